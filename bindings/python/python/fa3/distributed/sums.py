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


def copy_rows(x: Tensor, to: Tensor) -> None:
    """Copies a tensor, 16 bytes at a time if both tensors allow it. Torch would copy a tensor with gaps one element per
    thread.
    """
    if all(_has_wide_elements(y) for y in (x, to)):
        x, to = x.view(_WIDE), to.view(_WIDE)
    to.copy_(x)


def _add(to: Tensor, terms: list[Tensor]) -> None:
    """Writes a sum, which is rounded once."""
    if not terms:
        to.zero_()
    elif len(terms) == 1:
        # The gradients of a rank's own keys lie in place.
        if terms[0].data_ptr() != to.data_ptr():
            copy_rows(terms[0], to)
    elif len(terms) == 2:
        torch.add(*terms, out=to)
    else:
        # torch.sum adds in float32.
        copy_rows(torch.sum(torch.stack(terms), 0), to)


_WIDE = torch.complex128


def _has_wide_elements(x: Tensor) -> bool:
    """Whether each row of the last dimension consists of whole, aligned elements of 16 bytes."""
    ratio = _WIDE.itemsize // x.itemsize
    starts = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and x.data_ptr() % _WIDE.itemsize == 0 and all(start % ratio == 0 for start in starts)
