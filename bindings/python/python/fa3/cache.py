"""The lists and tables that give the rows of the sequences of a KV cache and of Q."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import operator
from .sequences import check_ends, check_used


class Cache(NamedTuple):
    """The arguments of operators over a cache that give the rows of sequences, in this order."""

    seqused_k: Tensor | None
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    leftpad_k: Tensor | None
    cu_seqlens_q: Tensor | None
    seqused_q: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    @property
    def lists(self) -> tuple[Tensor | None, ...]:
        """The lists and tables, as tensors."""
        return self[:6]

    def count(self, q: Tensor) -> int:
        """The number of sequences."""
        return q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Checks what the extension module does not check: ranks, and dtypes and shapes of the lists."""
        if self.cu_seqlens_q is not None:
            check_ends("cu_seqlens_q", self.cu_seqlens_q)
        rank, what = (4, "(batch, seqlen_q, heads, head_dim)") if self.cu_seqlens_q is None else (3, _PACKED)
        if q.dim() != rank:
            raise ValueError(f"q has {q.dim()} dimensions, expected {rank}: {what}")
        if not k.dim() == v.dim() == 4:
            given = f"k_cache has {k.dim()} and v_cache {v.dim()} dimensions"
            raise ValueError(f"{given}, expected 4: (batch or pages, rows, heads_kv, head_dim)")
        count = self.count(q)
        if self.seqused_k is not None:
            check_used("seqused_k", self.seqused_k, count)
        if self.leftpad_k is not None:
            check_used("leftpad_k", self.leftpad_k, count)
        if self.seqused_q is not None:
            check_used("seqused_q", self.seqused_q, count)
        if self.cache_batch_idx is not None:
            check_used("cache_batch_idx", self.cache_batch_idx, count)
        if self.page_table is not None:
            check_table(self.page_table, count if self.cache_batch_idx is None else None)

_PACKED = "(total_q, heads, head_dim), as there is cu_seqlens_q"


def check_table(table: Tensor, count: int | None) -> None:
    """Checks that a page table has a row for each of `count` sequences, or any rows if an index selects them."""
    found = f"page_table is {table.dtype} {tuple(table.shape)}"
    if count is None:
        if table.dtype != torch.int32 or table.dim() != 2:
            raise ValueError(f"{found}, expected torch.int32 (rows, pages), as there is cache_batch_idx")
    elif table.dtype != torch.int32 or table.dim() != 2 or operator.differ(table.shape[:1], [count]):
        raise ValueError(f"{found}, expected torch.int32 ({count}, pages): (sequences, pages)")


def dense_rows(table: Tensor | None) -> Tensor | None:
    """A page table as the extension module reads it: on a GPU its rows may be slices of wider rows."""
    if table is None or isinstance(table, FakeTensor):
        return table
    is_slice = table.stride(1) == 1 and table.stride(0) >= table.shape[1]
    return table if is_slice and not table.is_cpu else operator.aligned(table.contiguous())
