"""Arguments that change no result are accepted wherever FlashAttention-3 accepts them. Needs torch; what needs a GPU is
skipped without one.
"""

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import assert_equal, normal
from torch._subclasses.fake_tensor import FakeTensorMode

from fa3 import (
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flash_mla,
    quantize,
    quantize_channels,
)
from fa3.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

BF16, I32, E4M3 = torch.bfloat16, torch.int32, torch.float8_e4m3fn


class Calls:
    """The functions that compute attention, each called with the same numbers."""

    def __init__(self, device):
        self.q, self.k, self.v = (normal(2, 20, heads, 64, device=device, seed=heads) for heads in (4, 2, 2))
        self.ends, self.lengths = (torch.tensor(x, dtype=I32, device=device) for x in ([0, 20, 40], [20, 11]))

    def dense(self, **options):
        return flash_attn_func(self.q, self.k, self.v, **options)

    def packed(self, ends=None, **options):
        rows = (x.flatten(0, 1) for x in (self.q, self.k, self.v))
        ends = self.ends if ends is None else ends
        return flash_attn_varlen_func(*rows, ends, ends, 20, 20, **options)

    def cached(self, **options):
        return flash_attn_with_kvcache(self.q, self.k, self.v, **dict(cache_seqlens=self.lengths) | options)

    def below(self, window_size=(-1, -1), **options):
        left, right = window_size or (None, None)
        return _flash_attn_forward(self.q, self.k, self.v, **options, window_size_left=left, window_size_right=right)[0]

    def all(self):
        return self.dense, self.packed, self.cached, self.below


@pytest.mark.parametrize(
    "hint",
    [dict(num_splits=n) for n in (-1, 0, 1, 2, 16, 2**62)]
    + [dict(pack_gqa=pack) for pack in (None, False, True)]
    + [dict(sm_margin=3), dict(softcap=None), dict(attention_chunk=None)]
    + [dict(window_size=window) for window in (None, [None, None], (-2, -2), (2**40, 2**70), (-(2**70), None))],
    ids=str,
)
def test_what_changes_no_result_is_taken(device, hint):
    calls = Calls(device)
    for call in calls.all():
        torch.testing.assert_close(call(**hint), call(), rtol=0.01, atol=0.01)


def test_one_side_of_a_window_may_be_unbounded(device):
    calls = Calls(device)
    for call in calls.all():
        for window in ([5, None], (5, -7), (5, 2**40)):
            assert torch.equal(call(window_size=window), call(window_size=(5, -1)))


@pytest.mark.parametrize("hint", ["1", 1.5, (1,)], ids=str)
def test_hints_have_types(hint):
    for call in Calls("cpu").all():
        for name in ("num_splits", "pack_gqa"):
            with pytest.raises(TypeError, match=f"^{name} is "):
                call(**{name: hint})


def test_descales_beside_16_bits_are_not_looked_at(device):
    calls = Calls(device)
    scales = {f"{name}_descale": torch.full((3,), 7.0, device=device, requires_grad=True) for name in "qkv"}
    for call in calls.all():
        assert torch.equal(call(**scales), call())
        with pytest.raises(TypeError, match="^k_descale is float, expected torch.Tensor$"):
            call(k_descale=1.0)
    # With a cache of codes and Q in 16 bits, only q_descale is ignored.
    codes = dict(k_cache=calls.k.to(E4M3), v_cache=calls.v.to(E4M3))
    halves = torch.full((2, 2), 0.5, device=device)
    given = dict(q=calls.q, **codes, cache_seqlens=calls.lengths, k_descale=halves, v_descale=halves)
    assert torch.equal(flash_attn_with_kvcache(**given, q_descale=scales["q_descale"]), flash_attn_with_kvcache(**given))


def test_any_scheduler_metadata_of_a_cache(device):
    calls = Calls(device)
    pages = dict(page_table=torch.tensor([[0], [1]], dtype=I32, device=device), seqused_k=calls.lengths)
    rows = calls.q.flatten(0, 1)
    for given in (torch.zeros(3), torch.zeros(2, 2, dtype=I32), "any"):
        assert torch.equal(calls.cached(scheduler_metadata=given), calls.cached())
        assert torch.equal(calls.below(scheduler_metadata=given), calls.below())
        flash_attn_varlen_func(rows, calls.k, calls.v, calls.ends, None, 20, 20, **pages, scheduler_metadata=given)


