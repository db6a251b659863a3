"""Torch's own attention on this package's kernels. Needs torch 2.11. Torch's flash attention operators are for a GPU.
Without one, tests call our kernels directly, or put them in the place of these operators on the CPU.
"""

import inspect
import sys

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from host_time import microseconds, microseconds_in_turns
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import fa3
from fa3 import activation, flash_attn_func, flash_attn_varlen_func

if not hasattr(nn.attention, "register_flash_attention_impl"):
    pytest.skip("skipped: torch has no place for another flash attention", allow_module_level=True)
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import AuxRequest, varlen_attn

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
ATEN = torch.ops.aten
OPERATORS = activation._Kernels({}).by_name()
# cu_seqlens in which one sequence is empty, and rows are left over behind the last sequence.
ENDS = 0, 5, 5, 17, 30


class Torchs:
    """A stand-in for torch's kernel of an operator: it notes its calls."""

    def __init__(self):
        self.calls = []

    def call_boxed(self, keys, *arguments, **options):
        self.calls.append((arguments, options))
        return "torch's own"


def sdpa(q, k, v, **options):
    """Calls the operator that torch calls once it has chosen flash attention."""
    if q.is_cuda:
        return scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)
    return ATEN._scaled_dot_product_flash_attention(q, k, v, **options)[0]


def normal(*shape, device="cpu", dtype=BF16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def heads_first(x):
    return x.contiguous()


def heads_in_rows(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def side_by_side(x):
    return torch.cat([x, x, x], -1)[..., x.shape[3] : 2 * x.shape[3]]


LAYOUTS = [heads_first, heads_in_rows, side_by_side]


def dense(device, arrange=heads_first, heads=(4, 2), rows=(33, 40), dtype=BF16):
    q = arrange(normal(2, heads[0], rows[0], 64, device=device, dtype=dtype))
    k, v = (arrange(normal(2, heads[1], rows[1], 64, device=device, dtype=dtype, seed=seed)) for seed in (1, 2))
    return q, k, v


def gradients(attend, tensors, dout):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attend(*leaves)
    return out, torch.autograd.grad(out, leaves, dout)


def ours(**options):
    """`flash_attn_func` for tensors in torch's layout (batch, heads, seqlen, head_dim)."""
    return lambda *tensors: flash_attn_func(*(x.transpose(1, 2) for x in tensors), **options).transpose(1, 2)


@pytest.mark.parametrize("name", OPERATORS)
def test_signatures_are_torchs(name):
    packet, _, overload = name.partition(".")
    schema = getattr(getattr(ATEN, packet), overload or "default")._schema
    keys, *parameters = inspect.signature(OPERATORS[name]).parameters.values()
    parameters = [x for x in parameters if x.kind != x.VAR_KEYWORD]
    assert keys.name == "keys"
    assert [x.name for x in parameters] == [x.name for x in schema.arguments]
    for given, torchs in zip(parameters, schema.arguments, strict=True):
        assert (given.kind == given.KEYWORD_ONLY) == torchs.kwarg_only
        if torchs.has_default_value():
            assert given.default == torchs.default_value
        else:
            assert given.default is given.empty


@pytest.mark.parametrize("arrange", LAYOUTS)
@pytest.mark.parametrize("causal, scale", [(False, None), (True, 0.3)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_dense_batches(active, device, calls, arrange, causal, scale, heads):
    tensors = dense(device, arrange, heads, rows=(40, 40))
    dout = arrange(normal(2, 4, 40, 64, device=device, seed=3))
    expected, right = gradients(ours(causal=causal, softmax_scale=scale, deterministic=True), tensors, dout)
    calls.clear()
    torch.use_deterministic_algorithms(True)
    try:
        out, computed = gradients(lambda *x: sdpa(*x, is_causal=causal, scale=scale), tensors, dout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out, expected)
    assert out.stride() == torch.empty_like(tensors[0]).stride()
    for x, of_x, given in zip(computed, right, tensors, strict=True):
        assert torch.equal(x, of_x)
        assert x.stride() == torch.empty_like(given).stride()
    # No tensor is copied.
    (forward, of_forward), (backward, of_backward) = calls
    assert (forward, backward) == ("forward", "backward")
    for call in (of_forward, of_backward):
        assert [call[name][1] for name in "qkv"] == [x.data_ptr() for x in tensors]
        assert call["o"][1] == out.data_ptr()
    assert of_backward["dout"][1] == dout.data_ptr()
    assert [of_backward[name][1] for name in ("dq", "dk", "dv")] == [x.data_ptr() for x in computed]
    assert of_backward["deterministic"]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (7, 3)])
@pytest.mark.parametrize("arrange", [lambda x: x, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)])
def test_packed_sequences(active, device, calls, window, arrange):
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device)
    tensors = [arrange(normal(32, 4, 64, device=device, seed=seed)) for seed in range(3)]
    dout = normal(32, 4, 64, device=device, seed=3)

    def right(*x):
        return flash_attn_varlen_func(*x, ends, ends, 13, 13, window_size=window, deterministic=True)

    expected, of_expected = gradients(right, tensors, dout)
    calls.clear()
    torch.use_deterministic_algorithms(True)
    try:
        out, computed = gradients(lambda *x: varlen_attn(*x, ends, ends, 13, 13, window_size=window), tensors, dout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out, expected)
    assert out.stride() == torch.empty_like(tensors[0]).stride()
    for x, of_x in zip(computed, of_expected, strict=True):
        assert torch.equal(x, of_x)
    (forward, of_forward), (backward, of_backward) = calls
    assert (forward, backward) == ("forward", "backward")
    for call in (of_forward, of_backward):
        assert [call[name][1] for name in "qkv"] == [x.data_ptr() for x in tensors]
        assert call["o"][1] == out.data_ptr()
    with torch.no_grad():
        _, lse = varlen_attn(*tensors, ends, ends, 13, 13, window_size=window, return_aux=AuxRequest(lse=True))
        _, right_lse = flash_attn_varlen_func(*tensors, ends, ends, 13, 13, window_size=window, return_attn_probs=True)
    assert torch.equal(lse, right_lse)


