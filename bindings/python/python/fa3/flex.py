"""`flex_attention`, with the interface of torch's function of this name."""

import math
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from . import arguments, attention, masks
from . import score as scores
from .score import Score, ScoreMod

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
        block_mask: a `BlockMask` of torch for these lengths. It becomes one or two intervals of keys for each query,
            which `fa3.masks.from_mask_mod` makes at the first call with it, waiting for the GPU. If a causal mask or a
            window has the same intervals, the call is `flash_attn_func`'s with window_size. Where queries have three
            or more, all keys from the first to the last are visited, and the function of scores hides those between:
            then the BlockMask's mask_mod is such a function, too. In a trace of a mask that was not used before, this
            is refused, and causal masks and windows stay intervals.
        scale: the factor on Q K^T; 1 / sqrt(head_dim) if None.
        enable_gqa: whether heads_q may be a multiple of heads_kv.
        return_lse: whether to return LSE as well.

    Returns: O (batch, heads_q, seqlen_q, head_dim_v), a transposed view of a contiguous (batch, seqlen_q, heads_q,
        head_dim_v). With return_lse (O, LSE), LSE float32 (batch, heads_q, seqlen_q).

    Raises:
        NotImplementedError: score_mod has an operation that kernels cannot compute, and the message names its line; or
            a tensor that it reads by query and key requires grad, and is on a GPU.
        TypeError, ValueError: an argument is invalid, or no kernel supports it.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        arguments.tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions, expected 4: (batch, heads, seqlen, head_dim)")
    heads_q, heads_kv = query.shape[1], key.shape[1]
    if heads_q != heads_kv and not arguments.flag("enable_gqa", enable_gqa):
        raise ValueError(f"query has {heads_q} heads and key {heads_kv}, expected as many: or set enable_gqa")
    score, mask = prepared(query, key, score_mod, block_mask)
    out, lse = attend(query, key, value, score, mask, scale)
    return (out, lse) if arguments.flag("return_lse", return_lse) else out


def prepared(
    query: Tensor, key: Tensor, score_mod: ScoreMod | None, block_mask: "BlockMask | None"
) -> tuple[Score | None, dict[str, Any]]:
    """A function of scores as a Score, and a block mask as arguments of `flash_attn_func`."""
    mask: dict[str, Any] = {}
    if block_mask is not None:
        mask, rest = seen_keys(block_mask, query, key)
        score_mod = score_mod if rest is None else _within(rest, score_mod)
    return None if score_mod is None else scores.traced(score_mod, query, "s b h row k"), mask


def attend(
    query: Tensor, key: Tensor, value: Tensor, score: Score | None, mask: dict[str, Any], scale: float | None
) -> tuple[Tensor, Tensor]:
    """O and LSE of tensors whose heads are first."""
    if key.shape[0] == 1:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = attention.flash_attn_func(q, k, v, scale, score=score, return_attn_probs=True, **mask)
    return out.transpose(1, 2), lse


def seen_keys(mask: "BlockMask", query: Tensor, key: Tensor) -> "SeenKeys":
    """The keys that the rows of a block mask see, which are found once."""
    if tuple(mask.shape[2:]) != (query.shape[2], key.shape[2]):
        found = f"block_mask was created for block_mask.shape={tuple(mask.shape)}"
        raise ValueError(f"{found}, but seqlen_q is {query.shape[2]} and seqlen_k {key.shape[2]}")
    return keep_seen_keys(mask) if (known := known_seen_keys(mask)) is None else known


# A block mask as arguments of `flash_attn_func`, and a function that hides more keys.
SeenKeys = tuple[dict[str, Any], masks.MaskMod | None]


def known_seen_keys(mask: "BlockMask") -> SeenKeys | None:
    """The keys that rows of a block mask see, if the mask keeps them."""
    return getattr(mask, "_fa3_seen_keys", None)


def keep_seen_keys(mask: "BlockMask") -> SeenKeys:
    """Finds the keys that the rows of a block mask see. Outside of a trace the mask keeps them."""
    intervals, rest = masks.of_blocks(mask)
    if torch.compiler.is_compiling():
        return {"intervals": intervals}, rest
    window = masks.window_of(intervals, mask.shape[3])
    seen: SeenKeys = {"intervals": intervals} if window is None else {"window_size": window}, rest
    mask._fa3_seen_keys = seen  # type: ignore[attr-defined]
    return seen


def _within(mask_mod: masks.MaskMod, score_mod: ScoreMod | None) -> ScoreMod:
    """A function of scores that hides keys as a mask function does."""
    if isinstance(score_mod, Score):
        raise ValueError("queries see three or more intervals of keys beside a fa3.Score, expected a function")
    of_seen = score_mod or (lambda score, *at: score)
    return lambda score, *at: torch.where(mask_mod(*at), of_seen(score, *at), -math.inf)
