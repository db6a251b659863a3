"""The lists that give the rows of packed sequences, which lie one after the other in one tensor."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import arguments


class Sequences(NamedTuple):
    """The lists that give the rows of packed sequences, in the order of operators' arguments."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1


class Batch(NamedTuple):
    """A dense batch, seen as packed sequences of equal length."""

    sequences: int
    seqlen: int
    ends: Tensor

    @staticmethod
    def of(x: Any, name: str) -> "Batch":
        """The dense batch of a tensor (batch, seqlen, heads, head_dim). `name` is for errors."""
        arguments.tensor(name, x)
        if x.dim() != 4:
            what = "(batch, seqlen, heads, head_dim), as there is no cu_seqlens of it"
            raise ValueError(f"{name} has {x.dim()} dimensions, expected 4: {what}")
        count, seqlen = x.shape[:2]
        return Batch(count, seqlen, torch.arange(count + 1, dtype=torch.int32, device=x.device) * seqlen)

    def rows(self, x: Any, name: str) -> Tensor:
        """A tensor of this batch, reshaped to packed rows."""
        arguments.tensor(name, x)
        if x.dim() != 4 or tuple(x.shape[:2]) != (self.sequences, self.seqlen):
            what = f"({self.sequences}, {self.seqlen}, heads, head_dim): (batch, seqlen, heads, head_dim)"
            raise ValueError(f"{name} is {tuple(x.shape)}, expected {what}")
        return x.flatten(0, 1)

    def rows_of_output(self, x: Any, name: str) -> Tensor:
        """An output tensor, as a view of packed rows."""
        rows = self.rows(x, name)
        if self.sequences > 1 and self.seqlen > 1 and x.stride(0) != self.seqlen * x.stride(1):
            found = f"{name} has stride {x.stride(0)} in batch, expected {self.seqlen * x.stride(1)}"
            raise ValueError(f"{found}: sequences one after the other, as there are lengths of them")
        return rows

    def rows_of_lse(self, lse: Tensor, name: str) -> Tensor:
        """LSE (batch, heads, seqlen), reshaped to packed (heads, total)."""
        if lse.dim() != 3 or tuple(lse.shape[::2]) != (self.sequences, self.seqlen):
            what = f"({self.sequences}, heads, {self.seqlen}): (batch, heads, seqlen)"
            raise ValueError(f"{name} is {tuple(lse.shape)}, expected {what}")
        return lse.transpose(0, 1).flatten(1)

    def of_rows(self, x: Tensor) -> Tensor:
        """Packed rows, reshaped to the dense batch."""
        return x.unflatten(0, (self.sequences, self.seqlen))

    def of_lse(self, lse: Tensor) -> Tensor:
        """Packed LSE (heads, total), reshaped to (batch, heads, seqlen)."""
        return lse.unflatten(1, (self.sequences, self.seqlen)).transpose(0, 1)


def check_packed(name: str, x: Any) -> None:
    """Checks that a tensor of packed sequences has three dimensions."""
    arguments.tensor(name, x)
    if x.dim() != 3:
        what = "(total, heads, head_dim), as there is cu_seqlens of it"
        raise ValueError(f"{name} has {x.dim()} dimensions, expected 3: {what}")

