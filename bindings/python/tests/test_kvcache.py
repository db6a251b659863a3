"""Attention over a KV cache, `fa3.flash_attn_with_kvcache`: each sequence is compared with its own definition, on the
CPU and on a GPU. Needs torch.
"""

import itertools
import math
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

import covering
from caching import Cached
from dense import INTERVALS, anything
from packing import MASKS, assert_equal, garbage, normal
from reference import judge, judge_codes, standard

from fa3 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, get_scheduler_metadata, masks

F32, F16, BF16, E4M3, I32 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32
LAYOUTS = ["seqused", "padded", "indexed", "indexed padded", 16, 64, 256, 1]
# Layouts with padding in the first page, or with an index into the rows of the page table.
MIXED = ["4 padded indexed", "16 padded", "64 indexed"]
ROWS = [1, 5, [2, 0, 7, 1, 3, 1]]


def pages_for(device):
    """The numbers of rows of a page. If they are no multiple of 8, a kernel copies row by row."""
    return [1, 3, 16, 24, 1000] if device == "cpu" else [1, 2, 3, 4, 8, 16, 20, 24, 32, 64, 128, 1000]


# Tests of results.


@covering.parametrize(layout=LAYOUTS + MIXED, rows=ROWS, mask=MASKS, splits=[0, 1])
def test_each_sequence_has_its_own_results(nan_in_new_tensors, device, layout, rows, mask, splits):
    """All other rows of the cache are NaN, so that any that reached a result would show."""
    Cached(device, layout=layout, rows=rows).check(num_splits=splits, **mask)


@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize(
    "heads, head_dims",
    [((4, 4), (64, 64)), ((32, 4), (128, 128)), ((6, 2), (96, 96)), ((7, 1), (72, 40)), ((16, 1), (192, 128)), ((2, 1), (256, 256)), ((71, 1), (64, 64))],
)
def test_heads_and_columns(nan_in_new_tensors, device, heads, head_dims, splits):
    for dtype in (F16, BF16) if device == "cuda" else (F32, BF16):
        for rows, layout in itertools.product((1, 4), ("seqused", 16)):
            Cached(device, dtype, layout=layout, rows=rows, heads=heads, head_dims=head_dims).check(num_splits=splits, causal=True)


@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("rows", [1, 130, [1, 200, 0, 64, 1, 3]], ids=str)
def test_pages_of_any_size(nan_in_new_tensors, device, rows, splits):
    """A call may have a prompt beside single tokens."""
    for layout in pages_for(device):
        results = Cached(device, layout=layout, rows=rows).check(num_splits=splits, causal=True)
        if device == "cpu":
            assert_equal(results, Cached(device, rows=rows).call(return_softmax_lse=True, causal=True))


@pytest.mark.hopper
@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("rows", [1, 130], ids=str)
def test_rows_that_are_copied_one_by_one_have_the_bits_of_those_in_blocks(nan_in_new_tensors, rows, splits):
    """Pages of 64 rows make the same blocks of keys. So results differ only if a row is in the wrong place."""
    blocks = Cached("cuda", layout=64, rows=rows).check(num_splits=splits, causal=True)
    for layout in (1, 2, 12, "4 padded", "64 padded indexed"):
        assert_equal(Cached("cuda", layout=layout, rows=rows).check(num_splits=splits, causal=True), blocks)


SCORES = [dict(softmax_scale=0.3), dict(softcap=5.0), dict(softmax_scale=0.5, softcap=4.0), dict(s_aux=[-3.0, 0.5, 9.0, -math.inf])]
CHUNKS = [dict(causal=True, attention_chunk=70), dict(attention_chunk=64), dict(window_size=(20, 9), attention_chunk=33)]


@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("scores", [*SCORES, *CHUNKS], ids=str)
@pytest.mark.parametrize("layout", ["padded", 16])
def test_scales_soft_caps_sinks_and_chunks(nan_in_new_tensors, device, layout, scores, splits):
    """Chunks count from a sequence's first key, which follows its padding."""
    scores = {name: torch.tensor(x, device=device) if isinstance(x, list) else x for name, x in scores.items()}
    for rows in (1, 3, ROWS[2]):
        cached = Cached(device, F32 if device == "cpu" and "s_aux" in scores else BF16, layout=layout, rows=rows)
        cached.check(num_splits=splits, **scores)
        cached.check(num_splits=splits, **scores | dict(causal=True))


