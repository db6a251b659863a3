"""Attention of float8_e4m3fn on a GPU, against the definition in float64. O starts as NaN."""

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from reference import as_products_read

from fa3 import flash_attn_fp8_func, flash_attn_func, quantize, quantize_channels

pytestmark = [pytest.mark.hopper, pytest.mark.usefixtures("nan_in_new_tensors")]

FP8 = torch.float8_e4m3fn
MASKS = [dict(), dict(causal=True), dict(window_size=(37, 11)), dict(window_size=(-1, 3))]


@pytest.fixture
def codes(randn):
    """Q, K and V as codes, and their scales."""

    def make(batch, seqlens, heads, head_dim, scale=1.0):
        q = (scale * randn(batch, seqlens[0], heads[0], head_dim)).to(FP8)
        k, v = ((scale * randn(batch, seqlens[1], heads[1], head_dim)).to(FP8) for _ in "kv")
        scales = [0.5 + torch.rand(batch, heads[1], device="cuda") for _ in "qkv"]
        return (q, k, v), scales

    return make


def reference(q, k, v, descales, window=(-1, -1), softcap=0.0):
    """O and LSE in float64. Rows without keys are 0 and -inf."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (
        x.double() if descale is None else x.double() * descale.double()[:, None, :, None].repeat_interleave(times, 2)
        for x, descale, times in zip((q, k, v), descales, (group, 1, 1))
    )
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = scores.shape[2:]
    distance = torch.arange(keys, device=q.device) - torch.arange(rows, device=q.device)[:, None] - (keys - rows)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if window[0] >= 0:
        hidden |= distance < -window[0]
    if window[1] >= 0:
        hidden |= distance > window[1]
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(), v), scores.logsumexp(-1)


def check(tensors, descales, causal=False, window_size=(-1, -1), softcap=0.0):
    named = dict(zip(("q_descale", "k_descale", "v_descale"), descales))
    options = dict(causal=causal, window_size=window_size, softcap=softcap, **named)
    o, lse = flash_attn_func(*tensors, return_attn_probs=True, **options)
    assert o.dtype == torch.bfloat16 and torch.equal(o, flash_attn_func(*tensors, **options))
    window = (window_size[0], 0) if causal else window_size
    expected, expected_lse = reference(*tensors, descales, window, softcap)
    # P has a half step of 2^-4 in each number. It averages out over keys, and not where a row sees one.
    assert (o - expected).norm() < 0.04 * expected.norm()
    assert (o - expected).abs().max() < 0.1 * expected.abs().max()
    finite = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    # LSE is of the rounded P, too.
    torch.testing.assert_close(lse[finite].double(), expected_lse[finite], atol=0.09, rtol=1e-3)
    assert ((lse - expected_lse)[finite].square().mean() if finite.any() else 0) < 0.02**2


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
def test_head_dims_and_masks(codes, head_dim, mask):
    check(*codes(2, (333, 401), (6, 2), head_dim), **mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (12, 1)], ids=["one", "mha", "mqa"])
@pytest.mark.parametrize("seqlens", [(1, 1), (1, 999), (513, 1), (129, 128), (700, 257), (1024, 1024)], ids=str)
def test_lengths_and_heads(codes, seqlens, heads, mask):
    check(*codes(3, seqlens, heads, 64), **mask)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_soft_cap(codes, head_dim):
    check(*codes(2, (300, 500), (4, 2), head_dim, scale=3.0), softcap=5.0, causal=True)


@pytest.mark.parametrize("given", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0, 0, 0)], ids=str)
def test_scales_are_optional(codes, given):
    tensors, scales = codes(2, (200, 300), (4, 2), 128)
    check(tensors, [scale if is_given else None for scale, is_given in zip(scales, given)])


def test_scales_of_any_strides(codes):
    tensors, [q, k, v] = codes(2, (200, 300), (4, 2), 64)
    check(tensors, [q[:1, :1].expand(2, 2), k.t().contiguous().t(), torch.stack([v, v], -1)[..., 1]])
    scales, mean, _ = channels(tensors[2])
    expected = flash_attn_func(*tensors, v_descale=scales, v_mean=mean)
    # From 4 bytes past a multiple of 16 on.
    shifted = torch.cat([mean.flatten()[:1], mean.flatten()])[1:].view_as(mean)
    strided = scales.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(flash_attn_func(*tensors, v_descale=strided, v_mean=shifted), expected)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
def test_transposed_values(codes, head_dim, mask):
    """The bits of V in rows."""
    lengths = ((333, 401), (1, 1), (700, 1025), (64, 0), (4223, 4221), (8192, 8192))
    for seqlens, heads in zip(lengths, ((6, 2), (3, 3), (4, 1), (1, 1), (12, 4), (8, 8))):
        (q, k, v), scales = codes(2, seqlens, heads, head_dim)
        named = dict(zip(("q_descale", "k_descale", "v_descale"), scales))
        options = dict(softcap=7.0 if head_dim == 64 else 0.0, return_attn_probs=True, **named, **mask)
        expected = flash_attn_func(q, k, v, **options)
        given = flash_attn_func(q, k, as_products_read(v), v_transposed=True, **options)
        for x, y in zip(given, expected):
            assert torch.equal(x, y)


def block_scales(x, rows):
    """Scales of blocks, and what each row is multiplied by."""
    batch, seqlen, heads, _ = x.shape
    scales = 2.0 ** torch.randint(-3, 4, (batch, heads, -(-seqlen // rows)), device="cuda").float()
    scales *= 0.5 + torch.rand_like(scales)
    return scales, scales.repeat_interleave(rows, 2)[:, :, :seqlen].transpose(1, 2)[..., None]


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scales_of_blocks(codes, head_dim, rows, transposed):
    cases = (((333, 401), (6, 2), {}), ((1, 1), (1, 1), {}), ((200, 1500), (4, 2), dict(causal=True)))
    cases += (((700, 900), (3, 3), dict(window_size=(137, 30))), ((300, 300), (2, 1), dict(softcap=5.0)))
    cases += (((4223, 4221), (2, 1), dict(causal=True)), ((1000, 8192), (2, 2), {}))
    for seqlens, heads, options in cases:
        tensors, _ = codes(2, seqlens, heads, head_dim, scale=0.5)
        scales, factors = zip(*(block_scales(x, count) for x, count in zip(tensors, (rows, 128, 128))))
        window = options.get("window_size", (-1, 0) if options.get("causal") else (-1, -1))
        numbers = (x.double() * factor.double() for x, factor in zip(tensors, factors))
        expected, expected_lse = reference(*numbers, (None,) * 3, window, options.get("softcap", 0.0))
        q, k, v = tensors
        v = as_products_read(v) if transposed else v
        named = dict(zip(("q_descale", "k_descale", "v_descale"), scales), v_transposed=transposed)
        o, lse = flash_attn_func(q, k, v, return_attn_probs=True, **named, **options)
        assert (o - expected).norm() < 0.06 * expected.norm()
        finite = expected_lse.isfinite()
        torch.testing.assert_close(lse[finite].double(), expected_lse[finite], atol=0.1, rtol=2e-3)
        half = flash_attn_func(q, k, v, out_dtype=torch.float16, **named, **options)
        assert half.dtype == torch.float16 and (half.float() - o.float()).norm() < 0.01 * o.float().norm()


def channels(v):
    """Scales and means of V's channels, and V."""
    batch, _, heads, head_dim = v.shape
    scales, mean = (torch.rand(batch, heads, head_dim, device="cuda") for _ in "sm")
    scales, mean = 0.5 + scales, 8 * mean - 4
    return scales, mean, v.double() * scales.double().unsqueeze(1) + mean.double().unsqueeze(1)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("rows", [None, 64, 128], ids=["heads", "blocks of 64", "blocks of 128"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_channels_of_v(codes, head_dim, rows, transposed):
    """V = mean + scale * code, whatever rows of Q and K share a scale."""
    cases = (((333, 401), (6, 2), {}), ((1, 1), (1, 1), {}), ((700, 300), (4, 2), dict(causal=True)))
    cases += (((700, 900), (3, 3), dict(window_size=(137, 30))), ((300, 300), (2, 1), dict(softcap=5.0)))
    cases += (((4223, 4221), (2, 1), dict(causal=True)), ((1000, 8192), (2, 2), {}), ((64, 0), (2, 1), {}))
    for seqlens, heads, options in cases:
        (q, k, v), _ = codes(2, seqlens, heads, head_dim, scale=0.5)
        named, numbers = {}, [q.double(), k.double()]
        if rows:
            (q_scales, q_factors), (k_scales, k_factors) = block_scales(q, rows), block_scales(k, 128)
            named, numbers = dict(q_descale=q_scales, k_descale=k_scales), [q.double() * q_factors, k.double() * k_factors]
        scales, mean, values = channels(v)
        window = options.get("window_size", (-1, 0) if options.get("causal") else (-1, -1))
        judged = dict(window=window, softcap=options.get("softcap", 0.0))
        expected, expected_lse = reference(*numbers, values, (None,) * 3, **judged)
        # P, which is rounded to e4m3, has a part in what is not the mean alone.
        differing, _ = reference(*numbers, values - mean.double().unsqueeze(1), (None,) * 3, **judged)
        named |= dict(v_descale=scales, v_mean=mean, v_transposed=transposed)
        v = as_products_read(v) if transposed else v
        o, lse = flash_attn_func(q, k, v, return_attn_probs=True, **named, **options)
        assert (o - expected).norm() <= 0.04 * differing.norm() + 2**-9 * expected.norm()
        seen = expected_lse.isfinite()
        assert (o.transpose(1, 2)[~seen] == 0).all() and (lse[~seen] == -torch.inf).all()
        half = flash_attn_func(q, k, v, out_dtype=torch.float16, **named, **options)
        assert half.dtype == torch.float16 and (half.float() - o.float()).norm() <= 0.01 * o.float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_chain(randn, head_dim, dtype):
    """From 16 bits to 16 bits, with outliers and rotary embedding, beside attention in 16 bits."""
    q, k, v = (randn(2, 1000, heads, head_dim, dtype=dtype) for heads in (4, 2, 2))
    angles = torch.outer(torch.arange(1000.0), 10_000.0 ** -torch.linspace(0, 1, head_dim // 2)).cuda()
    cos, sin = angles.cos(), angles.sin()
    q[..., 5], k[..., 5] = 10 * q[..., 5], 4 * k[..., 5]

    def rotated(x):
        first, second = x.double().chunk(2, -1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        return torch.cat([first * c - second * s, second * c + first * s], -1)

    for rotation, rotate in (({}, lambda x: x.double()), (dict(cos=cos, sin=sin), rotated)):
        expected, _ = reference(rotate(q), rotate(k), v.double(), (None,) * 3, (-1, 0))
        o, lse = flash_attn_fp8_func(q, k, v, causal=True, return_attn_probs=True, **rotation)
        assert o.dtype == dtype and lse.shape == (2, 4, 1000)
        error = (o - expected).norm() / expected.norm()
        plain = flash_attn_fp8_func(q, k, v, causal=True, hadamard_seed=None, **rotation)
        assert error < 0.09 and error < (plain - expected).norm() / expected.norm()
        assert torch.equal(o, torch.compile(flash_attn_fp8_func, fullgraph=True)(q, k, v, causal=True, **rotation))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_chain_by_channels(randn, head_dim):
    """The mean of V's rows is not rounded. Graphs and compiled calls give the same bits."""
    q, k, v = (randn(2, 1000, heads, head_dim, dtype=torch.float16) for heads in (4, 2, 2))
    v += 4

    def attend(q, k, v):
        return flash_attn_fp8_func(q, k, v, causal=True, v_channels=True)

    expected, _ = reference(q, k, v, (None,) * 3, (-1, 0))
    o, of_blocks = attend(q, k, v), flash_attn_fp8_func(q, k, v, causal=True)
    # Attention emulated in torch has 0.39 times the error.
    assert (o - expected).norm() < 0.5 * (of_blocks - expected).norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(q, k, v)
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, o)
    assert torch.equal(torch.compile(attend, fullgraph=True)(q, k, v), o)


@pytest.mark.parametrize("scales_of", ["heads", "tensor"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_from_16_bits_by_heads(randn, head_dim, scales_of):
    """Scales of heads and of tensors, as FlashAttention-3's own interface takes them."""
    tensors = [
        randn(2, seqlen, heads, head_dim) * torch.arange(1, 2 * heads + 1, device="cuda").view(2, 1, heads, 1) / heads
        for seqlen, heads in ((700, 6), (900, 2), (900, 2))
    ]
    q, k, v = (x.bfloat16() for x in tensors)
    groups = dict(heads_per_scale=3) if scales_of == "heads" else {}
    codes, scales = zip(
        quantize(q, hadamard_seed=7, scales_of=scales_of, **groups),
        quantize(k, hadamard_seed=7, scales_of=scales_of),
        quantize(v, scales_of=scales_of),
    )
    scales = [x.expand(2, 2) for x in scales]
    check(codes, scales, causal=True)
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales), causal=True)
    o = flash_attn_func(*codes, **named)
    expected, _ = reference(q, k, v, (None,) * 3, (-1, 0))
    # Attention emulated in torch has 0.08 to 0.09.
    assert (o - expected).norm() < 0.12 * expected.norm()
    transposed, _ = quantize(v, transposed=True, scales_of=scales_of)
    assert torch.equal(flash_attn_func(*codes[:2], transposed, v_transposed=True, **named), o)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_scales_of_zero(codes, mask):
    """Zeros of Q or K make all scores 0: a row of O is the mean of the visible rows of V. Zeros of V make O 0, or the
    means.
    """
    tensors, _ = codes(2, (200, 300), (4, 2), 64)
    window = (-1, 0) if mask.get("causal") else mask.get("window_size", (-1, -1))
    for index, name in enumerate(("q_descale", "k_descale", "v_descale")):
        scales = [None if i != index else torch.zeros(2, 2, device="cuda") for i in range(3)]
        expected, expected_lse = reference(*tensors, scales, window)
        o, lse = flash_attn_func(*tensors, return_attn_probs=True, **{name: scales[index]}, **mask)
        assert (o - expected).norm() <= 0.02 * expected.norm()
        torch.testing.assert_close(lse.double(), expected_lse, atol=0.09, rtol=1e-3)
    mean = torch.randn(2, 2, 64, device="cuda")
    o = flash_attn_func(*tensors, v_descale=torch.zeros_like(mean), v_mean=mean, **mask)
    assert torch.equal(o, mean.bfloat16().repeat_interleave(2, 1).unsqueeze(1).expand_as(o))


def test_repeated_calls_give_the_same_bits(codes):
    (q, k, v), _ = codes(2, (1500, 2100), (8, 2), 128)
    transposed = as_products_read(v)
    scales = [block_scales(x, 128)[0] for x in (q, k, v)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales), causal=True)
    for options in (dict(v=v), dict(v=transposed, v_transposed=True)):
        first = flash_attn_func(q, k, **options, **named)
        assert all(torch.equal(first, flash_attn_func(q, k, **options, **named)) for _ in range(1000))


def test_bad_inputs_of_fp8(codes):
    (q, k, v), _ = codes(1, (200, 300), (2, 2), 64)
    blocks = [quantize(x.bfloat16())[1] for x in (q, k, v)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), blocks))
    flash_attn_func(q, k, v, **named)
    for change, sentence in (
        (dict(q_descale=None), "some descales are of blocks"),
        (dict(q_descale=blocks[0][..., :1]), r"q_descale is torch.float32 \(1, 2, 1\) on cuda:0, expected"),
        (dict(k_descale=blocks[1][:, :1]), "k_descale is torch.float32"),
        (dict(v_descale=quantize(v.bfloat16(), block_rows=64)[1]), r"v_descale .* expected torch.float32 \(1, 2, 3\)"),
        (dict(v_transposed=True), "transposed v is"),
        (dict(out_dtype=torch.float32), "out_dtype is torch.float32"),
    ):
        with pytest.raises(ValueError, match=sentence):
            flash_attn_func(q, k, v, **{**named, **change})
    _, scales, mean = quantize_channels(v.bfloat16())
    named |= dict(v_descale=scales, v_mean=mean)
    flash_attn_func(q, k, v, **named)
    for change, sentence in (
        (dict(v_descale=None), "there is v_mean without v_descale, expected both"),
        (dict(v_descale=blocks[2]), r"v_descale is torch.float32 \(1, 2, 3\) on cuda:0, expected torch.float32 \(1, 2, 64\)"),
        (dict(v_mean=mean[..., :32]), r"v_mean is torch.float32 \(1, 2, 32\) .* \(batch, heads_kv, head_dim_v\)"),
        (dict(v_mean=mean.half()), "v_mean is torch.float16"),
        (dict(v_mean=mean.cpu()), "on cpu, expected"),
        (dict(v_mean=None), r"v_descale is .* expected torch.float32 \(1, 2, 3\)"),
        (dict(k_descale=None), "some descales are of blocks, .* expected both of q and k or none"),
    ):
        with pytest.raises(ValueError, match=sentence):
            flash_attn_func(q, k, v, **{**named, **change})
    x = q.half()
    with pytest.raises(ValueError, match="v_mean is for torch.float8_e4m3fn, q is torch.float16"):
        flash_attn_func(x, x, x, v_mean=mean)
    with pytest.raises(ValueError, match="transposed v is"):
        flash_attn_func(x, x, x, v_transposed=True)
    with pytest.raises(ValueError, match="transposed v is torch.float8_e4m3fn"):
        flash_attn_func(x, x, as_products_read(q).half(), v_transposed=True)
    with pytest.raises(ValueError, match="o cannot be torch.bfloat16 when q is torch.float16"):
        flash_attn_func(x, x, x, out_dtype=torch.bfloat16)
    rows = as_products_read(v)
    with pytest.raises(ValueError, match="expected a contiguous"):
        flash_attn_func(q, k, torch.cat([rows, rows], -1)[..., : rows.shape[3]], v_transposed=True)


def test_bad_inputs_of_the_chain(randn):
    """Codes of V are in whole 128 keys: that there are as many as of K is seen before."""
    q, k, v = randn(1, 50, 2, 64), randn(1, 120, 2, 64), randn(1, 100, 2, 64)
    with pytest.raises(ValueError, match="^v has seqlen 100, expected 120$"):
        flash_attn_fp8_func(q, k, v)
    with pytest.raises(ValueError, match="^v is torch.float16, expected torch.bfloat16 like q$"):
        flash_attn_fp8_func(q, k, k.half())
    with pytest.raises(TypeError, match="^k is NoneType"):
        flash_attn_fp8_func(q, None, v)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sums_have_no_bias(head_dim):
    """O of V around 1 does not shrink as keys are added, though sums of e4m3 products keep about 13 fraction bits."""
    for seqlen in (1024, 4096, 16384, 65536):
        generator = torch.Generator("cuda").manual_seed(seqlen)
        shape = (1, seqlen, 2, head_dim)
        q, k, v = (torch.randn(shape, device="cuda", generator=generator) for _ in "qkv")
        q, k, v = q[:, :256].to(FP8), k.to(FP8), (1 + 0.5 * v).to(FP8)
        o = flash_attn_func(q, k, v)
        expected, _ = reference(q, k, v, (None,) * 3)
        bias = (o.double().mean() / expected.mean() - 1).item()
        print(f"head_dim {head_dim}, {seqlen} keys: {100 * bias:.3f} %")
        assert abs(bias) < 1e-3


@pytest.mark.parametrize("seqlens", [(700, 700), (9000, 4100)], ids=["transposed in the kernel", "transposed before"])
def test_same_bits_in_graphs_and_compiled(codes, seqlens):
    tensors, scales = codes(2, seqlens, (4, 2), 128)
    options = dict(zip(("q_descale", "k_descale", "v_descale"), scales), causal=True)
    expected = flash_attn_func(*tensors, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attn_func(*tensors, **options)
    for _ in range(100):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, expected)
    compiled = torch.compile(lambda *tensors: flash_attn_func(*tensors, **options), fullgraph=True)
    assert torch.equal(compiled(*tensors), expected)


def test_bad_scales(codes):
    (q, k, v), scales = codes(2, (64, 64), (4, 2), 64)
    for scale, sentence in [
        (scales[0].half(), "q_descale is torch.float16"),
        (scales[0][:, :1], r"q_descale is torch.float32 \(2, 1\) on cuda:0, expected torch.float32 \(2, 2\)"),
        (scales[0].cpu(), "on cpu, expected"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            flash_attn_func(q, k, v, q_descale=scale)
