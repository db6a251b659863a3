"""Gradients as torch's own machinery sees them: autograd, checkpoints, compilers, transforms, threads. How good the
numbers are is for test_backward.py and test_cpu.py, streams and graphs for test_backward_streams.py."""

import functools

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import USED, Packed, assert_equal, at_once, normal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from fa3 import (
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    gradient,
)

BF16 = torch.bfloat16
ON_GPU = pytest.param("cuda", marks=pytest.mark.hopper)
# softmax_scale, window_left, window_right, attention_chunk, softcap, sm_margin
OPTIONS = (0.5, 9, 0, 15, 20.0, 2)


def options_of(given):
    """The options of a call of the extension module."""
    names = ("softmax_scale", "softcap", "sm_margin")
    scale, softcap, margin = (given[name] for name in names)
    return (scale, *given["window"], softcap, margin)


def problem(device, seqlen=33):
    """Q, K and V that require grad, and the gradients of O and LSE."""
    shapes = [(2, seqlen, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64)]
    leaves = [normal(*shape, device=device, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    dout = normal(2, seqlen, 4, 64, device=device, seed=3)
    return leaves, dout, normal(2, 4, seqlen, device=device, dtype=torch.float32, seed=4)


def attend(q, k, v):
    return flash_attn_func(
        q, k, v, 0.5, causal=True, window_size=(9, 3), attention_chunk=15, softcap=20.0, sm_margin=2, return_attn_probs=True
    )


def direct(leaves, dout, dlse=None):
    """The same gradients from the operators themselves."""
    with torch.no_grad():
        out, lse = torch.ops.fa3.forward(*leaves, *OPTIONS)
        dout = torch.zeros_like(out) if dout is None else dout
        return torch.ops.fa3.backward(dout, *leaves, out, lse, dlse, *OPTIONS)


class Dense:
    """Q, K and V that require grad, and the gradients of O and LSE."""

    forward, backward, numbers = torch.ops.fa3.forward, torch.ops.fa3.backward, OPTIONS

    def __init__(self, device):
        self.leaves, self.dout, self.dlse = problem(device)
        self.lists = []

    def attend(self, *tensors):
        return attend(*tensors)

    @property
    def tensors(self):
        return [x.detach() for x in self.leaves]

    @property
    def given(self):
        return self.dout, self.dlse

    def direct(self, dout, dlse):
        """The same gradients from the operators themselves."""
        with torch.no_grad():
            out, lse = self.forward(*self.leaves, *self.lists, *self.numbers)
            dout = torch.zeros_like(out) if dout is None else dout
            return self.backward(dout, *self.leaves, out, lse, dlse, *self.lists, *self.numbers)


class OfPacked(Dense):
    """Packed sequences with rows that are not in use."""

    forward, backward = torch.ops.fa3.varlen_forward, torch.ops.fa3.varlen_backward
    # max_seqlen_q and max_seqlen_k, and OPTIONS.
    numbers = (130, 257, *OPTIONS)

    def __init__(self, device):
        self.packed = Packed(device, used=USED[0])
        self.leaves = [x.requires_grad_() for x in (self.packed.q, self.packed.k, self.packed.v)]
        self.dout, self.dlse = self.packed.given()
        self.lists = [*self.packed.ends, *self.packed.used]

    def attend(self, *tensors):
        options = dict(softmax_scale=0.5, causal=True, window_size=(9, 3), attention_chunk=15, softcap=20.0, sm_margin=2)
        return self.packed.call((130, 257), tensors, return_attn_probs=True, **options)


KINDS = {"dense": Dense, "packed": OfPacked}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def both(request, device):
    return request.param(device)


@pytest.mark.parametrize("subclass", [False, True], ids=["tensors", "parameters"])
@pytest.mark.parametrize("used", ["o", "lse", "both"])
def test_both_results_have_gradients(both, used, subclass):
    """Parameters are a subclass, for which the operator goes through torch's dispatcher."""
    inputs = [torch.nn.Parameter(x) for x in both.tensors] if subclass else both.leaves
    results = both.attend(*inputs)
    assert all(x.requires_grad for x in results)
    part = dict(o=slice(1), lse=slice(1, 2), both=slice(2))[used]
    gradients = torch.autograd.grad(results[part], inputs, both.given[part])
    dout, dlse = None if used == "lse" else both.dout, None if used == "o" else both.dlse
    assert_equal(gradients, both.direct(dout, dlse))
    assert all(x.is_contiguous() for x in gradients)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_tensor_that_requires_grad_is_enough(both, position):
    inputs = [x if i == position else x.detach() for i, x in enumerate(both.leaves)]
    torch.autograd.backward(both.attend(*inputs), both.given)
    assert torch.equal(both.leaves[position].grad, both.direct(*both.given)[position])
    assert sum(x.grad is not None for x in both.leaves) == 1


def test_nothing_is_kept_where_no_gradient_is_wanted(both):
    with torch.no_grad():
        assert not any(x.requires_grad for x in both.attend(*both.leaves))
    with torch.inference_mode():
        assert not any(x.requires_grad for x in both.attend(*both.leaves))
    assert not any(x.requires_grad for x in both.attend(*both.tensors))


def test_tensors_that_were_changed_since_are_found(both):
    for position in range(5 + len(both.lists)):
        tensors = [x.clone() for x in both.leaves]
        results = both.attend(*tensors)
        with torch.no_grad():
            [*tensors, *results, *both.lists][position].mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(results, both.leaves, both.given)


@pytest.mark.parametrize("through", ["plain", "operator"])
def test_second_derivatives_are_refused(both, through):
    results = both.attend(*both.leaves) if through == "plain" else both.forward(*both.leaves, *both.lists, *both.numbers)
    first = torch.autograd.grad(results, both.leaves, both.given, create_graph=True)
    # That they could be wanted is no error.
    assert_equal(first, both.direct(*both.given))
    for result in first:
        with pytest.raises(NotImplementedError, match="^attention has no second derivative"):
            torch.autograd.grad(result.float().sum(), both.leaves, retain_graph=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(both, reentrant):
    results = checkpoint.checkpoint(both.attend, *both.leaves, use_reentrant=reentrant)
    torch.autograd.backward(results, both.given)
    assert_equal([x.grad for x in both.leaves], both.direct(*both.given))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_tracers_see_the_backward_pass(kind):
    both = kind("cpu")

    def step(q, k, v, dout, dlse):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(both.attend(*leaves), leaves, (dout, dlse))

    given = *both.tensors, *both.given
    graph = make_fx(step)(*given)
    [node] = [node for node in graph.graph.nodes if node.target is both.backward.default]
    assert tuple(node.args[7 + len(both.lists) :]) == both.numbers
    assert_equal(graph(*given), both.direct(*both.given))


@pytest.mark.parametrize("place", ["cpu", "meta", ON_GPU])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_fake_tensors_have_fake_gradients(kind, place):
    """With heads outside rows where their tensors have them."""
    both = kind("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        if kind is OfPacked:
            both.packed.ends, both.packed.used = ([mode.from_tensor(x).to(place) for x in lists] for lists in (both.packed.ends, both.packed.used))
        q, k, v = (mode.from_tensor(x).to(place) for x in both.tensors)
        q = q.transpose(-3, -2).contiguous().transpose(-3, -2)
        leaves = [x.detach().requires_grad_() for x in (q, k, v[..., :32].contiguous())]
        results = torch.autograd.grad(both.attend(*leaves)[0].float().sum(), leaves)
    for x, leaf in zip(results, leaves, strict=True):
        assert (x.shape, x.dtype, x.stride(), x.device) == (leaf.shape, BF16, leaf.stride(), leaf.device)


def test_transforms(both):
    tensors, (dout, dlse) = both.tensors, both.given

    def loss(*tensors):
        out, lse = both.attend(*tensors)
        # LSE of rows that see no key is -inf.
        return (out.float() * dout).sum() + (lse.nan_to_num(neginf=0) * dlse).sum()

    expected = both.direct(dout, dlse)
    assert_equal(torch.func.grad(loss, argnums=(0, 1, 2))(*tensors), expected)
    results, pull = torch.func.vjp(both.attend, *tensors)
    assert_equal(results, both.attend(*tensors))
    assert_equal(pull((dout, dlse)), expected)
    # Inside of a transform that has nothing to do with it.
    scaled = torch.func.grad(lambda x: (both.attend(*tensors)[0].float() * x).sum())(torch.ones((), device=dout.device))
    assert torch.equal(scaled, both.attend(*tensors)[0].float().sum())
    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, *tensors[1:]).float().sum())(tensors[0])


def test_the_options_reach_the_backward_pass(calls):
    leaves, dout, dlse = problem("cpu")
    torch.autograd.grad(attend(*leaves), leaves, (dout, dlse))
    torch.autograd.grad(torch.ops.fa3.forward(*leaves, *OPTIONS, deterministic=True), leaves, (dout, dlse))
    assert [name for name, _ in calls] == ["forward", "backward"] * 2
    assert all(options_of(given) == OPTIONS for _, given in calls)
    assert [given["deterministic"] for _, given in calls[1::2]] == [False, True]


def test_autocast_casts_float32(device):
    """As for torch's own attention, whatever the dtypes of the others. Gradients are of the tensors that are given."""
    q, k, v = (torch.randn(2, 8, 4, 64, device=device) for _ in "qkv")
    ends = torch.tensor([0, 8, 16], dtype=torch.int32, device=device)
    q.requires_grad_()

    def results(q, k, v):
        out = flash_attn_func(q, k, v, causal=True)
        packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends, 8, 8, causal=True)
        with torch.no_grad():
            cached = flash_attn_with_kvcache(q, k.bfloat16(), v.bfloat16(), causal=True)
        [gradient] = torch.autograd.grad((out.float() + packed.unflatten(0, (2, 8))).sum(), q)
        return out, packed, cached, gradient

    expected = results(q.bfloat16(), k.bfloat16(), v.bfloat16())[:3]
    with torch.autocast(device, torch.bfloat16):
        *outputs, gradient = results(q, k, v.bfloat16())
        assert torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    assert all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=True))
    assert gradient.dtype == torch.float32


