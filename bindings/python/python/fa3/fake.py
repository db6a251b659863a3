"""Calls of fake and meta tensors: results without memory, and the refusals that tensors with memory meet.

The extension module checks a call without a device, by the rules of an H100 or of the CPU. Meta tensors have those of
the CPU, which takes all that a GPU takes. Extents that only the data will tell are not checked.
"""

import contextlib

import torch
from torch import Tensor

from . import _fa3, cached_operator, combine, fp8, gradient, operator, quantize, varlen_fp8, varlen_operator
from .cache import Cache, in_batch
from .new_rows import NewRows
from .sequences import Sequences, with_batch


def _forward(
    q,
    k,
    v,
    softmax_scale,
    window_left,
    window_right,
    attention_chunk,
    softcap,
    sm_margin,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    v_transposed=False,
    out_dtype=None,
    deterministic=False,
    v_mean=None,
    s_aux=None,
    qv=None,
    intervals=None,
    out=None,
):
    if not q.device == k.device == v.device:
        operator.refuse_gpu_and_cpu(q, k, v)
    for x in (q, k, v):
        operator.name_of(x.dtype)
    name = operator.name_of_output(out_dtype)
    operator.check_ranks(q, k, v)
    head_dim_v = v.shape[2 if v_transposed else 3]
    with contextlib.suppress(operator.Unknown):
        operator.check_shapes(q, k, v, v_transposed)
        if out is not None:
            operator.check_out(out, q, k, v, v_transposed, out_dtype)
        descales = (q_descale, k_descale, v_descale, v_mean)
        given = any(x is not None for x in descales)
        block_rows = operator.check_descales(q, k, head_dim_v, *descales) if given else None
        if s_aux is not None:
            operator.check_sinks(s_aux, q, q.shape[2])
        if qv is not None:
            operator.check_qv(qv, q)
        if intervals is not None:
            operator.check_intervals(intervals, q)
        q_seen, k_seen, v_seen = operator.seen(q), operator.seen(k), operator.seen(v)
        _run(
            _fa3.forward,
            q,
            q_seen,
            k_seen,
            operator.in_rows(v_seen, k_seen[2][1]) if v_transposed else v_seen,
            0,
            None,
            tuple(None if x is None else 0 for x in descales),
            *_numbers(softmax_scale, window_left, window_right, attention_chunk, softcap, sm_margin),
            (v_transposed, block_rows, name),
            None,
            None if out is None else operator.known(out.stride()),
            None,
            None if s_aux is None else 0,
            None,
            None if qv is None else operator.seen(qv),
            None if intervals is None else (0, operator.known(intervals.shape)),
        )
    if out is not None:
        return out, operator.lse_like(q)
    batch, seqlen, heads, _ = q.shape
    o = q.new_empty(batch, seqlen, heads, head_dim_v, dtype=out_dtype or operator.dtype_of_output(q))
    return o, operator.lse_like(q)


def _forward_out(*inputs, o):
    operator.refuse_grad(o, *(x for x in inputs if isinstance(x, Tensor)))
    _, lse = _forward(*inputs, out=o)
    return lse


def _varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    window_left,
    window_right,
    attention_chunk,
    softcap,
    sm_margin,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    out_dtype=None,
    deterministic=False,
    s_aux=None,
    qv=None,
    out=None,
):
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    descales = (q_descale, k_descale, v_descale)
    _check_places(("q", "k", "v", *Sequences._fields[:4]), (q, k, v, *sequences.lists))
    name = operator.name_of_output(out_dtype)
    with contextlib.suppress(operator.Unknown):
        varlen_operator.check(q, k, v, sequences, *descales)
        if out is not None:
            varlen_operator.check_out(out, q, v, out_dtype)
        if s_aux is not None:
            operator.check_sinks(s_aux, q, q.shape[1])
        if qv is not None:
            operator.check_qv(qv, q)
        _run(
            _fa3.forward,
            q,
            *(with_batch(operator.seen(x)) for x in (q, k, v)),
            0,
            None,
            tuple(None if x is None else 0 for x in (*descales, None)),
            *_numbers(softmax_scale, window_left, window_right, attention_chunk, softcap, sm_margin),
            (False, None, name),
            None,
            None if out is None else (0, *operator.known(out.stride())),
            sequences.seen(),
            None if s_aux is None else 0,
            None,
            None if qv is None else with_batch(operator.seen(qv)),
        )
    o = varlen_operator.o_like(q, v, out_dtype) if out is None else out
    return o, varlen_operator.lse_like(q)


