"""Results and gradients of dense batches, which the error law compares with the definition, on the CPU and on a GPU.
Outputs start as NaN, so that an element that is not written shows. Needs torch.
"""

import contextlib
import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from dense import INTERVALS, check, check_gradients, gradients, sink_and_window, tensors
from packing import MASKS, assert_equal, normal, on
from reference import judge_codes, standard

from fa3 import flash_attn_func, flash_attn_qkvpacked_func

pytestmark = pytest.mark.usefixtures("nan_in_new_tensors")

F32, F16, BF16, I32 = torch.float32, torch.float16, torch.bfloat16, torch.int32
# Sinks below, among and above the scores, and one that is -inf, which has no effect.
SINKS = [-3.0, 0.5, 9.0, -math.inf]


@pytest.fixture(params=[check, check_gradients], ids=["results", "gradients"])
def check_both(request):
    """Runs a test with `check`, which judges results, and with `check_gradients`, which judges gradients."""
    return request.param


TYPES = on("cpu", [F32, F16, BF16], [(1, 3), (64, 64), (72, 41), (128, 256)])
TYPES += on("cuda", [F16, BF16], [(d, d) for d in (8, 40, 64, 72, 96, 128, 160, 192, 256)] + [(192, 128), (64, 256), (256, 64), (40, 96)])


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("device, dtype, head_dims", TYPES, ids=str)
def test_types_head_dims_and_masks(check_both, device, dtype, head_dims, mask):
    rows, keys, heads = (70, 90, (4, 2)) if device == "cpu" else (333, 401, (6, 2))
    of_lse = dict(of_lse=device == "cpu") if check_both is check_gradients else {}
    check_both(*tensors(device, rows, keys, heads, head_dims, dtype), **of_lse, **mask)


SCORES = dict(causal=True, softmax_scale=0.3, softcap=4.0)
SIZES = on("cpu", [(0, 5), (5, 0), (0, 0), (1, 1), (1, 300), (300, 1), (200, 130)], [(1, 1), (6, 2), (4, 1)], [SCORES])
SIZES += on("cuda", [(1, 1), (1, 999), (513, 1), (129, 128), (700, 257), (1024, 1024)], [(1, 1), (5, 5), (6, 2), (12, 1)], MASKS)


@pytest.mark.parametrize("device, seqlens, heads, mask", SIZES, ids=str)
def test_lengths_and_heads(check_both, device, seqlens, heads, mask):
    check_both(*tensors(device, *seqlens, heads, batch=3), **mask)