def test_without_lse_the_gradients_are_the_same(device):
    leaves, dout, _ = problem(device)
    out = flash_attn_func(*leaves, 0.5, window_size=(9, 0), attention_chunk=15, softcap=20.0, deterministic=True, sm_margin=2)
    assert_equal(torch.autograd.grad(out, leaves, dout), direct(leaves, dout))


def test_gradients_of_a_packed_tensor(device):
    qkv = normal(2, 33, 3, 4, 64, device=device).requires_grad_()
    dout = normal(2, 33, 4, 64, device=device, seed=1)
    out = flash_attn_qkvpacked_func(qkv, 0.5, True, window_size=(9, 3), attention_chunk=15, softcap=20.0, sm_margin=2)
    [result] = torch.autograd.grad(out, qkv, dout)
    assert_equal(result.unbind(2), direct(qkv.detach().unbind(2), dout))
    qkv = normal(2, 33, 8, 64, device=device).requires_grad_()
    out, lse = flash_attn_qkvpacked_func(qkv, num_heads_q=4, return_attn_probs=True)
    [result] = torch.autograd.grad((out, lse), qkv, (dout, torch.ones_like(lse)))
    parts = [x.detach().requires_grad_() for x in qkv.split([4, 2, 2], 2)]
    results = flash_attn_func(*parts, return_attn_probs=True)
    expected = torch.autograd.grad(results, parts, (dout, torch.ones_like(lse)))
    assert_equal(result.split([4, 2, 2], 2), expected)


