"""The largest score of each head, which functions return with return_max_logits. Needs torch."""

import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from caching import Cached
from dense import sink_and_window, tensors
from packing import LENGTHS, USED, Packed, assert_equal, normal, of_rows, on
from reference import heads_first, scores_of

from fa3 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

F64, F32, F16, BF16, I32, E4M3 = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.float8_e4m3fn
SINKS = [30.0, -3.0, 0.5, -math.inf]
MASKS = {
    "all keys": dict(),
    "causal": dict(causal=True, softmax_scale=0.3),
    "window": dict(window_size=(9, 3), softcap=1.5),
    "chunks": dict(causal=True, attention_chunk=15),
    "intervals": dict(intervals=sink_and_window, softmax_scale=2.0),
}


def by_definition(q, k, v, qv=None, s_aux=None, **options):
    """The largest score of each head. Sinks are no scores."""
    q, k, _ = heads_first(q, k, v, qv, F64)
    scores, _ = scores_of(q, k, **options)
    return torch.nn.functional.pad(scores.transpose(0, 1).flatten(1), (0, 1), value=-math.inf).amax(1)


def compare(largest, *expected):
    """Compares with the maximum of what sequences have."""
    assert (largest.dtype, largest.shape, largest.requires_grad) == (F32, expected[0].shape, False)
    torch.testing.assert_close(largest.double(), torch.stack(expected).amax(0), rtol=1e-3, atol=1e-3)


TYPES = on("cpu", [F32, BF16], [(64, 64), (72, 41)]) + on("cuda", [BF16, F16], [(64, 64), (128, 128), (256, 256), (192, 128), (512, 512)])


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("device, dtype, head_dims", TYPES, ids=str)
def test_dense_batches(device, dtype, head_dims, mask):
    given = tensors(device, 150, 170, head_dims=head_dims, dtype=dtype)
    mask = {name: x(150, 170).to(device, I32) if callable(x) else x for name, x in mask.items()}
    sinks = torch.tensor(SINKS, device=device)
    for options in (mask, mask | dict(s_aux=sinks)):
        out, lse, largest = flash_attn_func(*given, return_attn_probs=True, return_max_logits=True, **options)
        compare(largest, by_definition(*given, **options))
        assert_equal([out, largest], flash_attn_func(*given, return_max_logits=True, **options))
        into = torch.full_like(out, math.nan)
        assert_equal([into, largest], flash_attn_func(*given, return_max_logits=True, out=into, **options))
        # Kernels may round otherwise if they keep the largest score.
        expected = flash_attn_func(*given, return_attn_probs=True, **options)
        torch.testing.assert_close((out, lse), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("split_keys", [None, 128, "fixed"])
@pytest.mark.parametrize("used", [None, *USED[:2]], ids=str)
def test_packed_sequences(device, used, split_keys):
    packed = Packed(device, used=used)
    options = dict(causal=True, split_keys=split_keys)
    for mask in (dict(), dict(intervals=packed.intervals(sink_and_window))) if split_keys is None else (dict(),):
        out, largest = packed.call(return_max_logits=True, **options, **mask)
        parts = [
            by_definition(packed.q[None, q], packed.k[None, k], packed.v[None, k], causal=True, **of_rows(mask, q))
            for q, k in packed.sequences()
        ]
        compare(largest, *parts)
        assert out.shape == packed.q.shape


@pytest.mark.parametrize("rows", [1, 3, [2, 0, 7, 1, 3, 1]], ids=str)
@pytest.mark.parametrize("layout", ["seqused", "16 padded indexed"])
@pytest.mark.parametrize("split_keys", [None, "fixed"])
def test_caches(device, layout, rows, split_keys):
    cached = Cached(device, layout=layout, rows=rows)
    given = dict(causal=True, split_keys=split_keys, return_max_logits=True)
    out, largest = cached.call(**given)
    compare(largest, *(by_definition(*x[:3], causal=True) for x in cached.sequences()))
    found = flash_attn_with_kvcache(cached.q, cached.k, cached.v, **cached.arguments(), **given, return_softmax_lse=True)
    assert_equal([out, largest], [found[0], found[4]])
    assert len(found) == 5 and found[2:4] == (None, None)


def test_caches_of_codes_and_latent_vectors(device):
    cached = Cached(device, layout=16, head_dims=(64, 512), heads=(4, 1))
    qv = normal(*cached.q.shape[:3], 512, seed=9, device=device)
    _, largest = cached.call(qv=qv, return_max_logits=True)
    compare(largest, *(by_definition(*x[:3], qv[x[3]]) for x in cached.sequences()))
    codes = Cached(device, layout="seqused")
    codes.k, codes.v = codes.k.to(E4M3), codes.v.to(E4M3)
    scales = dict(k_descale=torch.full((6, 2), 0.5, device=device))
    _, largest = codes.call(**scales, return_max_logits=True)
    k, v = (x.to(E4M3).to(BF16) for x in codes.own)
    codes.own = [k * 0.5, v]
    compare(largest, *(by_definition(*x[:3]) for x in codes.sequences()))


def test_new_rows_count(device):
    cached = Cached(device, keys=[40, 0, 9])
    k, v = (torch.full((3, 1, 2, 64), x, dtype=BF16, device=device) for x in (9.0, 1.0))
    keys, values = (x.nan_to_num() for x in (cached.k, cached.v))
    given = dict(cache_seqlens=cached.lengths, return_softmax_lse=True, return_max_logits=True)
    *_, largest = flash_attn_with_kvcache(cached.q, keys, values, k, v, **given)
    appended = [torch.cat([own[:, :n], k[:1]], 1) for (_, own, _, *_), n in zip(cached.sequences(), cached.keys)]
    compare(largest, *(by_definition(cached.q[i : i + 1], x, x) for i, x in enumerate(appended)))


@pytest.mark.parametrize("packs", [False, True])
def test_gradients_are_those_of_a_call_without(device, packs):
    packed = Packed(device, lengths=[(n, n) for n, _ in LENGTHS], behind=(0, 0))
    q, k, v = (x if packs else x[None] for x in (packed.q, packed.k, packed.v))
    sinks = torch.tensor(SINKS, device=device)
    lists = (packed.ends[0], packed.ends[0], None, None) if packs else ()
    function = flash_attn_varlen_func if packs else flash_attn_func
    gradients = []
    for options in (dict(), dict(return_max_logits=True)):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, sinks)]
        given = dict(s_aux=leaves[3], causal=True, deterministic=True, return_attn_probs=True)
        out, lse, *largest = function(*leaves[:3], *lists, **given, **options)
        assert not any(x.requires_grad for x in largest)
        gradients.append(torch.autograd.grad(out.sum() + lse.where(lse.isfinite(), 0).square().sum(), leaves))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("batch, rows, keys", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_no_rows_and_no_keys(device, batch, rows, keys):
    _, largest = flash_attn_func(*tensors(device, rows, keys, batch=batch), return_max_logits=True)
    assert torch.equal(largest.cpu(), torch.full((4,), -math.inf))


def test_codes_have_none(device):
    codes = [x.to(E4M3) for x in tensors(device)]
    with pytest.raises(ValueError, match="max_logits"):
        flash_attn_func(*codes, return_max_logits=True)
