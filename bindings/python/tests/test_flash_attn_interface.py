"""FlashAttention-3's low-level functions `_flash_attn_forward` and `_flash_attn_backward`, which context parallelism
calls. Needs torch.
"""

import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import Packed, assert_equal, normal
from reference import judge_gradients, standard

import fa3
from fa3 import flash_attn_func, flash_attn_interface, flash_attn_varlen_func, flash_attn_with_kvcache
from fa3.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

F32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn


def dense(device, dtype=BF16):
    q = normal(2, 33, 4, 64, device=device, dtype=dtype)
    k, v = (normal(2, 40, 2, d, device=device, dtype=dtype, seed=d) for d in (64, 32))
    return q, k, v, normal(2, 33, 4, 32, device=device, dtype=dtype, seed=5)


def int32(numbers, device):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def nan_like(*tensors):
    return [torch.full_like(x, math.nan) for x in tensors]


def test_the_module_has_flash_attention_3s_names():
    names = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_qkvpacked_func"]
    names += ["flash_attn_with_kvcache", "flash_attn_combine", "get_scheduler_metadata"]
    names += ["_flash_attn_forward", "_flash_attn_backward"]
    assert sorted(flash_attn_interface.__all__) == sorted(names)
    # These are the package's own functions, and not others with their names.
    assert all(getattr(flash_attn_interface, name) is getattr(fa3, name) for name in names)


def test_gradients_of_packed_sequences_are_parts_of_one_tensor(device):
    packed = Packed(device)
    # Q, K and V have equal numbers of rows and of heads.
    q = k = v = packed.k
    ends = packed.ends[1]
    dout = torch.randn(*k.shape, generator=torch.Generator().manual_seed(3)).to(k)
    lists = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=257, max_seqlen_k=257)
    out, lse, *_ = _flash_attn_forward(q, k, v, **lists, causal=True)
    expected = _flash_attn_backward(dout, q, k, v, out, lse, **lists, is_causal=True, deterministic=True)[:3]
    qkv = torch.full((k.shape[0], 3, *k.shape[1:]), math.nan, dtype=k.dtype, device=device)
    parts = dict(zip(("dq", "dk", "dv"), qkv.unbind(1), strict=True))
    _flash_attn_backward(dout, q, k, v, out, lse, **lists, **parts, is_causal=True, deterministic=True)
    for index, right in enumerate(expected):
        assert torch.equal(qkv[:, index], right)


def test_keys_in_parts_are_as_all_keys_at_once(device):
    """Ring attention merges parts of the keys by LSE. Their gradients are computed from the O and LSE of all keys."""
    dtype = F32 if device == "cpu" else BF16
    q, k, v, dout = dense(device, dtype)
    parts = [(k[:, rows], v[:, rows]) for rows in (slice(0, 16), slice(16, 40))]
    results = [_flash_attn_forward(q, *part)[:2] for part in parts]
    lse = torch.logsumexp(torch.stack([lse for _, lse in results]), 0)
    out = sum(o.float() * (of_part - lse).exp().transpose(1, 2)[..., None] for o, of_part in results).to(dtype)
    dq, dk, dv = torch.zeros_like(q, dtype=F32), *nan_like(k, v)
    buffer = torch.empty_like(q)
    for rows, part in zip((slice(0, 16), slice(16, 40)), parts, strict=True):
        # dK and dV are slices of larger tensors.
        _flash_attn_backward(dout, q, *part, out, lse, dq=buffer, dk=dk[:, rows], dv=dv[:, rows])
        dq += buffer
    expected, expected_lse = standard(q, k, v)
    tolerance = dict(rtol=1e-4, atol=1e-5) if device == "cpu" else dict(rtol=0.02, atol=0.02)
    torch.testing.assert_close(out.double(), expected, **tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, **tolerance)
    judge_gradients((dq.to(dtype), dk, dv), q, k, v, dout)


def test_compiled_calls_are_those_of_plain_ones(device):
    def step(dout, q, k, v, ends_q, ends_k):
        lists = dict(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, max_seqlen_q=130, max_seqlen_k=257)
        out, lse, *_ = _flash_attn_forward(q, k, v, causal=True, **lists)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        _flash_attn_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, is_causal=True, deterministic=True, **lists)
        return out, lse, dq, dk, dv

    packed = Packed(device)
    given = packed.given(of_lse=False)[0], packed.q, packed.k, packed.v, *packed.ends
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert_equal(compiled(*given), step(*given))


