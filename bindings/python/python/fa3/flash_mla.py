"""FlashMLA's interface: multi-head latent attention over one cache, of all keys or of listed ones."""

import functools
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import arguments, cached_operator, kvcache, operator, sparse_operator
from .cache import Cache
from .sparse_operator import Lists, Options

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

# A row of FlashMLA's FP8 cache: e4m3 codes, float32 scales of 128 columns each, and bfloat16 columns.
_CODES, _SCALES, _ROTATED = 512, 4, 64
_ROW_BYTES = _CODES + 4 * _SCALES + 2 * _ROTATED
_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    out: Tensor | None = None,
    *,
    lse_base: Literal[2] | None = None,
    neutral_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention over a cache of latent vectors. Each row of the cache is a token's key, and its first head_dim_v
    columns are the token's value. With indices, each token of q attends to the rows that it lists (sparse attention).

    It calls attention with views, so nothing is copied. Lengths, tables and lists are data:

        q = q[..., head_dim_v:]            k_cache = k_cache[..., head_dim_v:]        the rotated columns
        qv = q[..., :head_dim_v]           v_cache = k_cache[..., :head_dim_v]        the latent ones

    Arguments:
        q: (batch, seqlen_q, heads_q, head_dim), float16 or bfloat16; head_dim is 512 + 64 in DeepSeek's models. With
            indices, heads_q is any number.
        k_cache: (pages, page_rows, heads_kv, head_dim); pages have any number of rows, and DeepSeek's models one head,
            which indices ask for. With is_fp8_kvcache, (pages, page_rows, 1, 656) of uint8, int8 or float8_e4m3fn.
        block_table: the pages of each sequence, in order, int32 (batch, pages). Ignored with indices, as the next one.
        cache_seqlens: how many rows of each sequence are in use, int32 (batch,).
        head_dim_v: the number of latent columns, up to 512; there are up to 64 other columns. Both numbers are
            multiples of 8.
        tile_scheduler_metadata, num_splits: ignored, since kernels find their work themselves. They may be the
            results of `get_mla_metadata`.
        softmax_scale: the factor on scores; 1 / sqrt(head_dim) if None.
        causal: the last row of q is aligned with the last key in use, and each row sees keys up to its own
            position. Not with indices.
        is_fp8_kvcache: whether rows of the cache have 512 codes of e4m3, four float32 scales of 128 columns each, and
            64 columns of bfloat16. A code times its scale is rounded to bfloat16. With indices, and on a GPU without
            extra_k_cache.
        indices: rows of the cache, int32 (batch, seqlen_q, topk): page * page_rows + row of the page. An index that is
            no row of the cache, such as -1, is no key, wherever it is. A row that is listed twice counts twice.
        attn_sink: a sink for each query head, float32 (heads_q,): O is multiplied by 1 / (1 + exp(attn_sink - LSE)).
            LSE is without it.
        extra_k_cache, extra_indices_in_kvcache: a second cache with rows like the first cache's, and its lists. Its
            keys follow the first cache's.
        topk_length, extra_topk_length: how many of the first entries of each list count, int32 (batch,) or (batch,
            seqlen_q), clamped to 0 and topk.
        out: a tensor for O.
        lse_base: None, or 2: LSE is then the base-2 logarithm, as FlashInfer's merges take it.
        neutral_lse: whether LSE of rows that see no key is -inf, which adds nothing to a merge of results over parts of
            the keys. FlashMLA's +inf does not do that.

    Returns: O (batch, seqlen_q, heads_q, head_dim_v) of q's dtype, and LSE float32 (batch, heads_q, seqlen_q), the
        natural logarithm of the sum of exp(score). Rows that see no key have O = 0 and LSE = +inf.

    Raises:
        NotImplementedError: an argument is not supported yet. The backward pass always raises it.
        TypeError, ValueError: an argument is invalid, or no kernel supports it.
        RuntimeError: the driver reports an error.
    """
    fp8 = arguments.flag("is_fp8_kvcache", is_fp8_kvcache)
    for name, x in (("q", q), ("k_cache", k_cache)):
        _check_dims(name, x, 4, "(batch or pages, rows, heads, head_dim)")
    latent = arguments.integer("head_dim_v", head_dim_v)
    if lse_base not in (None, 2):
        raise ValueError(f"lse_base is {lse_base}, expected None or 2")
    neutral = arguments.flag("neutral_lse", neutral_lse)
    if indices is not None:
        if arguments.flag("causal", causal):
            raise ValueError("there are causal and indices, expected one of them: a list says which keys a token sees")
        given = dict(indices=indices, topk_length=topk_length)
        listed = _listed("k_cache", k_cache, fp8, q, latent, given)
        of_extra = dict(extra_indices_in_kvcache=extra_indices_in_kvcache, extra_topk_length=extra_topk_length)
        extra = _listed_extra(extra_k_cache, fp8, q, latent, of_extra)
        batch, rows = q.shape[:2]
        form = dict(lse_base_two=lse_base == 2, lse_empty_is_infinite=not neutral)
        o, lse = _sparse(q, (listed, extra), latent, softmax_scale, attn_sink, out, form)
        return o, lse.unflatten(0, (batch, rows)).transpose(1, 2)
    of_lists = dict(topk_length=topk_length, extra_topk_length=extra_topk_length, extra_k_cache=extra_k_cache)
    for name, given_with in (of_lists | dict(extra_indices_in_kvcache=extra_indices_in_kvcache)).items():
        if given_with is not None:
            raise ValueError(f"there is {name} without indices, the lists that it belongs to")
    if fp8:
        raise NotImplementedError("is_fp8_kvcache without indices is not supported yet")
    arguments.tensor("block_table", block_table)
    arguments.tensor("cache_seqlens", cache_seqlens)
    for name, x in (("q", q), ("k_cache", k_cache)):
        if not 0 < latent < x.shape[3]:
            raise ValueError(f"head_dim_v is {latent}, expected 1 to {x.shape[3] - 1}: a part of {name}'s columns")
    (qv, q), (v_cache, k_cache) = (x.tensor_split((latent,), dim=3) for x in (q, k_cache))
    q, _, _, qv = arguments.under_autocast(q, None, None, qv)
    cache = Cache(cache_seqlens, arguments.page_table(block_table, None), None, None, None, None, None, None)
    options = cached_operator.Options(
        *arguments.scores(softmax_scale, causal, (-1, -1), 0, 0.0),
        sm_margin=0,
        split_keys=arguments.split_keys(None, 0),
        s_aux=attn_sink,
        qv=qv,
        lse_base_two=lse_base == 2,
        lse_without_sink=attn_sink is not None,
        lse_empty_is_infinite=not neutral,
    )
    o, of_rows = kvcache.attention((q, k_cache, v_cache), None, cache, options, True, out)
    assert of_rows is not None
    return o, of_rows


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
    *,
    return_max_logits: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Sparse attention of the tokens of a prompt: `flash_mla_with_kvcache` with indices, of rows that are not in pages.

    Arguments:
        q: (tokens, heads_q, head_dim), float16 or bfloat16.
        kv: (rows, 1, head_dim), of q's dtype. The first d_v columns are values.
        indices: rows of kv, int32 (tokens, 1, topk).
        sm_scale: the factor on scores.
        d_v: the number of latent columns.
        attn_sink, topk_length, out: as in `flash_mla_with_kvcache`; topk_length is int32 (tokens,).
        return_max_logits: False leaves out the largest scores, which cost a little time.

    Returns: O (tokens, heads_q, d_v), the largest scaled score of each token and head, float32 (tokens, heads_q), and
        LSE, float32 (tokens, heads_q). Where a token has no key they are 0, -inf and +inf.

    Raises:
        As `flash_mla_with_kvcache`.
    """
    _check_dims("q", q, 3, "(tokens, heads_q, head_dim)")
    _check_dims("kv", kv, 3, "(rows, 1, head_dim)")
    latent, wants_max = arguments.integer("d_v", d_v), arguments.flag("return_max_logits", return_max_logits)
    arguments.tensor("indices", indices)
    # Tokens are sequences of one row.
    (batched, lists) = q.unsqueeze(1), dict(indices=indices, topk_length=topk_length)
    cache = _listed("kv", kv.unsqueeze(1), False, batched, latent, lists)
    into = out.unsqueeze(1) if out is not None else None
    results, function = dict(lse_empty_is_infinite=True, max_logits=wants_max), "flash_mla_sparse_fwd"
    o, lse = _sparse(batched, (cache, None), latent, sm_scale, attn_sink, into, results, function)
    lse, largest = lse if wants_max else (lse, None)
    return (o.squeeze(1) if out is None else out), largest, lse


