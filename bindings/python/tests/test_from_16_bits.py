"""Attention in 8 bits of tensors in 16, `fa3.flash_attn_fp8_func`: the same bits as quantization and attention one by
one. Needs torch.
"""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from fa3 import flash_attn_fp8_func, flash_attn_func, quantize, quantize_channels

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ON_GPU = pytest.param("cuda", marks=pytest.mark.hopper)
SCORES = [dict(), dict(causal=True, softcap=5.0), dict(softmax_scale=0.3, window_size=(37, 11))]


@pytest.fixture(params=["cpu", ON_GPU])
def device(request):
    if request.param == "cuda":
        request.getfixturevalue("nan_in_new_tensors")
    return request.param


def normal(*shape, device="cpu", dtype=BF16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def inputs(device, dtype=BF16, seqlens=(140, 300), heads=(4, 2), head_dims=(64, 32)):
    (rows, keys), (heads_q, heads_kv), (head_dim, head_dim_v) = seqlens, heads, head_dims
    q = normal(2, rows, heads_q, head_dim, device=device, dtype=dtype)
    k = normal(2, keys, heads_kv, head_dim, device=device, dtype=dtype, seed=1)
    return q, k, 2 + normal(2, keys, heads_kv, head_dim_v, device=device, dtype=dtype, seed=2)


def tables(device, rows=320, rotary_dim=32):
    angles = torch.outer(torch.arange(float(rows)), 100.0 ** -torch.linspace(0, 1, rotary_dim // 2))
    return angles.cos().to(device), angles.sin().to(device)


def listed(device, seqlen, rows=320, dtype=torch.int64, first=-3):
    """Positions of which some are in no table of so many rows."""
    return (first + 7 * torch.arange(2 * seqlen).view(2, seqlen) % (rows + 5)).to(device, dtype)


def parts(q, k, v, *, q_positions=0, k_positions=0, hadamard_seed=0, v_channels=False, rotation={}, **options):
    """O and LSE by quantization and attention."""
    rotation_of_q = rotation | (dict(positions=q_positions) if rotation else {})
    rotation_of_k = rotation | (dict(positions=k_positions) if rotation else {})
    q_codes, q_descale = quantize(q, **rotation_of_q, hadamard_seed=hadamard_seed)
    k_codes, k_descale = quantize(k, **rotation_of_k, hadamard_seed=hadamard_seed)
    v_mean = None
    if v_channels:
        v_codes, v_descale, v_mean = quantize_channels(v, transposed=True)
    else:
        v_codes, v_descale = quantize(v, transposed=True)
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, v_mean=v_mean)
    kinds = dict(v_transposed=True, out_dtype=q.dtype, return_attn_probs=True)
    return flash_attn_func(q_codes, k_codes, v_codes, **descales, **kinds, **options)


def assert_same_bits(results, expected):
    for result, right in zip(results, expected, strict=True):
        kind = torch.int16 if right.element_size() == 2 else torch.int32
        assert (result.dtype, result.shape) == (right.dtype, right.shape) and result.is_contiguous()
        assert torch.equal(result.view(kind), right.view(kind))


@pytest.mark.parametrize("v_channels", [False, True], ids=["blocks", "channels"])
@pytest.mark.parametrize("scores", SCORES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_it_is_what_its_parts_are(device, dtype, scores, v_channels):
    cases = [((140, 300), (4, 2), (64, 32)), ((33, 129), (2, 2), (128, 128)), ((5, 0), (2, 1), (32, 32)), ((0, 5), (2, 1), (32, 32))]
    if device == "cuda":
        cases += [((1500, 1500), (6, 2), (128, 64)), ((700, 900), (2, 1), (256, 256))]
    for seqlens, heads, head_dims in cases:
        q, k, v = inputs(device, dtype, seqlens, heads, head_dims)
        for seed in (None, 2**64 - 1):
            given = dict(hadamard_seed=seed, v_channels=v_channels)
            results = flash_attn_fp8_func(q, k, v, return_attn_probs=True, **given, **scores)
            assert_same_bits(results, parts(q, k, v, **given, **scores))
            assert_same_bits([flash_attn_fp8_func(q, k, v, **given, **scores)], results[:1])


def positions(device, q, k):
    """Positions of Q and of K: first ones and lists, of both integers, contiguous or not."""
    of_q, of_k = listed(device, q.shape[1]), listed(device, k.shape[1], dtype=torch.int32, first=0)
    strided = torch.stack([of_q, of_q], -1)[..., 0]
    yield from itertools.product((7, of_q), (3, of_k))
    yield strided, of_k
    yield of_q + 2**40, 0
    yield of_q.int(), of_k[:1].expand(2, -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_are_rotated_by_their_positions(device, dtype, interleaved):
    q, k, v = inputs(device)
    cos, sin = (table.to(dtype) for table in tables(device))
    rotation = dict(cos=cos, sin=sin, interleaved=interleaved)
    for of_q, of_k in positions(device, q, k):
        given = dict(q_positions=of_q, k_positions=of_k, causal=True)
        results = flash_attn_fp8_func(q, k, v, return_attn_probs=True, **given, **rotation)
        assert_same_bits(results, parts(q, k, v, rotation=rotation, **given))


def test_rows_without_a_position_are_nan(device):
    q, k, v = inputs(device, seqlens=(20, 30))
    cos, sin = tables(device)
    of_q = torch.arange(20).repeat(2, 1)
    of_q[0, 3], of_q[1, 7] = -1, 320
    is_nowhere = ((of_q < 0) | (of_q >= 320)).to(device)
    assert is_nowhere.sum() == 2
    out = flash_attn_fp8_func(q, k, v, cos=cos, sin=sin, q_positions=of_q.to(device))
    assert torch.equal(out.isnan(), is_nowhere[:, :, None, None].expand_as(out))


def test_strides_are_free(device):
    q, k, v = inputs(device)
    expected = flash_attn_fp8_func(q, k, v, causal=True, return_attn_probs=True)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert_same_bits(flash_attn_fp8_func(*heads_first, causal=True, return_attn_probs=True), expected)
    if device == "cpu":
        # Also those that a GPU does not take, and elements that begin inside of others.
        apart = [torch.stack([x, x], -1)[..., 1] for x in (q, k, v)]
        raw = [bytearray([0, *x.flatten().view(torch.uint8).tolist()]) for x in (q, k, v)]
        shifted = [torch.frombuffer(y, dtype=BF16, offset=1).view_as(x) for x, y in zip((q, k, v), raw)]
        for tensors in (apart, shifted):
            assert_same_bits(flash_attn_fp8_func(*tensors, causal=True, return_attn_probs=True), expected)


def test_negated_tensors_are_what_they_stand_for(device):
    q, k, v = inputs(device, seqlens=(20, 30))
    expected = [flash_attn_fp8_func(-q, k, v), flash_attn_fp8_func(q, k, -v)]
    negated = [flash_attn_fp8_func(torch._neg_view(q), k, v), flash_attn_fp8_func(q, k, torch._neg_view(v))]
    assert_same_bits(negated, expected)


def test_a_call_enters_the_extension_module_once(device, calls):
    q, k, v = inputs(device)
    cos, sin = tables(device)
    for v_channels in (False, True):
        flash_attn_fp8_func(q, k, v, cos=cos, sin=sin, q_positions=listed(device, 140), v_channels=v_channels)
    assert [name for name, _ in calls] == ["fp8_forward"] * 2
    # An LSE that nobody wants is not even allocated.
    assert all("lse" not in given for _, given in calls)


def test_the_schema_is_what_graphs_are_saved_with():
    expected = (
        "fa3::fp8_forward(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor? q_positions, "
        "Tensor? k_positions, bool interleaved, SymInt q_first, SymInt k_first, int? hadamard_seed, bool v_channels, "
        "float? softmax_scale, SymInt window_left, SymInt window_right, float softcap) -> (Tensor o, Tensor lse)"
    )
    assert str(torch.ops.fa3.fp8_forward.default._schema) == expected


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (70, 129)], ids=str)
def test_the_operator_is_what_it_says(device, seqlens):
    """Schema, fake results beside real ones, and what becomes of it under torch.compile: torch's own checks."""
    q, k, v = inputs(device, seqlens=seqlens)
    cos, sin = tables(device)
    # No NaN, which torch finds different from itself.
    of_q, of_k = (listed(device, seqlen, rows=315, first=0) for seqlen in seqlens)
    scores = (None, 7, 0, 30.0)
    for arguments in [
        (q, k, v, None, None, None, None, False, 0, 0, None, False, *scores),
        (q, k, v, None, None, None, None, False, 0, 0, -1, True, *scores),
        (q.transpose(1, 2).contiguous().transpose(1, 2), k, v, cos, sin, None, None, True, 5, 3, 7, False, *scores),
        (q, k, v, cos, sin, of_q, of_k.int(), False, 0, 0, 7, True, *scores),
    ]:
        torch.library.opcheck(torch.ops.fa3.fp8_forward.default, arguments)


def test_compiled_calls_are_those_of_plain_ones(device):
    q, k, v = inputs(device)
    cos, sin = tables(device)
    of_q = listed(device, 140, rows=315, first=0)

    def plain(q, k, v):
        return flash_attn_fp8_func(q * 2, k, v, return_attn_probs=True)

    def rotated(q, k, v):
        rotation = dict(cos=cos, sin=sin, interleaved=True, q_positions=of_q, k_positions=3)
        options = dict(softmax_scale=0.3, causal=True, window_size=(5, 3), softcap=20.0, hadamard_seed=2**64 - 3)
        return flash_attn_fp8_func(q * 2, k, v, v_channels=True, return_attn_probs=True, **rotation, **options)

    for function in (plain, rotated):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert_same_bits(compiled(q, k, v), function(q, k, v))


def test_an_export_takes_other_lengths():
    class Attend(torch.nn.Module):
        def forward(self, q, kv, positions):
            return flash_attn_fp8_func(q, kv, kv, causal=True, cos=cos, sin=sin, q_positions=positions)

    cos, sin = tables("cpu")
    given = [normal(2, 20, 4, 64), normal(2, 30, 2, 64), torch.arange(40).view(2, 20)]
    auto = torch.export.Dim.AUTO
    program = torch.export.export(Attend(), tuple(given), dynamic_shapes=[{0: auto, 1: auto}] * 3)
    given = [normal(3, 50, 4, 64), normal(3, 70, 2, 64), torch.arange(150).view(3, 50)]
    assert torch.equal(program.module()(*given), Attend()(*given))


@pytest.mark.parametrize("place", ["cuda", "cpu", "meta"])
def test_fake_results_are_contiguous_whatever_the_strides(place):
    with FakeTensorMode():
        q = torch.empty(2, 8, 300, 128, dtype=F16, device=place).transpose(1, 2)
        k, v = (torch.empty(2, 200, 2, dim, dtype=F16, device=place) for dim in (128, 64))
        out, lse = flash_attn_fp8_func(q, k, v, v_channels=True, return_attn_probs=True)
    assert (out.shape, out.dtype, out.is_contiguous(), out.device) == ((2, 300, 8, 64), F16, True, q.device)
    assert (lse.shape, lse.dtype, lse.is_contiguous(), lse.device) == ((2, 8, 300), F32, True, q.device)


def test_derivatives_are_refused_where_they_would_be_needed():
    """Where they always are; otherwise the backward pass refuses (test_autograd.py)."""
    x = normal(1, 8, 2, 64)
    tangent = "^q, k, v, cos or sin has a tangent"
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=tangent):
        flash_attn_fp8_func(x, x, forward_ad.make_dual(x, x))
    with pytest.raises(NotImplementedError, match=tangent):
        torch.func.jvp(lambda x: flash_attn_fp8_func(x, x, x), (x,), (x,))
    with pytest.raises(NotImplementedError, match="^q, k, v, cos or sin requires grad, and attention in 8 bits has no"):
        torch.func.grad(lambda x: flash_attn_fp8_func(x, x, x).sum())(x)


@pytest.mark.filterwarnings("ignore:.*performance drop")
def test_vmap_is_a_loop():
    q, k, v = (normal(3, 2, 20, heads, 32, seed=heads) for heads in (4, 2, 1))
    v = v.expand_as(k)
    expected = [flash_attn_fp8_func(*tensors) for tensors in zip(q, k, v)]
    assert torch.equal(torch.func.vmap(flash_attn_fp8_func)(q, k, v), torch.stack(expected))


def test_other_devices_are_refused():
    x, (cos, sin) = normal(1, 8, 2, 64), tables("cpu")
    with pytest.raises(ValueError, match="^k is on meta and q on cpu, expected one CUDA device or the CPU$"):
        flash_attn_fp8_func(x, x.to("meta"), x)
    with pytest.raises(ValueError, match="^sin is on meta and q on cpu, expected one CUDA device or the CPU$"):
        flash_attn_fp8_func(x, x, x, cos=cos, sin=sin.to("meta"))