def test_positions_without_a_rotation_are_not_looked_at(device):
    calls = Calls(device)
    new = dict(k=calls.q[:, :1, :2], v=calls.q[:, :1, :2], cache_seqlens=torch.tensor([3, 4], dtype=I32, device=device))
    for given in (dict(), new):
        assert torch.equal(calls.cached(**given, rotary_seqlens=calls.lengths), calls.cached(**given))


def test_lists_have_any_strides(device):
    calls = Calls(device)
    apart = torch.stack([calls.ends, calls.ends], 1)[:, 0]
    lengths = torch.stack([calls.lengths, calls.lengths], 1)[:, 0]
    assert not apart.is_contiguous() and not lengths.is_contiguous()
    assert torch.equal(calls.packed(apart), calls.packed())
    for name in ("seqused_q", "seqused_k"):
        assert torch.equal(calls.packed(**{name: lengths}), calls.packed(**{name: calls.lengths}))
    assert torch.equal(calls.cached(cache_seqlens=lengths), calls.cached())
    calls.q.requires_grad_()
    gradients = [torch.autograd.grad(calls.packed(ends, seqused_k=used).sum(), calls.q)[0] for ends, used in ((apart, lengths), (calls.ends, calls.lengths))]
    assert_equal(*([x] for x in gradients))


def with_gaps(x):
    """A tensor with the numbers of x, whose last stride is not 1."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def last_dimension_has_gaps(q, k, v, ends, lengths):
    """Calls that apply a function to their tensors, and calls that apply it to lists of packed sequences."""
    codes = [x.to(E4M3) for x in (q, k, v)]
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    return [
        lambda f: flash_attn_func(f(q), f(k), f(v)),
        lambda f: flash_attn_func(*map(f, codes)),
        lambda f: flash_attn_varlen_func(*map(f, rows), ends, ends, 20, 20),
        lambda f: flash_attn_with_kvcache(f(q), f(k), f(v), cache_seqlens=lengths),
        lambda f: flash_attn_with_kvcache(f(q), k, v, f(q[:, :1, :2]), f(q[:, :1, 2:]), cache_seqlens=torch.zeros_like(lengths)),
        lambda f: flash_attn_fp8_func(f(q), f(k), f(v)),
        lambda f: quantize(f(q))[0].float(),
        lambda f: quantize_channels(f(q))[0].float(),
        lambda f: torch.cat(_flash_attn_backward(q, f(q), f(k), f(v), q, q.new_ones(2, 4, 20, dtype=torch.float32), deterministic=True)[:3], 2),
    ]


def test_a_last_dimension_with_gaps_is_taken(device):
    """On a GPU such tensors are copied, as FlashAttention-3 does."""
    calls = Calls(device)
    for call in last_dimension_has_gaps(calls.q, calls.k, calls.v, calls.ends, calls.lengths):
        assert torch.equal(call(with_gaps), call(lambda x: x))


def test_fake_tensors_on_a_gpu_too():
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 20, heads, 64, dtype=BF16, device="cuda") for heads in (4, 2, 2))
        ends, lengths = (torch.empty(count, dtype=I32, device="cuda") for count in (3, 2))
        for call in last_dimension_has_gaps(q, k, v, ends, lengths):
            assert call(with_gaps).shape == call(lambda x: x).shape
        with pytest.raises(ValueError, match="k_cache has stride 2 in head_dim, expected 1"):
            flash_attn_with_kvcache(q, with_gaps(k), v, k, v, cache_seqlens=lengths)


def test_metadata_of_flash_mla_can_be_copied():
    lengths = torch.tensor([3, 4], dtype=I32)
    for given, named in (((lengths, 128, 1), {}), ((), dict(cache_seqlens=lengths, num_heads_k=1))):
        metadata, splits = flash_mla.get_mla_metadata(*given, **named)
        assert (metadata.shape, splits.shape) == ((0, 8), (3,))
        assert metadata.dtype == splits.dtype == I32
        torch.ones(132, 8, dtype=I32)[: metadata.shape[0]].copy_(metadata)
    metadata, splits = flash_mla.get_mla_metadata()
    assert isinstance(metadata, flash_mla.FlashMLASchedMeta) and splits is None
