"""The torch operators of attention over a cache of keys and values: `fa3::cached_forward`, `fa3::append_forward`, which
writes new rows to the cache before, and those that write O to a given tensor.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _fa3, arguments, operator, refusal
from .cache import Cache, in_batch
from .new_rows import NAMES as NAMES_OF_ROWS
from .new_rows import NewRows

NAMES = "q, k_cache, v_cache, qv, a descale or s_aux"
NAMES_OF_NEW = "k, v, rotary_cos or rotary_sin"
NO_GRADIENT = "requires grad, and attention over a cache has no gradients"


# Options that are tensors of numbers.
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
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    out_dtype: torch.dtype | None
    s_aux: Tensor | None
    qv: Tensor | None


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor | None,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    cu_seqlens_q: Tensor | None,
    seqused_q: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    softcap: float,
    sm_margin: int,
    split_keys: int,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    s_aux: Tensor | None = None,
    qv: Tensor | None = None,
    *,
    with_lse: bool = True,
    out: Tensor | None = None,
    new: NewRows | None = None,
) -> tuple[Tensor, Tensor | None]:
    """O and, if wanted, LSE of tensors on a GPU, put on torch's current stream of their device; or of tensors on the
    CPU. O is written to `out`, if that is given. New rows are written to the cache before.
    """
    lists = (seqused_k, page_table, cache_batch_idx, leftpad_k, cu_seqlens_q, seqused_q)
    cache = Cache(*lists, max_seqlen_q, max_seqlen_k)
    operator.refuse_tangents(NAMES, q, k, v)
    operator.check_places(*named(q, k, v, cache, new))
    cache.check(q, k, v)
    if new is not None:
        operator.refuse_tangents(NAMES_OF_NEW, *new.tensors)
        new.check(seqused_k, cache.count(q))
        new = new.dense()
    descales: tuple[int | None, int | None, int | None] = (None, None, None)
    if not (q_descale is None and k_descale is None and v_descale is None):
        given = (q_descale, k_descale, v_descale)
        operator.refuse_tangents(NAMES, *operator.given(*given))
        check_descales(q, k, cache.count(q), *given)
        # Copies are kept until the launch.
        scales = [None if x is None else operator.dense(x) for x in given]
        of_q, of_k, of_v = (None if x is None else x.data_ptr() for x in scales)
        descales = of_q, of_k, of_v
    name = operator.name_of_output(out_dtype)
    if out is None:
        o, strides = o_like(q, v, out_dtype), None
    else:
        check_out(out, q, v, out_dtype)
        o, strides = out, out.stride() if out.dim() == 4 else (0, *out.stride())
    lse = lse_like(q) if with_lse else None
    # Copies of what cannot be read. A cache that is written must not be one.
    device, q = q.get_device(), operator.readable(q)
    if new is None:
        k, v = operator.readable(k), operator.readable(v)
    cache = cache.dense()
    qv = None if qv is None else operator.beside(qv, q)
    sink = None if s_aux is None else operator.sinks(s_aux, q, q.shape[-2])
    _fa3.cached_forward(
        device,
        operator.current_stream(device),
        in_batch(operator.raw(q)),
        operator.raw(k),
        operator.raw(v),
        o.data_ptr(),
        None if lse is None else lse.data_ptr(),
        descales,
        softmax_scale,
        (window_left, window_right, attention_chunk),
        softcap or None,
        sm_margin,
        operator.workspace_for(q),
        cache.raw(cache.count(q)),
        split_keys,
        name,
        strides,
        None if sink is None else sink.data_ptr(),
        None if new is None else new.raw(),
        None if qv is None else in_batch(operator.raw(qv)),
    )
    return o, lse


def named(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, new: NewRows | None
) -> tuple[tuple[str, ...], tuple[Tensor | None, ...]]:
    """Names of the operators' tensors, and the tensors that there are."""
    if new is None:
        return ("q", "k", "v", *Cache._fields[:6]), (q, k, v, *cache.lists)
    return ("q", "k", "v", *Cache._fields[:6], *NAMES_OF_ROWS), (q, k, v, *cache.lists, *new[:6])


def launch_into(*inputs: Any, o: Tensor) -> Tensor:
    """LSE; O is written to `o`."""
    operator.refuse_grad(o, *(x for x in inputs if isinstance(x, Tensor)), function="flash_attn_with_kvcache")
    _, lse = launch(*inputs, out=o)
    assert lse is not None
    return lse


