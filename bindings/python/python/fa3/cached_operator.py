"""The torch operators of attention over a KV cache: `fa3::cached_forward`; `fa3::append_forward`, which first writes
new rows to the cache; and their variants that write O to a given tensor.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import arguments, operator, refusal
from .cache import Cache, dense_rows
from .new_rows import NewRows

NAMES = "q, k_cache, v_cache, qv, a descale or s_aux"
NAMES_OF_NEW = "k, v, rotary_cos or rotary_sin"
NO_GRADIENT = "requires grad, and attention over a cache has no gradients"


# The names of options that are tensors.
_FLOATS = ("q_descale", "k_descale", "v_descale", "s_aux", "qv")


class Options(NamedTuple):
    """The arguments of `fa3::cached_forward` besides q, k, v and the sequences, in this order."""

    softmax_scale: float | None
    window_left: int
    window_right: int
    attention_chunk: int
    softcap: float
    sm_margin: int
    split_keys: int
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    s_aux: Tensor | None = None
    qv: Tensor | None = None


def launch(
    q: Tensor, k: Tensor, v: Tensor, *inputs: Any, out: Tensor | None = None, **named: Any
) -> tuple[Tensor, Tensor | None]:
    """Calls `compute` with the arguments of `fa3::cached_forward`."""
    of_cache = len(Cache._fields)
    cache, options = Cache(*inputs[:of_cache]), Options(*inputs[of_cache:], **named)
    return compute((q, k, v), None, cache, options, out=out)


def compute(
    tensors: tuple[Tensor, Tensor, Tensor],
    new: NewRows | None,
    cache: Cache,
    options: Options,
    with_lse: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """O and, if wanted, LSE, as in `operator.compute`. New rows are first written to the cache."""
    q, k, v = tensors
    descales = options.q_descale, options.k_descale, options.v_descale
    operator.refuse_tangents(NAMES, q, k, v, *operator.given(*descales))
    cache.check(q, k, v)
    count = cache.count(q)
    if out is not None:
        what = "(total_q, heads_q, head_dim_v)" if q.dim() == 3 else "(batch, seqlen_q, heads_q, head_dim_v)"
        operator.check_out_is(out, q, (*q.shape[:-1], v.shape[3]), what, options.out_dtype)
    dense = operator.checked_descales(q, k, count, *descales)
    numbers = operator.scores(options)
    numbers["split_keys"] = options.split_keys
    numbers["max_seqlen_q"], numbers["max_seqlen_k"] = cache.max_seqlen_q, cache.max_seqlen_k
    for name in ("seqused_k", "cache_batch_idx", "leftpad_k", "cu_seqlens_q", "seqused_q"):
        dense[name] = getattr(cache, name)
    inputs: operator.Tensors = {"q": q}
    lying: operator.Tensors = {"page_table": dense_rows(cache.page_table)}
    # A cache that is written must not be replaced by a copy.
    written = inputs if new is None else lying
    written["k"], written["v"] = k, v
    if new is not None:
        operator.refuse_tangents(NAMES_OF_NEW, *new.tensors)
        new.check(cache.seqused_k, count)
        inputs["k_new"], inputs["v_new"] = new.k, new.v
        dense["cu_seqlens_k_new"] = new.cu_seqlens_k_new
        if new.rotary_cos is not None:
            dense["rotary_seqlens"] = new.rotary_seqlens
            dense["rotary_cos"], dense["rotary_sin"] = new.rotary_cos, new.rotary_sin
        numbers["interleaved"] = new.rotary_interleaved
    operation = "forward" if new is None else "append"
    return operator.attend(operation, inputs, options, numbers, dense, lying, v.shape[3], with_lse, out)


def launch_into(*inputs: Any, o: Tensor) -> Tensor:
    """Returns LSE, and writes O to `o`."""
    operator.refuse_grad(o, *(x for x in inputs if isinstance(x, Tensor)), function="flash_attn_with_kvcache")
    _, lse = launch(*inputs, out=o)
    assert lse is not None
    return lse


def append(q: Tensor, k: Tensor, v: Tensor, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Writes new rows, the first of `inputs`, to the cache, and returns O and LSE."""
    refuse_grad(*(x for x in (q, k, v, *inputs) if isinstance(x, Tensor)))
    of_new, of_cache = len(NewRows._fields), len(NewRows._fields) + len(Cache._fields)
    new, cache = NewRows(*inputs[:of_new]), Cache(*inputs[of_new:of_cache])
    return compute((q, k, v), new, cache, Options(*inputs[of_cache:]), **options)


