# Overloads for type checkers: with return_attn_probs, functions return two tensors.

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

@overload
def flash_attn_varlen_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] | None = (-1, -1),
    softcap: float | None = 0.0,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    q_positions: int | Tensor = 0,
    k_positions: int | Tensor = 0,
    hadamard_seed: int | None = 0,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...

@overload
def flash_attn_varlen_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] | None = (-1, -1),
    softcap: float | None = 0.0,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    q_positions: int | Tensor = 0,
    k_positions: int | Tensor = 0,
    hadamard_seed: int | None = 0,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor]: ...

@overload
def flash_attn_varlen_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] | None = (-1, -1),
    softcap: float | None = 0.0,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    q_positions: int | Tensor = 0,
    k_positions: int | Tensor = 0,
    hadamard_seed: int | None = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...