def test_8_bits(active, device):
    tensors = [x.to(E4M3) for x in dense(device)]
    descales = [normal(2, 2, device=device, dtype=F32, seed=seed).abs() for seed in range(3)]
    out = ATEN._scaled_dot_product_flash_attention.quantized(*tensors, *descales, is_causal=True)[0]
    names = ("q_descale", "k_descale", "v_descale")
    expected = ours(causal=True, **dict(zip(names, descales)))(*tensors)
    assert out.dtype == BF16 and torch.equal(out, expected)


@pytest.mark.parametrize("arrange", LAYOUTS)
def test_results_lie_as_torchs_own_do(active, device, arrange):
    """Results have the strides that torch's functions for fake tensors tell compilers."""
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device)
    packed = [normal(32, 4, 64, device=device)] * 3
    tensors = dense(device, arrange)
    codes = [x.to(E4M3) for x in tensors]
    for operator, given in (
        (ATEN._scaled_dot_product_flash_attention.default, tensors),
        (ATEN._scaled_dot_product_flash_attention.quantized, (*codes, None, None, None)),
        (ATEN._flash_attention_forward.default, (*(x.transpose(1, 2) for x in tensors), None, None, 33, 40, 0.0, True, False)),
        (ATEN._flash_attention_forward.default, (*packed, ends, ends, 13, 13, 0.0, True, False)),
    ):
        with torch.no_grad():
            results = operator(*given)
            with FakeTensorMode() as mode:
                fake = operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given))
        assert len(results) == len(fake)
        for x, like in zip(results, fake, strict=True):
            assert isinstance(x, torch.Tensor) == isinstance(like, torch.Tensor)
            if isinstance(x, torch.Tensor):
                assert (x.dtype, x.shape, x.stride()) == (like.dtype, like.shape, like.stride())
            else:
                assert x == like


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.hopper)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_calls(active, device, calls, backend):
    torch._dynamo.reset()
    tensors, dout = dense(device, heads_in_rows, rows=(40, 40)), normal(2, 4, 40, 64, device=device, seed=3)
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device)
    packed = [normal(32, 4, 64, device=device, seed=seed) for seed in range(3)]

    def attend(*x):
        return sdpa(*x, is_causal=True)

    def attend_packed(*x):
        return varlen_attn(*x, ends, ends, 13, 13, window_size=(-1, 0))

    for function, given, of_out in ((attend, tensors, dout), (attend_packed, packed, normal(32, 4, 64, device=device, seed=3))):
        expected, right = gradients(function, given, of_out)
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        calls.clear()
        out, computed = gradients(compiled, given, of_out)
        assert [name for name, _ in calls] == ["forward", "backward"]
        for x, of_x in zip((out, *computed), (expected, *right), strict=True):
            assert torch.equal(x, of_x) and x.stride() == of_x.stride()


