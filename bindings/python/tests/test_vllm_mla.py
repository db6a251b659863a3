"""vLLM's backends of latent attention: decoding, prompts in parts, and tokens that each attend to a list of rows. If
vLLM is installed, base classes are vLLM's own, otherwise `vllm_mla_interface` has them. Needs torch.
"""

import importlib
import importlib.util
import inspect
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

import vllm_interface
import vllm_mla_interface
from packing import ends, normal
from reference import judge, standard
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3.vllm

HAS_VLLM = importlib.util.find_spec("vllm") is not None
BF16, F16, E4M3, I32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32
PAGE = 16
# New rows and keys of sequences: decoding, a draft of two tokens, a short prompt, and padding of a captured batch.
ROWS, KEYS = [1, 2, 7, 1], [37, 20, 7, 0]
# (latent columns, rotated columns) of DeepSeek's models, a smaller model, and a model that rotates nothing.
DIMS = [(512, 64), (256, 64), (512, 0)]


@pytest.fixture
def classes(monkeypatch):
    """The classes of both our modules, on vLLM or on its stand-in."""
    ours = "fa3.vllm.mla", "fa3.vllm.mla_sparse"
    if not HAS_VLLM:
        vllm_mla_interface.install(monkeypatch)
        for name in ours:
            monkeypatch.delitem(sys.modules, name, raising=False)
    elif not torch.cuda.is_available():
        vllm_interface.compute_on_the_cpu()
    # vLLM's layer asks for the number of tensor-parallel ranks, which tests do not set up.
    of_sparse = importlib.import_module("vllm.model_executor.layers.attention.sparse_mla_attention")
    monkeypatch.setattr(of_sparse, "get_tensor_model_parallel_world_size", lambda: 1, raising=False)
    modules = [importlib.import_module(name) for name in ours]
    yield SimpleNamespace(**vars(modules[0]), **{x: y for x, y in vars(modules[1]).items() if x in modules[1].__all__})
    if not HAS_VLLM:
        for name in ours:
            sys.modules.pop(name, None)


def judge_o(o, lse, q, k, v, **options):
    """Calls `judge`. If there is no LSE (heads, rows), the definition's LSE takes its place."""
    lse = standard(q, k, v, **options)[1].float() if lse is None else lse
    judge(o, lse, q, k, v, **options)


def layer(kind, dims=DIMS[0], heads=16, topk_indices_buffer=None, **options):
    """Makes a layer of a class. vLLM's base classes require more arguments than attention needs."""
    defaults = dict(alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None)
    defaults |= dict(attn_type="decoder", kv_sharing_target_layer_name=None, q_lora_rank=None)
    defaults |= dict(qk_nope_head_dim=128, qk_head_dim=192, v_head_dim=128, kv_b_proj=None)
    latent, rotated = dims
    if topk_indices_buffer is not None:
        defaults |= dict(topk_indices_buffer=topk_indices_buffer)
    arguments = (heads, latent + rotated, 192**-0.5, 1)
    named = defaults | dict(kv_lora_rank=latent, qk_rope_head_dim=rotated) | options
    if not HAS_VLLM:
        return kind(*arguments, **named)
    config = importlib.import_module("vllm.config")
    with config.set_current_vllm_config(config.VllmConfig()):
        return kind(*arguments, **named)


