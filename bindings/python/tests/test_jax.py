"""Attention for JAX: beside its definition in float64, beside JAX's own attention, and under JAX's transforms. Needs
jax, but no torch. Results and gradients are also computed on a GPU, all else on the CPU.
"""

import threading

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="skipped: jax is not installed")

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fa3.jax import attention

# Largest differences from the definition, of numbers up to about 5.
LIMITS = {"float32": 2e-5, "float16": 8e-3, "bfloat16": 6e-2}


def devices(platform):
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


@pytest.fixture(autouse=True)
def platform(request):
    """The platform of a test's parameter, otherwise the CPU."""
    platform = getattr(request, "param", "cpu")
    if not devices(platform):
        pytest.skip("skipped: no GPU that jax can use")
    with jax.default_device(devices(platform)[0]):
        yield platform


on_both = pytest.mark.parametrize("platform", ["cpu", "gpu"], indirect=True)


def randn(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def qkv(q=(2, 33, 4, 32), keys=40, heads_kv=2, head_dim_v=24, dtype="float32"):
    batch, _, _, head_dim = q
    shapes = q, (batch, keys, heads_kv, head_dim), (batch, keys, heads_kv, head_dim_v)
    return [randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def hidden_keys(rows, keys, causal=False, window_size=(-1, -1), used=(None, None)):
    """The keys of a sequence that its queries do not see."""
    used_rows, used_keys = (n if n is not None else full for n, full in zip(used, (rows, keys)))
    row, key = np.arange(rows)[:, None], np.arange(keys)
    position = row + used_keys - used_rows
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = (row >= used_rows) | (key >= used_keys)
    if left is not None and left >= 0:
        hidden |= position - key > left
    if right is not None and right >= 0:
        hidden |= key - position > right
    return hidden


def definition(q, k, v, dout, dlse, scale=None, softcap=0.0, query_seq_lengths=None, key_value_seq_lengths=None, **mask):
    """O, LSE, and the gradients of q, k and v, in float64."""
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlse))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, 2) for x in (k, v))
    slope = q.shape[3] ** -0.5 if scale is None else scale
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * slope
    if softcap:
        s = softcap * np.tanh(s / softcap)
        slope = slope * (1 - (s / softcap) ** 2)
    lengths = [[None] * len(q) if x is None else x for x in (query_seq_lengths, key_value_seq_lengths)]
    hidden = np.stack([hidden_keys(q.shape[1], k.shape[1], used=used, **mask) for used in zip(*lengths)])[:, None]
    exps = np.where(hidden, 0, np.exp(s))
    sums = exps.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(sums[..., 0])
    p = exps / np.where(sums == 0, 1, sums)
    o = np.einsum("bhqk,bkhd->bqhd", p, v)
    dp = np.einsum("bqhd,bkhd->bhqk", dout, v)
    delta = np.einsum("bqhd,bqhd->bhq", dout, o) - dlse
    ds = p * (dp - delta[..., None]) * slope
    dq, dk, dv = (np.einsum(f, *x) for f, x in (("bhqk,bkhd->bqhd", (ds, k)), ("bhqk,bqhd->bkhd", (ds, q)), ("bhqk,bqhd->bkhd", (p, dout))))
    dk, dv = (x.reshape(*x.shape[:2], x.shape[2] // group, group, x.shape[3]).sum(3) for x in (dk, dv))
    return o, lse, dq, dk, dv


def computed(q, k, v, dout, dlse, **options):
    """The results of `definition`, from one call."""
    (o, lse), vjp = jax.vjp(lambda *x: attention(*x, return_lse=True, **options), q, k, v)
    return o, lse, *vjp((dout, dlse))


def check(found, expected, limit):
    """Compares all results. Infinities are equal."""
    assert len(found) == len(expected)
    for x, y in zip(found, expected):
        assert x.shape == y.shape
        np.testing.assert_allclose(np.asarray(x, np.float64), y, atol=limit * max(1, np.abs(y[np.isfinite(y)]).max(initial=0)), rtol=0)


LENGTHS = dict(query_seq_lengths=np.array([33, 7], np.int32), key_value_seq_lengths=np.array([0, 29], np.int32))
CASES = {
    "plain": dict(dtype="float32"),
    "causal, fewer keys": dict(dtype="bfloat16", keys=20, options=dict(causal=True)),
    "causal, more keys": dict(dtype="float16", options=dict(causal=True)),
    "left": dict(dtype="float32", heads_kv=1, options=dict(causal=True, window_size=(9, None))),
    "window": dict(dtype="bfloat16", heads_kv=4, options=dict(window_size=(9, 3), scale=0.3)),
    "soft cap": dict(dtype="float32", options=dict(softcap=2.0, causal=True)),
    "lengths": dict(dtype="float32", options=dict(causal=True, **LENGTHS)),
    "no keys": dict(dtype="float32", keys=0),
    "no queries": dict(dtype="float32", q=(2, 0, 4, 32)),
}


@on_both
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_the_definitions(case, platform):
    options = dict(CASES[case])
    if platform == "gpu" and options["dtype"] == "float32":
        options["dtype"] = "float16"
    dtype, options_of_call = options["dtype"], options.pop("options", {})
    q, k, v = qkv(**options)
    dout = randn(*q.shape[:3], v.shape[3], dtype=dtype, seed=3)
    dlse = randn(q.shape[0], q.shape[2], q.shape[1], seed=4)
    found = computed(q, k, v, dout, dlse, **options_of_call)
    assert [x.dtype for x in found] == [q.dtype, jnp.float32, *[q.dtype] * 3]
    check(found, definition(q, k, v, dout, dlse, **options_of_call), LIMITS[dtype])


@on_both
def test_results_and_gradients_are_those_of_jaxs_own_attention(platform):
    dtype = "float32" if platform == "cpu" else "bfloat16"
    q, k, v = qkv((2, 50, 4, 32), keys=50, head_dim_v=32, dtype=dtype)
    dout = randn(*q.shape, dtype=dtype, seed=3)
    results = []
    for function in (
        lambda *x: attention(*x, causal=True, window_size=(20, 0), scale=0.2),
        lambda *x: jax.nn.dot_product_attention(*x, is_causal=True, local_window_size=(20, 0), scale=0.2),
    ):
        out, vjp = jax.vjp(jax.jit(function), q, k, v)
        results.append([out, *vjp(dout)])
    found, expected = results
    check(found, [np.asarray(x, np.float64) for x in expected], LIMITS[dtype])


@pytest.mark.parametrize("platform", ["gpu"], indirect=True)
def test_large_workspaces_on_a_gpu(platform):
    """The backward pass accumulates the gradient of q in XLA's memory, while other programs of the stream run."""
    x = qkv((2, 2000, 8, 128), keys=2000, head_dim_v=128, dtype="bfloat16")
    function = jax.jit(jax.grad(lambda *x: attention(*x).astype(jnp.float32).var(), (0, 1, 2)))
    expected = jax.jit(jax.grad(lambda *x: jax.nn.dot_product_attention(*x).astype(jnp.float32).var(), (0, 1, 2)))(*x)
    results = [function(*(x + 0 for x in x)) for _ in range(20)]
    for found in results:
        for one, other in zip(found, expected):
            np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (one, other)), atol=0.05 * float(abs(other).max()))


