"""Rows of whole tensors, of which each rank has some."""

from typing import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from . import layout as layouts
from .layout import ZIGZAG, Layout, rows_of


def shard(
    x: Tensor,
    dim: int,
    group: dist.ProcessGroup | None = None,
    layout: str = ZIGZAG,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """The rank's rows of a tensor, in a new one.

    Arguments:
        x: a tensor, the same on all ranks.
        dim: the dimension of its rows.
        group: the ranks; all, if None.
        layout: "zigzag", under which ranks have as many scores each under a causal mask, or "contiguous". A sequence
            has a multiple of 2 rows a rank, or of 1.
        cu_seqlens: where documents begin and end, if the rows are those of packed documents: 0, and then the ends, on
            the host. Long documents are cut, each into pieces for all ranks, and short ones are dealt out.

    Raises:
        ValueError: rows that cannot be divided so, or ends that make no sense.
    """
    group, of = layout_of(x.shape[dim], group, layout, cu_seqlens)
    index = _index(of, dist.get_rank(group)).to(x.device)
    return x.index_select(dim, index)


def unshard(
    x: Tensor,
    dim: int,
    group: dist.ProcessGroup | None = None,
    layout: str = ZIGZAG,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """The inverse of `shard`: all rows, on every rank. It has no gradient."""
    group = group or dist.group.WORLD
    world = dist.get_world_size(group)
    rows = x.shape[dim] * world if cu_seqlens is None else int(cu_seqlens[-1])
    _, of = layout_of(rows, group, layout, cu_seqlens)
    own = x.detach().movedim(dim, 0).contiguous()
    parts = [own.new_empty(of.rows(rank), *own.shape[1:]) for rank in range(world)]
    most = max(map(len, parts))
    # Collectives want as many rows of all ranks.
    padded = own.new_zeros(most, *own.shape[1:])
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(found, padded, group=group)
    result = own.new_empty(rows, *own.shape[1:])
    for rank, part in enumerate(found):
        result[_index(of, rank).to(x.device)] = part[: of.rows(rank)]
    return result.movedim(0, dim)


def positions(
    seqlen: int | Sequence[int] | Tensor,
    group: dist.ProcessGroup | None = None,
    layout: str = ZIGZAG,
    device: torch.device | str | None = None,
) -> Tensor:
    """The position of each of the rank's rows in its sequence, int64 (rows,), as rotary embedding wants it.

    Arguments:
        seqlen: the rows of the sequence, or cu_seqlens of packed documents.
        group, layout: as of `shard`.
    """
    rows, cu_seqlens = (seqlen, None) if isinstance(seqlen, int) else (0, seqlen)
    group, of = layout_of(rows, group, layout, cu_seqlens)
    found = [torch.arange(piece.start, piece.stop) for piece in of.pieces[dist.get_rank(group)]]
    return torch.cat(found).to(device) if found else torch.empty(0, dtype=torch.int64, device=device)


def layout_of(
    rows: int, group: dist.ProcessGroup | None, layout: str, cu_seqlens: Sequence[int] | Tensor | None
) -> tuple[dist.ProcessGroup, Layout]:
    """The group, and who has which rows of a sequence, or of packed documents."""
    group = group or dist.group.WORLD
    assert group is not None
    world = dist.get_world_size(group)
    if cu_seqlens is None:
        return group, layouts.dense(rows, world, layout)
    return group, layouts.packed(ends(cu_seqlens), world, layout)


def ends(cu_seqlens: Sequence[int] | Tensor) -> tuple[int, ...]:
    """cu_seqlens as numbers of the host."""
    if isinstance(cu_seqlens, Tensor):
        if not cu_seqlens.is_cpu:
            raise TypeError(f"cu_seqlens is on {cu_seqlens.device}, for which the call would wait: keep it on the CPU")
        cu_seqlens = cu_seqlens.tolist()
    return tuple(cu_seqlens)


def _index(of: Layout, rank: int) -> Tensor:
    """A rank's rows as rows of the whole tensor."""
    found = [torch.arange(rows.start, rows.stop) for rows in rows_of(of, rank)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
