"""FlashAttention-3's pair below its functions, `_flash_attn_forward` and `_flash_attn_backward`, as context parallelism
calls it. Needs torch.
"""

import inspect
import math
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import USED, Packed, assert_equal, normal
from reference import judge_gradients, standard

import fa3
from fa3 import flash_attn_func, flash_attn_interface, flash_attn_varlen_func, flash_attn_with_kvcache
from fa3.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

F32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
SCORES = dict(softmax_scale=0.5, softcap=20.0, sm_margin=2)


def dense(device, dtype=BF16):
    q = normal(2, 33, 4, 64, device=device, dtype=dtype)
    k, v = (normal(2, 40, 2, d, device=device, dtype=dtype, seed=d) for d in (64, 32))
    return q, k, v, normal(2, 33, 4, 32, device=device, dtype=dtype, seed=5)


def int32(numbers, device):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def nan_like(*tensors):
    return [torch.full_like(x, math.nan) for x in tensors]


def test_the_signatures_are_flash_attention_3s():
    needed = inspect.Parameter.empty
    forward = dict.fromkeys("qkv", needed) | dict.fromkeys(["k_new", "v_new", "qv", "out_", "cu_seqlens_q", "cu_seqlens_k"])
    forward |= dict.fromkeys(["cu_seqlens_k_new", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table"])
    forward |= dict.fromkeys(["kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale"])
    forward |= dict(k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1)
    forward |= dict(attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1)
    forward |= dict(pack_gqa=None, sm_margin=0)
    backward = dict.fromkeys(["dout", "q", "k", "v", "out", "softmax_lse"], needed)
    backward |= dict.fromkeys(["cu_seqlens_q", "cu_seqlens_k", "sequed_q", "sequed_k", "max_seqlen_q", "max_seqlen_k"])
    backward |= dict(dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1)
    backward |= dict(softcap=0.0, deterministic=False, sm_margin=0)
    # Their names in earlier versions.
    earlier = {_flash_attn_forward: dict(out=None, window_size=None), _flash_attn_backward: dict(causal=False, window_size=None, attention_chunk=0)}
    for function, expected in ((_flash_attn_forward, forward), (_flash_attn_backward, backward)):
        parameters = inspect.signature(function).parameters.values()
        assert [(p.name, p.default) for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD] == list(expected.items())
        assert {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY} == earlier[function]
        assert getattr(fa3, function.__name__) is function


def test_the_module_has_flash_attention_3s_names():
    names = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_qkvpacked_func"]
    names += ["flash_attn_with_kvcache", "flash_attn_combine", "get_scheduler_metadata"]
    names += ["_flash_attn_forward", "_flash_attn_backward"]
    assert sorted(flash_attn_interface.__all__) == sorted(names)
    # Those of the package, not others with their names.
    assert all(getattr(flash_attn_interface, name) is getattr(fa3, name) for name in names)


def test_a_step_of_decoding_by_the_module(device):
    """As a server calls it, with FlashAttention-3's names alone."""
    q, k, v, _ = dense(device)
    lengths = torch.tensor([40, 11], dtype=torch.int32, device=device)
    given = (2, 1, 40, 4, 2, 64, lengths)
    metadata = flash_attn_interface.get_scheduler_metadata(*given, qkv_dtype=BF16, headdim_v=32, causal=True, num_splits=0)
    options = dict(cache_seqlens=lengths, causal=True, scheduler_metadata=metadata, return_softmax_lse=True)
    out, lse, *_ = flash_attn_interface.flash_attn_with_kvcache(q[:, :1], k, v, **options)
    for i, keys in enumerate((40, 11)):
        expected, expected_lse = standard(q[i : i + 1, :1], k[i : i + 1, :keys], v[i : i + 1, :keys])
        assert (out[i] - expected[0]).abs().max() < 2**-6 * expected.abs().max()
        assert (lse[i] - expected_lse[0]).abs().max() < 2**-6


@pytest.mark.parametrize(
    "window", [dict(), dict(causal=True), dict(window_size_left=9, window_size_right=3, attention_chunk=7)], ids=str
)
def test_dense_batches(device, window):
    q, k, v, dout = dense(device)
    options = dict(attention_chunk=window.get("attention_chunk", 0), causal=window.get("causal", False), window_size=(window.get("window_size_left", -1), window.get("window_size_right", -1)))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = flash_attn_func(*leaves, **options, **SCORES, deterministic=True, return_attn_probs=True)
    gradients = torch.autograd.grad(expected, leaves, dout)
    out, lse, out_accum, lse_accum = _flash_attn_forward(q, k, v, max_seqlen_q=33, max_seqlen_k=40, **window, **SCORES)
    assert_equal((out, lse), (expected, expected_lse))
    assert out_accum is None and lse_accum is None
    dq, dk, dv = nan_like(q, k, v)
    window = {"is_causal" if name == "causal" else name: value for name, value in window.items()}
    given = dict(dq=dq, dk=dk, dv=dv, **window, **SCORES, deterministic=True)
    results = _flash_attn_backward(dout, q, k, v, out, lse, max_seqlen_q=33, max_seqlen_k=40, **given)
    assert results[0] is dq and results[1] is dk and results[2] is dv and results[3] is None
    assert_equal(results[:3], gradients)
    # New tensors where there are none.
    assert_equal(_flash_attn_backward(dout, q, k, v, out, lse, **given | dict(dq=None, dk=None, dv=None))[:3], gradients)


@pytest.mark.parametrize("used", [None, USED[0]], ids=["all", "in part"])
def test_packed_sequences(device, used):
    packed = Packed(device, used=used)
    dout, dlse = packed.given(of_lse=False)
    tensors = packed.q, packed.k, packed.v
    expected = packed.call((130, 257), causal=True, return_attn_probs=True, **SCORES)
    gradients = packed.gradients(dout, hints=(130, 257), causal=True, deterministic=True, **SCORES)
    used_q, used_k = packed.used or (None, None)
    lists = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), packed.ends), max_seqlen_q=130, max_seqlen_k=257)
    place = torch.full_like(expected[0], math.nan)
    for to in (dict(), dict(out_=place), dict(out=place)):
        out, lse, *_ = _flash_attn_forward(*tensors, **lists, seqused_q=used_q, seqused_k=used_k, causal=True, **SCORES, **to)
        assert_equal((out, lse), expected)
        assert not to or out is place
    outputs = nan_like(*tensors)
    given = dict(zip(("dq", "dk", "dv"), outputs), is_causal=True, deterministic=True, **SCORES)
    _flash_attn_backward(dout, *tensors, out, lse, **lists, sequed_q=used_q, sequed_k=used_k, **given)
    assert_equal(outputs, gradients)


