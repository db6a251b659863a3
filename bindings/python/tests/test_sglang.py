"""SGLang's calls of FlashAttention-3, which go through SGLang's own functions if it is installed. Needs torch."""

import collections
import functools
import importlib
import importlib.metadata
import importlib.util
import math
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import normal

import fa3.flash_mla
import fa3.sglang
from fa3 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="skipped: sglang is not installed")
BF16, I32 = torch.bfloat16, torch.int32


class Step:
    """The tensors of a step with two sequences. Pages have one row, as in SGLang's cache."""

    def __init__(self, device):
        ints = dict(dtype=I32, device=device)
        self.q = normal(5, 4, 64, dtype=BF16, device=device)
        self.k_cache, self.v_cache = (normal(40, 1, 2, 64, dtype=BF16, seed=i, device=device) for i in (1, 2))
        self.page_table = torch.randperm(40, generator=torch.Generator().manual_seed(0)).view(2, 20).to(**ints)
        self.cache_seqlens = torch.tensor([17, 9], **ints)
        self.cu_seqlens_q, self.cu_seqlens_k = torch.tensor([0, 1, 5], **ints), torch.tensor([0, 17, 26], **ints)
        self.sinks = torch.tensor([0.5, -math.inf, 1.0, 0.0], device=device).to(BF16)

    def lists(self):
        names = ("cache_seqlens", "page_table", "cu_seqlens_q")
        return {name: getattr(self, name) for name in names} | dict(max_seqlen_q=4)

    def expected(self, **options):
        lists = self.lists()
        return flash_attn_with_kvcache(self.q, self.k_cache, self.v_cache, **lists, causal=True, **options)


def decode(function, step, **options):
    """Calls a function as SGLang's backend does."""
    return function(
        q=step.q,
        k_cache=step.k_cache,
        v_cache=step.v_cache,
        **step.lists(),
        cu_seqlens_k_new=step.cu_seqlens_k,
        softmax_scale=0.125,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
        **(dict(num_splits=0) | options),
    )


def check_calls(with_kvcache, varlen, device):
    step = Step(device)
    metadata = torch.arange(9, dtype=I32, device=device)
    found = decode(with_kvcache, step, sinks=step.sinks, scheduler_metadata=metadata)
    assert torch.equal(found, step.expected(s_aux=step.sinks))
    out = torch.empty_like(step.q)
    o, lse, *_ = decode(with_kvcache, step, return_softmax_lse=True, out=out)
    assert o is out and torch.equal(o, step.expected()) and lse.shape == (4, 5)
    rows = [normal(26, heads, 64, dtype=BF16, seed=heads, device=device) for heads in (4, 2, 2)]
    ends = step.cu_seqlens_k
    lists = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=17, max_seqlen_k=17)
    options = dict(softmax_scale=0.125, causal=True, return_softmax_lse=True)
    o, lse, *_ = varlen(*rows, **lists, **options)
    expected = flash_attn_varlen_func(*rows, ends, ends, 17, 17, causal=True, return_attn_probs=True)
    assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])
    dense = [x[None] for x in rows]
    found = varlen(*dense, cu_seqlens_q=None, cu_seqlens_k=None, causal=True, sinks=step.sinks)
    assert torch.equal(found, flash_attn_func(*dense, causal=True, s_aux=step.sinks))


def test_calls_as_sglang_makes_them(device):
    check_calls(fa3.sglang.flash_attn_with_kvcache, fa3.sglang.flash_attn_varlen_func, device)


def test_new_keys_have_their_lists():
    step = Step("cpu")
    new = [normal(2, 2, 64, dtype=BF16, seed=i) for i in (7, 8)]
    ends = torch.tensor([0, 1, 2], dtype=I32)
    lists = (step.cache_seqlens, None, None, step.page_table, step.cu_seqlens_q, ends, 4)
    caches = [[x.clone() for x in (step.k_cache, step.v_cache)] for _ in range(2)]
    found = fa3.sglang.flash_attn_with_kvcache(step.q, *caches[0], *new, None, None, None, *lists, causal=True)
    options = step.lists() | dict(cu_seqlens_k_new=ends, causal=True)
    assert torch.equal(found, flash_attn_with_kvcache(step.q, *caches[1], *new, **options))
    assert not torch.equal(caches[0][0], step.k_cache) and torch.equal(caches[0][0], caches[1][0])


