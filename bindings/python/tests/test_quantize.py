"""`fa3.quantize` and `fa3.quantize_channels` against their definitions. Needs torch."""

import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from reference import as_products_read, incoherent, quantized, quantized_channels, rotated
from torch._subclasses.fake_tensor import FakeTensorMode

from fa3 import quantize, quantize_channels

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn

hopper = pytest.mark.hopper


def normal(*shape, dtype=BF16, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(device, dtype)


def tables(positions, rotary_dim, dtype=F32, device="cpu"):
    """Cosines and sines of rotary embedding."""
    frequency = 10000.0 ** (-torch.arange(rotary_dim // 2, dtype=torch.float64) / (rotary_dim // 2))
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def bits(codes):
    return codes.view(torch.uint8).to(torch.int16)


def steps(codes):
    """Codes as integers in the order of their numbers."""
    magnitude = bits(codes) & 0x7F
    return torch.where(bits(codes) > 0x7F, -magnitude, magnitude)


def judge(result, expected):
    """Fails unless scales and means agree but for rounding, and codes but for a step, with the NaN of the definition
    where it has some.
    """
    for given, right, dtype in zip(result, expected, (E4M3, F32, F32)):
        assert (given.shape, given.dtype, given.is_contiguous(), given.device) == (right.shape, dtype, True, right.device)
    (codes, scales, *mean), (right, right_scales, *right_mean) = result, expected
    torch.testing.assert_close(scales, right_scales, rtol=1e-5, atol=0)
    torch.testing.assert_close(mean, right_mean, rtol=1e-5, atol=1e-5)
    nan = (bits(right) & 0x7F) == 0x7F
    assert torch.equal(bits(codes) == 0x7F, nan) and not (bits(codes) == 0xFF).any()
    assert ((steps(codes) - steps(right)).abs()[~nan] <= 1).all()
    return result


def check(x, *arguments, **options):
    """Computes, judges, and returns what was computed."""
    return judge(quantize(x, *arguments, **options), quantized(x, *arguments, **options))


def check_channels(x, **options):
    """The same by channels."""
    return judge(quantize_channels(x, **options), quantized_channels(x, **options))


def assert_equal(results, expected):
    for result, right in zip(results, expected, strict=True):
        # Torch compares no float8.
        assert torch.equal(*(bits(y) if y.dtype == E4M3 else y for y in (result, right)))


# What can be seen without a GPU.


def test_the_definition():
    """The definition that the other tests compare with."""
    for head_dim in (64, 96):
        matrix = incoherent(head_dim, 9)
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim, dtype=torch.float64))
    x, (cos, sin) = normal(1, 3, 2, 32, dtype=F32), tables(5, 32)
    for interleaved in (False, True):
        y = rotated(x, cos, sin, interleaved, torch.tensor([[0, 4, 5]]))
        torch.testing.assert_close(y[:, 0], x[:, 0])
        torch.testing.assert_close(y[:, 1].norm(), x[:, 1].norm())
        assert y[:, 2].isnan().all()
    assert not torch.equal(rotated(x, cos, sin), rotated(x, cos, sin, True))
    # Numbers of e4m3 up to 256, one a key.
    keys = torch.arange(144.0).view(1, 144, 1, 1).to(E4M3)
    assert as_products_read(keys)[0, 0, 0, :6].tolist() == [0, 1, 8, 9, 2, 3]
    assert as_products_read(keys).shape == (1, 1, 1, 256) and not as_products_read(keys)[..., 144:].float().any()
    codes, scales = quantized(x, hadamard_seed=3)
    y = (x.double() @ incoherent(32, 3)).float()
    # Half a step of e4m3 is a sixteenth at most.
    torch.testing.assert_close(codes.float() * scales.transpose(1, 2)[..., None], y, rtol=1 / 16, atol=0.01)


def test_the_definition_of_heads_and_the_tensor():
    # Four heads. The last one has zeros, and two numbers that are not finite.
    x = torch.zeros(1, 3, 4, 16)
    x[0, 0, 0, 0], x[0, 1, 1, 0], x[0, 2, 2, 0], x[0, 2, 3, :2] = 448.0, -896.0, 224.0, torch.tensor([math.nan, math.inf])
    for options, scales in [
        (dict(scales_of="heads"), [[1.0, 2.0, 0.5, 1.0]]),
        (dict(scales_of="heads", heads_per_scale=2), [[2.0, 0.5]]),
        (dict(scales_of="heads", heads_per_scale=4), [[2.0]]),
        (dict(scales_of="tensor"), [2.0]),
    ]:
        codes, given = quantized(x, **options)
        assert given.tolist() == scales
        by_head = given.flatten().repeat_interleave(4 // given.numel())
        assert torch.equal((codes.float() * by_head[:, None])[..., :3, :], x[..., :3, :])
        assert codes.float()[0, 2, 3, :2].isnan().all()
    for batch, seqlen in [(2, 0), (0, 5)]:
        x = torch.empty(batch, seqlen, 4, 16)
        assert quantized(x, scales_of="heads", heads_per_scale=2)[1].tolist() == [[1.0, 1.0]] * batch
        assert quantized(x, scales_of="tensor")[1].tolist() == [1.0]


def test_the_definition_of_channels():
    # Columns 0 1 2, 3 3 3, and 1 and what is not finite.
    x = torch.tensor([[0.0, 3.0, 1.0], [1.0, 3.0, math.inf], [2.0, 3.0, math.nan]]).view(1, 3, 1, 3)
    codes, scales, mean = (y.float().flatten().tolist() for y in quantized_channels(x))
    third = torch.tensor(1 / 3).item()
    assert mean == [1.0, 3.0, third]
    torch.testing.assert_close(scales, [1 / 448, 1.0, (1 - third) / 448])
    assert codes[0::3] == [-448.0, 0.0, 448.0] and codes[1::3] == [0.0] * 3
    assert codes[2] == 448.0 and math.isnan(codes[5]) and math.isnan(codes[8])
    codes, scales, mean = quantized_channels(torch.empty(2, 0, 1, 16))
    assert codes.shape == (2, 0, 1, 16) and (scales == 1).all() and (mean == 0).all()


REFUSED = {
    "dtype": (TypeError, "x is torch.float32, expected torch.float16 or torch.bfloat16", dict(x=normal(1, 8, 2, 64, dtype=F32))),
    "rank": (ValueError, "x has 3 dimensions, expected 4: (batch, seqlen, heads, head_dim)", dict(x=normal(8, 2, 64))),
    "rows": (ValueError, "block_rows is 32, expected 64 or 128", dict(block_rows=32)),
    "scales": (
        ValueError,
        "scales_of is 'rows', expected 'blocks', 'heads' or 'tensor'",
        dict(scales_of="rows"),
    ),
    "scale and heads": (
        ValueError,
        "scale is 0.5 and scales_of 'heads', expected only one of them",
        dict(scale=0.5, scales_of="heads"),
    ),
    "rows of the tensor": (
        ValueError,
        "block_rows 64 is of scales of blocks, scales_of is 'tensor'",
        dict(block_rows=64, scales_of="tensor"),
    ),
    "heads of blocks": (
        ValueError,
        "heads_per_scale 2 is of scales of heads, scales_of is 'blocks'",
        dict(heads_per_scale=2),
    ),
    "heads of the tensor": (
        ValueError,
        "heads_per_scale 0 is of scales of heads, scales_of is 'tensor'",
        dict(scales_of="tensor", heads_per_scale=0),
    ),
    "heads": (
        ValueError,
        "a scale for each 2 heads, of which the tensor has 3",
        dict(x=normal(1, 8, 3, 64), scales_of="heads", heads_per_scale=2),
    ),
    "no heads": (
        ValueError,
        "a scale for each 0 heads, of which the tensor has 2",
        dict(scales_of="heads", heads_per_scale=0),
    ),
    "fewer heads": (
        ValueError,
        "a scale for each -1 heads, of which the tensor has 2",
        dict(scales_of="heads", heads_per_scale=-1),
    ),
    "one": (ValueError, "there is one of cos and sin, expected both or none", dict(cos=torch.ones(8, 32))),
    "no rotation": (
        ValueError,
        "interleaved and positions are of a rotation, which needs cos and sin",
        dict(positions=1),
    ),
    "table": (
        TypeError,
        "sin is torch.float64, expected torch.float32, torch.float16 or torch.bfloat16",
        dict(cos=torch.ones(8, 32), sin=torch.ones(8, 32, dtype=torch.float64)),
    ),
    "tables": (
        ValueError,
        "cos is (8, 32) and sin (9, 32), expected both (positions, rotary_dim / 2)",
        dict(cos=torch.ones(8, 32), sin=torch.ones(9, 32)),
    ),
    "position type": (
        TypeError,
        "positions are torch.float32, expected torch.int32 or torch.int64",
        dict(cos=torch.ones(8, 32), sin=torch.ones(8, 32), positions=torch.zeros(1, 8)),
    ),
    "positions": (
        ValueError,
        "positions are (8,), expected (batch, seqlen), here (1, 8)",
        dict(cos=torch.ones(8, 32), sin=torch.ones(8, 32), positions=torch.zeros(8, dtype=torch.int32)),
    ),
    "seed": (ValueError, "hadamard_seed -1 is outside 0 to 2^64 - 1", dict(hadamard_seed=-1)),
    "large seed": (ValueError, f"hadamard_seed {2**64} is outside 0 to 2^64 - 1", dict(hadamard_seed=2**64)),
    "no tensor": (TypeError, "x is list, expected torch.Tensor", dict(x=[1])),
    "no table": (TypeError, "sin is int, expected torch.Tensor", dict(cos=torch.ones(8, 32), sin=1)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_calls_are_refused(case):
    error, sentence, arguments = REFUSED[case]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        arguments = {"x": normal(1, 8, 2, 64), **arguments}
        fake = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        with pytest.raises(error) as refusal:
            quantize(**fake)
        # Of a tensor alone it is the same.
        if arguments.keys() == {"x"}:
            with pytest.raises(error) as same:
                quantize_channels(**fake)
            assert str(same.value) == sentence
    assert str(refusal.value) == sentence


def test_zeros_without_memory_are_zeros():
    x = normal(1, 8, 2, 64)
    assert_equal(quantize(torch._efficientzerotensor(x.shape, dtype=x.dtype)), quantize(torch.zeros_like(x)))


# What the kernel computes.


@hopper
@pytest.mark.parametrize("hadamard_seed", [None, 0, 2**64 - 1])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_head_dims_rotations_and_signs(randn, dtype, head_dim, hadamard_seed):
    x = randn(2, 333, 3, head_dim, dtype=dtype)
    check(x, hadamard_seed=hadamard_seed)
    for rotary_dim in {16, head_dim}:
        cos, sin = tables(400, rotary_dim, device="cuda")
        for interleaved in (False, True):
            options = dict(interleaved=interleaved, positions=67, hadamard_seed=hadamard_seed, block_rows=64)
            check(x, cos, sin, **options)


@hopper
@pytest.mark.parametrize("block_rows", [64, 128])
@pytest.mark.parametrize("seqlen", [0, 1, 63, 64, 65, 128, 129, 1000])
def test_lengths_and_blocks(randn, seqlen, block_rows):
    x = randn(3, seqlen, 5, 64)
    _, scales = check(x, block_rows=block_rows)
    assert scales.shape == (3, 5, math.ceil(seqlen / block_rows))
    check(randn(0, seqlen, 5, 64), block_rows=block_rows)


@hopper
def test_a_given_scale(randn):
    x = randn(2, 200, 4, 128)
    for scale in (0.001, 0.25, 1, 3.0):
        codes, scales = check(x, scale=scale)
        assert scales.tolist() == [torch.tensor(scale, dtype=F32).item()]
    assert (check(x, scale=0.001)[0].float().abs().max() == 448).item()


HEADS_AND_TENSOR = [dict(scales_of="heads", heads_per_scale=heads) for heads in (1, 2, 6)] + [dict(scales_of="tensor")]


@hopper
@pytest.mark.usefixtures("nan_in_new_tensors")
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("scaling", HEADS_AND_TENSOR, ids=str)
@pytest.mark.parametrize("seqlen", [0, 1, 128, 129, 1000])
def test_scales_of_heads_and_of_the_tensor(randn, seqlen, scaling, transposed):
    """Whatever the workspace holds."""
    options = dict(transposed=transposed, **scaling)
    for head_dim in (16, 64, 80, 128, 256):
        for dtype in (torch.float16, BF16):
            # Each head of each sequence has another scale.
            x = (randn(2, seqlen, 6, head_dim) * torch.arange(1, 13, device="cuda").view(2, 1, 6, 1)).to(dtype)
            check(x, **options)
        cos, sin = tables(1100, 16, device="cuda")
        for interleaved in (False, True):
            check(x, cos, sin, interleaved=interleaved, positions=67, hadamard_seed=3, **options)
        # The tables end in the middle.
        positions = torch.arange(1100 - seqlen // 2, 1100 - seqlen // 2 + seqlen, device="cuda").expand(2, -1)
        check(x, cos, sin, positions=positions, **options)
    check(randn(0, seqlen, 6, 64), **options)


@hopper
@pytest.mark.parametrize("scaling", HEADS_AND_TENSOR, ids=str)
def test_scales_of_numbers_that_are_not_finite(randn, scaling):
    x = randn(1, 300, 6, 64)
    for row, strange in enumerate((math.nan, math.inf, -math.inf)):
        x[0, 100 * row, 1, 3 : 5 + row] = strange
    x[:, :, 0] = math.nan
    for transposed in (False, True):
        check(x, transposed=transposed, **scaling)


@hopper
@pytest.mark.parametrize("block_rows", [64, 128])
@pytest.mark.parametrize("seqlen", [0, 1, 63, 64, 65, 128, 129, 1000])
def test_transposed_codes(randn, seqlen, block_rows):
    for head_dim in (16, 64, 80, 128, 256):
        x = randn(2, seqlen, 3, head_dim)
        codes, scales = quantize(x, block_rows=block_rows)
        assert_equal(quantize(x, block_rows=block_rows, transposed=True), (as_products_read(codes), scales))
        codes, scales = quantize(x, scale=0.01)
        assert_equal(quantize(x, scale=0.01, transposed=True), (as_products_read(codes), scales))
    cos, sin = tables(seqlen + 2, 64, device="cuda")
    x = randn(2, 3, seqlen, 128).transpose(1, 2)
    check(x, cos, sin, positions=1, hadamard_seed=3, block_rows=block_rows, transposed=True)


@hopper
@pytest.mark.usefixtures("nan_in_new_tensors")
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("seqlen", [0, 1, 63, 128, 129, 255, 256, 257, 1000, 5000])
def test_channels(randn, seqlen, transposed):
    """Whatever the workspace holds."""
    for head_dim in (16, 64, 80, 128, 256):
        for dtype in (torch.float16, BF16):
            x = (4 * randn(2, 1, 3, head_dim) + randn(2, seqlen, 3, head_dim)).to(dtype)
            check_channels(x, transposed=transposed)
    check_channels(randn(0, seqlen, 3, 64), transposed=transposed)


@hopper
def test_channels_of_numbers_that_are_not_finite(randn):
    x = 4 + randn(1, 300, 2, 64)
    for row, strange in enumerate((math.nan, math.inf, -math.inf)):
        x[0, 100 * row, 1, 3 : 5 + row] = strange
    x[:, :, 0, 7] = math.nan
    for transposed in (False, True):
        _, scales, mean = check_channels(x, transposed=transposed)
        assert (scales[0, 0, 7], mean[0, 0, 7]) == (1, 0)


@hopper
def test_zeros_have_scale_1():
    x = torch.zeros(1, 130, 2, 64, dtype=BF16, device="cuda")
    codes, scales = check(x)
    assert (scales == 1).all() and (codes.float() == 0).all()
    for scales_of in ("heads", "tensor"):
        codes, scales = check(x, scales_of=scales_of)
        assert (scales == 1).all() and (codes.float() == 0).all()
    codes, scales, mean = check_channels(x + 3)
    assert (scales == 1).all() and (codes.float() == 0).all() and (mean == 3).all()


@hopper
def test_strides_are_as_they_are(randn):
    check(randn(2, 4, 200, 128).transpose(1, 2), hadamard_seed=1)
    check(randn(1, 200, 1, 64).expand(3, -1, 4, -1), *tables(200, 64, device="cuda"))
    # Rows inside larger ones, whose other elements are NaN.
    wide = torch.full((2, 300, 4, 3, 136), math.nan, dtype=BF16, device="cuda")
    wide[:, :, :, 1, 8:] = randn(2, 300, 4, 128)
    check(wide[:, :, :, 1, 8:])
    check_channels(wide[:, :, :, 1, 8:])
    check_channels(randn(1, 200, 1, 64).expand(3, -1, 4, -1))
    qkv = randn(2, 300, 3, 4, 128)
    for x in qkv.unbind(2):
        check(x, hadamard_seed=5, block_rows=64)
        check(x, hadamard_seed=5, scales_of="heads", heads_per_scale=2)


@hopper
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_listed_positions(randn, dtype):
    x, (cos, sin) = randn(2, 150, 3, 96), tables(60, 64, device="cuda")
    positions = torch.randint(0, 60, (2, 150), dtype=dtype, generator=torch.Generator().manual_seed(0)).cuda()
    check(x, cos, sin, positions=positions)
    # Those that the tables have not.
    limits = torch.iinfo(dtype)
    positions[0, :4] = torch.tensor([-1, 60, limits.min, limits.max])
    positions[1, 128:] = 60
    codes, scales = check(x, cos, sin, positions=positions, hadamard_seed=4)
    assert (bits(codes)[0, :4] == 0x7F).all() and (bits(codes)[1, 128:] == 0x7F).all()
    assert (scales[1, :, 1] == 1).all()
    # Lists and tables that lie otherwise than the kernel reads them.
    check(x, cos, sin, positions=positions.T.contiguous().T)
    check(x[:1, 1:], cos, sin, positions=positions[:1, 1:])
    check(x, cos.T.contiguous().T, sin.T.contiguous().T, positions=positions)
    check(x, cos.half(), sin.bfloat16(), positions=positions)


@hopper
def test_the_kernel_refuses_what_it_cannot_do(randn):
    x, (cos, sin) = randn(1, 60, 2, 64), tables(60, 64, device="cuda")
    for sentence, call in [
        ("the last row is at position 60, the tables of cosines and sines have 60 rows", lambda: quantize(x, cos, sin, positions=1)),
        ("-1 is too large or too small a number", lambda: quantize(x, cos, sin, positions=-1)),
        ("the scale 0 is outside 2^-64 to 2^64", lambda: quantize(x, scale=0.0)),
        ("the scale inf is outside 2^-64 to 2^64", lambda: quantize(x, scale=1e300)),
        ("a scale for each 3 heads, of which the tensor has 2", lambda: quantize(x, scales_of="heads", heads_per_scale=3)),
    ]:
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == sentence
    with pytest.raises(ValueError, match="^cos is on cpu and x on cuda:0, expected one CUDA device or the CPU$"):
        quantize(x, cos.cpu(), sin.cpu())


@hopper
def test_graphs(randn):
    """The first call of its kind is the captured one."""
    x, (cos, sin) = randn(4, 1000, 8, 112), tables(1200, 112, device="cuda")
    positions = torch.arange(200, 1200, device="cuda").expand(4, -1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        listed = quantize(x, cos, sin, positions=positions, hadamard_seed=3)
        given = quantize(x, scale=0.5)
        of_heads = quantize(x, scales_of="heads", heads_per_scale=4)
        channels = quantize_channels(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        for codes, *numbers in (listed, given, of_heads, channels):
            codes.view(torch.uint8).fill_(0x7F)
            for y in numbers:
                y.fill_(math.nan)
        graph.replay()
        judge(listed, quantized(x, cos, sin, positions=positions, hadamard_seed=3))
        assert_equal(listed, quantize(x, cos, sin, positions=200, hadamard_seed=3))
        assert_equal(judge(given, quantized(x, scale=0.5)), quantize(x, scale=0.5))
        of_heads_now = quantize(x, scales_of="heads", heads_per_scale=4)
        assert_equal(judge(of_heads, quantized(x, scales_of="heads", heads_per_scale=4)), of_heads_now)
        assert_equal(judge(channels, quantized_channels(x)), quantize_channels(x))


@hopper
def test_the_current_stream_is_used(randn):
    x, later = randn(4, 2048, 16, 128), randn(4, 2048, 16, 128)

    def results_of(x):
        return (*quantize(x), *quantize(x, scales_of="tensor"), *quantize_channels(x))

    expected = results_of(later)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(later)
        results = [y.clone() for y in results_of(x)]
    stream.synchronize()
    assert_equal(results, expected)


@hopper
def test_the_operator_is_the_function(randn):
    x, (cos, sin) = randn(2, 100, 4, 64), tables(100, 64, device="cuda")
    arguments = (x, cos, sin, None, False, 0, -1, 128, None, False)
    # As graphs call it that were saved before scales were of heads.
    assert_equal(torch.ops.fa3.quantize(*arguments), quantize(x, cos, sin, hadamard_seed=2**64 - 1))
    for scales_of, heads in [("blocks", 1), ("heads", 2), ("tensor", 1)]:
        expected = quantize(x, cos, sin, hadamard_seed=2**64 - 1, scales_of=scales_of, heads_per_scale=heads)
        assert_equal(torch.ops.fa3.quantize(*arguments, scales_of, heads), expected)
    assert_equal(torch.ops.fa3.quantize_channels(x, True), quantize_channels(x, transposed=True))
