"""`flash_attn_func` and `flash_attn_qkvpacked_func`, with FlashAttention-3's interface. Unsupported arguments raise."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from . import arguments, gradient, operator
from . import score as scores
from .score import ScoreMod

_REPEATS = operator.repeats("q", "k", "v")


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
    split_keys: int | Literal["fixed"] | None = None,
    return_max_logits: Literal[False] = False,
    score: ScoreMod | None = None,
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
    split_keys: int | Literal["fixed"] | None = None,
    return_max_logits: Literal[False] = False,
    score: ScoreMod | None = None,
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
    split_keys: int | Literal["fixed"] | None = None,
    return_max_logits: bool = False,
    score: ScoreMod | None = None,
) -> Tensor | tuple[Tensor, ...]: ...


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
    split_keys: int | Literal["fixed"] | None = None,
    return_max_logits: bool = False,
    score: ScoreMod | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of float16, bfloat16 or float8_e4m3fn tensors on a Hopper GPU, on torch's current stream of their
    device. On the CPU tensors may also be float32. Under `torch.autocast` float32 q, k, v and qv are cast to its dtype.

    O and LSE are differentiable, once and in reverse mode, in s_aux, and in q, k and v unless these are float8_e4m3fn.
    If one of them requires grad, q, k, v, O and LSE are kept for the backward pass, which computes the gradients of all
    of them. If a tensor lies in memory as (batch, heads, seqlen, head_dim), so does its gradient; other gradients are
    contiguous. The backward pass takes a workspace of 8 bytes for each query row of each head, and of 4 more bytes for
    each element of q where it accumulates the gradient of q in memory. It reads the gradient of O with its own strides,
    and copies it only where these strides do not meet the rules for q.

    Arguments:
        q: (batch, seqlen_q, heads_q, head_dim). All strides but the last are multiples of 8 (of 16 for float8_e4m3fn).
            A tensor whose last stride is not 1 is copied. On the CPU any strides will do, and nothing is copied.
        k: (batch, seqlen_k, heads_kv, head_dim); heads_q is a multiple of heads_kv.
        v: (batch, seqlen_k, heads_kv, head_dim_v). k and v have q's dtype. Or they are float8_e4m3fn beside q of
            float16 or bfloat16: then their scales are per head, and there are no gradients.
        qv: the part of q that is multiplied by v (latent attention), (batch, seqlen_q, heads_q, head_dim_v) of q's
            dtype, which is not float8_e4m3fn. Scores are softmax_scale * (q k^T + qv v^T), softmax_scale defaults to
            1 / sqrt(head_dim + head_dim_v), and there are no gradients. head_dim is at most 64 and head_dim_v at most
            512; on the CPU their sum is at most 576.
        softmax_scale: the factor on Q K^T; 1 / sqrt(head_dim) if None. Like the other numbers it may be a tensor
            without dimensions on the CPU that does not require grad.
        q_descale, k_descale, v_descale: the scales of float8_e4m3fn q, k and v, float32 (batch, heads_kv): a number is
            its code times its scale, which is not negative. A query head uses the scale of its key/value head. None
            is 1. Alternatively all three have a scale per block of 64 or 128 rows of q and of 128 rows of k and v,
            (batch, heads, blocks) as `quantize` returns them, positive and normal numbers. With v_mean, v_descale is
            per channel, and not negative. The descale of a 16-bit tensor is ignored, as in FlashAttention-3.
        causal: a query sees keys up to its own position. The last query is aligned with the last key.
        window_size: (left, right), how many keys before and after its position a query sees; None, -1 or less is
            unbounded. With causal, right is 0. If it is a tensor of two integers, it must be on the CPU.
        attention_chunk: 0 or None, or the number of keys in a chunk: a query sees only those keys of its window that
            lie in the same chunk as its own position.
        softcap: scores s become softcap * tanh(s / softcap); 0 or None is no cap.
        num_splits, pack_gqa: accepted and ignored. num_splits is any integer, and pack_gqa is None, True or False.
            No num_splits promises equal bits in other calls; split_keys does.
        deterministic: whether the gradient of q must have the same bits in every run.
            `torch.use_deterministic_algorithms(True)`, if set during the backward pass, has the same effect. Otherwise
            the gradient of q is accumulated in any order where that is faster: for head dimensions up to 128, if
            queries see more than 4096 keys on average, or more than 1024 under a mask. All other results always have
            the same bits.
        sm_margin: how many SMs of the GPU to leave to other kernels, in the backward pass as well.
        return_attn_probs: whether to return LSE as well.
        v_mean: the means of the channels of float8_e4m3fn v, float32 (batch, heads_kv, head_dim_v) as
            `quantize_channels` returns them. v_descale then has the scales of the channels, of the same shape, and v is
            code times scale plus mean. q_descale and k_descale are both per head or None, or both per block.
        v_transposed: v is float8_e4m3fn (batch, heads_kv, head_dim_v, keys) as `quantize(..., transposed=True)` and
            `quantize_channels(..., transposed=True)` write it, which is faster. Otherwise, for long sequences with
            head_dim 128 or 256, a kernel transposes v into memory of its size.
        out_dtype: the dtype of O: bfloat16 or float16 where q is float8_e4m3fn, else q's own.
        out: a tensor for O, of its shape, dtype and device. It shares no element with another tensor, but may lie
            between its rows. The last stride is 1, and the others are multiples of 8 that keep rows apart. No tensor of
            the call may require grad.
        s_aux: a sink for each query head, (heads_q,) of float32, float16 or bfloat16, as in GPT-OSS: the logit of one
            more key that every query sees and whose value is 0. It is neither scaled nor capped, and LSE includes it.
            A query that sees no key has LSE = s_aux. A sink of -inf has no effect, and one of +inf makes O 0.
        intervals: a mask of one or two intervals of keys for each query, int32 (batch or 1, heads_q or 1, seqlen_q,
            2 or 4): start and end of each interval. Two intervals may come in any order, overlap or be empty. Bounds
            outside the keys are clamped. Key blocks that no query of a tile sees are skipped. With causal, window_size
            or attention_chunk, a query sees the keys that both show. It goes neither with float8_e4m3fn nor with qv;
            head dimensions are at most 256. On a GPU the kernels read it, and the host does not. See `fa3.masks`. Words
            of listed blocks, from `fa3.masks.block_sparse`, are taken in its place, on a GPU with head dimensions up to
            128.
        split_keys: None, "fixed", or a number of keys, a multiple of 128. The keys of a sequence are then cut into
            pieces of a fixed size, counted from its first key, and the results of the pieces are merged in order. A
            row's O and LSE have the same bits in any call that sees the same keys with the same split_keys: this one,
            `flash_attn_varlen_func` or `flash_attn_with_kvcache`, in any batch, with any other rows of its sequence, on
            any number of SMs. "fixed" chooses the size by head_dim_v and qv alone. The backward pass takes O and LSE as
            always, and makes no such promise for gradients. It takes more time, and is refused where no such kernel is:
            with intervals, v_mean, v_transposed, or scales of blocks. See docs/bits.md.
        return_max_logits: whether to return the largest score of each head as well, which QK-clip of the optimizer
            Muon compares with its threshold. Not where q is float8_e4m3fn.
        score: a function of scores, whose value replaces each scaled and capped score before the mask: a `fa3.Score`,
            or a Python function of the score, the sequence, the query head, the query and the key. The query's index
            counts from the bottom right: the last query stands at the last key. See docs/expressions.md. It does not
            go with float8_e4m3fn, and on a GPU not with qv.

    Returns: O (batch, seqlen_q, heads_q, head_dim_v), which is out or a new contiguous tensor. Its dtype is q's, or
        where q is float8_e4m3fn out_dtype or bfloat16. With return_attn_probs (O, LSE), LSE float32 (batch, heads_q,
        seqlen_q): the natural logarithm of the sum of exp(score). With return_max_logits the last result is float32
        (heads_q,), the largest score of each head in this call's batch: scaled by softmax_scale and capped, of keys
        that a query sees, without s_aux, and -inf if there is no key. It has no gradient. A query that sees no key has
        O = 0, LSE = -inf and a gradient of 0. NaN or an infinity in v may reach all queries of a tile that visits its
        key block, whether or not they see its key. For float8_e4m3fn, exp(score) is rounded to e4m3, so that LSE is
        typically off by less than 0.01, and by up to 0.09 for a thousand keys.

    Raises:
        NotImplementedError: an argument is not supported yet, a number is a tensor that requires grad, or a tensor has
            a tangent (forward mode). The backward pass raises it for float8_e4m3fn tensors and their scales, with qv,
            and for a second derivative.
        TypeError, ValueError: an argument is invalid, or no kernel supports it.
        RuntimeError: the driver reports an error; or out is given, and a tensor requires grad.
    """
    given = (
        softmax_scale,
        causal,
        qv,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        num_splits,
        pack_gqa,
        deterministic,
        sm_margin,
        return_attn_probs,
        v_mean,
        v_transposed,
        out_dtype,
        out,
        s_aux,
        intervals,
        split_keys,
        return_max_logits,
        score,
    )
    if (found := operator.again(_REPEATS, (q, k, v), given)) is not None:
        return found  # type: ignore[no-any-return]
    arguments.check_hints(num_splits, pack_gqa)
    q, k, v, qv = arguments.under_autocast(q, k, v, qv)
    q_descale, k_descale, v_descale = arguments.descales(q, k, v, q_descale, k_descale, v_descale)
    options = operator.Options(
        *arguments.scores(softmax_scale, causal, window_size, attention_chunk, softcap),
        arguments.integer("sm_margin", sm_margin),
        q_descale,
        k_descale,
        v_descale,
        arguments.flag("v_transposed", v_transposed),
        None if out_dtype is None else arguments.output("out_dtype", out_dtype),
        arguments.flag("deterministic", deterministic),
        v_mean,
        s_aux,
        qv,
        intervals,
        arguments.pieces(split_keys),
        arguments.flag("return_max_logits", return_max_logits),
        *scores.given(score, q, True),
    )
    return_attn_probs = arguments.flag("return_attn_probs", return_attn_probs)
    descales: list[Tensor] = []
    if not (q_descale is k_descale is v_descale is v_mean is s_aux is qv is intervals is None):
        descales = operator.given(q_descale, k_descale, v_descale, v_mean, s_aux, qv, intervals)
    if options.score_tables:
        descales = [*descales, *options.score_tables]
    if out is not None:
        arguments.tensor("out", out)
        operator.refuse_grad(out, *(x for x in (q, k, v, *descales) if isinstance(x, Tensor)))
        if operator.is_plain(out, q, k, v, *descales):
            _, lse = operator.compute(q, k, v, options, return_attn_probs, out)
            operator.tell_autograd(out)
        else:
            lse = _traced_into(q, k, v, options, out)
    elif operator.is_plain(q, k, v, *descales) and not operator.needs_grad(*(options.score_tables or ())):
        if operator.needs_grad(q, k, v, *descales):
            out, lse = gradient.ATTENTION.plain(q, k, v, *options)
        else:
            out, lse = operator.compute(q, k, v, options, return_attn_probs)
            if split_keys is score is None and not options.v_transposed and not options.max_logits:
                operation = operator.made("forward", operator.SCORES, *options[:6])
                _REPEATS.keep((q, k, v), given, operation, return_attn_probs)
    else:
        _check_tensors(q, k, v, options)
        out, lse = gradient.ATTENTION.traced(q, k, v, *options)
    lse, largest = operator.split_lse(lse, options.max_logits)
    return operator.results(out, lse, largest, return_attn_probs)


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
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` with Q, K and V in one tensor. Q, K and V are views of it, and torch puts their gradients into
    one tensor.

    qkv is (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads_q + 2 * heads_kv, head_dim)
    with num_heads_q given.
    """
    q, k, v = arguments.unpacked(qkv, num_heads_q, "batch, seqlen")
    return flash_attn_func(  # type: ignore[return-value]
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def _traced_into(q: Tensor, k: Tensor, v: Tensor, options: operator.Options, out: Tensor) -> Tensor:
    """Calls the operator that writes O to `out`, and returns LSE."""
    _check_tensors(q, k, v, options)
    if operator.is_transformed():
        raise NotImplementedError("out is not supported inside of torch.func's transforms")
    return torch.ops.fa3.forward_out(q, k, v, *options, o=out)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, options: operator.Options) -> None:
    """Refuses arguments that are not tensors, and tensors with tangents."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        arguments.tensor(name, tensor)
    for name in ("q_descale", "k_descale", "v_descale", "v_mean", "s_aux", "qv", "intervals"):
        if getattr(options, name) is not None:
            arguments.tensor(name, getattr(options, name))
    operator.refuse_tangents("q, k or v", q, k, v)
