"""The interface without a GPU: signatures, traces, and counted operations. Needs torch."""

import inspect
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from operations import OPERATIONS
from packing import ends, normal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import fa3
from fa3 import flash_attn, flash_attn_func, flash_attn_interface, flash_attn_varlen_func, flash_attn_with_kvcache, flash_mla

BF16, F16, I32 = torch.bfloat16, torch.float16, torch.int32
SIGNATURES = (Path(__file__).parent / "signatures.txt").read_text().splitlines()


@pytest.mark.parametrize("line", SIGNATURES, ids=lambda line: line.partition("(")[0])
def test_signatures_are_what_others_call(line):
    """The signatures of FlashAttention-3, flash-attn 2 and FlashMLA. Arguments after a star are this package's own."""
    module, _, name = line.partition("(")[0].rpartition(".")
    signature = inspect.signature(getattr(dict(fa3=fa3, flash_attn=flash_attn, interface=flash_attn_interface, flash_mla=flash_mla)[module], name))
    parameters = [x.replace(annotation=x.empty) for x in signature.parameters.values()]
    assert f"{module}.{name}{signature.replace(parameters=parameters, return_annotation=signature.empty)}" == line


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("lazy", ["negated", "conjugated", "zero"])
def test_tensors_are_read_as_what_they_stand_for(lazy, position):
    """Tensors whose memory does not have their values: -x stored as x, the imaginary part of a conjugate, and zeros."""
    x = torch.randn(1, 8, 2, 64, generator=torch.Generator().manual_seed(0))
    lazy, value = {
        "negated": lambda: (torch._neg_view(x), -x),
        "conjugated": lambda: (torch.complex(x, x).conj().imag, -x),
        "zero": lambda: (torch._efficientzerotensor(x.shape, dtype=x.dtype), torch.zeros_like(x)),
    }[lazy]()
    assert lazy.is_neg() or lazy._is_zerotensor()
    given, expected = [x, x, x], [x, x, x]
    given[position], expected[position] = lazy, value
    assert torch.equal(flash_attn_func(*given), flash_attn_func(*expected))


# Traces: calls with FakeTensorMode's tensors, the operator that each calls, and the operator's options.
MASK = dict(causal=True, window_size=(5, 3), softcap=30.0)
SCORES = dict(softmax_scale=0.5, **MASK)
ROTATION = dict(interleaved=True, k_positions=7, hadamard_seed=2**64 - 1, v_channels=True)


def of_16_bits(q, k, cos, positions):
    return fa3.flash_attn_fp8_func(q, k, k, cos=cos, sin=cos, q_positions=positions, **ROTATION, **SCORES)


def paged(q, k, lengths, table):
    return flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths, page_table=table, causal=True, num_splits=1)


def meant(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device="cuda")