class Latent:
    """Packed rows of Q, and a cache of latent vectors in pages. Rows that no sequence uses have garbage."""

    def __init__(self, device, dims=DIMS[0], dtype=BF16, heads=16, rows=ROWS, keys=KEYS, of=None):
        self.dims, self.rows, self.keys = dims, rows, keys
        columns = sum(dims)
        self.q = normal(sum(rows), heads, columns, dtype=dtype, seed=1, device=device)
        self.k = of or [normal(n, 1, columns, dtype=dtype, seed=10 + i, device=device) for i, n in enumerate(keys)]
        pages = [-(-n // PAGE) for n in keys]
        numbers = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(0)).tolist()
        # Between the pages lie rows of other layers.
        memory = torch.full((sum(pages) + 2, 3 * PAGE, columns), torch.nan, dtype=dtype, device=device)
        self.cache = memory[:, PAGE : 2 * PAGE]
        table = torch.full((len(keys), max(pages) + 1), -1, dtype=I32)
        for i, k in enumerate(self.k):
            for page, part in enumerate(k.split(PAGE)):
                table[i, page] = numbers.pop()
                self.cache[table[i, page], : len(part)] = part[:, 0]
        self.table = table.to(device)
        self.lengths = torch.tensor(keys, dtype=I32, device=device)
        self.ends = ends(rows, device)

    def split(self):
        return self.q.tensor_split((self.dims[0],), dim=-1)

    def metadata(self, classes):
        decode = classes.Fa3MLADecodeMetadata(self.table, self.lengths, None, self.ends, max(self.rows), max(self.keys))
        return SimpleNamespace(decode=decode)

    def check(self, o, lse=None):
        """Checks O and LSE (tokens, heads) against attention over each sequence's rows."""
        start = 0
        for rows, k in zip(self.rows, self.k):
            part = slice(start, start + rows)
            start += rows
            if not len(k):
                assert not o[part].any() and (lse is None or (lse[part] == -torch.inf).all())
                continue
            q, v = self.q[None, part], k[None, ..., : self.dims[0]]
            of_part = None if lse is None else lse[None, part].transpose(1, 2).contiguous()
            judge_o(o[None, part], of_part, q, k[None], v, causal=True, softmax_scale=192**-0.5)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_decoding(classes, device, dims, dtype):
    batch = Latent(device, dims, dtype)
    impl = layer(classes.Fa3MLAImpl, dims)
    metadata = batch.metadata(classes)
    o, lse = impl.forward_mqa(batch.split(), batch.cache, metadata, None)
    assert lse is None
    batch.check(o)
    impl.need_to_return_lse_for_decode = True
    whole, lse = impl.forward_mqa(batch.q, batch.cache, metadata, None)
    assert torch.equal(whole, o)
    batch.check(whole, lse)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_cache_of_e4m3(classes, device, dims):
    batch = Latent(device, dims)
    impl, scale = layer(classes.Fa3MLAImpl, dims, kv_cache_dtype="fp8"), torch.tensor(0.5, device=device)
    codes = (batch.cache.float() / scale).to(E4M3).view(torch.uint8)
    batch.k = [((k.float() / scale).to(E4M3).float() * scale).to(BF16) for k in batch.k]
    o, _ = impl.forward_mqa(batch.split(), codes, batch.metadata(classes), SimpleNamespace(_k_scale=scale))
    batch.check(o)


def test_ranks_of_decode_context_parallelism_share_the_keys(classes, device):
    """Each rank has every second key, or none, of sequences with one new row. LSE of both ranks combines their O."""
    whole = Latent(device, rows=[1] * 4, keys=KEYS)
    parts, impl = [], layer(classes.Fa3MLAImpl)
    impl.need_to_return_lse_for_decode = True
    for rank in range(2):
        shard = Latent(device, rows=[1] * 4, keys=[len(k[rank::2]) for k in whole.k], of=[k[rank::2] for k in whole.k])
        metadata = shard.metadata(classes)
        metadata.decode.dcp_tot_seq_lens = whole.lengths
        parts.append(impl.forward_mqa(whole.q, shard.cache, metadata, None))
    lse = torch.logaddexp(*(lse.double() for _, lse in parts))
    o = sum(part.double() * (of - lse).exp().nan_to_num()[..., None] for part, of in parts)
    whole.check(o.to(BF16), lse.float())
    metadata.decode.max_query_len = 2
    with pytest.raises(NotImplementedError, match="^2 new rows of a sequence are not supported with decode context"):
        impl.forward_mqa(whole.q, shard.cache, metadata, None)


@pytest.mark.parametrize("ranks, graphs", [(1, "UNIFORM_BATCH"), (2, "UNIFORM_SINGLE_TOKEN_DECODE")])
def test_graphs_with_decode_context_parallelism_are_of_single_rows(classes, ranks, graphs):
    config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=ranks))
    assert classes.Fa3MLAMetadataBuilder.get_cudagraph_support(config, None).name == graphs


