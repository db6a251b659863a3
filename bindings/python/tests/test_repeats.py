"""Calls that are made again with equal options take a shorter way (`_fa3.Repeats`). They must do exactly what they
would do without it. Needs torch.
"""

import ast
import contextlib
import inspect
import math
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import ends, normal
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fa3
from fa3 import _fa3, operator

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="skipped: torch is older than 2.10"
)


class Subclass(torch.Tensor):
    """A tensor that may have functions of its own."""


class Mode(TorchFunctionMode):
    """A user's mode, which sees what is called."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def dense(of=lambda x: x, dtype=BF16, rows=5, **options):
    q, k, v = (of(normal(2, rows, heads, 64, dtype=dtype, seed=heads + i)) for i, heads in enumerate((4, 2, 2)))
    return fa3.flash_attn_func, (q, k, v), dict(causal=True) | options


def packed(of=lambda x: x, dtype=BF16, rows=9, **options):
    q, k, v = (of(normal(rows, heads, 64, dtype=dtype, seed=heads + i)) for i, heads in enumerate((4, 2, 2)))
    lists = ends([4, rows - 4], "cpu"), ends([4, rows - 4], "cpu")
    return fa3.flash_attn_varlen_func, (q, k, v, *lists, 8, 8), dict(causal=True) | options


def decoding(of=lambda x: x, dtype=BF16, rows=2, **options):
    q, cache = of(normal(rows, 1, 4, 64, dtype=dtype)), [normal(6, 4, 2, 64, dtype=dtype, seed=i) for i in (1, 2)]
    lists = dict(
        cache_seqlens=torch.full((rows,), 7, dtype=torch.int32),
        page_table=torch.arange(2 * rows, dtype=torch.int32).view(rows, 2),
    )
    return fa3.flash_attn_with_kvcache, (q, *cache), lists | options


def decoding_of_8_bits(of=lambda x: x, scales=(6, 4, 2), codes=torch.float8_e4m3fn, **options):
    """Decoding over caches of codes with scales, of tokens and heads in these pages or of heads."""
    function, (q, *cache), lists = decoding()
    k, v = (x.to(codes) for x in cache)
    named = {f"{name}_descale": of(torch.arange(48.0)[: math.prod(scales)].view(scales) + i) for i, name in enumerate("kv")}
    return function, (q, k, v), lists | named | options


@pytest.fixture
def runs(monkeypatch):
    """The calls that take the longer way."""
    runs, run = [], _fa3.run
    monkeypatch.setattr(_fa3, "run", lambda *given: runs.append(given) or run(*given))
    return runs


def outcome(call, contexts=()):
    """The results' bits, dtypes, strides and gradients, or the error."""
    function, tensors, options = call
    try:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            results = function(*tensors, **options)
    except Exception as error:
        return type(error), str(error)
    results = results if isinstance(results, tuple) else (results,)
    seen = [x for x in results if isinstance(x, torch.Tensor) and x.dtype != torch.uint64]
    return list(map(type, results)), [(x.dtype, x.stride(), x.requires_grad, x.detach().double().tolist()) for x in seen]


