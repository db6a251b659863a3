"""Results on a GPU, and their gradients where a test is about both, against the definition by the error law. Outputs
start as NaN, so that an element that is not written shows.
"""

import contextlib
import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from dense import check, check_gradients
from packing import MASKS, at_once
from reference import judge

from fa3 import flash_attn_func, flash_attn_qkvpacked_func

pytestmark = [pytest.mark.hopper, pytest.mark.usefixtures("nan_in_new_tensors")]


@pytest.fixture(params=[check, check_gradients], ids=["results", "gradients"])
def check_both(request):
    """Computes and judges results, or gradients."""
    return request.param


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_head_dims_and_masks(randn, dtype, head_dim, mask):
    dtype = getattr(torch, dtype)
    q, k, v = randn(2, 333, 6, head_dim, dtype=dtype), *(randn(2, 401, 2, head_dim, dtype=dtype) for _ in "kv")
    check(q, k, v, **mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (6, 2), (12, 1)], ids=["one", "mha", "gqa", "mqa"])
@pytest.mark.parametrize("seqlens", [(1, 1), (1, 999), (513, 1), (129, 128), (700, 257), (1024, 1024)], ids=str)
def test_lengths_and_heads(randn, check_both, seqlens, heads, mask):
    q = randn(3, seqlens[0], heads[0], 64)
    k, v = (randn(3, seqlens[1], heads[1], 64) for _ in "kv")
    check_both(q, k, v, **mask)


def test_values_have_a_head_dim_of_their_own(randn):
    q, k, v = randn(2, 300, 4, 192), randn(2, 350, 2, 192), randn(2, 350, 2, 128)
    out, _ = check(q, k, v, causal=True)
    assert out.shape == (2, 300, 4, 128)


@pytest.mark.parametrize("scale, softcap", [(0.3, 0.0), (None, 15.0), (0.5, 4.0)])
def test_scales_and_soft_caps(randn, check_both, scale, softcap):
    q, k, v = (randn(2, 260, 4, 128) for _ in "qkv")
    for mask in MASKS:
        check_both(q, k, v, softmax_scale=scale, softcap=softcap, **mask)


def test_many_tiles(randn):
    q, k, v = randn(4, 2048, 12, 128), randn(4, 2048, 3, 128), randn(4, 2048, 3, 128)
    for mask in MASKS:
        check(q, k, v, **mask)


def test_no_rows_and_no_keys(randn, check_both):
    for batch, seqlen_q, seqlen_k in [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)]:
        q, k, v = randn(batch, seqlen_q, 4, 64), randn(batch, seqlen_k, 2, 64), randn(batch, seqlen_k, 2, 64)
        check_both(q, k, v)
        check_both(q, k, v, causal=True)


def test_strides_are_as_they_are(randn, check_both):
    q, k, v = randn(2, 4, 200, 128).transpose(1, 2), randn(300, 2, 2, 128).transpose(0, 1), randn(2, 300, 2, 128)
    check_both(q, k, v, causal=True)
    # Rows inside larger ones, whose other elements are NaN.
    wide = torch.full((2, 300, 4, 3, 136), math.nan, dtype=q.dtype, device=q.device)
    wide[:, :, :, 1, 8:] = randn(2, 300, 4, 128)
    q = wide[:, :, :, 1, 8:]
    assert not q.is_contiguous()
    check_both(q, k, v)
    check_both(randn(2, 200, 8, 128), q, q)
    # Slices of one tensor.
    check_both(*randn(2, 250, 3, 4, 128).unbind(2), causal=True)
    check_both(*randn(2, 250, 10, 64).split([6, 2, 2], 2))
    # One sequence and one head for all.
    k, v = (randn(1, 300, 1, 128).expand(2, -1, 4, -1) for _ in "kv")
    check_both(q, k, v)


def test_packed_tensors_are_sliced_and_not_copied(randn):
    qkv = randn(2, 250, 3, 4, 128)
    q, k, v = qkv.unbind(2)
    for options in (dict(), dict(causal=True, softcap=20.0)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, lse = flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options)
        # The outputs and nothing else was allocated, in multiples of 512 bytes.
        assert torch.cuda.max_memory_allocated() - before <= 2 * out.numel() + 4 * lse.numel() + 1024
        expected = flash_attn_func(q, k, v, return_attn_probs=True, **options)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(flash_attn_qkvpacked_func(qkv), flash_attn_func(q, k, v))
    qkv = randn(2, 250, 10, 64)
    expected = flash_attn_func(qkv[:, :, :6], qkv[:, :, 6:8], qkv[:, :, 8:], causal=True)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=6), expected)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, 0.125, True, num_heads_q=6, sm_margin=4), expected)


