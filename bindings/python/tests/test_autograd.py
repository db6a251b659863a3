"""Gradients as torch's own machinery sees them: autograd, checkpoints, compilers, transforms, threads.
test_attention.py and test_varlen.py judge the numbers, and test_streams.py tests streams and graphs."""

import functools

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from operations import heads_outside
from packing import USED, Packed, assert_equal, at_once, needs_a_compiler, normal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint

from fa3 import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    gradient,
)

BF16 = torch.bfloat16
ON_GPU = pytest.param("cuda", marks=pytest.mark.hopper)
# (softmax_scale, window_left, window_right, attention_chunk, softcap, sm_margin)
OPTIONS = (0.5, 9, 0, 15, 20.0, 2)


def options_of(given):
    """The options that the extension module was called with, in the order of OPTIONS."""
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
    """The gradients that the operators compute directly, without autograd."""
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
        """The gradients that the operators compute directly, without autograd."""
        with torch.no_grad():
            out, lse = self.forward(*self.leaves, *self.lists, *self.numbers)
            dout = torch.zeros_like(out) if dout is None else dout
            return self.backward(dout, *self.leaves, out, lse, dlse, *self.lists, *self.numbers)


class OfPacked(Dense):
    """Packed sequences with rows that are not in use."""

    forward, backward = torch.ops.fa3.varlen_forward, torch.ops.fa3.varlen_backward
    # max_seqlen_q, max_seqlen_k, and OPTIONS.
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
    """If inputs are parameters, a subclass of tensors, the operator goes through torch's dispatcher."""
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
    # create_graph alone is no error: only computing a second derivative is.
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
    """Gradients have heads outside rows if their tensors have."""
    both = kind("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        if kind is OfPacked:
            both.packed.ends, both.packed.used = ([mode.from_tensor(x).to(place) for x in lists] for lists in (both.packed.ends, both.packed.used))
        q, k, v = (mode.from_tensor(x).to(place) for x in both.tensors)
        q = heads_outside(q)
        leaves = [x.detach().requires_grad_() for x in (q, k, v[..., :32].contiguous())]
        results = torch.autograd.grad(both.attend(*leaves)[0].float().sum(), leaves)
    for x, leaf in zip(results, leaves, strict=True):
        assert (x.shape, x.dtype, x.stride(), x.device) == (leaf.shape, BF16, leaf.stride(), leaf.device)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_other_devices_are_refused(kind):
    both = kind("cpu")
    q, k, v = both.tensors
    given = dict(k=k, cu_seqlens_k=both.lists[1]) if both.lists else dict(k=k)
    for name, x in given.items():
        others = [x.to("meta") if y is x else y for y in (k, *both.lists)]
        with pytest.raises(ValueError, match=f"^{name} is on meta and q on cpu, expected one CUDA device or the CPU$"):
            both.backward(both.dout, q, others[0], v, both.dout, both.dlse, None, *others[1:], *both.numbers)


def test_o_and_lse_have_any_strides(both):
    tensors = both.tensors
    o, lse = both.forward(*tensors, *both.lists, *both.numbers)
    o, lse = heads_outside(o), lse.transpose(-2, -1).contiguous().transpose(-2, -1)
    results = both.backward(both.dout, *tensors, o, lse, both.dlse, *both.lists, *both.numbers)
    assert_equal(results, both.direct(*both.given))


def test_gradients_are_written_where_they_are_wanted(both):
    tensors = both.tensors
    o, lse = both.forward(*tensors, *both.lists, *both.numbers)
    given = both.dout, *tensors, o, lse, both.dlse, *both.lists, *both.numbers
    expected = both.backward(*given, deterministic=True)
    into = getattr(torch.ops.fa3, f"{both.backward._qualified_op_name.removeprefix('fa3::')}_out")
    for arrange, part in [
        (lambda *lead, rows, heads, d: (*lead, rows, heads, d), lambda x: x),
        (lambda *lead, rows, heads, d: (*lead, heads, rows, d), lambda x: x.transpose(-3, -2)),
        (lambda *lead, rows, heads, d: (rows, *lead, heads, d), lambda x: x.transpose(0, -3)),
        (lambda *lead, rows, heads, d: (*lead, rows + 3, heads + 1, d + 16), lambda x: x[..., 2:-1, 1:, 8:-8]),
    ]:
        shapes = [arrange(*x.shape[:-3], **dict(zip(("rows", "heads", "d"), x.shape[-3:]))) for x in tensors]
        memory = [torch.full(shape, torch.nan, dtype=BF16, device=both.dout.device) for shape in shapes]
        outputs = [part(x) for x in memory]
        into(*given, deterministic=True, **dict(zip(("dq", "dk", "dv"), outputs)))
        assert_equal(outputs, expected)
        for whole, x in zip(memory, outputs, strict=True):
            assert whole.isnan().sum() == whole.numel() - x.numel(), "something else was written"
    like = dict(zip(("dq", "dk", "dv"), map(torch.empty_like, tensors)))
    q, k, v = tensors
    for change, sentence in [
        (dict(dk=torch.empty_like(q)), r"dk is torch.bfloat16 \(.*\), expected torch.bfloat16 \("),
        (dict(dk=k), r"output d[qk] \[0x[0-9a-f]+, 0x[0-9a-f]+\) overlaps "),
        (dict(dv=v[:1].expand_as(v)), "output dv has stride 0 in (batch|seqlen)"),
    ]:
        with pytest.raises(ValueError, match=f"^{sentence}"):
            into(*given, **like | change)


def test_transforms(both):
    tensors, (dout, dlse) = both.tensors, both.given

    def loss(*tensors):
        out, lse = both.attend(*tensors)
        # The -inf of rows that see no key would make the loss infinite.
        return (out.float() * dout).sum() + (lse.nan_to_num(neginf=0) * dlse).sum()

    expected = both.direct(dout, dlse)
    assert_equal(torch.func.grad(loss, argnums=(0, 1, 2))(*tensors), expected)
    results, pull = torch.func.vjp(both.attend, *tensors)
    assert_equal(results, both.attend(*tensors))
    assert_equal(pull((dout, dlse)), expected)
    # Attention also works inside of a transform over another variable.
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
    """As for torch's own attention, autocast casts each float32 tensor, whatever dtypes the other tensors have. A
    gradient has the dtype of the tensor that the caller gave.
    """
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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_functions(device, backend):
    if backend == "inductor":
        needs_a_compiler()

    # Only attention rounds in this layer, so that compiled results have the same bits.
    def layer(qkv):
        out, lse = flash_attn_qkvpacked_func(qkv.neg() * 2, causal=True, window_size=(99, -1), return_attn_probs=True)
        return out.transpose(1, 2).relu(), -lse

    torch.compiler.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for seqlen in (20, 21) if device == "cpu" else (300, 301):
        qkv = normal(2, seqlen, 3, 4, 64, device=device).requires_grad_()
        results, expected = compiled(qkv), layer(qkv)
        assert_equal(results, expected)
        assert_equal(*([torch.autograd.grad(x[0].sum(), qkv)[0]] for x in (results, expected)))


def test_threads(device):
    problems = [problem(device, seqlen) for seqlen in range(16, 24)]
    expected = [direct(*given) for given in problems]

    def work(leaves, dout, dlse, expected):
        for _ in range(10):
            assert_equal(torch.autograd.grad(attend(*leaves), leaves, (dout, dlse)), expected)

    at_once(work, [(*given, right) for given, right in zip(problems, expected)])
