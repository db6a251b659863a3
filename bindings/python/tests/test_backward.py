"""Gradients on a GPU, against float64 autograd by the error law. They start as NaN, so that what is not written shows.
"""

import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from dense import check_gradients, gradients
from packing import MASKS, assert_equal

pytestmark = [pytest.mark.hopper, pytest.mark.usefixtures("nan_in_new_tensors")]

HEAD_DIMS = [8, 40, 64, 72, 96, 128, 160, 192, 256]
# Each head_dim with each mask, and both dtypes with each of them.
COVERED = [
    ("float16" if (i + j) % 2 else "bfloat16", head_dim, mask)
    for i, head_dim in enumerate(HEAD_DIMS)
    for j, mask in enumerate(MASKS)
]


@pytest.mark.parametrize("dtype, head_dim, mask", COVERED, ids=str)
def test_head_dims_and_masks(randn, dtype, head_dim, mask):
    dtype = getattr(torch, dtype)
    q, k, v = randn(2, 333, 6, head_dim, dtype=dtype), *(randn(2, 401, 2, head_dim, dtype=dtype) for _ in "kv")
    check_gradients(q, k, v, of_lse=False, **mask)


@pytest.mark.parametrize("head_dim, head_dim_v", [(192, 128), (64, 256), (256, 64), (40, 96)])
def test_values_have_a_head_dim_of_their_own(randn, head_dim, head_dim_v):
    q, k, v = randn(2, 300, 4, head_dim), randn(2, 350, 2, head_dim), randn(2, 350, 2, head_dim_v)
    check_gradients(q, k, v, of_lse=False, causal=True)