# The right side of a causal window becomes 0. In a trace, a hint that is a tensor becomes None.
TRACED = {
    "forward": (lambda q: flash_attn_func(q, q, q, **MASK), lambda: [meant(2, 64, 8, 128)], 3, [None, 5, 0, 0, 30.0, 0]),
    "varlen_forward": (
        lambda q, ends, hint: flash_attn_varlen_func(q, q, q, ends, ends, hint, 40, **MASK),
        lambda: [meant(64, 8, 128), meant(4, dtype=I32), torch.tensor(5, device="cuda")],
        5,
        [None, None, None, 40, None, 5, 0, 0, 30.0, 0],
    ),
    "fp8_forward": (
        of_16_bits,
        lambda: [meant(2, 300, 4, 64), meant(2, 300, 2, 64), meant(400, 16, dtype=torch.float32), meant(2, 300, dtype=torch.int64)],
        6,
        [None, True, 0, 7, -1, True, 0.5, 5, 0, 30.0],
    ),
    "cached_forward": (
        paged,
        lambda: [meant(2, 1, 4, 64, dtype=F16), meant(20, 16, 2, 64, dtype=F16), meant(2, dtype=I32), meant(2, 9, dtype=I32)],
        5,
        [None] * 7 + [-1, 0, 0, 0.0, 0, 0],
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_tracers_see_one_operator(name):
    call, given, position, expected = TRACED[name]
    with FakeTensorMode():
        nodes = make_fx(call)(*given()).graph.nodes
    [node] = [node for node in nodes if "fa3" in str(node.target)]
    assert node.target is getattr(torch.ops.fa3, name).default
    tensors = [node for node in nodes if node.op == "placeholder"]
    assert all(x in tensors for x in node.args[:position]) and list(node.args[position:]) == expected


def test_compilers_see_one_graph_whatever_the_lengths():
    seen = []

    def backend(graph, _):
        seen.append(graph)
        return lambda *arguments: (torch.zeros(1),)

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def attend(qkv):
        return fa3.flash_attn_qkvpacked_func(qkv, causal=True) * 2

    for seqlen in (16, 40, 64):
        attend(torch.zeros(2, seqlen, 3, 4, 64, dtype=BF16))
    [graph] = seen
    assert sum("fa3.forward" in str(node.target) or node.target is torch.ops.fa3.forward for node in graph.graph.nodes) == 1


# Counted operations include hidden keys, and each query head. Counting does not read the lengths.


def flops(function, *tensors, **options):
    """Counts the operations of a call, and of its backward pass if its tensors require grad."""
    with FlopCounterMode(display=False) as counter:
        out = function(*tensors, **options)
        if any(x.requires_grad for x in tensors):
            out.sum().backward()
    return counter.get_total_flops()


def leaves(*shapes):
    return [torch.empty(shape, dtype=BF16).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("seqlen, heads_kv, head_dim_v", [(96, 4, 64), (40, 4, 32), (40, 2, 64)])
def test_operations_are_counted_as_torch_counts_its_own(seqlen, heads_kv, head_dim_v):
    def theirs(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

    with FakeTensorMode():
        of_ours = leaves((2, 32, 4, 64), (2, seqlen, heads_kv, 64), (2, seqlen, heads_kv, head_dim_v))
        counted = flops(flash_attn_func, *of_ours, causal=True)
        shapes = (2, 4, 32, 64), (2, 4, seqlen, 64), (2, 4, seqlen, head_dim_v)
        if head_dim_v == 64:
            assert counted == flops(theirs, *leaves(*shapes))
        assert counted == sdpa_flop_count(*shapes) + sdpa_backward_flop_count((2, 4, 32, head_dim_v), *shapes)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_operations_of_packed_sequences(requires_grad):
    """The count is exact for sequences of one length. With a hint, all count as having the hint's number of keys."""

    def tensors(*rows):
        return [normal(*rows[i > 0], heads, d).requires_grad_(requires_grad) for i, (heads, d) in enumerate(((4, 64), (2, 64), (2, 32)))]

    of_q, of_k = ends([20] * 3, "cpu"), ends([30] * 3, "cpu")
    dense = flops(flash_attn_func, *tensors((3, 20), (3, 30)))
    assert dense == 3 * 4 * 20 * 30 * 2 * (64 + 32 + (3 * 64 + 2 * 32 if requires_grad else 0))
    for hints, times in (((None, None), 2), ((20, 30), 2), ((1, 30), 2), ((20, 45), 3), ((20, 10**6), 6)):
        assert flops(lambda *x: flash_attn_varlen_func(*x, of_q, of_k, *hints), *tensors((60,), (90,))) == dense * times // 2
    if not requires_grad:
        into = lambda *x: flash_attn_varlen_func(*x, of_q, of_k, None, None, out=torch.empty(60, 4, 32, dtype=BF16))
        assert flops(into, *tensors((60,), (90,))) == dense


def test_operations_in_8_bits():
    with FakeTensorMode():
        q, k = meant(2, 32, 4, 64), meant(2, 40, 4, 64)
        assert flops(fa3.flash_attn_fp8_func, q, k, k) == flops(flash_attn_func, q, k, k) == 2 * 4 * 32 * 40 * 2 * 128
    q, k, v = normal(412, 2, 64), normal(734, 1, 64), normal(734, 1, 32)
    lists = ends([100, 33, 130, 1, 128], "cpu"), ends([140, 30, 300, 1, 256], "cpu")
    assert flops(lambda *x: fa3.flash_attn_varlen_fp8_func(*x, *lists, 130, 300), q, k, v) == 2 * 412 * 300 * 2 * (64 + 32)


@pytest.mark.parametrize("name", ["dense latent", "packed latent", "cache latent"])
def test_operations_of_latent_attention(name):
    operation = OPERATIONS[name]
    given = operation.make("cpu")
    with FakeTensorMode() as mode:
        given = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        without = {name: x for name, x in given.items() if name != "qv"}
        pairs, rest = divmod(flops(lambda: operation.function(**without)), 2 * (64 + 512))
        assert rest == 0 and flops(lambda: operation.function(**given)) == pairs * 2 * (64 + 512 + 512)
