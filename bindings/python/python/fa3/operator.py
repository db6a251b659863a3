"""The torch operators `fa3::forward` and `fa3::forward_out`, and what other operators share with them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

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
    """The arguments of `fa3::forward` besides q, k and v, in this order."""

    softmax_scale: float | None
    window_left: int
    window_right: int
    attention_chunk: int
    softcap: float
    sm_margin: int
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    v_transposed: bool
    out_dtype: torch.dtype | None
    deterministic: bool
    v_mean: Tensor | None
    s_aux: Tensor | None = None
    qv: Tensor | None = None
    intervals: Tensor | None = None

    def of_backward(self) -> tuple[float | None, int, int, int, float, int, bool]:
        """The arguments of `fa3::backward` besides tensors, in its order."""
        window = self.window_left, self.window_right, self.attention_chunk
        return self.softmax_scale, *window, self.softcap, self.sm_margin, self.deterministic


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    softcap: float,
    sm_margin: int,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_transposed: bool = False,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    v_mean: Tensor | None = None,
    s_aux: Tensor | None = None,
    qv: Tensor | None = None,
    intervals: Tensor | None = None,
    with_lse: bool = True,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """O and, if wanted, LSE of tensors on a GPU, put on torch's current stream of their device; or of tensors on the
    CPU. O is written to `out`, if that is given. `deterministic` is for the backward pass.
    """
    refuse_tangents("q, k or v", q, k, v)
    device = q.get_device()
    if not (q.is_cuda and k.is_cuda and v.is_cuda and k.get_device() == device and v.get_device() == device):
        refuse_gpu_and_cpu(q, k, v)
        q, k, v = aligned(q), aligned(k), aligned(v)
    q_raw, k_raw, v_raw = raw(q), raw(k), raw(v)
    name = name_of_output(out_dtype)
    if out is None:
        o, strides = output(q, k, v, v_transposed, out_dtype), None
    else:
        check_out(out, q, k, v, v_transposed, out_dtype)
        o, strides = out, out.stride()
    # An LSE that nobody wants is not even allocated: that takes as long as the launch.
    lse = lse_like(q) if with_lse else None
    if device >= 0 and not q_raw[3][3] == k_raw[3][3] == v_raw[3][3] == 1:
        q, k, v = readable(q), readable(k), readable(v)
        q_raw, k_raw, v_raw = raw(q), raw(k), raw(v)
    descales: _fa3._Descales = (None, None, None, None)
    block_rows = None
    if not (q_descale is None and k_descale is None and v_descale is None and v_mean is None):
        # They are kept until the launch. Their memory may be used again after it, in the order of the stream.
        given = (q_descale, k_descale, v_descale, v_mean)
        block_rows = check_descales(q, k, o.shape[3], *given)
        scales = [None if x is None else dense(x) for x in given]
        q_at, k_at, v_at, mean_at = (None if scale is None else scale.data_ptr() for scale in scales)
        descales = q_at, k_at, v_at, mean_at
    if v_transposed:
        v_raw = in_rows(v_raw, k.shape[1])
    # As with descales, copies live until the launch.
    qv = None if qv is None else beside(qv, q)
    sink = None if s_aux is None else sinks(s_aux, q, q.shape[2])
    intervals = None if intervals is None else bounds(intervals, q)
    fp8 = (v_transposed, block_rows, name) if v_transposed or block_rows or name else None
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
        (window_left, window_right, attention_chunk),
        softcap or None,
        sm_margin,
        fp8,
        workspace_for(q),
        strides,
        None,
        None if sink is None else sink.data_ptr(),
        None,
        None if qv is None else raw(qv),
        None if intervals is None else (intervals.data_ptr(), intervals.shape),
    )
    return o, lse


def launch_into(*inputs: Any, o: Tensor) -> Tensor:
    """LSE; O is written to `o`."""
    refuse_grad(o, *(x for x in inputs if isinstance(x, Tensor)))
    _, lse = launch(*inputs, out=o)
    assert lse is not None
    return lse


def is_plain(*tensors: Tensor) -> bool:
    """Whether nobody but the kernel wants to see the call: then torch's dispatcher, which takes as long, is left out.

    What lies in memory must be what the tensors hold. The dispatcher writes the negation that a negated tensor stands
    for, and the zeros of one that has no memory. It knows what meta tensors become.
    """
    if not _CAN_ASK or torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() != 0 or torch._C._len_torch_function_stack() != 0:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.is_neg() or tensor._is_zerotensor() or tensor.is_meta:
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


def refuse_grad(*tensors: Tensor, function: str = "flash_attn_func") -> None:
    """Refuses a result in given memory of which autograd wants to know, as torch's own functions do."""
    if needs_grad(*tensors):
        sentence = "out=... does not support automatic differentiation, but one of the arguments requires grad"
        raise RuntimeError(f"{function}: {sentence}")


