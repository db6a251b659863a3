"""The lists and tables that give the rows of the sequences of a KV cache and of Q."""

from typing import NamedTuple

from torch import Tensor


class Cache(NamedTuple):
    """The arguments that tell operators each sequence's rows of the cache and of Q, in the operators' order."""

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

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Checks ranks, which the extension module does not check."""
        rank, what = (4, "(batch, seqlen_q, heads, head_dim)") if self.cu_seqlens_q is None else (3, _PACKED)
        if q.dim() != rank:
            raise ValueError(f"q has {q.dim()} dimensions, expected {rank}: {what}")
        if not k.dim() == v.dim() == 4:
            given = f"k_cache has {k.dim()} and v_cache {v.dim()} dimensions"
            raise ValueError(f"{given}, expected 4: (batch or pages, rows, heads_kv, head_dim)")


_PACKED = "(total_q, heads, head_dim), as there is cu_seqlens_q"

