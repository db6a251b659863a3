"""vLLM's attention backend: classes, lists and results. If vLLM is installed, tests run with vLLM itself, otherwise
with the parts of its interface in `vllm_interface`. Needs torch.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

import vllm_interface
from packing import normal
from reference import standard

import fa3.vllm
from fa3 import flash_attn_func, masks

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="skipped: vllm is not installed")
BF16, E4M3, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
# The numbers of new keys and of all keys of four sequences: a decoding one, a prompt, a part of a prompt, and none.
ROWS, KEYS = [1, 7, 4, 0], [37, 7, 20, 0]
HEADS, HEADS_KV, PAGE = 4, 2, 16
# The number of rows behind the last sequence. A captured graph has such rows.
FILLED = 2
# vLLM's kernel that gives each token and head a scale.
OF_TOKENS = "triton_reshape_and_cache_flash_per_token_head_quant"
# The order in memory of a cache's axes, which are pages, heads, rows.
LAYOUTS = dict(HND=(0, 1, 2), NHD=(0, 2, 1), heads_outside=(1, 0, 2))


@pytest.fixture
def backend(monkeypatch):
    """Our module of backend classes, on vLLM or on its stand-in."""
    if not HAS_VLLM:
        vllm_interface.install(monkeypatch)
        monkeypatch.delitem(sys.modules, "fa3.vllm.backend", raising=False)
    elif not torch.cuda.is_available():
        vllm_interface.compute_on_the_cpu()
    module = importlib.import_module("fa3.vllm.backend")
    if not (HAS_VLLM and torch.cuda.is_available()):
        monkeypatch.setattr(module.ops, "reshape_and_cache_flash", vllm_interface.reshape_and_cache_flash)
        monkeypatch.setattr(module.triton_ops, OF_TOKENS, getattr(vllm_interface, OF_TOKENS))
    yield module
    if not HAS_VLLM:
        sys.modules.pop("fa3.vllm.backend", None)


@pytest.fixture
def registry(backend):
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum.CUSTOM.clear_override()
    yield registry
    registry.AttentionBackendEnum.CUSTOM.clear_override()


def ends_of(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=I32, device=device)


class Batch:
    """A batch of sequences in pages, and the arguments of its layers."""

    def __init__(self, device, head_size=64, layout="HND", dtype=BF16, causal=True, extra=0):
        self.device, self.head_size, self.dtype = device, head_size, dtype
        self.q, self.k, self.v = (
            [normal(n, heads, head_size, dtype=BF16, seed=seed + i, device=device) for i, n in enumerate(lengths)]
            for seed, lengths, heads in ((0, ROWS, HEADS), (10, KEYS, HEADS_KV), (20, KEYS, HEADS_KV))
        )
        pages = [-(-n // PAGE) for n in KEYS]
        numbers = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(0)).tolist()
        self.pages = [[numbers.pop() for _ in range(n)] for n in pages]
        order = LAYOUTS[layout]
        shape = sum(pages) + 2, HEADS_KV, PAGE
        cache = torch.empty(*(shape[i] for i in order), 2 * head_size + extra, dtype=dtype, device=device)
        # 0xFF is NaN: rows that are not written must not reach results.
        cache.view(torch.uint8).fill_(0xFF)
        back = sorted(range(3), key=lambda i: order[i])
        self.cache = cache.permute(*back, 3)
        self.layer = SimpleNamespace(
            _k_scale=torch.tensor(0.25 if dtype == E4M3 else 1.0, device=device),
            _v_scale=torch.tensor(0.5 if dtype == E4M3 else 1.0, device=device),
        )
        self.causal = causal

    def slots(self, i, keys):
        return [self.pages[i][j // PAGE] * PAGE + j % PAGE for j in keys]

    def fill(self, impl):
        """Writes all keys to the cache: first the keys of earlier steps, then the new ones."""
        old = [range(keys - rows) for rows, keys in zip(ROWS, KEYS)]
        new = [range(keys - rows, keys) for rows, keys in zip(ROWS, KEYS)]
        cache = self.cache.view(torch.uint8) if self.dtype == E4M3 else self.cache
        for ranges, filled in ((old, 0), (new, FILLED)):
            slots = [slot for i, keys in enumerate(ranges) for slot in self.slots(i, keys)]
            # vLLM passes more rows of keys than slots, and negative slots, to which no key goes.
            slots = torch.tensor([*slots, *[-1] * filled], device=self.device)
            rows = ((x[keys.start : keys.stop] for x, keys in zip(xs, ranges)) for xs in (self.k, self.v))
            key, value = (torch.cat([*x, torch.full_like(self.k[0][:3], torch.nan)]) for x in rows)
            impl.do_kv_cache_update(self.layer, key, value, cache, slots)
        return cache

    def lists(self, backend, rows=ROWS, keys=KEYS):
        ends = ends_of(rows, self.device)
        table = torch.full((len(rows), 5), -1, dtype=I32)
        for i, pages in enumerate(self.pages):
            table[i, : len(pages)] = torch.tensor(pages, dtype=I32)
        return backend.CommonAttentionMetadata(
            query_start_loc=ends,
            query_start_loc_cpu=ends.cpu(),
            seq_lens=torch.tensor(keys, dtype=I32, device=self.device),
            num_reqs=len(rows),
            num_actual_tokens=sum(ROWS) + FILLED,
            max_query_len=max(rows),
            max_seq_len=max(keys),
            block_table_tensor=table.to(self.device),
            slot_mapping=torch.arange(sum(ROWS), device=self.device),
            causal=self.causal,
        )

    def query(self):
        """The rows of Q, and rows that pad the batch."""
        return torch.cat([*self.q, normal(FILLED + 3, HEADS, self.head_size, dtype=BF16, device=self.device)])


def make(backend, head_size=64, **options):
    return backend.Fa3Impl(HEADS, head_size, head_size**-0.5, HEADS_KV, **options)


def build(backend, common):
    return backend.Fa3MetadataBuilder(None, ["layer"], None, common.seq_lens.device).build(0, common)


def check(batch, impl, metadata, expected, bound=2e-2):
    """Checks that O of each sequence is the expected one, and that other rows are 0 or not written."""
    query = batch.query()
    output = torch.full_like(query, 7.0)
    assert impl.forward(batch.layer, query, None, None, batch.fill(impl), metadata, output) is output
    parts = output.split([*ROWS, FILLED, 3])
    for i, part in enumerate(parts[: len(ROWS)]):
        if ROWS[i]:
            wanted = expected(*(x[i][None] for x in (batch.q, batch.k, batch.v)))[0]
            torch.testing.assert_close(part.double(), wanted.double(), rtol=bound, atol=bound)
    assert not parts[-2].any() and (parts[-1] == 7).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_size", [64, 128])
def test_layouts(backend, device, layout, head_size):
    batch = Batch(device, head_size, layout)
    impl = make(backend, head_size)
    metadata = build(backend, batch.lists(backend))
    check(batch, impl, metadata, lambda q, k, v: standard(q, k, v, causal=True)[0])


@pytest.mark.parametrize("causal", [True, False, [True, False, False, True]], ids=str)
@pytest.mark.parametrize(
    "options", [dict(sliding_window=5), dict(logits_soft_cap=2.0), dict(sliding_window=1)], ids=str
)
def test_masks_and_scores(backend, device, options, causal):
    """Sequences have one mask, or each its own."""
    each = causal if isinstance(causal, list) else [causal] * len(ROWS)
    batch = Batch(device, causal=torch.tensor(each, device=device) if each is causal else causal)
    impl = make(backend, **options)
    left, softcap = options.get("sliding_window", 0) - 1, options.get("logits_soft_cap", 0.0)
    metadata = build(backend, batch.lists(backend))
    computed = (x for x, rows in zip(each, ROWS) if rows)

    def expected(q, k, v):
        return standard(q, k, v, window_size=(left, 0 if next(computed) else left), softcap=softcap)[0]

    check(batch, impl, metadata, expected)


def test_sinks(backend, device):
    batch = Batch(device)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 3.0], device=device).to(BF16)
    metadata = build(backend, batch.lists(backend))
    check(batch, make(backend, sinks=sinks), metadata, lambda *x: standard(*x, causal=True, s_aux=sinks)[0])


# The first and the last key of each image of a decoding sequence, a prompt, and a part of a prompt, as vLLM has them.
IMAGES = {0: [(3, 9)], 1: [(0, 1), (3, 5)], 2: [(2, 3), (12, 13), (15, 18)], 3: []}


@pytest.mark.parametrize("window", [None, 4])
def test_images_see_themselves(backend, device, window, calls):
    """Rows of an image see all its keys, and other rows the keys of the window up to their own."""
    batch, impl = Batch(device), make(backend, sliding_window=window)
    common = batch.lists(backend)
    common.mm_req_doc_ranges, common.seq_lens_cpu_upper_bound = IMAGES, torch.tensor(KEYS)
    metadata = build(backend, common)
    sequence = iter(IMAGES)

    def expected(q, k, v):
        images, at = IMAGES[next(sequence)], k.shape[1] - q.shape[1]

        def sees(b, h, i, j):
            of_image = [(a <= i + at) & (i + at <= z) & (a <= j) & (j <= z) for a, z in images]
            return (j <= i + at) & (window is None or j > i + at - window) | torch.stack(of_image).any(0)

        intervals = masks.from_mask_mod(sees, None, None, q.shape[1], k.shape[1], device)
        return flash_attn_func(q, k, v, intervals=intervals)

    check(batch, impl, metadata, expected)
    # All layers with one window have one mask. Layers whose images vLLM clears have none.
    left = impl.left
    assert metadata.mask(left) is metadata.mask(left) and metadata.mask(left + 3) is not metadata.mask(left)
    metadata.mm_prefix_range_tensor = None
    assert metadata.mask(left) is None
    # No row of this batch is in an image.
    common.mm_req_doc_ranges = {0: [(3, 9)], 2: [(0, 15)]}
    assert build(backend, common).mask(left) is None


@pytest.mark.parametrize("scales", ["one", "of heads"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_of_8_bits(backend, device, layout, scales):
    batch = Batch(device, layout=layout, dtype=E4M3)
    if scales == "of heads":
        batch.layer._k_scale = torch.tensor([0.25, 0.5], device=device)
        batch.layer._v_scale = torch.tensor([1.0, 0.125], device=device)

    def rounded(x, scale):
        return ((x / scale.view(-1, 1)).to(E4M3).float() * scale.view(-1, 1)).to(BF16)

    def expected(q, k, v):
        k, v = rounded(k, batch.layer._k_scale), rounded(v, batch.layer._v_scale)
        return standard(q, k, v, causal=True)[0]

    impl = make(backend, kv_cache_dtype="fp8")
    assert not getattr(impl, "supports_quant_query_input", False)
    check(batch, impl, build(backend, batch.lists(backend)), expected)


def spec_of(backend, head_size, dtype="fp8_per_token_head", **options):
    """The spec of a layer's cache with a scale for each token and head, from vLLM or its stand-in."""
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    of_cache = dict(block_size=PAGE, num_kv_heads=HEADS_KV, head_size=head_size, head_size_v=head_size)
    mode = interface.get_kv_quant_mode(dtype)
    codes = torch.int8 if dtype.startswith("int8") else torch.uint8
    return interface.AttentionSpec(**of_cache, dtype=codes, kv_quant_mode=mode, **options)