@covering.parametrize(
    cache=[("seqused", 5), (16, 1), (16, 130), ("4 padded indexed", [2, 0, 7, 1, 3, 1]), (1, 130), (64, [1, 200, 0, 64, 1, 3])],
    make=INTERVALS,
    splits=[dict(), dict(num_splits=1), dict(split_keys=128)],
)
def test_intervals_count_the_keys_of_their_sequence(nan_in_new_tensors, device, cache, make, splits):
    layout, rows = cache
    cached = Cached(device, layout=layout, rows=rows)
    given = dict(intervals=cached.intervals(make), s_aux=torch.tensor([-3.0, 0.5, 9.0, -math.inf], device=device))
    for mask in (dict(), dict(causal=True), dict(window_size=(60, 9)), dict(causal=True, attention_chunk=50)):
        cached.check(**splits, **given, **mask)


@pytest.mark.parametrize("splits", [dict(), dict(num_splits=1), dict(split_keys=128)], ids=str)
@pytest.mark.parametrize(
    "layout, rows", [("seqused", 5), (16, 1), (16, 130), ("4 padded indexed", [2, 0, 7, 1, 3, 1]), (1, 130), (64, [1, 200, 0, 64, 1, 3])], ids=str
)
def test_each_sequence_is_causal_or_not(device, layout, rows, splits):
    cached = Cached(device, layout=layout, rows=rows)
    causal = torch.tensor([True, False, True, False, True, False], device=device)
    of_sequence = iter(causal.tolist())
    own = cached.intervals(lambda rows, keys: masks.sliding_window(rows, keys, -1, 0 if next(of_sequence) else -1))
    for mask in (dict(), dict(window_size=(60, 9)), dict(attention_chunk=50, softcap=4.0)):
        results = cached.call(causal=causal, return_softmax_lse=True, **splits, **mask)
        cached.judge(*results, intervals=own, **mask)


@pytest.mark.parametrize("splits", [dict(), dict(num_splits=1), dict(split_keys=128)], ids=str)
@pytest.mark.parametrize(
    "layout, rows, words",
    [("seqused", 5, 1), (16, 1, 1), (16, 130, 3), ("4 padded indexed", [2, 0, 7, 1, 3, 1], 1), (1, 130, 1), (64, [1, 200, 0, 64, 1, 3], 2)],
    ids=str,
)
def test_rows_see_the_new_keys_of_their_bits(nan_in_new_tensors, device, layout, rows, words, splits):
    """Random bits, also of keys that a sequence does not have. Rows may have more new keys than bits."""
    cached = Cached(device, layout=layout, rows=rows)
    generator = torch.Generator().manual_seed(3)
    tree = torch.randint(-(2**63), 2**63 - 1, (*cached.q.shape[:-2], words), generator=generator)
    of_sequence = iter(tree.flatten(0, -2))

    def make(rows, keys):
        """An interval of all older keys, and one for each bit, which is empty without the bit."""
        bits = [(torch.stack([next(of_sequence)]).T >> torch.arange(64) & 1).flatten() for _ in range(rows)]
        bits = torch.stack(bits) if rows else torch.zeros(0, 64 * words, dtype=torch.int64)
        first = (keys - rows + torch.arange(64 * words)).expand(rows, -1)
        older = torch.tensor([0, max(keys - rows, 0)]).expand(rows, 2)
        return torch.cat([older, torch.stack([first, first + bits], -1).flatten(1)], 1)[None, None]

    own = cached.intervals(make)
    tree = tree[..., 0] if words == 1 else tree
    for mask in (dict(), dict(causal=True), dict(window_size=(60, -1), softcap=4.0)):
        results = cached.call(tree_mask=tree.to(device), return_softmax_lse=True, **splits, **mask)
        cached.judge(*results, intervals=own, **mask)


