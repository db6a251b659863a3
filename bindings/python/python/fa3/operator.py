"""The torch operators `fa3::forward` and `fa3::forward_out`, and functions that all operators use."""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import _fa3

# Tensors by their names, or what the extension module takes in their places.
Tensors = dict[str, Any]


class Options(NamedTuple):
    """The arguments of `fa3::forward` besides q, k and v, in this order."""

    softmax_scale: float | None
    window_left: int
    window_right: int
    attention_chunk: int
    softcap: float
    sm_margin: int
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    v_transposed: bool = False
    out_dtype: torch.dtype | None = None
    deterministic: bool = False
    v_mean: Tensor | None = None
    s_aux: Tensor | None = None
    qv: Tensor | None = None
    intervals: Tensor | None = None
    split_keys: int | None = None
    # Whether LSE has the largest scores of rows behind it: (2, batch, heads_q, seqlen_q).
    max_logits: bool = False
    # The text of a function of scores, and its tables t0, t1 and so on.
    score: str | None = None
    score_tables: Sequence[Tensor] | None = None

    def of_backward(self) -> tuple[float | None, int, int, int, float, int, bool]:
        """The arguments of `fa3::backward` besides tensors, in its order."""
        window = self.window_left, self.window_right, self.attention_chunk
        return self.softmax_scale, *window, self.softcap, self.sm_margin, self.deterministic


# The names of the options that the extension module takes: the first fields of `Options`.
SCORES = " ".join(Options._fields[:6])


def launch(
    q: Tensor, k: Tensor, v: Tensor, *options: Any, out: Tensor | None = None, **named: Any
) -> tuple[Tensor, Tensor | None]:
    """Calls `compute` with the arguments of `fa3::forward`."""
    return compute(q, k, v, Options(*options, **named), out=out)


