"""The functions of flash-attn 2. Each function calls this package's function of the same name, with the arguments in
its order, and raises what that function raises. It returns O. With return_attn_probs it returns O, LSE and an empty
tensor in place of the probabilities, which flash-attn 2 returns only with dropout.
"""

from typing import Any

from torch import Tensor

from .. import arguments, attention, kvcache, score, varlen


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`fa3.flash_attn_func`: q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, head_dim)."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _results(q, attention.flash_attn_func(q, k, v, **options), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with K and V in one tensor, (batch, seqlen_k, 2, heads_kv, head_dim)."""
    options: Any = (
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    k, v = _unpacked("kv", kv, 2, 2)
    return flash_attn_func(q, k, v, *options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with Q, K and V in one tensor, (batch, seqlen, 3, heads, head_dim)."""
    options: Any = (
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    q, k, v = _unpacked("qkv", qkv, 2, 3)
    return flash_attn_func(q, k, v, *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """`fa3.flash_attn_varlen_func`: q (total_q, heads_q, head_dim), k and v (total_k, heads_kv, head_dim); with
    block_table, int32 (sequences, pages), k and v are pages (pages, page_rows, heads_kv, head_dim), and cu_seqlens_k
    says how many keys each sequence has.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    lists: dict[str, Any] = dict(cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    if block_table is not None:
        arguments.tensor("cu_seqlens_k", cu_seqlens_k)
        lists |= dict(cu_seqlens_k=None, seqused_k=cu_seqlens_k.diff(), page_table=block_table)
    found = varlen.flash_attn_varlen_func(q, k, v, cu_seqlens_q, **lists, **options)
    return _results(q, found, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with K and V in one tensor, (total_k, 2, heads_kv, head_dim)."""
    lists = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options: Any = (
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    k, v = _unpacked("kv", kv, 1, 2)
    return flash_attn_varlen_func(q, k, v, *lists, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with Q, K and V in one tensor, (total, 3, heads, head_dim)."""
    lists = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    options: Any = (
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    q, k, v = _unpacked("qkv", qkv, 1, 3)
    return flash_attn_varlen_func(q, k, v, *lists, *options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """`fa3.flash_attn_with_kvcache`. With return_softmax_lse the results are O and LSE."""
    found = kvcache.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        return_softmax_lse=True,
        score=score.alibi(alibi_slopes, causal, window_size),
    )
    return found[:2] if return_softmax_lse else found[0]


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:
    """The keyword arguments that this package's functions have in common."""
    if arguments.number("dropout_p", dropout_p) != 0:
        raise NotImplementedError(f"dropout_p is {dropout_p}, expected 0: there is no dropout of attention")
    scores: dict[str, Any] = dict(softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap)
    scores |= dict(score=score.alibi(alibi_slopes, causal, window_size))
    return scores | dict(deterministic=deterministic, return_attn_probs=True)


def _results(q: Tensor, found: Any, return_attn_probs: bool) -> Any:
    """O alone, or O, LSE and an empty tensor."""
    out, lse = found
    return (out, lse, q.new_empty(0)) if arguments.flag("return_attn_probs", return_attn_probs) else out


def _unpacked(name: str, x: Tensor, dim: int, count: int) -> tuple[Tensor, ...]:
    """The parts of a packed tensor, as views."""
    arguments.tensor(name, x)
    if x.dim() != dim + 3 or x.shape[dim] != count:
        rows = "batch, seqlen" if dim == 2 else "total"
        raise ValueError(f"{name} is {tuple(x.shape)}, expected ({rows}, {count}, heads, head_dim)")
    return x.unbind(dim)
