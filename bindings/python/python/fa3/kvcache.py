"""Attention over a cache of keys and values, with FlashAttention-3's interface."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import arguments, cached_operator, operator, varlen_operator
from .cache import Cache
from .new_rows import NewRows
from .sequences import Sequences


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
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
    causal: bool = False,
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
    split_keys: int | None = None,
    seqused_q: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None, None]:
    """Attention over a cache of keys and values, as servers compute it at each step, on a Hopper GPU or on the CPU.

    Lengths and page tables are data. On a GPU the host never reads them: the call waits for nothing, and a captured
    graph computes other lengths when it is replayed. Those that make no sense give wrong numbers, and never touch other
    memory than the tensors: lengths count as the cache has rows for, and a page that is not there has rows of zeros.
    On the CPU they are read, and refused with their numbers.
    NaN in rows that are not in use, or in pages that are nobody's, reaches nothing.

    Where rows of q are few, as in decoding, CTAs share the keys of all sequences equally, whatever their lengths.

    Arguments:
        q: (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with cu_seqlens_q. Strides are as of
            `flash_attn_func`.
        k_cache: (batch, rows, heads_kv, head_dim), or (pages, page_rows, heads_kv, head_dim) with page_table; heads_q
            is a multiple of heads_kv. Strides are as free as q's: heads may lie outside rows, and K and V side by side.
            The last is 1 where new rows are written.
        v_cache: of k_cache's shape, but with head_dim_v. Both are of q's dtype, or float8_e4m3fn beside q of float16 or
            bfloat16: half of the bytes are read, and results are those of q's dtype.
        k, v: new rows, (batch, seqlen_new, heads_kv, ...), or (total_new, heads_kv, ...) with cu_seqlens_k_new, float16
            or bfloat16, or on the CPU float32. A cache of float8_e4m3fn gets them divided by k_descale and v_descale,
            and rounded, beyond 448 to 448. It takes new rows of its own dtype as well, which are copied and not
            rotated. They are written to the cache behind the rows in use of their sequences, before the attention,
            which counts them as in use. Those that have no place there are left out on a GPU, and refused on the CPU.
        qv: the part of q that is multiplied by v_cache, of q's shape but with head_dim_v, as of `flash_attn_func`. It
            is not rotated.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2) of float32 or k's dtype: the first rotary_dim elements of
            new keys and of q are rotated, as far as k is given. The position of a new row is its row in the cache, that
            of the first row of q the number of rows before; of its other rows too, unless the mask is causal or has a
            window or chunks.
        cache_seqlens: how many rows of each sequence are in use before, with those of cache_leftpad, int32 (batch,) on
            q's device; or one number for all, of which a tensor is kept; all rows, if None.
        cache_batch_idx: the entry of k_cache's batch that is each sequence's, int32 (batch,); with page_table the row
            of it.
        cache_leftpad: so many rows of memory are before each sequence, int32 (batch,).
        page_table: the pages of each sequence, in order, int32 (batch, pages), or (rows, pages) with cache_batch_idx.
            Pages have any number of rows. The table's rows may be parts of longer ones. Entries behind those that are
            in use may be anything. block_table is its older name.
        cu_seqlens_q: where packed sequences of q begin and end, int32 (batch + 1,), as of `flash_attn_varlen_func`.
        cu_seqlens_k_new: where packed sequences of k and v begin and end, int32 (batch + 1,).
        max_seqlen_q: about how long the longest of q's is, as of `flash_attn_varlen_func`.
        rotary_seqlens: the position of each sequence's first new row and first row of q, in place of the rows before,
            int32 (batch,). Without a rotation it is ignored, as FlashAttention-3 does.
        q_descale, k_descale, v_descale: the scales of float8_e4m3fn q, k_cache and v_cache, float32 (batch, heads_kv),
            as of `flash_attn_varlen_func`. Those of tensors of 16 bits are ignored, as FlashAttention-3 does.
        softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin: as of `flash_attn_func`. The last row
            of a sequence of q stands at its last key in use.
        rotary_interleaved: whether pairs that rotate are neighbours, or else halves of rotary_dim.
        scheduler_metadata: nothing needs it, since kernels find their work themselves. It is not looked at.
        num_splits: 1 has each tile of q computed by one CTA. Any other number lets CTAs share keys where rows of q are
            few; in how many parts, kernels decide, whatever the number.
        pack_gqa: changes nothing. Where keys are shared, query heads of a group are rows of one tile, and else not.
        return_softmax_lse: whether to return LSE as well.
        out: a tensor for O, as of `flash_attn_func`.
        s_aux: a sink for each query head, as of `flash_attn_func`.
        split_keys: None, or a number of keys, a multiple of 128: then the keys of each sequence are cut into pieces of
            so many, whatever the rows of q, and the results of pieces are merged in their order. So a sequence has the
            same bits in any batch and on any number of SMs. num_splits=1 does not promise that: there tiles follow the
            longest sequence. It takes a workspace for all pieces that the cache may have of each row of q, and where q
            has many rows it is slow. On the CPU the bits are always a sequence's own. Not with another num_splits than
            0.
        seqused_q: how many rows of each sequence of q are in use, as of `flash_attn_varlen_func`.

    Returns: O, of q's shape but with head_dim_v, and of q's dtype, or bfloat16 if that is float8_e4m3fn: out, or a new
        contiguous tensor. With return_softmax_lse (O, LSE, None, None), LSE float32 (batch, heads_q, seqlen_q), or
        (heads_q, total_q) with cu_seqlens_q: the natural logarithm of the sum of exp(score). FlashAttention-3 has its
        parts of O and LSE in place of None. Rows that see no key have O = 0 and LSE = -inf.

    Raises:
        NotImplementedError: an argument that is not supported yet, a number that is a tensor and requires grad, or a
            tensor with a tangent (forward mode). There is no backward pass, which raises it; and with k and v nothing
            may require grad.
        TypeError, ValueError: arguments that make no sense, or that no kernel takes.
        RuntimeError: the driver's refusals; or there is out, and a tensor requires grad.
    """
    arguments.check_hints(num_splits, pack_gqa)
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
    lengths = _lengths(cache_seqlens, q, cu_seqlens_q)
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
    )
    with_lse = arguments.flag("return_softmax_lse", return_softmax_lse)
    tensors = (q, k_cache, v_cache)
    try:
        out, lse = cached_operator.attention(tensors, new, cache, options, with_lse, out, "flash_attn_with_kvcache")
    except (TypeError, ValueError) as error:
        raise type(error)(_with_names_of_this(str(error))) from error
    return (out, lse, None, None) if with_lse else out


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
    """Makes what the functions take as scheduler_metadata: an int32 tensor, on the device of the lengths.

    Over a cache it has no elements. FlashAttention-3 computes here how the work of a step is shared. Our kernels find
    that out themselves at each launch, from the lengths, so that no argument is looked at but cache_seqlens for its
    device.

    Of packed sequences, which have cu_seqlens_k, it is the table that a kernel makes of their lengths. A model makes it
    once for the calls of all layers. On the CPU it has no elements.

    Arguments:
        batch_size: the number of sequences.
        max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_q, causal, window_size, attention_chunk,
            sm_margin: as of `flash_attn_varlen_func`; cache_seqlens are its seqused_k, or None.
        num_heads_q, num_heads_kv, headdim, headdim_v, qkv_dtype: those of its tensors, bfloat16 if qkv_dtype is None.
        has_softcap: whether scores are capped.
        total_q, total_k: rows of its q, and of its k and v.

    The other arguments are not looked at.
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
    sequences.check()
    for name, x in sequences._asdict().items():
        if x is not None and x.device != cu_seqlens_q.device:
            operator.refuse_place("cu_seqlens_q", cu_seqlens_q, name, x)
    if sequences.batch != arguments.integer("batch_size", batch_size):
        raise ValueError(f"batch_size is {batch_size}, and cu_seqlens_q has {sequences.batch} sequences")
    if cu_seqlens_q.is_cpu:
        return torch.empty(0, dtype=torch.int32)
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
    return varlen_operator.make_table(q, kv, sequences, options)


