"""FlashMLA's interface: decoding of multi-head latent attention over one cache."""

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from . import arguments, cached_operator, kvcache
from .cache import Cache

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    *,
    lse_base: Literal[2] | None = None,
    neutral_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention over a cache of latent vectors. Each row of the cache is a token's key, and its first head_dim_v
    columns are the token's value.

    It calls `flash_attn_with_kvcache` with views, so that nothing is copied. Lengths and tables are data, as there:

        q = q[..., head_dim_v:]            k_cache = k_cache[..., head_dim_v:]        the rotated columns
        qv = q[..., :head_dim_v]           v_cache = k_cache[..., :head_dim_v]        the latent ones

    Arguments:
        q: (batch, seqlen_q, heads_q, head_dim), float16 or bfloat16; head_dim is 512 + 64 in DeepSeek's models.
        k_cache: (pages, page_rows, heads_kv, head_dim); pages have any number of rows, and DeepSeek's models one head.
        block_table: the pages of each sequence, in order, int32 (batch, pages).
        cache_seqlens: how many rows of each sequence are in use, int32 (batch,).
        head_dim_v: the number of latent columns, up to 512; there are up to 64 other columns. Both numbers are
            multiples of 8.
        tile_scheduler_metadata, num_splits: ignored, since kernels find their work themselves. They may be the
            results of `get_mla_metadata`.
        softmax_scale: the factor on scores; 1 / sqrt(head_dim) if None.
        causal: the last row of q is aligned with the last key in use, and each row sees keys up to its own
            position.
        indices: None. Sparse attention is not supported yet.
        attn_sink: a sink for each query head, float32 (heads_q,), as s_aux in `flash_attn_func`. LSE leaves it out.
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
    arguments.refuse(is_fp8_kvcache=fp8, indices=indices is not None)
    for name, x in (("q", q), ("k_cache", k_cache), ("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        arguments.tensor(name, x)
    latent = arguments.integer("head_dim_v", head_dim_v)
    for name, x in (("q", q), ("k_cache", k_cache)):
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions, expected 4: (batch or pages, rows, heads, head_dim)")
        if not 0 < latent < x.shape[3]:
            raise ValueError(f"head_dim_v is {latent}, expected 1 to {x.shape[3] - 1}: a part of {name}'s columns")
    (qv, q), (v_cache, k_cache) = (x.tensor_split((latent,), dim=3) for x in (q, k_cache))
    if lse_base not in (None, 2):
        raise ValueError(f"lse_base is {lse_base}, expected None or 2")
    neutral = arguments.flag("neutral_lse", neutral_lse)
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
    out, lse = kvcache.attention((q, k_cache, v_cache), None, cache, options, with_lse=True)
    assert lse is not None
    return out, lse


class FlashMLASchedMeta:
    """FlashMLA's metadata of a step, which it fills at the step's first call. Here it stays empty."""


def get_mla_metadata(*given: Any, **named: Any) -> tuple[FlashMLASchedMeta, None] | tuple[Tensor, Tensor]:
    """Makes tile_scheduler_metadata and num_splits for `flash_mla_with_kvcache`, which ignores them. FlashMLA computes
    there how CTAs share the work of a step. Our kernels find that out themselves at each launch, from the lengths.

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