@pytest.mark.parametrize("invariant", [False, True])
def test_how_the_keys_of_a_sequence_are_split(classes, calls, monkeypatch, invariant):
    monkeypatch.setattr(classes.envs, "VLLM_BATCH_INVARIANT", invariant, raising=False)
    batch = Latent("cpu")
    layer(classes.Fa3MLAImpl).forward_mqa(batch.split(), batch.cache, batch.metadata(classes), None)
    assert calls[-1][1]["split_keys"] == (-2 if invariant else -1)


def test_the_list_of_a_batch_is_vllms(classes):
    builder = object.__new__(classes.Fa3MLAMetadataBuilder)
    batch = Latent("cpu")
    lists = dict(block_table_tensor=batch.table, seq_lens_device=batch.lengths, query_start_loc_device=batch.ends)
    numbers = dict(max_seq_len=99, num_decode_tokens=11, max_query_len=8, dcp_tot_seq_lens_device=None)
    made = builder._build_decode(**lists, **numbers, query_start_loc_cpu=batch.ends)
    assert made.block_table is batch.table and made.seq_lens is batch.lengths and made.query_start_loc is batch.ends
    assert (made.max_query_len, made.max_seq_len) == (8, 99)


@pytest.mark.hopper
def test_a_captured_graph_follows_the_lengths(classes):
    batch = Latent("cuda")
    impl, metadata = layer(classes.Fa3MLAImpl), batch.metadata(classes)
    impl.forward_mqa(batch.split(), batch.cache, metadata, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = impl.forward_mqa(batch.split(), batch.cache, metadata, None)
    batch.keys, batch.k = [21, 11, 7, 0], [k[:n] for k, n in zip(batch.k, [21, 11, 7, 0])]
    batch.lengths.copy_(torch.tensor(batch.keys, dtype=I32))
    graph.replay()
    batch.check(o)


@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (256, 256)], ids=str)
def test_prompts_in_parts(classes, device, dims, given):
    """LSE combines attention among the new tokens with attention of the new tokens to all earlier tokens."""
    rows, context, heads = [5, 70, 1], [33, 0, 12], 2
    q, new_k, new_v = (normal(sum(rows), heads, d, seed=i, device=device) for i, d in enumerate((dims[0], *dims)))
    old_k, old_v = (normal(sum(context), heads, d, seed=3 + i, device=device) for i, d in enumerate(dims))
    prefill = classes.Fa3MLAPrefill(heads, 0.1, 512, 128, 64, 128, SimpleNamespace())
    prefill.prepare_metadata(SimpleNamespace(query_start_loc=ends(rows, device), max_query_len=max(rows)))
    memory = [q.new_full((sum(rows), heads, dims[1]), torch.nan) if given else None for _ in range(2)]
    alone = prefill.run_prefill_new_tokens(q, new_k, new_v, False)
    chunk = SimpleNamespace(query_start_loc=ends(rows, device), cu_seq_lens=ends(context, device))
    chunk.max_query_len, chunk.max_seq_len = max(rows), max(context)
    parts = [
        prefill.run_prefill_new_tokens(q, new_k, new_v, True, out=memory[0]),
        prefill.run_prefill_context_chunk(chunk, q, old_k, old_v, out=memory[1]),
    ]
    assert torch.equal(parts[0][0], alone)
    assert all(x is None or o is x for x, (o, _) in zip(memory, parts))
    lse = torch.logaddexp(*(lse.double() for _, lse in parts))
    o = sum((part.double() * (of - lse).exp().T[..., None] for part, of in parts))
    starts = 0, 0
    for n, m in zip(rows, context):
        new, old = (slice(start, start + x) for start, x in zip(starts, (n, m)))
        starts = new.stop, old.stop
        k, v = (torch.cat([x[old], y[new]])[None] for x, y in ((old_k, new_k), (old_v, new_v)))
        judge(o[None, new].to(BF16), lse[None, :, new].float(), q[None, new], k, v, causal=True, softmax_scale=0.1)