def test_a_tensor_that_is_used_more_than_once(device):
    x, dout = normal(2, 33, 4, 64, device=device), normal(2, 33, 4, 64, device=device, seed=1)
    dq, dk, dv = (gradient.float() for gradient in direct((x, x, x), dout))
    leaf = x.clone().requires_grad_()
    [result] = torch.autograd.grad(attend(leaf, leaf, leaf)[0], leaf, dout)
    assert torch.allclose(result.float(), dq + dk + dv, rtol=2**-6, atol=2**-6)


def test_gradients_add_up(device):
    leaves, dout, dlse = problem(device)
    once = direct(leaves, dout, dlse)
    for times in (1, 2):
        torch.autograd.backward(attend(*leaves), (dout, dlse))
        assert_equal([x.grad for x in leaves], [times * x for x in once])


def test_a_graph_can_be_kept(device):
    leaves, dout, dlse = problem(device)
    results = attend(*leaves)
    expected = torch.autograd.grad(results, leaves, (dout, dlse), retain_graph=True)
    assert_equal(torch.autograd.grad(results, leaves, (dout, dlse)), expected)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(results, leaves, (dout, dlse))


@pytest.mark.parametrize(
    "expand",
    [
        lambda out: out.float().sum(),
        lambda out: out.float().mean((0, 1)).square().sum(),
        lambda out: (out.transpose(1, 2).contiguous().float() * torch.arange(64, device=out.device)).sum(),
        lambda out: (out.transpose(1, 3).float().cumsum(1) * 0.1).sum(),
        lambda out: out[:, ::2, 1:3, 8:].float().square().sum(),
    ],
    ids=["sum", "mean", "heads first", "head_dim first", "a part"],
)
def test_gradients_of_o_have_any_strides(device, expand):
    leaves, _, _ = problem(device)
    out = attend(*leaves)[0]
    leaf = out.detach().requires_grad_()
    [dout] = torch.autograd.grad(expand(leaf), leaf)
    assert_equal(torch.autograd.grad(expand(out), leaves), direct(leaves, dout.contiguous()))