def by_rows(x, codes=E4M3):
    """The numbers of a cache with a scale for each token and head."""
    scale = x.float().abs().amax(-1, keepdim=True) / (448 if codes == E4M3 else 127)
    y = x * (1 / scale)
    y = y.to(codes) if codes == E4M3 else (y + 0.5 * y.sign()).trunc()
    return (y.float() * scale).to(x.dtype)


@pytest.mark.parametrize("codes", [E4M3, torch.int8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_size", [64, 128])
def test_caches_with_scales_of_tokens_and_heads(backend, device, layout, head_size, codes):
    dtype = "fp8_per_token_head" if codes == E4M3 else "int8_per_token_head"
    spec = backend.Fa3Backend.customize_spec(spec_of(backend, head_size, dtype))
    batch = Batch(device, head_size, layout, codes, extra=spec.state_content_bytes - 2 * head_size)
    # Rows differ in size, so that no other scale will do.
    sizes = [torch.linspace(-9, 0, len(x), device=device).exp2()[:, None, None].to(BF16) for x in batch.k]
    batch.v = [x * size for x, size in zip(batch.v, sizes)]
    impl = make(backend, head_size, kv_cache_dtype=dtype, sliding_window=5)
    metadata = build(backend, batch.lists(backend))
    check(batch, impl, metadata, lambda q, *kv: standard(q, *(by_rows(x, codes) for x in kv), window_size=(4, 0))[0])


def test_rows_with_scales_are_as_far_apart_as_kernels_take_them(backend):
    customize = backend.Fa3Backend.customize_spec
    assert [customize(spec_of(backend, n)).state_content_bytes for n in (64, 128, 256)] == [144, 272, 528]
    for spec in (spec_of(backend, 64, "fp8"), spec_of(backend, 64, state_content_bytes=200)):
        assert customize(spec) is spec


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("of", ["encoder", "encoder_only"])
def test_encoders(backend, device, of, window):
    """The keys of an encoder come with the call, and its rows see both sides."""
    batch = Batch(device)
    impl = make(backend, attn_type=of, sliding_window=window)
    rows = [5, 9, 3, 0]
    q, k, v = (normal(20, heads, 64, dtype=BF16, seed=heads, device=device) for heads in (HEADS, HEADS_KV, HEADS_KV))
    common = batch.lists(backend, rows, rows)
    metadata = build(backend, common)
    metadata.num_actual_tokens = sum(rows)
    output = torch.zeros_like(q)
    impl.do_kv_cache_update(batch.layer, k, v, torch.empty(0), common.slot_mapping)
    impl.forward(batch.layer, q, k, v, torch.empty(0), metadata, output)
    left = -1 if window is None else window - 1
    for start, end in zip(common.query_start_loc.tolist(), common.query_start_loc.tolist()[1:]):
        part = [x[None, start:end] for x in (q, k, v)]
        wanted = standard(*part, window_size=(left, left))[0][0]
        torch.testing.assert_close(output[start:end].double(), wanted, rtol=2e-2, atol=2e-2)
    assert not output[sum(rows) :].any()


def test_cross_attention_sees_all_keys(backend, device):
    batch = Batch(device, causal=False)
    impl = make(backend, attn_type="encoder_decoder")
    check(batch, impl, build(backend, batch.lists(backend)), lambda *x: standard(*x)[0])


def test_ctas_share_the_keys_of_a_sequence(backend, calls):
    batch = Batch("cpu")
    check(batch, make(backend), build(backend, batch.lists(backend)), lambda q, k, v: standard(q, k, v, causal=True)[0])
    assert calls[-1][1]["split_keys"] == -1


def test_a_run_for_profiling_has_zeros(backend):
    output = torch.ones(3, HEADS, 64)
    assert not make(backend).forward(None, output, None, None, torch.empty(0), None, output).any()


def test_a_batch_invariant_server_has_the_same_bits_in_any_batch(backend, calls, monkeypatch):
    assert backend.Fa3Backend.supports_batch_invariance()
    monkeypatch.setattr(backend.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    batch = Batch("cpu")
    check(batch, make(backend), build(backend, batch.lists(backend)), lambda q, k, v: standard(q, k, v, causal=True)[0])
    assert calls[-1][1]["split_keys"] == -2


@pytest.mark.hopper
def test_a_captured_graph_follows_the_lengths(backend):
    batch = Batch("cuda")
    impl = make(backend)
    cache, query = batch.fill(impl), batch.query()
    output = torch.zeros_like(query)
    common = batch.lists(backend)
    builder = backend.Fa3MetadataBuilder(None, ["layer"], None, torch.device("cuda"))
    metadata = builder.build_for_cudagraph_capture(common)
    impl.forward(batch.layer, query, None, None, cache, metadata, output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        impl.forward(batch.layer, query, None, None, cache, metadata, output)
    rows, keys = [2, 3, 7, 0], [21, 7, 20, 0]
    common.query_start_loc.copy_(ends_of(rows, "cuda"))
    common.seq_lens.copy_(torch.tensor(keys, dtype=I32))
    graph.replay()
    replayed = output.clone()
    other = batch.lists(backend, rows, keys)
    impl.forward(batch.layer, query, None, None, cache, build(backend, other), output)
    torch.testing.assert_close(replayed, output, rtol=2e-2, atol=2e-2)
    assert replayed[:12].any(-1).all()


def test_the_lists_are_those_of_vllm(backend):
    batch = Batch("cpu")
    common = batch.lists(backend)
    builder = backend.Fa3MetadataBuilder(None, ["layer"], None, torch.device("cpu"))
    metadata = builder.build(0, common)
    assert metadata.block_table is common.block_table_tensor and metadata.seq_lens is common.seq_lens
    other = builder.update_block_table(metadata, common.block_table_tensor + 1, common.slot_mapping + 1)
    assert torch.equal(other.block_table, metadata.block_table + 1) and other.seq_lens is metadata.seq_lens
    assert torch.equal(other.slot_mapping, metadata.slot_mapping + 1)
    assert metadata.block_table is common.block_table_tensor
    for images, support in ((False, "ALWAYS"), (True, "UNIFORM_BATCH")):
        config = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=images))
        assert builder.get_cudagraph_support(config, None).name == support
    builder.update_draft_decode_metadata(metadata)


def test_what_is_not_supported_is_refused(backend):
    common = Batch("cpu").lists(backend)
    builder = backend.Fa3MetadataBuilder(None, ["layer"], None, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="^cascade attention over a prefix of 32 keys is not supported$"):
        builder.build(32, common)
    common.causal = torch.tensor([True, False, True, True])
    common.mm_req_doc_ranges, common.seq_lens_cpu_upper_bound = IMAGES, torch.tensor(KEYS)
    with pytest.raises(NotImplementedError, match="^causal is a tensor, and there are images that see themselves$"):
        builder.build(0, common)
    with pytest.raises(NotImplementedError, match="^alibi_slopes are not supported$"):
        make(backend, alibi_slopes=[0.5] * HEADS)
    with pytest.raises(NotImplementedError, match="^attention of an encoder has no cache that could be fp8$"):
        make(backend, attn_type="encoder_only", kv_cache_dtype="fp8")
    x = torch.zeros(1, HEADS, 64)
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match="^quantization of O in the kernel is not supported$"):
            make(backend).forward(None, x, None, None, x, None, x, **{name: torch.ones(())})


def test_what_the_backend_says_it_computes(backend):
    ours = backend.Fa3Backend
    capability = backend.DeviceCapability
    assert ours.supports_compute_capability(capability(9, 0))
    assert not any(ours.supports_compute_capability(capability(*x)) for x in ((8, 0), (8, 9), (10, 0)))
    assert [n for n in (8, 12, 64, 256, 512, 520) if ours.supports_head_size(n)] == [8, 64, 256, 512]
    rest = (16, False, False, False, False, capability(9, 0))
    for size, dtype, works in ((128, "fp8", True), (72, "fp8", False), (512, "fp8", True), (512, "auto", True)):
        assert (ours.supports_combination(size, BF16, dtype, *rest) is None) == works
    for codes in ("fp8", "int8"):
        of_tokens = f"{codes}_per_token_head"
        assert of_tokens in ours.supported_kv_cache_dtypes and not ours.supports_combination(256, BF16, of_tokens, *rest)
        refusal = f"a cache of {of_tokens} has a head size of at most 256, not 512"
        assert ours.supports_combination(512, BF16, of_tokens, *rest) == refusal
    with_images = (*rest[:4], True, rest[-1])
    assert ours.supports_mm_prefix() and ours.supports_combination(256, BF16, "auto", *with_images) is None
    refusal = "images that see themselves need a cache of 16 bits, not of fp8"
    assert ours.supports_combination(256, BF16, "fp8", *with_images) == refusal
    assert all(ours.supports_attn_type(x) for x in ("decoder", "encoder", "encoder_only", "encoder_decoder"))


@pytest.mark.parametrize("dtype", ["auto", "fp8", "fp8_per_token_head", "int8_per_token_head"])
def test_head_sizes_that_it_says_it_computes_are_those_of_the_kernels(backend, dtype):
    """Fake tensors are checked by the rules of an H100."""
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    ours = backend.Fa3Backend
    for size in (8, 16, 72, 96, 128, 192, 256, 264, 512, 520):
        rest = (16, False, False, False, False, backend.DeviceCapability(9, 0))
        says = ours.supports_head_size(size) and ours.supports_combination(size, BF16, dtype, *rest) is None
        with fake.FakeTensorMode():
            q = torch.empty(3, HEADS, size, dtype=BF16, device="cuda")
            columns = backend.Fa3Backend.customize_spec(spec_of(backend, size, dtype)).state_content_bytes or 2 * size
            element = dict(auto=BF16, int8_per_token_head=torch.int8).get(dtype, E4M3)
            cache = torch.empty(4, HEADS_KV, PAGE, columns, dtype=element, device="cuda")
            list_of = lambda *shape: torch.empty(*shape, dtype=I32, device="cuda")
            metadata = backend.Fa3Metadata(3, 2, 9, list_of(3), list_of(2), list_of(2, 3), list_of(3), True)
            layer = SimpleNamespace(_k_scale=torch.empty((), device="cuda"), _v_scale=torch.empty((), device="cuda"))
            impl = make(backend, size, kv_cache_dtype=dtype)
            try:
                impl.forward(layer, q, None, None, cache, metadata, torch.empty_like(q))
                computes = True
            except ValueError:
                computes = False
        assert says == computes, size


def test_registration(registry, backend, monkeypatch, caplog):
    custom = registry.AttentionBackendEnum.CUSTOM
    assert fa3.vllm.register() == "CUSTOM" == backend.Fa3Backend.get_name()
    assert fa3.vllm.register() == "CUSTOM" and custom.get_path() == "fa3.vllm.backend.Fa3Backend"
    custom.clear_override()
    registry.register_backend(custom, "somebody.Else")
    sentence = "vLLM's attention backend CUSTOM is somebody.Else already"
    with pytest.raises(RuntimeError, match=f"^{sentence}$"):
        fa3.vllm.register()
    with caplog.at_level(logging.WARNING):
        fa3.vllm._plugin()
    assert caplog.messages == [f"fa3 is no attention backend of this vLLM: {sentence}"]
    assert custom.get_path() == "somebody.Else"
    custom.clear_override()
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.32.1")
    with pytest.raises(ImportError, match=r"^vllm is 0\.32\.1, expected 0\.33 or newer$"):
        fa3.vllm.register()
    assert not custom.is_overridden()
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "dev")
    assert fa3.vllm.register() == "CUSTOM" and custom.is_overridden()


