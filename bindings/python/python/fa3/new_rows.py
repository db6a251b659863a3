"""New rows of a KV cache, and the rotation of new keys and of queries."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import operator


class NewRows(NamedTuple):
    """The arguments of append operators that describe new rows and the rotation, in this order."""

    k: Tensor
    v: Tensor
    cu_seqlens_k_new: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_seqlens: Tensor | None
    rotary_interleaved: bool

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are given."""
        return operator.given(*self[:6])

    def check(self, seqused_k: Tensor | None) -> None:
        """Checks what the extension module does not check: ranks, and the tables."""
        if seqused_k is None:
            raise ValueError("there are k_new and v_new without seqused_k, which says where they go")
        rank, what = 4, "(batch, rows, heads_kv, head_dim), as there is no cu_seqlens_k_new"
        if self.cu_seqlens_k_new is not None:
            rank, what = 3, "(total, heads_kv, head_dim), as there is cu_seqlens_k_new"
        if not self.k.dim() == self.v.dim() == rank:
            given = f"k_new has {self.k.dim()} and v_new {self.v.dim()} dimensions"
            raise ValueError(f"{given}, expected {rank}: {what}")
        self._check_rotation()

    def _check_rotation(self) -> None:
        cos, sin = self.rotary_cos, self.rotary_sin
        if cos is None or sin is None:
            if cos is not sin:
                raise ValueError("there is one of rotary_cos and rotary_sin, expected both or none")
            if self.rotary_seqlens is not None:
                raise ValueError("rotary_seqlens is of a rotation, which needs rotary_cos and rotary_sin")
            return
        for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
            if table.dtype not in (torch.float32, self.k.dtype):
                raise TypeError(f"{name} is {table.dtype}, expected torch.float32 or {self.k.dtype}")
        if cos.dim() != 2 or operator.differ(cos.shape, sin.shape) or cos.dtype != sin.dtype:
            given = f"rotary_cos is {cos.dtype} {tuple(cos.shape)} and rotary_sin {sin.dtype} {tuple(sin.shape)}"
            raise ValueError(f"{given}, expected both alike: (positions, rotary_dim / 2)")
