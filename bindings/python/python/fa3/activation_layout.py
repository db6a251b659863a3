"""The layout of a call under activation: what the extension module takes, and whether it takes it, by shapes and
strides.
"""

import functools
from typing import Any, NamedTuple

import torch

from . import _fa3, operator

# Shape and strides of a tensor.
Extents = tuple[tuple[int, ...], tuple[int, ...]]

# Addresses of the scales of Q, K and V and of V's means, where there are none.
NO_SCALES: "_fa3._Descales" = (None, None, None, None)


class Layout(NamedTuple):
    """A call's numbers as the extension module takes them, in the order (batch, seqlen, heads, head_dim)."""

    # The name of the dtype of Q, K and V.
    dtype: str
    q: Extents
    k: Extents
    v: Extents
    # O's strides.
    o: tuple[int, ...]
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
    """The layout of a call that the extension module takes, by the rules of an H100, or None. `extents` are the shapes
    and strides of Q, K and V: (batch, seqlen, heads, head_dim), or if heads are first (batch, heads, seqlen, head_dim),
    or of so many packed sequences (total, heads, head_dim).

    All this decides is whether our kernels compute a call, whatever its data. A small call is bound by the host, so
    that the answer is kept.
    """
    rank = 4 if sequences is None else 3
    shapes, seen = extents[::2], list(zip(extents[::2], extents[1::2], strict=True))
    # Torch's O lies as Q, so that it has its head_dim. Without elements there is nothing to launch.
    if any(len(shape) != rank or 0 in shape for shape in shapes) or shapes[0][-1] != shapes[2][-1]:
        return None
    q, k, v = (_of_four(x, is_heads_first) for x in seen)
    # O and gradients lie as Q, K and V do, but without gaps.
    strides = [_of_four(_like(*x), is_heads_first)[1] for x in seen]
    (batch, seqlen, heads, _), _ = q
    lse = (batch, heads, seqlen) if sequences is None else (heads, seqlen)
    layout = Layout(operator.name_of(dtype), q, k, v, strides[0], lse)
    return layout if _is_taken(layout, window, sequences, margin, strides) else None


def _like(shape: tuple[int, ...], strides: tuple[int, ...]) -> Extents:
    """Shape and strides of what torch makes like a tensor."""
    return shape, torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def _of_four(extents: Extents, is_heads_first: bool) -> Extents:
    """Shape and strides in the order (batch, seqlen, heads, head_dim). Packed sequences become a batch of 1."""
    shape, strides = extents
    if len(shape) == 3:
        return (1, *shape), (0, *strides)
    order = (0, 2, 1, 3) if is_heads_first else (0, 1, 2, 3)
    return tuple(shape[i] for i in order), tuple(strides[i] for i in order)


def _is_taken(
    layout: Layout, window: tuple[int, int, int], sequences: int | None, margin: int, strides: list[tuple[int, ...]]
) -> bool:
    """Whether the extension module takes a call, forward and backward. `strides` are those of dQ, dK and dV."""
    name, *inputs, of_o, _ = layout
    q, k, v = ((name, 0, *x) for x in inputs)
    packed: Any = None if sequences is None else (sequences, (0, 0), (None, None), (None, None))
    try:
        # A call without a stream is only checked.
        _fa3.forward(0, None, q, k, v, 0, 0, NO_SCALES, None, window, None, margin, None, None, of_o, packed)
        if name != operator.name_of(torch.float8_e4m3fn):
            dout, addresses = (*q[:3], of_o), (0, 0, None, 0, 0, 0)
            end = True, strides, packed, None, of_o
            _fa3.backward(0, None, q, k, v, dout, *addresses, None, window, None, margin, None, *end)
    except ValueError:
        return False
    return True
