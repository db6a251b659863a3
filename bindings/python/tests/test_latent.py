"""Latent attention: `qv`, which FlashAttention-3's functions take, and FlashMLA's interface. Needs torch."""

import inspect
import math
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from caching import Cached
from packing import MASKS, Packed, assert_equal, normal
from reference import judge, rotated, standard
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fa3
from fa3 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, get_scheduler_metadata
from fa3.flash_mla import flash_mla_with_kvcache, get_mla_metadata

F32, F16, BF16, I32, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.float8_e4m3fn
HALF = [F16, BF16]
# head_dim and head_dim_v, which a GPU's kernels take.
DIMS = [(64, 512), (64, 256), (32, 512)]


def joined(q, k, v, qv):
    """Q, K and V of the same attention without qv."""
    return torch.cat([qv, q], -1), torch.cat([v, k], -1), v


def dense(device, dtype=BF16, dims=DIMS[0], rows=(70, 90), heads=(4, 2)):
    """Q, K, V and qv."""
    (of_q, of_k), (head_dim, head_dim_v) = rows, dims
    q, qv = (normal(2, of_q, heads[0], d, dtype=dtype, seed=d, device=device) for d in (head_dim, head_dim_v))
    k, v = (normal(2, of_k, heads[1], d, dtype=dtype, seed=1 + d, device=device) for d in (head_dim, head_dim_v))
    return q, k, v, qv


# What is computed.


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_scores_are_of_both_products(device, dtype, dims, mask):
    q, k, v, qv = dense(device, dtype, dims)
    out, lse = flash_attn_func(q, k, v, qv=qv, **mask, return_attn_probs=True)
    left, right = mask.get("window_size", (-1, -1))
    judge(out, lse, *joined(q, k, v, qv), window=(left, 0 if mask.get("causal") else right))


@pytest.mark.parametrize("dims", [(8, 40), (1, 3), (64, 512)], ids=str)
def test_any_columns_of_float32_on_the_cpu(dims):
    q, k, v, qv = dense("cpu", F32, dims, rows=(9, 20))
    judge(*flash_attn_func(q, k, v, qv=qv, return_attn_probs=True), *joined(q, k, v, qv))
    options = dict(softmax_scale=0.3, softcap=4.0)
    out, lse = flash_attn_func(q, k, v, qv=qv, **options, return_attn_probs=True)
    judge(out, lse, *joined(q, k, v, qv), scale=0.3, softcap=4.0)