def test_gradients_of_packed_sequences_are_parts_of_one_tensor(device):
    packed = Packed(device)
    # As many rows of Q as of K and V, of as many heads.
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


def test_calls_of_earlier_versions(device):
    """Tensors in their places, the rest by names that were others then."""
    packed = Packed(device)
    dout, _ = packed.given(of_lse=False)
    tensors = packed.q, packed.k, packed.v
    lists = (*packed.ends, None, None, None, 130, 257)
    out, lse, *rest = _flash_attn_forward(
        *tensors, *[None] * 4, *lists, *[None] * 9, softmax_scale=0.5, causal=True, window_size=(9, 0)
    )
    expected = packed.call((130, 257), softmax_scale=0.5, causal=True, window_size=(9, 0), return_attn_probs=True)
    assert_equal((out, lse), expected)
    outputs = nan_like(*tensors)
    options = dict(softmax_scale=0.5, causal=True, window_size=(9, 0), deterministic=True)
    lists = (*packed.ends, None, None, 130, 257)
    dq, dk, dv, _ = _flash_attn_backward(dout, *tensors, out, lse, *lists, *outputs, **options)
    assert_equal((dq, dk, dv), packed.gradients(dout, hints=(130, 257), **options))


def test_keys_in_parts_are_as_all_keys_at_once(device):
    """Ring attention: parts of the keys one after the other, merged by LSE; gradients by O and LSE of all keys."""
    dtype = F32 if device == "cpu" else BF16
    q, k, v, dout = dense(device, dtype)
    parts = [(k[:, rows], v[:, rows]) for rows in (slice(0, 16), slice(16, 40))]
    results = [_flash_attn_forward(q, *part)[:2] for part in parts]
    lse = torch.logsumexp(torch.stack([lse for _, lse in results]), 0)
    out = sum(o.float() * (of_part - lse).exp().transpose(1, 2)[..., None] for o, of_part in results).to(dtype)
    dq, dk, dv = torch.zeros_like(q, dtype=F32), *nan_like(k, v)
    buffer = torch.empty_like(q)
    for rows, part in zip((slice(0, 16), slice(16, 40)), parts, strict=True):
        # Buffers are slices of larger ones.
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


