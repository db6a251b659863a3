"""The torch operator `fa3::forward`, what it computes, and what other operators share with it."""

from typing import Callable, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _fa3

# The names that the extension module knows. Which of them its kernels take, it says itself.
_DTYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
}


class Options(NamedTuple):
    """What `fa3::forward` takes besides q, k and v, in this order."""

    softmax_scale: float | None
    window_left: int
    window_right: int
    softcap: float
    sm_margin: int
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    v_transposed: bool
    out_dtype: torch.dtype | None
    deterministic: bool
    v_mean: Tensor | None

    def of_backward(self) -> tuple[float | None, int, int, float, int, bool]:
        """What `fa3::backward` takes besides tensors, in its order."""
        window = self.window_left, self.window_right
        return self.softmax_scale, *window, self.softcap, self.sm_margin, self.deterministic


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_transposed: bool = False,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    v_mean: Tensor | None = None,
    with_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """O and, if wanted, LSE of tensors on a GPU, put on torch's current stream of their device. `deterministic` is for
    the backward pass.
    """
    refuse_tangents("q, k or v", q, k, v)
    device = q.get_device()
    if not (q.is_cuda and k.is_cuda and v.is_cuda and k.get_device() == device and v.get_device() == device):
        raise ValueError(f"q is on {q.device}, k on {k.device} and v on {v.device}, expected one CUDA device")
    q_raw, k_raw, v_raw = raw(q), raw(k), raw(v)
    if out_dtype is not None and out_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"out_dtype is {out_dtype}, expected torch.float16 or torch.bfloat16")
    output = None if out_dtype is None else _DTYPES[out_dtype]
    # What nobody wants is not even allocated: that takes as long as the launch.
    o, lse = _output(q, k, v, v_transposed, out_dtype), _lse(q) if with_lse else None
    descales: _fa3._Descales = (None, None, None, None)
    block_rows = None
    if not (q_descale is None and k_descale is None and v_descale is None and v_mean is None):
        # They are kept until the launch. Their memory may be used again after it, in the order of the stream.
        scales, block_rows = _descales(q, k, o.shape[3], q_descale, k_descale, v_descale, v_mean)
        q_at, k_at, v_at, mean_at = (None if scale is None else scale.data_ptr() for scale in scales)
        descales = q_at, k_at, v_at, mean_at
    if v_transposed:
        # As it would be in rows.
        batch, heads, head_dim, _ = v.shape
        shape = (batch, k.shape[1], heads, head_dim)
        v_raw = (v_raw[0], v_raw[1], shape, (k.shape[1] * heads * head_dim, heads * head_dim, head_dim, 1))
    fp8 = (v_transposed, block_rows, output) if v_transposed or block_rows or output else None
    _fa3.forward(
        device,
        current_stream(device),
        q_raw,
        k_raw,
        v_raw,
        o.data_ptr(),
        None if lse is None else lse.data_ptr(),
        descales,
        softmax_scale,
        (window_left, window_right),
        softcap or None,
        sm_margin,
        fp8,
        workspace_for(q),
    )
    return o, lse


def is_plain(*tensors: Tensor) -> bool:
    """Whether nobody but the kernel wants to see the call: then torch's dispatcher, which takes as long, is left out.

    What lies in memory must be what the tensors hold. The dispatcher writes the negation that a negated tensor stands
    for, and the zeros of one that has no memory.
    """
    if not _CAN_ASK or torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() != 0 or torch._C._len_torch_function_stack() != 0:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.is_neg() or tensor._is_zerotensor():
            return False
    return True


def is_transformed() -> bool:
    """Whether the call is inside of torch.func's transforms. Compilers have their own ways through those."""
    active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
    return not torch.compiler.is_compiling() and active()


def needs_grad(*tensors: Tensor) -> bool:
    """Whether autograd wants to know of the call."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False


def refuse_tangents(names: str, *tensors: Tensor) -> None:
    """A result that silently has no tangent would be a wrong one."""
    # Without a level there are no tangents. It is torch's own, and saves the time of looking.
    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(f"{names} has a tangent, and there is no derivative in forward mode")


def raw(tensor: Tensor) -> tuple:
    """What the extension module sees of a tensor: (dtype, address, shape, strides)."""
    try:
        return _DTYPES[tensor.dtype], tensor.data_ptr(), tensor.shape, tensor.stride()
    except KeyError as error:
        raise TypeError(
            f"a tensor is {error}, expected torch.float16, torch.bfloat16 or torch.float8_e4m3fn"
        ) from None


def dense(tensor: Tensor) -> Tensor:
    """As kernels read what has no strides for them: contiguous, from a multiple of 16 bytes on.
    May be the tensor itself.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def current_stream(device: int) -> int:
    """The driver's handle of torch's current stream of a device."""
    # Torch's own way is faster.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw(device) if raw else torch.cuda.current_stream(device).cuda_stream


def workspace_for(like: Tensor) -> Callable[[int, int], tuple[int, Tensor]]:
    """A function that makes a workspace on the device of a tensor, its first `zeros` bytes zeroed on the current
    stream: its address and itself.

    While the stream is captured it is the graph's own memory, and each replay begins with zeros. As with any tensor,
    what torch gives the memory to next comes later on the same stream.
    """

    def allocate(bytes: int, zeros: int) -> tuple[int, Tensor]:
        workspace = like.new_empty(bytes, dtype=torch.uint8)
        if zeros:
            workspace[:zeros].zero_()
        return workspace.data_ptr(), workspace

    return allocate


def _can_ask() -> bool:
    """Whether this torch has the questions of `is_plain`, some of which are its own."""
    names = ["_is_tracing", "_len_torch_dispatch_stack", "_len_torch_function_stack"]
    names.append("_are_functorch_transforms_active")
    return hasattr(Tensor, "_is_zerotensor") and all(hasattr(torch._C, name) for name in names)