def test_flex_attention_stays_torchs(active, device, calls):
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    tensors = dense(device, heads_in_rows, (4, 4), rows=(128, 128))
    out = torch.compile(flex_attention, backend=backend)(*tensors)
    assert not calls
    assert (out - ours()(*tensors)).abs().max() < 2**-6 * out.abs().max()


class Refused:
    """Calls that go to torch's own kernels, by name: the operator, its arguments, and its options."""

    q, k, v = dense("cpu", rows=(40, 40))
    lse = torch.zeros(2, 4, 40)
    seed, offset = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    ends = torch.tensor(ENDS, dtype=torch.int32)
    rows = [normal(32, 4, 64, seed=seed) for seed in range(3)]
    packed = *rows, ends, ends, 13, 13, 0.0, True, False

    @classmethod
    def of_sdpa(cls):
        q, k, v = cls.q, cls.k, cls.v
        shifted = torch.cat([q.flatten(), q.flatten()[:1]])[1:].view(q.shape)
        yield "dropout", (q, k, v, 0.1), {}
        yield "debug mask", (q, k, v, 0.0, False, True), {}
        yield "float32", (q.float(), k.float(), v.float()), {}
        yield "float64", (q.double(), k.double(), v.double()), dict(scale=0.5)
        yield "8 bits", (q.to(E4M3), k.half(), v.half()), {}
        yield "two dtypes", (q, k.half(), v.half()), {}
        yield "head_dim 60", (q[..., :60], k[..., :60], v[..., :60]), {}
        yield "head_dim 264", [torch.zeros(1, 1, 8, 264, dtype=BF16)] * 3, {}
        yield "head_dim of v", (q, k, v[..., :32]), {}
        yield "heads", (q, *[torch.cat([k, k[:, :1]], 1)] * 2), {}
        yield "batch", (q, k[:1], v[:1]), {}
        yield "address", (shifted, k, v), {}
        yield "columns apart", (q.mT.contiguous().mT, k, v), {}
        yield "rows apart", (torch.cat([q, q[..., :4]], -1)[..., :64], k, v), {}
        yield "no rows", (q[:, :, :0], k, v), {}
        yield "no keys", (q, k[:, :, :0], v[:, :, :0]), {}

    @classmethod
    def of_sdpa_backward(cls):
        given = cls.q, cls.q, cls.k, cls.v, cls.q, cls.lse, None, None, 40, 40
        yield "dropout", (*given, 0.1, True, cls.seed, cls.offset), {}
        given = [x.float() if isinstance(x, torch.Tensor) else x for x in given]
        yield "float32", (*given, 0.0, True, cls.seed, cls.offset), dict(scale=0.5)

    @classmethod
    def of_sdpa_in_8_bits(cls):
        q, k, v = (x.to(E4M3) for x in (cls.q, cls.k, cls.v))
        yield "dropout", (q, k, v, None, None, None, 0.1), {}
        yield "16 bits", (cls.q, cls.k, cls.v, None, None, None), {}
        yield "scales of rows", (q, k, v, None, torch.ones(2, 2, 40), None), {}
        yield "scales in 16 bits", (q, k, v, None, None, torch.ones(2, 2, dtype=BF16)), {}

    @classmethod
    def forward(cls):
        tensors, ends, end = cls.rows, cls.ends, cls.packed[5:]
        dense = *(x.transpose(1, 2) for x in (cls.q, cls.k, cls.v)), None, None, *end
        used = torch.ones(4, dtype=torch.int32)
        yield "dropout", (*cls.packed[:7], 0.1, True, False), {}
        yield "debug mask", (*cls.packed[:9], True), {}
        yield "slopes", cls.packed, dict(alibi_slopes=torch.ones(4))
        yield "rows in use of a dense batch", dense, dict(seqused_k=used[:2])
        yield "rows in use of other sequences", cls.packed, dict(seqused_k=used[:3])
        yield "64 bits", (*tensors, ends.long(), ends.long(), *end), {}
        yield "ends in other places", (*tensors, ends, ends.repeat(2)[::2], *end), {}
        yield "other sequences of keys", (*tensors, ends, ends[:-1], *end), {}
        yield "a newer argument", cls.packed, dict(block_table=used)

    @classmethod
    def backward(cls):
        q, k, v = cls.rows
        given = q, q, k, v, q, torch.zeros(4, 32), cls.ends, cls.ends, 13, 13
        yield "dropout", (*given, 0.1, True, cls.seed, cls.offset), {}
        yield "64 bits", (*given[:6], cls.ends.long(), cls.ends.long(), 13, 13, 0.0, True, cls.seed, cls.offset), {}