def refuse_tangents(names: str, *tensors: Tensor) -> None:
    """A result that silently has no tangent would be a wrong one."""
    # Without a level there are no tangents. It is torch's own, and saves the time of looking.
    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(f"{names} has a tangent, and there is no derivative in forward mode")


def given(*tensors: Tensor | None) -> list[Tensor]:
    """The tensors that there are."""
    return [tensor for tensor in tensors if tensor is not None]


def check_places(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Checks that the tensors that are given, of these names, are on one GPU, or on the CPU. The first one is."""
    first = tensors[0]
    assert first is not None
    device, is_cpu = first.get_device(), first.is_cpu
    for name, x in zip(names, tensors, strict=True):
        if x is not None and not (x.get_device() == device and (x.is_cuda or (is_cpu and x.is_cpu))):
            refuse_place(names[0], first, name, x)


def refuse_place(first_name: str, first: Tensor, name: str, x: Tensor) -> NoReturn:
    """Refuses a tensor that is elsewhere than the first one, or one that is in no place for any."""
    also = "" if x is first else f" and {first_name} on {first.device}"
    raise ValueError(f"{name} is on {x.device}{also}, expected one CUDA device or the CPU")


def refuse_gpu_and_cpu(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses tensors that are not all on the CPU, having found that they are not all on one GPU."""
    if not (q.is_cpu and k.is_cpu and v.is_cpu):
        places = f"q is on {q.device}, k on {k.device} and v on {v.device}"
        raise ValueError(f"{places}, expected one CUDA device or the CPU")


def name_of_output(dtype: torch.dtype | None) -> str | None:
    """The extension module's name of a dtype that O may be asked for in."""
    if dtype is not None and dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"out_dtype is {dtype}, expected torch.float16 or torch.bfloat16")
    return None if dtype is None else _DTYPES[dtype]


def name_of(dtype: torch.dtype) -> str:
    """The extension module's name of a dtype."""
    try:
        return _DTYPES[dtype]
    except KeyError:
        expected = "torch.float16, torch.bfloat16, torch.float8_e4m3fn or, on the CPU, torch.float32"
        raise TypeError(f"a tensor is {dtype}, expected {expected}") from None


def raw(tensor: Tensor) -> tuple:
    """A tensor as the extension module takes it: (dtype, address, shape, strides)."""
    # A function less to call, where microseconds count.
    name = _DTYPES.get(tensor.dtype) or name_of(tensor.dtype)
    try:
        return name, tensor.data_ptr(), tensor.shape, tensor.stride()
    except RuntimeError:
        # To ask beforehand would cost every call.
        refuse_nested("a tensor", tensor)
        raise


def refuse_nested(name: str, tensor: Tensor) -> None:
    """Refuses a nested tensor, whose sequences are of many lengths, so that it has no shape."""
    if tensor.is_nested:
        instead = "flash_attn_varlen_func takes its values, with its offsets as int32 cu_seqlens"
        raise TypeError(f"{name} is a nested tensor: {instead}")


