"""Formulas of the operators for `torch.utils.flop_counter.FlopCounterMode`. As for torch's own attention they count all
matrix products, including hidden keys. For packed sequences they are an estimate, which is exact if all sequences have
the same number of keys. In the backward pass they count the recomputed scores as well.

Torch's module imports Triton, which takes as long as all of this package. So it is not imported here: the formulas are
registered when a program imports it.
"""

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

# These modules define all operators.
from . import cached_operator, fp8, gradient, new_rows, operator, varlen_fp8, varlen_operator  # noqa: F401
from .cache import Cache

_Shape = tuple[int, ...]
_Formula = Callable[..., int]
_MODULE = "torch.utils.flop_counter"
# The formulas, with the names of the operators whose work they count.
_formulas: list[tuple[tuple[str, ...], _Formula]] = []


def _counts(*operators: str) -> Callable[[_Formula], _Formula]:
    """Makes a function the formula of these operators."""

    def keep(formula: _Formula) -> _Formula:
        _formulas.append((operators, formula))
        return formula

    return keep


@_counts("forward")
def _forward(
    q: _Shape, k: _Shape, v: _Shape, *options: Any, out_shape: tuple[_Shape, _Shape], **named: Any
) -> int:
    """Counts Q K^T, Qv V^T and P V."""
    return _forward_out(q, k, v, *options, o=out_shape[0], **named)


@_counts("fp8_forward")
def _fp8_forward(q: _Shape, k: _Shape, v: _Shape, *_: Any, out_shape: tuple[_Shape, _Shape], **__: Any) -> int:
    """Counts Q K^T and P V."""
    return _pairs(q, k) * 2 * (q[3] + out_shape[0][3])


@_counts("forward_out")
def _forward_out(q: _Shape, k: _Shape, v: _Shape, *options: Any, o: _Shape, **named: Any) -> int:
    """Counts Q K^T, Qv V^T and P V."""
    return _pairs(q, k) * 2 * (q[3] + _latent(operator.Options, options, named) + o[3])


@_counts("varlen_forward")
def _varlen_forward(
    q: _Shape, k: _Shape, v: _Shape, *given: Any, out_shape: tuple[_Shape, _Shape], **named: Any
) -> int:
    """Counts Q K^T, Qv V^T and P V."""
    return _varlen_forward_out(q, k, v, *given, o=out_shape[0], **named)


@_counts("varlen_fp8_forward")
def _varlen_fp8_forward(
    q: _Shape, k: _Shape, v: _Shape, *given: Any, out_shape: tuple[_Shape, _Shape], **__: Any
) -> int:
    """Counts Q K^T and P V."""
    # `given` has the lists, then two rotary tables and two lists of positions, then the hints.
    lists, hints = given[:2], given[6:8]
    return _pairs_of_packed(q, k, *lists, None, None, *hints) * 2 * (q[2] + out_shape[0][2])


@_counts("varlen_forward_out")
def _varlen_forward_out(q: _Shape, k: _Shape, v: _Shape, *given: Any, o: _Shape, **named: Any) -> int:
    """Q K^T, Qv V^T and P V."""
    latent = _latent(varlen_operator.Options, given[4:], named)
    return _pairs_of_packed(q, k, *given) * 2 * (q[2] + latent + o[2])


@_counts("cached_forward", "cached_forward_out")
def _cached_forward(
    q: _Shape, k: _Shape, v: _Shape, seqused_k: _Shape | None, page_table: _Shape | None, *given: Any, **named: Any
) -> int:
    """Counts Q K^T, Qv V^T and P V."""
    # The lengths are data, which are not read, so all rows of the cache count.
    keys = k[1] * (page_table[1] if page_table else 1)
    *rows, heads, head_dim = q
    latent = _latent(cached_operator.Options, given[len(Cache._fields) - 2 :], named)
    return math.prod(rows) * heads * keys * 2 * (head_dim + latent + v[3])


@_counts("append_forward", "append_forward_out")
def _append_forward(q: _Shape, k: _Shape, v: _Shape, *inputs: Any, **named: Any) -> int:
    """Counts Q K^T, Qv V^T and P V, but not the writing of new rows."""
    return _cached_forward(q, k, v, *inputs[len(new_rows.NewRows._fields) :], **named)


@_counts("backward", "backward_out", "backward_sink")
def _backward(dout: _Shape, q: _Shape, k: _Shape, *_: Any, **__: Any) -> int:
    """Counts Q K^T, dQ and dK, which have head_dim; and dP and dV, which have head_dim_v."""
    return _pairs(q, k) * 2 * (3 * q[3] + 2 * dout[3])


@_counts("varlen_backward", "varlen_backward_out", "varlen_backward_sink")
def _varlen_backward(
    dout: _Shape, q: _Shape, k: _Shape, v: _Shape, o: _Shape, lse: _Shape, dlse: _Shape | None, *lists: Any, **__: Any
) -> int:
    """Counts Q K^T, dQ and dK, which have head_dim; and dP and dV, which have head_dim_v."""
    return _pairs_of_packed(q, k, *lists) * 2 * (3 * q[2] + 2 * dout[2])


def _latent(fields: Any, options: tuple[Any, ...], named: dict[str, Any]) -> int:
    """The columns of qv among these options, given by position or by name; 0 if it is not given."""
    at = fields._fields.index("qv")
    qv = options[at] if at < len(options) else named.get("qv")
    return qv[-1] if qv else 0


def _pairs(q: _Shape, k: _Shape) -> int:
    """The number of scores: pairs of a query and a key, over all query heads."""
    batch, seqlen, heads, _ = q
    return batch * heads * seqlen * k[1]


def _pairs_of_packed(
    q: _Shape,
    k: _Shape,
    cu_seqlens_q: _Shape,
    cu_seqlens_k: _Shape,
    seqused_q: _Shape | None = None,
    seqused_k: _Shape | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *_: Any,
) -> int:
    """The estimated number of scores, as if all sequences had max_seqlen_k keys, or without that hint the mean number
    of keys. The lengths themselves are data, which are not read.
    """
    total, heads = q[:2]
    mean = k[0] // max(cu_seqlens_k[0] - 1, 1)
    return heads * total * (mean if max_seqlen_k is None else min(max(max_seqlen_k, 0), k[0]))


def _register(module: ModuleType) -> None:
    """Registers all formulas with torch's module."""
    for operators, formula in _formulas:
        module.register_flop_formula([getattr(torch.ops.fa3, name) for name in operators])(formula)


class _Finder(MetaPathFinder):
    """Lets the other finders of `sys.meta_path` find torch's module, and registers the formulas whenever it is loaded.
    It finds no other module.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register(module)

        # The loader belongs to this spec alone. It stays the module's loader, which other code may ask for its source.
        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
if _MODULE in sys.modules:
    _register(importlib.import_module(_MODULE))
