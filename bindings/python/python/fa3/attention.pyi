# Overloads for type checkers: with return_attn_probs, functions return two tensors.

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: Literal[False] = False,
    *,
    v_mean: Tensor | None = None,
    v_transposed: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    intervals: Tensor | None = None,
) -> Tensor: ...

@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    return_attn_probs: Literal[True],
    v_mean: Tensor | None = None,
    v_transposed: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    intervals: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...

@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    v_mean: Tensor | None = None,
    v_transposed: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    intervals: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...

@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    *,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor]: ...

@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...