def seen(tensor: Tensor, as_it_lies: bool = False) -> tuple:
    """A fake tensor as the extension module takes it: without an address, its numbers as they are in this call. Strides
    are those of what `readable` makes of it, unless it is taken as it lies.
    """
    if tensor.is_cuda and not as_it_lies and known(tensor.stride()[-1:]) != (1,):
        tensor = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return name_of(tensor.dtype), 0, known(tensor.shape), known(tensor.stride())


def in_rows(transposed: tuple, seqlen: int) -> tuple:
    """Transposed V as the extension module takes it: its shape and strides as if its rows were those of keys."""
    dtype, address, (batch, heads, head_dim, _), _ = transposed
    return dtype, address, (batch, seqlen, heads, head_dim), (seqlen * heads * head_dim, heads * head_dim, head_dim, 1)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where the CPU cannot read its elements, which begin inside of others."""
    return tensor if tensor.data_ptr() % tensor.itemsize == 0 or not tensor.is_cpu else tensor.clone()


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where the CPU cannot read its elements, or kernels its last dimension, which has gaps."""
    return aligned(tensor) if tensor.is_cpu or tensor.stride(-1) == 1 else tensor.contiguous()


class Unknown(Exception):
    """A number that only the data will tell."""


# A compiler's numbers.
_SYMBOLS = frozenset((torch.SymInt, torch.SymFloat))


def known(numbers) -> tuple:
    """Numbers as they are in this call. Symbols of a compiler are what they stand for now, which is no promise to it.

    Raises:
        Unknown: nobody knows one of them yet, such as how many elements are not 0.
    """
    numbers = tuple(numbers)
    if _SYMBOLS.isdisjoint(map(type, numbers)):
        return numbers
    return tuple(_known(number) if type(number) in _SYMBOLS else number for number in numbers)


def _known(symbol: Any) -> float:
    if symbol.node.hint is None:
        raise Unknown
    return symbol.node.hint


