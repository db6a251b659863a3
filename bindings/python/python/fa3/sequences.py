"""Sequences of many lengths, one after the other in one tensor: the lists that say where they lie."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _fa3, operator


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
        """Checks types, shapes and strides of the lists, which the extension module does not see."""
        for name, x in (("cu_seqlens_q", self.cu_seqlens_q), ("cu_seqlens_k", self.cu_seqlens_k)):
            check_ends(name, x)
            _check_contiguous(name, x)
        count = self.batch
        if operator.known(self.cu_seqlens_k.shape) != operator.known(self.cu_seqlens_q.shape):
            counts = f"cu_seqlens_q has {count} sequences and cu_seqlens_k {self.cu_seqlens_k.shape[0] - 1}"
            raise ValueError(f"{counts}, expected as many")
        for name, used in (("seqused_q", self.seqused_q), ("seqused_k", self.seqused_k)):
            if used is not None:
                check_used(name, used, count)
                _check_contiguous(name, used)

    def aligned(self) -> "Sequences":
        """The same with lists that the CPU can read. Those that are copies live as long as the result."""
        if not self.cu_seqlens_q.is_cpu:
            return self
        ends_q, ends_k, *used = self.lists
        used_q, used_k = (None if x is None else operator.aligned(x) for x in used)
        longest = self.max_seqlen_q, self.max_seqlen_k
        return Sequences(operator.aligned(ends_q), operator.aligned(ends_k), used_q, used_k, *longest)

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


def with_batch(packed: tuple) -> tuple:
    """A packed tensor as the extension module takes it: with a batch of 1."""
    dtype, address, shape, strides = packed
    return dtype, address, (1, *shape), (0, *strides)


def check_ends(name: str, x: Tensor) -> None:
    """Where sequences end is a list of one number more than there are sequences."""
    if x.dtype != torch.int32 or x.dim() != 1 or operator.known(x.shape) == (0,):
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected torch.int32 (sequences + 1,)")


def check_used(name: str, x: Tensor, count: int) -> None:
    """How many rows each sequence has of something is a list of one number a sequence."""
    if x.dtype != torch.int32 or operator.known(x.shape) != operator.known([count]):
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected torch.int32 {(count,)}: (sequences,)")


def _check_contiguous(name: str, x: Tensor) -> None:
    [extent], [stride] = operator.known(x.shape), operator.known(x.stride())
    if extent > 1 and stride != 1:
        raise ValueError(f"{name} has stride {stride}, expected 1")