def test_sinks_and_a_given_output(device):
    q, k, v, qv = dense(device)
    sinks = torch.tensor([1.0, -3.0, -math.inf, 5.0], device=device)
    o, lse = standard(*joined(q, k, v, qv))
    memory = torch.full((2, 70, 5, 512), 7.0, dtype=BF16, device=device)
    out = memory[:, :, :4]
    same, with_sinks = flash_attn_func(q, k, v, qv=qv, s_aux=sinks, out=out, return_attn_probs=True)
    assert same is out and (memory[:, :, 4] == 7).all()
    expected = torch.logaddexp(lse, sinks[:, None].double())
    torch.testing.assert_close(with_sinks.double(), expected, rtol=1e-5, atol=1e-5)
    weight = (lse - expected).exp().transpose(1, 2)[..., None]
    torch.testing.assert_close(out.double(), o * weight, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("used", [None, ([7, 0, 0, 20, 130, 0, 1, 100], [9, 5, 1, 0, 1, 0, 139, 0])], ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_packed_sequences_are_those_alone(device, dtype, used):
    packed = Packed(device, dtype, head_dims=DIMS[0], used=used)
    qv = normal(len(packed.q), 4, 512, dtype=dtype, seed=9, device=device)
    out, lse = packed.call(qv=qv, causal=True, return_attn_probs=True)
    for of_q, of_k in packed.sequences():
        given = packed.q[None, of_q], packed.k[None, of_k], packed.v[None, of_k], qv[None, of_q]
        judge(out[None, of_q], lse[None, :, of_q].contiguous(), *joined(*given), window=(-1, 0))
    in_use, _ = packed.in_use()
    assert (out[~in_use] == 0).all() and (lse[:, ~in_use] == -math.inf).all()


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
    out, lse = cached.call(qv=qv, causal=True, return_softmax_lse=True)
    for q, k, v, of_o, of_lse in cached.sequences():
        results = out[of_o], lse[of_lse].contiguous()
        judge(*results, *joined(q, k, v, qv[of_o]), window=(-1, 0))
    assert not torch.equal(out, cached.call(causal=True))


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


# FlashMLA's interface.


class Paged:
    """Q and a cache of latent vectors in pages, of sequences of so many keys; pages of nobody's are NaN."""

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

    def judge(self, out, lse, scale=None, window=(-1, -1)):
        for i, own in enumerate(self.own):
            given = self.q[i : i + 1], own, own[..., : self.latent]
            judge(out[i : i + 1], lse[i : i + 1], *given, scale=scale, window=window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "given",
    [dict(), dict(heads=(8, 2), rows=3), dict(page_rows=1), dict(page_rows=16, rows=1), dict(latent=256), dict(heads=(128, 1))],
    ids=str,
)
def test_rows_of_one_cache_are_keys_and_values(device, given, dtype, causal):
    paged = Paged(device, dtype, **given)
    out, lse = paged.call(*get_mla_metadata(paged.lengths, 32, 1), causal=causal)
    assert out.shape == (*paged.q.shape[:3], paged.latent) and lse.shape == (*paged.q.shape[:1], *paged.q.shape[2:0:-1])
    paged.judge(out, lse, window=(-1, 0) if causal else (-1, -1))
    paged.judge(*paged.call(softmax_scale=0.1), scale=0.1)


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


def test_the_signature_is_flash_mlas():
    parameters = inspect.signature(flash_mla_with_kvcache).parameters
    names = "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal"
    assert list(parameters)[:9] == names.split()
    assert fa3.flash_mla.flash_mla_with_kvcache is flash_mla_with_kvcache


@pytest.mark.parametrize(
    "given, error, sentence",
    [
        (dict(is_fp8_kvcache=True), NotImplementedError, "is_fp8_kvcache is not supported yet"),
        (dict(indices=torch.zeros(1)), NotImplementedError, "indices is not supported yet"),
        (dict(head_dim_v=576), ValueError, "head_dim_v is 576, expected 1 to 575: a part of q's columns"),
        (dict(head_dim_v=0), ValueError, "head_dim_v is 0, expected 1 to 575: a part of q's columns"),
        (dict(head_dim_v=1.5), TypeError, "head_dim_v is 1.5, expected an integer"),
        (dict(k_cache=torch.zeros(5, 64, 576)), ValueError, "k_cache has 3 dimensions, expected 4: (batch or pages, rows, heads, head_dim)"),
        (dict(k_cache=torch.zeros(5, 64, 1, 512)), ValueError, "head_dim_v is 512, expected 1 to 511: a part of k_cache's columns"),
        (dict(k_cache=torch.zeros(5, 64, 1, 570)), ValueError, "k_cache has head_dim 58, expected 64"),
        (dict(block_table=[[0]]), TypeError, "block_table is list, expected torch.Tensor"),
        (dict(cache_seqlens=5), TypeError, "cache_seqlens is int, expected torch.Tensor"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_makes_no_sense_in_flash_mlas_words(given, error, sentence):
    tensors = dict(q=torch.zeros(2, 1, 4, 576), k_cache=torch.zeros(5, 64, 1, 576), block_table=torch.zeros(2, 2, dtype=I32))
    arguments = tensors | dict(cache_seqlens=torch.ones(2, dtype=I32), head_dim_v=512) | given
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        flash_mla_with_kvcache(**arguments)


# What is refused.


@pytest.mark.parametrize(
    "qv, sentence",
    [
        (normal(2, 9, 4, 32, dtype=F32), "qv has head_dim 32, expected 40"),
        (normal(2, 9, 2, 40, dtype=F32), "qv has heads 2, expected 4"),
        (normal(2, 20, 4, 40, dtype=F32), "qv has seqlen 20, expected 9"),
        (normal(9, 4, 40, dtype=F32), "qv has 3 dimensions, expected 4 as q has"),
        (normal(2, 9, 4, 40), "qv is torch.bfloat16, expected torch.float32 like q"),
        (normal(2, 9, 4, 40, dtype=F32).to("meta"), "qv is on meta and q on cpu, expected one CUDA device or the CPU"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_qv_that_does_not_fit_is_refused(qv, sentence):
    q, k, v, _ = dense("cpu", F32, (8, 40), rows=(9, 20))
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        flash_attn_func(q, k, v, qv=qv)
    if qv.dim() == 4 and not qv.is_meta:
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            flash_attn_with_kvcache(q, k, v, qv=qv)


def test_what_has_no_qv():
    x = normal(1, 8, 2, 16).to(E4M3)
    with pytest.raises(ValueError, match="^qv takes torch.float32, torch.float16 or torch.bfloat16, not torch.float8_e4m3fn$"):
        flash_attn_func(x, x, x, qv=x)
    q, qv, kv = normal(1, 8, 2, 72), normal(1, 8, 2, 512), normal(1, 8, 1, 512)
    with pytest.raises(ValueError, match="^q has head_dim 72 and qv 512, together more than 576$"):
        flash_attn_func(q, kv[..., :72], kv, qv=qv)
    with pytest.raises(TypeError, match="^qv is list, expected torch.Tensor$"):
        flash_attn_func(q, q, q, qv=[1])


def functions(device):
    """The functions that take qv, their tensors, and the sentence of what has no gradients."""
    q, k, v, qv = dense(device, rows=(5, 5))
    ends = torch.tensor([0, 2, 5], dtype=I32, device=device)
    packed = dict(q=q[0], k=k[0], v=v[0], qv=qv[0])

    def varlen(**tensors):
        return flash_attn_varlen_func(**tensors, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=3, max_seqlen_k=3)

    cache = dict(q=q, k_cache=k, v_cache=v, qv=qv)
    of_both = "there is qv, for which attention has no gradients"
    of_cache = "q, k_cache, v_cache, qv, a descale or s_aux requires grad, and attention over a cache has no gradients"
    return [
        (flash_attn_func, dict(q=q, k=k, v=v, qv=qv), of_both),
        (varlen, packed, of_both),
        (flash_attn_with_kvcache, cache, of_cache),
    ]


def flops(function, **tensors):
    with FlopCounterMode(display=False) as counter:
        function(**tensors)
    return counter.get_total_flops()


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
        q, k, v, qv = dense("cuda", dims=(72, 256))
        with pytest.raises(ValueError, match="head_dim 72 and head_dim_v 256: they take up to 64 and 512$"):
            flash_attn_func(q, k, v, qv=qv)
        q, k, v, qv = dense("cuda", F32)
        with pytest.raises(ValueError, match="^the forward kernels take torch.float16, torch.bfloat16 and torch.float8_e4m3fn, not torch.float32$"):
            flash_attn_func(q, k, v, qv=qv)


def test_fake_tensors_and_operations():
    with FakeTensorMode():
        for function, tensors, _ in functions("cpu"):
            out = function(**tensors)
            assert (out.shape, out.dtype) == (tensors["qv"].shape, BF16)
            without = {name: x for name, x in tensors.items() if name != "qv"}
            pairs, rest = divmod(flops(function, **without), 2 * (64 + 512))
            assert rest == 0 and flops(function, **tensors) == pairs * 2 * (64 + 512 + 512)
            with pytest.raises(ValueError, match="^qv has head_dim 64, expected 512$"):
                function(**(tensors | dict(qv=tensors["q"])))
