"""Latent attention: `qv`, which FlashAttention-3's functions take, and FlashMLA's interface. Needs torch."""

import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from caching import Cached
from dense import check
from packing import MASKS, Packed, assert_equal, normal
from reference import judge, rotated
from torch._subclasses.fake_tensor import FakeTensorMode

from fa3 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, get_scheduler_metadata
from fa3.flash_mla import flash_mla_with_kvcache, get_mla_metadata

F32, F16, BF16, I32 = torch.float32, torch.float16, torch.bfloat16, torch.int32
HALF = [F16, BF16]
# (head_dim, head_dim_v) that a GPU's kernels support.
DIMS = [(64, 512), (64, 256), (32, 512)]


def dense(device, dtype=BF16, dims=DIMS[0], rows=(70, 90), heads=(4, 2)):
    """Makes Q, K, V and qv."""
    (of_q, of_k), (head_dim, head_dim_v) = rows, dims
    q, qv = (normal(2, of_q, heads[0], d, dtype=dtype, seed=d, device=device) for d in (head_dim, head_dim_v))
    k, v = (normal(2, of_k, heads[1], d, dtype=dtype, seed=1 + d, device=device) for d in (head_dim, head_dim_v))
    return q, k, v, qv


# Tests of results.


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_scores_are_of_both_products(device, dtype, dims, mask):
    q, k, v, qv = dense(device, dtype, dims)
    check(q, k, v, qv=qv, **mask)


@pytest.mark.parametrize("dims", [(8, 40), (1, 3), (64, 512)], ids=str)
def test_any_columns_of_float32_on_the_cpu(dims):
    q, k, v, qv = dense("cpu", F32, dims, rows=(9, 20))
    for options in ({}, dict(softmax_scale=0.3, softcap=4.0)):
        check(q, k, v, qv=qv, **options)


def test_sinks_and_a_given_output(device):
    q, k, v, qv = dense(device)
    sinks = torch.tensor([1.0, -3.0, -math.inf, 5.0], device=device)
    expected = check(q, k, v, qv=qv, s_aux=sinks)
    memory = torch.full((2, 70, 5, 512), 7.0, dtype=BF16, device=device)
    out = memory[:, :, :4]
    results = flash_attn_func(q, k, v, qv=qv, s_aux=sinks, out=out, return_attn_probs=True)
    assert results[0] is out and (memory[:, :, 4] == 7).all()
    assert_equal(results, expected)