@pytest.mark.parametrize("of_o, of_lse", [(True, False), (False, True), (True, True)], ids=["o", "lse", "both"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_o_and_lse(randn, dtype, of_o, of_lse):
    q, k, v = (randn(2, 400, 4, 128, dtype=getattr(torch, dtype)) for _ in "qkv")
    for mask in MASKS[:3]:
        results = check_gradients(q, k, v, of_o=of_o, of_lse=of_lse, **mask)
        # LSE does not depend on V.
        assert of_o or not results[2].any()


def test_nearly_one_hot(randn):
    """Where a row's softmax is one key, its terms cancel."""
    q, k, v = 8 * randn(2, 300, 4, 64), 8 * randn(2, 300, 2, 64), randn(2, 300, 2, 64)
    check_gradients(q, k, v, causal=True)


@pytest.mark.parametrize("deterministic", [True, False])
def test_many_tiles(randn, deterministic):
    """Rows see more than 4096 keys, under a mask more than 1024: dQ is added up in any order if it may be."""
    q, k, v = randn(2, 4200, 6, 128), randn(2, 4200, 3, 128), randn(2, 4200, 3, 128)
    for mask in (dict(), dict(causal=True), dict(window_size=(900, 400))):
        check_gradients(q, k, v, of_lse=False, deterministic=deterministic, **mask)


@pytest.mark.parametrize("mask", [dict(), dict(causal=True), dict(window_size=(900, 400)), dict(causal=True, softcap=8.0)], ids=str)
@pytest.mark.parametrize("head_dims", [(40, 40), (64, 64), (128, 128), (64, 128), (128, 72)], ids=str)
def test_dq_is_added_up(randn, head_dims, mask):
    """Rows see so many keys that dQ is added up in any order if it may be."""
    head_dim, head_dim_v = head_dims
    q, k, v = randn(1, 999, 4, head_dim), randn(1, 4201, 2, head_dim), randn(1, 4201, 2, head_dim_v)
    check_gradients(q, k, v, deterministic=False, **mask)


def test_added_up_it_is_nearly_the_same(randn):
    # With fewer keys additions in order are the faster ones.
    q, k, v, dout = (randn(2, seqlen, 4, 64) for seqlen in (500, 4100, 4100, 500))
    first, again = (gradients(q, k, v, dout, deterministic=deterministic) for deterministic in (True, False))
    assert not torch.equal(first[0], again[0])
    for x, y in zip(first, again, strict=True):
        assert (x.float() - y.float()).norm() < 1e-3 * x.float().norm()


def test_torchs_mode_asks_for_the_same_bits(randn, monkeypatch):
    q, k, v, dout = (randn(2, seqlen, 4, 64) for seqlen in (500, 4100, 4100, 500))
    expected = gradients(q, k, v, dout, deterministic=True)
    # The mode is on, and `nan_in_new_tensors` hides it.
    monkeypatch.setattr("fa3.gradient.asks_for_same_bits", torch.are_deterministic_algorithms_enabled)
    for _ in range(3):
        for x, y in zip(gradients(q, k, v, dout, deterministic=False), expected, strict=True):
            assert torch.equal(x, y)


def test_rows_without_keys_and_keys_without_rows(randn):
    q, k, v = (randn(2, seqlen, 4, 64) for seqlen in (500, 200, 200))
    dq, _, _ = check_gradients(q, k, v, causal=True)
    assert not dq[:, :300].any() and dq[:, 301:].any()
    q, k, v = (randn(2, seqlen, 4, 64) for seqlen in (100, 600, 600))
    _, dk, dv = check_gradients(q, k, v, causal=True, window_size=(20, 0))
    assert not dk[:, :480].any() and not dv[:, :480].any() and dk[:, 480:].any() and dv[:, 480:].any()


def test_no_rows_and_no_keys(randn):
    for batch, seqlen_q, seqlen_k in [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)]:
        q, k, v = randn(batch, seqlen_q, 4, 64), randn(batch, seqlen_k, 2, 64), randn(batch, seqlen_k, 2, 64)
        for options in (dict(of_lse=False), dict(causal=True, of_lse=False), dict(), dict(of_o=False)):
            for x in check_gradients(q, k, v, **options):
                assert not x.any()


def test_gradients_of_o_are_read_with_their_strides(randn):
    q, k, v = (randn(2, 300, 4, 64) for _ in "qkv")
    wide = torch.full((2, 300, 4, 80), math.nan, dtype=q.dtype, device=q.device)
    wide[..., 8:72] = randn(2, 300, 4, 64)
    shifted = torch.full((2, 300, 4, 80), math.nan, dtype=q.dtype, device=q.device)
    shifted[..., 3:67] = randn(2, 300, 4, 64)
    for dout in [
        randn(2, 4, 300, 64).transpose(1, 2),
        randn(300, 4, 2, 64).permute(2, 0, 1, 3),
        wide[..., 8:72],
        randn(64).expand(2, 300, 4, 64),
        randn(1, 300, 1, 64).expand(2, 300, 4, 64),
        # These are copied.
        randn(1).expand(2, 300, 4, 64),
        randn(2, 300, 64, 4).transpose(2, 3),
        shifted[..., 3:67],
        randn(2 * 300 * 4 * 64 + 1)[1:].view(2, 300, 4, 64),
    ]:
        assert_equal(gradients(q, k, v, dout, causal=True), gradients(q, k, v, dout.contiguous().clone(), causal=True))
    dout = randn(2, 300, 4, 64)
    for dlse in [
        randn(2, 300, 4, dtype=torch.float32).transpose(1, 2),
        randn(1, dtype=torch.float32).expand(2, 4, 300),
        randn(2 * 4 * 300 + 1, dtype=torch.float32)[1:].view(2, 4, 300),
    ]:
        assert_equal(gradients(q, k, v, dout, dlse), gradients(q, k, v, dout, dlse.contiguous().clone()))


def test_nan_stays_in_its_head(randn):
    q, k, v, dout = (randn(2, 300, 2, 64) for _ in range(4))
    expected = gradients(q, k, v, dout, causal=True)
    dout[1, 100, 1] = math.nan
    results = gradients(q, k, v, dout, causal=True)
    for result, right in zip(results, expected):
        assert result[1, :, 1].isnan().any()
        assert torch.equal(result[0], right[0]) and torch.equal(result[1, :, 0], right[1, :, 0])
    # Of dQ it is one row.
    assert results[0][1, :, 1].isnan().all(-1).nonzero().tolist() == [[100]]


def test_gradients_have_the_same_bits_every_time(randn):
    """Also while another stream keeps some of the SMs busy."""
    q, k, v, dout = randn(4, 1000, 8, 128), randn(4, 1500, 2, 128), randn(4, 1500, 2, 128), randn(4, 1000, 8, 128)
    first = gradients(q, k, v, dout, causal=True)
    load, x = torch.cuda.Stream(), randn(1024, 1024)
    torch.cuda.synchronize()
    for i in range(100):
        with torch.cuda.stream(load):
            for _ in range(1 + i % 7):
                x @ x
        assert_equal(gradients(q, k, v, dout, causal=True, deterministic=True), first)
    load.synchronize()


@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
def test_a_sequence_has_the_same_bits_in_every_batch(randn, mask):
    q, k, v, dout = randn(5, 700, 4, 64), randn(5, 900, 2, 64), randn(5, 900, 2, 64), randn(5, 700, 4, 64)
    together = gradients(q, k, v, dout, **mask)
    for i in range(5):
        alone = gradients(*(x[i : i + 1] for x in (q, k, v, dout)), **mask)
        assert_equal(alone, [x[i : i + 1] for x in together])


def test_fewer_sms_compute_the_same(randn):
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    q, k, v, dout = (randn(4, 1024, 16, 128) for _ in range(4))
    expected = gradients(q, k, v, dout, causal=True)
    for margin in (1, 32, sms - 1):
        assert_equal(gradients(q, k, v, dout, causal=True, sm_margin=margin), expected)
    options = (None, -1, -1, 0, 0.0)
    out, lse = torch.ops.fa3.forward(q, k, v, *options, 0)
    for margin in (-1, sms):
        with pytest.raises(ValueError, match=f"^sm_margin {margin} is outside 0 to {sms - 1}: the device has {sms} sms$"):
            torch.ops.fa3.backward(dout, q, k, v, out, lse, None, *options, margin)


def test_bad_tensors_of_the_operator(randn):
    q, k, v, dout = (randn(2, 64, 4, 64) for _ in range(4))
    options = (None, -1, -1, 0, 0.0, 0)
    out, lse = torch.ops.fa3.forward(q, k, v, *options)
    for change, sentence in [
        (dict(k=k[:, :, :3], v=v[:, :, :3]), "heads_q 4 is not a multiple of heads_kv 3"),
        (dict(k=k[:, :63]), "v has seqlen 64, expected 63"),
        (dict(v=v.half()), "v is torch.float16, expected torch.bfloat16 like q"),
        (dict(lse=lse.cpu()), "expected one CUDA device"),
    ]:
        given = dict(dout=dout, q=q, k=k, v=v, o=out, lse=lse, dlse=None) | change
        with pytest.raises(ValueError, match=sentence):
            torch.ops.fa3.backward(*given.values(), *options)
    # O and LSE may have any strides.
    expected = torch.ops.fa3.backward(dout, q, k, v, out, lse, None, *options)
    out, lse = out.transpose(1, 2).contiguous().transpose(1, 2), lse.transpose(1, 2).contiguous().transpose(1, 2)
    assert_equal(torch.ops.fa3.backward(dout, q, k, v, out, lse, None, *options), expected)
