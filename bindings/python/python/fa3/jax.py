"""Attention for JAX: `attention`, by XLA's foreign function interface, with gradients. It needs JAX, and no torch.

XLA calls the extension module's handler, on the CPU or on a GPU's stream. Nothing else of this package is for JAX.
"""

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from . import _fa3

__all__ = ["attention"]

# The extension module's names of dtypes.
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32"}
# The dimensions of arrays: sequences, queries i and keys j, heads of q and groups of heads g, columns d and e.
_DIMS = {"q": "b i h d", "k": "b j g d", "v": "b j g e", "o": "b i h e", "lse": "b h i", "seqused_q": "b", "seqused_k": "b"}
_DIMS |= {f"d{name}": _DIMS[name] for name in ("q", "k", "v", "lse")} | {"dout": _DIMS["o"]}
_LENGTHS = {"query_seq_lengths": "seqused_q", "key_value_seq_lengths": "seqused_k"}

if jax.__version_info__ < (0, 7, 2):
    raise ImportError(f"fa3.jax needs JAX 0.7.2 or newer, and this is {jax.__version__}")

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
    `jax.shard_map` take the function. `jax.vmap` computes all entries in one call, as one batch. If q is distributed
    over devices by its sequences or heads, so is the call, where each device has as many of them.

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
        NotImplementedError: a second derivative.
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
    return _compiled(call, q, k, v, lengths)


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


_attend.defvjp(_attend_forward, _attend_backward)
_compiled = jax.jit(_attend, static_argnums=0)


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
    def run(*arrays: Array) -> list[Array]:
        q, *others = arrays
        return _partitioned(called, len(arrays))(_checked.bind(q, called=called), *others)

    @run.def_vmap
    def run_as_one_batch(size: int, are_batched: Sequence[bool], *arrays: Array) -> Any:
        entries = [x if has else jnp.broadcast_to(x, (size, *x.shape)) for x, has in zip(arrays, are_batched)]
        as_one = {name: x.reshape(size * x.shape[1], *x.shape[2:]) for name, x in zip(given, entries)}
        shapes = {name: ((size * shape[0], *shape[1:]), dtype) for name, (shape, dtype) in results.items()}
        outputs = _run(operation, as_one, shapes, options)
        return [x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in outputs], [True] * len(outputs)

    return run(*given.values())


def _partitioned(called: "_Called", count: int) -> Any:
    """A call as a function of its `count` arguments. Where XLA distributes a program over devices by itself, each
    device computes a part of the sequences, of the heads of k and v, or of both.
    """
    (_, _, (sequences, _, heads_q, _)), (_, _, (_, _, heads_kv, _)), *_ = called.tensors
    # A head of k and v serves r heads of q.
    of_q = "g" if heads_q == heads_kv else "r" if heads_kv == 1 else "(g r)"
    sizes = dict(r=heads_q // heads_kv) if of_q == "(g r)" else {}
    dims = [_DIMS[name].replace("h", of_q) for name, *_ in called.tensors]

    @custom_partitioning
    def run(*arrays: Array) -> list[Array]:
        return called.run(arrays)

    def shardings(mesh: Any, arrays: Sequence[Any]) -> tuple[Any, Any]:
        """The shardings of arguments and results, which follow from that of q."""
        batch, _, heads = (tuple(arrays[0].sharding.spec) + (None,) * 3)[:3]
        axes = {"b": _dividing(mesh, batch, sequences), "g": _dividing(mesh, heads, heads_kv)}
        axes["h"] = axes["g"]
        of = [PartitionSpec(*(axes.get(dim) for dim in _DIMS[name].split())) for name, *_ in called.tensors]
        placed = [NamedSharding(mesh, spec) for spec in of]
        return placed[: len(arrays)], placed[len(arrays) :]

    def partition(mesh: Any, arrays: Any, results: Any) -> Any:
        of_arrays, of_results = shardings(mesh, arrays)
        part = called.part([*of_arrays, *of_results])
        return mesh, lambda *parts: part.run(parts), of_results, tuple(of_arrays)

    run.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, arrays, results: shardings(mesh, arrays)[1],
        sharding_rule=f"{', '.join(dims[:count])} -> {', '.join(dims[count:])}",
        need_replication_factors=tuple(dict.fromkeys(x for x in " ".join(dims) if x in "ijder")),
        **sizes,
    )
    return run


class _Called(NamedTuple):
    """An operation with its tensors, each (name, dtype, shape), and its options."""

    operation: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    options: tuple[tuple[str, Any], ...]

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Makes the call a part of the program that is traced."""
        # Results vary over the axes of a mesh as q does, inside `jax.shard_map`.
        results = self.tensors[len(arrays) :]
        like_q = lambda q: [jnp.broadcast_to(q.sum().astype(dtype), shape) for _, dtype, shape in results]
        call = jax.ffi.ffi_call("fa3", jax.eval_shape(like_q, arrays[0]))
        options = {name: _attribute(value) for name, value in self.options}
        names = " ".join(name for name, *_ in self.tensors)
        return call(*arrays, operation=self.operation, tensors=names, **options)

    def part(self, shardings: Sequence[NamedSharding]) -> "_Called":
        """The call of one device."""
        tensors = [(name, dtype, x.shard_shape(shape)) for (name, dtype, shape), x in zip(self.tensors, shardings)]
        return _Called(self.operation, tuple(tensors), self.options)

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


def _dividing(mesh: Any, axes: Any, extent: int) -> Any:
    """The axes of a mesh over which a dimension is distributed, if they divide its extent into equal parts."""
    count = math.prod(mesh.shape[axis] for axis in (axes if isinstance(axes, tuple) else (axes,)) if axis is not None)
    return axes if extent % count == 0 else None


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