@pytest.mark.skipif(not HAS_VLLM or torch.cuda.is_available(), reason="skipped: it needs vllm, without its kernels")
def test_vllms_layer_combines_the_parts_of_prompts(classes):
    """vLLM cuts the tokens before the new ones into parts of at most 32 rows, also of one sequence. Its kernel that
    gathers them from the cache has a stand-in here.
    """
    common = importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
    rows, context, heads = [5, 7, 3], [70, 0, 33], 2
    batch = Latent("cpu", heads=heads, rows=rows, keys=[n + m for n, m in zip(rows, context)])
    weight = normal(heads * 256, 512, seed=5) * 512**-0.5

    class Projection:
        params_dtype = BF16

        def __call__(self, x):
            return (x @ weight.T,)

    impl = layer(classes.Fa3MLAImpl, heads=heads, kv_b_proj=Projection())
    prefill = classes.Fa3MLAPrefill(heads, 0.1, 512, 128, 64, 128, SimpleNamespace())
    parts = common.build_mla_chunked_context_metadata(
        context_lens_cpu=torch.tensor(context, dtype=I32),
        prefill_query_start_loc_cpu=batch.ends,
        chunked_prefill_workspace=torch.empty(32, 576, dtype=BF16),
        chunked_prefill_workspace_size=32,
        block_size=PAGE,
        align_chunk_to_block=True,
        device=torch.device("cpu"),
        dcp_world_size=1,
        dcp_local_block_size=1,
        dcp_virtual_block_size=1,
    )
    assert len(parts.chunks) > 3 and any(chunk.is_continuation for chunk in parts.chunks)
    lists = batch.table, batch.ends, max(rows), parts
    metadata = common.MLACommonPrefillMetadata(*lists, q_data_type=BF16, prefill_backend=prefill)
    prefill.prepare_metadata(metadata)
    q = normal(sum(rows), heads, 192, seed=6)
    output = torch.full((sum(rows), heads * 128), torch.nan, dtype=BF16)
    new = torch.cat([k[-n:] for n, k in zip(rows, batch.k)])
    latent, rotated, cache = new[:, 0, :512], new[..., 512:], batch.cache.contiguous()
    impl.forward_mha(q, latent, rotated, cache, SimpleNamespace(prefill=metadata), torch.ones(()), output)
    for start, n, own in zip(batch.ends.tolist(), rows, batch.k):
        k, v = (own[:, 0, :512] @ weight.T).view(1, len(own), heads, 256).split(128, dim=-1)
        k = torch.cat([k, own[None, ..., 512:].expand(-1, -1, heads, -1)], -1)
        o = output.view(1, -1, heads, 128)[:, start : start + n]
        judge_o(o, None, q[None, start : start + n], k, v, causal=True, softmax_scale=0.1)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_lists_of_rows(classes, device, dims):
    """Each token sees the rows in its list, in any order, and no entry behind the list's end."""
    tokens, topk, heads = 5, 128, 16
    batch = Latent(device, dims, rows=[tokens], keys=[200])
    counts = torch.tensor([128, 1, 0, 77, 64], dtype=I32, device=device)
    generator = torch.Generator().manual_seed(3)
    keys = torch.stack([torch.randperm(200, generator=generator)[:topk] for _ in range(tokens)])
    distance = batch.cache.stride(0) // sum(dims)
    indices = batch.table[0].cpu()[keys // PAGE] * distance + keys % PAGE
    for i, n in enumerate(counts.tolist()):
        indices[i, n:] = -1
    buffer = torch.zeros(64, topk, dtype=I32, device=device)
    impl = layer(classes.Fa3MLASparseImpl, dims, heads, topk_indices_buffer=buffer)
    lists = indices.to(device, I32), counts
    o, lse = impl._forward_mqa_kernel(
        batch.split(), batch.cache, *lists, layer=None, block_size=PAGE, is_decode=True
    )
    assert lse is None
    for i, n in enumerate(counts.tolist()):
        if not n:
            assert not o[i].any()
            continue
        k = batch.k[0][keys[i, :n].to(device)][None]
        judge_o(o[None, i : i + 1], None, batch.q[None, i : i + 1], k, k[..., : dims[0]], softmax_scale=192**-0.5)


@pytest.mark.parametrize("kind, cache", [("Fa3MLAImpl", "fp8_e5m2"), ("Fa3MLASparseImpl", "fp8")])
def test_what_is_not_supported_is_refused(classes, kind, cache):
    kind = getattr(classes, kind)
    for option in (dict(alibi_slopes=[0.5]), dict(sliding_window=7), dict(logits_soft_cap=2.0)):
        with pytest.raises(NotImplementedError, match=f"^{next(iter(option))} is not supported in latent attention$"):
            layer(kind, **option)
    with pytest.raises(NotImplementedError, match="^latent attention of type encoder is not supported"):
        layer(kind, attn_type="encoder")
    with pytest.raises(NotImplementedError, match=f"^a cache of {cache} is not supported in latent attention$"):
        layer(kind, kv_cache_dtype=cache)
    prefill = classes.Fa3MLAPrefill(2, 0.1, 512, 128, 64, 128, None)
    x = torch.zeros(1, 2, 192)
    with pytest.raises(NotImplementedError, match="^quantization of O in the kernel is not supported$"):
        prefill.run_prefill_new_tokens(x, x, x, False, output_scale=torch.ones(()))


def test_what_the_backends_say_they_compute(classes):
    for backend in (classes.Fa3MLABackend, classes.Fa3MLASparseBackend):
        capability = sys.modules["vllm.platforms.interface"].DeviceCapability
        assert backend.is_mla() and backend.get_supported_head_sizes() == [320, 512, 576]
        assert backend.supports_compute_capability(capability(9, 0))
        assert not any(backend.supports_compute_capability(capability(*x)) for x in ((8, 0), (10, 0)))
        assert not backend.supports_batch_invariance()
        assert backend.get_impl_cls() is not None and backend.get_builder_cls() is not None
    assert classes.Fa3MLASparseBackend.is_sparse()


@pytest.mark.parametrize(
    "dims", [(128, 64, 128), (64, 64, 128), (192, 64, 256), (256, 0, 256), (128, 64, 64), (9, 0, 9)], ids=str
)
def test_head_dims_of_prompts_that_it_says_it_computes_are_those_of_the_kernels(classes, dims):
    no_rotation, rotated, head_dim_v = dims
    named = SimpleNamespace(qk_nope_head_dim=no_rotation, qk_rope_head_dim=rotated, v_head_dim=head_dim_v)
    prefill = classes.Fa3MLAPrefill(2, 0.1, 512, *dims, None)
    with FakeTensorMode():
        q, v = (torch.empty(3, 2, d, dtype=BF16, device="cuda") for d in (no_rotation + rotated, head_dim_v))
        prefill.prepare_metadata(
            SimpleNamespace(query_start_loc=torch.empty(2, dtype=I32, device="cuda"), max_query_len=3)
        )
        try:
            prefill.run_prefill_new_tokens(q, q, v, False)
            computes = True
        except ValueError:
            computes = False
    assert prefill.supports_mla_dimensions(named) <= computes


def test_registration(classes, monkeypatch):
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    prefills = importlib.import_module("vllm.v1.attention.backends.mla.prefill.registry")
    attention, prefill = registry.AttentionBackendEnum, prefills.MLAPrefillBackendEnum.FLASH_ATTN
    members = attention.CUSTOM, attention.FLASH_ATTN_MLA, attention.FLASH_ATTN_MLA_SPARSE, prefill
    is_ours = lambda: [x.is_overridden() and x.get_path().startswith("fa3.vllm.") for x in members]
    try:
        monkeypatch.delenv("FA3_VLLM_MLA", raising=False)
        assert fa3.vllm.register() == "CUSTOM" and is_ours() == [True, False, False, False]
        monkeypatch.setenv("FA3_VLLM_MLA", "1")
        assert fa3.vllm.register() == fa3.vllm.register() == "CUSTOM" and all(is_ours())
        for member, names in zip(members[1:], (["mla"], ["mla_sparse"], ["mla"])):
            module, _, name = member.get_path().rpartition(".")
            assert module.rpartition(".")[2] in names and getattr(classes, name).get_name() == member.name
        for x in members:
            x.clear_override()
        registry.register_backend(attention.FLASH_ATTN_MLA, "somebody.Else")
        with pytest.raises(RuntimeError, match="^vLLM's attention backend FLASH_ATTN_MLA is somebody.Else already$"):
            fa3.vllm.register()
        assert is_ours() == [False] * 4
    finally:
        for x in members:
            x.clear_override()


@pytest.mark.skipif(not HAS_VLLM, reason="skipped: vllm is not installed")
def test_the_interface_that_stands_for_vllm_is_vllms(classes):
    where = {
        "vllm.model_executor.layers.attention.mla_attention": ["MLACommonImpl", "MLACommonMetadataBuilder"],
        "vllm.v1.attention.backends.mla.prefill.base": ["MLAPrefillBackend"],
        "vllm.model_executor.layers.attention.sparse_mla_attention": ["SparseMLACommonMetadataBuilder"],
        "vllm.v1.attention.backends.mla.sparse_utils": ["flat_kv_row_view", "align_blocks_to_rows"],
        "vllm.v1.attention.backends.mla.prefill.registry": ["register_mla_prefill_backend"],
    }
    for module, names in where.items():
        for name in names:
            ours, theirs = getattr(vllm_mla_interface, name), getattr(importlib.import_module(module), name)
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
    common = importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
    fields = vllm_mla_interface.MLACommonDecodeMetadata.__dataclass_fields__
    assert list(fields) == list(common.MLACommonDecodeMetadata.__dataclass_fields__)
    sizes = (x.MLACommonBackend.get_supported_head_sizes() for x in (vllm_mla_interface, common))
    assert next(sizes) == next(sizes)
    methods = dict(MLACommonImpl="forward_mqa", MLACommonMetadataBuilder="_build_decode")
    for ours, (kind, method) in zip((classes.Fa3MLAImpl, classes.Fa3MLAMetadataBuilder), methods.items()):
        found, expected = (getattr(x, method) for x in (ours, getattr(common, kind)))
        assert list(inspect.signature(found).parameters) == list(inspect.signature(expected).parameters), method


@pytest.mark.skipif(not HAS_VLLM, reason="skipped: vllm is not installed")
@pytest.mark.parametrize("sparse", [False, True])
def test_vllm_takes_the_backends(classes, sparse):
    backend = classes.Fa3MLASparseBackend if sparse else classes.Fa3MLABackend
    capability = sys.modules["vllm.platforms.interface"].DeviceCapability

    def reasons(head_size=576, kv="auto", major=9, **options):
        flags = dict(use_mla=True, has_sink=False, use_sparse=sparse, use_mm_prefix=False)
        flags |= dict(use_per_head_quant_scales=False)
        return backend.validate_configuration(
            head_size, BF16, kv, 64, device_capability=capability(major, 0), attn_type="decoder", **flags | options
        )

    assert not reasons() and not reasons(320) and not reasons(kv="bfloat16")
    assert reasons(kv="fp8") == (["kv_cache_dtype not supported"] if sparse else [])
    assert reasons(major=10) == ["compute capability not supported"]
    assert reasons(use_dcp=True) == (["DCP not supported"] if sparse else [])
    assert reasons(use_batch_invariant=True) == ["batch invariance not supported"]