def alone(call, contexts=()):
    """The outcome of the longer way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fa3.Repeats, "attend", lambda *_: None)
        return outcome(call, contexts)


@pytest.mark.parametrize("make", [dense, packed, decoding])
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_call_that_is_made_again_takes_the_shorter_way(runs, make, with_lse, dtype):
    name = "return_softmax_lse" if make is decoding else "return_attn_probs"
    expected = alone(make(dtype=dtype, **{name: with_lse}))
    del runs[:]
    assert outcome(make(dtype=dtype, **{name: with_lse})) == expected and not runs
    # Other sizes are no other options.
    assert outcome(make(dtype=dtype, rows=11 if make is not decoding else 3, **{name: with_lse}))[0] and not runs


@pytest.mark.parametrize(
    "given", [dict(scales=(6, 4, 2)), dict(scales=(2, 2)), dict(codes=torch.int8)], ids=["tokens", "heads", "int8"]
)
def test_scales_are_no_options(runs, given):
    expected = alone(decoding_of_8_bits(**given))
    del runs[:]
    assert outcome(decoding_of_8_bits(**given)) == expected and not runs
    # Their numbers and strides are the ones of this call.
    others = dict(numbers=lambda x: x * 2 + 1, strides=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) * 3)
    for of in others.values():
        other = alone(decoding_of_8_bits(of, **given))
        del runs[:]
        assert outcome(decoding_of_8_bits(of, **given)) == other != expected and not runs


SCALES = {
    "of another dtype": dict(of=lambda x: x.to(BF16)),
    "of fewer pages": dict(of=lambda x: x[1:]),
    "of fewer heads": dict(of=lambda x: x[..., 1:]),
    "of one dimension more": dict(of=lambda x: x[..., None]),
    "of heads": dict(scales=(2, 2)),
    "of one tensor": dict(v_descale=None),
    "of both kinds": dict(v_descale=torch.ones(2, 2)),
    "of no tensor": dict(k_descale=None, v_descale=None),
    "of q": dict(q_descale=torch.ones(2, 2)),
    "with a gradient": dict(of=lambda x: x.requires_grad_()),
    "that are negated": dict(of=torch._neg_view),
    "of a subclass": dict(of=lambda x: x.as_subclass(Subclass)),
    "that are numbers": dict(k_descale=1.0),
    "of int8": dict(codes=torch.int8),
}


@pytest.mark.parametrize("usual", [(6, 4, 2), (2, 2)])
@pytest.mark.parametrize("other", SCALES)
def test_every_change_of_scales_counts(usual, other):
    changes = dict(scales=usual) | SCALES[other]
    expected, of_usual = alone(decoding_of_8_bits(**changes)), alone(decoding_of_8_bits(scales=usual))
    for _ in range(2):
        assert outcome(decoding_of_8_bits(scales=usual)) == of_usual
        assert outcome(decoding_of_8_bits(**changes)) == expected


def test_scales_of_16_bits_are_ignored():
    scales = dict(k_descale=torch.full((2, 2), 3.0), v_descale=torch.full((2, 2), 3.0))
    for _ in range(2):
        assert outcome(decoding_of_8_bits(scales=(2, 2)))[0]
        assert outcome(decoding(**scales)) == alone(decoding())


def heads_first(x):
    return x.transpose(0, -2).contiguous().transpose(0, -2)


def without_memory(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def odd_strides(x):
    return x[:1].as_strided((1, *x.shape[1:]), (24, *x.stride()[1:]))


class Integer(int):
    """An integer that may have functions of its own."""


def fewer_columns(x):
    return x[..., :32] if x.shape[-2] == 2 else x


OTHERS = {
    "other strides": dict(of=heads_first),
    "gaps in rows": dict(of=lambda x: x.repeat_interleave(2, dim=-1)[..., ::2]),
    "other columns": dict(of=fewer_columns),
    "float32": dict(dtype=torch.float32),
    "float64": dict(dtype=torch.float64),
    "float8": dict(of=lambda x: x.to(torch.float8_e4m3fn)),
    "one dimension more": dict(of=lambda x: x[None]),
    "one dimension less": dict(of=lambda x: x[0]),
    "gradients": dict(of=lambda x: x.requires_grad_()),
    "a parameter": dict(of=torch.nn.Parameter),
    "a subclass": dict(of=lambda x: x.as_subclass(Subclass)),
    "negated": dict(of=torch._neg_view),
    "zeros": dict(of=lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype)),
    "a view of one batch": dict(of=odd_strides),
    "memory that was freed": dict(of=without_memory),
    "a functional tensor": dict(of=torch._to_functional_tensor),
    "a copy when it is written": dict(of=torch._lazy_clone),
    "no rows": dict(of=lambda x: x[:0]),
    "no tensor": dict(of=lambda x: None),
    "numbers": dict(of=lambda x: x.tolist()),
    "a sparse tensor": dict(of=lambda x: x.to_sparse()),
    "an integer for a bool": dict(causal=1),
    "a float for a bool": dict(causal=1.0),
    "an array for a bool": dict(causal=torch.tensor(True)),
    "a subclass of integers": dict(causal=Integer(1)),
    "a larger integer": dict(sm_margin=2**70),
    "a scale": dict(softmax_scale=0.5),
    "a scale of zero": dict(softmax_scale=-0.0),
    "an invalid scale": dict(softmax_scale="1"),
    "a list": dict(window_size=[2, 0]),
    "a window": dict(window_size=(2, 0)),
    "floats in a window": dict(window_size=(-1.0, -1.0)),
    "a chunk": dict(attention_chunk=3),
    "a cap": dict(softcap=20.0),
    "an invalid margin": dict(sm_margin=-1),
    "a sink": dict(s_aux=torch.ones(4)),
    "pieces": dict(split_keys=128),
    "a mask by sequence": dict(causal=torch.tensor([True, False])),
    "a tree": dict(tree_mask=torch.ones(2, 1, dtype=torch.int64)),
    "a function of scores": dict(score=lambda s, b, h, q, k: s * 0.5),
    "a text of scores": dict(score=fa3.Score("s * 0.5")),
    "largest scores": dict(return_max_logits=True),
    "no largest scores": dict(return_max_logits=0),
    "an unknown argument": dict(unknown=1),
}


@pytest.mark.parametrize("make", [dense, packed, decoding])
@pytest.mark.parametrize("other", OTHERS)
def test_every_change_counts(make, other):
    changes = {"num_splits": 0, **OTHERS[other]} if make is decoding else OTHERS[other]
    expected, usual = alone(make(**changes)), alone(make())
    # Each of them is made again after the other one.
    for _ in range(2):
        assert outcome(make()) == usual
        assert outcome(make(**changes)) == expected


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", BF16),
    "a mode of functions": Mode,
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "forward mode": forward_ad.dual_level,
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("of", [lambda x: x, lambda x: x.requires_grad_()], ids=["plain", "gradients"])
def test_what_torch_does_meanwhile_counts(context, dtype, of):
    contexts = [CONTEXTS[context]]
    expected, usual = alone(dense(of, dtype), contexts), alone(dense(of, dtype))
    for _ in range(2):
        assert outcome(dense(of, dtype)) == usual
        assert outcome(dense(of, dtype), contexts) == expected


def test_tangents_are_refused():
    outcome(dense())
    with forward_ad.dual_level():
        q = normal(2, 5, 4, 64)
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="tangent"):
            fa3.flash_attn_func(dual, q, q, causal=True)


def test_transforms_see_the_operator():
    x = normal(3, 2, 5, 4, 64)
    fa3.flash_attn_func(x[0], x[0], x[0])
    mapped = torch.func.vmap(lambda x: fa3.flash_attn_func(x, x, x))(x)
    assert torch.equal(mapped, torch.stack([fa3.flash_attn_func(y, y, y) for y in x]))


class Operators(TorchDispatchMode):
    """Notes the operators that are called."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def of_mode(f, x):
    with Operators() as mode:
        mode.seen = []
        f(x)
    return " ".join(mode.seen)