def test_a_cache_is_that_of_flash_attn_with_kvcache(device):
    """Megatron-LM's call, with all arguments by name."""
    rows, _, _, _ = dense(device)
    lengths, ends = int32([40, 11], device), int32([0, 3, 5], device)
    table = int32([[2, 0, 1], [3, 4, 5]], device)
    q, pages = rows.flatten(0, 1)[:5], normal(6, 16, 2, 64, device=device)
    names = inspect.signature(_flash_attn_forward).parameters
    by_name = {name: x.default for name, x in names.items() if x.kind == x.POSITIONAL_OR_KEYWORD and x.default is not x.empty}
    by_name |= dict(cu_seqlens_q=ends, seqused_k=lengths, max_seqlen_q=3, max_seqlen_k=48, page_table=table, causal=True)
    by_name |= dict(scheduler_metadata=torch.zeros(3), pack_gqa=True, num_splits=3)
    out, lse, *_ = _flash_attn_forward(q=q, k=pages, v=pages, **by_name)
    options = dict(page_table=table, cu_seqlens_q=ends, max_seqlen_q=3, causal=True, return_softmax_lse=True)
    expected = flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, **options, num_splits=3)
    assert_equal((out, lse), expected[:2])


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
    # Nobody looks at positions without a rotation.
    _flash_attn_forward(q, *caches[1], **new | dict(rotary_cos=None, rotary_sin=None), seqused_k=lengths, seqlens_rotary=lengths)


@pytest.mark.parametrize("of_q", [True, False], ids=["packed q", "dense q"])
@pytest.mark.parametrize("of_k", [True, False], ids=["packed k", "dense k"])
def test_tensors_with_and_without_lengths(device, of_q, of_k):
    """Each of Q and K is packed or a dense batch. Rows in use are as of packed ones."""
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


def test_gradients_of_lengths_lie_one_after_the_other():
    q, k, v, dout = dense("cpu")
    out, lse, *_ = _flash_attn_forward(q, k, v)
    wide = torch.empty(2, 35, 4, 64, dtype=BF16)[:, :33]
    sentence = "dq has stride 8960 in batch, expected 8448: sequences one after the other, as there are lengths of them"
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        _flash_attn_backward(dout, q, k, v, out, lse, sequed_q=int32([5, 6], "cpu"), dq=wide)


def test_bad_arguments():
    q, k, v, dout = dense("cpu")
    out, lse, *_ = _flash_attn_forward(q, k, v)
    ends = torch.tensor([0, 33], dtype=torch.int32)

    def forward(**change):
        _flash_attn_forward(**dict(q=q, k=k, v=v) | change)

    def backward(**change):
        _flash_attn_backward(**dict(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse) | change)

    for function, change, error, sentence in [
        (forward, dict(out=out, out_=out), ValueError, "there are out and out_, expected one of them"),
        (forward, dict(rotary_interleaved="no"), TypeError, "rotary_interleaved is 'no', expected True or False"),
        (forward, dict(max_seqlen_q="1"), TypeError, "max_seqlen_q is '1', expected an integer"),
        (forward, dict(cu_seqlens_q=ends), ValueError, "q has 4 dimensions, expected 3: (total, heads, head_dim), as there is cu_seqlens of it"),
        (forward, dict(cu_seqlens_k=ends), ValueError, "k has 4 dimensions, expected 3: (total, heads, head_dim), as there is cu_seqlens of it"),
        (forward, dict(cu_seqlens_k=ends, page_table=ends), ValueError, "there are cu_seqlens_k and page_table, which is of a cache"),
        (forward, dict(k=None), TypeError, "k is NoneType, expected torch.Tensor"),
        (backward, dict(sequed_q=lse), ValueError, "seqused_q is torch.float32"),
        (backward, dict(softmax_lse=None), TypeError, "softmax_lse is NoneType, expected torch.Tensor"),
        (backward, dict(dq=[1]), TypeError, "dq is list, expected torch.Tensor"),
        (backward, dict(is_causal=2.0), TypeError, "is_causal is 2.0, expected True or False"),
        (backward, dict(dk=torch.empty_like(q)), ValueError, "dk is torch.bfloat16 (2, 33, 4, 64), expected torch.bfloat16 (2, 40, 2, 64)"),
        (backward, dict(dk=k), ValueError, "output dk [0x"),
        (backward, dict(out=out.half()), ValueError, "o is torch.float16 (2, 33, 4, 32), expected torch.bfloat16"),
        *[
            (function, dict(window_size=(1, 2), window_size_left=3), ValueError, "window_size is (1, 2), and its sides are 3 and -1")
            for function in (forward, backward)
        ],
        *[(function, dict(window_size_left=(1, 2)), TypeError, "the left side of window_size is a tuple") for function in (forward, backward)],
        *[(function, dict(softcap=-1.0), ValueError, "soft cap -1 is outside") for function in (forward, backward)],
    ]:
        with pytest.raises(error, match=f"^{re.escape(sentence)}"):
            function(**change)


def test_codes(device):
    x = normal(2, 33, 4, 64, device=device).to(E4M3)
    scales = {f"{name}_descale": torch.rand(2, 4, device=device) for name in "qkv"}
    out, lse, *_ = _flash_attn_forward(x, x, x, **scales, causal=True)
    assert_equal((out, lse), flash_attn_func(x, x, x, **scales, causal=True, return_attn_probs=True))


def test_the_module_has_flash_attention_3s_functions():
    for name in ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func"):
        assert getattr(flash_attn_interface, name) is getattr(fa3, name)
