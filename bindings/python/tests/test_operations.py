"""Laws of all operations in torch's operators, compilers, tracers and fake tensors. Needs torch."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from operations import EDGES, OPERATIONS, SHAPES, heads_outside
from packing import assert_equal, needs_a_compiler, normal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode



@pytest.fixture(params=OPERATIONS.values(), ids=OPERATIONS)
def operation(request):
    return request.param


NEGATED = ("q", "k", "v", "x", "qv", "cos", "sin", "rotary_cos", "out_partial")
VARIED = (*NEGATED, "k_cache", "v_cache")
WITH_OUT = {name: x for name, x in OPERATIONS.items() if x.takes_out}


@pytest.fixture(params=WITH_OUT.values(), ids=WITH_OUT)
def with_out(request):
    return request.param


def results_of(operation, call, given):
    """All tensors that a call returns or writes."""
    given = given | {name: given[name].clone() for name in operation.writes}
    return bits([*call(**given), *(given[name] for name in operation.writes)])


def bits(tensors):
    """Views float8 tensors as integers, since torch cannot compare them."""
    return [x.view(torch.uint8) if x.element_size() == 1 else x for x in tensors]


def test_compiled_calls_are_those_of_plain_ones(device, operation):
    def negated(**given):
        name, x = next(iter(given.items()))
        return operation.call(**(given | {name: x.neg() if x.element_size() > 1 else x}))

    torch.compiler.reset()
    compiled = torch.compile(negated, backend="aot_eager", fullgraph=True)
    given = operation.make(device)
    results, expected = (results_of(operation, call, given) for call in (compiled, negated))
    assert_equal(results, expected)
    assert [x.stride() for x in results] == [x.stride() for x in expected]


def test_other_sizes_compile_nothing_anew(device, operation):
    """A compiler may take a number as a constant in the first graph. The second graph serves all numbers."""
    seen = []

    def backend(graph, _):
        seen.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(operation.call, backend=backend, fullgraph=True)
    sizes = [operation.tensors(device, n) for n in (3, 4)]
    for n in range(3, 7):
        given = operation.make(device, n)
        for name, x in sizes[0].items():
            for dim in range(x.dim()):
                if x.shape[dim] != sizes[1][name].shape[dim]:
                    torch._dynamo.mark_dynamic(given[name], dim)
        assert_equal(results_of(operation, compiled, given), results_of(operation, operation.call, given))
        assert len(seen) <= (2 if n > 3 and (operation.has_numbers or operation.writes) else 1)


DIFFERENTIABLE = {name: x for name, x in OPERATIONS.items() if x.no_gradient is None}


@pytest.mark.parametrize("operation", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
@pytest.mark.parametrize(
    "device, backend",
    [
        ("cpu", "aot_eager"),
        pytest.param("cuda", "aot_eager", marks=pytest.mark.hopper),
        pytest.param("cuda", "inductor", marks=pytest.mark.hopper),
    ],
    indirect=["device"],
)
def test_gradients_of_other_sizes_compile_nothing_anew(device, backend, operation):
    """Gradients come from O and LSE, or from O alone."""
    if backend == "inductor":
        needs_a_compiler()

    # Only attention rounds in this layer, so that compiled results have the same bits.
    def layer(q, k, v, **given):
        out, lse, *_ = operation.call(q=q * 2, k=k.neg(), v=v, **given, deterministic=True)
        return out.transpose(-3, -2).relu(), -lse

    torch.compiler.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    # There are more sequences than heads, because a compiler gives equal sizes one symbol.
    for n in range(5, 8):
        given = operation.make(device, n)
        leaves = [given[name].requires_grad_() for name in "qkv"]
        for part in (slice(1), slice(2)):
            expected = layer(**given)[part]
            dout = [normal(*x.shape, dtype=x.dtype, device=device, seed=7) for x in expected]
            with torch._dynamo.config.patch(error_on_recompile=n > 5):
                results = compiled(**given)[part]
                gradients = torch.autograd.grad(results, leaves, dout)
            assert_equal(results, expected)
            assert_equal(gradients, torch.autograd.grad(expected, leaves, dout))


def test_an_export_takes_other_sizes(operation):
    numbers = operation.numbers("cpu")

    class Module(torch.nn.Module):
        def forward(self, given):
            return operation.call(**given, **numbers)

    first, others = (operation.tensors("cpu", n) for n in (3, 5))
    shapes = {name: dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) for name, x in first.items()}
    program = torch.export.export(Module(), (first,), dynamic_shapes=(shapes,)).module()
    expected = results_of(operation, lambda **given: Module()(given), others)
    assert_equal(results_of(operation, lambda **given: program(given), others), expected)


def leaves_of(given):
    return {name: given[name].detach().requires_grad_() for name in ("q", "k", "v", "s_aux") if name in given}


EAGER = "test_schema", "test_autograd_registration", "test_faketensor"
COMPILED = (*EAGER, "test_aot_dispatch_dynamic")


class Seen(TorchDispatchMode):
    """A mode that notes the calls of this package's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "fa3":
            self.calls.append((function, arguments, options or {}))
        return function(*arguments, **(options or {}))