def loss(q, k, v, **options):
    return attention(q, k, v, causal=True, **options).astype(jnp.float32).var()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jit(jax.value_and_grad(f, (0, 1, 2))),
        lambda f: jax.value_and_grad(jax.checkpoint(jax.jit(f)), (0, 1, 2)),
        lambda f: jax.jit(jax.value_and_grad(lambda *x: jax.lax.scan(lambda y, _: (y + f(*x), None), 0.0, None, 1)[0], (0, 1, 2))),
    ],
    ids=["jit of grad", "checkpoint", "scan"],
)
def test_transforms_change_nothing(transform):
    x = qkv()
    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(*x)
    found, found_gradients = transform(loss)(*x)
    assert found == value
    for one, other in zip(gradients, found_gradients):
        np.testing.assert_array_equal(one, other)


def test_shapes_are_known_without_computing():
    x = [jax.ShapeDtypeStruct(x.shape, "bfloat16") for x in qkv()]
    o, lse = jax.eval_shape(lambda *x: attention(*x, return_lse=True), *x)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == ((2, 33, 4, 24), jnp.bfloat16, (2, 4, 33), jnp.float32)


def test_vmap_computes_one_batch():
    """Entries have the bits of calls of their own, also where K and V are shared, and of gradients."""
    (q, k, v), lengths = qkv((6, 33, 4, 32)), jnp.arange(3, 9, dtype=jnp.int32)
    q, k, v, lengths = (x.reshape(3, 2, *x.shape[1:]) for x in (q, k, v, lengths))
    function = lambda q, k, v, n: attention(q, k, v, causal=True, key_value_seq_lengths=n, return_lse=True)
    mapped = jax.vmap(function, (0, None, 1, 0))
    program = jax.jit(mapped).lower(q, k[0], v.swapaxes(0, 1), lengths).as_text()
    assert program.count("custom_call @fa3") == 1
    for found, *expected in zip(mapped(q, k[0], v.swapaxes(0, 1), lengths), *(function(q[i], k[0], v[i], lengths[i]) for i in range(3))):
        np.testing.assert_array_equal(found, jnp.stack(expected))
    gradient = jax.grad(loss, (0, 1, 2))
    for found, *expected in zip(jax.vmap(gradient)(q, k, v), *(gradient(q[i], k[i], v[i]) for i in range(3))):
        np.testing.assert_array_equal(found, jnp.stack(expected))
    twice = jax.vmap(jax.vmap(lambda *x: attention(*(x[None] for x in x))[0]))
    np.testing.assert_array_equal(twice(q, k, v).reshape(6, 33, 4, 24), attention(*(x.reshape(6, *x.shape[2:]) for x in (q, k, v))))


