"""Sums of the gradients of keys that several launches computed."""

import torch
from torch import Tensor

from .plan import Sum


def write_sums(sums: tuple[Sum, ...], parts: list[list[Tensor]], to: list[Tensor]) -> None:
    """Writes each sum to its rows, in every tensor of `to`. `parts[i]` has the gradients of return i: one tensor for
    each tensor of `to`.
    """
    for which, x in enumerate(to):
        for total in sums:
            terms = [parts[part][which][row : row + total.rows] for part, row in total.terms]
            _add(x[total.row : total.row + total.rows], terms)


def _add(to: Tensor, terms: list[Tensor]) -> None:
    """Writes a sum, which is rounded once."""
    if not terms:
        to.zero_()
    elif len(terms) == 1:
        to.copy_(terms[0])
    elif len(terms) == 2:
        torch.add(*terms, out=to)
    else:
        # torch.sum adds in float32.
        torch.sum(torch.stack(terms), 0, out=to)