def compute(
    q: Tensor, k: Tensor, v: Tensor, options: Options, with_lse: bool = True, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Computes O and, if wanted, LSE. On a GPU it launches on torch's current stream of the tensors' device. Fake
    tensors are only checked. O is written to `out`, if it is given.
    """
    try:
        refuse_tangents("q, k or v", q, k, v)
        v_transposed, out_dtype = options.v_transposed, options.out_dtype
        check_ranks(q, k, v)
        if v_transposed:
            _check_transposed(k, v)
        head_dim_v = v.shape[2 if v_transposed else 3]
        if out is not None:
            expected = *q.shape[:3], head_dim_v
            check_out_is(out, q, expected, "(batch, seqlen_q, heads_q, head_dim_v)", out_dtype)
        tensors: Tensors = {"q": q, "k": k, "v": v}
        fields: str = SCORES
        values: tuple[Any, ...] = options[:6]
        given_scales = options.q_descale, options.k_descale, options.v_descale, options.v_mean
        if not (given_scales[0] is given_scales[1] is given_scales[2] is given_scales[3] is None) or v_transposed:
            block_rows = check_descales(q, k, head_dim_v, *given_scales)
            tensors |= zip(("q_descale", "k_descale", "v_descale", "v_mean"), given_scales)
            fields, values = f"{SCORES} v_transposed block_rows", (*values, v_transposed, block_rows)
        if options.split_keys is not None:
            fields, values = f"{fields} split_keys", (*values, options.split_keys)
        if options.intervals is not None:
            tensors["intervals"] = bounds(options.intervals, q)
        fields, values = with_score(fields, values, tensors, options.score, options.score_tables)
        return attend("forward", fields, values, tensors, options, head_dim_v, with_lse, out)
    except RuntimeError:
        # Checking for nested tensors beforehand would slow down every call.
        for name, x in (("q", q), ("k", k), ("v", v)):
            refuse_nested(name, x)
        raise


def with_score(
    fields: str, values: tuple[Any, ...], tensors: Tensors, score: str | None, tables: Sequence[Tensor] | None
) -> tuple[str, tuple[Any, ...]]:
    """The names and values of an operation's options, and a function of scores, if any. Its tables become tensors."""
    if score is None:
        return fields, values
    tensors |= ((f"score_table{i}", x) for i, x in enumerate(tables or ()))
    return f"{fields} score", (*values, score)


# The names of the options that say in which form LSE is stored.
_LSE_FORM = "lse_base_two lse_without_sink lse_empty_is_infinite"


def with_lse_form(fields: str, values: tuple[Any, ...], options: Any) -> tuple[str, tuple[Any, ...]]:
    """The names and values of an operation's options, and the form of LSE, if it is not the default form."""
    form = options.lse_base_two, options.lse_without_sink, options.lse_empty_is_infinite
    return (f"{fields} {_LSE_FORM}", (*values, *form)) if any(form) else (fields, values)


def attend(
    operation: str,
    fields: str,
    values: tuple[Any, ...],
    tensors: Tensors,
    options: Any,
    head_dim_v: int,
    with_lse: bool,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Computes O and, if wanted, LSE by an operation of the extension module. If the largest scores are wanted, too,
    LSE and they are one tensor, (2, ...). `options` are an attention operator's options, of which only the sinks, qv,
    max_logits and the dtype of O are read. The other arguments are as in `run`.
    """
    q, out_dtype = tensors["q"], options.out_dtype
    assert q is not None
    if out_dtype is not None and out_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"out_dtype is {out_dtype}, expected torch.float16 or torch.bfloat16")
    if options.qv is not None:
        check_qv(options.qv, q)
        tensors["qv"] = options.qv
    if options.s_aux is not None:
        tensors["sink"] = sinks(options.s_aux, q, q.shape[-2])
    # LSE is allocated only if it is wanted: allocation takes as long as the launch.
    lse: Tensor | None
    if options.max_logits:
        lse = lse_like(q, 2)
        tensors["lse"], tensors["max_logits"] = lse
    else:
        tensors["lse"] = lse = lse_like(q) if with_lse else None
    o = o_like(q, head_dim_v, out_dtype) if out is None else out
    # For a new tensor of the default dtype, the extension module needs only the address.
    tensors["o"] = o.data_ptr() if out is None and out_dtype is None and not is_fake(o) else o
    run(operation, fields, values, tensors)
    return o, lse


def results(o: Tensor, lse: Tensor | None, largest: Tensor | None, with_lse: bool) -> Any:
    """The results of a function: O, LSE if it is wanted, and `largest` if it is not None."""
    found = (o, *((lse,) if with_lse else ()), *given(largest))
    return o if len(found) == 1 else found


def split_lse(lse: Tensor | None, max_logits: bool) -> tuple[Tensor | None, Tensor | None]:
    """LSE, and the largest score of each head, float32 (heads_q,), if LSE has the scores of rows behind it. They have
    no gradient.
    """
    if not max_logits or lse is None:
        return lse, None
    of_heads = lse[1].detach().movedim(-2, 0).flatten(1)
    # A call without rows has no maximum of its own.
    return lse[0], torch.nn.functional.pad(of_heads, (0, 1), value=-math.inf).amax(1)


@functools.lru_cache(maxsize=4096)
def made(operation: str, fields: str, *values: Any) -> _fa3.Operation:
    """An operation with its options, which calls with equal options share. `fields` are the names of the values, with
    spaces between, as torch's operators have them.
    """
    options = dict(zip(fields.split(), values, strict=True))
    if "window_left" in options:
        left, right = options.pop("window_left"), options.pop("window_right")
        options["window"] = left, right, options.pop("attention_chunk", 0)
        options["softcap"] = options.pop("softcap", None) or None
    return _fa3.Operation(operation, **options)


def repeats(*names: str) -> _fa3.Repeats:
    """The calls that a function makes again, with the names of the tensors that it takes. See `_fa3.Repeats`."""
    return _fa3.Repeats(names, _workspace)


def again(repeats: _fa3.Repeats, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """O, or (O, LSE), of a call that is made again. None if it is not, or if a compiler has to see all of it."""
    return repeats.attend(tensors, options) if _CAN_ASK and not is_compiling() else None


def run(operation: str, fields: str, values: tuple[Any, ...], tensors: Tensors) -> int | None:
    """Makes the extension module compute an operation with options as in `made`, on torch's current stream of the first
    tensor's device, or on the CPU. Fake tensors are only checked. Tensors that are None are left out.
    """
    first = next(iter(tensors.values()))
    assert first is not None
    if is_fake(first):
        return _check(operation, fields, values, tensors)
    device = first.get_device()
    stream, allocate = current_stream(device), workspace_for(first)
    return _fa3.run(made(operation, fields, *values), device, stream, tensors, allocate)


def _check(operation: str, fields: str, values: tuple[Any, ...], tensors: Tensors) -> int | None:
    """Makes the extension module check a call with fake tensors, by the rules of an H100 or of the CPU. Meta tensors
    follow the rules of the CPU, which supports all that a GPU supports. Sizes that depend on the data are not checked.
    """
    first_name, first = next(iter(tensors.items()))
    assert first is not None
    given: dict[str, Any] = {}
    try:
        for name, x in tensors.items():
            if x is not None:
                if x.device != first.device:
                    refuse_place(first_name, first, name, x)
                given[name] = x.dtype, 0, known(x.shape), known(x.stride())
        values = known(values)
    except Unknown:
        return None
    call = made(operation, fields, *values)
    if _recording.calls is not None:
        _recording.calls.append((call, given))
    by_rules_of = 0 if first.is_cuda or _recording.calls is not None else -1
    return _fa3.run(call, by_rules_of, None, given, None)


class _Recording(threading.local):
    """The list to which this thread's calls with fake tensors are added, if any."""

    calls: list[tuple[_fa3.Operation, Tensors]] | None = None


_recording = _Recording()


@contextlib.contextmanager
def recorded(calls: list[tuple[_fa3.Operation, Tensors]]) -> Iterator[None]:
    """Adds this thread's calls with fake tensors to a list, and checks them by the rules of an H100, while the context
    lasts.
    """
    before, _recording.calls = _recording.calls, calls
    try:
        yield
    finally:
        _recording.calls = before


def is_fake(x: Tensor) -> bool:
    """Whether a tensor is meta or fake: it has no memory."""
    return x.is_meta if type(x) is Tensor else x.is_meta or isinstance(x, FakeTensor)


def is_plain(*tensors: Tensor) -> bool:
    """Whether a call may bypass torch's dispatcher, which takes as long as a launch: no tracer, mode or transform is
    active, and all tensors are plain tensors.

    The memory of a plain tensor has its values. Other tensors need the dispatcher: it materializes a negated tensor or
    a zero tensor, and computes the shapes of meta tensors' results.
    """
    if not _CAN_ASK or is_compiling() or _is_tracing() or _dispatch_modes() or _function_modes() or _transforms():
        return False
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.is_neg() or tensor._is_zerotensor() or tensor.is_meta:
            return False
    return True


def is_transformed() -> bool:
    """Whether the call is inside of torch.func's transforms. Compilers handle transforms themselves."""
    active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
    return not is_compiling() and active()


def needs_grad(*tensors: Tensor) -> bool:
    """Whether autograd records the call."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False


def refuse_grad(*tensors: Tensor, function: str = "flash_attn_func") -> None:
    """Refuses `out` if autograd records the call, as torch's own functions do."""
    if needs_grad(*tensors):
        sentence = "out=... does not support automatic differentiation, but one of the arguments requires grad"
        raise RuntimeError(f"{function}: {sentence}")


def refuse_tangents(names: str, *tensors: Tensor) -> None:
    """Refuses tensors with tangents, since the result would silently have none."""
    # If forward mode's level is -1, no tensor has a tangent. The level is private to torch, but reading it is faster
    # than looking at each tensor.
    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(f"{names} has a tangent, and there is no derivative in forward mode")


def given(*tensors: Tensor | None) -> list[Tensor]:
    """The tensors that are not None."""
    return [tensor for tensor in tensors if tensor is not None]


def refuse_place(first_name: str, first: Tensor, name: str, x: Tensor) -> NoReturn:
    """Refuses a tensor that is on another device than the first one, or on an unsupported device."""
    also = "" if x is first else f" and {first_name} on {first.device}"
    raise ValueError(f"{name} is on {x.device}{also}, expected one CUDA device or the CPU")


def refuse_nested(name: str, tensor: Tensor) -> None:
    """Refuses a nested tensor, whose sequences have different lengths, so that it has no shape."""
    if tensor.is_nested:
        instead = "flash_attn_varlen_func takes its values, with its offsets as int32 cu_seqlens"
        raise TypeError(f"{name} is a nested tensor: {instead}")


class Unknown(Exception):
    """Raised for a number that depends on data."""


# Symbolic numbers of a compiler.
_SYMBOLS = frozenset((torch.SymInt, torch.SymFloat))


def known(numbers) -> tuple:
    """Numbers as they are in this call. A compiler's symbols become their current values, without a guard.

    Raises:
        Unknown: a number has no value yet, such as the number of elements that are not 0.
    """
    numbers = tuple(numbers)
    if _SYMBOLS.isdisjoint(map(type, numbers)):
        return numbers
    return tuple(_known(number) if type(number) in _SYMBOLS else number for number in numbers)


def _known(symbol: Any) -> float:
    if symbol.node.hint is None:
        raise Unknown
    return symbol.node.hint


def differ(given: Any, expected: Any) -> bool:
    """Whether numbers differ, as far as they are known."""
    try:
        return known(given) != known(expected)
    except Unknown:
        return False


def current_stream(device: int) -> int:
    """The driver's handle of torch's current stream of a GPU; 0 for the CPU, which has none."""
    if device < 0:
        return 0
    # Torch's private function is faster.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw(device) if raw else torch.cuda.current_stream(device).cuda_stream


def workspace_for(like: Tensor) -> Callable[[int, int], tuple[int, Tensor]]:
    """A function that allocates a workspace on the device of a tensor and zeroes its first `zeros` bytes on the current
    stream. It returns the address and the tensor.

    While the stream is captured, the workspace is the graph's own memory, and each replay zeroes it first. As with any
    tensor, the next use of this memory comes later on the same stream.
    """
    return functools.partial(_workspace, like)


def _workspace(like: Tensor, bytes: int, zeros: int) -> tuple[int, Tensor]:
    workspace = like.new_empty(bytes, dtype=torch.uint8)
    if zeros:
        workspace[:zeros].zero_()
    return workspace.data_ptr(), workspace


def _can_ask() -> bool:
    """Whether this torch has the functions that `is_plain` calls, some of which are private."""
    return hasattr(Tensor, "_is_zerotensor") and all(hasattr(torch._C, name) for name in _ASKED)


def o_like(q: Tensor, head_dim_v: int, dtype: torch.dtype | None) -> Tensor:
    """A new, contiguous tensor for O: q's shape, with head_dim_v columns."""
    if dtype is None and q.dtype is torch.float8_e4m3fn:
        dtype = torch.bfloat16
    if type(q) is Tensor and q.shape[-1] == head_dim_v and q.is_contiguous():
        # Without a dtype, torch parses the arguments faster.
        return torch.empty_like(q) if dtype is None else torch.empty_like(q, dtype=dtype)
    # Torch parses sizes faster as separate arguments than as a tuple.
    return q.new_empty(*q.shape[:-1], head_dim_v, dtype=dtype)


def lse_like(q: Tensor, *first: int) -> Tensor:
    """A new, contiguous tensor for LSE: (batch, heads_q, seqlen_q), or (heads_q, total_q) of packed sequences. `first`
    are dimensions before these.
    """
    *batch, rows, heads, _ = q.shape
    return q.new_empty(*first, *batch, heads, rows, dtype=torch.float32)


def check_out_is(out: Tensor, q: Tensor, expected: tuple[int, ...], what: str, dtype: torch.dtype | None) -> None:
    """Checks out: its shape, whose dimensions are `what`, q's device, and `dtype` or the default dtype of O.
    """
    dtype = dtype or dtype_of_output(q)
    if out.dtype != dtype or differ(out.shape, expected) or out.device != q.device:
        found = f"{out.dtype} {tuple(out.shape)} on {out.device}"
        raise ValueError(f"out is {found}, expected {dtype} {tuple(expected)} on {q.device}: {what}")
    refuse_tangents("out", out)


def dtype_of_output(q: Tensor) -> torch.dtype:
    """The default dtype of O: q's, but bfloat16 for float8."""
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def check_ranks(q: Tensor, k: Tensor, v: Tensor, packed: bool = False) -> None:
    """Checks that tensors have four dimensions, or three if sequences are packed."""
    expected, what = (3, "(total, heads, head_dim)") if packed else (4, "(batch, seqlen, heads, head_dim)")
    if not q.dim() == k.dim() == v.dim() == expected:
        given = f"q has {q.dim()}, k {k.dim()} and v {v.dim()} dimensions"
        raise ValueError(f"{given}, expected {expected}: {what}")


def _check_transposed(k: Tensor, v: Tensor) -> None:
    """Checks that a transposed V has the keys of K, rounded up to whole blocks, and no gaps."""
    batch, seqlen, heads, _ = k.shape
    expected = (batch, heads, v.shape[2], (seqlen + 127) // 128 * 128)
    if differ(v.shape, expected) or not v.is_contiguous():
        what = "(batch, heads_kv, head_dim_v, seqlen_k rounded up to 128)"
        raise ValueError(f"transposed v is {tuple(v.shape)}, expected a contiguous {expected}: {what}")


def check_descales(q: Tensor, k: Tensor, head_dim_v: int, *given: Tensor | None) -> int | None:
    """Checks the scales of e4m3 Q, K and V and the means of V's channels. Returns how many rows of Q share a scale, or
    None for scales per head.
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
        # If blocks of 64 and of 128 rows both give this number of blocks, 128 is taken.
        blocks = -(-q.shape[1] // 128)
        rows = 64 if differ(q_descale.shape[2:], [blocks]) else 128
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
            if x.dtype != torch.float32 or differ(x.shape, shape) or x.device != q.device:
                found = f"{x.dtype} {tuple(x.shape)} on {x.device}"
                raise ValueError(f"{name} is {found}, expected torch.float32 {shape} on {q.device}: {what}")
            refuse_tangents(name, x)
    return rows


def check_is_scaled(name: str, q: Tensor, k: Tensor) -> None:
    """Checks that the tensor which a descale belongs to is e4m3."""
    of, x = ("q", q) if name == "q_descale" or k.dtype == q.dtype else ("k", k)
    if x.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name} is for torch.float8_e4m3fn, {of} is {x.dtype}")


def checked_descales(q: Tensor, k: Tensor, ends: Tensor | None, *descales: Tensor | None) -> Tensors:
    """The per-head scales of e4m3 Q, K and V by their names, checked: (sequences, heads_kv). `ends` is cu_seqlens of q,
    or None for a dense batch.
    """
    if descales[0] is descales[1] is descales[2] is None:
        return {}
    named: Tensors = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    for name, x in named.items():
        if x is not None:
            check_is_scaled(name, q, k)
            shape = q.shape[0] if ends is None else ends.shape[0] - 1, k.shape[-2]
            if x.dtype != torch.float32 or differ(x.shape, shape) or x.device != q.device:
                found = f"{x.dtype} {tuple(x.shape)} on {x.device}"
                expected = f"torch.float32 {shape} on {q.device}: (sequences, heads_kv)"
                raise ValueError(f"{name} is {found}, expected {expected}")
            refuse_tangents(name, x)
    return named


def sinks(s_aux: Tensor, q: Tensor, heads: int) -> Tensor:
    """Sinks in float32, one for each query head, on the device of q: the tensor itself or a copy."""
    is_float = s_aux.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if not is_float or differ(s_aux.shape, [heads]) or s_aux.device != q.device:
        found = f"{s_aux.dtype} {tuple(s_aux.shape)} on {s_aux.device}"
        expected = f"torch.float32, torch.float16 or torch.bfloat16 {(heads,)} on {q.device}: (heads_q,)"
        raise ValueError(f"s_aux is {found}, expected {expected}")
    refuse_tangents("s_aux", s_aux)
    return s_aux.to(torch.float32)


def check_qv(qv: Tensor, q: Tensor) -> None:
    """Checks what the extension module does not check: the rank, the device and the tangents of qv."""
    if qv.dim() != q.dim():
        raise ValueError(f"qv has {qv.dim()} dimensions, expected {q.dim()} as q has")
    if qv.device != q.device:
        raise ValueError(f"qv is on {qv.device} and q on {q.device}, expected one CUDA device or the CPU")
    refuse_tangents("qv", qv)


def bounds(intervals: Tensor, q: Tensor) -> Tensor:
    """The intervals of a dense or packed q, checked. They get a batch axis if they have none. Axes that are expanded
    for the batch or for heads become 1. Other masks are as `arguments.mask_of_data` makes them.
    """
    if intervals.dim() == 4 and intervals.shape[3] == 1:
        if intervals.device != q.device:
            refuse_place("q", q, "causal or tree_mask", intervals)
        return intervals
    if intervals.dtype != torch.int32 or intervals.dim() != q.dim() or intervals.device != q.device:
        found = f"{intervals.dtype} {tuple(intervals.shape)} on {intervals.device}"
        packed, dense = "(heads_q or 1, total_q, 2 or 4)", "(batch or 1, heads_q or 1, seqlen_q, 2 or 4)"
        what = packed if q.dim() == 3 else dense
        raise ValueError(f"intervals is {found}, expected torch.int32 {what} on {q.device}")
    if intervals.dim() == 3:
        intervals = intervals.unsqueeze(0)
    for dim in (0, 1):
        if not is_fake(q) and intervals.stride(dim) == 0 and intervals.shape[dim] > 1:
            intervals = intervals.narrow(dim, 0, 1)
    return intervals


# The functions of `is_plain`, under names that are found faster. If torch lacks one, all calls go through its
# dispatcher.
_ASKED = "_is_tracing _len_torch_dispatch_stack _len_torch_function_stack _are_functorch_transforms_active".split()
_functions: list[Any] = [getattr(torch._C, name, None) for name in _ASKED]
_is_tracing, _dispatch_modes, _function_modes, _transforms = _functions
_CAN_ASK = _can_ask()

def define(name: str, arguments: str, results: str, function: Callable[..., Any]) -> None:
    """Defines an operator of this package. `function` computes it on a GPU and on the CPU, and checks fake tensors.
    """
    library.define(f"{name}({arguments}) -> {results}", tags=_TAGS)
    for key in ("CUDA", "CPU"):
        library.impl(name, function, key)
    torch.library.register_fake(f"fa3::{name}", function, lib=library)
    overload = getattr(torch.ops.fa3, name).default
    if overload._schema.is_mutable:
        library.impl(name, _telling_autograd(overload), "ADInplaceOrView", with_keyset=True)


def define_attention(
    name: str, arguments: str, launch: Callable[..., Any], function: str | None, out: str = "a"
) -> None:
    """Defines an operator that returns O and LSE, and its variant that writes O to a given tensor. `function` is the
    caller's name for errors, or None if `launch` itself refuses gradients. `out` is the written tensor's letter in the
    schema.
    """

    def launch_into(*inputs: Any, o: Tensor) -> Tensor:
        if function is not None:
            refuse_grad(o, *(x for x in inputs if isinstance(x, Tensor)), function=function)
        return launch(*inputs, out=o)[1]

    define(name, arguments, "(Tensor o, Tensor lse)", launch)
    # The written tensor is not named `out`, since torch.compile would assume that it is contiguous.
    define(f"{name}_out", f"{arguments}, *, Tensor({out}!) o", "Tensor lse", launch_into)


def _telling_autograd(overload: Any) -> Callable[..., Any]:
    """A kernel that tells autograd which arguments the operator writes, by its schema."""
    written = [(i, x) for i, x in enumerate(overload._schema.arguments) if x.alias_info and x.alias_info.is_write]

    def tell(keys: Any, *inputs: Any, **named: Any) -> Any:
        tell_autograd(*(named[x.name] if x.kwarg_only else inputs[i] for i, x in written))
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *inputs, **named)

    return tell


def tell_autograd(*written: Tensor) -> None:
    """Increments the versions of written tensors, so that a backward pass that saved them raises, as with torch's own
    functions. Inference tensors have no version and cannot be saved.
    """
    for tensor in written:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


# The operators exist as long as this object.
library: torch.library.Library = torch.library.Library("fa3", "DEF")
# Compilers must leave the last dimension contiguous.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
# The arguments of a function of scores.
OF_SCORE = "str? score=None, Tensor[]? score_tables=None"
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, float? softmax_scale, SymInt window_left, SymInt window_right, "
    "SymInt attention_chunk, float softcap, SymInt sm_margin, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, bool v_transposed=False, ScalarType? out_dtype=None, bool deterministic=False, "
    "Tensor? v_mean=None, Tensor? s_aux=None, Tensor? qv=None, Tensor? intervals=None, SymInt? split_keys=None, "
    f"bool max_logits=False, {OF_SCORE}"
)
define_attention("forward", _ARGUMENTS, launch, "flash_attn_func")
