# Overloads for type checkers: with return_attn_probs, functions return two tensors.

from collections.abc import Sequence
from typing import Any, Literal, overload

from torch import Tensor

@overload
def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    v_channels: bool = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...

@overload
def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    v_channels: bool = False,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor]: ...

@overload
def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    v_channels: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...

# For packed sequences.
NAMES: str
NO_GRADIENT: str

def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: dict[str, Tensor | None],
    sequences: dict[str, Tensor | None],
    options: dict[str, Any],
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]: ...
