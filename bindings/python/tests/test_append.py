"""New rows of a cache, and rotary embedding of new keys and of queries: `fa3.flash_attn_with_kvcache` with k and v, on
the CPU and on a GPU. Needs torch.
"""

import itertools
import math
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from caching import KEYS, Cached
from packing import assert_equal, ends, needs_a_compiler, normal
from reference import rotated

from fa3 import flash_attn_func, flash_attn_with_kvcache

F32, F16, BF16, E4M3, I32 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32
LAYOUTS = ["seqused", "padded", "indexed", 16, 64, 1, "4 padded indexed"]
NEW = [1, 5, [2, 0, 7, 1, 3, 1]]
ROTATIONS = [None, dict(rotary_interleaved=True), dict(rotary_interleaved=False)]


class Appended(Cached):
    """A cache whose last rows of each sequence are new. Before the call these rows are NaN."""

    def __init__(self, device, new, rotation=None, dtype=BF16, rotary_dim=32, table=None, listed=False, **options):
        count = len(KEYS)
        self.new = [new] * count if isinstance(new, int) else new
        keys = [n + more for n, more in zip(KEYS, self.new)]
        super().__init__(device, dtype, keys=keys, **options)
        self.rotation, self.before = rotation, [n - more for n, more in zip(self.keys, self.new)]
        heads, head_dims = self.own[0].shape[2], [x.shape[3] for x in self.own]
        self.fresh = [normal(sum(self.new) + 2, heads, d, dtype=dtype, seed=11 + i, device=device) for i, d in enumerate(head_dims)]
        self.new_ends = None if isinstance(new, int) else ends(self.new, device)
        if isinstance(new, int):
            self.fresh = [x[:-2].unflatten(0, (count, new)) for x in self.fresh]
        # The positions of the first new rows.
        bases = [n + pad for n, pad in zip(self.before, self.pad)]
        self.listed = torch.tensor([(7 * i) % 50 for i in range(count)], dtype=I32, device=device) if listed else None
        self.bases = self.listed.tolist() if listed else bases
        angles = torch.arange(300)[:, None] / 10000 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
        self.cos, self.sin = (x.to(device, table or dtype) for x in (angles.cos(), angles.sin()))
        self.plain_q = self.q
        for i, (first, more) in enumerate(zip(self.before, self.new)):
            part = (i,) if self.new_ends is None else (slice(self.new_ends[i].item(), self.new_ends[i + 1].item()),)
            k, v = (x[part] for x in self.fresh)
            self.own[0][i, first : first + more] = self.turned(k, self.bases[i])
            self.own[1][i, first : first + more] = v
        self.expected = [self.in_memory(x, len(self.k), self.k.shape[1]) for x in self.own]
        for memory in (self.k, self.v):
            for i, (first, n) in enumerate(zip(self.before, self.keys)):
                at = torch.arange(first, n) + self.pad[i]
                memory[self.table[i, at // memory.shape[1]].long(), at % memory.shape[1]] = math.nan
        self.lengths = torch.tensor([n + pad for n, pad in zip(self.before, self.pad)], dtype=I32, device=device)

    def turned(self, x, first, each=True):
        """Rotates rows (rows, heads, head_dim) of one sequence."""
        if self.rotation is None:
            return x
        positions = (torch.arange(len(x)) if each else torch.zeros(len(x), dtype=torch.int64)) + first
        positions = positions[None].to(x.device).clamp(max=len(self.cos) - 1)
        interleaved = self.rotation["rotary_interleaved"]
        return rotated(x[None], self.cos, self.sin, interleaved, positions)[0].to(x.dtype)

    def turn_queries(self, each):
        """Rotates Q as attention should see it. If `each`, each row has its own position."""
        self.q = self.plain_q.clone()
        for i, base in enumerate(self.bases):
            part = (i,) if self.ends is None else (slice(self.ends[i].item(), self.ends[i + 1].item()),)
            self.q[part] = self.turned(self.plain_q[part], base, each)

    def arguments(self):
        given = super().arguments() | dict(k=self.fresh[0], v=self.fresh[1])
        if self.new_ends is not None:
            given["cu_seqlens_k_new"] = self.new_ends
        if self.rotation is not None:
            given |= dict(rotary_cos=self.cos, rotary_sin=self.sin, **self.rotation)
            if self.listed is not None:
                given["rotary_seqlens"] = self.listed
        return given

    def check(self, **options):
        """Computes, judges the results and the cache, and returns the results."""
        masked = options.get("causal", False) or options.get("window_size", (-1, -1)) != (-1, -1)
        results = self.call((self.plain_q, self.k, self.v), return_softmax_lse=True, **options)
        for memory, expected in zip((self.k, self.v), self.expected, strict=True):
            assert torch.equal(memory.view(torch.int16), expected.view(torch.int16)), "rows of the cache"
        self.turn_queries(masked)
        options = {name: x for name, x in options.items() if name in ("causal", "window_size")}
        self.judge(*results, **options)
        return results


@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
@pytest.mark.parametrize("new", NEW, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_rows_are_in_the_cache_and_seen(nan_in_new_tensors, device, layout, new, rotation, splits):
    """The other rows of the cache stay as they are."""
    for rows, mask in itertools.product((new, [1, 3, 0, 2, 5, 1]), (dict(causal=True), {})):
        Appended(device, new, rotation, layout=layout, rows=rows).check(num_splits=splits, **mask)


@pytest.mark.parametrize("rotation", ROTATIONS[1:], ids=str)
def test_rotations_of_all_kinds(nan_in_new_tensors, device, rotation):
    for dtype, rotary_dim, table, listed in itertools.product((F16, BF16), (16, 64), (None, F32), (False, True)):
        given = dict(dtype=dtype, rotary_dim=rotary_dim, table=table, listed=listed)
        Appended(device, 3, rotation, rows=3, layout=16, **given).check(window_size=(20, 0))


@pytest.mark.parametrize("heads, head_dims", [((32, 4), (128, 128)), ((7, 1), (72, 40)), ((16, 1), (192, 128)), ((2, 2), (256, 256))])
def test_heads_and_columns(nan_in_new_tensors, device, heads, head_dims):
    for layout in ("seqused", 16):
        Appended(device, 2, ROTATIONS[1], rows=2, layout=layout, heads=heads, head_dims=head_dims).check(causal=True)


def test_keys_and_values_side_by_side(nan_in_new_tensors, device):
    """K and V are the two halves of each row, as in vLLM's cache."""
    for layout in ("seqused", 16):
        appended = Appended(device, 2, ROTATIONS[2], rows=2, layout=layout)
        expected = appended.check(causal=True)
        appended = Appended(device, 2, ROTATIONS[2], rows=2, layout=layout)
        both = torch.cat([appended.k, appended.v], -1).transpose(1, 2).contiguous().transpose(1, 2)
        appended.k, appended.v = both.split(64, -1)
        assert_equal(appended.check(causal=True), expected)


@pytest.mark.hopper
def test_rows_without_a_place_are_left_out_on_a_gpu():
    device = "cuda"
    cached = Cached(device, keys=[30, 0, 17], layout=16)
    cached.table = torch.tensor([[0, 1], [2, -1], [3, 10**6]], dtype=I32, device=device)
    cached.k, cached.v = (normal(5, 16, 2, 64, seed=i, device=device) for i in range(2))
    k, v = (normal(3, 4, 2, 64, seed=5 + i, device=device) for i in range(2))
    right = [x.clone() for x in (cached.k, cached.v)]
    for memory, x in zip(right, (k, v), strict=True):
        # Of four new rows each, two of the first sequence fit, none of the second, and one of the third.
        memory[1, 14:] = x[0, :2]
        memory[3, 15] = x[2, 0]
    lengths = torch.tensor([30, -3, 15], dtype=I32, device=device)
    q = normal(3, 1, 4, 64, device=device)
    flash_attn_with_kvcache(q, cached.k, cached.v, k, v, cache_seqlens=lengths, page_table=cached.table)
    assert_equal([cached.k, cached.v], right)


def test_keys_and_values_are_pages_of_one_pool():
    """K and V are views of one memory that begin a page apart, and tables list every second page (transformers)."""
    pool, new = normal(9, 16, 2, 64), [normal(2, 1, 2, 64, seed=i) for i in (1, 2)]
    k, v, table = pool[:-1], pool[1:], torch.tensor([[0, 4], [2, 6]], dtype=I32)
    right = pool.clone()
    for i, x in enumerate(new):
        right[table[:, 1].long() + i, 1] = x[:, 0]
    flash_attn_with_kvcache(normal(2, 1, 4, 64), k, v, *new, cache_seqlens=17, page_table=table)
    assert torch.equal(pool, right)
    with pytest.raises(ValueError, match="^output v_cache .* overlaps k_cache "):
        flash_attn_with_kvcache(normal(2, 1, 4, 64), k, v, *new, cache_seqlens=17, page_table=table // 2)
    assert torch.equal(pool, right)


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
@pytest.mark.parametrize("new", [5, [2, 0, 7, 1, 3, 1]], ids=str)
@pytest.mark.parametrize("layout", ["padded", 16])
def test_new_rows_become_e4m3(device, layout, new, rotation):
    """New rows are divided by their scales, and the other rows of the cache stay as they are."""
    appended = Appended(device, new, rotation, layout=layout)
    caches = [x.to(E4M3) for x in (appended.k, appended.v)]
    expected = [x.view(torch.uint8).clone() for x in caches]
    of_k, of_v = (torch.rand(len(KEYS), 2, generator=torch.Generator().manual_seed(i)).to(device) + 0.5 for i in range(2))
    for memory, own, scales in zip(expected, appended.own, (of_k, of_v)):
        for i, (first, n) in enumerate(zip(appended.before, appended.keys)):
            at = torch.arange(first, n) + appended.pad[i]
            codes = (own[i, first:n].float() / scales[i][:, None]).to(E4M3)
            memory[appended.table[i, at // memory.shape[1]].long(), at % memory.shape[1]] = codes.view(torch.uint8)
    results = appended.call((appended.plain_q, *caches), causal=True, k_descale=of_k, v_descale=of_v, return_softmax_lse=True)
    for memory, right in zip(caches, expected, strict=True):
        assert torch.equal(memory.view(torch.uint8), right)
    # Attention over the cache after the call has the same results.
    appended.turn_queries(True)
    again = Cached.arguments(appended) | dict(cache_seqlens=torch.tensor([n + pad for n, pad in zip(appended.keys, appended.pad)], dtype=I32, device=device))
    of_cache = dict(k_descale=of_k, v_descale=of_v, causal=True, return_softmax_lse=True)
    assert_equal(results, flash_attn_with_kvcache(appended.q, *caches, **again, **of_cache)[:2])


@pytest.mark.parametrize("of_q", [BF16, E4M3], ids=str)
def test_new_rows_of_e4m3_are_copied(device, of_q):
    q, new = normal(2, 3, 4, 64, device=device).to(of_q), [normal(2, 3, 2, 64, seed=i, device=device).to(E4M3) for i in (1, 2)]
    caches = [normal(2, 40, 2, 64, seed=i, device=device).to(E4M3) for i in (3, 4)]
    expected = [x.view(torch.uint8).clone() for x in caches]
    for memory, x in zip(expected, new):
        memory[:, 30:33] = x.view(torch.uint8)
    out = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=30, causal=True)
    assert out.dtype == BF16
    for memory, right in zip(caches, expected, strict=True):
        assert torch.equal(memory.view(torch.uint8), right)
    cos = torch.ones(50, 16, device=device)
    with pytest.raises(ValueError, match="^rows of torch.float8_e4m3fn cannot be rotated, expected torch.float16, torch.bfloat16 or torch.float32$"):
        flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=30, rotary_cos=cos, rotary_sin=cos)


@pytest.mark.parametrize("device, dtype", [("cpu", BF16), ("cpu", F32), pytest.param("cuda", BF16, marks=pytest.mark.hopper)], ids=str)
def test_token_by_token_as_at_once(device, dtype):
    """Decoding token by token over a growing cache gives what one causal call over all rows gives."""
    q, k, v = (normal(2, 40, heads, 64, dtype=dtype, seed=i, device=device) for i, heads in enumerate((4, 2, 2)))
    expected = flash_attn_func(q, k, v, causal=True)
    k_cache, v_cache = (torch.full((2, 40, 2, 64), math.nan, dtype=dtype, device=device) for _ in "kv")
    tolerance = dict(rtol=2e-6, atol=2e-6) if dtype == F32 else dict(rtol=2e-2, atol=1e-2)
    at = 0
    for rows in (7, 1, 1, 20, 1, 10):
        part = slice(at, at + rows)
        out = flash_attn_with_kvcache(q[:, part], k_cache, v_cache, k[:, part], v[:, part], cache_seqlens=at, causal=True)
        torch.testing.assert_close(out, expected[:, part], **tolerance)
        at += rows
    assert_equal([k_cache, v_cache], [k, v])


def test_lists_that_make_no_sense_are_named():
    """The CPU reads the lists, and refuses invalid ones."""
    q, k, new = torch.zeros(2, 1, 4, 64).bfloat16(), torch.zeros(2, 9, 2, 64).bfloat16(), torch.ones(5, 2, 64).bfloat16()
    tables = dict.fromkeys(["rotary_cos", "rotary_sin"], torch.ones(6, 16))
    rows = dict(cu_seqlens_k_new=torch.tensor([0, 2, 5], dtype=I32))
    for given, sentence in [
        (dict(cu_seqlens_k_new=torch.tensor([0, 3, 6], dtype=I32)), "new rows: cu_seqlens ends at 6, past the 5 rows of k"),
        (dict(cu_seqlens_k_new=torch.tensor([0, 3, 2], dtype=I32)), "new rows: cu_seqlens falls from 3 to 2 at entry 2"),
        (dict(cache_seqlens=7), "3 rows do not fit behind the 7 of sequence 1, whose capacity is 9"),
        (dict(cache_seqlens=torch.tensor([3, -1], dtype=I32)), "cache_seqlens is -1 for sequence 1, outside 0 to 9"),
        (dict(cache_seqlens=4) | tables, "sequence 1 has rows up to position 6, and the tables have 6 positions"),
        (dict(rotary_seqlens=torch.tensor([0, -2], dtype=I32)) | tables, "rotary_seqlens is -2 for sequence 1, less than 0"),
        (dict(cache_batch_idx=torch.tensor([1, 1], dtype=I32)), "new rows of sequences 0 and 1 go to one place: row 3 of entry 1"),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            flash_attn_with_kvcache(q, k, k.clone(), new, new, **(dict(cache_seqlens=3) | rows | given))
    assert (k == 0).all(), "nothing was written"


def test_one_cache_of_keys_and_values_gets_no_rows(device):
    """Rows of K would overwrite rows of V. That is so too if V begins one row behind K."""
    q, cache, new = normal(2, 1, 4, 64, device=device), normal(2, 9, 2, 64, device=device), normal(2, 1, 2, 64, device=device)
    for k, v in [(cache, cache), (cache[:, :8], cache[:, 1:])]:
        before = cache.clone()
        with pytest.raises(ValueError, match=r"^output [kv]_cache .* overlaps [kv]_cache "):
            flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=3)
        assert torch.equal(cache, before)


@pytest.mark.parametrize("name", ["q", "k_cache", "k"])
def test_nothing_may_require_grad(device, name):
    appended = Appended(device, 1)
    given = dict(q=appended.q, k_cache=appended.k, v_cache=appended.v) | appended.arguments()
    given[name] = given[name].clone().requires_grad_()
    sentence = "^appending k and v to a cache has no gradients, but one of the arguments requires grad$"
    with pytest.raises(NotImplementedError, match=sentence):
        flash_attn_with_kvcache(**given)
    with torch.no_grad():
        flash_attn_with_kvcache(**given)


# Tests of CUDA graphs, and of torch's compiler and operators.


@pytest.mark.hopper
@pytest.mark.parametrize("splits", [0, 1])
def test_a_graph_appends_where_lengths_say(splits):
    q, k, v = (normal(2, 40, heads, 64, seed=i, device="cuda") for i, heads in enumerate((4, 2, 2)))
    expected = flash_attn_func(q, k, v, causal=True)
    k_cache, v_cache = (torch.full((2, 40, 2, 64), math.nan, dtype=BF16, device="cuda") for _ in "kv")
    lengths = torch.zeros(2, dtype=I32, device="cuda")
    row = [x[:, :1].clone() for x in (q, k, v)]

    def step():
        return flash_attn_with_kvcache(row[0], k_cache, v_cache, row[1], row[2], cache_seqlens=lengths, causal=True, num_splits=splits)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    k_cache.fill_(math.nan), v_cache.fill_(math.nan)
    for at in range(40):
        for to, x in zip(row, (q, k, v), strict=True):
            to.copy_(x[:, at : at + 1])
        lengths.fill_(at)
        graph.replay()
        torch.testing.assert_close(out[:, 0], expected[:, at], rtol=2e-2, atol=1e-2)
    assert_equal([k_cache, v_cache], [k, v])


def test_a_call_enters_the_extension_module_once(device, calls):
    Appended(device, 1, ROTATIONS[1], layout=16).call()
    [(name, given)] = calls
    assert name == "append" and {"k_new", "rotary_cos"} <= given.keys()


def test_nothing_is_written_where_the_attention_is_refused(device):
    appended = Appended(device, 1, layout=16)
    before = [x.clone() for x in (appended.k, appended.v)]
    for given in (dict(s_aux=torch.zeros(3, device=device)), dict(out=torch.zeros(3, device=device)), dict(softmax_scale=math.nan)):
        with pytest.raises(ValueError):
            appended.call(**given)
    for x, kept in zip((appended.k, appended.v), before, strict=True):
        assert torch.equal(x.view(torch.int16), kept.view(torch.int16))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_write_the_cache(device, backend):
    if backend == "inductor":
        needs_a_compiler()

    def step(q, k_cache, v_cache, k, v, lengths, table, cos, sin):
        given = dict(cache_seqlens=lengths, page_table=table, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False)
        first = flash_attn_with_kvcache(q * 2, k_cache, v_cache, k, v, causal=True, **given)
        # A second layer sees the rows that the first one has written.
        return first, flash_attn_with_kvcache(first, k_cache, v_cache, cache_seqlens=lengths + 1, page_table=table, causal=True)

    torch.compiler.reset()
    plain, traced = (Appended(device, 1, ROTATIONS[2], layout=16, rows=1) for _ in range(2))
    results = []
    for appended, function in ((plain, step), (traced, torch.compile(step, backend=backend, fullgraph=True))):
        given = appended.lengths, appended.table, appended.cos, appended.sin
        results.append(function(appended.q, appended.k, appended.v, *appended.fresh, *given))
    assert_equal(*results)
    assert torch.equal(plain.k.view(torch.int16), traced.k.view(torch.int16))
    assert torch.equal(plain.v.view(torch.int16), plain.expected[1].view(torch.int16))
    assert torch.equal(traced.v.view(torch.int16), plain.expected[1].view(torch.int16))


def test_compiled_calls_write_keys_and_values_side_by_side(device):
    def step(q, both, k, v, lengths):
        k_cache, v_cache = both.split(64, -1)
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    torch.compiler.reset()
    results, caches = [], []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        appended = Appended(device, 1, rows=1)
        both = torch.cat([appended.k, appended.v], -1)
        results.append([function(appended.q, both, *appended.fresh, appended.lengths)])
        caches.append(both)
    assert_equal(*results)
    assert torch.equal(caches[0].view(torch.int16), caches[1].view(torch.int16))
