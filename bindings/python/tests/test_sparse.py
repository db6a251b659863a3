"""Sparse latent attention with FlashMLA's interface: each token attends to the rows that it lists. Needs torch."""

import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import assert_equal, normal

from fa3 import flash_mla
from fa3.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache

F32, F16, BF16, I32, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.float8_e4m3fn
SCALE = 0.05


def definition(q, lists, scale, d_v, sink):
    """One token, in float64: q (heads, d), lists of (rows, indices, length), sink (heads,)."""
    keys = [rows[i] for rows, indices, length in lists for i in indices[: max(0, length)] if 0 <= i < len(rows)]
    if not keys:
        return torch.zeros(len(q), d_v), torch.full((len(q),), math.inf), torch.full((len(q),), -math.inf)
    keys = torch.stack(keys).double()
    s = scale * q.double() @ keys.T
    lse = s.logsumexp(-1)
    o = s.softmax(-1) @ keys[:, :d_v] / (1 + (sink.double() - lse).exp())[:, None]
    return o, lse, s.amax(-1)


def lists_of(tokens, topk, rows, seed=0):
    """Lists with garbage among rows, at both ends and in the middle; of one row again and again; and of no row."""
    lists = torch.randint(rows, (tokens, topk), generator=torch.Generator().manual_seed(seed), dtype=I32)
    for at, garbage in ((0, -1), (1, rows), (topk // 2, -(2**31)), (topk // 2 + 1, 2**31 - 1), (topk - 1, -7)):
        if 0 <= at < topk:
            lists[0::3, at] = garbage
    lists[1::5], lists[2::7] = 3, -1
    return lists


class Sparse:
    """Tokens with lists of a cache in pages, and maybe of a second one. The last page is listed nowhere, and NaN."""

    def __init__(
        self, device, dtype=BF16, heads=16, batch=3, rows=2, topk=100, columns=576, pages=(9, 16), lengths=None, extra=None
    ):
        def cache(pages, page_rows, seed):
            cache = normal(pages + 1, page_rows, 1, columns, dtype=dtype, seed=seed, device=device)
            cache[-1] = math.nan
            return cache

        def lists(topk, rows_of_cache, seed):
            return lists_of(batch * rows, topk, rows_of_cache, seed).view(batch, rows, topk).to(device)

        self.q = normal(batch, rows, heads, columns, dtype=dtype, device=device)
        self.caches = [cache(*pages, 1)]
        # The NaN of the last page is a row, but not one that a list names.
        self.lists = [lists(topk, pages[0] * pages[1], 1)]
        self.lists[0][self.lists[0] == pages[0] * pages[1]] = 2**30
        self.lengths = [None if lengths is None else torch.tensor(lengths, dtype=I32, device=device)]
        if extra is not None:
            topk, pages, lengths = extra
            self.caches.append(cache(*pages, 2))
            self.lists.append(lists(topk, pages[0] * pages[1], 2))
            self.lists[1][self.lists[1] == pages[0] * pages[1]] = -1
            self.lengths.append(None if lengths is None else torch.tensor(lengths, dtype=I32, device=device))

    @property
    def given(self):
        names = ("indices", "topk_length"), ("extra_indices_in_kvcache", "extra_topk_length")
        given = {name: x for pair, values in zip(names, zip(self.lists, self.lengths)) for name, x in zip(pair, values)}
        return given | dict(extra_k_cache=self.caches[1] if len(self.caches) > 1 else None)

    def call(self, d_v=512, **options):
        options = dict(softmax_scale=SCALE) | options
        return flash_mla_with_kvcache(self.q, self.caches[0], None, None, d_v, **self.given, **options)

    def expected(self, d_v=512, sink=None):
        """O (tokens, heads, d_v), LSE and the largest scores (tokens, heads)."""
        q, rows = self.q.flatten(0, 1).cpu(), self.q.shape[1]
        sink = torch.full((q.shape[1],), -math.inf) if sink is None else sink.cpu()
        results = []
        for token in range(len(q)):
            lists = []
            for cache, indices, lengths in zip(self.caches, self.lists, self.lengths):
                length = indices.shape[2]
                if lengths is not None:
                    length = lengths[token // rows].flatten()[token % rows if lengths.dim() == 2 else 0].item()
                lists.append((cache.flatten(0, 2).cpu(), indices.flatten(0, 1)[token].tolist(), length))
            results.append(definition(q[token], lists, SCALE, d_v, sink))
        return [torch.stack(x) for x in zip(*results)]

    def check(self, d_v=512, sink=None):
        out, lse = self.call(d_v, attn_sink=sink)
        o, expected_lse, _ = self.expected(d_v, sink)
        batch, rows, heads, _ = self.q.shape
        assert (out.shape, lse.shape) == ((batch, rows, heads, d_v), (batch, heads, rows))
        compare(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), o, expected_lse)
        return out, lse


def compare(out, lse, o, expected_lse):
    assert lse.dtype == F32
    out, lse = out.cpu().double(), lse.cpu().double()
    # O is a mean of values with the size of 1, whose probabilities are rounded where its dtype is.
    assert (out - o).abs().max() <= 2 * torch.finfo(BF16).eps * max(1, o.abs().max())
    seen = expected_lse.isfinite()
    assert torch.equal(lse[~seen], expected_lse[~seen]) and (out[~seen] == 0).all()
    assert ((lse - expected_lse)[seen].abs() <= 1e-5 * expected_lse[seen].abs().clamp(min=1)).all()


CASES = {
    "one token": dict(batch=1, rows=1),
    "several tokens": dict(rows=3, topk=1),
    "lists that end anywhere": dict(lengths=[[70, 0], [1000, -5], [99, 1]]),
    "lengths of sequences": dict(lengths=[7, 100, 0], rows=3, topk=65),
    "pages of one row": dict(pages=(150, 1)),
    "one page": dict(pages=(1, 90)),
    "no entries": dict(topk=0),
    "long lists": dict(topk=700, batch=1),
    "latent columns alone": dict(columns=512),
}
TWO = {
    "two caches": dict(extra=(33, (4, 8), None)),
    "two caches and lengths": dict(lengths=[50, 0, 1], extra=(33, (30, 1), [[3, 99], [0, -1], [33, 7]])),
    "a list of the second cache alone": dict(topk=0, extra=(64, (4, 8), None)),
}


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_tokens_attend_to_the_rows_that_they_list(device, dtype, given):
    Sparse(device, dtype, **given).check()


@pytest.mark.parametrize("given", TWO.values(), ids=TWO)
def test_two_caches(device, given):
    Sparse(device, **given).check(sink=normal(16, dtype=F32, device=device))


@pytest.mark.parametrize("heads", [1, 8, 12, 64, 128])
def test_heads_and_sinks(device, heads):
    sink = normal(heads, dtype=F32, seed=3, device=device)
    sink[0] = -math.inf
    Sparse(device, heads=heads, batch=2, topk=40).check(sink=sink)


def test_an_infinite_sink_takes_all(device):
    sparse = Sparse(device)
    out, lse = sparse.call(attn_sink=torch.full((16,), math.inf, device=device))
    assert (out == 0).all()
    assert_equal([lse], sparse.call()[1:])


def test_lse_has_other_forms(device):
    """Base 2, and -inf where a token has no key, with sinks and without."""
    sparse = Sparse(device)
    sparse.lists[0][1] = -1
    for sink in (None, normal(16, dtype=F32, device=device)):
        out, lse = sparse.call(attn_sink=sink)
        assert (lse[1] == math.inf).all() and lse[0].isfinite().all()
        expected = torch.where(lse == math.inf, -lse, lse) / math.log(2)
        found = sparse.call(attn_sink=sink, lse_base=2, neutral_lse=True)
        assert_equal(found[:1], [out])
        torch.testing.assert_close(found[1], expected, rtol=1e-6, atol=1e-6)


def test_the_scale_is_that_of_all_columns(device):
    sparse = Sparse(device)
    assert_equal(sparse.call(softmax_scale=None), sparse.call(softmax_scale=1 / 24))


def test_what_is_ignored_is_ignored(device):
    sparse = Sparse(device)
    given = [torch.zeros(1, 8, dtype=I32), object()]
    out = flash_mla_with_kvcache(sparse.q, sparse.caches[0], given[0], given[1], 512, *given, SCALE, indices=sparse.lists[0])
    assert_equal(out, sparse.call())


@pytest.mark.parametrize("sink", [False, True])
def test_a_prompt_is_sparse_attention_of_its_tokens(device, sink):
    """With the largest scores. Its bits are the ones of decoding."""
    sparse = Sparse(device, batch=1, rows=9, pages=(120, 1), lengths=[[70, 0, 1000, -5, 99, 1, 100, 12, 13]])
    sink = normal(16, dtype=F32, device=device) if sink else None
    q, kv, indices, lengths = sparse.q[0], sparse.caches[0][:, 0], sparse.lists[0][0].unsqueeze(1), sparse.lengths[0][0]
    out, largest, lse = flash_mla_sparse_fwd(q, kv, indices, SCALE, 512, sink, lengths)
    o, expected_lse, expected_largest = sparse.expected(sink=sink)
    compare(out, lse, o, expected_lse)
    assert (largest.dtype, largest.shape) == (F32, (9, 16))
    torch.testing.assert_close(largest.cpu().double(), expected_largest.double(), rtol=1e-5, atol=1e-5)
    decoded, of_decoded = sparse.call(attn_sink=sink)
    assert_equal([out, lse], [decoded[0], of_decoded[0].T])
    into = torch.full((9, 17, 520), 7.0, dtype=BF16, device=device)[:, 1:, 8:]
    results = flash_mla_sparse_fwd(q, kv, indices, SCALE, 512, sink, lengths, into, return_max_logits=False)
    assert results[0] is into and results[1] is None
    assert_equal([into, results[2]], [out, lse])


def test_a_token_has_its_own_bits():
    """On the CPU, whatever tokens are beside it; on a GPU shares of lists depend on them."""
    sparse = Sparse("cpu", extra=(33, (4, 8), None), lengths=[50, 100, 1])
    out, lse = sparse.call()
    for i in range(3):
        one = Sparse("cpu", extra=(33, (4, 8), None), lengths=[50, 100, 1])
        one.q, one.lists = sparse.q[i : i + 1], [x[i : i + 1] for x in sparse.lists]
        one.lengths = [sparse.lengths[0][i : i + 1], None]
        assert_equal(one.call(), [out[i : i + 1], lse[i : i + 1]])


def of_bytes(cache, scales):
    """FlashMLA's rows of 656 bytes of these latent codes, and the rows in bfloat16 that they stand for."""
    latent, rotated = cache.split((512, 64), 3)
    codes = (latent.float().unflatten(3, (4, 128)) / scales[..., None]).flatten(3).to(E4M3)
    parts = codes.view(torch.uint8), scales.view(torch.uint8), rotated.contiguous().view(torch.uint8)
    numbers = (codes.float().unflatten(3, (4, 128)) * scales[..., None]).flatten(3).to(BF16)
    return torch.cat(parts, 3), torch.cat([numbers, rotated], 3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("given", [CASES["lists that end anywhere"], CASES["pages of one row"], TWO["two caches"]], ids=str)
def test_rows_of_codes_are_the_numbers_that_they_stand_for(device, dtype, given):
    if device != "cpu" and "extra" in given:
        pytest.skip("a GPU has one cache of FP8 rows")
    sparse = Sparse(device, **given)
    for i, cache in enumerate(sparse.caches):
        cache.nan_to_num_(0.5)
        sparse.caches[i], _ = of_bytes(cache, normal(*cache.shape[:3], 4, dtype=F32, seed=i, device=device).abs() + 0.01)
    rows = [of_bytes_to_numbers(x) for x in sparse.caches]
    sparse.caches = [x.view(dtype) for x in sparse.caches]
    results = sparse.call(is_fp8_kvcache=True)
    sparse.caches = rows
    assert_equal(results, sparse.check())


def test_views_of_rows_of_codes_lie_in_the_cache():
    """A GPU takes these views, so they are checked on the CPU, too."""
    cache, numbers = of_bytes(normal(5, 9, 1, 576, dtype=BF16), normal(5, 9, 1, 4, dtype=F32).abs() + 0.01)
    keys, codes, scales = flash_mla._views("k_cache", cache.view(torch.int8)[1::2])
    assert (keys.dtype, codes.dtype, scales.dtype) == (BF16, E4M3, F32)
    assert [x.stride()[:2] for x in (keys, codes, scales)] == [(2 * 9 * n, n) for n in (328, 656, 164)]
    assert all(x.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr() for x in (keys, codes, scales))
    found = (codes.float().unflatten(3, (4, 128)) * scales[..., None]).flatten(3).to(BF16)
    assert_equal([torch.cat([found, keys], 3)], [numbers[1::2]])
    with pytest.raises(ValueError, match="k_cache has strides .* expected rows without gaps at multiples of 16 bytes"):
        flash_mla._views("k_cache", cache.view(-1)[8 : 8 + 656].view(1, 1, 1, 656))
    with pytest.raises(NotImplementedError, match="extra_k_cache with is_fp8_kvcache is not supported on a GPU yet"):
        flash_mla._views("extra_k_cache", cache)


def of_bytes_to_numbers(cache):
    codes, scales, rotated = cache.split((512, 16, 128), 3)
    scales = scales.contiguous().view(F32).repeat_interleave(128, 3)
    return torch.cat([(codes.contiguous().view(E4M3).float() * scales).to(BF16), rotated.contiguous().view(BF16)], 3)


def test_refusals():
    sparse = Sparse("cpu")

    def refused(error, sentence, change=lambda given: None, **options):
        given = dict(q=sparse.q, k_cache=sparse.caches[0], block_table=None, cache_seqlens=None, head_dim_v=512)
        given |= dict(indices=sparse.lists[0]) | options
        with pytest.raises(error, match=f"^{sentence}"):
            flash_mla_with_kvcache(**given)

    lists, cache = sparse.lists[0], sparse.caches[0]
    refused(ValueError, "there are causal and indices", causal=True)
    refused(ValueError, r"indices is torch.int64 \(3, 2, 100\), expected torch.int32 \(3, 2, topk\)", indices=lists.long())
    refused(ValueError, "indices is torch.int32", indices=lists[:2])
    refused(NotImplementedError, "k_cache has 2 heads, and lists of keys take one", k_cache=cache.expand(-1, -1, 2, -1))
    refused(ValueError, "topk_length is torch.int32", topk_length=torch.zeros(2, dtype=I32))
    refused(ValueError, "topk_length is torch.int64", topk_length=torch.zeros(3, dtype=torch.int64))
    refused(ValueError, "there is extra_k_cache without extra_indices_in_kvcache", extra_k_cache=cache)
    refused(ValueError, "there is extra_indices_in_kvcache without extra_k_cache", extra_indices_in_kvcache=lists)
    refused(ValueError, "there is extra_topk_length without extra_k_cache", extra_topk_length=torch.zeros(3, dtype=I32))
    refused(ValueError, "there is topk_length without indices", topk_length=torch.zeros(3, dtype=I32), indices=None)
    refused(ValueError, "k_cache is torch.float16 and q torch.bfloat16", k_cache=cache.half())
    refused(ValueError, "k_cache has 512 and q 576 columns", k_cache=cache[..., :512])
    codes = torch.zeros(9, 16, 1, 656, dtype=torch.uint8)
    of_codes = dict(k_cache=codes, is_fp8_kvcache=True)
    refused(NotImplementedError, "q is torch.float16, and rows of FP8", q=sparse.q.half(), **of_codes)
    refused(NotImplementedError, "head_dim_v is 256", **of_codes | dict(head_dim_v=256))
    refused(NotImplementedError, "k_cache has rows of 584 bytes", **of_codes | dict(k_cache=codes[..., :584]))
    refused(ValueError, "k_cache is torch.uint8 with rows of 600", **of_codes | dict(k_cache=codes[..., :600]))
    refused(ValueError, "attn_sink|s_aux is torch.float32", attn_sink=torch.zeros(3))
    with pytest.raises(NotImplementedError, match="requires grad, and attention over a cache has no gradients"):
        flash_mla_with_kvcache(sparse.q.requires_grad_(), cache, None, None, 512, indices=lists)[0].sum().backward()
