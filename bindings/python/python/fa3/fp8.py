"""Attention in 8 bits of tensors in 16: quantization of Q, K and V, and the forward pass on their codes."""

import functools

from torch import Tensor

from . import arguments
from .attention import flash_attn_func
from .quantize import quantize, quantize_channels


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    q_positions: int | Tensor = 0,
    k_positions: int | Tensor = 0,
    hadamard_seed: int | None = 0,
    v_channels: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of float16 or bfloat16 tensors, computed in float8_e4m3fn on a Hopper GPU, or emulated on the CPU.

    By default Q and K are multiplied by a random orthogonal matrix, which spreads outliers over the head dimension
    (FlashAttention-3's incoherent processing). Then blocks of 128 rows of a head are quantized, each with its own
    scale. It is four kernels: `quantize` of Q, K and V, and `flash_attn_func` on their codes.

    Arguments:
        q: (batch, seqlen_q, heads_q, head_dim), head_dim a multiple of 16 up to 256. Strides are free, but the last is
            1 and the others are multiples of 8.
        k: (batch, seqlen_k, heads_kv, head_dim); heads_q is a multiple of heads_kv.
        v: (batch, seqlen_k, heads_kv, head_dim_v), head_dim_v a multiple of 16 up to 256.
        softmax_scale, causal, window_size, softcap, return_attn_probs: as of `flash_attn_func`.
        cos, sin, interleaved: rotary embedding of Q and K, as of `quantize`. Without tables nothing is rotated.
        q_positions, k_positions: the positions of rows of Q and of K, as of `quantize`.
        hadamard_seed: what the signs of the random matrix are drawn from, 0 to 2^64 - 1; no matrix if None.
        v_channels: V is quantized by `quantize_channels`, with a mean and a scale for each channel instead of a scale
            for each block. The error is smaller where V's rows have something in common. It takes two more kernels,
            which read V once more.

    Returns:
        O (batch, seqlen_q, heads_q, head_dim_v) of q's dtype, contiguous. With return_attn_probs (O, LSE), as
        `flash_attn_func` gives it for float8_e4m3fn.

    Raises:
        NotImplementedError: a number that is a tensor and requires grad, or a tensor with a tangent (forward mode). The
            backward pass raises it for all tensors.
        TypeError, ValueError: arguments that make no sense, or that no kernel takes.
        RuntimeError: what the driver says.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        arguments.tensor(name, x)
        if x.dtype != q.dtype or x.dim() != 4:
            given = f"{name} is {x.dtype} with {x.dim()} dimensions, expected {q.dtype} like q"
            raise ValueError(f"{given} and 4: (batch, seqlen, heads, head_dim)")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k is {tuple(k.shape)} and v {tuple(v.shape)}, expected the same batch, seqlen and heads")
    for name, positions in (("q_positions", q_positions), ("k_positions", k_positions)):
        if not isinstance(positions, Tensor):
            arguments.integer(name, positions)
    turned = functools.partial(quantize, cos=cos, sin=sin, interleaved=interleaved, hadamard_seed=hadamard_seed)
    q_codes, q_descale = turned(q, positions=q_positions)
    k_codes, k_descale = turned(k, positions=k_positions)
    v_mean: Tensor | None = None
    if arguments.flag("v_channels", v_channels):
        v_codes, v_descale, v_mean = quantize_channels(v, transposed=True)
    else:
        v_codes, v_descale = quantize(v, transposed=True)
    return flash_attn_func(
        q_codes,
        k_codes,
        v_codes,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        softcap=softcap,
        return_attn_probs=return_attn_probs,
        v_mean=v_mean,
        v_transposed=True,
        out_dtype=q.dtype,
    )
