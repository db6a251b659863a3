"""Attention for JAX: `attention`, by XLA's foreign function interface, with gradients. It needs JAX, and no torch.

XLA calls the extension module's handler, on the CPU or on a GPU's stream. Nothing else of this package is for JAX.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.typing import ArrayLike

from . import _fa3

__all__ = ["attention"]

# The extension module's names of dtypes.
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32"}
_LENGTHS = {"query_seq_lengths": "seqused_q", "key_value_seq_lengths": "seqused_k"}

for _platform, _address in _fa3.xla_handlers():
    jax.ffi.register_ffi_target("fa3", jax.ffi.pycapsule(_address), platform=_platform)


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    deterministic: bool = False,
    return_lse: Literal[False] = False,
) -> Array: ...


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    deterministic: bool = False,
    return_lse: Literal[True],
) -> tuple[Array, Array]: ...


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]: ...


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention of float16 and bfloat16 arrays on a Hopper GPU, and of these and float32 on the CPU.

    O and LSE are differentiable in q, k and v, once and in reverse mode. `jax.jit`, `jax.vmap`, `jax.checkpoint` and
    `jax.shard_map` take the function. `jax.vmap` computes all entries in one call, as one batch.

    Arguments:
        q: (batch, seqlen_q, heads_q, head_dim).
        k: (batch, seqlen_k, heads_kv, head_dim) of q's dtype; heads_q is a multiple of heads_kv.
        v: (batch, seqlen_k, heads_kv, head_dim_v) of q's dtype.
        scale: the factor of q k^T; 1 / sqrt(head_dim) if None. Like all that follows it is a number, not an array that
            JAX traces.
        causal: a query sees keys up to its own position. The last query is aligned with the last key, as in
            FlashAttention. `is_causal` of `jax.nn.dot_product_attention` aligns the first ones, which is the same mask
            if there are as many queries as keys.
        window_size: (left, right), how many keys before and after its position a query sees; None or -1 is unbounded.
            With causal, right is 0. It is aligned like causal.
        softcap: scores s become softcap * tanh(s / softcap); 0 is no cap.
        query_seq_lengths, key_value_seq_lengths: how many rows of each sequence are in use, its first ones: int32
            (batch,), traced or not. Causal masks and windows align the last query in use with the last key in use.
        deterministic: whether the gradient of q has the same bits in every run on a GPU. All else always has.
        return_lse: whether to return LSE as well.

    Returns: O (batch, seqlen_q, heads_q, head_dim_v) of q's dtype. With return_lse (O, LSE), LSE float32 (batch,
        heads_q, seqlen_q): the natural logarithm of the sum of exp(score). A query that is not in use or sees no key
        has O = 0, LSE = -inf and a gradient of 0.

    Raises, when the call is traced:
        TypeError: q, k or v has another dtype.
        ValueError: shapes do not fit each other, a number is invalid, or no kernel computes the call. On a GPU this is
            raised when the program is lowered.
    """
    sides = [-1 if side is None else operator.index(side) for side in window_size]
    if len(sides) != 2:
        raise ValueError(f"window_size is {window_size}, expected (left, right)")
    call = _Call(
        None if scale is None else float(scale),
        (sides[0], 0 if causal else sides[1], 0),
        float(softcap),
        bool(deterministic),
        bool(return_lse),
    )
    q, k, v = (_floats(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    given = dict(query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths)
    lengths = {_LENGTHS[name]: _integers(name, x, q.shape[0]) for name, x in given.items() if x is not None}
    return _attend(call, q, k, v, lengths)


class _Call(NamedTuple):
    """The options of a call."""

    scale: float | None
    window: tuple[int, int, int]
    softcap: float
    deterministic: bool
    with_lse: bool

    def options(self, **more: Any) -> dict[str, Any]:
        """Options of the extension module's operations."""
        given = dict(softmax_scale=self.scale, window=self.window, softcap=self.softcap or None, **more)
        return {name: value for name, value in given.items() if value is not None}


def _floats(name: str, x: ArrayLike) -> Array:
    """An array of numbers, checked."""
    x = jnp.asarray(x)
    if x.dtype.name not in ("float32", "float16", "bfloat16"):
        raise TypeError(f"{name} is {x.dtype.name}, expected float16, bfloat16 or, on the CPU, float32")
    if x.ndim != 4:
        raise ValueError(f"{name} is {x.shape}, expected (batch, seqlen, heads, head_dim)")
    return x


def _integers(name: str, x: ArrayLike, count: int) -> Array:
    """An array of lengths, checked."""
    x = jnp.asarray(x)
    if x.dtype != np.int32 or x.shape != (count,):
        raise ValueError(f"{name} is {x.dtype.name} {x.shape}, expected int32 {(count,)}")
    return x


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, q: Array, k: Array, v: Array, lengths: dict[str, Array]) -> Any:
    results = _forward(call, q, k, v, lengths, call.with_lse)
    return tuple(results) if call.with_lse else results[0]


def _forward(call: _Call, q: Array, k: Array, v: Array, lengths: dict[str, Array], with_lse: bool) -> list[Array]:
    """O, and LSE if `with_lse`."""
    batch, seqlen, heads, _ = q.shape
    results = dict(o=((*q.shape[:3], v.shape[3]), q.dtype), lse=((batch, heads, seqlen), np.dtype(np.float32)))
    if not with_lse:
        del results["lse"]
    return _run("forward", dict(q=q, k=k, v=v, **lengths), results, call.options())


def _attend_forward(call: _Call, q: Array, k: Array, v: Array, lengths: dict[str, Array]) -> Any:
    o, lse = _forward(call, q, k, v, lengths, True)
    return (o, lse) if call.with_lse else o, (q, k, v, lengths, o, lse)


def _attend_backward(call: _Call, kept: Any, gradients: Any) -> Any:
    q, k, v, lengths, o, lse = kept
    dout, *dlse = gradients if call.with_lse else (gradients,)
    given = dict(q=q, k=k, v=v, **lengths, o=o, lse=lse, dout=dout, **dict(zip(["dlse"], dlse)))
    results = {f"d{name}": (given[name].shape, given[name].dtype) for name in "qkv"}
    return *_run("backward", given, results, call.options(deterministic=call.deterministic)), None


_attend.__wrapped__.defvjp(_attend_forward, _attend_backward)


def _run(
    operation: str,
    given: Mapping[str, Array],
    results: Mapping[str, tuple[tuple[int, ...], Any]],
    options: dict[str, Any],
) -> list[Array]:
    """Checks an operation of the extension module, and makes it a part of the program that is traced. The results have
    these shapes and dtypes.
    """
    called = _Called(
        operation,
        tuple((name, x.dtype.name, x.shape) for name, x in given.items())
        + tuple((name, dtype.name, shape) for name, (shape, dtype) in results.items()),
        tuple(options.items()),
    )
    called.check(-1)

    @jax.custom_batching.custom_vmap
    def run(*given: Array) -> list[Array]:
        q, *others = given
        # Results vary over the axes of a mesh as q does, inside `jax.shard_map`.
        like_q = lambda q: [jnp.broadcast_to(q.sum().astype(dtype), shape) for shape, dtype in results.values()]
        outputs = jax.eval_shape(like_q, q)
        attributes = {name: _attribute(value) for name, value in options.items()}
        names = " ".join(name for name, *_ in called.tensors)
        call = jax.ffi.ffi_call("fa3", outputs)
        return call(_checked.bind(q, called=called), *others, operation=operation, tensors=names, **attributes)

    @run.def_vmap
    def run_as_one_batch(size: int, are_batched: Sequence[bool], *arrays: Array) -> Any:
        entries = [x if is_batched else jnp.broadcast_to(x, (size, *x.shape)) for x, is_batched in zip(arrays, are_batched)]
        as_one = {name: x.reshape(size * x.shape[1], *x.shape[2:]) for name, x in zip(given, entries)}
        shapes = {name: ((size * shape[0], *shape[1:]), dtype) for name, (shape, dtype) in results.items()}
        outputs = _run(operation, as_one, shapes, options)
        return [x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in outputs], [True] * len(outputs)

    return run(*given.values())


class _Called(NamedTuple):
    """An operation with its tensors, each (name, dtype, shape), and its options."""

    operation: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    options: tuple[tuple[str, Any], ...]

    def check(self, device: int) -> None:
        """Checks the call by the rules of the CPU, which is device -1, or of a GPU."""
        described = {}
        for name, dtype, shape in self.tensors:
            strides = tuple(int(np.prod(shape[i + 1 :], dtype=object)) for i in range(len(shape)))
            described[name] = (_DTYPES.get(dtype, dtype), 0, shape, strides)
        try:
            _fa3.run(_fa3.Operation(self.operation, **dict(self.options)), device, None, described, None)
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace("torch.", "")) from None


def _attribute(value: Any) -> Any:
    """An option as an attribute of an FFI call, in 64 bits."""
    if isinstance(value, tuple):
        return np.array(value, np.int64)
    return np.bool_(value) if isinstance(value, bool) else np.float64(value)


# The identity of q. Where a program is lowered for a GPU, it checks the call by the rules of a GPU: a function that is
# traced does not know yet where it will run.
_checked = Primitive("fa3_checked")
_checked.def_abstract_eval(lambda q, *, called: q)
_checked.def_impl(lambda q, *, called: q)
mlir.register_lowering(_checked, lambda ctx, q, *, called: [q])


def _refuse_derivative(primals: Any, tangents: Any, *, called: _Called) -> Any:
    raise NotImplementedError("attention has no second derivative: its gradients cannot be differentiated")


def _lowered_for_gpu(ctx: mlir.LoweringRuleContext, q: Any, *, called: _Called) -> list[Any]:
    called.check(0)
    return [q]


mlir.register_lowering(_checked, _lowered_for_gpu, platform="cuda")
ad.primitive_jvps[_checked] = _refuse_derivative
