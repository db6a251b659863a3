"""`flex_attention`, with the interface of torch's function of this name."""

import weakref
from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from . import arguments, attention, masks
from . import score as scores
from .score import ScoreMod

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: "BlockMask | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: "BlockMask | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: "BlockMask | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: "BlockMask | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with a function of scores, on a Hopper GPU or on the CPU, as torch's
    `torch.nn.attention.flex_attention.flex_attention` computes it.

    Arguments:
        query: (batch, heads_q, seqlen_q, head_dim). Dtypes and head dimensions are as in `flash_attn_func`.
        key, value: (batch or 1, heads_kv, seqlen_k, head_dim and head_dim_v), of query's dtype.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) returns the score that takes the place of `score`, which is
            scaled. It is called once with symbols, at each call: nothing of it is kept, so what it captures may change.
            q_idx counts from the first query. Or a `fa3.Score`. docs/expressions.md says what it may compute.
        block_mask: a `BlockMask` of torch for these lengths. It becomes at most two intervals of keys for each query,
            which `fa3.masks.from_mask_mod` makes at the first call with it, waiting for the GPU.
        scale: the factor on Q K^T; 1 / sqrt(head_dim) if None.
        enable_gqa: whether heads_q may be a multiple of heads_kv.
        return_lse: whether to return LSE as well.

    Returns: O (batch, heads_q, seqlen_q, head_dim_v), a transposed view of a contiguous (batch, seqlen_q, heads_q,
        head_dim_v). With return_lse (O, LSE), LSE float32 (batch, heads_q, seqlen_q).

    Raises:
        NotImplementedError: score_mod has an operation that kernels cannot compute, and the message names its line; or
            a tensor that it reads requires grad.
        TypeError, ValueError: an argument is invalid, or no kernel supports it. This includes a block_mask with a query
            of three or more intervals.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        arguments.tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions, expected 4: (batch, heads, seqlen, head_dim)")
    heads_q, heads_kv = query.shape[1], key.shape[1]
    if heads_q != heads_kv and not arguments.flag("enable_gqa", enable_gqa):
        raise ValueError(f"query has {heads_q} heads and key {heads_kv}, expected as many: or set enable_gqa")
    if key.shape[0] == 1:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    found = attention.flash_attn_func(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        scale,
        score=None if score_mod is None else scores.traced(score_mod, query, "s b h row k"),
        intervals=None if block_mask is None else _intervals(block_mask, query, key),
        return_attn_probs=True,
    )
    out, lse = found[0].transpose(1, 2), found[1]
    return (out, lse) if arguments.flag("return_lse", return_lse) else out


# The intervals of block masks.
_known: "weakref.WeakKeyDictionary[BlockMask, Tensor]" = weakref.WeakKeyDictionary()


def _intervals(mask: "BlockMask", query: Tensor, key: Tensor) -> Tensor:
    """The intervals of a block mask, which are made once."""
    if tuple(mask.shape[2:]) != (query.shape[2], key.shape[2]):
        found = f"block_mask was created for block_mask.shape={tuple(mask.shape)}"
        raise ValueError(f"{found}, but seqlen_q is {query.shape[2]} and seqlen_k {key.shape[2]}")
    if mask not in _known:
        _known[mask] = masks.from_mask_mod(mask)
    return _known[mask]