def _varlen_forward_out(*inputs, o):
    operator.refuse_grad(o, *(x for x in inputs if isinstance(x, Tensor)), function="flash_attn_varlen_func")
    _, lse = _varlen_forward(*inputs, out=o)
    return lse


def _cached_forward(
    q,
    k,
    v,
    seqused_k,
    page_table,
    cache_batch_idx,
    leftpad_k,
    cu_seqlens_q,
    seqused_q,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    window_left,
    window_right,
    attention_chunk,
    softcap,
    sm_margin,
    split_keys,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    out_dtype=None,
    s_aux=None,
    qv=None,
    out=None,
    new=None,
):
    lists = (seqused_k, page_table, cache_batch_idx, leftpad_k, cu_seqlens_q, seqused_q)
    cache = Cache(*lists, max_seqlen_q, max_seqlen_k)
    descales = (q_descale, k_descale, v_descale)
    _check_places(*cached_operator.named(q, k, v, cache, new))
    name = operator.name_of_output(out_dtype)
    with contextlib.suppress(operator.Unknown):
        cache.check(q, k, v)
        if new is not None:
            new.check(cache.seqused_k, cache.count(q))
        cached_operator.check_descales(q, k, cache.count(q), *descales)
        if out is not None:
            cached_operator.check_out(out, q, v, out_dtype)
        if s_aux is not None:
            operator.check_sinks(s_aux, q, q.shape[-2])
        if qv is not None:
            operator.check_qv(qv, q)
        strides = None if out is None else operator.known(out.stride())
        _run(
            _fa3.cached_forward,
            q,
            in_batch(operator.seen(q)),
            *(operator.seen(x, as_it_lies=new is not None) for x in (k, v)),
            0,
            None,
            tuple(None if x is None else 0 for x in descales),
            *_numbers(softmax_scale, window_left, window_right, attention_chunk, softcap, sm_margin),
            None,
            cache.seen(q),
            *operator.known([split_keys]),
            name,
            strides if out is None or out.dim() == 4 else (0, *strides),
            None if s_aux is None else 0,
            None if new is None else new.seen(),
            None if qv is None else in_batch(operator.seen(qv)),
        )
    o = cached_operator.o_like(q, v, out_dtype) if out is None else out
    return o, cached_operator.lse_like(q)


def _cached_forward_out(*inputs, o):
    operator.refuse_grad(o, *(x for x in inputs if isinstance(x, Tensor)), function="flash_attn_with_kvcache")
    _, lse = _cached_forward(*inputs, out=o)
    return lse


def _append_forward(q, k, v, *inputs, out=None):
    new, rest = NewRows(*inputs[:7]), inputs[7:]
    cached_operator.refuse_grad(*(x for x in (q, k, v, *inputs) if isinstance(x, Tensor)))
    return _cached_forward(q, k, v, *rest, out=out, new=new)


def _append_forward_out(*inputs, o):
    _, lse = _append_forward(*inputs, out=o)
    return lse


def _backward_out(*inputs, dq, dk, dv):
    _backward(*inputs, outputs=(dq, dk, dv))


