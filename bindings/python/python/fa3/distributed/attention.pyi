# Overloads for type checkers: with return_lse or return_attn_probs, functions return two tensors.

from typing import Literal, Sequence, overload

import torch.distributed as dist
from torch import Tensor

ALL_GATHER: str
ULYSSES: str

@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: Literal[False] = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...

@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: Literal[True],
    return_attn_probs: bool = False,
) -> tuple[Tensor, Tensor]: ...

@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor]: ...

@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: Literal[False] = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...

@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: Literal[True],
    return_attn_probs: bool = False,
) -> tuple[Tensor, Tensor]: ...

@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor]: ...

@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...