def test_threads_call_at_the_same_time():
    """XLA's threads call the handler."""
    # Other threads have another default device.
    x = jax.device_put(qkv(), jax.devices("cpu")[0])
    function, results = jax.jit(jax.value_and_grad(loss)), []
    threads = [threading.Thread(target=lambda: results.append([function(*x) for _ in range(10)])) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    value, gradient = function(*x)
    assert len(results) == 4 and all(found == value and (dq == gradient).all() for found, dq in sum(results, []))


def test_devices_compute_their_parts():
    if len(jax.devices("cpu")) < 2:
        pytest.skip("skipped: one device, since XLA_FLAGS was set")
    x, expected = qkv(), attention(*qkv(), causal=True)
    mesh = Mesh(jax.devices("cpu")[:2], "x")
    parts = PartitionSpec("x")
    placed = [jax.device_put(x, NamedSharding(mesh, parts)) for x in x]
    mapped = jax.jit(jax.shard_map(lambda *x: attention(*x, causal=True), mesh=mesh, in_specs=parts, out_specs=parts))
    np.testing.assert_array_equal(mapped(*placed), expected)
    gradient = jax.grad(lambda *x: mapped(*x).var(), (0, 1, 2))
    for found, one in zip(gradient(*placed), jax.grad(lambda *x: attention(*x, causal=True).var(), (0, 1, 2))(*x)):
        np.testing.assert_allclose(found, one, atol=1e-7)


@pytest.mark.parametrize("heads_kv, spec, gathers", [(2, ("x",), 0), (2, (None, None, "x"), 0), (1, (None, None, "x"), 1)])
def test_xla_distributes_sequences_and_heads(heads_kv, spec, gathers):
    """A program whose arrays are distributed over devices gathers none of them, if each device can compute its part."""
    if len(jax.devices("cpu")) < 2:
        pytest.skip("skipped: one device, since XLA_FLAGS was set")
    mesh = Mesh(jax.devices("cpu")[:2], "x")
    q, k, v = qkv(heads_kv=heads_kv)
    lengths = dict(key_value_seq_lengths=np.array([40, 17], np.int32))
    function = jax.jit(lambda *x: jax.vjp(lambda *x: attention(*x, causal=True, return_lse=True, **lengths), *x)[1]((x[0][..., :24], x[0][..., 0].swapaxes(1, 2))))
    of_k = PartitionSpec(*spec) if heads_kv > 1 else PartitionSpec()
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((q, PartitionSpec(*spec)), (k, of_k), (v, of_k))]
    assert ("all-gather" in function.lower(*placed).compile().as_text()) == gathers
    for found, expected in zip(function(*placed), function(q, k, v)):
        np.testing.assert_array_equal(found, expected)


