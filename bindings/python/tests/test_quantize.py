"""`fa3.quantize` and `fa3.quantize_channels` against their definitions, on the CPU and on a GPU. Needs torch."""

import itertools
import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import normal
from reference import as_products_read, incoherent, quantized, quantized_channels, rotated

from fa3 import quantize, quantize_channels

F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn

pytestmark = pytest.mark.usefixtures("nan_in_new_tensors")


def tables(positions, rotary_dim, dtype=F32, device="cpu"):
    """Makes tables of cosines and sines for rotary embedding."""
    frequency = 10000.0 ** (-torch.arange(rotary_dim // 2, dtype=torch.float64) / (rotary_dim // 2))
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def bits(codes):
    return codes.view(torch.uint8).to(torch.int16)


def steps(codes):
    """Codes as integers that are ordered like the numbers that the codes represent."""
    magnitude = bits(codes) & 0x7F
    return torch.where(bits(codes) > 0x7F, -magnitude, magnitude)


def judge(result, expected):
    """Fails unless scales and means agree to rounding, codes agree to one step, and NaN are where the definition has
    them.
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
    """`check` by channels."""
    return judge(quantize_channels(x, **options), quantized_channels(x, **options))


def assert_equal(results, expected):
    for result, right in zip(results, expected, strict=True):
        # Torch cannot compare float8.
        assert torch.equal(*(bits(y) if y.dtype == E4M3 else y for y in (result, right)))


def test_the_definition():
    """Checks the definition with which the other tests compare."""
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
    # e4m3 codes of the numbers 0 to 143, one for each key.
    keys = torch.arange(144.0).view(1, 144, 1, 1).to(E4M3)
    assert as_products_read(keys)[0, 0, 0, :6].tolist() == [0, 1, 8, 9, 2, 3]
    assert as_products_read(keys).shape == (1, 1, 1, 256) and not as_products_read(keys)[..., 144:].float().any()
    codes, scales = quantized(x, hadamard_seed=3)
    y = (x.double() @ incoherent(32, 3)).float()
    # Half a step of e4m3 is at most 1/16 of a number.
    torch.testing.assert_close(codes.float() * scales.transpose(1, 2)[..., None], y, rtol=1 / 16, atol=0.01)


def test_the_definition_of_heads_and_the_tensor():
    # There are four heads. The last one has zeros, a NaN and an infinity.
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
    # Three channels: 0 1 2; 3 3 3; and 1, an infinity and a NaN.
    x = torch.tensor([[0.0, 3.0, 1.0], [1.0, 3.0, math.inf], [2.0, 3.0, math.nan]]).view(1, 3, 1, 3)
    codes, scales, mean = (y.float().flatten().tolist() for y in quantized_channels(x))
    third = torch.tensor(1 / 3).item()
    assert mean == [1.0, 3.0, third]
    torch.testing.assert_close(scales, [1 / 448, 1.0, (1 - third) / 448])
    assert codes[0::3] == [-448.0, 0.0, 448.0] and codes[1::3] == [0.0] * 3
    assert codes[2] == 448.0 and math.isnan(codes[5]) and math.isnan(codes[8])
    codes, scales, mean = quantized_channels(torch.empty(2, 0, 1, 16))
    assert codes.shape == (2, 0, 1, 16) and (scales == 1).all() and (mean == 0).all()


def test_zeros_without_memory_are_zeros():
    x = normal(1, 8, 2, 64)
    assert_equal(quantize(torch._efficientzerotensor(x.shape, dtype=x.dtype)), quantize(torch.zeros_like(x)))


# Tests of results, with any contents of the workspace.


def sizes(device, on_cpu, on_gpu):
    return on_cpu if device == "cpu" else on_gpu


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("hadamard_seed", [None, 0, 2**64 - 1])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_head_dims_rotations_and_signs(device, dtype, hadamard_seed, transposed):
    for head_dim in sizes(device, (32,), (16, 64, 80, 96, 128, 192, 256)):
        x = normal(2, sizes(device, 130, 333), 3, head_dim, dtype=dtype, device=device)
        check(x, hadamard_seed=hadamard_seed, transposed=transposed)
        for rotary_dim, interleaved in itertools.product({16, head_dim}, (False, True)):
            cos, sin = tables(400, rotary_dim, device=device)
            options = dict(interleaved=interleaved, hadamard_seed=hadamard_seed, block_rows=64, transposed=transposed)
            check(x, cos, sin, positions=67, **options)


@pytest.mark.parametrize("block_rows", [64, 128])
@pytest.mark.parametrize("seqlen", [0, 1, 63, 64, 65, 128, 129, 1000])
def test_lengths_and_blocks(device, seqlen, block_rows):
    _, scales = check(normal(3, seqlen, 5, 64, device=device), block_rows=block_rows)
    assert scales.shape == (3, 5, math.ceil(seqlen / block_rows))
    check(normal(0, seqlen, 5, 64, device=device), block_rows=block_rows)
    for head_dim in sizes(device, (16,), (16, 64, 80, 128, 256)):
        x = normal(2, seqlen, 3, head_dim, device=device)
        for options in (dict(block_rows=block_rows), dict(scale=0.01)):
            codes, scales = quantize(x, **options)
            assert_equal(quantize(x, **options, transposed=True), (as_products_read(codes), scales))
    cos, sin = tables(seqlen + 2, 64, device=device)
    x = normal(2, 3, seqlen, 128, device=device).transpose(1, 2)
    check(x, cos, sin, positions=1, hadamard_seed=3, block_rows=block_rows, transposed=True)


def test_a_given_scale(device):
    x = normal(2, 200, 4, 128, device=device)
    for scale in (0.001, 0.25, 1, 3.0):
        codes, scales = check(x, scale=scale)
        assert scales.tolist() == [torch.tensor(scale, dtype=F32).item()]
    assert (check(x, scale=0.001)[0].float().abs().max() == 448).item()


SCALES = [dict(scales_of="heads", heads_per_scale=heads) for heads in (1, 2, 6)] + [dict(scales_of="tensor")]
# (function that checks a call, options).
KINDS = [(check, scaling) for scaling in SCALES] + [(check_channels, {})]


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("function, scaling", KINDS, ids=lambda x: getattr(x, "__name__", str(x)))
@pytest.mark.parametrize("seqlen", [0, 1, 63, 128, 129, 257, 1000, 5000])
def test_scales_of_heads_the_tensor_and_channels(device, seqlen, function, scaling, transposed):
    if seqlen > sizes(device, 257, 5000):
        pytest.skip("skipped: the CPU has no blocks of rows")
    options = dict(transposed=transposed, **scaling)
    for head_dim, dtype in itertools.product(sizes(device, (16,), (16, 64, 80, 128, 256)), (F16, BF16)):
        # Each head of each sequence has its own magnitude, and each channel its own mean.
        x = normal(2, seqlen, 6, head_dim, dtype=F32, device=device) * torch.arange(1, 13, device=device).view(2, 1, 6, 1)
        function((x + 4 * normal(2, 1, 6, head_dim, dtype=F32, device=device)).to(dtype), **options)
    function(normal(0, seqlen, 6, 64, device=device), **options)
    if function is check:
        x, (cos, sin) = normal(2, seqlen, 6, 64, device=device), tables(seqlen + 100, 16, device=device)
        # The positions of some rows are behind the tables' ends.
        listed = torch.arange(100 + seqlen - seqlen // 2, 100 + 2 * seqlen - seqlen // 2, device=device).expand(2, -1)
        for interleaved, positions in itertools.product((False, True), (67, listed)):
            check(x, cos, sin, interleaved=interleaved, positions=positions, hadamard_seed=3, **options)


@pytest.mark.parametrize("function, scaling", KINDS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_numbers_that_are_not_finite(device, function, scaling):
    x = 4 + normal(1, 300, 6, 64, device=device)
    for row, strange in enumerate((math.nan, math.inf, -math.inf)):
        x[0, 100 * row, 1, 3 : 5 + row] = strange
    x[:, :, 0, 7] = math.nan
    x[:, :, 2] = math.nan
    for transposed in (False, True):
        _, scales, *mean = function(x, transposed=transposed, **scaling)
        assert not mean or (scales[0, 0, 7], mean[0][0, 0, 7]) == (1, 0)


def test_zeros_have_scale_1(device):
    x = torch.zeros(1, 130, 2, 64, dtype=BF16, device=device)
    for scaling in (dict(), dict(scales_of="heads"), dict(scales_of="tensor")):
        codes, scales = check(x, **scaling)
        assert (scales == 1).all() and (codes.float() == 0).all()
    codes, scales, mean = check_channels(x + 3)
    assert (scales == 1).all() and (codes.float() == 0).all() and (mean == 3).all()


def test_strides_are_as_they_are(device):
    check(normal(2, 4, 200, 128, device=device).transpose(1, 2), hadamard_seed=1)
    one = normal(1, 200, 1, 64, device=device).expand(3, -1, 4, -1)
    check(one, *tables(200, 64, device=device))
    # The tensor is a part of wider rows, whose other elements are NaN.
    wide = torch.full((2, 300, 4, 3, 136), math.nan, dtype=BF16, device=device)
    wide[:, :, :, 1, 8:] = normal(2, 300, 4, 128, device=device)
    check(wide[:, :, :, 1, 8:])
    check_channels(wide[:, :, :, 1, 8:])
    check_channels(one)
    for x in normal(2, 300, 3, 4, 128, device=device).unbind(2):
        check(x, hadamard_seed=5, block_rows=64)
        check(x, hadamard_seed=5, scales_of="heads", heads_per_scale=2)
    if device == "cpu":
        # The memory of a file or a message may begin at any address.
        x = normal(1, 20, 2, 16)
        raw = bytearray(b"x" + bytes(x.view(torch.uint8).flatten().tolist()))
        assert_equal(quantize(torch.frombuffer(raw, dtype=BF16, offset=1).view(x.shape)), quantize(x))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_listed_positions(device, dtype):
    x, (cos, sin) = normal(2, 150, 3, 96, device=device), tables(60, 64, device=device)
    positions = torch.randint(0, 60, (2, 150), dtype=dtype, generator=torch.Generator().manual_seed(0)).to(device)
    check(x, cos, sin, positions=positions)
    # These positions are outside the tables.
    limits = torch.iinfo(dtype)
    positions[0, :4] = torch.tensor([-1, 60, limits.min, limits.max])
    positions[1, 128:] = 60
    codes, scales = check(x, cos, sin, positions=positions, hadamard_seed=4)
    assert (bits(codes)[0, :4] == 0x7F).all() and (bits(codes)[1, 128:] == 0x7F).all()
    assert (scales[1, :, 1] == 1).all()
    # Lists and tables with strides and dtypes that a kernel does not read.
    check(x, cos, sin, positions=positions.T.contiguous().T)
    check(x[:1, 1:], cos, sin, positions=positions[:1, 1:])
    check(x, cos.T.contiguous().T, sin.T.contiguous().T, positions=positions)
    check(x, cos.half(), sin.bfloat16(), positions=positions)


def test_the_operator_is_the_function(device):
    x, (cos, sin) = normal(2, 100, 4, 64, device=device), tables(100, 64, device=device)
    arguments = (x, cos, sin, None, False, 0, -1, 128, None, False)
    # Graphs that were saved before `scales_of` existed call the operator with these arguments.
    assert_equal(torch.ops.fa3.quantize(*arguments), quantize(x, cos, sin, hadamard_seed=2**64 - 1))
    for scales_of, heads in [("blocks", 1), ("heads", 2), ("tensor", 1)]:
        expected = quantize(x, cos, sin, hadamard_seed=2**64 - 1, scales_of=scales_of, heads_per_scale=heads)
        assert_equal(torch.ops.fa3.quantize(*arguments, scales_of, heads), expected)
    assert_equal(torch.ops.fa3.quantize_channels(x, True), quantize_channels(x, transposed=True))


# Tests for a GPU only. A law of all operations says that graphs have the bits of calls.


@pytest.mark.hopper
def test_the_first_call_of_all_is_captured():
    x, (cos, sin) = normal(4, 1000, 8, 112, device="cuda"), tables(1200, 112, device="cuda")
    positions = torch.arange(200, 1200, device="cuda").expand(4, -1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [
            quantize(x, cos, sin, positions=positions, hadamard_seed=3),
            quantize(x, scale=0.5),
            quantize(x, scales_of="heads", heads_per_scale=4),
            quantize_channels(x),
        ]
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        for codes, *numbers in results:
            codes.view(torch.uint8).fill_(0x7F)
            for y in numbers:
                y.fill_(math.nan)
        graph.replay()
        listed, given, of_heads, channels = results
        assert_equal(listed, check(x, cos, sin, positions=200, hadamard_seed=3))
        assert_equal(given, check(x, scale=0.5))
        assert_equal(of_heads, check(x, scales_of="heads", heads_per_scale=4))
        assert_equal(channels, check_channels(x))


@pytest.mark.hopper
def test_the_current_stream_is_used():
    x, later = (normal(4, 2048, 16, 128, seed=seed, device="cuda") for seed in (0, 1))

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