TRACERS = {
    "a mode": of_mode,
    "make_fx": lambda f, x: make_fx(f)(x).code,
    "a tracer": lambda f, x: str(torch.jit.trace(f, x).inlined_graph),
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_tracers_see_the_operator(tracer):
    def f(x):
        return fa3.flash_attn_func(x, x, x)

    x = normal(2, 5, 4, 64)
    f(x)
    assert re.search(r"fa3(\.|::)forward", TRACERS[tracer](f, x))


def test_compilers_see_the_operator():
    x, seen = normal(2, 5, 4, 64), []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    expected = fa3.flash_attn_func(x, x, x)
    compiled = torch.compile(lambda x: fa3.flash_attn_func(x, x, x), backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), expected) and any("fa3.forward" in name for name in seen)


def test_a_number_in_a_tensor_is_read_by_each_call():
    scale = torch.tensor(0.5)
    for value in (0.5, 2.0, 0.25):
        scale.fill_(value)
        assert outcome(dense(softmax_scale=scale)) == alone(dense(softmax_scale=value))


def test_eight_options_are_kept(runs):
    calls = [dense(softmax_scale=100.0 + i) for i in range(9)]
    for call in calls:
        outcome(call)
    del runs[:]
    for call in calls[1:]:
        outcome(call)
    assert not runs
    outcome(calls[0])
    assert len(runs) == 1