Q, K, V = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((2, 16, 4, 64), (2, 16, 2, 64), (2, 16, 2, 64)))


def like(x, shape=None, dtype=None):
    return jax.ShapeDtypeStruct(shape or x.shape, dtype or x.dtype)


REFUSALS = [
    (dict(q=like(Q, dtype="int32")), TypeError, "q is int32, expected float16, bfloat16 or, on the CPU, float32"),
    (dict(k=like(K, dtype="float8_e4m3fn")), TypeError, "k is float8_e4m3fn, expected float16, bfloat16 or, on the CPU, float32"),
    (dict(v=like(V, dtype="float16")), ValueError, "v is float16, expected bfloat16 like q"),
    (dict(q=like(Q, (16, 4, 64))), ValueError, "q is (16, 4, 64), expected (batch, seqlen, heads, head_dim)"),
    (dict(q=like(Q, (2, 16, 3, 64))), ValueError, "heads_q 3 is not a multiple of heads_kv 2"),
    (dict(k=like(K, (2, 16, 2, 32))), ValueError, "k has head_dim 32, expected 64"),
    (dict(v=like(V, (2, 17, 2, 64))), ValueError, "v has seqlen 17, expected 16"),
    (dict(softcap=-1.0), ValueError, "soft cap -1 is outside 1e-18 to 1e18"),
    (dict(scale=float("nan")), ValueError, "softmax scale NaN is outside 1e-18 to 1e18"),
    (dict(window_size=(-2, 0)), ValueError, "window size -2 is outside -1 to 2^32 - 1"),
    (dict(window_size=(1, 2, 3)), ValueError, "window_size is (1, 2, 3), expected (left, right)"),
    (dict(window_size=(1.5, 0)), TypeError, "'float' object cannot be interpreted as an integer"),
    (dict(key_value_seq_lengths=np.zeros(2, np.float32)), ValueError, "key_value_seq_lengths is float32 (2,), expected int32 (2,)"),
    (dict(query_seq_lengths=np.zeros(3, np.int32)), ValueError, "query_seq_lengths is int32 (3,), expected int32 (2,)"),
    (dict(bias=0), TypeError, "attention() got an unexpected keyword argument 'bias'"),
]


@pytest.mark.parametrize("given, kind, sentence", REFUSALS, ids=lambda x: x if isinstance(x, str) else "")
def test_refusals_come_when_a_call_is_traced(given, kind, sentence):
    arrays = {name: given.get(name, x) for name, x in dict(q=Q, k=K, v=V).items()}
    options = {name: x for name, x in given.items() if name not in arrays}
    with pytest.raises(kind) as raised:
        jax.eval_shape(lambda arrays: attention(**arrays, **options), arrays)
    assert str(raised.value).split("\n")[0] == sentence