@pytest.mark.parametrize("splits", [dict(), dict(num_splits=1), dict(split_keys=128)], ids=str)
@pytest.mark.parametrize("layout, rows", [(16, [1, 70, 0, 1, 1, 3]), (1, 3)], ids=str)
def test_wide_heads_under_masks_of_data(nan_in_new_tensors, device, layout, rows, splits):
    cached = Cached(device, layout=layout, rows=rows, heads=(4, 1), head_dims=(512, 512))
    for make, mask in itertools.product(INTERVALS[: 1 if device == "cpu" else None], (dict(causal=True), dict(window_size=(60, 9)))):
        cached.check(intervals=cached.intervals(make), **splits, **mask)
    causal = torch.tensor([True, False, True, False, True, False], device=device)
    of_sequence = iter(causal.tolist())
    own = cached.intervals(lambda rows, keys: masks.sliding_window(rows, keys, -1, 0 if next(of_sequence) else -1))
    cached.judge(*cached.call(causal=causal, return_softmax_lse=True, **splits), intervals=own)
    if rows == 3:
        # Of the new keys, a row sees itself alone.
        alone = torch.arange(3)[:, None] + torch.tensor([0, 1])
        own = cached.intervals(lambda _, keys: torch.cat([torch.tensor([[0, keys - 3]] * 3), keys - 3 + alone], 1)[None, None])
        tree = masks.tree_words(torch.eye(3, dtype=torch.bool, device=device).expand(6, 3, 3))
        cached.judge(*cached.call(tree_mask=tree, return_softmax_lse=True, **splits), intervals=own)


def test_a_causal_tree_has_the_bits_of_a_causal_mask(device):
    for rows in (1, 8, 64, 70):
        cached = Cached(device, layout=16, rows=rows, keys=[200, 64, 129, 300])
        tree = masks.tree_words(torch.ones(4, rows, rows, dtype=torch.bool, device=device).tril())
        assert tree.shape == (4, rows, -(-rows // 64))
        results = (cached.call(return_softmax_lse=True, **x) for x in (dict(tree_mask=tree), dict(causal=True)))
        assert_equal(*results)


def test_wrong_words_are_refused(device):
    cached, words = Cached(device, rows=5), torch.zeros(6, 5, dtype=torch.int64, device=device)
    causal = torch.ones(6, dtype=torch.bool, device=device)
    for tree, given, sentence in (
        (words.to(I32), {}, r"^tree_mask is torch.int32 \(6, 5\), expected torch.int64 \(batch, seqlen_q\) or"),
        (words[1:], {}, r"^tree_mask is torch.int64 \(5, 5\), expected .* beside q of \(6, 5, 4, 64\)$"),
        (words[..., None][..., :0], {}, r"^tree_mask is torch.int64 \(6, 5, 0\), expected"),
        (words, dict(causal=causal), "^there are tree_mask and causal as tensors, expected one of them$"),
    ):
        with pytest.raises(ValueError, match=sentence):
            cached.call(tree_mask=tree, **given)
    with pytest.raises(ValueError, match=r"^seen is torch.int64 \(6, 5\), expected torch.bool"):
        masks.tree_words(words)


def test_intervals_count_appended_rows(device):
    q, new = normal(2, 3, 4, 64, device=device), normal(2, 3, 2, 64, seed=1, device=device)
    cache, lengths = normal(2, 40, 2, 64, seed=2, device=device), torch.tensor([9, 30], dtype=I32, device=device)
    given = dict(intervals=anything(3, 33).to(device, I32), return_softmax_lse=True)
    appended = flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=lengths, **given)[:2]
    for i, n in enumerate([9, 30]):
        cache[i, n : n + 3] = new[i]
    assert_equal(appended, flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths + 3, **given)[:2])


@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("keys", [[20000, 3, 500, 0, 64, 1], [1] * 40, [0] * 3, [70] * 300], ids=["one long", "ones", "none", "many"])
def test_lengths_of_all_kinds(nan_in_new_tensors, device, keys, splits):
    for layout in ("seqused", 64):
        Cached(device, keys=keys, layout=layout, heads=(2, 1)).check(num_splits=splits)


@pytest.mark.parametrize("splits", [0, 1])
def test_all_rows_are_in_use_unless_lengths_say_otherwise(nan_in_new_tensors, device, splits):
    q, k, v = (normal(3, n, heads, 64, seed=i, device=device) for i, (n, heads) in enumerate([(2, 4), (50, 2), (50, 2)]))
    out, lse, *_ = flash_attn_with_kvcache(q, k, v, causal=True, num_splits=splits, return_softmax_lse=True)
    judge(out, lse, q, k, v, causal=True)
    # With a page table and no lengths, all rows of the pages are keys.
    table = torch.tensor([[1, 0], [2, 2], [0, 1]], dtype=I32, device=device)
    k, v = (x[:, :48] for x in (k, v))
    out, lse, *_ = flash_attn_with_kvcache(q, k, v, page_table=table, num_splits=splits, return_softmax_lse=True)
    judge(out, lse, q, *(x[table.long()].flatten(1, 2) for x in (k, v)))