class _Cache(NamedTuple):
    """A cache: latent values, the columns that are not latent, or the latent ones if there are none, and the scales of
    values in 8 bits, each (pages, page_rows, 1, ...); its lists (tokens, topk), and their lengths (tokens,).
    """

    values: Tensor
    keys: Tensor
    scales: Tensor | None
    indices: Tensor
    lengths: Tensor | None


def _sparse(
    q: Tensor,
    caches: tuple[_Cache, _Cache | None],
    latent: int,
    softmax_scale: float | None,
    attn_sink: Tensor | None,
    out: Tensor | None,
    results: dict[str, bool],
    function: str = "flash_mla_with_kvcache",
) -> tuple[Tensor, Tensor]:
    """O (batch, seqlen_q, heads_q, head_dim_v) and LSE (tokens, heads_q). `results` are options of LSE: if the largest
    scores are wanted, they follow LSE, (2, tokens, heads_q).
    """
    batch, rows, heads, columns = q.shape
    scale = 1 / math.sqrt(columns) if softmax_scale is None else arguments.number("softmax_scale", softmax_scale)
    if attn_sink is not None:
        arguments.tensor("attn_sink", attn_sink)
    into = None
    if out is not None:
        arguments.tensor("out", out)
        if out.dtype != q.dtype or out.shape != (batch, rows, heads, latent) or out.device != q.device:
            found = f"{out.dtype} {tuple(out.shape)} on {out.device}"
            expected = f"{q.dtype} {(batch, rows, heads, latent)} on {q.device}"
            raise ValueError(f"out is {found}, expected {expected}: (batch, seqlen_q, heads_q, head_dim_v)")
        are_tokens = batch == 1 or rows == 1 or out.stride(0) == rows * out.stride(1)
        into = out.flatten(0, 1).unsqueeze(1) if are_tokens else None
        given = (x for cache in caches if cache for x in cache[:3])
        operator.refuse_grad(out, q, *operator.given(*given, attn_sink), function=function)
    tokens = q.flatten(0, 1).unsqueeze(1)
    q_rotated, qv = (tokens[..., latent:], tokens[..., :latent]) if columns > latent else (tokens, None)
    cache, extra = caches
    more = (extra.keys, extra.values, extra.indices, extra.lengths) if extra is not None else ()
    lists = Lists(cache.indices, cache.lengths, *more)
    options = Options(
        scale, 0, -1, attn_sink, qv, lse_without_sink=attn_sink is not None, v_scales=cache.scales, **results
    )
    o, lse = sparse_operator.attention((q_rotated, cache.keys, cache.values), lists, options, True, into, function)
    assert lse is not None
    if out is None:
        o = o.view(batch, rows, heads, latent)
    elif into is None:
        o = out.copy_(o.view(batch, rows, heads, latent))
    else:
        o = out
    return o, lse.squeeze(-1)