def test_new_rows_of_a_cache(device):
    q, k, v, _ = dense(device)
    q, k_new, v_new = q[:, :2], *(normal(2, 2, 2, d, device=device, seed=5) for d in (64, 32))
    cos, sin = (normal(64, 16, device=device, dtype=F32, seed=seed) for seed in (6, 7))
    lists = dict(cache_batch_idx=int32([1, 0], device), cache_leftpad=int32([2, 0], device), rotary_seqlens=int32([3, 4], device))
    caches = [(k.clone(), v.clone()) for _ in "ab"]
    lengths = int32([9, 30], device)
    expected = flash_attn_with_kvcache(q, *caches[0], k_new, v_new, None, cos, sin, lengths, **lists, return_softmax_lse=True)
    named = dict(zip(("kv_batch_idx", "leftpad_k", "seqlens_rotary"), lists.values()))
    new = dict(k_new=k_new, v_new=v_new, rotary_cos=cos, rotary_sin=sin)
    results = _flash_attn_forward(q, *caches[1], **new, seqused_k=lengths, **named)
    assert_equal(results[:2], expected[:2])
    assert_equal(caches[1], caches[0])
    # seqlens_rotary is ignored without a rotation.
    _flash_attn_forward(q, *caches[1], **new | dict(rotary_cos=None, rotary_sin=None), seqused_k=lengths, seqlens_rotary=lengths)


@pytest.mark.parametrize("of_q", [True, False], ids=["packed q", "dense q"])
@pytest.mark.parametrize("of_k", [True, False], ids=["packed k", "dense k"])
def test_tensors_with_and_without_lengths(device, of_q, of_k):
    """Q and K may each be packed or a dense batch. Rows in use have the results that they have when both are packed."""
    q, k, v, dout = dense(device)
    flat = [x.flatten(0, 1) for x in (q, k, v, dout)]
    ends = [int32([0, n, 2 * n], device) for n in (33, 40)]
    used = dict(seqused_q=int32([20, 33], device), seqused_k=int32([40, 11], device))
    leaves = [x.detach().requires_grad_() for x in flat[:3]]
    expected, expected_lse = flash_attn_varlen_func(*leaves, *ends, 33, 40, **used, causal=True, return_attn_probs=True)
    gradients = torch.autograd.grad(expected, leaves, flat[3])
    q, dout = (flat[0], flat[3]) if of_q else (q, dout)
    k, v = flat[1:3] if of_k else (k, v)
    lists = ends[0] if of_q else None, ends[1] if of_k else None
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_varlen_func(*leaves, *lists, 33, 40, **used, causal=True, return_attn_probs=True)
    results = torch.autograd.grad(out, leaves, dout)
    lse_of = expected_lse if of_q else expected_lse.unflatten(1, (2, 33)).transpose(0, 1)
    assert_equal((out, lse, *results), (expected.view_as(out), lse_of, *(x.view_as(y) for x, y in zip(gradients, results))))
    place = torch.full_like(out, math.nan)
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), lists))
    forward = _flash_attn_forward(q, k, v, **named, **used, causal=True, out_=place)
    assert forward[0] is place
    torch.testing.assert_close(place, out, rtol=0.02, atol=0.02)
    assert forward[1].shape == lse.shape
    used = {name.replace("used", "ued"): x for name, x in used.items()}
    outputs = nan_like(q, k, v)
    given = dict(**named, **used, is_causal=True, deterministic=True)
    new = _flash_attn_backward(dout, q, k, v, out, lse, **given)
    _flash_attn_backward(dout, q, k, v, out, lse, **given, **dict(zip(("dq", "dk", "dv"), outputs)))
    assert_equal(outputs, results)
    assert_equal(new[:3], results)


@pytest.mark.parametrize("dynamic", [None, True], ids=str)
def test_compiled_calls_with_and_without_lengths(dynamic):
    def step(q, k, ends, used):
        rows = flash_attn_varlen_func(q.flatten(0, 1), k, k, ends, None, 33, 40, seqused_k=used)
        out, lse, *_ = _flash_attn_forward(q, k, k, seqused_q=used)
        return rows, out, *_flash_attn_backward(out, q, k, k, out, lse, sequed_k=used)[:3]

    q, k, _, _ = dense("cpu")
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (33, 20):
        given = q[:, :rows], k, int32([0, rows, 2 * rows], "cpu"), int32([3, rows], "cpu")
        assert_equal(compiled(*given), step(*given))


def test_codes(device):
    x = normal(2, 33, 4, 64, device=device).to(E4M3)
    scales = {f"{name}_descale": torch.rand(2, 4, device=device) for name in "qkv"}
    out, lse, *_ = _flash_attn_forward(x, x, x, **scales, causal=True)
    assert_equal((out, lse), flash_attn_func(x, x, x, **scales, causal=True, return_attn_probs=True))