def test_one_length_for_all_is_a_number(nan_in_new_tensors, device, calls):
    q, k, v = (normal(3, n, heads, 64, seed=i, device=device) for i, (n, heads) in enumerate([(1, 4), (50, 2), (50, 2)]))
    for length in (0, 1, 37, 50, torch.tensor(37)):
        if isinstance(length, torch.Tensor):
            length = length.item()
        results = flash_attn_with_kvcache(q, k, v, cache_seqlens=length, return_softmax_lse=True)
        judge(*results[:2], q, k[:, :length], v[:, :length])
    flash_attn_with_kvcache(q, k, v, cache_seqlens=37)
    # The tensor for one length is cached: later calls neither fill nor copy it.
    lengths = [given["seqused_k"][1] for _, given in calls]
    assert lengths[-1] == lengths[-2] == lengths[2] and len(set(lengths)) == 4


@pytest.mark.parametrize("splits", [0, 1])
def test_strides_are_as_they_are(device, splits):
    """Heads outside rows, K and V side by side, layers in one pool, and a table that is a slice of a wider one."""
    cached = Cached(device, layout=16, rows=2)
    expected = cached.check(causal=True, num_splits=splits)

    def heads_outside(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    k, v = cached.k, cached.v
    outside = heads_outside(k), heads_outside(v)
    beside = torch.cat([k, v], -1).split(64, -1)
    of_vllm = torch.cat([k, v], -1).transpose(1, 2).contiguous().transpose(1, 2).split(64, -1)
    pool = torch.stack([torch.full_like(k, math.nan), k, v], 1).unbind(1)[1:]
    layers = torch.stack([torch.full_like(k, math.nan), k, v, k], 2)
    for tensors in (outside, beside, of_vllm, pool, (layers[:, :, 1], layers[:, :, 2])):
        assert not tensors[0].is_contiguous()
        q = cached.q.transpose(1, 2).contiguous().transpose(1, 2)
        assert_equal(cached.call((q, *tensors), causal=True, num_splits=splits, return_softmax_lse=True), expected)
    count, pages = cached.table.shape
    longer = torch.full((count, pages + 3), -7, dtype=I32, device=device)
    longer[:, :pages] = cached.table
    behind = torch.full((count, pages + 3), -7, dtype=I32, device=device)
    behind[:, 3:] = cached.table
    apart = torch.stack([cached.table] * 2, -1)[..., 0]
    for table in (longer[:, :pages], behind[:, 3:], apart):
        assert not table.is_contiguous()
        results = cached.call(page_table=table, causal=True, num_splits=splits, return_softmax_lse=True)
        if device == "cpu":
            assert_equal(results, expected)
        cached.judge(*results, causal=True)
    # The lengths are every other number of a longer list.
    lengths = torch.stack([cached.lengths] * 2, 1)[:, 0]
    assert_equal(cached.call(cache_seqlens=lengths, causal=True, num_splits=splits, return_softmax_lse=True), expected)


@pytest.mark.hopper
@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("new", [False, True])
def test_a_part_of_a_table_is_the_limit_of_lengths(nan_in_new_tensors, splits, new):
    """Behind the table's slice are other sequences' pages. Too large a length neither reads nor writes them."""
    cached = Cached("cuda", layout=16)
    pages = cached.table.shape[1] - 2
    cached.k.nan_to_num_(nan=1.0)
    cached.v.nan_to_num_(nan=1.0)
    # Each row of the wider table continues with the first sequence's pages.
    longer = cached.table[:1, :pages].repeat(len(cached.keys), 2)
    longer[:, :pages] = cached.table[:, :pages]
    lengths = torch.full_like(cached.lengths, 16 * pages + 21)
    results = []
    for table in (longer[:, :pages], longer[:, :pages].contiguous()):
        rows = [normal(len(cached.keys), 1, 2, 64, dtype=BF16, device="cuda")] * 2 if new else []
        cache = [cached.q, cached.k.clone(), cached.v.clone()]
        given = dict(cache_seqlens=lengths, page_table=table, causal=True, num_splits=splits, return_softmax_lse=True)
        results.append([*flash_attn_with_kvcache(*cache, *rows, **given)[:2], *cache[1:]])
    assert_equal(*results)
    assert_equal(results[0][2:], (cached.k, cached.v))


@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("layout", [16, 3, "16 padded"])
def test_codes_and_their_scales(nan_in_new_tensors, device, layout, splits):
    """On a GPU, e4m3 kernels compute some of these calls. Kernels that convert Q, K and V compute the others: calls
    with split keys, and calls whose rows are copied one by one.
    """
    of_q, of_k, of_v = (torch.rand(6, 2, generator=torch.Generator().manual_seed(i)).to(device) + 0.5 for i in range(3))
    for rows in (3, [2, 0, 7, 1, 3, 1], 70):
        cached = Cached(device, F32 if device == "cpu" else BF16, layout=layout, rows=rows)
        q, k, v = cached.q.to(E4M3), cached.k.to(E4M3), cached.v.to(E4M3)
        for scales in ({}, dict(q_descale=of_q, k_descale=of_k, v_descale=of_v)):
            out, lse = cached.call((q, k, v), **scales, causal=True, return_softmax_lse=True, num_splits=splits)
            assert out.dtype == BF16
            factors = [x if scales else torch.ones_like(x) for x in (of_q, of_k, of_v)]
            for i, (*own, of_o, of_lse) in enumerate(cached.sequences()):
                own = [x.to(E4M3).float() * scale[i].repeat_interleave(x.shape[2] // 2)[:, None] for x, scale in zip(own, factors, strict=True)]
                judge_codes(out[of_o], lse[of_lse], *own, causal=True)


def e4m3_of(cached):
    """K and V of a cache in e4m3, and their per-head scales. `own` becomes the numbers that the codes represent."""
    of_k, of_v = (torch.rand(len(cached.keys), cached.k.shape[2], generator=torch.Generator().manual_seed(i)) + 0.5 for i in range(2))
    scales = [x.to(cached.q.device) for x in (of_k, of_v)]
    codes = [(x / scale[:, None, :, None]).to(E4M3) for x, scale in zip(cached.own, scales)]
    entries, page_rows = cached.k.shape[:2]
    k, v = (cached.in_memory(x.float(), entries, page_rows).to(E4M3) for x in codes)
    cached.own = [x.float() * scale[:, None, :, None] for x, scale in zip(codes, scales)]
    return k, v, dict(k_descale=scales[0], v_descale=scales[1])


@covering.parametrize(layout=["seqused", "indexed padded", 1, 16, 64, "16 padded"], rows=ROWS, mask=MASKS, splits=[0, 1])
def test_a_cache_of_e4m3_beside_queries_of_16_bits(nan_in_new_tensors, device, layout, rows, mask, splits):
    """All other rows of the cache are NaN."""
    for dtype, head_dims in ((BF16, (64, 64)), (F16, (128, 128)), (BF16, (512, 272))):
        cached = Cached(device, dtype, layout=layout, rows=rows, head_dims=head_dims)
        k, v, scales = e4m3_of(cached)
        results = cached.call((cached.q, k, v), return_softmax_lse=True, num_splits=splits, **scales, **mask)
        # The error law needs 16-bit inputs, in which a scale times a code is not exact. So tolerances are fixed.
        for q, own_k, own_v, of_o, of_lse in cached.sequences():
            right, right_lse = standard(q, own_k, own_v, **mask)
            torch.testing.assert_close(results[0][of_o].double(), right, rtol=2e-2, atol=4e-3)
            torch.testing.assert_close(results[1][of_lse].double(), right_lse, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype, head_dims", [(BF16, (128, 128)), (F16, (512, 512))], ids=str)
def test_scales_of_1_have_the_results_of_16_bits(device, dtype, head_dims):
    """On a GPU the bits are equal if keys are split, since tiles have one size for both dtypes. Products over wide
    heads are of f16.
    """
    cached = Cached(device, dtype, layout=16, rows=2, head_dims=head_dims)
    codes = [x.to(E4M3) for x in (cached.k, cached.v)]
    of_codes = cached.call((cached.q, *codes), causal=True, return_softmax_lse=True)
    of_numbers = cached.call((cached.q, *(x.to(dtype) for x in codes)), causal=True, return_softmax_lse=True)
    if device == "cuda":
        assert_equal(of_codes, of_numbers)
    else:
        # The CPU rounds in other places.
        torch.testing.assert_close(of_codes, of_numbers, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("layout", ["seqused", "indexed padded", 1, 16, "16 padded"])
def test_tokens_with_scales_have_the_results_of_16_bits(nan_in_new_tensors, device, layout):
    """The bits are equal if keys are split. All other rows of the cache, and their scales, are NaN."""
    for dtype, rows, to in ((BF16, 1, E4M3), (F16, [2, 0, 7, 1, 3, 1], E4M3), (BF16, 1, torch.int8)):
        cached = Cached(device, dtype, layout=layout, rows=rows)
        scales = [x.float().abs().amax(-1) / (448 if to == E4M3 else 127) for x in (cached.k, cached.v)]
        codes = [(x / scale[..., None]).to(to) for x, scale in zip((cached.k, cached.v), scales)]
        rounded = [(x.float() * scale[..., None]).to(dtype) for x, scale in zip(codes, scales)]
        # Rows of one head lie side by side, and so do the scales of K and of V.
        of_k, of_v = torch.stack([x.transpose(1, 2) for x in scales], -1).unbind(-1)
        given = dict(k_descale=of_k.transpose(1, 2), v_descale=of_v.transpose(1, 2))
        of = dict(causal=True, return_softmax_lse=True)
        assert_equal(cached.call((cached.q, *codes), **given, **of), cached.call((cached.q, *rounded), **of))


@pytest.mark.hopper
@pytest.mark.parametrize("layout", [16, 1])
@pytest.mark.parametrize("split_keys", [None, 128])
def test_queries_of_e4m3_have_the_results_of_16_bits(layout, split_keys):
    """The bits are equal if keys are split."""
    cached = Cached("cuda", layout=layout, rows=2, head_dims=(128, 128))
    codes = [x.to(E4M3) for x in (cached.q, cached.k, cached.v)]
    of = dict(causal=True, return_softmax_lse=True, split_keys=split_keys)
    assert_equal(cached.call(codes, **of), cached.call([x.to(BF16) for x in codes], **of))


def test_pages_of_varlen_may_be_of_e4m3(device):
    cached = Cached(device, layout=16, rows=[2, 0, 7, 1, 3, 1])
    k, v, scales = e4m3_of(cached)
    expected = cached.call((cached.q, k, v), causal=True, return_softmax_lse=True, **scales)
    of = dict(seqused_k=cached.lengths, page_table=cached.table, num_splits=0, return_attn_probs=True)
    results = flash_attn_varlen_func(cached.q, k, v, cached.ends, None, max(cached.rows), None, causal=True, **of, **scales)
    assert_equal(results, expected)


# Numbers that are no valid lengths or pages.


def test_lists_that_make_no_sense_are_refused_with_their_numbers():
    """The CPU reads the lists, and refuses invalid ones."""
    q, k = normal(2, 1, 4, 64), normal(4, 16, 2, 64)
    table = torch.tensor([[0, 1], [2, 3]], dtype=I32)

    def listed(*numbers):
        return torch.tensor(numbers, dtype=I32)

    for given, sentence in [
        (dict(cache_seqlens=33), "cache_seqlens is 33 for sequence 0, outside 0 to 32"),
        (dict(cache_seqlens=listed(32, -3)), "cache_seqlens is -3 for sequence 1, outside 0 to 32"),
        (dict(cache_leftpad=listed(4, 21)), "cache_leftpad is 21 for sequence 1, outside 0 to cache_seqlens, 20"),
        (dict(page_table=table + 1), "page_table has 4 as entry 1 of sequence 1, and k_cache has 4 entries"),
        (dict(page_table=table - 1), "page_table has -1 as entry 0 of sequence 0, and k_cache has 4 entries"),
        (dict(cache_batch_idx=listed(1, 2)), "cache_batch_idx is 2 for sequence 1, and page_table has 2 rows"),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            flash_attn_with_kvcache(q, k, k, **(dict(cache_seqlens=20, page_table=table) | given))
    with pytest.raises(ValueError, match="^cache_seqlens is 17 for sequence 0, outside 0 to 16$"):
        flash_attn_with_kvcache(q, k[:2], k[:2], cache_seqlens=17)


def test_a_table_as_wide_as_a_servers_takes_neither_memory_nor_time():
    """The table is for a million tokens, of which each sequence uses 16."""
    q, k = normal(64, 1, 8, 128), normal(64, 16, 8, 128)
    table = torch.full((64, 65536), -1, dtype=I32)
    table[:, 0] = torch.arange(64)
    assert torch.equal(flash_attn_with_kvcache(q, k, k, cache_seqlens=16, page_table=table), flash_attn_func(q, k, k))


@pytest.mark.hopper
def test_lengths_and_pages_count_as_far_as_there_are_rows_on_a_gpu():
    cached = Cached("cuda", BF16, keys=[48, 48, 48, 48], layout=16)
    cached.table = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, -1]], dtype=I32, device="cuda")
    cached.k, cached.v = (normal(12, 16, 2, 64, seed=7 + i, device="cuda") for i in range(2))
    lengths = torch.tensor([1000, -5, 48, 2**31 - 1], dtype=I32, device="cuda")
    out, lse = cached.call(cache_seqlens=lengths, return_softmax_lse=True)
    cached.own = [torch.cat([x, torch.zeros_like(x[:1])])[cached.table.long()].flatten(1, 2) for x in (cached.k, cached.v)]
    cached.keys = [48, 0, 48, 48]
    cached.judge(out, lse)


@pytest.mark.hopper
@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("rows", [1, [1, 200, 0, 64, 1, 3]], ids=str)
def test_garbage_touches_nothing_else_on_a_gpu(splits, rows):
    generator = torch.Generator().manual_seed(0)
    for layout in LAYOUTS + MIXED:
        cached = Cached("cuda", layout=layout, rows=rows)
        shape = (*cached.q.shape[:-1], 64)
        memory = torch.full((math.prod(shape) + 2000,), 7.0, dtype=BF16, device="cuda")
        out = memory[1000:-1000].view(shape)
        kept = [x.clone() for x in (cached.q, cached.k, cached.v)]
        for numbers in garbage(generator):
            for _ in range(5):
                given = cached.arguments()
                for name, x in given.items():
                    if isinstance(x, torch.Tensor):
                        given[name] = numbers(x.numel()).view(x.shape).cuda()
                flash_attn_with_kvcache(cached.q, cached.k, cached.v, **given, causal=True, num_splits=splits, out=out)
                torch.cuda.synchronize()
                assert (memory[:1000] == 7).all() and (memory[-1000:] == 7).all()
        for x, before in zip((cached.q, cached.k, cached.v), kept, strict=True):
            assert torch.equal(x.view(torch.int16), before.view(torch.int16))
        cached.check(causal=True, num_splits=splits)


@pytest.mark.hopper
def test_a_row_of_the_table_that_is_not_there_has_no_pages_on_a_gpu():
    cached = Cached("cuda", keys=[20, 20], layout="16 indexed")
    given = cached.arguments()
    given["cache_batch_idx"][1] = 10**6
    out = cached.call(cache_batch_idx=given["cache_batch_idx"])
    assert (out[1] == 0).all() and not (out[0] == 0).any()


# Tests of accepted arguments, and of their effect.


def test_what_decides_how_a_call_is_computed(device, calls):
    """Splits and packing change no result beyond its rounding."""
    cached = Cached(device, layout=16)
    metadata = get_scheduler_metadata(6, 1, 200, 4, 2, 64, cached.lengths)
    assert (metadata.dtype, metadata.shape, metadata.device) == (I32, (0,), cached.q.device)
    for given in (dict(num_splits=0), dict(num_splits=3), dict(num_splits=-1), dict(num_splits=1), dict(pack_gqa=True), dict(pack_gqa=False), dict(scheduler_metadata=metadata)):
        results = cached.call(**given, return_softmax_lse=True)
        cached.judge(*results)
    assert [given["split_keys"] for _, given in calls] == [-1, -1, -1, 0, -1, -1, -1]
    # block_table is the older name of page_table.
    given = cached.arguments()
    given["block_table"] = given.pop("page_table")
    assert_equal([flash_attn_with_kvcache(cached.q, cached.k, cached.v, **given)], [cached.call()])


def test_a_call_enters_the_extension_module_once(device, calls, are_lists):
    cached = Cached(device, layout=16, rows=[2, 0, 7, 1, 3, 1])
    cached.call()
    [(name, given)] = calls
    assert name == "forward" and "lse" not in given
    lists = dict(cu_seqlens_q=cached.ends, seqused_k=cached.lengths, page_table=cached.table)
    are_lists(given, (7, None), **lists)


@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
@pytest.mark.parametrize("used", [None, [1, 0, 5, 1, 3, 0]], ids=["all", "in part"])
def test_packed_sequences_over_pages(nan_in_new_tensors, device, mask, used):
    """`flash_attn_varlen_func` takes a page table, too."""
    cached = Cached(device, layout=16, rows=[2, 0, 7, 1, 3, 1])
    tensors, lists = (cached.q, cached.k, cached.v), (cached.ends, None, 7, 200)
    given = dict(seqused_k=cached.lengths, return_attn_probs=True, **mask)
    for name, splits in itertools.product(("page_table", "block_table"), (0, 1)):
        results = flash_attn_varlen_func(*tensors, *lists, **given, **{name: cached.table}, num_splits=splits)
        cached.judge(*results, **mask)
    out = torch.empty_like(results[0])
    assert flash_attn_varlen_func(*tensors, *lists, **(given | dict(return_attn_probs=False)), page_table=cached.table, out=out) is out
    cached.judge(out, results[1], **mask)
    if used:
        used = torch.tensor(used, dtype=I32, device=device)
        out, lse = flash_attn_varlen_func(*tensors, *lists, **given, page_table=cached.table, seqused_q=used)
        for i, (q, k, v, of_o, of_lse) in enumerate(cached.sequences()):
            n = used[i].item()
            judge(out[of_o][:, :n], lse[of_lse][..., :n].contiguous(), q[:, :n], k, v, **mask)
            assert (out[of_o][:, n:] == 0).all() and (lse[of_lse][..., n:] == -math.inf).all()
    with pytest.raises(ValueError, match="^there are page_table and cu_seqlens_k, expected one of them$"):
        flash_attn_varlen_func(*tensors, cached.ends, cached.ends, 7, 200, page_table=cached.table)


# Tests of CUDA graphs, and of torch's compiler and operators.


@pytest.mark.hopper
@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_computes_other_lengths(layout, splits):
    cached = Cached("cuda", keys=[1000, 0, 1, 64, 129, 37], layout=layout)
    cached.call(causal=True, num_splits=splits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    given = cached.arguments()
    with torch.cuda.graph(graph):
        results = flash_attn_with_kvcache(cached.q, cached.k, cached.v, **given, num_splits=splits, return_softmax_lse=True)[:2]
    for keys in ([1000, 0, 1, 64, 129, 37], [0] * 6, [37, 129, 64, 1, 0, 1000], [1, 1, 1, 1, 1, 1]):
        # Each step puts the keys of all sequences into pages that the captured cache has room for.
        table = torch.full_like(cached.table, -1)
        own = [x[:, : max(keys, default=0)] for x in cached.own]
        if cached.page_rows:
            at = 0
            for i, n in enumerate(keys):
                used = -(-n // cached.page_rows)
                table[i, :used] = torch.arange(at, at + used, dtype=I32)
                at += used
            if at > len(cached.k):
                continue
        else:
            table = cached.table
        for memory, x in zip((cached.k, cached.v), own, strict=True):
            memory.fill_(math.nan)
            for i, n in enumerate(keys):
                for r in range(0, n):
                    row = r + cached.pad[i]
                    memory[table[i, row // memory.shape[1]], row % memory.shape[1]] = x[i, r]
        if "page_table" in given:
            given["page_table"].copy_(table)
        given["cache_seqlens"].copy_(torch.tensor([n + pad for n, pad in zip(keys, cached.pad)], dtype=I32))
        for x in results:
            x.fill_(math.nan)
        graph.replay()
        cached.keys = keys
        cached.judge(*results)


@pytest.mark.hopper
def test_a_graph_holds_the_length_of_all():
    """A length that is a number becomes a tensor, which lives as long as the graph."""
    q, k, v = (normal(3, n, heads, 64, seed=i, device="cuda") for i, (n, heads) in enumerate([(1, 4), (50, 2), (50, 2)]))
    flash_attn_with_kvcache(q, k, v, cache_seqlens=37)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, *_ = flash_attn_with_kvcache(q, k, v, cache_seqlens=37, return_softmax_lse=True)
    # These other lengths replace the cached tensor.
    for length in range(300):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=length % 50)
    q.copy_(torch.randn_like(q))
    graph.replay()
    judge(out, lse, q, k[:, :37], v[:, :37])
