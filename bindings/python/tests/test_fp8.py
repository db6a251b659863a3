"""Attention of float8_e4m3fn against float64 attention of the numbers that codes and scales represent, on the CPU and
on a GPU. O starts as NaN. Needs torch.
"""

import math
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import normal, on
from reference import as_products_read, rotated, standard

from fa3 import flash_attn_fp8_func, flash_attn_func, quantize

pytestmark = pytest.mark.usefixtures("nan_in_new_tensors")

BF16, F16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
MASKS = [dict(), dict(causal=True), dict(window_size=(37, 11)), dict(window_size=(-1, 3))]
NAMES = "q_descale", "k_descale", "v_descale"
HEAD_DIMS = on("cpu", [64]) + on("cuda", [64, 128, 256])


def rand(*shape, device, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.fixture
def codes(device):
    """Makes Q, K and V as codes, and their per-head scales."""

    def make(batch, seqlens, heads, head_dim, scale=1.0, head_dim_v=None):
        q = (scale * normal(batch, seqlens[0], heads[0], head_dim, device=device)).to(FP8)
        dims = head_dim, head_dim_v or head_dim
        k, v = ((scale * normal(batch, seqlens[1], heads[1], d, seed=d, device=device)).to(FP8) for d in dims)
        return (q, k, v), [0.5 + rand(batch, heads[1], seed=seed, device=device) for seed in range(3)]

    return make


def of(device, on_cpu, on_gpu):
    return on_cpu if device == "cpu" else on_gpu


def stand_for(tensors, descales):
    """The numbers that codes and per-head scales represent."""
    for x, descale in zip(tensors, descales):
        yield x.double() if descale is None else x.double() * descale.double().repeat_interleave(x.shape[2] // descale.shape[1], 1)[:, None, :, None]


def judge(o, lse, numbers, error, of_blocks=False, **options):
    expected, expected_lse = standard(*numbers, **options)
    # The rounding of P to e4m3 changes a number by up to 2^-4. This averages out, except in a row that sees one key.
    assert (o - expected).norm() <= error * expected.norm()
    seen = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen) and (lse[~seen] == -math.inf).all() and (o.transpose(1, 2)[~seen] == 0).all()
    # LSE also comes from the rounded P.
    atol, rtol = (0.1, 2e-3) if of_blocks else (0.09, 1e-3)
    torch.testing.assert_close(lse[seen].double(), expected_lse[seen], atol=atol, rtol=rtol)
    assert of_blocks or not seen.any() or (lse - expected_lse)[seen].square().mean() < 0.02**2
    return expected


def check(tensors, descales, **options):
    named = {name: x for name, x in zip(NAMES, descales) if x is not None}
    o, lse = flash_attn_func(*tensors, return_attn_probs=True, **named, **options)
    assert o.dtype == BF16 and torch.equal(o, flash_attn_func(*tensors, **named, **options))
    expected = judge(o, lse, stand_for(tensors, descales), 0.04, **options)
    if o.numel():
        assert (o - expected).abs().max() <= 0.1 * expected.abs().max()


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    "device, head_dims",
    on("cpu", [(1, 3), (30, 41), (64, 64)]) + on("cuda", [(d, d) for d in (16, 64, 80, 128, 192, 256)]),
    ids=str,
)
def test_head_dims_and_masks(codes, device, head_dims, mask):
    head_dim, head_dim_v = head_dims
    check(*codes(2, of(device, (33, 81), (333, 401)), (6, 2), head_dim, head_dim_v=head_dim_v), **mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    "device, seqlens, heads",
    on("cpu", [(1, 1), (1, 199), (129, 1)], [(1, 1), (12, 1)])
    + on("cuda", [(1, 1), (1, 999), (513, 1), (129, 128), (700, 257), (1024, 1024)], [(1, 1), (5, 5), (12, 1)]),
    ids=str,
)
def test_lengths_and_heads(codes, device, seqlens, heads, mask):
    check(*codes(3, seqlens, heads, 64), **mask)


@pytest.mark.parametrize("device, head_dim", HEAD_DIMS)
def test_soft_cap(codes, device, head_dim):
    check(*codes(2, of(device, (100, 130), (300, 500)), (4, 2), head_dim, scale=3.0), softcap=5.0, causal=True)


