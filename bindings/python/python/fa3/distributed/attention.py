"""Attention over sequences whose rows are spread over a group of ranks."""

from typing import Any, Literal, Sequence, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .. import arguments
from ..attention import flash_attn_func
from ..varlen import flash_attn_varlen_func
from . import gathered, ulysses
from .gather import Gather
from .group import Group
from .handshake import agree, compares_every_call
from .kernels import Kernels, Scores
from .layout import ZIGZAG, Layout
from .memory import memory_of
from .plan import Window, schedule
from .sharding import ends, layout_of
from .uncompiled import uncompiled

ALL_GATHER, ULYSSES = "all_gather", "ulysses"


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: Literal[False] = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: Literal[True],
    return_attn_probs: bool = False,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...


@uncompiled
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = ZIGZAG,
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` for sequences whose rows are spread over a group: each rank gives its rows of Q, K and V, as
    `shard` cuts them, and gets its rows of O. All ranks must call it, with the same shapes and options.

    O and LSE have the same bits as on one GPU if the kernel uses the same tile for a rank's keys as for all keys;
    otherwise they agree to rounding. They are differentiable in q, k, v and s_aux. Each rank has the gradient of s_aux
    from its own rows: as for other shared parameters, the gradients must be summed over the ranks.

    Arguments:
        q: (batch, rows, heads_q, head_dim) of float16 or bfloat16, or on the CPU also of float32.
        k: (batch, rows, heads_kv, head_dim).
        v: (batch, rows, heads_kv, head_dim_v).
        group: the ranks; all if None.
        layout: which rows a rank has, as in `shard`: "zigzag" or "contiguous".
        method: "all_gather" sends the keys of all other ranks to each rank. "ulysses" sends all rows of some heads to
            each rank, so that heads_kv must be a multiple of the number of ranks. None chooses the method that sends
            less.
        sm_margin: how many SMs to leave to other kernels, such as NCCL's.
        others: as in `flash_attn_func`.

    Returns: O (batch, rows, heads_q, head_dim_v). With return_lse or return_attn_probs (O, LSE), LSE float32
    (batch, heads_q, rows).

    Raises:
        ValueError: an argument is invalid, or the ranks' calls differ.
        RuntimeError: a rank did not make the call in time.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        arguments.tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} is {tuple(x.shape)}, expected (batch, rows, heads, head_dim)")
    group, of = layout_of(q.shape[1] * dist.get_world_size(group), group, layout, None)
    numbers = arguments.scores(softmax_scale, causal, window_size, 0, softcap)
    scores = Scores(numbers[0], numbers[4], sm_margin, deterministic)
    kernels = Kernels(False, scores)
    out, lse = _attention(q, k, v, s_aux, group, of, Window(*numbers[1:3]), kernels, layout, method)
    return (out, lse) if return_lse or return_attn_probs else out


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: Literal[False] = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: Literal[True],
    return_attn_probs: bool = False,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = "zigzag",
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...


@uncompiled
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    *,
    layout: str = ZIGZAG,
    method: str | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` for packed documents, each of which attends to itself alone.

    Arguments:
        q: (rows, heads_q, head_dim); k and v likewise. The rows are what `shard` returns with this cu_seqlens.
            Ranks may have different numbers of rows.
        cu_seqlens: where documents begin and end in the whole tensor, on the host: 0, then the end of each document.
        others: as in `attention`.

    Returns: O (rows, heads_q, head_dim_v). With return_lse or return_attn_probs (O, LSE), LSE float32 (heads_q, rows).

    Raises:
        TypeError: cu_seqlens is on a GPU.
        ValueError, RuntimeError: as in `attention`.
    """
    group, of = layout_of(0, group, layout, ends(cu_seqlens))
    rows = of.rows(dist.get_rank(group))
    for name, x in (("q", q), ("k", k), ("v", v)):
        arguments.tensor(name, x)
        if x.dim() != 3 or x.shape[0] != rows:
            expected = f"(rows, heads, head_dim) with the rank's {rows} rows"
            raise ValueError(f"{name} is {tuple(x.shape)}, expected {expected}")
    numbers = arguments.scores(softmax_scale, causal, window_size, 0, softcap)
    scores = Scores(numbers[0], numbers[4], sm_margin, deterministic)
    kernels = Kernels(True, scores)
    out, lse = _attention(q, k, v, s_aux, group, of, Window(*numbers[1:3]), kernels, layout, method)
    return (out, lse) if return_lse or return_attn_probs else out


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s_aux: Tensor | None,
    group: dist.ProcessGroup,
    of: Layout,
    window: Window,
    kernels: Kernels,
    layout: str,
    method: str | None,
) -> tuple[Tensor, Tensor]:
    """O and LSE by the given method, or by the method that sends fewer bytes."""
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_kv == 0 or heads_q % heads_kv or k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1]:
        given = f"q is {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
        raise ValueError(f"{given}, expected as many heads of k as of v, a divisor of those of q, and one head_dim")
    method = _method(method, heads_q, heads_kv, of.world)
    shapes = [tuple(x.shape[:-3]) + tuple(x.shape[-2:]) for x in (q, k, v)]
    sinks = None if s_aux is None else (tuple(s_aux.shape), s_aux.dtype)
    call = f"{method} {layout} {of.documents} {shapes} {q.dtype} {window} {kernels} s_aux {sinks}"
    agree(group, call)
    if method == ALL_GATHER:
        its, memory = schedule(of, dist.get_rank(group), window), memory_of(group, q.device)
        out, lse = gathered.Attention.apply(q, k, v, s_aux, Gather(Group(group), its, kernels, memory))
    else:
        out, lse = _by_heads(q, k, v, s_aux, group, of, window, kernels)
    if compares_every_call():
        # If one autograd node makes both O and LSE, the dictionary has it once, so that ranks agree once.
        reference = Group(group)
        for node, name in {lse.grad_fn: "LSE", out.grad_fn: "O"}.items():
            if node is not None:
                node.register_prehook(lambda _, name=name: agree(reference.get(), f"gradients of {name} of {call}"))
    return out, lse


def _by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s_aux: Tensor | None,
    group: dist.ProcessGroup,
    of: Layout,
    window: Window,
    kernels: Kernels,
) -> tuple[Tensor, Tensor]:
    """Computes attention of the rank's heads over all rows, between two all-to-all exchanges."""
    q, k, v = (ulysses.to_heads(x, group, of, -3, -2) for x in (q, k, v))
    rank = dist.get_rank(group)
    options: Any = dict(
        softmax_scale=kernels.scores.softmax_scale,
        window_size=window,
        softcap=kernels.scores.softcap,
        s_aux=None if s_aux is None else s_aux.chunk(of.world)[rank],
        deterministic=kernels.scores.deterministic,
        sm_margin=kernels.scores.sm_margin,
        return_attn_probs=True,
    )
    if kernels.is_packed:
        starts = torch.tensor([0, *of.documents], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        ends = starts.to(q.device)
        longest = max(of.documents, default=0)
        out, lse = flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, **options)
    else:
        out, lse = flash_attn_func(q, k, v, **options)
    return ulysses.to_rows(out, group, of, -3, -2), ulysses.to_rows(lse, group, of, -1, -2)


def _method(method: str | None, heads_q: int, heads_kv: int, world: int) -> str:
    """The given method, or the one that sends fewer bytes: K and V of all other ranks, or a share of Q, K, V and O."""
    if method not in (None, ALL_GATHER, ULYSSES):
        raise ValueError(f"method is {method!r}, expected {ALL_GATHER!r}, {ULYSSES!r} or None")
    divides = heads_kv % world == 0
    if method == ULYSSES and not divides:
        raise ValueError(f"there are {heads_kv} heads of k for {world} ranks, expected a multiple for method {ULYSSES!r}")
    if method is not None:
        return method
    # Counted in heads of a rank's rows, each rank receives 2 heads_kv from each other rank by all_gather, and
    # 2 (heads_q + heads_kv) / ranks by ulysses.
    return ULYSSES if divides and heads_q + heads_kv < heads_kv * world else ALL_GATHER