def append(q: Tensor, k: Tensor, v: Tensor, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """O and LSE of a cache to which new rows are written before, the first of these inputs."""
    refuse_grad(*(x for x in (q, k, v, *inputs) if isinstance(x, Tensor)))
    of_new = len(NewRows._fields)
    return launch(q, k, v, *inputs[of_new:], **options, new=NewRows(*inputs[:of_new]))


def append_into(*inputs: Any, o: Tensor) -> Tensor:
    """LSE; O is written to `o`."""
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
    """O and LSE, or None where nobody wants it and it is not computed, by whichever way the tensors need. O is `out`,
    if that is given to the function of this name.
    """
    given_options = (getattr(options, name) for name in _FLOATS)
    floats = (*tensors, *operator.given(*given_options))
    given = (*floats, *operator.given(*cache.lists, out), *(new.tensors if new else ()))
    inputs: tuple[Any, ...] = (*tensors, *(new or ()), *cache, *options)
    is_plain = operator.is_plain(*given)
    if not is_plain:
        _check_types(tensors, new, cache, options, out)
    if new is not None:
        refuse_grad(*given)
        plain, traced, traced_into = append, torch.ops.fa3.append_forward, torch.ops.fa3.append_forward_out
        if operator.is_transformed():
            raise NotImplementedError("k and v are not supported inside of torch.func's transforms")
    else:
        plain, traced, traced_into = launch, torch.ops.fa3.cached_forward, torch.ops.fa3.cached_forward_out
        if out is None and not (is_plain and not operator.needs_grad(*floats)):
            refusal.derivatives(NAMES, NO_GRADIENT, *floats)
            return traced(*inputs)
    if out is not None:
        operator.refuse_grad(out, *floats, function=function)
    if is_plain:
        results = plain(*inputs, with_lse=with_lse, out=out)
        operator.tell_autograd(*operator.given(out), *(tensors[1:] if new is not None else ()))
        return results
    if out is None:
        return traced(*inputs)
    if operator.is_transformed():
        raise NotImplementedError("out is not supported inside of torch.func's transforms")
    return out, traced_into(*inputs, o=out)


def _check_types(
    tensors: tuple[Any, ...], new: NewRows | None, cache: Cache, options: Options, out: Any
) -> None:
    """Refuses what is no tensor."""
    for name, x in zip(("q", "k_cache", "v_cache"), tensors):
        arguments.tensor(name, x)
    optional = {name: getattr(options, name) for name in _FLOATS} | dict(zip(Cache._fields, cache.lists)) | {"out": out}
    if new is not None:
        optional |= dict(zip(NewRows._fields[:6], new))
    for name, x in optional.items():
        if x is not None:
            arguments.tensor(name, x)


def refuse_grad(*tensors: Tensor) -> None:
    """Refuses tensors of which autograd wants to know where the cache is written, which has no gradient."""
    if operator.needs_grad(*tensors):
        sentence = "appending k and v to a cache has no gradients, but one of the arguments requires grad"
        raise NotImplementedError(sentence)


def o_like(q: Tensor, v: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A new, contiguous tensor for O: of q's shape, but with v's columns."""
    # Torch reads extents faster one by one than from a tuple.
    return q.new_empty(*q.shape[:-1], v.shape[3], dtype=dtype or operator.dtype_of_output(q))


def lse_like(q: Tensor) -> Tensor:
    """A new, contiguous tensor for LSE: (batch, heads_q, seqlen_q), or (heads_q, total_q) of packed sequences."""
    *batch, rows, heads, _ = q.shape
    return q.new_empty(*batch, heads, rows, dtype=torch.float32)


def check_descales(q: Tensor, k: Tensor, count: int, *descales: Tensor | None) -> None:
    """Scales are of e4m3, one for each sequence and each head of K and V."""
    for name, x in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if x is not None:
            operator.check_descale(name, x, q, k, (count, k.shape[2]))


def check_out(out: Tensor, q: Tensor, v: Tensor, dtype: torch.dtype | None) -> None:
    """Checks the tensor that O is written to. Its strides and its address the extension module checks."""
    what = "(total_q, heads_q, head_dim_v)" if q.dim() == 3 else "(batch, seqlen_q, heads_q, head_dim_v)"
    operator.check_out_is(out, q, (*q.shape[:-1], v.shape[3]), what, dtype)


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
# The cache is written.
_WRITTEN = (
    "Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor k_new, Tensor v_new, Tensor? cu_seqlens_k_new, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? rotary_seqlens, bool rotary_interleaved"
)
for _name, _arguments, _launch, _launch_into, _o in (
    ("cached_forward", f"{_TENSORS}, {_ARGUMENTS}", launch, launch_into, "Tensor(a!) o"),
    ("append_forward", f"{_WRITTEN}, {_ARGUMENTS}", append, append_into, "Tensor(c!) o"),
):
    operator.define(_name, _arguments, "(Tensor o, Tensor lse)", _launch)
    # Not `out`: that argument torch.compile takes for contiguous only.
    operator.define(f"{_name}_out", f"{_arguments}, *, {_o}", "Tensor lse", _launch_into)
torch.library.register_autograd("fa3::cached_forward", _backward, setup_context=_save, lib=operator.library)