def _backward(
    dout,
    q,
    k,
    v,
    o,
    lse,
    dlse,
    softmax_scale,
    window_left,
    window_right,
    attention_chunk,
    softcap,
    sm_margin,
    deterministic=False,
    intervals=None,
    s_aux=None,
    outputs=None,
    sequences=None,
):
    _check_places(*gradient.named((q, k, v, dout, o, lse, dlse, *(outputs or (None, None, None))), sequences))
    operator.check_ranks(q, k, v, packed=sequences is not None)
    gradients = outputs or gradient.gradients_like(q, k, v)
    with contextlib.suppress(operator.Unknown):
        gradient.check(dout, q, k, v, o, lse, dlse, outputs, sequences)
        if s_aux is not None:
            operator.check_sinks(s_aux, q, q.shape[-2])
        # One whose strides kernels cannot read is copied.
        dout = torch.empty_like(dout, memory_format=torch.contiguous_format)
        seen = [operator.seen(x) if sequences is None else with_batch(operator.seen(x)) for x in (q, k, v, dout)]
        numbers = _numbers(softmax_scale, window_left, window_right, attention_chunk, softcap, sm_margin)
        sink = None if s_aux is None else (0, 0)
        if intervals is not None:
            operator.check_intervals(intervals, q)
        bounds = None if intervals is None else (0, operator.known(intervals.shape))
        options = (deterministic, gradient.strides_of(*gradients), sequences and sequences.seen(), sink, None, bounds)
        _run(_fa3.backward, q, *seen, 0, 0, None, 0, 0, 0, *numbers, None, *options)
    return gradients if s_aux is None else (*gradients, torch.empty_like(s_aux, dtype=torch.float32))


def _varlen_backward(
    dout,
    q,
    k,
    v,
    o,
    lse,
    dlse,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    max_seqlen_q,
    max_seqlen_k,
    *options,
    **outputs,
):
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    return _backward(dout, q, k, v, o, lse, dlse, *options, sequences=sequences, **outputs)


def _varlen_backward_out(*inputs, dq, dk, dv):
    _varlen_backward(*inputs, outputs=(dq, dk, dv))


def _fp8_forward(
    q,
    k,
    v,
    cos,
    sin,
    q_positions,
    k_positions,
    interleaved,
    q_first,
    k_first,
    hadamard_seed,
    v_channels,
    softmax_scale,
    window_left,
    window_right,
    softcap,
):
    _check_places(fp8.TENSORS, (q, k, v, cos, sin, q_positions, k_positions))
    fp8.check_tensors(q, k, v)
    with contextlib.suppress(operator.Unknown):
        of_q, of_k = (q_positions, q_first), (k_positions, k_first)
        fp8.check(q, k, v, cos, sin, interleaved, of_q, of_k)
        rotation = None if cos is None else (*_tables(cos, interleaved), _positions(*of_q), _positions(*of_k))
        seed, seen = quantize.seed(hadamard_seed), (operator.seen(q), operator.seen(k), operator.seen(v))
        *numbers, _ = _numbers(softmax_scale, window_left, window_right, 0, softcap, 0)
        _run(_fa3.fp8_forward, q, *seen, 0, None, rotation, seed, v_channels, *numbers, None)
    return q.new_empty(*q.shape[:3], v.shape[3]), operator.lse_like(q)


def _varlen_fp8_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    cos,
    sin,
    q_positions,
    k_positions,
    max_seqlen_q,
    max_seqlen_k,
    interleaved,
    q_first,
    k_first,
    hadamard_seed,
    softmax_scale,
    window_left,
    window_right,
    softcap,
):
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k)
    tensors = (q, k, v, cos, sin, q_positions, k_positions, cu_seqlens_q, cu_seqlens_k)
    _check_places((*fp8.TENSORS, "cu_seqlens_q", "cu_seqlens_k"), tensors)
    fp8.check_tensors(q, k, v, packed=True)
    with contextlib.suppress(operator.Unknown):
        of_q, of_k = (q_positions, q_first), (k_positions, k_first)
        varlen_fp8.check(q, k, v, sequences, cos, sin, interleaved, of_q, of_k)
        rotation = None if cos is None else (*_tables(cos, interleaved), _positions(*of_q), _positions(*of_k))
        seed, seen = quantize.seed(hadamard_seed), (with_batch(operator.seen(x)) for x in (q, k, v))
        *numbers, _ = _numbers(softmax_scale, window_left, window_right, 0, softcap, 0)
        _run(_fa3.fp8_forward, q, *seen, 0, None, rotation, seed, False, *numbers, None, sequences.seen())
    return q.new_empty(*q.shape[:2], v.shape[2]), varlen_operator.lse_like(q)


