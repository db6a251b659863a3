"""The interface of flash-attn 2, compared with this package's own functions. Needs torch, but no GPU."""

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import assert_equal

import fa3
from fa3 import flash_attn
from fa3.flash_attn import bert_padding

ENDS = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
LENGTHS = torch.tensor([3, 9], dtype=torch.int32)


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_results_by_place_are_those_by_name():
    """Functions return O alone, or O, LSE and an empty tensor. The function for a cache returns O and LSE."""
    q, k, v = randn(2, 12, 4, 16), randn(2, 12, 2, 16), randn(2, 12, 2, 16) + 1
    given = 0.0, 0.3, True, (7, 0), 5.0, None, True
    options = dict(softmax_scale=0.3, causal=True, window_size=(7, 0), softcap=5.0)
    expected = fa3.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    *found, empty = flash_attn.flash_attn_func(q, k, v, *given, True)
    assert_equal(found, expected)
    assert empty.numel() == 0 and empty.dtype == q.dtype
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, *given), expected[0])
    expected = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=LENGTHS, **options, return_softmax_lse=True)
    by_place = None, None, None, None, LENGTHS, None, None, None, 0.3, True, (7, 0), 5.0, True, None, 0
    assert_equal(flash_attn.flash_attn_with_kvcache(q, k, v, *by_place, True), expected[:2])
    assert torch.equal(flash_attn.flash_attn_with_kvcache(q, k, v, *by_place), expected[0])


def test_new_rows_of_a_cache():
    q, cache, new = (randn(2, rows, heads, 16).bfloat16() for rows, heads in ((1, 4), (16, 2), (1, 2)))
    caches = [[x.clone() for x in (cache, cache + 1)] for _ in range(2)]
    cos, sin = randn(16, 8).bfloat16(), randn(16, 8).bfloat16()
    expected = fa3.flash_attn_with_kvcache(q, *caches[0], new, new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=LENGTHS)
    assert torch.equal(flash_attn.flash_attn_with_kvcache(q, *caches[1], new, new, cos, sin, LENGTHS), expected)
    assert_equal(*caches)


@pytest.mark.parametrize("window", [dict(causal=True), dict(window_size=(5, 0)), dict(window_size=(5, 2)), {}], ids=str)
def test_slopes_of_alibi(window):
    q, k, v = (randn(2, rows, heads, 16) for rows, heads in ((5, 4), (12, 2), (12, 2)))
    slopes = randn(2, 4).abs()
    for given in (slopes, slopes[0]):
        at = given.expand(2, 4)
        options = window | dict(score=lambda s, b, h, i, j: s - at[b, h] * (i - j).abs())
        expected = fa3.flash_attn_func(q, k, v, **options)
        found = flash_attn.flash_attn_func(q, k, v, **window, alibi_slopes=given)
        torch.testing.assert_close(found, expected)
        found = flash_attn.flash_attn_with_kvcache(q, k, v, **window, alibi_slopes=given)
        torch.testing.assert_close(found, expected)
    rows, lists = [x.flatten(0, 1) for x in (q, k, v)], [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 12)]
    found = flash_attn.flash_attn_varlen_func(*rows, *lists, 5, 12, **window, alibi_slopes=slopes[0])
    torch.testing.assert_close(found, expected.flatten(0, 1))


def test_what_there_is_not_is_refused():
    q = randn(2, 12, 4, 16)
    with pytest.raises(NotImplementedError, match="^dropout_p is 0.1, expected 0: there is no dropout of attention$"):
        flash_attn.flash_attn_func(q, q, q, 0.1)
    with pytest.raises(ValueError, match=r"^kv is \(2, 12, 4, 16\), expected \(batch, seqlen, 2, heads, head_dim\)$"):
        flash_attn.flash_attn_kvpacked_func(q, q)
    with pytest.raises(ValueError, match=r"^qkv is \(12, 4, 16\), expected \(total, 3, heads, head_dim\)$"):
        flash_attn.flash_attn_varlen_qkvpacked_func(q[0], ENDS, 7)


def test_padding_is_taken_out_and_put_back():
    x, mask = randn(3, 5, 2, 4).requires_grad_(), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    rows, indices, ends, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()]) and torch.equal(x.flatten(0, 1)[indices], rows)
    assert (ends.tolist(), longest, used.tolist()) == ([0, 3, 5, 10], 5, [3, 2, 5])
    assert ends.dtype == used.dtype == torch.int32
    back = bert_padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(back, x * mask[..., None, None])
    [gradient] = torch.autograd.grad(back.sum(), x)
    assert torch.equal(gradient, mask[..., None, None].expand_as(x).float())
    # Rows that are kept, but not in use.
    unused = torch.tensor([[0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0] * 5])
    rows, _, ends, longest, used = bert_padding.unpad_input(x, mask.bool(), unused.bool())
    assert torch.equal(rows, x[(mask + unused).bool()])
    assert (ends.tolist(), longest, used.tolist()) == ([0, 4, 7, 12], 5, [3, 2, 5])


def test_sequences_of_a_row_are_told_apart():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = randn(3, 6, 4)
    rows, indices, ends, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert (ends.tolist(), longest, len(indices)) == ([0, 2, 5, 8, 10, 16], 6, 16)