@pytest.mark.parametrize("given", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0, 0, 0)], ids=str)
def test_scales_are_optional(codes, device, given):
    tensors, scales = codes(2, of(device, (100, 130), (200, 300)), (4, 2), 128)
    check(tensors, [scale if is_given else None for scale, is_given in zip(scales, given)], **of(device, dict(softmax_scale=0.05), {}))


def test_scales_of_any_strides(codes):
    tensors, [q, k, v] = codes(2, (200, 300), (4, 2), 64)
    check(tensors, [q[:1, :1].expand(2, 2), k.t().contiguous().t(), torch.stack([v, v], -1)[..., 1]])
    scales, mean, _ = channels(tensors[2])
    expected = flash_attn_func(*tensors, v_descale=scales, v_mean=mean)
    # The means begin 4 bytes behind a multiple of 16 bytes.
    shifted = torch.cat([mean.flatten()[:1], mean.flatten()])[1:].view_as(mean)
    strided = scales.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(flash_attn_func(*tensors, v_descale=strided, v_mean=shifted), expected)


def test_scales_that_make_no_sense_are_named():
    """The CPU reads the scales, and refuses invalid ones."""
    x = normal(1, 20, 2, 32).to(FP8)
    for scale, sentence in ((-1.0, "scale 1 is -1"), (math.nan, "NaN"), (math.inf, "inf")):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            flash_attn_func(x, x, x, k_descale=torch.tensor([[1.0, scale]]))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("device, head_dim", on("cpu", [32, 64]) + on("cuda", [32, 64, 80, 128, 256]))
def test_transposed_values(codes, device, head_dim, mask):
    """A transposed V gives the bits that V in rows gives."""
    lengths = ((1, 1), (64, 0), (133, 141), (333, 401), (700, 1025), (4223, 4221), (8192, 8192))
    for seqlens, heads in zip(lengths[: of(device, 3, 7)], ((3, 3), (1, 1), (6, 2), (6, 2), (4, 1), (12, 4), (8, 8))):
        (q, k, v), scales = codes(2, seqlens, heads, head_dim)
        options = dict(softcap=7.0 if head_dim == 64 else 0.0, return_attn_probs=True, **dict(zip(NAMES, scales)), **mask)
        expected = flash_attn_func(q, k, v, **options)
        given = flash_attn_func(q, k, as_products_read(v), v_transposed=True, **options)
        for x, y in zip(given, expected):
            assert torch.equal(x, y)