def test_keys_without_a_rotated_part(device):
    """With only_qv there is no Q and no K. SGLang passes None, and also tensors that do not matter."""
    step = Step(device)
    qv, q = normal(5, 4, 512, dtype=BF16, seed=3, device=device), step.q
    step.v_cache = normal(40, 1, 1, 512, dtype=BF16, seed=2, device=device)
    for step.q, step.k_cache in ((None, None), (q, step.k_cache)):
        found = decode(fa3.sglang.flash_attn_with_kvcache, step, qv=qv, only_qv=True)
        expected = flash_attn_with_kvcache(
            None, None, step.v_cache, qv=qv, softmax_scale=0.125, causal=True, **step.lists()
        )
        assert torch.equal(found, expected)
    ends, values = step.cu_seqlens_k, normal(26, 1, 512, dtype=BF16, seed=4, device=device)
    lists = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=17, max_seqlen_k=17)
    qv = normal(26, 4, 512, dtype=BF16, seed=5, device=device)
    found = fa3.sglang.flash_attn_varlen_func(None, None, values, **lists, qv=qv, only_qv=True)
    assert torch.equal(found, flash_attn_varlen_func(None, None, values, **lists, qv=qv))


def test_the_deterministic_mode_fixes_the_splits(monkeypatch):
    """SGLang asks for one split there."""
    passed = []
    monkeypatch.setattr(fa3.sglang, "_with_kvcache", lambda *_, **options: passed.append(options))
    for given in (0, 1, 4):
        decode(fa3.sglang.flash_attn_with_kvcache, Step("cpu"), num_splits=given)
    assert [(x["num_splits"], x.get("split_keys")) for x in passed] == [(0, None), (0, "fixed"), (4, None)]


# Functions of sgl_kernel.flash_mla. They return their names.


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits,
    softmax_scale=None,
    causal=False,
    descale_q=None,
    descale_k=None,
    is_fp8_kvcache=False,
    indices=None,
):
    return "flash_mla_with_kvcache"


def get_mla_metadata(cache_seqlens=None, num_q_tokens_per_head_k=None, num_heads_k=None, is_fp8_kvcache=False):
    return "get_mla_metadata"


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    return "flash_mla_sparse_fwd"


def hooked(theirs, of=fa3.sglang._OF_LATENT):
    """A function of FlashMLA with this package's hook, as SGLang's registry wraps it."""
    return functools.partial(of[theirs.__name__], theirs)


def test_flash_mla_over_rows_of_16_bits_comes_here(device):
    ints = dict(dtype=I32, device=device)
    q = normal(2, 1, 64, 576, dtype=BF16, device=device)
    cache = normal(3, 64, 1, 576, dtype=BF16, seed=1, device=device)
    lists = dict(block_table=torch.tensor([[2, 0], [1, -1]], **ints), cache_seqlens=torch.tensor([70, 9], **ints))
    metadata, splits = hooked(get_mla_metadata)(lists["cache_seqlens"], 64, 1)
    assert splits.shape == (3,)
    given = dict(q=q, k_cache=cache, **lists, head_dim_v=512, softmax_scale=0.1, causal=True)
    planned = dict(tile_scheduler_metadata=metadata, num_splits=splits)
    o, lse = hooked(flash_mla_with_kvcache)(**given, **planned)
    expected = fa3.flash_mla.flash_mla_with_kvcache(**given)
    assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])
    for other in (dict(is_fp8_kvcache=True), dict(descale_q=splits, descale_k=splits)):
        assert hooked(flash_mla_with_kvcache)(**given, **planned, **other) == "flash_mla_with_kvcache"
    assert hooked(get_mla_metadata)() == "get_mla_metadata"
    assert hooked(get_mla_metadata)(splits, 64, 1, is_fp8_kvcache=True) == "get_mla_metadata"


