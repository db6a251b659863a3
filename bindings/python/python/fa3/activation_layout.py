"""The layout of a call under `fa3.activate()`: shapes and strides for the extension module, and whether the module
supports them.
"""

import functools
from typing import Any, NamedTuple

import torch

from . import _fa3

# The shape and the strides of a tensor.
Extents = tuple[tuple[int, ...], tuple[int, ...]]


class Layout(NamedTuple):
    """A call's shapes and strides for the extension module, in the order (batch, seqlen, heads, head_dim)."""

    # The dtype of Q, K and V.
    dtype: torch.dtype
    q: Extents
    k: Extents
    v: Extents
    o: Extents
    # LSE's shape.
    lse: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def layout_of(
    dtype: torch.dtype,
    window: tuple[int, int, int],
    sequences: int | None,
    margin: int,
    is_heads_first: bool,
    *extents: tuple[int, ...],
) -> Layout | None:
    """The layout of a call, or None if the extension module refuses the call by the rules of an H100. `extents` are the
    shapes and strides of Q, K and V: (batch, seqlen, heads, head_dim), or if heads are first (batch, heads, seqlen,
    head_dim), or (total, heads, head_dim) of `sequences` packed sequences.

    So the choice of our kernels depends on no data. The result is cached, because the host limits the speed of a small
    call.
    """
    rank = 4 if sequences is None else 3
    shapes, seen = extents[::2], list(zip(extents[::2], extents[1::2], strict=True))
    # Torch's O has Q's layout, so V must have Q's head_dim. If a tensor has no elements, there is nothing to launch.
    if any(len(shape) != rank or 0 in shape for shape in shapes) or shapes[0][-1] != shapes[2][-1]:
        return None
    q, k, v = (_in_order(x, is_heads_first) for x in seen)
    # O has the layout of Q, and the gradients have the layouts of Q, K and V; all of them without gaps.
    outputs = [_in_order(_like(*x), is_heads_first) for x in seen]
    *batch, seqlen, heads, _ = q[0]
    layout = Layout(dtype, q, k, v, outputs[0], (*batch, heads, seqlen))
    return layout if _is_taken(layout, window, sequences, margin, outputs) else None


def _like(shape: tuple[int, ...], strides: tuple[int, ...]) -> Extents:
    """The shape and strides of torch.empty_like."""
    return shape, torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def _in_order(extents: Extents, is_heads_first: bool) -> Extents:
    """The shape and strides in the order (batch, seqlen, heads, head_dim), or (total, heads, head_dim)."""
    if not is_heads_first:
        return extents
    shape, strides = (tuple(x[i] for i in (0, 2, 1, 3)) for x in extents)
    return shape, strides


def _is_taken(
    layout: Layout, window: tuple[int, int, int], sequences: int | None, margin: int, outputs: list[Extents]
) -> bool:
    """Whether the extension module supports a call, forward and backward. `outputs` are dQ, dK and dV."""
    dtype, q, k, v, o, of_lse = layout
    is_e4m3 = dtype == torch.float8_e4m3fn
    named = {"q": q, "k": k, "v": v}
    tensors: dict[str, Any] = {x: (dtype, 0, *extents) for x, extents in named.items()}
    tensors["o"] = torch.bfloat16 if is_e4m3 else dtype, 0, *o
    if sequences is not None:
        tensors |= {x: (torch.int32, 0, (sequences + 1,), (1,)) for x in ("cu_seqlens_q", "cu_seqlens_k")}
    options = {"window": window, "sm_margin": margin}
    try:
        # A call without a stream is only checked.
        _fa3.run(_fa3.Operation("forward", **options), 0, None, tensors, None)
        if not is_e4m3:
            gradients = dict(zip(("dq", "dk", "dv"), outputs), dout=o)
            tensors |= {x: (dtype, 0, *extents) for x, extents in gradients.items()}
            backward = _fa3.Operation("backward", **options, deterministic=True)
            _fa3.run(backward, 0, None, tensors, None)
    except ValueError:
        return False
    return True
