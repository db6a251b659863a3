"""FP8 attention of 16-bit tensors, which are quantized first, and its torch operator `fa3::fp8_forward`."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import arguments, operator, quantize, refusal, rotary  # type: ignore[no-redef]

NO_GRADIENT = "requires grad, and attention in 8 bits has no gradients"
NAMES = "q, k, v, cos or sin"
# The options that dense and packed sequences have, and all options of dense sequences.
FIELDS = "interleaved q_first k_first hadamard_seed softmax_scale window_left window_right softcap"
_FIELDS = f"{FIELDS} v_channels"


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of float16 or bfloat16 tensors, computed in float8_e4m3fn on a Hopper GPU, or emulated on the CPU.

    By default Q and K are multiplied by a random orthogonal matrix, which spreads outliers over the head dimension
    (FlashAttention-3's incoherent processing). Then blocks of 128 rows of a head are quantized, each with its own
    scale. Four kernels run: `quantize` for Q, K and V, and `flash_attn_func` on their codes, which lie in a workspace.

    Arguments:
        q: (batch, seqlen_q, heads_q, head_dim), head_dim a multiple of 16 up to 256. The last stride is 1, and the
            others are multiples of 8.
        k: (batch, seqlen_k, heads_kv, head_dim); heads_q is a multiple of heads_kv.
        v: (batch, seqlen_k, heads_kv, head_dim_v), head_dim_v a multiple of 16 up to 256.
        softmax_scale, causal, window_size, softcap, return_attn_probs: as in `flash_attn_func`.
        cos, sin, interleaved: rotary embedding of Q and K, as in `quantize`. Without tables nothing is rotated.
        q_positions, k_positions: the positions of rows of Q and of K, as in `quantize`.
        hadamard_seed: the seed of the random matrix's signs, 0 to 2^64 - 1; no matrix if None.
        v_channels: V is quantized by `quantize_channels`, with a mean and a scale for each channel instead of a scale
            for each block. The error is smaller if the rows of V have a common mean. It costs two more kernels, which
            read V once more.

    Returns:
        O (batch, seqlen_q, heads_q, head_dim_v) of q's dtype, contiguous. With return_attn_probs (O, LSE), LSE as
        `flash_attn_func` returns it for float8_e4m3fn.

    Raises:
        NotImplementedError: a number is a tensor that requires grad, or a tensor has a tangent (forward mode). The
            backward pass always raises it.
        TypeError, ValueError: an argument is invalid, or no kernel supports it.
        RuntimeError: the driver reports an error.
    """
    q_listed, q_first = rotary.positions("q_positions", q_positions)
    k_listed, k_first = rotary.positions("k_positions", k_positions)
    scale, left, right, _, cap = arguments.scores(softmax_scale, causal, window_size, 0, softcap)
    options = (
        arguments.flag("interleaved", interleaved),
        q_first,
        k_first,
        quantize.given_seed(hadamard_seed),
        arguments.flag("v_channels", v_channels),
        scale,
        left,
        right,
        cap,
    )
    return_attn_probs = arguments.flag("return_attn_probs", return_attn_probs)
    tensors = (q, k, v, *operator.given(cos, sin, q_listed, k_listed))
    if operator.is_plain(*tensors) and not operator.needs_grad(*tensors):
        out, lse = _launch(q, k, v, cos, sin, q_listed, k_listed, *options, return_attn_probs)
    else:
        out, lse = _traced(q, k, v, cos, sin, q_listed, k_listed, *options)
    return (out, lse) if return_attn_probs else out  # type: ignore[return-value]


def _traced(q, k, v, cos, sin, q_positions, k_positions, interleaved, q_first, k_first, hadamard_seed, *options):
    """Calls the operator, which tracers, fake tensors and other tensor subclasses need to see."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        arguments.tensor(name, tensor)
    rotary.check_types(cos, sin)
    refusal.derivatives(NAMES, NO_GRADIENT, q, k, v, *operator.given(cos, sin))
    hadamard_seed = quantize.signed(hadamard_seed)
    options = (interleaved, q_first, k_first, hadamard_seed, *options)
    return torch.ops.fa3.fp8_forward(q, k, v, cos, sin, q_positions, k_positions, *options)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    interleaved: bool,
    q_first: int,
    k_first: int,
    hadamard_seed: int | None,
    v_channels: bool,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    with_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """O and, if wanted, LSE of tensors on a GPU or on the CPU. hadamard_seed is taken modulo 2^64, since an operator's
    integers are signed.
    """
    scores = softmax_scale, window_left, window_right, softcap
    values = interleaved, q_first, k_first, quantize.seed(hadamard_seed), *scores, v_channels
    positions: operator.Tensors = {"q_positions": q_positions, "k_positions": k_positions}
    return compute(q, k, v, cos, sin, positions, {}, _FIELDS, values, with_lse)


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: operator.Tensors,
    sequences: operator.Tensors,
    fields: str,
    values: tuple[Any, ...],
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns O and, if wanted, LSE of dense or of packed sequences. `fields` are the names of the options."""
    operator.refuse_tangents(NAMES, *operator.given(q, k, v, cos, sin, *positions.values(), *sequences.values()))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"{name} is {x.dtype}, expected torch.float16 or torch.bfloat16")
    is_packed = bool(sequences)
    operator.check_ranks(q, k, v, packed=is_packed)
    places = zip(positions, positions.values(), values[1:3], (q, k))
    rotary.check(cos, sin, values[0], *places, packed=is_packed)
    lists = {name: rotary.positions_as_read(x) for name, x in positions.items()} if cos is not None else {}
    o, lse = operator.o_like(q, v.shape[-1], None), operator.lse_like(q) if with_lse else None
    tensors: operator.Tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
    operator.run("fp8_forward", fields, values, tensors | sequences | lists | rotary.tables(cos, sin))
    return o, lse


operator.define(
    "fp8_forward",
    "Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor? q_positions, Tensor? k_positions, "
    "bool interleaved, SymInt q_first, SymInt k_first, int? hadamard_seed, bool v_channels, float? softmax_scale, "
    "SymInt window_left, SymInt window_right, float softcap",
    "(Tensor o, Tensor lse)",
    _launch,
)
refusal.register(f"{NAMES} {NO_GRADIENT}", "fp8_forward")
