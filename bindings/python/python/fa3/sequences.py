"""Sequences of many lengths, one after the other in one tensor: the lists that say where they lie."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _fa3, arguments, operator


class Sequences(NamedTuple):
    """The arguments of operators over packed sequences that say where these lie, in this order."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    @property
    def lists(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The lists, on the device of the tensors."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return self.cu_seqlens_q.shape[0] - 1

    def check(self) -> None:
        """Checks types and shapes of the lists, which the extension module does not see."""
        for name, x in (("cu_seqlens_q", self.cu_seqlens_q), ("cu_seqlens_k", self.cu_seqlens_k)):
            check_ends(name, x)
        count = self.batch
        if operator.known(self.cu_seqlens_k.shape) != operator.known(self.cu_seqlens_q.shape):
            counts = f"q has {count} sequences and k {self.cu_seqlens_k.shape[0] - 1}"
            raise ValueError(f"{counts}, expected as many")
        for name, used in (("seqused_q", self.seqused_q), ("seqused_k", self.seqused_k)):
            if used is not None:
                check_used(name, used, count)

    def dense(self) -> "Sequences":
        """The same with lists as the extension module reads them. Those that are copies live as long as the result."""
        ends_q, ends_k, *used = self.lists
        used_q, used_k = (None if x is None else dense_list(x) for x in used)
        return Sequences(dense_list(ends_q), dense_list(ends_k), used_q, used_k, self.max_seqlen_q, self.max_seqlen_k)

    def raw(self) -> "_fa3._Packed":
        """The sequences as the extension module takes them."""
        ends_q, ends_k, *used = self.lists
        used_q, used_k = (None if x is None else x.data_ptr() for x in used)
        longest = self.max_seqlen_q, self.max_seqlen_k
        return self.batch, (ends_q.data_ptr(), ends_k.data_ptr()), (used_q, used_k), longest

    def seen(self) -> "_fa3._Packed":
        """The same without addresses."""
        [count] = operator.known([self.batch])
        used_q, used_k = (None if x is None else 0 for x in (self.seqused_q, self.seqused_k))
        return count, (0, 0), (used_q, used_k), operator.known([self.max_seqlen_q, self.max_seqlen_k])


class Batch(NamedTuple):
    """Sequences of a dense batch, which are packed ones of as many rows each."""

    sequences: int
    seqlen: int
    ends: Tensor

    @staticmethod
    def of(x: Any, name: str) -> "Batch":
        """The sequences of a tensor (batch, seqlen, heads, head_dim) of this name."""
        arguments.tensor(name, x)
        if x.dim() != 4:
            what = "(batch, seqlen, heads, head_dim), as there is no cu_seqlens of it"
            raise ValueError(f"{name} has {x.dim()} dimensions, expected 4: {what}")
        count, seqlen = x.shape[:2]
        return Batch(count, seqlen, torch.arange(count + 1, dtype=torch.int32, device=x.device) * seqlen)

    def rows(self, x: Any, name: str) -> Tensor:
        """A tensor of these sequences as packed ones have it."""
        arguments.tensor(name, x)
        if x.dim() != 4 or tuple(x.shape[:2]) != (self.sequences, self.seqlen):
            what = f"({self.sequences}, {self.seqlen}, heads, head_dim): (batch, seqlen, heads, head_dim)"
            raise ValueError(f"{name} is {tuple(x.shape)}, expected {what}")
        return x.flatten(0, 1)

    def rows_of_output(self, x: Any, name: str) -> Tensor:
        """Rows of a tensor that is written: a view of its memory."""
        rows = self.rows(x, name)
        if self.sequences > 1 and self.seqlen > 1 and x.stride(0) != self.seqlen * x.stride(1):
            found = f"{name} has stride {x.stride(0)} in batch, expected {self.seqlen * x.stride(1)}"
            raise ValueError(f"{found}: sequences one after the other, as there are lengths of them")
        return rows

    def rows_of_lse(self, lse: Tensor, name: str) -> Tensor:
        """LSE (batch, heads, seqlen) as packed sequences have it, (heads, total)."""
        if lse.dim() != 3 or tuple(lse.shape[::2]) != (self.sequences, self.seqlen):
            what = f"({self.sequences}, heads, {self.seqlen}): (batch, heads, seqlen)"
            raise ValueError(f"{name} is {tuple(lse.shape)}, expected {what}")
        return lse.transpose(0, 1).flatten(1)

    def of_rows(self, x: Tensor) -> Tensor:
        """Packed rows as those of a dense batch."""
        return x.unflatten(0, (self.sequences, self.seqlen))

    def of_lse(self, lse: Tensor) -> Tensor:
        """LSE (heads, total) as that of a dense batch, (batch, heads, seqlen)."""
        return lse.unflatten(1, (self.sequences, self.seqlen)).transpose(0, 1)


def with_batch(packed: tuple) -> tuple:
    """A packed tensor as the extension module takes it: with a batch of 1."""
    dtype, address, shape, strides = packed
    return dtype, address, (1, *shape), (0, *strides)


def check_packed(name: str, x: Any) -> None:
    """A tensor of packed sequences has three dimensions."""
    arguments.tensor(name, x)
    if x.dim() != 3:
        what = "(total, heads, head_dim), as there is cu_seqlens of it"
        raise ValueError(f"{name} has {x.dim()} dimensions, expected 3: {what}")


def check_ends(name: str, x: Tensor) -> None:
    """Where sequences end is a list of one number more than there are sequences."""
    if x.dtype != torch.int32 or x.dim() != 1 or operator.known(x.shape) == (0,):
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected torch.int32 (sequences + 1,)")


def check_used(name: str, x: Tensor, count: int) -> None:
    """How many rows each sequence has of something is a list of one number a sequence."""
    if x.dtype != torch.int32 or operator.known(x.shape) != operator.known([count]):
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected torch.int32 {(count,)}: (sequences,)")


def dense_list(x: Tensor) -> Tensor:
    """A list as the extension module reads it. May be the tensor itself."""
    x = x.contiguous()
    return operator.aligned(x) if x.is_cpu else x
