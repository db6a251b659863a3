"""New rows of a cache of keys and values, and the rotation of them and of queries."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _fa3, operator
from .cache import in_batch
from .sequences import check_ends, check_used, dense_list


# The tensors, by the names that operators have for them.
NAMES = ("k_new", "v_new", "cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_seqlens")


class NewRows(NamedTuple):
    """The arguments of operators over a cache that gets rows before, besides those of the attention, in this order."""

    k: Tensor
    v: Tensor
    cu_seqlens_k_new: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_seqlens: Tensor | None
    rotary_interleaved: bool

    @property
    def tensors(self) -> list[Tensor]:
        """All that there are."""
        return operator.given(*self[:6])

    def check(self, seqused_k: Tensor | None, count: int) -> None:
        """Checks what the extension module does not see: ranks, and types and shapes of the lists and tables."""
        if seqused_k is None:
            raise ValueError("there are k_new and v_new without seqused_k, which says where they go")
        rank, what = 4, "(batch, rows, heads_kv, head_dim), as there is no cu_seqlens_k_new"
        if self.cu_seqlens_k_new is not None:
            rank, what = 3, "(total, heads_kv, head_dim), as there is cu_seqlens_k_new"
            check_ends("cu_seqlens_k_new", self.cu_seqlens_k_new)
            if operator.known(self.cu_seqlens_k_new.shape) != operator.known([count + 1]):
                found = f"cu_seqlens_k_new is of {self.cu_seqlens_k_new.shape[0] - 1} sequences"
                raise ValueError(f"{found}, expected {count}")
        if not self.k.dim() == self.v.dim() == rank:
            given = f"k_new has {self.k.dim()} and v_new {self.v.dim()} dimensions"
            raise ValueError(f"{given}, expected {rank}: {what}")
        self._check_rotation(count)

    def _check_rotation(self, count: int) -> None:
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
        if cos.dim() != 2 or operator.known(cos.shape) != operator.known(sin.shape) or cos.dtype != sin.dtype:
            given = f"rotary_cos is {cos.dtype} {tuple(cos.shape)} and rotary_sin {sin.dtype} {tuple(sin.shape)}"
            raise ValueError(f"{given}, expected both alike: (positions, rotary_dim / 2)")
        if self.rotary_seqlens is not None:
            check_used("rotary_seqlens", self.rotary_seqlens, count)

    def dense(self) -> "NewRows":
        """The same with lists and tables as the extension module reads them. Those that are copies live as long as the
        result.
        """
        k, v = operator.readable(self.k), operator.readable(self.v)
        ends, listed = (None if x is None else dense_list(x) for x in (self.cu_seqlens_k_new, self.rotary_seqlens))
        cos, sin = (None if x is None else operator.dense(x) for x in (self.rotary_cos, self.rotary_sin))
        return NewRows(k, v, ends, cos, sin, listed, self.rotary_interleaved)

    def raw(self) -> "_fa3._NewRows":
        """The rows as the extension module takes them."""
        ends = None if self.cu_seqlens_k_new is None else self.cu_seqlens_k_new.data_ptr()
        rotation: _fa3._AppendRotation | None = None
        cos, sin, listed = self.rotary_cos, self.rotary_sin, self.rotary_seqlens
        if cos is not None and sin is not None:
            rows, pairs = cos.shape
            address = None if listed is None else listed.data_ptr()
            tables = operator.name_of(cos.dtype), cos.data_ptr(), sin.data_ptr()
            rotation = *tables, rows, 2 * pairs, self.rotary_interleaved, address
        return in_batch(operator.raw(self.k)), in_batch(operator.raw(self.v)), ends, rotation

    def seen(self) -> "_fa3._NewRows":
        """The same without addresses."""
        ends = None if self.cu_seqlens_k_new is None else 0
        rotation: _fa3._AppendRotation | None = None
        if self.rotary_cos is not None:
            rows, pairs = operator.known(self.rotary_cos.shape)
            address = None if self.rotary_seqlens is None else 0
            name = operator.name_of(self.rotary_cos.dtype)
            rotation = name, 0, 0, rows, 2 * pairs, self.rotary_interleaved, address
        return in_batch(operator.seen(self.k)), in_batch(operator.seen(self.v)), ends, rotation
