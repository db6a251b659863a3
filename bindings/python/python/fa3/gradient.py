"""The gradients of attention: the torch operators `fa3::backward` and `fa3::backward_out`, and autograd's part of
`fa3::forward`.
"""

from typing import Any

import torch
from torch import Tensor

from . import _fa3, operator, refusal
from .operator import Options


def asks_for_same_bits() -> bool:
    """Whether torch's mode asks for algorithms that give the same bits in every run."""
    return torch.are_deterministic_algorithms_enabled()


def launch(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
    deterministic: bool = False,
    *,
    outputs: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of tensors on a GPU, put on torch's current stream of their device; or of tensors on the CPU. They
    are written to `outputs`, if these are given. As for torch's own operators, its mode of deterministic algorithms
    counts as it is now.
    """
    given = _given(dout, q, k, v, o, lse, dlse, *(outputs or ()))
    operator.refuse_tangents("a tensor of the backward pass", *given)
    device = q.get_device()
    if not all(x.is_cuda and x.get_device() == device for x in given) and not all(x.is_cpu for x in given):
        places = ", ".join(str(x.device) for x in given)
        raise ValueError(f"tensors are on {places}, expected one CUDA device or the CPU")
    check(dout, q, k, v, o, lse, dlse, outputs)
    q, k, v = operator.aligned(q), operator.aligned(k), operator.aligned(v)
    # Copies are kept until the launch. Their memory may be used again after it, in the order of the stream.
    dout, o, lse = _readable(dout), operator.dense(o), operator.dense(lse)
    dlse = None if dlse is None else operator.dense(dlse)
    dq, dk, dv = outputs or gradients_like(q, k, v)
    _fa3.backward(
        device,
        operator.current_stream(device),
        operator.raw(q),
        operator.raw(k),
        operator.raw(v),
        operator.raw(dout),
        o.data_ptr(),
        lse.data_ptr(),
        None if dlse is None else dlse.data_ptr(),
        dq.data_ptr(),
        dk.data_ptr(),
        dv.data_ptr(),
        softmax_scale,
        (window_left, window_right),
        softcap or None,
        sm_margin,
        operator.workspace_for(q),
        deterministic or asks_for_same_bits(),
        strides_of(dq, dk, dv),
    )
    return dq, dk, dv


def launch_into(*inputs: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Writes dQ, dK and dV to given tensors."""
    launch(*inputs, outputs=(dq, dk, dv))


def strides_of(*tensors: Tensor) -> list[tuple[int, ...] | None]:
    """The strides of each tensor that is not contiguous, as the extension module takes them."""
    return [None if x.is_contiguous() else operator.known(x.stride()) for x in tensors]


def check(dout, q, k, v, o, lse, dlse, outputs=None) -> None:
    """Refuses what the extension module does not see, since it is given addresses."""
    operator.check_ranks(q, k, v)
    batch, seqlen, heads, _ = q.shape
    of_o = (q.dtype, (batch, seqlen, heads, v.shape[3]), "(batch, seqlen_q, heads_q, head_dim_v)")
    of_lse = (torch.float32, (batch, heads, seqlen), "(batch, heads_q, seqlen_q)")
    for name, x, (dtype, shape, what) in (("dout", dout, of_o), ("o", o, of_o), ("lse", lse, of_lse), ("dlse", dlse, of_lse)):
        if x is not None and (x.dtype != dtype or operator.known(x.shape) != operator.known(shape)):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected {dtype} {shape}: {what}")
    for name, x, like in zip(("dq", "dk", "dv"), outputs or (), (q, k, v)):
        if x.dtype != like.dtype or operator.known(x.shape) != operator.known(like.shape):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected {like.dtype} {tuple(like.shape)}")


def _readable(dout: Tensor) -> Tensor:
    """The tensor itself if kernels can read its strides and its address, or else a copy."""
    *outer, last = dout.stride()
    if last != 1 or dout.data_ptr() % 16 != 0:
        return operator.dense(dout)
    for extent, stride in zip(dout.shape, outer):
        if extent > 1 and stride % 8 != 0:
            return operator.dense(dout)
    return dout


def gradients_like(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """New tensors for dQ, dK and dV: with heads outside rows where the tensor lies so, else contiguous."""
    return _gradient_like(q), _gradient_like(k), _gradient_like(v)


def _gradient_like(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        heads_first = x.transpose(1, 2)
        if heads_first.is_contiguous():
            return torch.empty_like(heads_first, memory_format=torch.contiguous_format).transpose(1, 2)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _save(ctx, inputs, output) -> None:
    """Keeps the parts of the forward pass that the backward pass needs. A gradient that nobody has is None there."""
    q, k, v, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.is_float8 = q.dtype == torch.float8_e4m3fn
    if ctx.is_float8:
        return refusal.save(ctx, inputs)
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = Options(*options).of_backward()


def _backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the forward pass's arguments."""
    without_gradient = (None,) * len(Options._fields)
    if dout is None and dlse is None:
        return (None, None, None, *without_gradient)
    if ctx.is_float8:
        return refusal.gradients(ctx, f"q is {torch.float8_e4m3fn}, for which attention has no gradients", dout, dlse)
    q, k, v, o, lse = ctx.saved_tensors
    if dout is None:
        # One row of zeros for all.
        dout = o.new_zeros(o.shape[3]).expand(o.shape)
    tensors = (dout, q, k, v, o, lse, dlse)
    if operator.is_plain(*_given(*tensors)) and not operator.needs_grad(*_given(*tensors)):
        gradients = launch(*tensors, *ctx.options)
    elif operator.is_transformed():
        gradients = _TransformedGradient.apply(*tensors, *ctx.options)
    else:
        gradients = torch.ops.fa3.backward(*tensors, *ctx.options)
    return (*gradients, *without_gradient)


def _refuse(ctx, *gradients: Tensor | None) -> None:
    raise NotImplementedError("attention has no second derivative: its gradients cannot be differentiated")


class Attention(torch.autograd.Function):
    """`operator.launch` with gradients."""

    @staticmethod
    def forward(ctx, *inputs):
        output = operator.launch(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, dout, dlse)


class TransformedAttention(torch.autograd.Function):
    """The same inside of torch.func's transforms, which want it in two steps. That takes longer."""

    @staticmethod
    def forward(*inputs):
        return torch.ops.fa3.forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, dout, dlse)


class _TransformedGradient(torch.autograd.Function):
    """The backward pass inside of torch.func's transforms."""

    @staticmethod
    def forward(*inputs):
        return torch.ops.fa3.backward(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> None:
        _refuse(ctx, *gradients)


_ARGUMENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse, float? softmax_scale, "
    "SymInt window_left, SymInt window_right, float softcap, SymInt sm_margin, bool deterministic=False"
)
operator.library.define(f"backward({_ARGUMENTS}) -> (Tensor dq, Tensor dk, Tensor dv)", tags=operator.TAGS)
operator.library.define(
    f"backward_out({_ARGUMENTS}, *, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> ()", tags=operator.TAGS
)
for _key in ("CUDA", "CPU"):
    operator.library.impl("backward", launch, _key)
    operator.library.impl("backward_out", launch_into, _key)
torch.library.register_autograd("fa3::forward", _backward, setup_context=_save, lib=operator.library)
torch.library.register_autograd("fa3::backward", _refuse, lib=operator.library)