def block_scales(x, rows):
    """Per-block scales of codes, and the numbers that codes and scales represent."""
    batch, seqlen, heads, _ = x.shape
    generator = torch.Generator().manual_seed(rows)
    scales = 2.0 ** torch.randint(-3, 4, (batch, heads, -(-seqlen // rows)), generator=generator).float()
    scales = (scales * (0.5 + torch.rand(scales.shape, generator=generator))).to(x.device)
    return scales, x.double() * scales.double().repeat_interleave(rows, 2)[:, :, :seqlen].transpose(1, 2)[..., None]


def channels(v):
    """The scales and means of V's channels, and the numbers that V's codes represent with them."""
    batch, _, heads, head_dim = v.shape
    scales, mean = 0.5 + rand(batch, heads, head_dim, device=v.device), 8 * rand(batch, heads, head_dim, seed=1, device=v.device) - 4
    return scales, mean, v.double() * scales.double().unsqueeze(1) + mean.double().unsqueeze(1)


SCALED = [
    ((133, 201), (6, 2), {}),
    ((1, 1), (1, 1), {}),
    ((64, 0), (2, 1), {}),
    ((130, 130), (2, 1), dict(causal=True)),
    ((333, 401), (6, 2), {}),
    ((300, 300), (2, 1), dict(softcap=5.0)),
    ((200, 1500), (4, 2), dict(causal=True)),
    ((700, 300), (4, 2), dict(causal=True)),
    ((700, 900), (3, 3), dict(window_size=(137, 30))),
    ((4223, 4221), (2, 1), dict(causal=True)),
    ((1000, 8192), (2, 2), {}),
]


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("rows", [None, 64, 128], ids=["heads", "blocks of 64", "blocks of 128"])
@pytest.mark.parametrize("device, head_dim", HEAD_DIMS)
def test_scales_of_blocks_and_channels(codes, device, head_dim, rows, transposed):
    """V = mean + scale * code per channel, with and without scales per block of Q and K."""
    for seqlens, heads, options in SCALED[: of(device, 4, 11)]:
        (q, k, v), _ = codes(2, seqlens, heads, head_dim, scale=0.5)
        named, numbers = dict(v_transposed=transposed), [q.double(), k.double()]
        if rows:
            (named["q_descale"], numbers[0]), (named["k_descale"], numbers[1]) = block_scales(q, rows), block_scales(k, 128)
        of_v = as_products_read(v) if transposed else v
        ways = [channels(v)]
        if rows:
            scales, values = block_scales(v, 128)
            ways.append((scales, None, values))
        for scales, mean, values in ways:
            given = named | dict(v_descale=scales, v_mean=mean)
            o, lse = flash_attn_func(q, k, of_v, return_attn_probs=True, **given, **options)
            if mean is None:
                judge(o, lse, (*numbers, values), 0.06, of_blocks=True, **options)
            else:
                # The rounding of P to e4m3 affects only the part of V that differs from the mean.
                expected, expected_lse = standard(*numbers, values, **options)
                differing, _ = standard(*numbers, values - mean.double().unsqueeze(1), **options)
                assert (o - expected).norm() <= 0.04 * differing.norm() + 2**-9 * expected.norm()
                seen = expected_lse.isfinite()
                assert (o.transpose(1, 2)[~seen] == 0).all() and (lse[~seen] == -math.inf).all()
            half = flash_attn_func(q, k, of_v, out_dtype=F16, **given, **options)
            assert half.dtype == F16 and (half.float() - o.float()).norm() <= 0.01 * o.float().norm()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("device, head_dim", HEAD_DIMS)
def test_the_chain(device, head_dim, dtype):
    """`flash_attn_fp8_func` with outliers and rotary embedding, compared with attention in 16 bits."""
    size = of(device, 200, 1000)
    q, k, v = (normal(2, size, heads, head_dim, dtype=dtype, seed=seed, device=device) for seed, heads in enumerate((4, 2, 2)))
    angles = torch.outer(torch.arange(float(size)), 10_000.0 ** -torch.linspace(0, 1, head_dim // 2)).to(device)
    tables = angles.cos(), angles.sin()
    q[..., 5], k[..., 5] = 10 * q[..., 5], 4 * k[..., 5]
    for rotation, numbers in (({}, (q, k)), (dict(zip(("cos", "sin"), tables)), [rotated(x, *tables) for x in (q, k)])):
        expected, _ = standard(*numbers, v, causal=True)
        o, lse = flash_attn_fp8_func(q, k, v, causal=True, return_attn_probs=True, **rotation)
        assert o.dtype == dtype and lse.shape == (2, 4, size)
        error = (o - expected).norm() / expected.norm()
        plain = flash_attn_fp8_func(q, k, v, causal=True, hadamard_seed=None, **rotation)
        assert error < 0.09 and error < (plain - expected).norm() / expected.norm()
        if device == "cuda":
            assert torch.equal(o, torch.compile(flash_attn_fp8_func, fullgraph=True)(q, k, v, causal=True, **rotation))


@pytest.mark.parametrize("device, head_dim", HEAD_DIMS)
def test_the_chain_by_channels(device, head_dim):
    """With v_channels, the mean of V's rows is not rounded."""
    size = of(device, 200, 1000)
    q, k, v = (normal(2, size, heads, head_dim, dtype=F16, seed=seed, device=device) for seed, heads in enumerate((4, 2, 2)))
    v += 4
    expected, _ = standard(q, k, v, causal=True)
    o, of_blocks = (flash_attn_fp8_func(q, k, v, causal=True, v_channels=of_channels) for of_channels in (True, False))
    # In an emulation in torch the ratio of these errors is 0.39.
    assert (o - expected).norm() < 0.5 * (of_blocks - expected).norm()


@pytest.mark.parametrize("scales_of", ["heads", "tensor"])
@pytest.mark.parametrize("device, head_dim", HEAD_DIMS)
def test_from_16_bits_by_heads(device, head_dim, scales_of):
    """16-bit tensors, quantized with scales per head or per tensor, as FlashAttention-3's own interface takes them."""
    q, k, v = (
        normal(2, seqlen, heads, head_dim, seed=seed, device=device) * torch.arange(1, 2 * heads + 1, device=device).view(2, 1, heads, 1) / heads
        for seed, (seqlen, heads) in enumerate(of(device, ((140, 6), (200, 2), (200, 2)), ((700, 6), (900, 2), (900, 2))))
    )
    groups = dict(heads_per_scale=3) if scales_of == "heads" else {}
    codes, scales = zip(
        quantize(q, hadamard_seed=7, scales_of=scales_of, **groups),
        quantize(k, hadamard_seed=7, scales_of=scales_of),
        quantize(v, scales_of=scales_of),
    )
    scales = [x.expand(2, 2) for x in scales]
    check(codes, scales, causal=True)
    named = dict(zip(NAMES, scales), causal=True)
    o = flash_attn_func(*codes, **named)
    expected, _ = standard(q, k, v, causal=True)
    # An emulation in torch has an error of 0.08 to 0.09.
    assert (o - expected).norm() < 0.12 * expected.norm()
    transposed, _ = quantize(v, transposed=True, scales_of=scales_of)
    assert torch.equal(flash_attn_func(*codes[:2], transposed, v_transposed=True, **named), o)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_scales_of_zero(codes, device, mask):
    """If the scales of Q or K are 0, all scores are 0, and a row of O is the mean of the visible rows of V. If the
    scales of V are 0, O is 0, or the means of the channels.
    """
    tensors, ones = codes(2, of(device, (60, 90), (200, 300)), (4, 2), 64)
    zeros = torch.zeros_like(ones[0])
    for index in range(3):
        scales = [None if i != index else zeros for i in range(3)]
        o, lse = flash_attn_func(*tensors, return_attn_probs=True, **{NAMES[index]: zeros}, **mask)
        judge(o, lse, stand_for(tensors, scales), 0.02, **mask)
    mean = normal(2, 2, 64, dtype=torch.float32, device=tensors[0].device)
    o = flash_attn_func(*tensors, v_descale=torch.zeros_like(mean), v_mean=mean, **mask)
    assert torch.equal(o, mean.bfloat16().repeat_interleave(2, 1).unsqueeze(1).expand_as(o))


# Tests for a GPU only.


@pytest.mark.hopper
@pytest.mark.parametrize("device", ["cuda"])
def test_repeated_calls_give_the_same_bits(codes):
    (q, k, v), _ = codes(2, (1500, 2100), (8, 2), 128)
    transposed = as_products_read(v)
    named = dict(zip(NAMES, (block_scales(x, 128)[0] for x in (q, k, v))), causal=True)
    for options in (dict(v=v), dict(v=transposed, v_transposed=True)):
        first = flash_attn_func(q, k, **options, **named)
        assert all(torch.equal(first, flash_attn_func(q, k, **options, **named)) for _ in range(1000))


@pytest.mark.hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sums_have_no_bias(head_dim):
    """If V is about 1, O does not shrink with more keys, though sums of e4m3 products keep about 13 fraction bits."""
    for seqlen in (1024, 4096, 16384, 65536):
        generator = torch.Generator("cuda").manual_seed(seqlen)
        q, k, v = (torch.randn(1, seqlen, 2, head_dim, device="cuda", generator=generator) for _ in "qkv")
        q, k, v = q[:, :256].to(FP8), k.to(FP8), (1 + 0.5 * v).to(FP8)
        o = flash_attn_func(q, k, v)
        expected, _ = standard(q, k, v)
        bias = (o.double().mean() / expected.mean() - 1).item()
        print(f"head_dim {head_dim}, {seqlen} keys: {100 * bias:.3f} %")
        assert abs(bias) < 1e-3


@pytest.mark.hopper
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("seqlens", [(700, 700), (9000, 4100)], ids=["transposed in the kernel", "transposed before"])
def test_same_bits_in_graphs_and_compiled(codes, seqlens):
    tensors, scales = codes(2, seqlens, (4, 2), 128)
    options = dict(zip(NAMES, scales), causal=True)
    x = [normal(*y.shape, dtype=F16, seed=seed, device="cuda") for seed, y in enumerate(tensors)]
    for call, given in (
        (lambda *tensors: flash_attn_func(*tensors, **options), tensors),
        (lambda *tensors: flash_attn_fp8_func(*tensors, causal=True, v_channels=True), x),
    ):
        expected = call(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(*given)
        for _ in range(100):
            captured.fill_(math.nan)
            graph.replay()
            assert torch.equal(captured, expected)
        assert torch.equal(torch.compile(call, fullgraph=True)(*given), expected)
