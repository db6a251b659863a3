"""Attention in 8 bits of tensors in 16, `fa3.flash_attn_fp8_func`: the same bits as quantization and attention one by
one. Needs torch.
"""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import normal

from fa3 import flash_attn_fp8_func, flash_attn_func, quantize, quantize_channels

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ON_GPU = pytest.param("cuda", marks=pytest.mark.hopper)
SCORES = [dict(), dict(causal=True, softcap=5.0), dict(softmax_scale=0.3, window_size=(37, 11))]


@pytest.fixture(params=["cpu", ON_GPU])
def device(request):
    if request.param == "cuda":
        request.getfixturevalue("nan_in_new_tensors")
    return request.param


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


def test_a_call_enters_the_extension_module_once(device, calls):
    q, k, v = inputs(device)
    cos, sin = tables(device)
    for v_channels in (False, True):
        flash_attn_fp8_func(q, k, v, cos=cos, sin=sin, q_positions=listed(device, 140), v_channels=v_channels)
    assert [name for name, _ in calls] == ["fp8_forward"] * 2
    # An LSE that nobody wants is not even allocated.
    assert all("lse" not in given for _, given in calls)


@pytest.mark.filterwarnings("ignore:.*performance drop")
def test_vmap_is_a_loop():
    q, k, v = (normal(3, 2, 20, heads, 32, seed=heads) for heads in (4, 2, 1))
    v = v.expand_as(k)
    expected = [flash_attn_fp8_func(*tensors) for tensors in zip(q, k, v)]
    assert torch.equal(torch.func.vmap(flash_attn_fp8_func)(q, k, v), torch.stack(expected))
