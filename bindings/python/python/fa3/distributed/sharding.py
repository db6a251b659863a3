"""Shards a tensor's rows over the ranks of a group, and gathers them again."""

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
    """The rank's rows of a tensor, as a new tensor.

    Arguments:
        x: a tensor, equal on all ranks.
        dim: the dimension of its rows.
        group: the ranks; all if None.
        layout: "zigzag", which gives all ranks the same number of scores under a causal mask, or "contiguous". The
            number of a sequence's rows is a multiple of the number of ranks, or for "zigzag" of twice that number.
        cu_seqlens: where packed documents begin and end, on the host: 0, then the end of each document. Long documents
            are split over all ranks, and short documents are assigned to one rank each.

    Raises:
        ValueError: the rows cannot be divided like this, or cu_seqlens is invalid.
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
    """The inverse of `shard`: returns all rows, on every rank. The result has no gradient."""
    group = group or dist.group.WORLD
    world = dist.get_world_size(group)
    rows = x.shape[dim] * world if cu_seqlens is None else int(cu_seqlens[-1])
    _, of = layout_of(rows, group, layout, cu_seqlens)
    own = x.detach().movedim(dim, 0).contiguous()
    parts = [own.new_empty(of.rows(rank), *own.shape[1:]) for rank in range(world)]
    most = max(map(len, parts))
    # Collectives need the same number of rows from all ranks.
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
        group, layout: as in `shard`.
    """
    rows, cu_seqlens = (seqlen, None) if isinstance(seqlen, int) else (0, seqlen)
    group, of = layout_of(rows, group, layout, cu_seqlens)
    found = [torch.arange(piece.start, piece.stop) for piece in of.pieces[dist.get_rank(group)]]
    return torch.cat(found).to(device) if found else torch.empty(0, dtype=torch.int64, device=device)


def layout_of(
    rows: int, group: dist.ProcessGroup | None, layout: str, cu_seqlens: Sequence[int] | Tensor | None
) -> tuple[dist.ProcessGroup, Layout]:
    """The group, and the layout of a sequence or of packed documents over its ranks."""
    group = group or dist.group.WORLD
    assert group is not None
    world = dist.get_world_size(group)
    if cu_seqlens is None:
        return group, layouts.dense(rows, world, layout)
    return group, layouts.packed(ends(cu_seqlens), world, layout)


def ends(cu_seqlens: Sequence[int] | Tensor) -> tuple[int, ...]:
    """cu_seqlens as integers of the host."""
    if isinstance(cu_seqlens, Tensor):
        if not cu_seqlens.is_cpu:
            raise TypeError(f"cu_seqlens is on {cu_seqlens.device}, for which the call would wait: keep it on the CPU")
        cu_seqlens = cu_seqlens.tolist()
    return tuple(cu_seqlens)


def _index(of: Layout, rank: int) -> Tensor:
    """The indices of a rank's rows in the whole tensor."""
    found = [torch.arange(rows.start, rows.stop) for rows in rows_of(of, rank)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