def test_checkpoints_that_keep_attention(calls):
    leaves, dout, _ = problem("cpu")
    contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, [torch.ops.fa3.forward.default])

    def layer(q, k, v):
        return attend(q * 2, k, v)[0].relu()

    out = checkpoint.checkpoint(layer, *leaves, use_reentrant=False, context_fn=contexts)
    results = torch.autograd.grad(out, leaves, dout)
    assert [name for name, _ in calls] == ["forward", "backward"]
    assert_equal(results, torch.autograd.grad(layer(*leaves), leaves, dout))


def test_what_is_kept_may_lie_elsewhere_meanwhile(device):
    qkv = normal(2, 33, 3, 4, 64, device=device).requires_grad_()
    dout = normal(2, 33, 4, 64, device=device, seed=1)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.to("cpu", copy=True), lambda x: x.to(device)):
        out = flash_attn_qkvpacked_func(qkv, *OPTIONS[:1], window_size=(9, 0), attention_chunk=15, softcap=20.0, sm_margin=2)
    [result] = torch.autograd.grad(out, qkv, dout)
    assert_equal(result.unbind(2), direct(qkv.detach().unbind(2), dout))


def test_exported_modules_have_gradients(device):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v)

    leaves, dout, dlse = problem(device)
    exported = torch.export.export(Layer(), tuple(leaves)).module()
    assert_equal(torch.autograd.grad(exported(*leaves), leaves, (dout, dlse)), direct(leaves, dout, dlse))


def test_transforms_that_are_refused(device):
    leaves, _, _ = problem(device)
    q, k, v = (x.detach() for x in leaves)

    def loss(q):
        return attend(q, k, v)[0].float().square().sum()

    with pytest.raises(NotImplementedError, match="q, k or v has a tangent, and there is no derivative in forward mode"):
        torch.func.jvp(loss, (q,), (q,))
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.hessian(loss)(q)


def test_forward_mode_is_refused(device):
    leaves, _, _ = problem(device)
    for q in (leaves[0], leaves[0].detach(), torch.nn.Parameter(leaves[0].detach())):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode"):
            attend(forward_ad.make_dual(q, torch.ones_like(q)), *leaves[1:])


E4M3 = torch.float8_e4m3fn
OF_CODES = "^q is torch.float8_e4m3fn, for which attention has no gradients$"
FROM_16_BITS = "^q, k, v, cos or sin requires grad, and attention in 8 bits has no gradients$"


def float8_calls(device):
    """Calls with a float8 tensor, a scale or a mean that requires grad; and of 16 bits that are computed in 8."""
    x = torch.ones(2, 16, 4, 64, device=device).to(E4M3)
    descale, blocks = torch.ones(2, 4, device=device), torch.ones(2, 4, 1, device=device)
    channels = torch.ones(2, 4, 64, device=device)
    leaf = x.clone().requires_grad_()
    for position in range(3):
        yield functools.partial(flash_attn_func, *(leaf if i == position else x for i in range(3)))
    for name, scale in (("q_descale", descale), ("k_descale", descale), ("v_descale", descale)):
        yield functools.partial(flash_attn_func, x, x, x, **{name: scale.clone().requires_grad_()})
    scales = dict(q_descale=blocks, k_descale=blocks, v_descale=channels, v_mean=channels)
    for name in scales:
        yield functools.partial(flash_attn_func, x, x, x, **(scales | {name: scales[name].clone().requires_grad_()}))
    x = torch.ones(2, 16, 4, 64, dtype=BF16, device=device)
    leaf = x.clone().requires_grad_()
    for position in range(3):
        tensors = (leaf if i == position else x for i in range(3))
        yield functools.partial(flash_attn_fp8_func, *tensors, v_channels=position == 1)
    table = torch.ones(16, 32, device=device)
    for name in ("cos", "sin"):
        tables = dict(cos=table, sin=table) | {name: table.clone().requires_grad_()}
        yield functools.partial(flash_attn_fp8_func, x, x, x, **tables)


def test_float8_has_no_gradients():
    """The forward pass runs; its gradients are refused where they are computed, and traced before."""
    with FakeTensorMode():
        for call in float8_calls("cuda"):
            out = call()
            assert out.requires_grad and out.dtype == BF16
            with torch.no_grad():
                assert not call().requires_grad


