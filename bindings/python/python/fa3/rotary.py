"""Arguments of rotary embedding: tables of cosines and sines, and positions of rows."""

from typing import Any

import torch
from torch import Tensor

from . import arguments, operator

# The positions of a tensor's rows: (name, list or None, first position if there is no list, the tensor).
Positions = tuple[str, Tensor | None, int, Tensor]


def positions(name: str, given: Any) -> tuple[Tensor | None, int]:
    """A list of positions or None, and the first position, which is used without a list."""
    return (given, 0) if isinstance(given, Tensor) else (None, arguments.integer(name, given))


def check_types(cos: Any, sin: Any) -> None:
    """Checks that given tables are tensors."""
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            arguments.tensor(name, table)


def check(
    cos: Tensor | None, sin: Tensor | None, interleaved: bool, *positions: Positions, packed: bool = False
) -> None:
    """Refuses tensors that the extension module cannot check, since it gets only their addresses. Lists of positions
    are (batch, seqlen), or (total,) for packed sequences.
    """
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError("there is one of cos and sin, expected both or none")
        said = any(listed is not None or operator.differ([first], [0]) for _, listed, first, _ in positions)
        if interleaved or said:
            raise ValueError("interleaved and positions are of a rotation, which needs cos and sin")
        return
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"{name} is {table.dtype}, expected torch.float32, torch.float16 or torch.bfloat16")
    if cos.dim() != 2 or operator.differ(cos.shape, sin.shape):
        shapes = f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}"
        raise ValueError(f"{shapes}, expected both (positions, rotary_dim / 2)")
    for name, listed, _, x in positions:
        if listed is None:
            continue
        if listed.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} are {listed.dtype}, expected torch.int32 or torch.int64")
        dims, shape = ("(total,)", x.shape[:1]) if packed else ("(batch, seqlen)", x.shape[:2])
        if operator.differ(listed.shape, shape):
            raise ValueError(f"{name} are {tuple(listed.shape)}, expected {dims}, here {tuple(shape)}")


def tables(cos: Tensor | None, sin: Tensor | None) -> operator.Tensors:
    """Tables in float32, as kernels read them."""
    named = (("cos", cos), ("sin", sin))
    return {name: table.to(torch.float32) for name, table in named if table is not None}


def positions_as_read(listed: Tensor | None) -> Tensor | None:
    """A list of positions in int32, as kernels read it, or None."""
    if listed is None or listed.dtype == torch.int32:
        return listed
    # Positions that int32 cannot hold are outside every table, as are -1 and 2^31 - 1.
    return listed.clamp(-1, 2**31 - 1).to(torch.int32)
