"""FP8 attention of 16-bit packed sequences, and its torch operator `fa3::varlen_fp8_forward`."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import arguments, fp8, operator, quantize, refusal, rotary  # type: ignore[no-redef]
from .sequences import Sequences

_FIELDS = f"{fp8.FIELDS} max_seqlen_q max_seqlen_k"


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
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_fp8_func` for sequences of different lengths, packed one after the other into one tensor.

    Each block of 128 rows has a scale. The first block begins where the sequence does, and no block has rows of two
    sequences. So the O of a sequence has the same bits as in a call with this sequence alone.

    Arguments:
        q: (total_q, heads_q, head_dim), head_dim a multiple of 16 up to 256. The last stride is 1, and the others are
            multiples of 8.
        k: (total_k, heads_kv, head_dim); heads_q is a multiple of heads_kv.
        v: (total_k, heads_kv, head_dim_v), head_dim_v a multiple of 16 up to 256.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `flash_attn_varlen_func`. All rows of a sequence
            are in use.
        softmax_scale, causal, window_size, softcap, return_attn_probs: as in `flash_attn_func`.
        cos, sin, interleaved: rotary embedding of Q and K, as in `quantize`. Without tables nothing is rotated.
        q_positions, k_positions: the position of the first row of each sequence, from which the others count up; or
            int32 or int64 tensors (total_q,) and (total_k,). Rows whose position is outside the tables become NaN.
        hadamard_seed: the seed of the random matrix's signs, 0 to 2^64 - 1; no matrix if None.

    Returns:
        O (total_q, heads_q, head_dim_v) of q's dtype, contiguous. With return_attn_probs (O, LSE), LSE as
        `flash_attn_varlen_func` returns it for float8_e4m3fn. Rows behind the last sequence have O = 0 and LSE = -inf.

    Raises:
        NotImplementedError: a number is a tensor that requires grad, or a tensor has a tangent (forward mode). The
            backward pass always raises it.
        TypeError, ValueError: an argument is invalid, or no kernel supports it. On the CPU this includes invalid
            lengths.
        RuntimeError: the driver reports an error.
    """
    q_listed, q_first = rotary.positions("q_positions", q_positions)
    k_listed, k_first = rotary.positions("k_positions", k_positions)
    scale, left, right, _, cap = arguments.scores(softmax_scale, causal, window_size, 0, softcap)
    options: tuple[Any, ...] = (
        arguments.hint("max_seqlen_q", max_seqlen_q),
        arguments.hint("max_seqlen_k", max_seqlen_k),
        arguments.flag("interleaved", interleaved),
        q_first,
        k_first,
        quantize.given_seed(hadamard_seed),
        scale,
        left,
        right,
        cap,
    )
    return_attn_probs = arguments.flag("return_attn_probs", return_attn_probs)
    inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k, cos, sin, q_listed, k_listed)
    tensors = (*inputs[:5], *operator.given(*inputs[5:]))
    if operator.is_plain(*tensors) and not operator.needs_grad(*tensors):
        out, lse = _launch(*inputs, *options, return_attn_probs)  # type: ignore[call-arg]
    else:
        out, lse = _traced(inputs, options)
    return (out, lse) if return_attn_probs else out  # type: ignore[return-value]


def _traced(inputs: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Calls the operator, which tracers, fake tensors and other tensor subclasses need to see."""
    for name, tensor in zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), inputs):
        arguments.tensor(name, tensor)
    q, k, v, _, _, cos, sin, *_ = inputs
    rotary.check_types(cos, sin)
    refusal.derivatives(fp8.NAMES, fp8.NO_GRADIENT, q, k, v, *operator.given(cos, sin))
    hints, (interleaved, q_first, k_first, hadamard_seed, *scores) = options[:2], options[2:]
    options = (*hints, interleaved, q_first, k_first, quantize.signed(hadamard_seed), *scores)
    return torch.ops.fa3.varlen_fp8_forward(*inputs, *options)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    interleaved: bool,
    q_first: int,
    k_first: int,
    hadamard_seed: int | None,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    with_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """O and, if wanted, LSE of tensors on a GPU or on the CPU. hadamard_seed is taken modulo 2^64, since an operator's
    integers are signed.
    """
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, None, None)
    scores = softmax_scale, window_left, window_right, softcap
    values = interleaved, q_first, k_first, quantize.seed(hadamard_seed), *scores, max_seqlen_q, max_seqlen_k
    positions: operator.Tensors = {"q_positions": q_positions, "k_positions": k_positions}
    lists = sequences._asdict()
    return fp8.compute(q, k, v, cos, sin, positions, lists, _FIELDS, values, with_lse)


operator.define(
    "varlen_fp8_forward",
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? cos, "
    "Tensor? sin, Tensor? q_positions, Tensor? k_positions, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "bool interleaved, SymInt q_first, SymInt k_first, int? hadamard_seed, float? softmax_scale, "
    "SymInt window_left, SymInt window_right, float softcap",
    "(Tensor o, Tensor lse)",
    _launch,
)
refusal.register(f"{fp8.NAMES} {fp8.NO_GRADIENT}", "varlen_fp8_forward")