@pytest.mark.parametrize("kernel", ["of_sdpa", "of_sdpa_in_8_bits", "of_sdpa_backward", "forward", "backward"])
def test_what_is_not_ours_goes_to_torch(monkeypatch, kernel):
    monkeypatch.setattr(activation, "_has_kernels", lambda device: True)
    [name] = [name for name, function in OPERATORS.items() if function.__name__ == kernel]
    torchs = Torchs()
    function = activation._Kernels({name: torchs}).by_name()[name]
    schema = _schema(name)
    for why, given, options in getattr(Refused, kernel)():
        assert function("keys", *given, **options) == "torch's own", why
        passed, named = torchs.calls.pop()
        # Torch's kernel gets the call as it was given, completed with torch's defaults.
        positions = [x for x in schema.arguments if not x.kwarg_only]
        expected = [*given, *(x.default_value for x in positions[len(given) :])]
        assert len(passed) == len(expected) and all(a is b or a == b for a, b in zip(passed, expected)), why
        defaults = {x.name: None for x in schema.arguments if x.kwarg_only}
        assert named == defaults | options, why


def _schema(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(ATEN, packet), overload or "default")._schema


def test_other_devices_go_to_torch(monkeypatch):
    torchs = Torchs()
    kernel = activation._Kernels({activation._OF_SDPA: torchs}).of_sdpa
    assert kernel("keys", *dense("cpu")) == "torch's own"
    for capability, is_ours in (((8, 0), False), ((9, 0), True), ((10, 0), False)):
        activation._has_kernels.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        assert activation._has_kernels(0) == is_ours
    activation._has_kernels.cache_clear()


def in_the_place():
    """For each of torch's CUDA kernels of dense attention, whether this package made it."""
    lines = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention").splitlines()
    return ["activation.py" in line for line in lines if line.startswith("CUDA:")]


@pytest.mark.skipif(torch.version.cuda is None, reason="skipped: torch is built without CUDA")
def test_activation_ends_where_it_began(monkeypatch):
    removed = []

    class Other:
        def remove(self):
            removed.append(self)

    current = nn.attention.current_flash_attention_impl
    assert in_the_place() == [False]
    with fa3.activate() as active:
        assert current() == activation.NAME and in_the_place() == [True]
        # A second activation inside of the first one changes nothing.
        with fa3.activate():
            assert in_the_place() == [True]
        assert current() == activation.NAME and in_the_place() == [True]
    assert current() is None and in_the_place() == [False]
    active.restore()
    # The end of an activation restores the previous implementation. An exception ends it as well.
    nn.attention.register_flash_attention_impl("OTHER", register_fn=Other)
    nn.attention.activate_flash_attention_impl("OTHER")
    with pytest.raises(ZeroDivisionError), fa3.activate():
        assert current() == activation.NAME and len(removed) == 1
        1 / 0
    assert current() == "OTHER" and in_the_place() == [False]
    # `restore` changes nothing if torch's own function has ended the activation, and another one came later.
    active = fa3.activate()
    nn.attention.restore_flash_attention_impl()
    assert current() is None and in_the_place() == [False]
    nn.attention.activate_flash_attention_impl("OTHER")
    active.restore()
    assert current() == "OTHER"
    nn.attention.restore_flash_attention_impl()
    monkeypatch.delitem(nn.attention._registry._FLASH_ATTENTION_IMPLS, "OTHER")


@pytest.mark.parametrize("first", [[3, 1, 2, 0, 4], [1, 2, 0, 3, 4]])
def test_flash_gets_ahead_of_others(monkeypatch, first):
    monkeypatch.setattr(activation, "_let_torch_find_its_order", lambda: None)
    before = torch._C._get_sdp_priority_order()
    try:
        torch._C._set_sdp_priority_order(first)
        order = activation._put_flash_first()
        assert order == (first, [1, *(x for x in first if x != 1)])
        assert torch._C._get_sdp_priority_order() == order[1]
        activation._Handle(torch.library.Library("aten", "IMPL", "CPU"), order, ("", "none")).remove()
        assert torch._C._get_sdp_priority_order() == first
        # A priority that a user sets meanwhile stays.
        activation._put_flash_first()
        torch._C._set_sdp_priority_order([0, 1, 2, 3, 4])
        activation._Handle(torch.library.Library("aten", "IMPL", "CPU"), order, ("", "none")).remove()
        assert torch._C._get_sdp_priority_order() == [0, 1, 2, 3, 4]
    finally:
        torch._C._set_sdp_priority_order(before)