def test_sparse_prompts_come_here(monkeypatch):
    """By the function of FlashMLA's name, with SGLang's arguments."""
    passed = []
    monkeypatch.setattr(fa3.flash_mla, "flash_mla_sparse_fwd", lambda **given: passed.append(given), raising=False)
    given = dict(q=1, kv=2, indices=3, sm_scale=0.1, d_v=512, topk_length=4)
    hooked(flash_mla_sparse_fwd, dict(flash_mla_sparse_fwd=fa3.sglang._around("flash_mla_sparse_fwd")))(**given)
    assert passed == [given]


@pytest.mark.parametrize("has_flash_mla", [False, True])
def test_registration(monkeypatch, has_flash_mla):
    """Over the parts of SGLang that `register` uses."""
    registry = SimpleNamespace(_hooks=collections.defaultdict(list))
    registry.register = lambda target, hook, kind: registry._hooks[target].append((kind, hook, None))
    modules = {
        "sglang.srt.plugins.hook_registry": dict(HookRegistry=registry, HookType=SimpleNamespace(REPLACE=1, AROUND=2)),
        "sglang.kernels.ops.attention.flash_attention_v3": dict(_load_fa3_kernels=dict),
        "sgl_kernel.flash_mla": dict(flash_mla_with_kvcache=dict, get_mla_metadata=dict) if has_flash_mla else None,
    }
    for name, names in modules.items():
        monkeypatch.setitem(sys.modules, name, names and SimpleNamespace(**names))
    fa3.sglang.register()
    fa3.sglang.register()
    found = {target: kind for target, [(kind, _, _)] in registry._hooks.items()}
    latent = {f"sgl_kernel.flash_mla.{name}": 2 for name in ("flash_mla_with_kvcache", "get_mla_metadata")}
    assert found == {fa3.sglang._TARGET: 1} | (latent if has_flash_mla else {})


def test_what_is_not_supported_is_refused():
    step = Step("cpu")
    with pytest.raises(TypeError, match="^there are 29 arguments by their place, expected up to 28$"):
        fa3.sglang.flash_attn_with_kvcache(*[step.q] * 5, *[None] * 24)
    with pytest.raises(ValueError, match="^there is seqused_k without cu_seqlens_q$"):
        fa3.sglang.flash_attn_varlen_func(step.q, step.q, step.q, None, None, seqused_k=step.cache_seqlens)


def test_it_is_a_plugin_that_the_user_asks_for(monkeypatch):
    [plugin] = importlib.metadata.entry_points(group="sglang.srt.plugins", name="fa3")
    called = []
    monkeypatch.setattr(fa3.sglang, "register", lambda: called.append(1))
    for value, times in ((None, 0), ("0", 0), ("1", 1)):
        if value is None:
            monkeypatch.delenv(fa3.sglang.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(fa3.sglang.VARIABLE, value)
        plugin.load()()
        assert len(called) == times


@needs_sglang
def test_sglangs_functions_come_here(device, monkeypatch):
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    kernels = importlib.import_module("sglang.kernels.ops.attention.flash_attention_v3")
    theirs = importlib.import_module("sglang.kernels.ops.attention.flash_attention")
    fa3.sglang.register()
    fa3.sglang.register()
    assert len(hooks._hooks[fa3.sglang._TARGET]) == 1
    hooks.apply_hooks()
    # SGLang's own check would look for a GPU.
    monkeypatch.setattr(kernels, "_is_fa3_supported", lambda: True)
    check_calls(theirs.flash_attn_with_kvcache, theirs.flash_attn_varlen_func, device)


@needs_sglang
def test_a_version_without_the_place_is_refused(monkeypatch):
    kernels = importlib.import_module("sglang.kernels.ops.attention.flash_attention_v3")
    monkeypatch.delattr(kernels, "_load_fa3_kernels")
    with pytest.raises(ImportError, match="^sglang has no sglang.kernels.ops.attention.flash_attention_v3._load_fa3"):
        fa3.sglang.register()