@pytest.mark.parametrize("compiled", [False, True])
def test_float8_gradients_are_refused_in_a_sentence(device, compiled):
    for given in float8_calls(device):
        call = given
        if compiled:
            # Torch would give up after eight calls of one function.
            torch.compiler.reset()
            call = torch.compile(given, backend="aot_eager", fullgraph=True)
        sentence = FROM_16_BITS if given.func is flash_attn_fp8_func else OF_CODES
        results = call(return_attn_probs=True)
        for result in results:
            assert result.requires_grad
            with pytest.raises(NotImplementedError, match=sentence):
                result.float().sum().backward(retain_graph=True)


def flops(function, *arguments):
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


@pytest.mark.parametrize("seqlen, heads_kv, head_dim_v", [(96, 4, 64), (40, 4, 32), (40, 2, 64)])
def test_operations_are_counted_as_torch_counts_its_own(seqlen, heads_kv, head_dim_v):
    """Operations of hidden keys count, and of each query head."""

    def step(attend, *shapes):
        leaves = [torch.empty(shape, dtype=BF16).requires_grad_() for shape in shapes]
        attend(*leaves).sum().backward()

    def ours(q, k, v):
        return flash_attn_func(q, k, v, causal=True)

    def theirs(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

    with FakeTensorMode():
        counted = flops(step, ours, (2, 32, 4, 64), (2, seqlen, heads_kv, 64), (2, seqlen, heads_kv, head_dim_v))
        shapes = (2, 4, 32, 64), (2, 4, seqlen, 64), (2, 4, seqlen, head_dim_v)
        if head_dim_v == 64:
            assert counted == flops(step, theirs, *shapes)
        assert counted == sdpa_flop_count(*shapes) + sdpa_backward_flop_count((2, 4, 32, head_dim_v), *shapes)


def test_operations_in_8_bits_are_counted():
    with FakeTensorMode():
        q, k = (torch.empty(2, seqlen, 4, 64, dtype=BF16, device="cuda") for seqlen in (32, 40))
        assert flops(flash_attn_fp8_func, q, k, k) == flops(flash_attn_func, q, k, k) == 2 * 4 * 32 * 40 * 2 * 128


def test_threads(device):
    problems = [problem(device, seqlen) for seqlen in range(16, 24)]
    expected = [direct(*given) for given in problems]

    def work(leaves, dout, dlse, expected):
        for _ in range(10):
            assert_equal(torch.autograd.grad(attend(*leaves), leaves, (dout, dlse)), expected)

    at_once(work, [(*given, right) for given, right in zip(problems, expected)])


@pytest.mark.parametrize(
    "error, sentence, change",
    [
        (ValueError, "q has 3, k 4 and v 4 dimensions", dict(q=lambda x: x[0])),
        (ValueError, r"dout is torch.float16 \(2, 33, 4, 64\), expected torch.bfloat16", dict(dout=lambda x: x.half())),
        (ValueError, r"o is torch.bfloat16 \(2, 32, 4, 64\), expected torch.bfloat16 \(2, 33", dict(o=lambda x: x[:, 1:])),
        (ValueError, r"lse is torch.float32 \(2, 4, 32\), expected torch.float32 \(2, 4, 33\)", dict(lse=lambda x: x[..., 1:])),
        (ValueError, r"dlse is torch.float64 \(2, 4, 33\), expected torch.float32", dict(dlse=lambda x: x.double())),
    ],
)
def test_bad_tensors_of_the_operator(device, error, sentence, change):
    leaves, dout, dlse = problem(device)
    q, k, v = (x.detach() for x in leaves)
    given = dict(dout=dout, q=q, k=k, v=v, o=torch.zeros_like(dout), lse=torch.zeros_like(dlse), dlse=dlse)
    given |= {name: function(given[name]) for name, function in change.items()}
    with pytest.raises(error, match=f"^{sentence}"):
        torch.ops.fa3.backward(*given.values(), *OPTIONS)


def test_other_devices_are_refused():
    leaves, dout, dlse = problem("cpu")
    q, k, v = (x.detach() for x in leaves)
    with pytest.raises(ValueError, match="^k is on meta and q on cpu, expected one CUDA device or the CPU$"):
        flash_attn_func(q, k.to("meta"), v)
    places = "^k is on meta and q on cpu, expected one CUDA device or the CPU$"
    with pytest.raises(ValueError, match=places):
        torch.ops.fa3.backward(dout, q, k.to("meta"), v, dout, dlse, None, *OPTIONS)