def test_a_call_with_tensors_among_its_options_is_not_kept(runs):
    repeats, x = operator.repeats("q", "k", "v"), normal(1, 2, 2, 64)
    operation = _fa3.Operation("forward")
    for option in (x, [1], object(), (1, [2])):
        repeats.keep((x, x, x), (option,), operation, False)
        assert repeats.attend((x, x, x), (option,)) is None
    repeats.keep((x, x, x), (None,), operation, False)
    assert repeats.attend((x, x, x), (None,)) is not None
    for tensors in ((x, x), (x, x, None), (x, x, x, x), ()):
        assert repeats.attend(tensors, (None,)) is None
        repeats.keep(tensors, (0,), operation, False)
        assert repeats.attend(tensors, (0,)) is None


def of_torch(of=lambda x: x, dtype=BF16, heads=2, dropout=0.0, causal=True, debug=False, **options):
    q, k, v = (of(normal(2, h, 16, 64, dtype=dtype, seed=h + i)) for i, h in enumerate((4, heads, heads)))
    return torch.ops.aten._scaled_dot_product_flash_attention, (q, k, v, dropout, causal, debug), options


def packed_of_torch(of=lambda x: x, dtype=BF16, lengths=(4, 12), as_list=lambda x: x, dropout=0.0, causal=True, debug=False, **options):
    q, k, v = (of(normal(16, heads, 64, dtype=dtype, seed=heads + i)) for i, heads in enumerate((4, 2, 2)))
    lists = [as_list(ends(lengths, "cpu")) for _ in "qk"]
    return torch.ops.aten._flash_attention_forward, (q, k, v, *lists, 12, 12, dropout, causal, debug), options


OTHERS_OF_TORCH = {
    "other strides": dict(of=lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2)),
    "another address": dict(of=lambda x: torch.cat([x.flatten(), x.flatten()[:1]])[1:].view(x.shape)),
    "rows side by side": dict(of=lambda x: torch.cat([x, x], -1)[..., :64]),
    "gradients": dict(of=lambda x: x.requires_grad_()),
    "float16": dict(dtype=torch.float16),
    "float32": dict(dtype=torch.float32),
    "no mask": dict(causal=False),
    "dropout": dict(dropout=0.1),
    "a debug mask": dict(debug=True),
    "a scale": dict(scale=0.5),
}
OTHER_BATCHES = {
    "other heads": (of_torch, dict(heads=4)),
    "other sequences": (packed_of_torch, dict(lengths=(4, 2, 10))),
    "64 bits": (packed_of_torch, dict(as_list=lambda x: x.long())),
    "a window": (packed_of_torch, dict(window_size_left=3, window_size_right=0)),
    "lengths in use": (packed_of_torch, dict(seqused_k=torch.tensor([2, 9], dtype=torch.int32))),
}


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    "make, changes",
    [
        *(pytest.param(make, x, id=f"{make.__name__}-{name}") for make in (of_torch, packed_of_torch) for name, x in OTHERS_OF_TORCH.items()),
        *(pytest.param(*case, id=name) for name, case in OTHER_BATCHES.items()),
    ],
)
def test_operators_of_torch_are_made_again_with_equal_layouts(active, runs, make, changes):
    expected, usual = alone(make(**changes)), alone(make())
    for _ in range(2):
        assert outcome(make(**changes)) == expected
        assert outcome(make()) == usual
    del runs[:]
    assert outcome(make()) == usual and not runs


@pytest.mark.parametrize("function", [fa3.flash_attn_func, fa3.flash_attn_varlen_func, fa3.flash_attn_with_kvcache])
def test_every_argument_is_compared(function):
    [body] = ast.parse(inspect.getsource(function)).body
    [given] = [x.value for x in body.body if isinstance(x, ast.Assign) and getattr(x.targets[0], "id", "") == "given"]
    [tensors] = [x.value for x in body.body if isinstance(x, ast.Assign) and getattr(x.targets[0], "id", "") == "tensors"][:1] or [ast.parse("q, k, v").body[0].value]
    names = [x.id for x in (*tensors.elts, *given.elts)]
    assert sorted(names) == sorted(inspect.signature(function).parameters)
