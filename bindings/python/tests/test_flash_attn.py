"""The interface of flash-attn 2, beside this package's own functions. Needs torch, but no GPU."""

import inspect

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

import fa3
from fa3 import flash_attn
from fa3.flash_attn import bert_padding

SCORES = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
LISTS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
# flash-attn 2.8's arguments, in their order.
ARGUMENTS = dict(
    flash_attn_func=f"q k v {SCORES}",
    flash_attn_kvpacked_func=f"q kv {SCORES}",
    flash_attn_qkvpacked_func=f"qkv {SCORES}",
    flash_attn_varlen_func=f"q k v {LISTS} {SCORES} block_table",
    flash_attn_varlen_kvpacked_func=f"q kv {LISTS} {SCORES}",
    flash_attn_varlen_qkvpacked_func=f"qkv cu_seqlens max_seqlen {SCORES}",
    flash_attn_with_kvcache="q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits "
    "return_softmax_lse",
)
GIVEN = 0.0, 0.3, True, (7, 0), 5.0, None, True
OPTIONS = dict(softmax_scale=0.3, causal=True, window_size=(7, 0), softcap=5.0)
ENDS = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
LENGTHS = torch.tensor([3, 9], dtype=torch.int32)


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def same(found, expected, q):
    """Three results, or with a cache two."""
    assert len(found) == (2 if q is None else 3)
    assert all(torch.equal(x, y) for x, y in zip(found, expected))
    assert q is None or (found[2].numel() == 0 and found[2].dtype == q.dtype)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_those_of_flash_attn(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == ARGUMENTS[name].split()
    defaults = dict(dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0)
    defaults |= dict(deterministic=False, return_attn_probs=False, rotary_interleaved=True, num_splits=0)
    for name, default in defaults.items():
        assert name not in parameters or parameters[name].default == default


def test_dense():
    q, k, v = randn(2, 12, 4, 16), randn(2, 12, 2, 16), randn(2, 12, 2, 16) + 1
    expected = fa3.flash_attn_func(q, k, v, **OPTIONS, return_attn_probs=True)
    same(flash_attn.flash_attn_func(q, k, v, *GIVEN, True), expected, q)
    same(flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), *GIVEN, True), expected, q)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, *GIVEN), expected[0])
    qkv = torch.stack([q, q + 1, q - 1], 2).requires_grad_()
    expected = fa3.flash_attn_func(*qkv.unbind(2), **OPTIONS, return_attn_probs=True)
    found = flash_attn.flash_attn_qkvpacked_func(qkv, *GIVEN, True)
    same(found, expected, q)
    assert torch.equal(*(torch.autograd.grad(x[0].sum(), qkv)[0] for x in (found, expected)))


def test_varlen():
    q, k, v = randn(12, 4, 16), randn(12, 2, 16), randn(12, 2, 16) + 1
    lists = ENDS, ENDS, 7, 7
    expected = fa3.flash_attn_varlen_func(q, k, v, *lists, **OPTIONS, return_attn_probs=True)
    same(flash_attn.flash_attn_varlen_func(q, k, v, *lists, *GIVEN, True), expected, q)
    same(flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *lists, *GIVEN, True), expected, q)
    qkv = torch.stack([q, q + 1, q - 1], 1)
    expected = fa3.flash_attn_varlen_func(*qkv.unbind(1), *lists, **OPTIONS, return_attn_probs=True)
    same(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, ENDS, 7, *GIVEN, True), expected, q)


def test_varlen_over_pages():
    q, pages, table = randn(12, 4, 16), randn(6, 4, 2, 16), torch.tensor([[3, 1], [0, 2], [5, 4]], dtype=torch.int32)
    ends = torch.tensor([0, 7, 12, 20], dtype=torch.int32)
    keys = [pages[row].flatten(0, 1)[:count] for row, count in zip(table.long(), (7, 5, 8))]
    k = torch.cat(keys)
    expected = fa3.flash_attn_varlen_func(q, k, k + 1, ENDS, ends, 7, 8, **OPTIONS, return_attn_probs=True)
    lists = ENDS, ends, 7, 8
    same(flash_attn.flash_attn_varlen_func(q, pages, pages + 1, *lists, *GIVEN, True, table), expected, q)


def test_a_cache():
    q, cache, new = randn(2, 1, 4, 16), randn(2, 16, 2, 16), randn(2, 1, 2, 16).bfloat16()
    expected = fa3.flash_attn_with_kvcache(q, cache, cache + 1, cache_seqlens=LENGTHS, **OPTIONS, return_softmax_lse=True)
    by_place = None, None, None, None, LENGTHS, None, None, None, 0.3, True, (7, 0), 5.0, True, None, 0
    same(flash_attn.flash_attn_with_kvcache(q, cache, cache + 1, *by_place, True), expected[:2], None)
    assert torch.equal(flash_attn.flash_attn_with_kvcache(q, cache, cache + 1, *by_place), expected[0])
    caches = [[x.bfloat16() for x in (cache, cache + 1)] for _ in range(2)]
    cos, sin = randn(16, 8).bfloat16(), randn(16, 8).bfloat16()
    rotation = dict(rotary_cos=cos, rotary_sin=sin, cache_seqlens=LENGTHS)
    expected = fa3.flash_attn_with_kvcache(q.bfloat16(), *caches[0], new, new, **rotation)
    assert torch.equal(flash_attn.flash_attn_with_kvcache(q.bfloat16(), *caches[1], new, new, cos, sin, LENGTHS), expected)
    assert all(torch.equal(x, y) for x, y in zip(*caches))


def test_what_there_is_not_is_refused():
    q = randn(2, 12, 4, 16)
    with pytest.raises(NotImplementedError, match="^dropout_p is 0.1, expected 0: there is no dropout of attention$"):
        flash_attn.flash_attn_func(q, q, q, 0.1)
    for function, inputs in ((flash_attn.flash_attn_func, (q, q, q)), (flash_attn.flash_attn_with_kvcache, (q, q, q))):
        with pytest.raises(NotImplementedError, match="^alibi_slopes is not None: there is no ALiBi$"):
            function(*inputs, alibi_slopes=torch.ones(4))
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
    # Rows that are there, but not in use.
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