def unlike(calls):
    """One of the calls for each function and each form of its arguments: shapes, strides, types and numbers."""

    def form(x):
        return (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x

    seen = {}
    for function, arguments, options in calls:
        arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
        forms = *map(form, arguments), *options, *map(form, options.values())
        seen.setdefault(str((function, forms)), (function, arguments, options))
    return seen.values()


@pytest.mark.parametrize("operation", (OPERATIONS | EDGES).values(), ids=OPERATIONS | EDGES)
def test_operators_are_what_they_say(device, operation):
    """Runs torch's own checks of each operator that the calls reach: its schema, its registration with autograd, and
    its fake results compared with real ones. The first call of each operator is also checked under torch.compile,
    except in edge cases.
    """
    is_edge = any(operation is edge for edge in EDGES.values())
    given = operation.make(device)
    name, x = next((name, x) for name, x in given.items() if name not in operation.writes)
    with Seen() as seen:
        results = operation.call(**given)
        operation.call(**(given | {name: heads_outside(x)}))
        if operation.takes_out:
            operation.call(**given, out=torch.empty_like(results[0]))
        if operation.no_gradient is None:
            leaves = leaves_of(given)
            for used in (slice(1), slice(2)):
                results = operation.call(**(given | leaves))[used]
                torch.autograd.grad(results, list(leaves.values()), [torch.ones_like(x) for x in results])
    assert seen.calls
    compiled = set()

    def check(function, arguments, options):
        has_codes = any(isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn for x in arguments)
        checks = EAGER if is_edge or function in compiled else COMPILED
        compiled.add(function)
        # Torch's check of a schema compares tensors, and torch cannot compare float8.
        torch.library.opcheck(function, arguments, options, test_utils=checks[1:] if has_codes else checks)

    for function, arguments, options in unlike(seen.calls):
        name = function._schema.name.removeprefix("fa3::")
        if name.endswith("forward") and operation.no_gradient is None:
            leaves = [x.clone().requires_grad_() for x in arguments[:3]]
            check(function, (*leaves, *arguments[3:]), options)
        check(function, arguments, options)
        if name in ("backward", "varlen_backward"):
            into = dict(zip(("dq", "dk", "dv"), map(torch.empty_like, arguments[1:4]), strict=True))
            check(getattr(torch.ops.fa3, f"{name}_out").default, arguments, options | into)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_the_operator_is_what_it_says_for_every_type(name, dtype):
    q, k, v = (x.to(dtype) for x in SHAPES[name]("cpu").values())
    for x in (q, heads_outside(q)):
        torch.library.opcheck(torch.ops.fa3.forward.default, (x, k, v, None, 7, 0, 6, 30.0, 0))


@pytest.mark.parametrize("name", ["dense, sinks", "dense, intervals"])
def test_gradients_of_sinks_and_under_intervals(device, name):
    """Compiled calls and torch.func's transforms give the gradients of plain calls."""
    given = EDGES[name].make(device)
    leaves = leaves_of(given)

    def loss(*tensors):
        out, lse = EDGES[name].call(**(given | dict(zip(leaves, tensors))), deterministic=True)
        return out.float().sum() + lse.sum()

    expected = torch.autograd.grad(loss(*leaves.values()), leaves.values())
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_equal(torch.autograd.grad(compiled(*leaves.values()), leaves.values()), expected)
    positions = tuple(range(len(leaves)))
    assert_equal(torch.func.grad(loss, argnums=positions)(*(x.detach() for x in leaves.values())), expected)


def test_schemas_are_what_graphs_are_saved_with():
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fa3::"))
    schemas = sorted(str(torch._C._get_schema(name, "")) for name in names)
    assert schemas == (Path(__file__).parent / "schemas.txt").read_text().splitlines()


@pytest.mark.parametrize("place", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize("operation", (OPERATIONS | EDGES).values(), ids=OPERATIONS | EDGES)
def test_fake_results_are_contiguous_whatever_the_strides(operation, place):
    given = operation.make("cpu")
    expected = operation.call(**given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {
            name: mode.from_tensor(heads_outside(x)).to(place) if isinstance(x, torch.Tensor) else x for name, x in given.items()
        }
        results = operation.call(**fake)
        if operation.takes_out:
            assert operation.call(**fake, out=results[0])[0] is results[0]
    for x, right in zip(results, expected, strict=True):
        assert (x.shape, x.dtype, x.device.type, x.stride()) == (right.shape, right.dtype, place, right.stride())


def rows_outside(x):
    """The tensor with its first two dimensions exchanged in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def test_strides_are_as_they_are(device, operation):
    """Heads outside rows, tensors side by side, and parts of larger tensors, whose other elements are NaN."""
    given = operation.make(device)
    expected = results_of(operation, operation.call, given)
    inputs = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and x.dim() > 2 and name not in operation.writes}
    for arrange in (
        heads_outside,
        lambda x: torch.stack([x, x, x], -3)[..., 1, :, :],
        lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
        rows_outside,
    ):
        # Kernels need the sequences or pages of a cache one after the other in memory.
        kept = ("k_cache", "v_cache") if arrange is rows_outside else ()
        others = {name: arrange(x) for name, x in inputs.items() if name not in kept}
        assert_equal(results_of(operation, operation.call, given | others), expected)


def test_o_is_written_where_it_is_wanted(device, with_out):
    given = with_out.make(device)
    expected = results_of(with_out, with_out.call, given)
    shape, dtype = expected[0].shape, expected[0].dtype
    for whole, part in [
        (shape, lambda x: x),
        ((*shape[:-3], shape[-2], shape[-3], shape[-1]), lambda x: x.transpose(-3, -2)),
        ((shape[1], shape[0], *shape[2:]), lambda x: x.transpose(0, 1)),
        ((*shape[:-3], shape[-3] + 3, shape[-2] + 1, shape[-1] + 16), lambda x: x[..., 2:-1, 1:, 8:-8]),
    ]:
        memory = torch.full(whole, torch.nan, dtype=dtype, device=device)
        out = part(memory)

        def into(**given):
            results = with_out.call(**given, out=out)
            assert results[0] is out
            return results

        assert_equal(results_of(with_out, into, given), expected)
        assert memory.isnan().sum() == memory.numel() - out.numel(), "something else was written"
        # The same holds for a call that returns O alone.
        out.fill_(torch.nan)
        alone = dict.fromkeys(with_out.options.keys() & {"return_attn_probs", "return_softmax_lse"}, False)
        results_of(with_out, lambda **given: into(**given, **alone), given)
        assert torch.equal(out, expected[0])


def test_a_compiled_call_writes_where_it_is_told(device, with_out):
    def into(out, given):
        with_out.call(**given, out=out)
        return out + 1

    torch.compiler.reset()
    compiled = torch.compile(into, backend="aot_eager", fullgraph=True)
    given = with_out.make(device)
    expected = results_of(with_out, with_out.call, given)[0]
    out = heads_outside(expected) * 0
    given = given | {name: given[name].clone() for name in with_out.writes}
    assert_equal([compiled(out, given), out], [expected + 1, expected])


def test_a_result_in_given_memory_has_no_gradient(device, with_out):
    given = with_out.make(device)
    out = torch.empty_like(results_of(with_out, with_out.call, given)[0])
    sentence = "out=... does not support automatic differentiation, but one of the arguments requires grad|^appending |^a tensor that score reads "
    for name, x in (given | dict(out=out)).items():
        if isinstance(x, torch.Tensor) and x.is_floating_point() and not name.startswith("rotary"):
            leaf = {name: x.detach().clone().requires_grad_()}
            with pytest.raises((RuntimeError, NotImplementedError), match=sentence):
                with_out.call(**(given | dict(out=out) | leaf))
            with torch.no_grad():
                assert with_out.call(**(given | dict(out=out) | leaf))[0].requires_grad == (name == "out")
    with Seen() as seen:
        with_out.call(**given, out=out)
    [(function, (first, *others), options)] = seen.calls
    with pytest.raises((RuntimeError, NotImplementedError), match=sentence):
        function(first.detach().requires_grad_(), *others, **options)


WITHOUT_GRADIENTS = {
    name: x
    for name, x in (OPERATIONS | {"codes by channels": EDGES["codes by channels"]}).items()
    if x.no_gradient is not None and not x.writes
}
# Each function once. A compiler sees the same operators in the other calls.
COMPILED_TOO = "dense latent", "packed codes", "cache", "combine", "fp8", "quantize"


@pytest.mark.parametrize(
    "operation, compiled",
    [pytest.param(x, False, id=f"eager-{name}") for name, x in WITHOUT_GRADIENTS.items()]
    + [pytest.param(WITHOUT_GRADIENTS[name], True, id=f"compiled-{name}") for name in COMPILED_TOO],
)
def test_what_has_no_gradients_says_so(device, operation, compiled):
    """The forward pass runs, also with fake tensors, and gives the same results. All gradients are refused. A compiled
    call refuses the gradient of its first tensor.
    """
    given = operation.make(device)
    expected = operation.call(**given)
    for name, x in given.items():
        # The tensors that a function of scores reads are refused at once.
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or name == "slopes":
            continue
        torch.compiler.reset()
        call = torch.compile(operation.call, backend="aot_eager", fullgraph=True) if compiled else operation.call
        leaf = {name: x.detach().clone().requires_grad_()}
        results = call(**(given | leaf))
        assert_equal(bits(x.detach() for x in results), bits(expected))
        # The largest scores are no part of a graph.
        for result in results[: -1 if "return_max_logits" in operation.options else None]:
            assert result.requires_grad
            with pytest.raises(NotImplementedError, match=f"^{operation.no_gradient}$"):
                result.float().sum().backward(retain_graph=True)
        with torch.no_grad():
            assert not any(x.requires_grad for x in call(**(given | leaf)))
        if compiled:
            break


def test_transforms_are_refused(operation):
    """Tangents are always refused, and gradients are refused if the operation has none."""
    given = operation.make("cpu")
    # Torch supports no tangents of 8-bit tensors.
    floats = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point() and x.element_size() > 1}
    name, x = next((name, x) for name, x in floats.items() if name not in operation.writes)

    def total(x):
        return operation.call(**(given | {name: x}))[-1].sum()

    tangent = f"{operation.inputs} has a tangent, and there is no derivative in forward mode"
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"^{tangent}$"):
        total(forward_ad.make_dual(x, x))
    with pytest.raises(NotImplementedError, match=f"^{operation.transforms or tangent}$"):
        torch.func.jvp(total, (x,), (x,))
    if operation.no_gradient:
        with pytest.raises(NotImplementedError, match=f"^{operation.no_gradient}$"):
            torch.func.grad(total)(x)
        return
    for leaf in (x.clone().requires_grad_(), torch.nn.Parameter(x)):
        # Torch itself refuses this, in its own words.
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=" to use it with forward mode AD.$"):
            total(forward_ad.make_dual(leaf, x))


def test_negated_tensors_are_what_they_stand_for(device, operation):
    given = operation.make(device)
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.element_size() > 1 and name in NEGATED:
            expected = results_of(operation, operation.call, given | {name: -x})
            assert_equal(results_of(operation, operation.call, given | {name: torch._neg_view(x)}), expected)


@pytest.mark.parametrize("operation", (OPERATIONS | EDGES).values(), ids=OPERATIONS | EDGES)
def test_other_devices_are_refused(operation):
    given, tensors = operation.make("cpu"), operation.tensors("cpu")
    if len(tensors) == 1:
        return
    first = next(iter(tensors))
    for name, x in tensors.items():
        with pytest.raises(ValueError) as error:
            operation.call(**(given | {name: x.to("meta")}))
        # If the first tensor is on the other device, the sentence names another tensor.
        at, other, found = ("cpu", "meta", r"[\w ]+") if name == first else ("meta", "cpu", name)
        found = "causal or tree_mask" if found in ("causal", "tree_mask") else found
        found = "a tensor that score reads" if found == "slopes" else found
        sentence = f"{found} is on {at} and {first} on {other}, expected one CUDA device or the CPU"
        if re.match("._descale|v_mean|s_aux|intervals", str(error.value)):
            # These tensors have shapes that follow from other tensors, and a sentence of their own.
            sentence = rf"{found} is torch\.(float32|int32) (\(.*\)) on {at}, expected torch\.\1.* on {other}(: .*)?"
        assert re.fullmatch(sentence, str(error.value)), str(error.value)


# Tests for a GPU only.


@pytest.mark.hopper
def test_nothing_waits_for_a_gpu(operation):
    given = operation.make("cuda")
    operation.call(**given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        operation.call(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.hopper
def test_a_graph_computes_other_numbers(operation):
    """Each replay gives the bits of a call."""
    given = operation.make("cuda")
    kept = {name: x.clone() for name, x in given.items() if isinstance(x, torch.Tensor)}
    operation.call(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = operation.call(**given)
    for scale in (1, -0.5, 2):
        for name, x in kept.items():
            given[name].copy_(x * scale if name in VARIED and x.element_size() > 1 else x)
        for x in bits(results):
            x.fill_(0x7F)
        again = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        graph.replay()
        assert_equal(bits(results), bits(operation.call(**again)))
        assert_equal([given[name] for name in operation.writes], [again[name] for name in operation.writes])
