"""DeepSpeed-Ulysses: each rank exchanges its rows of all heads for all rows of some heads, and back."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Message, Pending
from .group import Group
from .layout import Layout, rows_of


def to_heads(x: Tensor, group: dist.ProcessGroup, layout: Layout, rows: int, heads: int) -> Tensor:
    """Exchanges rows for heads, between the ranks of `group`. `x` has the rank's rows of all heads. The result has all
    rows of the rank's share of heads. `rows` and `heads` are the indices of these dimensions of `x`.
    """
    return _Exchange.apply(x, Group(group), layout, rows, heads, True)


def to_rows(x: Tensor, group: dist.ProcessGroup, layout: Layout, rows: int, heads: int) -> Tensor:
    """The inverse of `to_heads`."""
    return _Exchange.apply(x, Group(group), layout, rows, heads, False)


class _Exchange(torch.autograd.Function):
    """`to_heads` or `to_rows`. Each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *of: Any) -> Tensor:
        *ctx.of, to = of
        ctx.to = to
        return _to_heads(x, *ctx.of) if to else _to_rows(x, *ctx.of)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back = _to_rows if ctx.to else _to_heads
        return back(gradient, *ctx.of), None, None, None, None, None


def _to_heads(x: Tensor, group: Group, layout: Layout, rows: int, heads: int) -> Tensor:
    rank, world = dist.get_rank(group.get()), layout.world
    shares = [share.contiguous() for share in x.movedim((rows, heads), (0, 1)).chunk(world, 1)]
    found = x.new_empty(sum(layout.documents), *shares[rank].shape[1:])
    receives = []
    for other, number, at in _pieces(layout):
        if other == rank:
            found[at] = shares[rank][number]
        else:
            receives.append(Message(other, found[at]))
    sends = [Message(other, shares[other][number]) for other in range(world) if other != rank for number in _numbers(layout, rank)]
    Pending(group.get(), sends, receives).wait()
    return found.movedim((0, 1), (rows, heads))


def _to_rows(x: Tensor, group: Group, layout: Layout, rows: int, heads: int) -> Tensor:
    rank, world = dist.get_rank(group.get()), layout.world
    own = x.movedim((rows, heads), (0, 1)).contiguous()
    found = own.new_empty(world, layout.rows(rank), *own.shape[1:])
    sends = []
    for other, number, at in _pieces(layout):
        if other == rank:
            found[rank, number] = own[at]
        else:
            sends.append(Message(other, own[at]))
    receives = [Message(other, found[other, number]) for other in range(world) if other != rank for number in _numbers(layout, rank)]
    Pending(group.get(), sends, receives).wait()
    return found.movedim(0, 1).flatten(1, 2).movedim((0, 1), (rows, heads))


def _pieces(layout: Layout) -> list[tuple[int, slice, slice]]:
    """For each rank's pieces: the rank, the piece's rows among the rank's rows, and its rows among all rows."""
    return [
        (rank, number, slice(at.start, at.stop))
        for rank in range(layout.world)
        for number, at in zip(_numbers(layout, rank), rows_of(layout, rank), strict=True)
    ]


def _numbers(layout: Layout, rank: int) -> list[slice]:
    """For each of a rank's pieces, its rows among the rank's rows."""
    ends = [0, *itertools.accumulate(piece.rows for piece in layout.pieces[rank])]
    return [slice(*end) for end in itertools.pairwise(ends)]
