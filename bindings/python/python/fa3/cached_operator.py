"""The torch operators of attention over a KV cache: `fa3::cached_forward`; `fa3::append_forward`, which first writes
new rows to the cache; and their variants that write O to a given tensor.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import arguments, operator, refusal
from .cache import Cache
from .new_rows import NewRows

NAMES = "q, k_cache, v_cache, qv, a descale or s_aux"
NAMES_OF_NEW = "k, v, rotary_cos or rotary_sin"
NO_GRADIENT = "requires grad, and attention over a cache has no gradients"


# The names of options that are tensors.
_TENSORS_OF_OPTIONS = ("q_descale", "k_descale", "v_descale", "s_aux", "qv", "intervals")


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
    lse_base_two: bool = False
    lse_without_sink: bool = False
    lse_empty_is_infinite: bool = False
    intervals: Tensor | None = None
    max_logits: bool = False
    score: str | None = None
    score_tables: Sequence[Tensor] | None = None


# The names of the extension module's options: the first fields of `Options`, and the last fields of `Cache`.
SCORES = " ".join((*Options._fields[:7], *Cache._fields[6:]))


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
    if out is not None:
        what = "(total_q, heads_q, head_dim_v)" if q.dim() == 3 else "(batch, seqlen_q, heads_q, head_dim_v)"
        operator.check_out_is(out, q, (*q.shape[:-1], v.shape[3]), what, options.out_dtype)
    given: operator.Tensors = {"q": q, "k": k, "v": v, **dict(zip(Cache._fields, cache.lists))}
    if any(x is not None and x.dim() == 3 for x in descales[1:]):
        given |= _checked_scales(q, k, *descales[1:])
    else:
        given |= operator.checked_descales(q, k, cache.cu_seqlens_q, *descales)
    operation = "forward"
    fields, values = operator.with_lse_form(SCORES, (*options[:7], *cache[6:]), options)
    fields, values = operator.with_score(fields, values, given, options.score, options.score_tables)
    if options.intervals is not None:
        given["intervals"] = operator.bounds(options.intervals, q)
    if new is not None:
        operator.refuse_tangents(NAMES_OF_NEW, *new.tensors)
        new.check(cache.seqused_k)
        given["k_new"], given["v_new"] = new.k, new.v
        given |= zip(NewRows._fields[2:6], new[2:6])
        operation, fields, values = "append", f"{fields} interleaved", (*values, new.rotary_interleaved)
    return operator.attend(operation, fields, values, given, options, v.shape[3], with_lse, out)


def _checked_scales(q: Tensor, k: Tensor, *descales: Tensor | None) -> operator.Tensors:
    """The scales of each row and head of K and V by the names that the extension module gives them, checked."""
    named: operator.Tensors = {}
    for name, x in zip("kv", descales, strict=True):
        if x is None or x.dtype != torch.float32 or operator.differ(x.shape, k.shape[:3]) or x.device != q.device:
            found = x if x is None else f"{x.dtype} {tuple(x.shape)} on {x.device}"
            expected = f"torch.float32 {tuple(k.shape[:3])} on {q.device}: (batch or pages, rows, heads_kv)"
            raise ValueError(f"{name}_descale is {found}, expected {expected}")
        operator.refuse_tangents(f"{name}_descale", x)
        named[f"{name}_scales"] = x.unsqueeze(-1)
    return named


def append(q: Tensor, k: Tensor, v: Tensor, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Writes new rows, the first of `inputs`, to the cache, and returns O and LSE."""
    refuse_grad(*(x for x in (q, k, v, *inputs) if isinstance(x, Tensor)))
    of_new, of_cache = len(NewRows._fields), len(NewRows._fields) + len(Cache._fields)
    new, cache = NewRows(*inputs[:of_new]), Cache(*inputs[of_new:of_cache])
    return compute((q, k, v), new, cache, Options(*inputs[of_cache:]), **options)


def attention(
    tensors: tuple[Tensor, Tensor, Tensor],
    new: NewRows | None,
    cache: Cache,
    options: Options,
    with_lse: bool,
    out: Tensor | None,
    function: str,
) -> tuple[Tensor, Tensor | None]:
    """Returns O and, if wanted, LSE. O is written to `out`, if it is given. Traces and autograd see the torch
    operators; other calls skip them. `function` is the caller's name for errors.
    """
    given_options = (getattr(options, name) for name in _TENSORS_OF_OPTIONS)
    floats = (*tensors, *operator.given(*given_options), *(options.score_tables or ()))
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
    optional = {name: getattr(options, name) for name in _TENSORS_OF_OPTIONS} | dict(zip(Cache._fields, cache.lists)) | {"out": out}
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


_ARGUMENTS = (
    "Tensor? seqused_k, Tensor? page_table, Tensor? cache_batch_idx, Tensor? leftpad_k, Tensor? cu_seqlens_q, "
    "Tensor? seqused_q, SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? softmax_scale, SymInt window_left, "
    "SymInt window_right, SymInt attention_chunk, float softcap, SymInt sm_margin, SymInt split_keys, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, ScalarType? out_dtype=None, "
    "Tensor? s_aux=None, Tensor? qv=None, bool lse_base_two=False, bool lse_without_sink=False, "
    f"bool lse_empty_is_infinite=False, Tensor? intervals=None, bool max_logits=False, {operator.OF_SCORE}"
)
_TENSORS = "Tensor q, Tensor k, Tensor v"
# `fa3::append_forward` writes to the cache, so the schema marks k and v as written.
_WRITTEN = (
    "Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor k_new, Tensor v_new, Tensor? cu_seqlens_k_new, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? rotary_seqlens, bool rotary_interleaved"
)
operator.define_attention("cached_forward", f"{_TENSORS}, {_ARGUMENTS}", launch, "flash_attn_with_kvcache")
operator.define_attention("append_forward", f"{_WRITTEN}, {_ARGUMENTS}", append, None, out="c")
refusal.register(f"{NAMES} {NO_GRADIENT}", "cached_forward")