@pytest.mark.parametrize("used", [None, ([7, 0, 0, 20, 130, 0, 1, 100], [9, 5, 1, 0, 1, 0, 139, 0])], ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_packed_sequences_are_those_alone(device, dtype, used):
    packed = Packed(device, dtype, head_dims=DIMS[0], used=used)
    qv = normal(len(packed.q), 4, 512, dtype=dtype, seed=9, device=device)
    packed.check(qv=qv, causal=True)


@pytest.mark.hopper
def test_a_table_of_other_calls_is_not_taken():
    packed = Packed("cuda", head_dims=DIMS[0])
    qv = normal(len(packed.q), 4, 512, seed=9, device="cuda")
    lists = dict(cu_seqlens_q=packed.ends[0], cu_seqlens_k=packed.ends[1], total_q=len(packed.q), total_k=len(packed.k))
    table = get_scheduler_metadata(len(packed.lengths), 130, 257, 4, 2, 64, None, headdim_v=512, **lists)
    assert_equal([packed.call(qv=qv, scheduler_metadata=table)], [packed.call(qv=qv)])


@pytest.mark.parametrize("rows", [1, 3, [1, 20, 0, 6, 1, 3]], ids=str)
@pytest.mark.parametrize("layout", ["seqused", "padded", "indexed", 64, 16, 1, "16 indexed padded"], ids=str)
def test_caches_of_every_kind(device, layout, rows):
    cached = Cached(device, layout=layout, rows=rows, head_dims=DIMS[0])
    qv = normal(*cached.q.shape[:-1], 512, seed=9, device=device)
    out, _ = cached.check(qv=qv, causal=True)
    assert not torch.equal(out, cached.call(causal=True))


@pytest.mark.parametrize("rows", [1, [1, 20, 0, 6, 1, 3]], ids=str)
@pytest.mark.parametrize("layout", ["seqused", 64, "16 indexed padded"], ids=str)
def test_caches_of_e4m3(device, layout, rows):
    """On a GPU the bits of f16, if keys are split: the scale is a power of 2."""
    cached = Cached(device, F16, layout=layout, rows=rows, head_dims=DIMS[0])
    qv = normal(*cached.q.shape[:-1], 512, dtype=F16, seed=9, device=device)
    codes = [x.to(torch.float8_e4m3fn) for x in (cached.k, cached.v)]
    numbers = [x.to(F16) / 2 for x in codes]
    scale = torch.full((len(cached.keys), cached.k.shape[2]), 0.5, device=device)
    options = dict(qv=qv, causal=True, return_softmax_lse=True)
    results = cached.call((cached.q, *codes), k_descale=scale, v_descale=scale, **options)
    expected = cached.call((cached.q, *numbers), **options)
    if device == "cuda":
        assert_equal(results, expected)
    else:
        # Rounded in other places.
        torch.testing.assert_close(results, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("scale", [None, 0.05])
@pytest.mark.parametrize("layout", ["seqused", 16, 1], ids=str)
def test_scores_of_qv_and_values_alone(device, layout, scale):
    """Without q and k, the columns of V are the keys, too."""
    cached = Cached(device, layout=layout, rows=[1, 20, 0, 6, 1, 3], head_dims=(512, 512))
    cached.own[0] = cached.own[1]
    options = dict(causal=True, softmax_scale=scale)
    of_cache = cached.call((None, None, cached.v), qv=cached.q, return_softmax_lse=True, **options)
    cached.judge(*of_cache, **options)
    if layout == 16:
        lists = cached.ends, None, max(cached.rows), None, None, cached.lengths
        options |= dict(page_table=cached.table, qv=cached.q, num_splits=0)
        found = flash_attn_varlen_func(None, None, cached.v, *lists, return_attn_probs=True, **options)
        assert_equal(found, of_cache)


def test_packed_scores_of_qv_and_values_alone(device):
    packed = Packed(device, head_dims=(512, 512))
    packed.k = packed.v
    packed.judge(*packed.call(tensors=(None, None, packed.v), qv=packed.q, causal=True, return_attn_probs=True), causal=True)


def test_what_stands_for_no_keys_is_told():
    q, k, v, qv = dense("cpu")
    with pytest.raises(ValueError, match="^new rows k and v need k_cache, which is None$"):
        flash_attn_with_kvcache(None, None, v, k, v, qv)
    for given in ((None, None, v), (None, k, v), (q, None, v)):
        with pytest.raises(TypeError, match="^(q|k|k_cache) is NoneType, expected torch.Tensor$"):
            flash_attn_with_kvcache(*given, qv=None if given[:2] == (None, None) else qv)


def test_pages_of_packed_queries_by_the_other_function(device):
    cached = Cached(device, layout=16, rows=[1, 20, 0, 6, 1, 3], head_dims=DIMS[0])
    qv = normal(*cached.q.shape[:-1], 512, seed=9, device=device)
    lists = cached.ends, None, max(cached.rows), None, None, cached.lengths
    out = flash_attn_varlen_func(cached.q, cached.k, cached.v, *lists, page_table=cached.table, qv=qv, num_splits=1)
    assert_equal([out], [cached.call(qv=qv, num_splits=1)])


@pytest.mark.parametrize("interleaved", [False, True])
def test_new_rows_rotate_q_and_not_qv(device, interleaved):
    q, k, v, qv = dense(device, rows=(3, 3), heads=(4, 1))
    k_cache, v_cache = (normal(2, 40, 1, d, seed=7, device=device) for d in DIMS[0])
    before = torch.tensor([20, 5], dtype=I32, device=device)
    cos, sin = (normal(50, 32, dtype=F32, seed=seed, device=device) for seed in (3, 4))
    options = dict(cache_seqlens=before, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved, causal=True)
    caches = k_cache.clone(), v_cache.clone()
    out = flash_attn_with_kvcache(q, *caches, k, v, qv, **options)
    positions = before.long()[:, None] + torch.arange(3, device=device)
    q, k = (rotated(x, cos, sin, interleaved, positions).to(BF16) for x in (q, k))
    for i, first in enumerate(before.tolist()):
        k_cache[i, first : first + 3], v_cache[i, first : first + 3] = k[i], v[i]
    assert_equal(caches, (k_cache, v_cache))
    assert_equal([out], [flash_attn_with_kvcache(q, *caches, qv=qv, cache_seqlens=before + 3, causal=True)])


@pytest.mark.parametrize("paged", [False, True], ids=["entries", "pages"])
def test_new_rows_go_into_both_parts_of_one_cache(device, paged):
    q, k, v, qv = dense(device, rows=(2, 2), heads=(4, 1))
    cache = normal(4, 32, 1, 576, device=device)
    before = torch.tensor([30, 0], dtype=I32, device=device)
    table = torch.tensor([[3, 0], [1, -1]], dtype=I32, device=device) if paged else None
    expected = cache.clone()
    pages = [3, 1] if paged else [0, 1]
    for i, first in enumerate(before.tolist()):
        expected[pages[i], first : first + 2] = torch.cat([v[i], k[i]], -1)
    parts = cache[..., 512:], cache[..., :512]
    rows = () if paged else (slice(2),)
    options = dict(page_table=table, causal=True)
    parts = [x[rows] for x in parts]
    out = flash_attn_with_kvcache(q, *parts, k, v, qv, cache_seqlens=before, **options)
    assert_equal([cache], [expected])
    assert_equal([out], [flash_attn_with_kvcache(q, *parts, qv=qv, cache_seqlens=before + 2, **options)])


# Tests of FlashMLA's interface.


class Paged:
    """Q, and a cache of latent vectors in pages, for sequences with `keys` keys. Unused pages are NaN."""

    def __init__(self, device, dtype=BF16, keys=(200, 1, 64, 37, 0), rows=2, heads=(16, 1), page_rows=64, latent=512):
        self.keys, self.latent, columns = keys, latent, latent + 64
        self.q = normal(len(keys), rows, heads[0], columns, dtype=dtype, device=device)
        pages = [-(-n // page_rows) for n in keys]
        order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(1)).tolist()
        self.cache = torch.full((len(order), page_rows, heads[1], columns), math.nan, dtype=dtype, device=device)
        self.table = torch.full((len(keys), max(pages) + 1), -1, dtype=I32)
        self.own = []
        for i, (n, count) in enumerate(zip(keys, pages)):
            self.table[i, :count] = torch.tensor(order[:count], dtype=I32)
            own = normal(n, heads[1], columns, dtype=dtype, seed=2 + i, device=device)
            for page, rows_of_page in zip(order[:count], own.split(page_rows) if n else ()):
                self.cache[page, : len(rows_of_page)] = rows_of_page
            order = order[count:]
            self.own.append(own[None])
        self.table, self.lengths = self.table.to(device), torch.tensor(keys, dtype=I32, device=device)

    def call(self, *arguments, **options):
        return flash_mla_with_kvcache(self.q, self.cache, self.table, self.lengths, self.latent, *arguments, **options)

    def check(self, *arguments, **options):
        out, lse = self.call(*arguments, neutral_lse=True, **options)
        assert out.shape == (*self.q.shape[:3], self.latent) and lse.shape == (*self.q.shape[:1], *self.q.shape[2:0:-1])
        for i, own in enumerate(self.own):
            judge(out[i : i + 1], lse[i : i + 1], self.q[i : i + 1], own, own[..., : self.latent], **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "given",
    [dict(), dict(heads=(8, 2), rows=3), dict(page_rows=1), dict(page_rows=16, rows=1), dict(latent=256), dict(heads=(128, 1))],
    ids=str,
)
def test_rows_of_one_cache_are_keys_and_values(device, given, dtype, causal):
    paged = Paged(device, dtype, **given)
    paged.check(*get_mla_metadata(paged.lengths, 32, 1), causal=causal)
    paged.check(softmax_scale=0.1)


def test_lse_of_flash_mla_has_other_forms(device):
    """LSE without the sink, +inf in rows that see no key, or -inf; and in base 2."""
    paged = Paged(device)
    sinks = torch.linspace(-2, 3, paged.q.shape[2], device=device)
    out, lse = paged.call(causal=True)
    with_sinks, of_keys = paged.call(causal=True, attn_sink=sinks)
    assert_equal([of_keys], [lse])
    weight = 1 / (1 + torch.exp(sinks[:, None] - lse)).transpose(1, 2)[..., None]
    torch.testing.assert_close(with_sinks.float(), out.float() * weight, rtol=1e-2, atol=1e-3)
    [infinite], [none] = (paged.call(attn_sink=torch.full_like(sinks, sink))[:1] for sink in (torch.inf, -torch.inf))
    assert not infinite.any()
    assert_equal([none], [paged.call()[0]])
    base_2 = paged.call(causal=True, lse_base=2)[1]
    torch.testing.assert_close(base_2, lse / math.log(2))
    for neutral, empty in ((False, torch.inf), (True, -torch.inf)):
        lse = paged.call(neutral_lse=neutral)[1]
        assert (lse[-1] == empty).all() and lse[:-1].isfinite().all()
    with pytest.raises(ValueError, match="lse_base is 10, expected None or 2"):
        paged.call(lse_base=10)


@pytest.mark.parametrize("lists", [False, True])
def test_metadata_may_have_any_form(device, lists):
    """Servers pass None, what `get_mla_metadata` makes, or tensors without elements. With lists so are tables."""
    paged = Paged(device, keys=(200, 64))
    empty, indices = torch.empty(0, dtype=I32, device=device), None
    if lists:
        indices = torch.arange(40, dtype=I32, device=device).view(2, 2, 10)
        paged.cache.nan_to_num_(0.5)
        paged.table = paged.lengths = empty
    expected = paged.call(indices=indices)
    for metadata in (get_mla_metadata(), get_mla_metadata(torch.zeros(2, dtype=I32, device=device), 32, 1), (empty, empty)):
        assert_equal(paged.call(*metadata, indices=indices), expected)
    torch.compiler.reset()
    compiled = torch.compile(paged.call, backend="aot_eager", fullgraph=True)
    assert_equal(compiled(empty, empty, indices=indices), expected)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_an_lse_near_zero_is_near(device, dtype):
    """On a GPU bf16's references lie 2^16 above the largest score, and LSE of one key is its score, here about 0.01."""
    q, cache = (normal(64, 64 * heads, 576, dtype=dtype, seed=heads, device=device) / 10 for heads in (2, 1))
    q, cache = q.view(64, 2, 64, 576), cache.view(64, 64, 1, 576)
    lengths = torch.ones(64, dtype=I32, device=device)
    table = torch.arange(64, dtype=I32, device=device).view(64, 1)
    _, lse = flash_mla_with_kvcache(q, cache, table, lengths, 512)
    exact = torch.einsum("bqhd,bd->bhq", q.double(), cache[:, 0, 0].double()) * 576**-0.5
    assert (lse - exact).abs().max() < 1e-6


def test_nothing_is_copied(device, calls):
    paged = Paged(device)
    paged.call(causal=True)
    [(name, given)] = calls
    assert name == "forward"
    addresses = [given[of][1] for of in ("q", "qv", "k", "v")]
    q, cache = paged.q.data_ptr(), paged.cache.data_ptr()
    assert addresses == [q + 2 * 512, q, cache + 2 * 512, cache]


@pytest.mark.hopper
def test_a_graph_computes_other_lengths():
    paged = Paged("cuda")
    expected = paged.call(causal=True)
    keys, lengths = paged.lengths.clone(), paged.lengths
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = paged.call(causal=True)
    lengths.fill_(1)
    graph.replay()
    assert not torch.equal(results[0], expected[0])
    lengths.copy_(keys)
    graph.replay()
    assert_equal(results, expected)


def test_a_gpu_takes_narrow_keys_and_wide_values():
    with FakeTensorMode():
        for head_dim, head_dim_v in DIMS + [(8, 8), (64, 128)]:
            q, k, v, qv = dense("cuda", dims=(head_dim, head_dim_v))
            assert flash_attn_func(q, k, v, qv=qv).shape == (2, 70, 4, head_dim_v)
            out = flash_mla_with_kvcache(
                torch.cat([qv, q], -1),
                torch.cat([v, k], -1),
                torch.zeros(2, 1, dtype=I32, device="cuda"),
                torch.zeros(2, dtype=I32, device="cuda"),
                head_dim_v,
            )
            assert [x.shape for x in out] == [(2, 70, 4, head_dim_v), (2, 4, 70)]