def append_into(*inputs: Any, o: Tensor) -> Tensor:
    """Returns LSE, and writes O to `o`."""
    _, lse = append(*inputs, out=o)
    assert lse is not None
    return lse


def attention(
    tensors: tuple[Tensor, Tensor, Tensor],
    new: NewRows | None,
    cache: Cache,
    options: Options,
    with_lse: bool,
    out: Tensor | None,
    function: str,
) -> tuple[Tensor, Tensor | None]:
    """Returns O and, if wanted, LSE: computed into `out`, by the operators for traces, or directly. `function` is the
    caller's name for errors.
    """
    given_options = (getattr(options, name) for name in _FLOATS)
    floats = (*tensors, *operator.given(*given_options))
    given = (*floats, *operator.given(*cache.lists, out), *(new.tensors if new else ()))
    is_plain = operator.is_plain(*given)
    if not is_plain:
        _check_types(tensors, new, cache, options, out)
    if new is not None:
        refuse_grad(*given)
        traced, traced_into = torch.ops.fa3.append_forward, torch.ops.fa3.append_forward_out
        if operator.is_transformed():
            raise NotImplementedError("k and v are not supported inside of torch.func's transforms")
    else:
        traced, traced_into = torch.ops.fa3.cached_forward, torch.ops.fa3.cached_forward_out
        if out is None and not (is_plain and not operator.needs_grad(*floats)):
            refusal.derivatives(NAMES, NO_GRADIENT, *floats)
            return traced(*tensors, *cache, *options)
    if out is not None:
        operator.refuse_grad(out, *floats, function=function)
    if is_plain:
        results = compute(tensors, new, cache, options, with_lse, out)
        operator.tell_autograd(*operator.given(out), *(tensors[1:] if new is not None else ()))
        return results
    inputs: tuple[Any, ...] = (*tensors, *(new or ()), *cache, *options)
    if out is None:
        return traced(*inputs)
    if operator.is_transformed():
        raise NotImplementedError("out is not supported inside of torch.func's transforms")
    return out, traced_into(*inputs, o=out)


def _check_types(
    tensors: tuple[Any, ...], new: NewRows | None, cache: Cache, options: Options, out: Any
) -> None:
    """Refuses arguments that are not tensors."""
    for name, x in zip(("q", "k_cache", "v_cache"), tensors):
        arguments.tensor(name, x)
    optional = {name: getattr(options, name) for name in _FLOATS} | dict(zip(Cache._fields, cache.lists)) | {"out": out}
    if new is not None:
        optional |= dict(zip(NewRows._fields[:6], new))
    for name, x in optional.items():
        if x is not None:
            arguments.tensor(name, x)


def refuse_grad(*tensors: Tensor) -> None:
    """Refuses tensors whose gradients autograd would compute: writing to the cache has no gradient."""
    if operator.needs_grad(*tensors):
        sentence = "appending k and v to a cache has no gradients, but one of the arguments requires grad"
        raise NotImplementedError(sentence)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    refusal.save(ctx, inputs)


def _backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    return refusal.gradients(ctx, f"{NAMES} {NO_GRADIENT}", *given)


_ARGUMENTS = (
    "Tensor? seqused_k, Tensor? page_table, Tensor? cache_batch_idx, Tensor? leftpad_k, Tensor? cu_seqlens_q, "
    "Tensor? seqused_q, SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? softmax_scale, SymInt window_left, "
    "SymInt window_right, SymInt attention_chunk, float softcap, SymInt sm_margin, SymInt split_keys, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, ScalarType? out_dtype=None, "
    "Tensor? s_aux=None, Tensor? qv=None"
)
_TENSORS = "Tensor q, Tensor k, Tensor v"
# The operator writes to the cache.
_WRITTEN = (
    "Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor k_new, Tensor v_new, Tensor? cu_seqlens_k_new, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? rotary_seqlens, bool rotary_interleaved"
)
for _name, _arguments, _launch, _launch_into, _o in (
    ("cached_forward", f"{_TENSORS}, {_ARGUMENTS}", launch, launch_into, "Tensor(a!) o"),
    ("append_forward", f"{_WRITTEN}, {_ARGUMENTS}", append, append_into, "Tensor(c!) o"),
):
    operator.define(_name, _arguments, "(Tensor o, Tensor lse)", _launch)
    # Not named `out`: torch.compile would assume that it is contiguous.
    operator.define(f"{_name}_out", f"{_arguments}, *, {_o}", "Tensor lse", _launch_into)
torch.library.register_autograd("fa3::cached_forward", _backward, setup_context=_save, lib=operator.library)
