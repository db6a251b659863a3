"""Attention over packed sequences, and its torch operators `fa3::varlen_forward` and `fa3::varlen_forward_out`."""

from typing import Any

import torch
from torch import Tensor

from . import _fa3, arguments, operator, refusal

_NO_GRADIENT = "requires grad, and attention over packed sequences has no gradients yet"
_NAMES = "q, k, v or a descale"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` of sequences of many lengths, packed one after the other into one tensor.

    Sequence i is rows cu_seqlens_q[i] up to cu_seqlens_q[i + 1] of q, and rows cu_seqlens_k[i] up to
    cu_seqlens_k[i + 1] of k and v. Each attends to itself alone, and any may be empty.

    Lengths are data. On a GPU the host never reads them: the call waits for nothing, and a captured graph computes
    other lengths when it is replayed. Lists that make no sense give wrong numbers there, and never touch other memory
    than the tensors; on the CPU they are refused.

    There are no gradients yet.

    Arguments:
        q: (total_q, heads_q, head_dim). Strides are free, but the last is 1 and the others are multiples of 8 (of 16
            for float8_e4m3fn). On the CPU all are free.
        k: (total_k, heads_kv, head_dim); heads_q is a multiple of heads_kv.
        v: (total_k, heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: where sequences begin and end, int32 (sequences + 1,), contiguous and on q's device.
            The first number is 0 and none is less than the one before. Rows may be left over behind the last sequence.
        max_seqlen_q, max_seqlen_k: about how long the longest sequences are, or None. They decide how the call is
            computed: wrong ones change its speed, and no result beyond its rounding. Tensors on the CPU without
            dimensions are read; those on a GPU, for which the call would wait, and those in a trace count as None.
        seqused_q, seqused_k: how many rows of each sequence are in use, from its first on, int32 (sequences,); all, if
            None.
        q_descale, k_descale, v_descale: the scales of float8_e4m3fn q, k and v, float32 (sequences, heads_kv): a number
            is its code times its scale, which is not negative. A head of q has the scale of its head of k. None is 1.
        deterministic: changes nothing. All results always have the same bits.
        softmax_scale, causal, window_size, softcap, num_splits, pack_gqa, sm_margin, return_attn_probs, out_dtype: as
            of `flash_attn_func`. The last row in use of a sequence of q stands at the last key in use of its own.
        out: a tensor for O, as of `flash_attn_func`.

    Returns: O (total_q, heads_q, head_dim_v) of q's dtype, or of out_dtype or bfloat16 if that is float8_e4m3fn: out,
        or a new contiguous tensor. With return_attn_probs (O, LSE), LSE float32 (heads_q, total_q): the natural
        logarithm of the sum of exp(score). Rows that see no key, are not in use, or lie behind the last sequence have
        O = 0 and LSE = -inf. NaN or an infinity reaches no other sequence.

    Raises:
        NotImplementedError: an argument that is not supported yet, a number that is a tensor and requires grad, or a
            tensor with a tangent (forward mode). The backward pass raises it for all tensors.
        TypeError, ValueError: arguments that make no sense, or that no kernel takes. On the CPU also lists that make no
            sense.
        RuntimeError: the driver's refusals; or there is out, and a tensor requires grad.
    """
    arguments.refuse_unsupported(qv, attention_chunk, num_splits, pack_gqa)
    arguments.flag("deterministic", deterministic)
    left, right = arguments.window(window_size)
    options = (
        arguments.hint("max_seqlen_q", max_seqlen_q),
        arguments.hint("max_seqlen_k", max_seqlen_k),
        None if softmax_scale is None else arguments.number("softmax_scale", softmax_scale),
        left,
        0 if arguments.flag("causal", causal) else right,
        arguments.number("softcap", softcap),
        arguments.integer("sm_margin", sm_margin),
        q_descale,
        k_descale,
        v_descale,
        None if out_dtype is None else arguments.output("out_dtype", out_dtype),
    )
    return_attn_probs = arguments.flag("return_attn_probs", return_attn_probs)
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    given = (*tensors[:5], *operator.given(*tensors[5:], q_descale, k_descale, v_descale))
    if out is not None:
        arguments.tensor("out", out)
        operator.refuse_grad(out, *(x for x in given if isinstance(x, Tensor)), function="flash_attn_varlen_func")
        if operator.is_plain(out, *given):
            _, lse = _launch(*tensors, *options, return_attn_probs, out=out)
        else:
            _check_types(tensors, q_descale, k_descale, v_descale)
            if operator.is_transformed():
                raise NotImplementedError("out is not supported inside of torch.func's transforms")
            lse = torch.ops.fa3.varlen_forward_out(*tensors, *options, o=out)
    elif operator.is_plain(*given) and not operator.needs_grad(*given):
        out, lse = _launch(*tensors, *options, return_attn_probs)
    else:
        _check_types(tensors, q_descale, k_descale, v_descale)
        refusal.derivatives(_NAMES, _NO_GRADIENT, *given)
        out, lse = torch.ops.fa3.varlen_forward(*tensors, *options)
    return (out, lse) if return_attn_probs else out


def _check_types(tensors: tuple[Any, ...], *descales: Any) -> None:
    """Refuses arguments that are no tensors."""
    for name, tensor in zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), tensors):
        arguments.tensor(name, tensor)
    names = ("seqused_q", "seqused_k", "q_descale", "k_descale", "v_descale")
    for name, tensor in zip(names, (*tensors[5:], *descales), strict=True):
        if tensor is not None:
            arguments.tensor(name, tensor)


def _launch(
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
    softcap: float,
    sm_margin: int,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    with_lse: bool = True,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """O and, if wanted, LSE of tensors on a GPU, put on torch's current stream of their device; or of tensors on the
    CPU. O is written to `out`, if that is given.
    """
    lists, descales = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), (q_descale, k_descale, v_descale)
    operator.refuse_tangents(_NAMES, *operator.given(q, k, v, *descales))
    operator.check_places(q, k, v, *operator.given(*lists))
    check(q, k, v, *lists, *descales)
    name = operator.name_of_output(out_dtype)
    if out is None:
        o, strides = o_like(q, v, out_dtype), None
    else:
        check_out(out, q, v, out_dtype)
        o, strides = out, (0, *out.stride())
    lse = lse_like(q) if with_lse else None
    # Copies are kept until the call is over.
    device, q, k, v = q.get_device(), operator.aligned(q), operator.aligned(k), operator.aligned(v)
    lists = tuple(None if x is None else operator.aligned(x) for x in lists)
    ends_q, ends_k, used_q, used_k = (None if x is None else x.data_ptr() for x in lists)
    scales = [None if x is None else operator.dense(x) for x in descales]
    of_q, of_k, of_v = (None if x is None else x.data_ptr() for x in scales)
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
        (window_left, window_right),
        softcap or None,
        sm_margin,
        (False, None, name) if name else None,
        operator.workspace_for(q),
        strides,
        (cu_seqlens_q.shape[0] - 1, (ends_q, ends_k), (used_q, used_k), (max_seqlen_q, max_seqlen_k)),
    )
    return o, lse


def _launch_into(*inputs: Any, o: Tensor) -> Tensor:
    """LSE; O is written to `o`."""
    operator.refuse_grad(o, *(x for x in inputs if isinstance(x, Tensor)), function="flash_attn_varlen_func")
    _, lse = _launch(*inputs, out=o)
    assert lse is not None
    return lse


def with_batch(packed: tuple) -> tuple:
    """A packed tensor as the extension module takes it: with a batch of 1."""
    dtype, address, shape, strides = packed
    return dtype, address, (1, *shape), (0, *strides)


def o_like(q: Tensor, v: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A new, contiguous tensor for O (total_q, heads_q, head_dim_v)."""
    total, heads, _ = q.shape
    return q.new_empty(total, heads, v.shape[2], dtype=dtype or operator.dtype_of_output(q))


def lse_like(q: Tensor) -> Tensor:
    """A new, contiguous tensor for LSE (heads_q, total_q)."""
    total, heads, _ = q.shape
    return q.new_empty(heads, total, dtype=torch.float32)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    *descales: Tensor | None,
) -> None:
    """Checks what the extension module does not see: ranks, lists and scales."""
    if not q.dim() == k.dim() == v.dim() == 3:
        dimensions = f"q has {q.dim()}, k {k.dim()} and v {v.dim()} dimensions"
        raise ValueError(f"{dimensions}, expected 3: (total, heads, head_dim)")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x.dtype != torch.int32 or x.dim() != 1 or operator.known(x.shape) == (0,):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected torch.int32 (sequences + 1,)")
        _check_contiguous(name, x)
    if operator.known(cu_seqlens_k.shape) != operator.known(cu_seqlens_q.shape):
        counts = cu_seqlens_q.shape[0] - 1, cu_seqlens_k.shape[0] - 1
        raise ValueError(f"cu_seqlens_q has {counts[0]} sequences and cu_seqlens_k {counts[1]}, expected as many")
    count = cu_seqlens_q.shape[0] - 1
    for name, x in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if x is not None:
            if x.dtype != torch.int32 or operator.known(x.shape) != operator.known([count]):
                found = f"{name} is {x.dtype} {tuple(x.shape)}"
                raise ValueError(f"{found}, expected torch.int32 {(count,)}: (sequences,)")
            _check_contiguous(name, x)
    for name, x in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if x is None:
            continue
        if q.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} is for torch.float8_e4m3fn, q is {q.dtype}")
        shape = count, k.shape[1]
        if x.dtype != torch.float32 or operator.known(x.shape) != operator.known(shape) or x.device != q.device:
            found = f"{x.dtype} {tuple(x.shape)} on {x.device}"
            what = "(sequences, heads_kv)"
            raise ValueError(f"{name} is {found}, expected torch.float32 {shape} on {q.device}: {what}")


def _check_contiguous(name: str, x: Tensor) -> None:
    [extent], [stride] = operator.known(x.shape), operator.known(x.stride())
    if extent > 1 and stride != 1:
        raise ValueError(f"{name} has stride {stride}, expected 1")


def check_out(out: Tensor, q: Tensor, v: Tensor, dtype: torch.dtype | None) -> None:
    """Checks the tensor that O is written to. Its strides and its address the extension module checks."""
    expected = *q.shape[:2], v.shape[2]
    operator.check_out_is(out, q, expected, "(total_q, heads_q, head_dim_v)", dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    refusal.save(ctx, inputs)


def _backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    return refusal.gradients(ctx, f"{_NAMES} {_NO_GRADIENT}", *given)


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? softmax_scale, SymInt window_left, SymInt window_right, "
    "float softcap, SymInt sm_margin, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "ScalarType? out_dtype=None"
)
operator.library.define(f"varlen_forward({_ARGUMENTS}) -> (Tensor o, Tensor lse)", tags=operator.TAGS)
# Not `out`: that argument torch.compile takes for contiguous only.
operator.library.define(f"varlen_forward_out({_ARGUMENTS}, *, Tensor(a!) o) -> Tensor lse", tags=operator.TAGS)
for _key in ("CUDA", "CPU"):
    operator.library.impl("varlen_forward", _launch, _key)
    operator.library.impl("varlen_forward_out", _launch_into, _key)
torch.library.register_autograd("fa3::varlen_forward", _backward, setup_context=_save, lib=operator.library)