def test_nan_stays_in_its_rows(randn):
    q, k, v = (randn(1, 300, 2, 64) for _ in "qkv")
    expected, expected_lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    q[0, 100, 1] = math.nan
    k[0, 200, 0] = math.nan
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    rows = torch.zeros(1, 300, 2, dtype=torch.bool, device=q.device)
    rows[0, 100, 1] = True
    rows[0, 200:, 0] = True
    assert out[rows].isnan().all() and lse.transpose(1, 2)[rows].isnan().all()
    assert torch.equal(out[~rows], expected[~rows])
    assert torch.equal(lse.transpose(1, 2)[~rows], expected_lse.transpose(1, 2)[~rows])


def test_results_have_the_same_bits_every_time(randn):
    q, k, v = randn(4, 1000, 8, 128), randn(4, 1500, 2, 128), randn(4, 1500, 2, 128)
    first = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    for _ in range(200):
        again = flash_attn_func(q, k, v, causal=True, deterministic=True, return_attn_probs=True)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_fewer_sms_compute_the_same(randn):
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    q, k, v = (randn(4, 2048, 16, 128) for _ in "qkv")
    expected = flash_attn_func(q, k, v, causal=True)
    for margin in (1, 32, sms - 1):
        assert torch.equal(flash_attn_func(q, k, v, causal=True, sm_margin=margin), expected)
    for margin in (-1, sms, 1 << 40):
        with pytest.raises(ValueError, match=f"^sm_margin {margin} is outside 0 to {sms - 1}: the device has {sms} sms$"):
            flash_attn_func(q, k, v, sm_margin=margin)


def test_threads_share_the_library(randn):
    problems = [[randn(2, 64 * i, 4, 64) for _ in "qkv"] for i in range(1, 9)]
    torch.cuda.synchronize()

    def attend(q, k, v):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                result = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
            judge(*result, q, k, v, window=(-1, 0))

    at_once(attend, problems)


@pytest.mark.parametrize(
    "error, sentence, change",
    [
        (ValueError, "k is torch.float16, expected torch.bfloat16 like q", lambda q, k, v: (q, k.half(), v)),
        (ValueError, "the forward kernels take torch.float16, torch.bfloat16 and torch.float8_e4m3fn, not torch.float32", lambda q, k, v: (x.float() for x in (q, k, v))),
        (TypeError, "a tensor is torch.float64, expected", lambda q, k, v: (q.double(), k, v)),
        (ValueError, "expected one CUDA device", lambda q, k, v: (q, k.cpu(), v)),
        (ValueError, "q has 3, k 4 and v 4 dimensions", lambda q, k, v: (q[0], k, v)),
        (ValueError, "q has head_dim 60, not a multiple of 8", lambda q, k, v: (q[..., :60], k[..., :60], v[..., :60])),
        (ValueError, "heads_q 4 is not a multiple of heads_kv 3", lambda q, k, v: (q, k[:, :, :3], v[:, :, :3])),
        (ValueError, "k has head_dim 56, expected 64", lambda q, k, v: (q, k[..., :56], v)),
        (ValueError, "v has seqlen 63, expected 64", lambda q, k, v: (q, k, v[:, :63])),
        (ValueError, "k has batch 1, expected 2", lambda q, k, v: (q, k[:1], v[:1])),
    ],
)
def test_bad_tensors(randn, error, sentence, change):
    q, k, v = change(*(randn(2, 64, 4, 64) for _ in "qkv"))
    with pytest.raises(error, match=sentence):
        flash_attn_func(q, k, v)


def test_bad_numbers(randn):
    x = randn(2, 64, 4, 64)
    for options, sentence in [
        (dict(softmax_scale=0.0), "softmax scale 0 is outside"),
        (dict(softmax_scale=math.nan), "softmax scale NaN is outside"),
        (dict(softcap=-1.0), "soft cap -1 is outside"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            flash_attn_func(x, x, x, **options)
    misaligned = randn(2 * 64 * 4 * 64 + 1)[1:].view(2, 64, 4, 64)
    with pytest.raises(ValueError, match="^k lies at 0x[0-9a-f]+, not a multiple of 16 bytes$"):
        flash_attn_func(x, misaligned, x)


def test_other_gpus(randn):
    if torch.cuda.device_count() < 2:
        pytest.skip("skipped: one GPU only")
    q, k, v = (randn(2, 200, 4, 64) for _ in "qkv")
    with pytest.raises(ValueError, match="expected one CUDA device"):
        flash_attn_func(q, k.to("cuda:1"), v)
    with contextlib.nullcontext() if torch.cuda.get_device_capability(1) == (9, 0) else pytest.raises(RuntimeError):
        check(*(x.to("cuda:1") for x in (q, k, v)), causal=True)
