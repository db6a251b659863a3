"""Attention over packed sequences, with FlashAttention's interfaces."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import arguments, cached_operator, operator, varlen_operator
from . import score as scores
from .cache import Cache
from .score import ScoreMod
from .sequences import Batch, Sequences, check_packed

_REPEATS = operator.repeats("q", "k", "v", *Sequences._fields)


@overload
def flash_attn_varlen_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
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
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    page_table: Tensor | None = None,
    block_table: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    split_keys: int | Literal["fixed"] | None = None,
    intervals: Tensor | None = None,
    return_max_logits: Literal[False] = False,
    score: ScoreMod | None = None,
) -> Tensor: ...


@overload
def flash_attn_varlen_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
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
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    page_table: Tensor | None = None,
    block_table: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    split_keys: int | Literal["fixed"] | None = None,
    intervals: Tensor | None = None,
    return_max_logits: Literal[False] = False,
    score: ScoreMod | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_varlen_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
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
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    page_table: Tensor | None = None,
    block_table: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    split_keys: int | Literal["fixed"] | None = None,
    intervals: Tensor | None = None,
    return_max_logits: bool = False,
    score: ScoreMod | None = None,
) -> Tensor | tuple[Tensor, ...]: ...


def flash_attn_varlen_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
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
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    page_table: Tensor | None = None,
    block_table: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    split_keys: int | Literal["fixed"] | None = None,
    intervals: Tensor | None = None,
    return_max_logits: bool = False,
    score: ScoreMod | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` for sequences of different lengths, packed one after the other into one tensor.

    Sequence i is q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]] and the slices of k and v from cu_seqlens_k[i] to
    cu_seqlens_k[i + 1]. Each sequence attends to itself alone, and any sequence may be empty.

    Lengths are data. On a GPU the host never reads them: the call waits for nothing, and a captured graph computes
    other lengths when it is replayed. There, invalid lengths give unspecified results, but never an access outside the
    tensors. On the CPU they raise.

    O and LSE are differentiable in q, k and v unless these are float8_e4m3fn, as in `flash_attn_func`. Rows that are
    not in use, or lie behind the last sequence, have gradients of 0. The lengths are kept for the backward pass, and
    must not be changed before it.

    Arguments:
        q: (total_q, heads_q, head_dim), or a dense batch (batch, seqlen_q, heads_q, head_dim) where cu_seqlens_q is
            None: then O and LSE are dense, too. Strides are as in `flash_attn_func`.
        k: (total_k, heads_kv, head_dim), or a dense batch where cu_seqlens_k is None, as is v then; heads_q is a
            multiple of heads_kv.
        v: (total_k, heads_kv, head_dim_v). k and v have q's dtype, or are float8_e4m3fn beside q of float16 or
            bfloat16.
        cu_seqlens_q, cu_seqlens_k: where sequences begin and end, int32 (sequences + 1,) on q's device. The first
            number is 0, and the numbers do not decrease. Rows may be left over behind the last sequence.
        max_seqlen_q, max_seqlen_k: about how long the longest sequences are, or None. These hints decide how the call
            is computed: wrong ones change its speed, and no result beyond its rounding. Tensors without dimensions are
            read if they are on the CPU. Tensors on a GPU, for which the call would wait, and in a trace count as None.
        seqused_q, seqused_k: how many rows of each sequence are in use, from its first on, int32 (sequences,); all rows
            if None.
        qv: the part of q that is multiplied by v, (total_q, heads_q, head_dim_v), as in `flash_attn_func`. With q and k
            None, scores are the product of qv and v alone.
        q_descale, k_descale, v_descale: the scales of float8_e4m3fn q, k and v, float32 (sequences, heads_kv): a number
            is its code times its scale, which is not negative. A query head uses the scale of its key/value head. None
            is 1. The descale of a 16-bit tensor is ignored, as in FlashAttention-3. With page_table, k_descale and
            v_descale may be scales of each row and head, as in `flash_attn_with_kvcache`.
        softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, pack_gqa, deterministic, sm_margin,
            return_attn_probs, return_max_logits, out_dtype: as in `flash_attn_func`. In each sequence the last query in
            use is aligned with the last key in use. causal may also be a tensor, bool or int32 (sequences,) on q's
            device: a sequence whose number is not 0 is causal, and queries of other sequences see all keys, within
            window_size and attention_chunk. On a GPU the kernels read it, and the host does not. Like intervals, in
            whose place it stands, it goes neither with float8_e4m3fn nor with qv, and head dimensions are at most 256.
        out: a tensor for O, as in `flash_attn_func`.
        s_aux: a sink for each query head, as in `flash_attn_func`. It has no effect on rows outside all sequences.
        page_table: the pages of each sequence's keys, as in `flash_attn_with_kvcache`: k and v are (pages, page_rows,
            heads_kv, ...), cu_seqlens_k is None, and seqused_k says how many keys each sequence has. num_splits and
            scheduler_metadata then mean what they mean for that function, and there are no gradients. block_table is
            another name of page_table.
        scheduler_metadata: the table that `get_scheduler_metadata` made for these sequences. Without it each call makes
            the table; with it the layers of a model share one. Results have the same bits. Lengths, hints, shapes,
            dtype, mask and softcap must be the ones the table was made for: otherwise results are unspecified, or the
            call raises ValueError. A call makes its own table if the given one has no elements, if O is differentiable,
            in a trace, and with qv, split_keys, intervals or causal as a tensor. The CPU needs no table.
        split_keys: as in `flash_attn_func`. num_splits is ignored beside it.
        intervals: a mask of one or two intervals of keys for each query, as in `flash_attn_func`, but int32 (heads_q or
            1, total_q, 2 or 4). Keys are counted from the first key of the query's sequence. The rows of a dense batch
            of q count one sequence after the other, except with page_table: then intervals are (batch or 1, heads_q or
            1, seqlen_q, 2 or 4).
        score: a function of scores, as in `flash_attn_func`. Its indices count in the sequence.

    Returns: O (total_q, heads_q, head_dim_v), which is out or a new contiguous tensor. Its dtype is q's, or where q is
        float8_e4m3fn out_dtype or bfloat16. With return_attn_probs (O, LSE), LSE float32 (heads_q, total_q): the
        natural logarithm of the sum of exp(score). Rows that see no key, are not in use, or lie behind the last
        sequence have O = 0 and LSE = -inf. NaN or an infinity reaches no other sequence.

    Raises:
        NotImplementedError: an argument is not supported yet, a number is a tensor that requires grad, or a tensor has
            a tangent (forward mode). The backward pass raises it for float8_e4m3fn tensors and their scales, and for a
            second derivative.
        TypeError, ValueError: an argument is invalid, or no kernel supports it. On the CPU this includes invalid
            lengths.
        RuntimeError: the driver reports an error; or out is given, and a tensor requires grad.
    """
    given = (
        max_seqlen_q,
        max_seqlen_k,
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
        out_dtype,
        out,
        s_aux,
        page_table,
        block_table,
        scheduler_metadata,
        split_keys,
        intervals,
        return_max_logits,
        score,
    )
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    if (found := operator.again(_REPEATS, tensors, given)) is not None:
        return found  # type: ignore[no-any-return]
    arguments.check_hints(num_splits, pack_gqa)
    q, k, softmax_scale = arguments.scores_of_values(q, k, v, qv, softmax_scale)
    q, k, v, qv = arguments.under_autocast(q, k, v, qv)
    q_descale, k_descale, v_descale = arguments.descales(q, k, v, q_descale, k_descale, v_descale)
    page_table = arguments.page_table(page_table, block_table)
    with_lse = arguments.flag("return_attn_probs", return_attn_probs)
    with_max_logits = arguments.flag("return_max_logits", return_max_logits)
    causal, intervals = arguments.mask_of_data(causal, intervals)
    of_score = scores.given(score, q, page_table is None, True)
    if page_table is not None:
        if cu_seqlens_k is not None:
            raise ValueError("there are page_table and cu_seqlens_k, expected one of them")
        arguments.flag("deterministic", deterministic)
        longest = arguments.hint("max_seqlen_q", max_seqlen_q), arguments.hint("max_seqlen_k", max_seqlen_k)
        out, lse = cached_operator.attention(
            (q, k, v),
            None,
            Cache(seqused_k, page_table, None, None, cu_seqlens_q, seqused_q, *longest),
            cached_operator.Options(
                *arguments.scores(softmax_scale, causal, window_size, attention_chunk, softcap),
                arguments.integer("sm_margin", sm_margin),
                arguments.split_keys(split_keys, num_splits if split_keys is None else 0),
                q_descale,
                k_descale,
                v_descale,
                None if out_dtype is None else arguments.output("out_dtype", out_dtype),
                s_aux,
                qv,
                intervals=intervals,
                max_logits=with_max_logits,
                score=of_score[0],
                score_tables=of_score[1],
            ),
            with_lse,
            out,
            "flash_attn_varlen_func",
        )
        lse, largest = operator.split_lse(lse, with_max_logits)
        return operator.results(out, lse, largest, with_lse)
    # Tables are made only for calls without qv, split_keys and intervals.
    is_plain = qv is None and split_keys is None and intervals is None and score is None
    table = arguments.metadata(scheduler_metadata) if is_plain else None
    batch = Batch.of(q, "q") if cu_seqlens_q is None else None
    if cu_seqlens_k is None:
        if batch is None:
            check_packed("q", q)
        of_k = Batch.of(k, "k")
        k, v, cu_seqlens_k = of_k.rows(k, "k"), of_k.rows(v, "v"), of_k.ends
    elif batch is not None:
        check_packed("k", k)
        check_packed("v", v)
    if batch is not None:
        q, cu_seqlens_q = batch.rows(q, "q"), batch.ends
        qv = None if qv is None else batch.rows(qv, "qv")
    options = varlen_operator.Options(
        arguments.hint("max_seqlen_q", max_seqlen_q),
        arguments.hint("max_seqlen_k", max_seqlen_k),
        *arguments.scores(softmax_scale, causal, window_size, attention_chunk, softcap),
        arguments.integer("sm_margin", sm_margin),
        q_descale,
        k_descale,
        v_descale,
        None if out_dtype is None else arguments.output("out_dtype", out_dtype),
        arguments.flag("deterministic", deterministic),
        s_aux,
        qv,
        arguments.pieces(split_keys),
        intervals,
        with_max_logits,
        *of_score,
    )
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    into = out if batch is None or out is None else batch.rows_of_output(out, "out")
    rows, lse = _attend(tensors, options, with_lse, into, table)
    if batch is split_keys is score is None and not with_max_logits and not is_compiling():
        operation = operator.made("forward", varlen_operator.SCORES, *options[:8])
        _REPEATS.keep(tensors, given, operation, with_lse)
    lse, largest = operator.split_lse(lse, with_max_logits)
    if batch is not None:
        rows = batch.of_rows(rows) if out is None else out
        lse = None if lse is None else batch.of_lse(lse)
    return operator.results(rows, lse, largest, with_lse)