def test_derivatives_that_there_are_not_are_refused():
    x = qkv()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attention(q, *x[1:]), x[:1], x[:1])
    with pytest.raises(NotImplementedError, match="^attention has no second derivative: its gradients cannot be differentiated"):
        jax.grad(lambda q: jax.grad(loss)(q, *x[1:]).var())(x[0])


GPU = [
    (dict(shape=(2, 16, 4, 64), dtype="float32"), "the forward kernels take float16, bfloat16 and float8_e4m3fn, not float32"),
    (dict(shape=(2, 16, 4, 60)), "q has head_dim 60, not a multiple of 8 as bfloat16 needs (16-byte rows)"),
    (dict(shape=(2, 16, 4, 320), with_grad=True), "the backward kernels have no tile for head_dim 320 and head_dim_v 320"),
]


def lowered_for_gpu(shape, dtype="bfloat16", with_grad=False):
    x = jax.ShapeDtypeStruct(shape, dtype)
    function = jax.jit(jax.grad(loss, (0, 1, 2)) if with_grad else loss)
    return function.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("given, sentence", GPU)
def test_a_program_for_a_gpu_is_checked_by_its_rules(given, sentence):
    with pytest.raises(ValueError) as raised:
        lowered_for_gpu(**given)
    assert str(raised.value).split("\n")[0].startswith(sentence)


def test_a_program_for_a_gpu_has_two_calls():
    """The forward pass that keeps LSE, and the backward pass."""
    text = lowered_for_gpu((2, 16, 4, 64), with_grad=True)
    calls = [line for line in text.splitlines() if "custom_call @fa3" in line]
    assert ['operation = "forward"' in calls[0], 'operation = "backward"' in calls[1]] == [True, True] and len(calls) == 2


def call(*given, names, results, operation="forward", **options):
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in results]
    return jax.ffi.ffi_call("fa3", shapes)(*given, operation=operation, tensors=names, **options)


Q4 = (1, 2, 1, 8)
CALLS = [
    (dict(names="q k v o", results=[Q4], operation="attend"), "INVALID_ARGUMENT: there is no operation attend"),
    (dict(names="q k v o", results=[Q4], operation="append"), "INVALID_ARGUMENT: append writes to its arguments, which XLA does not allow"),
    (dict(names="q k o", results=[Q4]), "INVALID_ARGUMENT: there are 4 buffers, and 3 names of tensors"),
    (dict(names="q k dout o", results=[Q4]), "INVALID_ARGUMENT: there is no v"),
    (dict(names="q k v o lse", results=[Q4, (1, 1, 1)]), "INVALID_ARGUMENT: lse takes 8 bytes, its memory has 4"),
    (dict(names="q k v o", results=[(1, 2, 1, 4)]), "INVALID_ARGUMENT: o has head_dim 4, expected 8"),
    (dict(names="q k v o", results=[Q4], bias=np.float64(1)), "INVALID_ARGUMENT: the operation has no option bias"),
    (dict(names="q k v o", results=[Q4], softcap=np.int64(1)), "INVALID_ARGUMENT: softcap has XLA's type 5, expected 12"),
    (dict(names="q k v o", results=[Q4], softcap="1"), "INVALID_ARGUMENT: softcap is no number"),
    (dict(names="q k v o", results=[Q4], window=np.int64(1)), "INVALID_ARGUMENT: window is no list of three 64-bit integers"),
    (dict(names="q k v o", results=[Q4], softcap=np.float64(-1)), "INVALID_ARGUMENT: soft cap -1 is outside 1e-18 to 1e18"),
]


@pytest.mark.parametrize("given, sentence", CALLS, ids=[sentence for _, sentence in CALLS])
def test_the_handler_refuses_other_calls(given, sentence):
    x = randn(*Q4)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(call(x, x, x, **given))
    assert str(raised.value).split("\n")[0].startswith(sentence)