def test_graphs_on_disk_are_kept_apart():
    config = torch.compiler.config
    with config.patch(cache_key_tag="mine"):
        tags = activation._tag_compiled_graphs()
        assert tags == ("mine", config.cache_key_tag) and tags[0] != tags[1]
        activation._Handle(torch.library.Library("aten", "IMPL", "CPU"), None, tags).remove()
        assert config.cache_key_tag == "mine"
        # A tag that a user sets meanwhile stays.
        activation._tag_compiled_graphs()
        config.cache_key_tag = "another"
        activation._Handle(torch.library.Library("aten", "IMPL", "CPU"), None, tags).remove()
        assert config.cache_key_tag == "another"


def test_torch_without_a_place_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(torch.library, "get_kernel")
        with pytest.raises(NotImplementedError, match="^torch .* has no place for another flash attention, expected 2.11$"):
            fa3.activate()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NotImplementedError, match="^torch .* is built without CUDA, and has no flash attention$"):
        fa3.activate()


def choice(*tensors):
    return SDPBackend(torch._fused_sdp_choice(*tensors))


@pytest.mark.hopper
def test_torch_chooses_flash_while_it_is_active():
    tensors = dense("cuda", heads=(4, 4))
    before = choice(*tensors)
    with fa3.activate():
        assert choice(*tensors) == SDPBackend.FLASH_ATTENTION
        # Calls with a mask go to torch's own kernels.
        assert torch._fused_sdp_choice(*tensors, torch.zeros(33, 40, dtype=BF16, device="cuda")) != 1
    assert choice(*tensors) == before


@pytest.mark.hopper
def test_calls_that_are_not_ours_are_as_before(calls):
    q, k, v = dense("cuda", rows=(40, 40), heads=(4, 4))
    mask = normal(40, 40, device="cuda", seed=5)
    for given, options in (
        ((q, k, v), dict(attn_mask=mask)),
        ((q.float(), k.float(), v.float()), dict(is_causal=True)),
        ((q, k, v[..., :32]), dict()),
    ):
        expected = scaled_dot_product_attention(*given, **options)
        with fa3.activate():
            assert torch.equal(scaled_dot_product_attention(*given, **options), expected)
    with fa3.activate():
        torch.manual_seed(0)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        dropped = scaled_dot_product_attention(*leaves, dropout_p=0.5)
        assert torch.autograd.grad(dropped, leaves, q)[0].isfinite().all()
        assert not torch.equal(dropped, scaled_dot_product_attention(*leaves, dropout_p=0.5))
    assert calls == []


@pytest.mark.hopper
def test_a_graph_from_before_is_not_used(calls):
    """Torch has a compiled graph on disk, with the backend that it chose before the activation."""
    tensors = dense("cuda", heads=(4, 4), rows=(40, 40))

    def compiled():
        torch._dynamo.reset()
        return torch.compile(lambda *x: scaled_dot_product_attention(*x, is_causal=True), fullgraph=True)(*tensors)

    compiled()
    with fa3.activate():
        out = compiled()
        assert [name for name, _ in calls] == ["forward"]
        assert torch.equal(out, ours(causal=True)(*tensors))
        calls.clear()
    compiled()
    assert calls == []