def test_vllm_finds_the_backend_by_itself():
    [plugin] = importlib.metadata.entry_points(group="vllm.general_plugins", name="fa3")
    assert plugin.load() is fa3.vllm._plugin


@needs_vllm
def test_vllm_takes_the_backend(registry, backend):
    fa3.vllm.register()
    ours = registry.AttentionBackendEnum.CUSTOM.get_class()
    assert ours is backend.Fa3Backend

    def reasons(head_size=128, kv="auto", capability=(9, 0), kind="decoder", **options):
        flags = (False,) * 5
        capability = backend.DeviceCapability(*capability)
        return ours.validate_configuration(head_size, BF16, kv, 16, *flags, capability, kind, **options)

    for kind in ("decoder", "encoder", "encoder_only", "encoder_decoder"):
        assert not reasons(kind=kind, kv="fp8", has_sliding_window=True, use_non_causal=True)
        assert not reasons(kind=kind, use_batch_invariant=True)
    assert reasons(capability=(8, 0)) == ["compute capability not supported"]
    assert reasons(520) == ["head_size not supported"]
    assert reasons(kv="fp8_e5m2") == ["kv_cache_dtype not supported"]
    assert reasons(use_dcp=True) == ["DCP not supported"]
    assert reasons(use_rswa=True) == ["R-SWA not supported"]


