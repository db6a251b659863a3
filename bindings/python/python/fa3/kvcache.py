"""Attention over a cache of keys and values, with FlashAttention-3's interface."""

import functools
import re
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import arguments, cached_operator, operator, varlen_operator
from . import score as scores
from .cache import Cache
from .new_rows import NewRows
from .score import ScoreMod
from .sequences import Sequences

_REPEATS = operator.repeats("q", "k", "v", "seqused_k", "page_table", "cu_seqlens_q", "k_descale", "v_descale")


@overload
def flash_attn_with_kvcache(
    q: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
    window_size: Sequence[int | None] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: Literal[False] = False,
    *,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    split_keys: int | Literal["fixed"] | None = None,
    seqused_q: Tensor | None = None,
    intervals: Tensor | None = None,
    tree_mask: Tensor | None = None,
    return_max_logits: Literal[False] = False,
    score: ScoreMod | None = None,
) -> Tensor: ...


@overload
def flash_attn_with_kvcache(
    q: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
    window_size: Sequence[int | None] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    return_softmax_lse: Literal[True],
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    split_keys: int | Literal["fixed"] | None = None,
    seqused_q: Tensor | None = None,
    intervals: Tensor | None = None,
    tree_mask: Tensor | None = None,
    return_max_logits: Literal[False] = False,
    score: ScoreMod | None = None,
) -> tuple[Tensor, Tensor, None, None]: ...


@overload
def flash_attn_with_kvcache(
    q: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
    window_size: Sequence[int | None] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    split_keys: int | Literal["fixed"] | None = None,
    seqused_q: Tensor | None = None,
    intervals: Tensor | None = None,
    tree_mask: Tensor | None = None,
    return_max_logits: bool = False,
    score: ScoreMod | None = None,
) -> Tensor | tuple[Any, ...]: ...