def _output(q: Tensor, k: Tensor, v: Tensor, v_transposed: bool, dtype: torch.dtype | None) -> Tensor:
    """A new, contiguous tensor for O (batch, seqlen_q, heads_q, head_dim_v), of bfloat16 if Q is of float8."""
    check_ranks(q, k, v)
    if dtype is None:
        dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    if v_transposed:
        _check_transposed(k, v)
    head_dim_v = v.shape[2 if v_transposed else 3]
    if q.shape[3] == head_dim_v and q.is_contiguous():
        return torch.empty_like(q, dtype=dtype)
    batch, seqlen, heads, _ = q.shape
    # Torch reads extents faster one by one than from a tuple.
    return q.new_empty(batch, seqlen, heads, head_dim_v, dtype=dtype)


def check_ranks(q: Tensor, k: Tensor, v: Tensor) -> None:
    """They have four dimensions."""
    if not q.dim() == k.dim() == v.dim() == 4:
        given = f"q has {q.dim()}, k {k.dim()} and v {v.dim()} dimensions"
        raise ValueError(f"{given}, expected 4: (batch, seqlen, heads, head_dim)")


def _check_transposed(k: Tensor, v: Tensor) -> None:
    """V transposed has the keys of K, in whole blocks, and no gaps."""
    batch, seqlen, heads, _ = k.shape
    expected = (batch, heads, v.shape[2], (seqlen + 127) // 128 * 128)
    if tuple(v.shape) != expected or not v.is_contiguous():
        what = "(batch, heads_kv, head_dim_v, seqlen_k rounded up to 128)"
        raise ValueError(f"transposed v is {tuple(v.shape)}, expected a contiguous {expected}: {what}")


def _descales(q: Tensor, k: Tensor, head_dim_v: int, *given: Tensor | None) -> tuple[list[Tensor | None], int | None]:
    """The scales of e4m3 Q, K and V and the means of V's channels, as kernels read them; and how many rows of Q share a
    scale, if heads do not.
    """
    names = ("q_descale", "k_descale", "v_descale", "v_mean")
    if q.dtype != torch.float8_e4m3fn:
        name = next(name for name, x in zip(names, given, strict=True) if x is not None)
        raise ValueError(f"{name} is for torch.float8_e4m3fn, q is {q.dtype}")
    q_descale, _, v_descale, v_mean = given
    if v_mean is not None and v_descale is None:
        raise ValueError("there is v_mean without v_descale, expected both: the means and the scales of v's channels")
    batch, heads_kv = q.shape[0], k.shape[2]
    of_rows = given[:3] if v_mean is None else given[:2]
    of_blocks = [x is not None and x.dim() == 3 for x in of_rows]
    rows: int | None = None
    of_q: tuple[tuple[int, ...], str]
    of_k: tuple[tuple[int, ...], str]
    of_v: tuple[tuple[int, ...], str]
    if q_descale is not None and all(of_blocks):
        # Where either will do, it is 128.
        rows = 128 if q_descale.shape[2] == -(-q.shape[1] // 128) else 64
        what = "(batch, heads, blocks), with 64 or 128 rows of q and 128 of k and v in a block"
        of_q = (batch, q.shape[2], -(-q.shape[1] // rows)), what
        of_k = (batch, heads_kv, -(-k.shape[1] // 128)), what
    elif any(of_blocks):
        wanted = "all of them or none" if v_mean is None else "both of q and k or none, as v_mean is given"
        raise ValueError(f"some descales are of blocks, (batch, heads, blocks), expected {wanted}")
    else:
        of_q = of_k = (batch, heads_kv), "(batch, heads_kv)"
    of_channels = (batch, heads_kv, head_dim_v), "(batch, heads_kv, head_dim_v)"
    of_v = of_k if v_mean is None else of_channels
    readable = []
    for name, x, expected in zip(names, given, (of_q, of_k, of_v, of_channels), strict=True):
        if x is not None:
            shape, what = expected
            if x.dtype != torch.float32 or tuple(x.shape) != shape or x.device != q.device:
                found = f"{x.dtype} {tuple(x.shape)} on {x.device}"
                raise ValueError(f"{name} is {found}, expected torch.float32 {shape} on {q.device}: {what}")
            refuse_tangents(name, x)
            # Kernels read four channels at a time, and other scales one by one.
            x = dense(x) if expected is of_channels else x.contiguous()
        readable.append(x)
    return readable, rows


def _lse(q: Tensor) -> Tensor:
    """A new, contiguous tensor for LSE (batch, heads_q, seqlen_q)."""
    batch, seqlen, heads, _ = q.shape
    return q.new_empty(batch, heads, seqlen, dtype=torch.float32)


def _fake(
    q,
    k,
    v,
    softmax_scale,
    window_left,
    window_right,
    softcap,
    sm_margin,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    v_transposed=False,
    out_dtype=None,
    deterministic=False,
    v_mean=None,
):
    return _output(q, k, v, v_transposed, out_dtype), _lse(q)


# Where torch cannot be asked who listens, all calls go through its dispatcher.
_CAN_ASK = _can_ask()

# Operators live as long as this object.
library = torch.library.Library("fa3", "DEF")
library.define(
    "forward(Tensor q, Tensor k, Tensor v, float? softmax_scale, SymInt window_left, SymInt window_right, float softcap, "
    "SymInt sm_margin, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, bool v_transposed=False, "
    "ScalarType? out_dtype=None, bool deterministic=False, Tensor? v_mean=None) -> (Tensor o, Tensor lse)",
    # Compilers must leave the last dimension contiguous.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
library.impl("forward", launch, "CUDA")
torch.library.register_fake("fa3::forward", _fake, lib=library)