def _attend(
    tensors: tuple[Any, ...],
    options: varlen_operator.Options,
    with_lse: bool,
    out: Tensor | None,
    table: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Computes O and, if wanted, LSE: into `out`, by operators for traces, with autograd, or by a plain launch."""
    q = tensors[0]
    of_options = options.q_descale, options.k_descale, options.v_descale, options.s_aux, options.qv, options.intervals
    given = (*tensors[:5], *operator.given(*tensors[5:], *of_options), *(options.score_tables or ()))
    if out is not None:
        arguments.tensor("out", out)
        operator.refuse_grad(out, *(x for x in given if isinstance(x, Tensor)), function="flash_attn_varlen_func")
        if operator.is_plain(out, *given):
            sequences, given_table = Sequences(*tensors[3:]), _table(table, q)
            q, k, v, *_ = tensors
            _, lse = varlen_operator.compute(q, k, v, sequences, options, with_lse, out, given_table)
            operator.tell_autograd(out)
            return out, lse
        _check_tensors(tensors, *of_options)
        if operator.is_transformed():
            raise NotImplementedError("out is not supported inside of torch.func's transforms")
        return out, torch.ops.fa3.varlen_forward_out(*tensors, *options, o=out)
    if not operator.is_plain(*given) or operator.needs_grad(*(options.score_tables or ())):
        _check_tensors(tensors, *of_options)
        return varlen_operator.ATTENTION.traced(*tensors, *options)
    if operator.needs_grad(*given):
        return varlen_operator.ATTENTION.plain(*tensors, *options)
    q, k, v, *lists = tensors
    return varlen_operator.compute(q, k, v, Sequences(*lists), options, with_lse, table=_table(table, q))


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] | None = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int | None = 0,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
) -> Tensor: ...


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] | None = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int | None = 0,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] | None = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int | None = 0,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] | None = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int | None = 0,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_varlen_func` with Q, K and V in one tensor. Q, K and V are views of it, and torch puts their
    gradients into one tensor.

    qkv is (total, 3, heads, head_dim), or (total, heads_q + 2 * heads_kv, head_dim) with num_heads_q given. Sequence i
    is qkv[cu_seqlens[i]:cu_seqlens[i + 1]].

    Arguments before the star, and their order, are flash-attn 2's, since FlashAttention-3 has no such function. The
    other arguments are as in FlashAttention-3's flash_attn_qkvpacked_func. dropout_p is 0. alibi_slopes, float32
    (heads_q,) or (sequences, heads_q), are the factors on the distance of query and key, which is subtracted from
    scores.
    """
    arguments.refuse(dropout_p=arguments.number("dropout_p", dropout_p) != 0)
    arguments.tensor("cu_seqlens", cu_seqlens)
    q, k, v = arguments.unpacked(qkv, num_heads_q, "total")
    return flash_attn_varlen_func(  # type: ignore[return-value]
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        None,
        None,
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
        score=scores.alibi(alibi_slopes, causal, window_size),
    )


def _table(table: Tensor | None, q: Tensor) -> Tensor | None:
    """The table that kernels read; None on the CPU, which takes no table."""
    if table is None or q.is_cpu:
        return None
    if table.device != q.device:
        operator.refuse_place("q", q, "scheduler_metadata", table)
    return table


def _check_tensors(tensors: tuple[Any, ...], *descales: Any) -> None:
    """Refuses arguments that are not tensors, and tensors with tangents."""
    for name, tensor in zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), tensors):
        arguments.tensor(name, tensor)
    names = ("seqused_q", "seqused_k", "q_descale", "k_descale", "v_descale", "s_aux", "qv", "intervals")
    for name, tensor in zip(names, (*tensors[5:], *descales), strict=True):
        if tensor is not None:
            arguments.tensor(name, tensor)
    operator.refuse_tangents(varlen_operator.NAMES, *tensors[:3], *operator.given(*descales))