def flash_attn_with_kvcache(
    q: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
    window_size: Sequence[int | None] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    split_keys: int | Literal["fixed"] | None = None,
    seqused_q: Tensor | None = None,
    intervals: Tensor | None = None,
    tree_mask: Tensor | None = None,
    return_max_logits: bool = False,
    score: ScoreMod | None = None,
) -> Tensor | tuple[Any, ...]:
    """Attention over a KV cache, as servers compute it at each step, on a Hopper GPU or on the CPU.

    Lengths and page tables are data. On a GPU the host never reads them: the call waits for nothing, and a captured
    graph computes other lengths when it is replayed. There, out-of-range lengths and page indices give unspecified
    results but never access memory outside the tensors: lengths are clamped to the rows of the cache, and a missing
    page reads as zeros. On the CPU lengths and page tables are read, and invalid ones raise.
    NaN in rows that are not in use, or in pages of no sequence, reaches no result.

    Where there are few query rows, as in decoding, CTAs share the keys of all sequences equally (split-KV), whatever
    the lengths.

    Arguments:
        q: (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with cu_seqlens_q. Strides are as in
            `flash_attn_func`.
        k_cache: (batch, rows, heads_kv, head_dim), or (pages, page_rows, heads_kv, head_dim) with page_table; heads_q
            is a multiple of heads_kv. Strides are as for q: in memory heads may lie outside rows, and K and V may lie
            side by side. The last stride is 1 where new rows are written.
        v_cache: of k_cache's shape, but with head_dim_v. Both caches have q's dtype, or are float8_e4m3fn beside q of
            float16 or bfloat16: then half as many bytes are read, and results have q's dtype. So may both caches be
            int8, with scales of each row and head.
        k, v: new rows, (batch, seqlen_new, heads_kv, ...), or (total_new, heads_kv, ...) with cu_seqlens_k_new, float16
            or bfloat16, or on the CPU float32. Before attention they are written after the first cache_seqlens rows of
            each sequence, and queries see them. Rows that do not fit into the cache are dropped on a GPU, and raise on
            the CPU. For a float8_e4m3fn cache they are divided by k_descale and v_descale, rounded, and saturated at
            448; new rows that are float8_e4m3fn themselves are copied and not rotated.
        qv: the part of q that is multiplied by v_cache, of q's shape but with head_dim_v, as in `flash_attn_func`. It
            is not rotated. With float8_e4m3fn caches, k_descale is the factor of its product, too. With q and k_cache
            None, scores are the product of qv and v_cache alone (SGLang's only_qv).
        rotary_cos, rotary_sin: (positions, rotary_dim / 2) of float32 or k's dtype. They need k, and rotate the first
            rotary_dim elements of new keys and of q. The position of a new key is its row in the cache. The first query
            of a sequence has the position cache_seqlens; the other queries follow if the mask is causal or has a
            window, chunks or intervals, or causal is a tensor, and else have that position, too. Also with tree_mask
            they follow in their order: rotate the rows of a tree before the call.
        cache_seqlens: how many rows of each sequence are in use before the call, including cache_leftpad rows, int32
            (batch,) on q's device; or one number for all sequences, whose tensor is kept for later calls; all rows if
            None.
        cache_batch_idx: the entry of k_cache's batch for each sequence, or with page_table its row, int32 (batch,).
        cache_leftpad: how many rows of padding precede each sequence in memory, int32 (batch,).
        page_table: the pages of each sequence, in order, int32 (batch, pages), or (rows, pages) with cache_batch_idx.
            Pages have any number of rows. The table may be a slice of a wider one. Entries behind the pages in use may
            be anything. block_table is its older name.
        cu_seqlens_q: where packed sequences of q begin and end, int32 (batch + 1,), as in `flash_attn_varlen_func`.
        cu_seqlens_k_new: where packed sequences of k and v begin and end, int32 (batch + 1,).
        max_seqlen_q: about how long the longest sequence of q is, as in `flash_attn_varlen_func`.
        rotary_seqlens: the position of each sequence's first new key and first query, in place of cache_seqlens, int32
            (batch,). Without a rotation it is ignored, as in FlashAttention-3.
        q_descale, k_descale, v_descale: the scales of float8_e4m3fn q, k_cache and v_cache, float32 (batch, heads_kv),
            as in `flash_attn_varlen_func`. The descale of a 16-bit tensor is ignored, as in FlashAttention-3. Beside q
            of 16 bits, k_descale and v_descale may both have a scale for each row and head of the cache instead, as
            vLLM's fp8_per_token_head has: (batch, rows, heads_kv), or (pages, page_rows, heads_kv) with page_table, of
            any strides, and int8 caches must have. Then an element is its code times its row's scale, rounded to q's
            dtype, head_dim and head_dim_v are at most 256 on a GPU, and k, v and qv are None.
        softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin: as in `flash_attn_func`. The last query
            of a sequence is aligned with its last key in use. causal may also be a tensor, bool or int32 (batch,), that
            says which sequences are causal, as in `flash_attn_varlen_func`.
        rotary_interleaved: whether a pair that rotates is two neighbours (GPT-J), or else i and i + rotary_dim / 2.
        scheduler_metadata: ignored, since kernels find their work themselves.
        num_splits: 1 has each tile of q computed by one CTA. Any other number lets CTAs share keys where there are few
            query rows; kernels choose the number of splits themselves.
        pack_gqa: changes nothing. Where keys are shared, query heads of a group are rows of one tile, and else not.
        return_softmax_lse: whether to return LSE as well.
        out: a tensor for O, as in `flash_attn_func`.
        s_aux: a sink for each query head, as in `flash_attn_func`.
        split_keys: None, "fixed", or a number of keys, a multiple of 128, as in `flash_attn_func`. It gives a row equal
            bits in decoding and in any chunk of a prompt, in pages of any size, in any batch, and on any number of SMs.
            num_splits must be 0. num_splits=1 promises nothing of the kind, since its tiles depend on the longest
            sequence.
        seqused_q: how many rows of each sequence of q are in use, as in `flash_attn_varlen_func`.
        intervals: a mask of one or two intervals of keys for each query, as in `flash_attn_func`, or as in
            `flash_attn_varlen_func` where q is packed. Keys are counted from the sequence's first key behind
            cache_leftpad, and new rows k and v follow the rows in use. Where CTAs share keys, and with pages whose rows
            are copied one by one, all keys in use are read, whatever the mask.
        tree_mask: which new keys each query sees, such as its ancestors in a tree of drafts: int64 (batch, seqlen_q) or
            (batch, seqlen_q, words), or (total_q,) or (total_q, words) where q is packed. The new keys of a sequence
            are its last ones, as many as it has queries in use. Bit i of word w is for new key 64 w + i, and new keys
            without a bit are hidden. A query sees all older keys, and itself only by its bit; with causal,
            window_size or attention_chunk, it sees the keys that both show. It goes where intervals go, in whose place
            it stands. `fa3.masks.tree_words` makes it of a bool tensor.
        return_max_logits: whether to return the largest score of each head as well, behind the other results, as in
            `flash_attn_func`.
        score: a function of scores, as in `flash_attn_func`. Keys are counted from the sequence's first key behind
            cache_leftpad.

    Returns: O, of q's shape but with head_dim_v, which is out or a new contiguous tensor. Its dtype is q's, or bfloat16
        where q is float8_e4m3fn. With return_softmax_lse (O, LSE, None, None), LSE float32 (batch, heads_q, seqlen_q),
        or (heads_q, total_q) with cu_seqlens_q: the natural logarithm of the sum of exp(score). FlashAttention-3
        returns its partial O and LSE in place of None. Rows that see no key have O = 0 and LSE = -inf.

    Raises:
        NotImplementedError: an argument is not supported yet, a number is a tensor that requires grad, or a tensor has
            a tangent (forward mode). The backward pass always raises it. With k and v no tensor may require grad.
        TypeError, ValueError: an argument is invalid, or no kernel supports it.
        RuntimeError: the driver reports an error; or out is given, and a tensor requires grad.
    """
    given = (
        k,
        v,
        qv,
        rotary_cos,
        rotary_sin,
        cache_batch_idx,
        cache_leftpad,
        cu_seqlens_k_new,
        max_seqlen_q,
        rotary_seqlens,
        q_descale,
        softmax_scale,
        causal,
        window_size,
        attention_chunk,
        softcap,
        rotary_interleaved,
        scheduler_metadata,
        num_splits,
        pack_gqa,
        sm_margin,
        return_softmax_lse,
        block_table,
        out,
        s_aux,
        split_keys,
        seqused_q,
        intervals,
        tree_mask,
        return_max_logits,
        score,
    )
    tensors = q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, k_descale, v_descale
    if (found := operator.again(_REPEATS, tensors, given)) is not None:
        return (*found, None, None) if return_softmax_lse else found  # type: ignore[no-any-return]
    arguments.check_hints(num_splits, pack_gqa)
    if k_cache is None and not k is v is None:
        raise ValueError("new rows k and v need k_cache, which is None")
    q, k_cache, softmax_scale = arguments.scores_of_values(q, k_cache, v_cache, qv, softmax_scale)
    q, k, v, qv = arguments.under_autocast(q, k, v, qv)
    q_descale, k_descale, v_descale = arguments.descales(q, k_cache, v_cache, q_descale, k_descale, v_descale)
    pages = _pages(arguments.page_table(page_table, block_table), cache_batch_idx)
    interleaved = arguments.flag("rotary_interleaved", rotary_interleaved)
    new = None
    if rotary_seqlens is not None and rotary_cos is None and rotary_sin is None:
        arguments.tensor("rotary_seqlens", rotary_seqlens)
        rotary_seqlens = None
    if k is None or v is None:
        _refuse_without_rows(k, v, cu_seqlens_k_new=cu_seqlens_k_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    else:
        new = NewRows(k, v, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens, interleaved)
    longest = arguments.hint("max_seqlen_q", max_seqlen_q)
    causal, intervals = arguments.mask_of_data(causal, intervals, q, tree_mask)
    lengths, of_score = _lengths(cache_seqlens, q, cu_seqlens_q), scores.given(score, q)
    cache = Cache(lengths, *pages, cache_leftpad, cu_seqlens_q, seqused_q, longest, None)
    options = cached_operator.Options(
        *arguments.scores(softmax_scale, causal, window_size, attention_chunk, softcap),
        arguments.integer("sm_margin", sm_margin),
        arguments.split_keys(split_keys, num_splits),
        q_descale,
        k_descale,
        v_descale,
        None,
        s_aux,
        qv,
        intervals=intervals,
        max_logits=arguments.flag("return_max_logits", return_max_logits),
        score=of_score[0],
        score_tables=of_score[1],
    )
    with_lse = arguments.flag("return_softmax_lse", return_softmax_lse)
    out, lse = attention((q, k_cache, v_cache), new, cache, options, with_lse, out)
    if score is None and not options.max_logits and not is_compiling():
        operation = operator.made("forward", cached_operator.SCORES, *options[:7], *cache[6:])
        _REPEATS.keep(tensors, given, operation, with_lse)
    lse, largest = operator.split_lse(lse, options.max_logits)
    if not with_lse:
        return operator.results(out, lse, largest, with_lse)
    return out, lse, None, None, *operator.given(largest)


def attention(
    tensors: tuple[Tensor, Tensor, Tensor],
    new: NewRows | None,
    cache: Cache,
    options: cached_operator.Options,
    with_lse: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """O and, if wanted, LSE. Errors have the names of the arguments of `flash_attn_with_kvcache`."""
    try:
        return cached_operator.attention(tensors, new, cache, options, with_lse, out, "flash_attn_with_kvcache")
    except (TypeError, ValueError) as error:
        raise type(error)(_with_names_of_this(str(error))) from error


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor | None,
    qkv_dtype: torch.dtype | None = None,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int | None] | None = (-1, -1),
    attention_chunk: int | None = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    total_q: int | None = None,
    total_k: int | None = None,
) -> Tensor:
    """Makes the tensor that the functions take as scheduler_metadata: int32, on the device of the lengths.

    For a cache the tensor has no elements. FlashAttention-3's function assigns the work of a step to CTAs. Our kernels
    assign the work themselves at each launch, from the lengths, so only the device of cache_seqlens matters.

    For packed sequences, which have cu_seqlens_k, the tensor is the table of work tiles that a kernel makes of their
    lengths. A model makes it once for the calls of all layers. On the CPU it has no elements.

    Arguments:
        batch_size: the number of sequences.
        max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_q, causal, window_size, attention_chunk,
            sm_margin: as in `flash_attn_varlen_func`. Give its seqused_k, or None, as cache_seqlens.
        num_heads_q, num_heads_kv, headdim, headdim_v, qkv_dtype: of that function's tensors. A qkv_dtype of None is
        bfloat16.
        has_softcap: whether scores are capped.
        total_q, total_k: the number of rows of q, and of k and v.

    The other arguments are ignored.
    """
    if cu_seqlens_k is None:
        arguments.tensor("cache_seqlens", cache_seqlens)
        assert cache_seqlens is not None
        return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        arguments.tensor(name, x)
    for name, rows in (("total_q", total_q), ("total_k", total_k)):
        if rows is None:
            raise ValueError(f"there is cu_seqlens_k and no {name}, expected the rows of the tensor")
    assert cu_seqlens_q is not None
    longest = arguments.hint("max_seqlen_q", max_seqlen_q), arguments.hint("max_seqlen_k", max_seqlen_k)
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, cache_seqlens)
    _, *window, _ = arguments.scores(None, causal, window_size, attention_chunk, 0.0)
    dtype = torch.bfloat16 if qkv_dtype is None else qkv_dtype
    q = dtype, arguments.integer("total_q", total_q), num_heads_q, headdim
    kv = arguments.integer("total_k", total_k), num_heads_kv, headdim if headdim_v is None else headdim_v
    options = {
        "window": tuple(window),
        "softcap": 1.0 if arguments.flag("has_softcap", has_softcap) else None,
        "sm_margin": arguments.integer("sm_margin", sm_margin),
        "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1],
    }
    table = varlen_operator.make_table(q, kv, sequences, options)
    if sequences.batch != arguments.integer("batch_size", batch_size):
        raise ValueError(f"batch_size is {batch_size}, and cu_seqlens_q has {sequences.batch} sequences")
    return table


