"""The interface as far as it can be seen without a GPU. Needs torch, but most tests no GPU."""

import inspect

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fa3 import (
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)


# Where two sequences end.
ENDS = torch.tensor([0, 3, 8], dtype=torch.int32)


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def signature(function):
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_signatures_are_flash_attention_3s():
    none = inspect.Parameter.empty
    tail = dict(window_size=(-1, -1), attention_chunk=0, softcap=0.0)
    descales = dict(q_descale=None, k_descale=None, v_descale=None)
    expected = dict(q=none, k=none, v=none, softmax_scale=None, causal=False, qv=None, **descales, **tail)
    expected |= dict(num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False)
    more = dict(v_mean=None, v_transposed=False, out_dtype=None, out=None, s_aux=None, intervals=None)
    assert signature(flash_attn_func) == list((expected | more).items())
    of_more = [inspect.signature(flash_attn_func).parameters[name] for name in more]
    assert all(parameter.kind == inspect.Parameter.KEYWORD_ONLY for parameter in of_more)
    expected = dict(qkv=none, softmax_scale=None, causal=False, **descales, **tail)
    expected |= dict(deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False)
    assert signature(flash_attn_qkvpacked_func) == list(expected.items())
    lists = {f"{name}_{of}": none for name in ("cu_seqlens", "max_seqlen") for of in "qk"}
    expected = dict(q=none, k=none, v=none, **lists, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False)
    expected |= dict(qv=None, **descales, **tail, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0)
    expected |= dict(return_attn_probs=False)
    more = dict(out_dtype=None, out=None, s_aux=None, page_table=None, block_table=None, scheduler_metadata=None)
    assert signature(flash_attn_varlen_func) == list((expected | more).items())
    of_more = [inspect.signature(flash_attn_varlen_func).parameters[name] for name in more]
    assert all(parameter.kind == inspect.Parameter.KEYWORD_ONLY for parameter in of_more)


