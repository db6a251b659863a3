"""Sequences of keys and values in a cache: the lists that say where their rows are, and those of the sequences of Q."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _fa3, operator
from .sequences import check_ends, check_used, dense_list


class Cache(NamedTuple):
    """The arguments of operators over a cache that say where sequences are, in this order."""

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
        """The lists, on the device of the tensors."""
        return self[:6]

    def count(self, q: Tensor) -> int:
        """How many sequences there are."""
        return q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Checks what the extension module does not see: ranks, and types and shapes of the lists."""
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

    def dense(self) -> "Cache":
        """The same with lists as the extension module reads them. Those that are copies live as long as the result."""
        table = None if self.page_table is None else dense_rows(self.page_table)
        used_k, _, index, leftpad, ends_q, used_q = self.lists
        return Cache(
            None if used_k is None else dense_list(used_k),
            table,
            None if index is None else dense_list(index),
            None if leftpad is None else dense_list(leftpad),
            None if ends_q is None else dense_list(ends_q),
            None if used_q is None else dense_list(used_q),
            self.max_seqlen_q,
            self.max_seqlen_k,
        )

    def raw(self, count: int) -> "_fa3._Cache":
        """The sequences, which are so many, as the extension module takes them."""
        used_k, table, index, leftpad, ends_q, used_q = self.lists
        used = None if used_q is None else used_q.data_ptr(), None if used_k is None else used_k.data_ptr()
        return (
            count,
            None if ends_q is None else ends_q.data_ptr(),
            used,
            None if leftpad is None else leftpad.data_ptr(),
            None if table is None else (table.data_ptr(), table.shape[1], _stride(table), _indexed(table, index)),
            (self.max_seqlen_q, self.max_seqlen_k),
        )

    def seen(self, q: Tensor) -> "_fa3._Cache":
        """The same without addresses."""
        [count] = operator.known([self.count(q)])
        used_k, _, index, leftpad, ends_q, used_q = (None if x is None else 0 for x in self.lists)
        pages = None
        if self.page_table is not None:
            rows, of_sequence = operator.known(self.page_table.shape)
            pages = 0, of_sequence, of_sequence, None if index is None else (0, rows)
        longest = operator.known([self.max_seqlen_q, self.max_seqlen_k])
        return count, ends_q, (used_q, used_k), leftpad, pages, longest


_PACKED = "(total_q, heads, head_dim), as there is cu_seqlens_q"


def check_table(table: Tensor, count: int | None) -> None:
    """A page table has a row for each of so many sequences, or any number of rows that an index chooses from."""
    found = f"page_table is {table.dtype} {tuple(table.shape)}"
    if count is None:
        if table.dtype != torch.int32 or table.dim() != 2:
            raise ValueError(f"{found}, expected torch.int32 (rows, pages), as there is cache_batch_idx")
    elif table.dtype != torch.int32 or table.dim() != 2 or operator.known(table.shape[:1]) != operator.known([count]):
        raise ValueError(f"{found}, expected torch.int32 ({count}, pages): (sequences, pages)")


def _indexed(table: Tensor, index: Tensor | None) -> tuple[int, int] | None:
    """An index of the rows of a page table as the extension module takes it."""
    return None if index is None else (index.data_ptr(), table.shape[0])


def in_batch(raw: tuple) -> tuple:
    """A tensor as the extension module takes it: packed sequences have a batch of 1."""
    dtype, address, shape, strides = raw
    return raw if len(shape) == 4 else (dtype, address, (1, *shape), (0, *strides))


def dense_rows(table: Tensor) -> Tensor:
    """A page table as the extension module reads it: on a GPU its rows may be parts of longer ones."""
    is_slice = table.stride(1) == 1 and table.stride(0) >= table.shape[1]
    return table if is_slice and not table.is_cpu else dense_list(table)


def _stride(table: Tensor) -> int:
    """The distance of rows of such a table. That of its only row means nothing."""
    return table.stride(0) if table.shape[0] > 1 else table.shape[1]