def _quantize(
    x,
    cos,
    sin,
    positions,
    interleaved,
    first_position,
    hadamard_seed,
    block_rows,
    scale,
    transposed,
    scales_of="blocks",
    heads_per_scale=1,
):
    _check_places(quantize.TENSORS, (x, cos, sin, positions))
    quantize.check_x(x)
    scaling = (block_rows, scale, scales_of, heads_per_scale)
    with contextlib.suppress(operator.Unknown):
        quantize.check(x, cos, sin, positions, interleaved, first_position, *scaling)
        rotation = None if cos is None else (*_tables(cos, interleaved), *_positions(positions, first_position))
        seed = quantize.seed(hadamard_seed)
        _run(_fa3.quantize, x, operator.seen(x), 0, 0, rotation, seed, *quantize.sharing(*scaling), transposed, None)
    return quantize.codes_like(x, transposed), quantize.scales_like(x, *scaling)


def _quantize_channels(x, transposed):
    quantize.check_x(x)
    with contextlib.suppress(operator.Unknown):
        _run(_fa3.quantize_channels, x, operator.seen(x), 0, 0, 0, transposed, None)
    return quantize.codes_like(x, transposed), quantize.channels_like(x), quantize.channels_like(x)


def _combine(out_partial, lse_partial, out_dtype=None, out=None):
    _check_places(("out_partial", "lse_partial"), (out_partial, lse_partial))
    with contextlib.suppress(operator.Unknown):
        combine.check(out_partial, lse_partial, out, out_dtype)
        o = combine.o_like(out_partial, out_dtype) if out is None else out
        others = (operator.seen(x, as_it_lies=True) for x in (lse_partial, o, combine.lse_like(lse_partial)))
        _run(_fa3.combine, out_partial, *combine.seen(operator.seen(out_partial), *others), None)
    o = combine.o_like(out_partial, out_dtype) if out is None else out
    return o, combine.lse_like(lse_partial)


def _combine_out(*inputs, o):
    operator.refuse_grad(o, *(x for x in inputs if isinstance(x, Tensor)), function="flash_attn_combine")
    _, lse = _combine(*inputs, out=o)
    return lse


def _check_places(names, tensors) -> None:
    """Refuses tensors of several devices."""
    for name, x in zip(names, tensors, strict=True):
        if x is not None and x.device != tensors[0].device:
            operator.refuse_place(names[0], tensors[0], name, x)


def _tables(cos: Tensor, interleaved: bool) -> tuple[int, int, int, int, bool]:
    """Tables without addresses, as the extension module takes them."""
    rows, pairs = operator.known(cos.shape)
    return 0, 0, rows, 2 * pairs, interleaved


def _positions(listed: Tensor | None, first: int) -> tuple[int | None, int]:
    """Positions without an address, as the extension module takes them."""
    [first] = operator.known([first])
    return None if listed is None else 0, first


def _numbers(softmax_scale, window_left, window_right, attention_chunk, softcap, sm_margin) -> tuple:
    """The numbers of attention as the extension module takes them."""
    numbers = [softmax_scale, window_left, window_right, attention_chunk, softcap, sm_margin]
    scale, left, right, chunk, softcap, margin = operator.known(numbers)
    return scale, (left, right, chunk), softcap or None, margin


def _run(function, like: Tensor, *arguments) -> None:
    """Lets a function of the extension module check a call, for the kind of device that a tensor is on."""
    function(0 if like.is_cuda else -1, None, *arguments)


for _name, _function in (
    ("forward", _forward),
    ("forward_out", _forward_out),
    ("backward", _backward),
    ("backward_out", _backward_out),
    ("backward_sink", gradient.by_names("backward_sink", _backward)),
    ("fp8_forward", _fp8_forward),
    ("varlen_fp8_forward", _varlen_fp8_forward),
    ("varlen_forward", _varlen_forward),
    ("varlen_forward_out", _varlen_forward_out),
    ("cached_forward", _cached_forward),
    ("cached_forward_out", _cached_forward_out),
    ("append_forward", _append_forward),
    ("append_forward_out", _append_forward_out),
    ("varlen_backward", _varlen_backward),
    ("varlen_backward_out", _varlen_backward_out),
    ("varlen_backward_sink", gradient.by_names("varlen_backward_sink", _varlen_backward)),
    ("quantize", _quantize),
    ("quantize_channels", _quantize_channels),
    ("combine", _combine),
    ("combine_out", _combine_out),
):
    torch.library.register_fake(f"fa3::{_name}", _function, lib=operator.library)