@pytest.mark.hopper
def test_more_of_torchs_attention_is_ours(calls):
    """Torch pads head dimensions, finds causal masks, and calls our kernels from modules, nested tensors and graphs."""
    with fa3.activate():
        q, k, v = (x[..., :60].contiguous() for x in dense("cuda", rows=(40, 40), heads=(4, 4)))
        expected = ATEN._scaled_dot_product_attention_math(q.double(), k.double(), v.double(), None, 0.0, True)[0]
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        assert (out - expected).abs().max() < 2**-6 * expected.abs().max()
        assert len(calls) == 1

        bias = causal_lower_right(33, 40)
        tensors = dense("cuda", heads=(4, 4))
        assert torch.equal(scaled_dot_product_attention(*tensors, attn_mask=bias), ours(causal=True)(*tensors))
        calls.clear()

        module = nn.MultiheadAttention(256, 4, batch_first=True, device="cuda", dtype=BF16)
        x = normal(2, 40, 256, device="cuda").requires_grad_()
        module(x, x, x, need_weights=False)[0].sum().backward()
        assert [name for name, _ in calls] == ["forward", "backward"]
        calls.clear()

        rows = [normal(length, 4, 64, device="cuda", seed=length) for length in (5, 12, 30)]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
        out = scaled_dot_product_attention(nested, nested, nested, is_causal=True)
        assert [name for name, _ in calls] == ["forward"]
        for of_out, x in zip(out.transpose(1, 2).unbind(), rows, strict=True):
            expected = flash_attn_func(*[x[None]] * 3, causal=True)[0]
            assert (of_out - expected).abs().max() < 2**-6 * expected.abs().max()
        calls.clear()

        tensors = dense("cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sdpa(*tensors)
        tensors[0].neg_()
        graph.replay()
        assert torch.equal(out, ours()(*tensors))
        calls.clear()

        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            sdpa(*dense("cuda", heads=(4, 4)))
        assert calls == []


@pytest.mark.hopper
def test_compiled_steps_in_cuda_graphs(calls):
    """Torch's graphs own the memory of all results, also of the placeholders for dropout."""
    torch._dynamo.reset()
    tensors, dout = dense("cuda", rows=(40, 40)), normal(2, 4, 40, 64, device="cuda", seed=3)
    with fa3.activate():
        out, expected = gradients(sdpa, tensors, dout)
        compiled = torch.compile(lambda *x: sdpa(*x) * 1, mode="reduce-overhead", fullgraph=True)
        calls.clear()
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            again, computed = gradients(compiled, tensors, dout)
            for x, of_x in zip((again, *computed), (out, *expected), strict=True):
                assert torch.equal(x, of_x)
            # The next step overwrites these results.
            del again, computed, x
        # Our kernels are called once before the capture, and once for it.
        assert [name for name, _ in calls] == ["forward", "backward"] * 2


def test_calls_share_a_seed_unless_graphs_own_their_results(monkeypatch):
    def seed(x):
        seed, offset, mask = activation._others(x)
        assert (seed.shape, seed.dtype, offset.shape, offset.dtype, mask.numel()) == ((2,), torch.uint64, (), torch.uint64, 0)
        assert offset.data_ptr() == seed.data_ptr()
        return seed.data_ptr()

    x, kept = normal(2, 3), torch.zeros(2, dtype=torch.uint64)
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    held = seed(x)
    monkeypatch.setitem(activation._seeds, -1, (kept, kept[0]))
    assert seed(x) == kept.data_ptr() != held
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", None)
    assert seed(x) != kept.data_ptr()


@pytest.mark.hopper
def test_host_time_of_a_call_under_activation():
    """Compares the host time with torch's own call and with our operator."""
    q, k, v = (normal(1, 4, 64, 64, device="cuda", seed=seed) for seed in range(3))
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    packed, ends = [x[0] for x in rows], torch.tensor([0, 40, 64], dtype=torch.int32, device="cuda")
    options = None, -1, 0, 0, 0.0, 0
    lists = ends, ends, None, None, 40, 40

    def forward():
        return torch.ops.fa3.forward(*rows, *options)

    def varlen_forward():
        return torch.ops.fa3.varlen_forward(*packed, *lists, *options)

    def flash(*given, seqlen):
        return ATEN._flash_attention_forward(*given, seqlen, seqlen, 0.0, True, False)

    calls = {
        "scaled_dot_product_attention": (lambda: sdpa(q, k, v, is_causal=True), forward),
        "varlen_attn": (lambda: varlen_attn(*packed, ends, ends, 40, 40, window_size=(-1, 0)), varlen_forward),
        "_flash_attention_forward, dense": (lambda: flash(*rows, None, None, seqlen=64), forward),
        "_flash_attention_forward, packed": (lambda: flash(*packed, ends, ends, seqlen=40), varlen_forward),
    }
    print()
    with torch.inference_mode():
        for name, (call, operator) in calls.items():
            call()
            torchs = microseconds(call, calls=100)
            with fa3.activate():
                call(), operator()
                active, plain = microseconds_in_turns([call, operator], calls=100)
            print(f"{name:34}torch {torchs:6.2f} us, under activation {active:6.2f}, our operator {plain:6.2f}")
            # Hosts differ, and other processes use them. So the bound is relative to another call.
            assert active < 3 * plain
