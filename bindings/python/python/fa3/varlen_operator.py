"""The torch operators of packed sequences: `fa3::varlen_forward`, `fa3::varlen_backward`, and those that write to given
tensors.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _fa3, gradient, operator
from .sequences import Sequences, with_batch

NAMES = "q, k, v or a descale"


class Options(NamedTuple):
    """The arguments of `fa3::varlen_forward` besides q, k, v and the lists, in this order."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    softmax_scale: float | None
    window_left: int
    window_right: int
    attention_chunk: int
    softcap: float
    sm_margin: int
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    out_dtype: torch.dtype | None
    deterministic: bool
    s_aux: Tensor | None = None
    qv: Tensor | None = None

    def of_backward(self) -> tuple[int | None, int | None, float | None, int, int, int, float, int, bool]:
        """The arguments of `fa3::varlen_backward` besides tensors, in its order."""
        hints = self.max_seqlen_q, self.max_seqlen_k
        window = self.window_left, self.window_right, self.attention_chunk
        return *hints, self.softmax_scale, *window, self.softcap, self.sm_margin, self.deterministic


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    softcap: float,
    sm_margin: int,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
    qv: Tensor | None = None,
    with_lse: bool = True,
    *,
    out: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """O and, if wanted, LSE of tensors on a GPU, put on torch's current stream of their device; or of tensors on the
    CPU. O is written to `out`, if that is given. `deterministic` is for the backward pass. `table` is one that
    `make_table` has made, on a GPU.
    """
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    descales = (q_descale, k_descale, v_descale)
    operator.refuse_tangents(NAMES, *operator.given(q, k, v, *descales))
    operator.check_places(("q", "k", "v", *Sequences._fields[:4]), (q, k, v, *sequences.lists))
    check(q, k, v, sequences, *descales)
    name = operator.name_of_output(out_dtype)
    if out is None:
        o, strides = o_like(q, v, out_dtype), None
    else:
        check_out(out, q, v, out_dtype)
        o, strides = out, (0, *out.stride())
    lse = lse_like(q) if with_lse else None
    # Copies are kept until the call is over.
    device, q, k, v = q.get_device(), operator.readable(q), operator.readable(k), operator.readable(v)
    sequences = sequences.dense()
    scales = [None if x is None else operator.dense(x) for x in descales]
    of_q, of_k, of_v = (None if x is None else x.data_ptr() for x in scales)
    qv = None if qv is None else operator.beside(qv, q)
    sink = None if s_aux is None else operator.sinks(s_aux, q, q.shape[1])
    _fa3.forward(
        device,
        operator.current_stream(device),
        with_batch(operator.raw(q)),
        with_batch(operator.raw(k)),
        with_batch(operator.raw(v)),
        o.data_ptr(),
        None if lse is None else lse.data_ptr(),
        (of_q, of_k, of_v, None),
        softmax_scale,
        (window_left, window_right, attention_chunk),
        softcap or None,
        sm_margin,
        (False, None, name) if name else None,
        operator.workspace_for(q),
        strides,
        sequences.raw(),
        None if sink is None else sink.data_ptr(),
        None if table is None else (table.data_ptr(), table.shape[0]),
        None if qv is None else with_batch(operator.raw(qv)),
    )
    return o, lse


def make_table(
    q: tuple[torch.dtype, int, int, int],
    kv: tuple[int, int, int],
    sequences: Sequences,
    window: tuple[int, int, int],
    has_softcap: bool,
    sm_margin: int,
) -> Tensor:
    """The table of packed sequences on a GPU: of Q of this dtype, rows, heads and head_dim, and K and V of these rows,
    heads and head_dim_v.
    """
    dtype, rows, heads, head_dim = q
    keys, heads_kv, head_dim_v = kv
    name = operator.name_of(dtype)
    shapes = (rows, heads, head_dim), (keys, heads_kv, head_dim), (keys, heads_kv, head_dim_v)
    q_raw, k_raw, v_raw = (with_batch((name, 0, shape, (shape[1] * shape[2], shape[2], 1))) for shape in shapes)
    like = sequences.cu_seqlens_q
    device, workspace = like.get_device(), operator.workspace_for(like)
    stream, lists = operator.current_stream(device), sequences.raw()

    def make(address: int | None) -> int:
        numbers = has_softcap, sm_margin
        return _fa3.forward_table(device, stream, q_raw, k_raw, v_raw, window, *numbers, lists, address, workspace)

    table = like.new_empty(make(None))
    make(table.data_ptr())
    return table


def launch_into(*inputs: Any, o: Tensor) -> Tensor:
    """LSE; O is written to `o`."""
    operator.refuse_grad(o, *(x for x in inputs if isinstance(x, Tensor)), function="flash_attn_varlen_func")
    _, lse = launch(*inputs, out=o)
    assert lse is not None
    return lse


def launch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    *options: Any,
    **outputs: Any,
) -> tuple[Tensor, ...]:
    """Gradients as `gradient.launch` computes them, which takes these options."""
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    return gradient.launch(dout, q, k, v, o, lse, dlse, *options, sequences=sequences, **outputs)


def launch_backward_into(*inputs: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Writes dQ, dK and dV to given tensors."""
    launch_backward(*inputs, outputs=(dq, dk, dv))


def o_like(q: Tensor, v: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A new, contiguous tensor for O (total_q, heads_q, head_dim_v)."""
    total, heads, _ = q.shape
    return q.new_empty(total, heads, v.shape[2], dtype=dtype or operator.dtype_of_output(q))


def lse_like(q: Tensor) -> Tensor:
    """A new, contiguous tensor for LSE (heads_q, total_q)."""
    total, heads, _ = q.shape
    return q.new_empty(heads, total, dtype=torch.float32)


def check(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, *descales: Tensor | None) -> None:
    """Checks what the extension module does not see: ranks, lists and scales."""
    operator.check_ranks(q, k, v, packed=True)
    sequences.check()
    for name, x in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if x is not None:
            operator.check_descale(name, x, q, k, (sequences.batch, k.shape[1]))


def check_out(out: Tensor, q: Tensor, v: Tensor, dtype: torch.dtype | None) -> None:
    """Checks the tensor that O is written to. Its strides and its address the extension module checks."""
    expected = *q.shape[:2], v.shape[2]
    operator.check_out_is(out, q, expected, "(total_q, heads_q, head_dim_v)", dtype)


_LISTS = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, "
)
_ARGUMENTS = (
    f"Tensor q, Tensor k, Tensor v, {_LISTS}float? softmax_scale, SymInt window_left, SymInt window_right, "
    "SymInt attention_chunk, float softcap, SymInt sm_margin, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, ScalarType? out_dtype=None, bool deterministic=False, Tensor? s_aux=None, "
    "Tensor? qv=None"
)
operator.define("varlen_forward", _ARGUMENTS, "(Tensor o, Tensor lse)", launch)
# Not `out`: that argument torch.compile takes for contiguous only.
operator.define("varlen_forward_out", f"{_ARGUMENTS}, *, Tensor(a!) o", "Tensor lse", launch_into)
gradient.define("varlen_backward", _LISTS, launch_backward, launch_backward_into)
# `fa3::varlen_forward`.
ATTENTION = gradient.Differentiable("varlen_forward", "varlen_backward", Options, launch, launch_backward, lists=4)