@needs_vllm
@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_per_token_head", "int8_per_token_head"])
def test_a_layer_of_vllm(backend, device, cache):
    """vLLM's own layer writes keys to its cache, and gets O."""
    config = importlib.import_module("vllm.config")
    context = importlib.import_module("vllm.forward_context")
    layers = importlib.import_module("vllm.model_executor.layers.attention")
    of_vllm, dtype = config.VllmConfig(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with config.set_current_vllm_config(of_vllm), torch.device(device):
            options = dict(prefix="a.0", attn_backend=backend.Fa3Backend)
            of_cache = config.CacheConfig(cache_dtype=cache)
            layer = layers.Attention(HEADS, 64, 0.125, HEADS_KV, cache_config=of_cache, **options)
            # vLLM's workers do this, too.
            spec = backend.Fa3Backend.customize_spec(layer.get_kv_cache_spec(of_vllm))
    finally:
        torch.set_default_dtype(dtype)
    columns = spec.state_content_size_bytes // spec.dtype.itemsize
    layer.kv_cache = torch.zeros(4, HEADS_KV, spec.block_size, columns, dtype=spec.dtype, device=device)
    q, k, v = (normal(5, n * 64, dtype=torch.float16, seed=n, device=device) for n in (HEADS, HEADS_KV, HEADS_KV))
    ends = ends_of([5], device)
    common = backend.CommonAttentionMetadata(
        query_start_loc=ends,
        query_start_loc_cpu=ends.cpu(),
        seq_lens=torch.tensor([5], dtype=I32, device=device),
        num_reqs=1,
        num_actual_tokens=5,
        max_query_len=5,
        max_seq_len=5,
        block_table_tensor=torch.tensor([[2, 0]], dtype=I32, device=device),
        slot_mapping=torch.arange(5, device=device) + 2 * spec.block_size,
    )
    metadata, slots = {"a.0": build(backend, common)}, {"a.0": common.slot_mapping}
    with config.set_current_vllm_config(of_vllm), context.set_forward_context(metadata, of_vllm, slot_mapping=slots):
        found = layer(q, k, v)
    if cache == "fp8":
        k, v = (x.to(E4M3).to(x.dtype) for x in (k, v))
    if cache.endswith("per_token_head"):
        k, v = (by_rows(x.view(5, -1, 64), E4M3 if cache.startswith("fp8") else torch.int8) for x in (k, v))
    wanted = standard(*(x.view(1, 5, -1, 64) for x in (q, k, v)), causal=True)[0].flatten(2)[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=1e-2)


@needs_vllm
def test_the_interface_that_stands_for_vllm_is_vllms(backend):
    theirs = importlib.import_module("vllm.v1.attention.backend")
    for name in ("AttentionBackend", "AttentionMetadataBuilder", "AttentionImpl"):
        for key, ours in vars(getattr(vllm_interface, name)).items():
            if key.startswith("__") and key != "__init__" or key in ("_abc_impl", "_is_protocol"):
                continue
            found = inspect.getattr_static(getattr(theirs, name), key)
            if isinstance(ours, (staticmethod, classmethod)):
                assert type(found) is type(ours), key
                ours, found = ours.__func__, found.__func__
            if inspect.isfunction(ours):
                assert list(inspect.signature(ours).parameters) == list(inspect.signature(found).parameters), key
            elif name == "AttentionBackend" or isinstance(ours, bool):
                assert ours == found, key
    fields = vllm_interface.CommonAttentionMetadata.__dataclass_fields__
    assert set(fields) <= set(theirs.CommonAttentionMetadata.__dataclass_fields__)
    for ours in vllm_interface.AttentionCGSupport, vllm_interface.AttentionType:
        found = getattr(theirs, ours.__name__)
        assert {x.name: x.value for x in ours} == {x.name: x.value for x in found}
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    for ours in vllm_interface.KVQuantMode:
        assert interface.KVQuantMode[ours.name] == ours and interface.KVQuantMode(ours).is_per_token_head == ours.is_per_token_head
    fields = vllm_interface.AttentionSpec.__dataclass_fields__
    assert set(fields) <= set(interface.AttentionSpec.__dataclass_fields__)
    ops = importlib.import_module("vllm._custom_ops")
    names = (inspect.signature(x.reshape_and_cache_flash).parameters for x in (vllm_interface, ops))
    # Without a GPU, the backend has our function in place of vLLM's.
    assert list(next(names)) == list(next(names))