def _listed(
    name: str, cache: Tensor, fp8: bool, q: Tensor, latent: int, given: dict[str, Tensor | None]
) -> _Cache:
    """A cache with lists of its rows and lengths of the lists, which are given by their names, checked."""
    (of_lists, indices), (of_lengths, lengths) = given.items()
    for given_name, x in ((name, cache), *given.items()):
        if x is not None:
            arguments.tensor(given_name, x)
            if x.device != q.device:
                operator.refuse_place("q", q, given_name, x)
    if cache.shape[2] != 1:
        raise NotImplementedError(f"{name} has {cache.shape[2]} heads, and lists of keys take one")
    columns = _CODES + _ROTATED if fp8 else cache.shape[3]
    if fp8:
        _check_codes(name, cache, q, latent)
    elif cache.dtype != q.dtype:
        raise ValueError(f"{name} is {cache.dtype} and q {q.dtype}, expected one dtype without is_fp8_kvcache")
    if columns != q.shape[3] or not 0 < latent <= columns:
        found = f"{name} has {columns} and q {q.shape[3]} columns, {latent} of them latent"
        raise ValueError(f"{found}, expected as many, and some latent")
    batch, rows = q.shape[:2]
    assert indices is not None
    if indices.dtype != torch.int32 or indices.dim() != 3 or indices.shape[:2] != (batch, rows):
        found = f"{of_lists} is {indices.dtype} {tuple(indices.shape)}"
        raise ValueError(f"{found}, expected torch.int32 ({batch}, {rows}, topk)")
    if lengths is not None:
        is_of_tokens = lengths.dim() == 2
        shape = (batch, rows) if is_of_tokens else (batch,)
        if lengths.dtype != torch.int32 or lengths.shape != shape:
            found = f"{of_lengths} is {lengths.dtype} {tuple(lengths.shape)}"
            raise ValueError(f"{found}, expected torch.int32 ({batch},) or ({batch}, {rows})")
        lengths = (lengths if is_of_tokens else lengths[:, None].expand(batch, rows)).flatten()
    scales = None
    if fp8 and q.is_cuda:
        keys, cache, scales = _views(name, cache)
    else:
        cache = _of_16_bits(cache) if fp8 else cache
        # Columns that are not latent have a product of their own.
        keys, cache = (cache[..., latent:] if columns > latent else cache), cache[..., :latent]
    return _Cache(cache, keys, scales, indices.flatten(0, 1), lengths)