# Arguments of this function that operators have other names for.
_NAMES = dict(k="k_cache", v="v_cache", k_new="k", v_new="v", seqused_k="cache_seqlens", leftpad_k="cache_leftpad")


def _with_names_of_this(sentence: str) -> str:
    """Errors of an operator, with the names of this function's arguments."""
    said = re.sub(r"\b[a-z_]+\b", lambda word: _NAMES.get(word[0], word[0]), sentence)
    is_other_batch = re.match("k_cache has batch .*, expected ", said)
    return f"{said}, as q has: cache_batch_idx says which are meant" if is_other_batch else said


def _refuse_without_rows(k: Any, v: Any, **given: Any) -> None:
    """Refuses what is of new rows, where there are none."""
    if (k is None) != (v is None):
        one, other = ("k", "v") if v is None else ("v", "k")
        raise ValueError(f"there is {one} without {other}, expected both or none")
    for name, x in given.items():
        if x is not None:
            raise ValueError(f"there is {name} without k and v, the new rows that it is of")


def _pages(page_table: Any, cache_batch_idx: Any) -> tuple[Any, Tensor | None]:
    """The page table, and which of its rows are sequences'. A cache in another order has one page a sequence."""
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
    # What a graph reads must live as long as the graph.
    if operator.is_plain(q) and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _filled(q.device, operator.current_stream(q.get_device()), count, rows)
    return torch.full((count,), rows, dtype=torch.int32, device=q.device)


@functools.lru_cache(maxsize=256)
def _filled(device: torch.device, stream: int, count: int, rows: int) -> Tensor:
    """So many numbers, kept for later calls on the same stream, which fills it before."""
    return torch.full((count,), rows, dtype=torch.int32, device=device)
