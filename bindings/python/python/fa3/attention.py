"""FlashAttention-3's interface. What cannot be done is refused, never ignored."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import arguments, gradient, operator


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of float16, bfloat16 or float8_e4m3fn tensors on a Hopper GPU, on torch's current stream of their
    device; or of such and float32 tensors on the CPU. Under `torch.autocast` float32 q, k, v and qv are cast to its
    dtype.

    O and LSE are differentiable in q, k and v of float16 and bfloat16, and in s_aux, once and in reverse mode. If one
    of them requires grad, q, k, v, O and LSE are kept for the backward pass, which writes gradients of all of them,
    with heads outside rows where the tensor lies so and else contiguous, and takes a workspace of 8 bytes for each row
    of a head of q, and where the gradient of q is added up, 4 for each of its elements. It reads the gradient of O with
    its own strides, and copies it only where those are not as q's must be.

    Arguments:
        q: (batch, seqlen_q, heads_q, head_dim). Strides are free, but all but the last are multiples of 8 (of 16 for
            float8_e4m3fn), and a tensor whose last is not 1 is copied. On the CPU all are free, and nothing is copied.
        k: (batch, seqlen_k, heads_kv, head_dim); heads_q is a multiple of heads_kv.
        v: (batch, seqlen_k, heads_kv, head_dim_v). k and v are of q's dtype, or float8_e4m3fn beside q of float16 or
            bfloat16, with scales of heads, and then without gradients.
        qv: the part of q that is multiplied by v, (batch, seqlen_q, heads_q, head_dim_v) of q's dtype, which is not
            float8_e4m3fn: scores are softmax_scale * (q k^T + qv v^T), softmax_scale is 1 / sqrt(head_dim + head_dim_v)
            if None, and there are no gradients. head_dim is at most 64 then, and head_dim_v at most 512; on the CPU
            they are at most 576 together.
        softmax_scale: the factor on Q K^T; 1 / sqrt(head_dim) if None. This and other numbers may be tensors without
            dimensions on the CPU that do not require grad.
        q_descale, k_descale, v_descale: the scales of float8_e4m3fn q, k and v, float32 (batch, heads_kv): a number is
            its code times its scale, which is not negative. A head of q has the scale of its head of k. None is 1. Or
            scales of blocks of 64 or 128 rows of q and 128 rows of k and v, (batch, heads, blocks) as `quantize` gives
            them, all three, positive and normal numbers. With v_mean, v_descale is of channels, and not negative. That
            of a tensor of 16 bits is ignored, as FlashAttention-3 does.
        causal: a query sees keys up to its own position. The last query stands at the last key.
        window_size: (left, right), how many keys before and after its position a query sees; None, -1 or less is
            unbounded. The right side of a causal window is 0. A tensor of both must be on the CPU.
        attention_chunk: 0 or None, or how many keys a chunk has: of the keys that its window has, a query sees only
            those of the chunk in which its own position lies.
        softcap: scores s become softcap * tanh(s / softcap); 0 or None is no cap.
        num_splits, pack_gqa: any integer, and None, True or False. They change nothing: kernels choose.
        deterministic: whether the gradient of q must be the same bits in every run. So it is, too, where the backward
            pass runs while `torch.are_deterministic_algorithms_enabled()`. Otherwise it is added up in any order where
            that is faster: for head dimensions up to 128, where queries see more than 4096 keys on average, or under a
            mask more than 1024. All other results always have the same bits.
        sm_margin: how many SMs of the GPU to leave to others, in the backward pass as well.
        return_attn_probs: whether to return LSE as well.
        v_mean: the means of float8_e4m3fn v's channels, float32 (batch, heads_kv, head_dim_v) as `quantize_channels`
            gives them. Then v_descale has their scales, of the same shape, and v is its codes times the scale of its
            channel, plus the mean. q_descale and k_descale are of heads or None, or both of blocks.
        v_transposed: v is float8_e4m3fn (batch, heads_kv, head_dim_v, keys) as `quantize(..., transposed=True)` and
            `quantize_channels(..., transposed=True)` write it, which is faster. Otherwise long sequences of head_dim
            128 and 256 take memory of v's size, into which a kernel transposes it.
        out_dtype: that of O. Where q is float8_e4m3fn it is bfloat16 or float16, else q's own.
        out: a tensor for O, of its shape, dtype and device, which has no element in common with another tensor: it may
            lie between their rows. Strides are free, but the last is 1, and the others are multiples of 8 that keep
            rows apart. Nothing may require grad.
        s_aux: a sink for each query head, (heads_q,) of float32, float16 or bfloat16, as GPT-OSS has them: the logit of
            one more key that every query sees, whose value is 0. It is neither scaled nor capped, and LSE includes it.
            A query that sees no key has LSE = s_aux. One of -inf is none.
        intervals: a mask of any kind that one or two intervals of keys say for each query, int32 (batch or 1, heads_q
            or 1, seqlen_q, 2 or 4): start and end of the keys that it sees, or two of each. Two may come in any order,
            overlap and be empty. Bounds beyond the keys are those of their ends. Blocks of keys that no query of a tile
            sees take no time. It is in place of causal, window_size and attention_chunk, without float8_e4m3fn and qv;
            head dimensions are at most 256. On a GPU they are read where the call is computed.

    Returns: O (batch, seqlen_q, heads_q, head_dim_v) of q's dtype, or of out_dtype or bfloat16 if that is
        float8_e4m3fn: out, or a new contiguous tensor. With return_attn_probs (O, LSE), LSE float32 (batch, heads_q,
        seqlen_q): the natural logarithm of the sum of exp(score). A query that sees no key has O = 0, LSE = -inf and a
        gradient of 0. NaN or an infinity in v may reach all queries of a tile that visits its block of keys, whether
        they see its key or not. Of float8_e4m3fn, exp(score) is rounded to e4m3, so that LSE is typically off by less
        than 0.01, and by up to 0.09 for a thousand keys.

    Raises:
        NotImplementedError: an argument that is not supported yet, a number that is a tensor and requires grad, or a
            tensor with a tangent (forward mode). The backward pass raises it for float8_e4m3fn tensors and their
            scales, with qv, and for a second derivative.
        TypeError, ValueError: arguments that make no sense, or that no kernel takes.
        RuntimeError: the driver's refusals; or there is out, and a tensor requires grad.
    """
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
    )
    return_attn_probs = arguments.flag("return_attn_probs", return_attn_probs)
    descales = [x for x in (q_descale, k_descale, v_descale, v_mean, s_aux, qv, intervals) if x is not None]
    if out is not None:
        arguments.tensor("out", out)
        operator.refuse_grad(out, *(x for x in (q, k, v, *descales) if isinstance(x, Tensor)))
        if operator.is_plain(out, q, k, v, *descales):
            _, lse = operator.compute(q, k, v, options, return_attn_probs, out)
            operator.tell_autograd(out)
        else:
            lse = _traced_into(q, k, v, options, out)
    elif operator.is_plain(q, k, v, *descales):
        if operator.needs_grad(q, k, v, *descales):
            out, lse = gradient.ATTENTION.plain(q, k, v, *options)
        else:
            out, lse = operator.compute(q, k, v, options, return_attn_probs)
    else:
        _check_tensors(q, k, v, options)
        out, lse = gradient.ATTENTION.traced(q, k, v, *options)
    return (out, lse) if return_attn_probs else out


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
    """`flash_attn_func` of Q, K and V in one tensor, of which nothing is copied.
    Torch puts their gradients into one tensor.

    qkv is (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads_q + 2 * heads_kv, head_dim)
    with num_heads_q given.
    """
    q, k, v = arguments.unpacked(qkv, num_heads_q, "batch, seqlen")
    return flash_attn_func(
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
    """LSE, by the operator that writes O to a tensor."""
    _check_tensors(q, k, v, options)
    if operator.is_transformed():
        raise NotImplementedError("out is not supported inside of torch.func's transforms")
    return torch.ops.fa3.forward_out(q, k, v, *options, o=out)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, options: operator.Options) -> None:
    """Refuses arguments that are no tensors, and tensors with tangents."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        arguments.tensor(name, tensor)
    for name in ("q_descale", "k_descale", "v_descale", "v_mean", "s_aux", "qv", "intervals"):
        if getattr(options, name) is not None:
            arguments.tensor(name, getattr(options, name))
    operator.refuse_tangents("q, k or v", q, k, v)