# Operators have other names for these arguments of `flash_attn_with_kvcache`.
_NAMES = dict(k="k_cache", v="v_cache", k_new="k", v_new="v", seqused_k="cache_seqlens", leftpad_k="cache_leftpad")
_NAMES |= dict(k_scales="k_descale", v_scales="v_descale")


def _with_names_of_this(sentence: str) -> str:
    """An operator's error, with the argument names of `flash_attn_with_kvcache`."""
    said = re.sub(r"\b[a-z_]+\b", lambda word: _NAMES.get(word[0], word[0]), sentence)
    is_other_batch = re.match("k_cache has batch .*, expected ", said)
    return f"{said}, as q has: cache_batch_idx says which are meant" if is_other_batch else said


def _refuse_without_rows(k: Any, v: Any, **given: Any) -> None:
    """Refuses arguments that describe new rows, where there are no new rows."""
    if (k is None) != (v is None):
        one, other = ("k", "v") if v is None else ("v", "k")
        raise ValueError(f"there is {one} without {other}, expected both or none")
    for name, x in given.items():
        if x is not None:
            raise ValueError(f"there is {name} without k and v, the new rows that it is of")


def _pages(page_table: Any, cache_batch_idx: Any) -> tuple[Any, Tensor | None]:
    """The page table, and the row of the table for each sequence. With cache_batch_idx a dense cache counts as paged:
    each entry of its batch is one page.
    """
    if cache_batch_idx is None:
        return page_table, None
    arguments.tensor("cache_batch_idx", cache_batch_idx)
    if cache_batch_idx.dtype != torch.int32 or cache_batch_idx.dim() != 1:
        found = f"{cache_batch_idx.dtype} {tuple(cache_batch_idx.shape)}"
        raise ValueError(f"cache_batch_idx is {found}, expected torch.int32 (batch,)")
    return (cache_batch_idx.unsqueeze(1), None) if page_table is None else (page_table, cache_batch_idx)


