"""Tensors that a function of scores reads, and that require grad: whether kernels compute their gradients."""

from typing import Any

import torch

from . import _fa3, operator

# A trace would ignore functools.cache around the function below, and go on into it.
_REFUSALS: dict[tuple[str, tuple[int, ...], tuple[int, ...], bool], str | None] = {}


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def refused_gradient(
    text: str, axes: tuple[int, ...], learned: tuple[int, ...], are_packed: bool = False
) -> str | None:
    """The reason for which kernels compute no gradients of the tables `learned` of a text, if there is one. Each table
    has a number of axes. Sequences may be packed.
    """
    of = text, axes, learned, are_packed
    if of not in _REFUSALS:
        _REFUSALS[of] = _refused(*of)
    return _REFUSALS[of]


def _refused(text: str, axes: tuple[int, ...], learned: tuple[int, ...], are_packed: bool) -> str | None:
    # One row and one key, and large tables: no index of the first row and key leads beyond them.
    first = 1 if are_packed else 0
    of_rows = torch.bfloat16, 0, (1, 1, 1, 64)[first:], (64, 64, 64, 1)[first:]
    tensors: dict[str, Any] = dict.fromkeys(("q", "k", "v", "o", "dout", "dq", "dk", "dv"), of_rows)
    tensors["lse"] = torch.float32, 0, (1, 1, 1)[first:], (1, 1, 1)[first:]
    if are_packed:
        tensors |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), (torch.int32, 0, (2,), (1,)))
    extents = [1 << 30 // n for n in axes]
    table = [
        (torch.float32, 0, (extent,) * n, tuple(extent**i for i in reversed(range(n))))
        for n, extent in zip(axes, extents)
    ]
    tensors |= {f"score_table{i}": x for i, x in enumerate(table)}
    tensors |= {f"score_dtable{i}": table[i] for i in learned}
    names = f"{operator.SCORES} deterministic score"
    try:
        _fa3.run(operator.made("backward", names, None, -1, -1, 0, 0.0, 0, False, text), 0, None, tensors, None)
    except ValueError as refusal:
        return str(refusal)
    return None