@pytest.mark.parametrize("batch, rows, keys", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_no_rows_and_no_keys(device, batch, rows, keys):
    given = tensors(device, rows, keys, batch=batch)
    for mask in MASKS[:2]:
        check(*given, **mask)
        for of in (dict(), dict(of_lse=False), dict(of_o=False)):
            assert not any(x.any() for x in check_gradients(*given, **mask, **of))


CHUNKS = [
    dict(causal=True, attention_chunk=70),
    dict(attention_chunk=64),
    dict(window_size=(20, 9), attention_chunk=33),
    # This chunk is longer than all keys.
    dict(attention_chunk=1000),
]
# (rows, keys, head_dim) of the tests of masks.
OF_MASKS = [(250, 250, 64), (70, 300, 128), (140, 40, 256), (70, 900, 128), (300, 40, 256), (300, 140, 128), (90, 200, 256)]


@pytest.mark.parametrize("mask", [*CHUNKS, *INTERVALS], ids=lambda mask: getattr(mask, "__name__", str(mask)))
@pytest.mark.parametrize("device, size", on("cpu", OF_MASKS[:3]) + on("cuda", OF_MASKS), ids=str)
def test_chunks_and_intervals(device, mask, size):
    rows, keys, head_dim = size
    given = tensors(device, rows, keys, head_dims=(head_dim, head_dim))
    mask = mask if isinstance(mask, dict) else dict(intervals=mask(rows, keys).to(device, I32))
    check(*given, **mask)
    # The CPU accumulates in one order, whatever `deterministic` is.
    for deterministic in [True, False][: 1 if device == "cpu" else 2]:
        check_gradients(*given, of_lse=False, deterministic=deterministic, **mask)


@pytest.mark.parametrize("mask", [*MASKS[1:3], *CHUNKS[::2]], ids=str)
@pytest.mark.parametrize("make", INTERVALS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("device, size", on("cpu", OF_MASKS[:2]) + on("cuda", OF_MASKS[:4]), ids=str)
def test_intervals_intersect_other_masks(check_both, device, make, mask, size):
    rows, keys, head_dim = size
    given = tensors(device, rows, keys, head_dims=(head_dim, head_dim))
    check_both(*given, intervals=make(rows, keys).to(device, I32), s_aux=torch.tensor(SINKS, device=device), **mask)


@pytest.mark.parametrize("of_sinks", [dict(), dict(s_aux=SINKS)], ids=["", "sinks"])
@pytest.mark.parametrize(
    "scores", [dict(), dict(softmax_scale=0.3), dict(softcap=15.0), dict(softmax_scale=0.5, softcap=4.0)], ids=str
)
def test_scales_soft_caps_and_sinks(device, check_both, scores, of_sinks):
    """Under a mask the first rows see no key, only their sinks."""
    of_sinks = {name: torch.tensor(x, device=device) for name, x in of_sinks.items()}
    for dtype in (F32, BF16) if device == "cpu" else (F16, BF16):
        rows, keys, head_dim = (40, 30, 64) if device == "cpu" else (260, 230, 128)
        given = tensors(device, rows, keys, head_dims=(head_dim, head_dim), dtype=dtype)
        for mask in (*MASKS, dict(intervals=sink_and_window(rows, keys).to(device, I32))):
            check_both(*given, **scores, **of_sinks, **mask)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_sinks_of_every_type(device, dtype):
    q, k, v = tensors(device, 40, 30)
    expected = flash_attn_func(q, k, v, s_aux=torch.tensor(SINKS, device=device))
    sinks = torch.tensor(SINKS, device=device, dtype=dtype).requires_grad_()
    out = flash_attn_func(q, k, v, s_aux=sinks)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert sinks.grad.dtype == dtype and sinks.grad.isfinite().all()
    # A sink of -inf has no effect.
    none = torch.full_like(sinks, -math.inf)
    assert_equal(*(flash_attn_func(q, k, v, causal=True, s_aux=x, return_attn_probs=True) for x in (none, None)))


def test_sinks_beside_codes(device):
    codes = [x.to(torch.float8_e4m3fn) for x in tensors(device, 40, 30)]
    sinks = torch.tensor(SINKS, device=device)
    results = flash_attn_func(*codes, s_aux=sinks, return_attn_probs=True)
    judge_codes(*results, *(x.float() for x in codes), s_aux=sinks)


@pytest.mark.parametrize("of_o, of_lse", [(True, False), (False, True), (True, True)], ids=["o", "lse", "both"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_gradients_of_o_and_lse(device, dtype, of_o, of_lse):
    size = 400 if device == "cuda" else 70
    for mask in MASKS[:3]:
        results = check_gradients(*tensors(device, size, size, (4, 4), (128, 128), dtype), of_o, of_lse, **mask)
        # LSE does not depend on V, so dV is 0 without a gradient of O.
        assert of_o or not results[2].any()


def test_gradients_where_a_row_is_nearly_one_hot(device):
    """The terms dP and D of a row's dS cancel."""
    q, k, v = tensors(device, 300, 300)
    check_gradients(8 * q, 8 * k, v, causal=True)


def test_gradients_are_slopes():
    """Gradients agree with central differences of the forward pass in float64."""
    q, k, v = (x.requires_grad_() for x in tensors("cpu", 5, 5, (2, 2), (4, 4), F32, batch=1))
    out, lse = flash_attn_func(q, k, v, causal=True, softcap=2.0, return_attn_probs=True)
    dout, dlse = normal(*out.shape, dtype=F32, seed=3), normal(*lse.shape, dtype=F32, seed=4)
    results = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    exact = [x.detach().double() for x in (q, k, v)]

    def phi(*qkv):
        out, lse = standard(*qkv, causal=True, softcap=2.0)
        return (out * dout).sum() + (lse * dlse).sum()

    for x, gradient in zip(exact, results):
        for index in range(x.numel()):
            slopes = []
            for step in (1e-4, -1e-4):
                x.view(-1)[index] += step
                slopes.append(phi(*exact))
                x.view(-1)[index] -= step
            slope = (slopes[0] - slopes[1]) / 2e-4
            assert abs(slope - gradient.flatten()[index]) < 1e-5


def test_rows_without_keys_and_keys_without_rows(device):
    dq, _, _ = check_gradients(*tensors(device, 500, 200, (4, 4)), causal=True)
    assert not dq[:, :300].any() and dq[:, 301:].any()
    _, dk, dv = check_gradients(*tensors(device, 100, 600, (4, 4)), causal=True, window_size=(20, 0))
    assert not dk[:, :480].any() and not dv[:, :480].any() and dk[:, 480:].any() and dv[:, 480:].any()


def wide(x, offset=8):
    """The tensor as a part of wider rows, whose other elements are NaN."""
    memory = torch.full((*x.shape[:3], 3, x.shape[3] + 16), math.nan, dtype=x.dtype, device=x.device)
    memory[:, :, :, 1, offset : offset + x.shape[3]] = x
    return memory[:, :, :, 1, offset : offset + x.shape[3]]


def test_strides_are_as_they_are(device, check_both):
    q, k, v = tensors(device, 200, 300, (4, 2), (128, 128))
    check_both(q.transpose(1, 2).contiguous().transpose(1, 2), k.transpose(0, 1).contiguous().transpose(0, 1), v, causal=True)
    assert not wide(k).is_contiguous()
    check_both(wide(q), wide(k), v)
    check_both(normal(2, 200, 8, 128, device=device), wide(q), wide(q))
    # Q, K and V are slices of one tensor.
    check_both(*normal(2, 250, 3, 4, 128, device=device).unbind(2), causal=True)
    check_both(*normal(2, 250, 10, 64, device=device).split([6, 2, 2], 2))
    # One sequence and one head of K and V serve all sequences and heads.
    k, v = (normal(1, 300, 1, 128, seed=seed, device=device).expand(2, -1, 4, -1) for seed in (1, 2))
    check_both(q, k, v)


def test_the_cpu_takes_any_strides():
    """Strides in which columns are outermost, or every other column is skipped; and addresses that are not aligned,
    since the memory of a file or a message may begin anywhere.
    """

    def shifted(x, bytes):
        raw = bytearray(bytes) + bytearray(x.contiguous().view(torch.uint8).flatten().tolist())
        return torch.frombuffer(raw, dtype=x.dtype, offset=bytes).view(x.shape)

    given = *tensors("cpu", 50, 50, (4, 4), (32, 32)), normal(2, 50, 4, 32, seed=3)
    q, k, v, dout = given
    expected = flash_attn_func(q, k, v, causal=True), *gradients(*given, causal=True)
    for arrange in (
        lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        lambda x: torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0],
        lambda x: shifted(x, 2),
        lambda x: shifted(x, 1),
    ):
        others = [arrange(x) for x in given]
        results = flash_attn_func(*others[:3], causal=True), *gradients(*others, causal=True)
        assert results[0].is_contiguous()
        assert_equal(results, expected)


def test_gradients_of_o_are_read_with_their_strides(device):
    q, k, v = tensors(device, 300, 300, (4, 4))
    dout, dlse = normal(2, 300, 4, 64, seed=5, device=device), normal(2, 4, 300, dtype=F32, seed=6, device=device)
    for given in [
        dout.transpose(1, 2).contiguous().transpose(1, 2),
        dout.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
        wide(dout),
        dout[0, 0, 0].expand(2, 300, 4, 64),
        dout[:1, :, :1].expand(2, 300, 4, 64),
        # The following tensors are copied.
        dout[0, 0, 0, :1].expand(2, 300, 4, 64),
        dout.transpose(2, 3).contiguous().transpose(2, 3),
        wide(dout, 3),
        torch.cat([dout.flatten()[:1], dout.flatten()])[1:].view(dout.shape),
    ]:
        assert_equal(gradients(q, k, v, given, causal=True), gradients(q, k, v, given.contiguous().clone(), causal=True))
    for given in [
        dlse.transpose(1, 2).contiguous().transpose(1, 2),
        dlse[0, 0, :1].expand(2, 4, 300),
        torch.cat([dlse.flatten()[:1], dlse.flatten()])[1:].view(dlse.shape),
    ]:
        assert_equal(gradients(q, k, v, dout, given), gradients(q, k, v, dout, given.contiguous().clone()))


def test_nan_stays_where_it_belongs(device):
    """NaN of a query stays in its row, of a key in the rows that see it, and of dO in its head, or in its row of dQ."""
    q, k, v = tensors(device, 300, 300, (2, 2))
    dout = normal(2, 300, 2, 64, seed=5, device=device)
    expected, expected_lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    right = gradients(q, k, v, dout, causal=True)
    dout[1, 100, 1] = math.nan
    results = gradients(q, k, v, dout, causal=True)
    for x, y in zip(results, right, strict=True):
        assert x[1, :, 1].isnan().any()
        assert torch.equal(x[0], y[0]) and torch.equal(x[1, :, 0], y[1, :, 0])
    assert results[0][1, :, 1].isnan().all(-1).nonzero().tolist() == [[100]]
    q[0, 100, 1], k[0, 200, 0] = math.nan, math.nan
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    rows = torch.zeros(2, 300, 2, dtype=torch.bool, device=device)
    rows[0, 100, 1] = True
    rows[0, 200:, 0] = True
    assert out[rows].isnan().all() and lse.transpose(1, 2)[rows].isnan().all()
    assert torch.equal(out[~rows], expected[~rows])
    assert torch.equal(lse.transpose(1, 2)[~rows], expected_lse.transpose(1, 2)[~rows])


def both_passes(q, k, v, dout, deterministic=True, **options):
    """O, LSE and gradients."""
    return *flash_attn_func(q, k, v, return_attn_probs=True, **options), *gradients(q, k, v, dout, None, deterministic, **options)


@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
def test_a_sequence_has_the_same_bits_in_every_batch(device, mask):
    rows, keys = (700, 900) if device == "cuda" else (70, 90)
    given = *tensors(device, rows, keys, batch=5), normal(5, rows, 4, 64, seed=5, device=device)
    together = both_passes(*given, **mask)
    for i in range(5):
        assert_equal(both_passes(*(x[i : i + 1] for x in given), **mask), [x[i : i + 1] for x in together])


# Cases for a GPU only: many tiles, many SMs, and sums in any order.


@pytest.mark.hopper
@pytest.mark.parametrize("deterministic", [True, False])
def test_many_tiles(deterministic):
    """Rows see more than 4096 keys, or more than 1024 under a mask, so that dQ may be accumulated in any order."""
    for mask in MASKS:
        check(*tensors("cuda", 2048, 2048, (12, 3), (128, 128), batch=4), **mask)
    given = tensors("cuda", 4200, 4200, (6, 3), (128, 128))
    for mask in (dict(), dict(causal=True), dict(window_size=(900, 400))):
        check_gradients(*given, of_lse=False, deterministic=deterministic, **mask)


@pytest.mark.hopper
@pytest.mark.parametrize("mask", [dict(), dict(causal=True), dict(window_size=(900, 400)), dict(causal=True, softcap=8.0)], ids=str)
@pytest.mark.parametrize("head_dims", [(40, 40), (64, 64), (128, 128), (64, 128), (128, 72)], ids=str)
def test_dq_is_added_up(head_dims, mask):
    """Rows see enough keys that dQ may be accumulated in any order."""
    check_gradients(*tensors("cuda", 999, 4201, (4, 2), head_dims, batch=1), deterministic=False, **mask)


@pytest.mark.hopper
def test_added_up_it_is_nearly_the_same(monkeypatch):
    # With fewer keys, dQ is accumulated in a fixed order, which is then faster.
    given = *tensors("cuda", 500, 4100, (4, 4)), normal(2, 500, 4, 64, seed=5, device="cuda")
    first, again = (gradients(*given, deterministic=deterministic) for deterministic in (True, False))
    assert not torch.equal(first[0], again[0])
    for x, y in zip(first, again, strict=True):
        assert (x.float() - y.float()).norm() < 1e-3 * x.float().norm()
    # Torch's deterministic mode is on, but `nan_in_new_tensors` hides it. Now the mode asks for the same bits.
    monkeypatch.setattr("fa3.gradient.asks_for_same_bits", torch.are_deterministic_algorithms_enabled)
    for _ in range(3):
        assert_equal(gradients(*given, deterministic=False), first)


@pytest.mark.hopper
def test_results_have_the_same_bits_every_time():
    """Results have the same bits even while another stream keeps some of the SMs busy."""
    given = *tensors("cuda", 1000, 1500, (8, 2), (128, 128), batch=4), normal(4, 1000, 8, 128, seed=5, device="cuda")
    first = both_passes(*given, causal=True)
    load, x = torch.cuda.Stream(), normal(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    for i in range(150):
        with torch.cuda.stream(load):
            for _ in range(i % 7):
                x @ x
        assert_equal(both_passes(*given, causal=True), first)
    load.synchronize()


@pytest.mark.hopper
def test_fewer_sms_compute_the_same():
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    given = *tensors("cuda", 1500, 1500, (16, 16), (128, 128), batch=4), normal(4, 1500, 16, 128, seed=5, device="cuda")
    expected = both_passes(*given, causal=True)
    for margin in (1, 32, sms - 1):
        assert_equal(both_passes(*given, causal=True, sm_margin=margin), expected)
    q, k, v, dout = given
    options = None, -1, 0, 0, 0.0
    for margin in (-1, sms, 1 << 40):
        for call in (
            lambda: flash_attn_func(q, k, v, sm_margin=margin),
            lambda: torch.ops.fa3.backward(dout, q, k, v, *expected[:2], None, *options, margin),
        ):
            with pytest.raises(ValueError, match=f"^sm_margin {margin} is outside 0 to {sms - 1}: the device has {sms} sms$"):
                call()


@pytest.mark.hopper
def test_packed_tensors_are_sliced_and_not_copied(randn):
    qkv = randn(2, 250, 3, 4, 128)
    q, k, v = qkv.unbind(2)
    for options in (dict(), dict(causal=True, softcap=20.0)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, lse = flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options)
        # Only the outputs were allocated, in multiples of 512 bytes.
        assert torch.cuda.max_memory_allocated() - before <= 2 * out.numel() + 4 * lse.numel() + 1024
        assert_equal((out, lse), flash_attn_func(q, k, v, return_attn_probs=True, **options))
    assert torch.equal(flash_attn_qkvpacked_func(qkv), flash_attn_func(q, k, v))
    qkv = randn(2, 250, 10, 64)
    expected = flash_attn_func(qkv[:, :, :6], qkv[:, :, 6:8], qkv[:, :, 8:], causal=True)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=6), expected)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, 0.125, True, num_heads_q=6, sm_margin=4), expected)


@pytest.mark.hopper
def test_other_gpus(check_both):
    if torch.cuda.device_count() < 2:
        pytest.skip("skipped: one GPU only")
    q, k, v = tensors("cuda", 200, 200, (4, 4))
    with pytest.raises(ValueError, match="^k is on cuda:1 and q on cuda:0, expected one CUDA device or the CPU$"):
        flash_attn_func(q, k.to("cuda:1"), v)
    with contextlib.nullcontext() if torch.cuda.get_device_capability(1) == (9, 0) else pytest.raises(RuntimeError):
        check_both(*(x.to("cuda:1") for x in (q, k, v)), causal=True)


@pytest.mark.hopper
def test_addresses_that_kernels_cannot_read_are_refused():
    x = normal(2, 64, 4, 64, device="cuda")
    misaligned = torch.cat([x.flatten(), x.flatten()[:1]])[1:].view(x.shape)
    with pytest.raises(ValueError, match="^k lies at 0x[0-9a-f]+, not a multiple of 16 bytes$"):
        flash_attn_func(x, misaligned, x)