def dense(tensor: Tensor) -> Tensor:
    """As kernels read what has no strides for them: contiguous, from a multiple of 16 bytes on.
    May be the tensor itself.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def current_stream(device: int) -> int:
    """The driver's handle of torch's current stream of a GPU; 0 for the CPU, which has none."""
    if device < 0:
        return 0
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


def output(q: Tensor, k: Tensor, v: Tensor, v_transposed: bool, dtype: torch.dtype | None) -> Tensor:
    """A new, contiguous tensor for O (batch, seqlen_q, heads_q, head_dim_v)."""
    check_shapes(q, k, v, v_transposed)
    dtype = dtype or dtype_of_output(q)
    head_dim_v = v.shape[2 if v_transposed else 3]
    if q.shape[3] == head_dim_v and q.is_contiguous():
        return torch.empty_like(q, dtype=dtype)
    batch, seqlen, heads, _ = q.shape
    # Torch reads extents faster one by one than from a tuple.
    return q.new_empty(batch, seqlen, heads, head_dim_v, dtype=dtype)


def check_out(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, v_transposed: bool, dtype: torch.dtype | None
) -> None:
    """Checks the tensor that O is written to. Its strides and its address the extension module checks."""
    check_shapes(q, k, v, v_transposed)
    expected = *q.shape[:3], v.shape[2 if v_transposed else 3]
    check_out_is(out, q, expected, "(batch, seqlen_q, heads_q, head_dim_v)", dtype)


def check_out_is(out: Tensor, q: Tensor, expected: tuple[int, ...], what: str, dtype: torch.dtype | None) -> None:
    """Checks that O fits a tensor: its dtype, or that of O by default, O's shape, whose dimensions are `what`, and the
    device of q.
    """
    dtype = dtype or dtype_of_output(q)
    if out.dtype != dtype or known(out.shape) != known(expected) or out.device != q.device:
        found = f"{out.dtype} {tuple(out.shape)} on {out.device}"
        raise ValueError(f"out is {found}, expected {dtype} {tuple(expected)} on {q.device}: {what}")
    refuse_tangents("out", out)


def dtype_of_output(q: Tensor) -> torch.dtype:
    """The dtype of O where none is asked for: that of Q, but bfloat16 for float8."""
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def check_shapes(q: Tensor, k: Tensor, v: Tensor, v_transposed: bool) -> None:
    """Checks what the extension module does not see."""
    check_ranks(q, k, v)
    if v_transposed:
        _check_transposed(k, v)


def check_ranks(q: Tensor, k: Tensor, v: Tensor, packed: bool = False) -> None:
    """They have four dimensions, or three where sequences are packed."""
    expected, what = (3, "(total, heads, head_dim)") if packed else (4, "(batch, seqlen, heads, head_dim)")
    if not q.dim() == k.dim() == v.dim() == expected:
        given = f"q has {q.dim()}, k {k.dim()} and v {v.dim()} dimensions"
        raise ValueError(f"{given}, expected {expected}: {what}")


def _check_transposed(k: Tensor, v: Tensor) -> None:
    """V transposed has the keys of K, in whole blocks, and no gaps."""
    batch, seqlen, heads, _ = k.shape
    expected = (batch, heads, v.shape[2], (seqlen + 127) // 128 * 128)
    if known(v.shape) != known(expected) or not v.is_contiguous():
        what = "(batch, heads_kv, head_dim_v, seqlen_k rounded up to 128)"
        raise ValueError(f"transposed v is {tuple(v.shape)}, expected a contiguous {expected}: {what}")


def check_descales(q: Tensor, k: Tensor, head_dim_v: int, *given: Tensor | None) -> int | None:
    """Checks the scales of e4m3 Q, K and V and the means of V's channels. Returns how many rows of Q share a scale, if
    heads do not.
    """
    names = ("q_descale", "k_descale", "v_descale", "v_mean")
    for name, x in zip(names, given, strict=True):
        if x is not None:
            check_is_scaled(name, q, k)
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
        blocks = -(-q.shape[1] // 128)
        rows = 128 if known(q_descale.shape[2:]) == known([blocks]) else 64
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
    for name, x, (shape, what) in zip(names, given, (of_q, of_k, of_v, of_channels), strict=True):
        if x is not None:
            if x.dtype != torch.float32 or known(x.shape) != known(shape) or x.device != q.device:
                found = f"{x.dtype} {tuple(x.shape)} on {x.device}"
                raise ValueError(f"{name} is {found}, expected torch.float32 {shape} on {q.device}: {what}")
            refuse_tangents(name, x)
    return rows


def check_is_scaled(name: str, q: Tensor, k: Tensor) -> None:
    """The tensor that a scale of this name is for is e4m3."""
    of, x = ("q", q) if name == "q_descale" or k.dtype == q.dtype else ("k", k)
    if x.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name} is for torch.float8_e4m3fn, {of} is {x.dtype}")


def check_descale(name: str, x: Tensor, q: Tensor, k: Tensor, shape: tuple[int, int]) -> None:
    """The scales of heads of an e4m3 tensor are (sequences, heads_kv)."""
    check_is_scaled(name, q, k)
    if x.dtype != torch.float32 or known(x.shape) != known(shape) or x.device != q.device:
        found = f"{x.dtype} {tuple(x.shape)} on {x.device}"
        raise ValueError(f"{name} is {found}, expected torch.float32 {shape} on {q.device}: (sequences, heads_kv)")


def sinks(s_aux: Tensor, q: Tensor, heads: int) -> Tensor:
    """Sinks as kernels read them: float32, contiguous. May be the tensor itself."""
    check_sinks(s_aux, q, heads)
    return dense(s_aux.to(torch.float32))


def check_sinks(s_aux: Tensor, q: Tensor, heads: int) -> None:
    """There is one for each query head, on the device of q."""
    is_float = s_aux.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if not is_float or known(s_aux.shape) != known([heads]) or s_aux.device != q.device:
        found = f"{s_aux.dtype} {tuple(s_aux.shape)} on {s_aux.device}"
        expected = f"torch.float32, torch.float16 or torch.bfloat16 {(heads,)} on {q.device}: (heads_q,)"
        raise ValueError(f"s_aux is {found}, expected {expected}")
    refuse_tangents("s_aux", s_aux)


def beside(qv: Tensor, q: Tensor) -> Tensor:
    """The part of Q that is multiplied by V, as the extension module reads it. May be the tensor itself."""
    check_qv(qv, q)
    return readable(qv)


def check_qv(qv: Tensor, q: Tensor) -> None:
    """Checks of the part of Q that is multiplied by V what the extension module does not see."""
    if qv.dim() != q.dim():
        raise ValueError(f"qv has {qv.dim()} dimensions, expected {q.dim()} as q has")
    if qv.device != q.device:
        raise ValueError(f"qv is on {qv.device} and q on {q.device}, expected one CUDA device or the CPU")
    refuse_tangents("qv", qv)


def bounds(intervals: Tensor, q: Tensor) -> Tensor:
    """Intervals of keys as kernels read them: contiguous, and once where sequences or heads share them. May be the
    tensor itself.
    """
    check_intervals(intervals, q)
    for dim in (0, 1):
        if intervals.stride(dim) == 0 and intervals.shape[dim] > 1:
            intervals = intervals.narrow(dim, 0, 1)
    return dense(intervals)


def check_intervals(intervals: Tensor, q: Tensor) -> None:
    """Checks of intervals of keys what the extension module does not see."""
    if intervals.dtype != torch.int32 or intervals.dim() != 4 or intervals.device != q.device:
        found = f"{intervals.dtype} {tuple(intervals.shape)} on {intervals.device}"
        what = "(batch or 1, heads_q or 1, seqlen_q, 2 or 4)"
        raise ValueError(f"intervals is {found}, expected torch.int32 {what} on {q.device}")


def lse_like(q: Tensor) -> Tensor:
    """A new, contiguous tensor for LSE (batch, heads_q, seqlen_q)."""
    batch, seqlen, heads, _ = q.shape
    return q.new_empty(batch, heads, seqlen, dtype=torch.float32)


# Where torch cannot be asked who listens, all calls go through its dispatcher.
_CAN_ASK = _can_ask()

def define(name: str, arguments: str, results: str, function: Callable[..., Any]) -> None:
    """Defines an operator of this package, which a function computes on a GPU and on the CPU."""
    library.define(f"{name}({arguments}) -> {results}", tags=_TAGS)
    for key in ("CUDA", "CPU"):
        library.impl(name, function, key)
    overload = getattr(torch.ops.fa3, name).default
    if overload._schema.is_mutable:
        library.impl(name, _telling_autograd(overload), "ADInplaceOrView", with_keyset=True)


def _telling_autograd(overload: Any) -> Callable[..., Any]:
    """An operator that tells autograd what it writes, by its schema."""
    written = [(i, x) for i, x in enumerate(overload._schema.arguments) if x.alias_info and x.alias_info.is_write]

    def tell(keys: Any, *inputs: Any, **named: Any) -> Any:
        tell_autograd(*(named[x.name] if x.kwarg_only else inputs[i] for i, x in written))
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *inputs, **named)

    return tell


def tell_autograd(*written: Tensor) -> None:
    """Has a backward pass refuse tensors that it kept and that have been written since, as torch's own functions do.
    Inference tensors cannot be kept.
    """
    for tensor in written:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


# Operators live as long as this object.
library = torch.library.Library("fa3", "DEF")
# Compilers must leave the last dimension contiguous.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, float? softmax_scale, SymInt window_left, SymInt window_right, "
    "SymInt attention_chunk, float softcap, SymInt sm_margin, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, bool v_transposed=False, ScalarType? out_dtype=None, bool deterministic=False, "
    "Tensor? v_mean=None, Tensor? s_aux=None, Tensor? qv=None, Tensor? intervals=None"
)
define("forward", _ARGUMENTS, "(Tensor o, Tensor lse)", launch)
# Not `out`: that argument torch.compile takes for contiguous only.
define("forward_out", f"{_ARGUMENTS}, *, Tensor(a!) o", "Tensor lse", launch_into)