def _lengths(cache_seqlens: Any, q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor | None:
    """The lengths as a tensor, if they are given."""
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if isinstance(cache_seqlens, (list, tuple)):
        found = f"cache_seqlens is a {type(cache_seqlens).__name__}"
        raise TypeError(f"{found}, expected an integer or an int32 tensor (batch,)")
    rows = arguments.integer("cache_seqlens", cache_seqlens)
    if isinstance(rows, int) and not 0 <= rows < 2**31:
        raise ValueError(f"cache_seqlens is {rows}, expected 0 to 2^31 - 1")
    for name, x in (("q", q), ("cu_seqlens_q", cu_seqlens_q)):
        if x is not None or name == "q":
            arguments.tensor(name, x)
    count = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    # A captured graph reads the tensor at every replay, so it must own the tensor's memory.
    if operator.is_plain(q) and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _filled(q.device, operator.current_stream(q.get_device()), count, rows)
    return torch.full((count,), rows, dtype=torch.int32, device=q.device)


@functools.lru_cache(maxsize=256)
def _filled(device: torch.device, stream: int, count: int, rows: int) -> Tensor:
    """`count` times the number `rows`. The cached tensor serves later calls on the stream that fills it."""
    return torch.full((count,), rows, dtype=torch.int32, device=device)