def _listed_extra(
    cache: Tensor | None, fp8: bool, q: Tensor, latent: int, given: dict[str, Tensor | None]
) -> _Cache | None:
    """The second cache as `_listed` gives it, if it is given."""
    (name, indices), (of_lengths, lengths) = given.items()
    if (cache is None) != (indices is None):
        one, other = (name, "extra_k_cache") if cache is None else ("extra_k_cache", name)
        raise ValueError(f"there is {one} without {other}, expected both or none")
    if cache is None:
        if lengths is not None:
            raise ValueError(f"there is {of_lengths} without extra_k_cache, whose lists it belongs to")
        return None
    _check_dims("extra_k_cache", cache, 4, "(pages, rows, heads, head_dim)")
    return _listed("extra_k_cache", cache, fp8, q, latent, given)


def _check_codes(name: str, cache: Tensor, q: Tensor, latent: int) -> None:
    """Refuses anything but FlashMLA's FP8 rows."""
    if q.dtype != torch.bfloat16:
        raise NotImplementedError(f"q is {q.dtype}, and rows of FP8 take torch.bfloat16: their rotated columns have it")
    if latent != _CODES:
        raise NotImplementedError(f"head_dim_v is {latent}, and rows of FP8 have {_CODES} latent columns")
    if cache.shape[3] == 584:
        raise NotImplementedError(f"{name} has rows of 584 bytes, which are not supported yet: rows have {_ROW_BYTES}")
    if cache.dtype not in _BYTES or cache.shape[3] != _ROW_BYTES:
        found = f"{name} is {cache.dtype} with rows of {cache.shape[3]}"
        raise ValueError(f"{found}, expected rows of {_ROW_BYTES} bytes: uint8, int8 or float8_e4m3fn")


def _views(name: str, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rotated columns, the codes and the scales of FlashMLA's FP8 rows, where they lie."""
    if name == "extra_k_cache":
        raise NotImplementedError("extra_k_cache with is_fp8_kvcache is not supported on a GPU yet")
    if cache.stride(3) != 1 or any(x % 16 for x in (cache.storage_offset(), *cache.stride()[:3])):
        found = f"{name} has strides {cache.stride()} and begins at byte {cache.storage_offset()} of its storage"
        raise ValueError(f"{found}, expected rows without gaps at multiples of 16 bytes")
    scales = cache.view(torch.float32)[..., _CODES // 4 : _CODES // 4 + _SCALES]
    return cache.view(torch.bfloat16)[..., -_ROTATED:], cache.view(torch.float8_e4m3fn)[..., :_CODES], scales


def _of_16_bits(cache: Tensor) -> Tensor:
    """FlashMLA's FP8 rows in bfloat16: codes times their scales, rounded once, and the rotated columns."""
    codes, scales, rotated = cache.view(torch.uint8).split((_CODES, 4 * _SCALES, 2 * _ROTATED), dim=3)
    groups = codes.view(torch.float8_e4m3fn).float().unflatten(3, (_SCALES, _CODES // _SCALES))
    latents = (groups * scales.contiguous().view(torch.float32).unsqueeze(4)).flatten(3)
    return torch.cat([latents.to(torch.bfloat16), rotated.contiguous().view(torch.bfloat16)], 3)


def _check_dims(name: str, x: Any, dims: int, what: str) -> None:
    """Refuses anything but a tensor of this number of dimensions."""
    arguments.tensor(name, x)
    if x.dim() != dims:
        raise ValueError(f"{name} has {x.dim()} dimensions, expected {dims}: {what}")


class FlashMLASchedMeta:
    """FlashMLA's metadata of a step, which it fills at the step's first call. Here it stays empty."""


def get_mla_metadata(*given: Any, **named: Any) -> tuple[FlashMLASchedMeta, None] | tuple[Tensor, Tensor]:
    """Makes tile_scheduler_metadata and num_splits for `flash_mla_with_kvcache`, which ignores them. In FlashMLA
    they say how CTAs share the work of a step. Our kernels find that out themselves at each launch, from the lengths.

    Returns: without arguments, as newer versions of FlashMLA are called, an object and None. With the arguments of
        older versions, int32 tensors that servers slice, and copy to their own buffers: the metadata (0, 8) has a row
        for no CTA, and num_splits (batch + 1,) is 0. They are on the device of the first tensor argument, which has the
        lengths.
    """
    lengths = next((x for x in (*given, *named.values()) if isinstance(x, Tensor)), None)
    if lengths is None:
        return FlashMLASchedMeta(), None
    zeros = functools.partial(torch.zeros, dtype=torch.int32, device=lengths.device)
    return zeros(0, 8), zeros(lengths.shape[0] + 1)