def test_the_signature_of_packed_sequences_in_one_tensor_is_flash_attn_2s():
    none = inspect.Parameter.empty
    expected = dict(qkv=none, cu_seqlens=none, max_seqlen=none, dropout_p=0.0, softmax_scale=None, causal=False)
    expected |= dict(window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
    more = dict(q_descale=None, k_descale=None, v_descale=None, attention_chunk=0, num_heads_q=None, sm_margin=0)
    assert signature(flash_attn_varlen_qkvpacked_func) == list((expected | more).items())
    of_more = [inspect.signature(flash_attn_varlen_qkvpacked_func).parameters[name] for name in more]
    assert all(parameter.kind == inspect.Parameter.KEYWORD_ONLY for parameter in of_more)


def test_tensors_of_the_wrong_kind_are_refused():
    x = zeros(1, 8, 2, 64)
    with pytest.raises(TypeError, match="^k is NoneType, expected torch.Tensor$"):
        flash_attn_func(x, None, x)
    for position, name in enumerate(("q", "k", "v")):
        packed = [x[0], x[0], x[0], ENDS, ENDS]
        packed[position] = None
        with pytest.raises(TypeError, match=f"^{name} is NoneType, expected torch.Tensor$"):
            flash_attn_varlen_func(*packed, None, None)
    for name in ("seqused_q", "seqused_k", "q_descale", "out"):
        with pytest.raises(TypeError, match=f"^{name} is list, expected torch.Tensor$"):
            flash_attn_varlen_func(x[0], x[0], x[0], ENDS, ENDS, None, None, **{name: [1, 2]})
    with pytest.raises(TypeError, match="^qkv is list, expected torch.Tensor$"):
        flash_attn_qkvpacked_func([x, x, x])
    meta = x.to("meta")
    with pytest.raises(ValueError, match="^k is on meta and q on cpu, expected one CUDA device or the CPU$"):
        flash_attn_func(x, meta, x)


@pytest.mark.parametrize(
    "shape, num_heads_q, expected",
    [
        ((2, 8, 6, 64), None, r"\(batch, seqlen, 3, heads, head_dim\)"),
        ((2, 8, 2, 4, 64), None, r"\(batch, seqlen, 3, heads, head_dim\)"),
        ((2, 8, 7, 64), 4, r"\(batch, seqlen, 4 \+ 2 \* heads_kv, head_dim\) with num_heads_q 4"),
        ((2, 8, 4, 64), 4, r"\(batch, seqlen, 4 \+ 2 \* heads_kv, head_dim\) with num_heads_q 4"),
    ],
)
def test_packed_tensors_of_the_wrong_shape_are_refused(shape, num_heads_q, expected):
    with pytest.raises(ValueError, match=f"expected {expected}$"):
        flash_attn_qkvpacked_func(zeros(*shape), num_heads_q=num_heads_q)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("lazy", ["negated", "conjugated", "zero"])
def test_tensors_are_read_as_what_they_stand_for(lazy, position):
    """Tensors whose memory is not what they hold: -x, kept as x; a conjugate's imaginary part; zeros without memory."""
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


def test_fake_tensors_of_other_ranks_are_refused():
    with FakeTensorMode():
        q, k = (torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((64, 8, 128), (2, 64, 8, 128)))
        with pytest.raises(ValueError, match="^q has 3, k 4 and v 4 dimensions, expected 4"):
            flash_attn_func(q, k, k)


def test_tracers_see_the_operator():
    def attend(x):
        return flash_attn_func(x, x, x, causal=True, window_size=(5, 3), softcap=30.0)

    with FakeTensorMode():
        graph = make_fx(attend)(torch.empty(2, 64, 8, 128, dtype=torch.bfloat16, device="cuda"))
    [node] = [node for node in graph.graph.nodes if node.target is torch.ops.fa3.forward.default]
    # The right side of a causal window is 0.
    assert list(node.args[3:]) == [None, 5, 0, 0, 30.0, 0]


def test_tracers_see_attention_in_8_bits_as_one_operator():
    def attend(q, k, v, cos, positions):
        rotation = dict(cos=cos, sin=cos, interleaved=True, q_positions=positions, k_positions=7)
        scores = dict(softmax_scale=0.5, causal=True, window_size=(5, 3), softcap=30.0)
        return flash_attn_fp8_func(q, k, v, hadamard_seed=2**64 - 1, v_channels=True, **rotation, **scores)

    with FakeTensorMode():
        q, k, v = (torch.empty(2, 300, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        cos, positions = torch.empty(400, 16, device="cuda"), torch.empty(2, 300, dtype=torch.int64, device="cuda")
        graph = make_fx(attend)(q, k, v, cos, positions).graph
    [node] = [node for node in graph.nodes if "fa3" in str(node.target)]
    assert node.target is torch.ops.fa3.fp8_forward.default
    given = dict(zip((argument.name for argument in node.target._schema.arguments), node.args, strict=True))
    tensors = [node for node in graph.nodes if node.op == "placeholder"]
    names = ("q", "k", "v", "cos", "q_positions")
    assert [given.pop(name) for name in names] == tensors and given.pop("sin") is tensors[3]
    assert given == dict(
        k_positions=None,
        interleaved=True,
        q_first=0,
        k_first=7,
        hadamard_seed=-1,
        v_channels=True,
        softmax_scale=0.5,
        window_left=5,
        window_right=0,
        softcap=30.0,
    )


def test_compilers_see_one_graph_whatever_the_lengths():
    seen = []

    def backend(graph, _):
        seen.append(graph)
        return lambda *arguments: (torch.zeros(1),)

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def attend(qkv):
        return flash_attn_qkvpacked_func(qkv, causal=True) * 2

    for seqlen in (16, 40, 64):
        attend(zeros(2, seqlen, 3, 4, 64))
    [graph] = seen
    assert sum("fa3.forward" in str(node.target) or node.target is torch.ops.fa3.forward for node in graph.graph.nodes) == 1
