"""One table of work tiles for several calls with packed sequences: scheduler_metadata. Needs torch."""

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import BEHIND, LENGTHS, MASKS, USED, Packed, ends
from torch._subclasses.fake_tensor import FakeTensorMode

from fa3 import flash_attn_varlen_func, get_scheduler_metadata

BF16, F16, E4M3, I32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32
HINTS = (130, 257)


def table_of(packed, hints=HINTS, softcap=0.0, **mask):
    used_q, used_k = packed.used or (None, None)
    (total_q, heads_q, head_dim), (total_k, heads_kv, head_dim_v) = packed.q.shape, packed.v.shape
    shapes = dict(qkv_dtype=packed.q.dtype, headdim_v=head_dim_v, total_q=total_q, total_k=total_k)
    lists = dict(cu_seqlens_q=packed.ends[0], cu_seqlens_k=packed.ends[1], seqused_q=used_q)
    numbers = len(packed.ends[0]) - 1, *hints, heads_q, heads_kv, head_dim, used_k
    return get_scheduler_metadata(*numbers, **shapes, **lists, **mask, has_softcap=softcap != 0)


def test_the_cpu_takes_no_table():
    packed = Packed("cpu")
    table = table_of(packed, causal=True)
    assert (table.dtype, table.shape, table.is_cpu) == (I32, (0,), True)
    given = packed.call(HINTS, causal=True, scheduler_metadata=table)
    assert torch.equal(given, packed.call(HINTS, causal=True))
    assert torch.equal(packed.call(HINTS, causal=True, scheduler_metadata=torch.zeros(40, dtype=I32)), given)


def test_what_makes_no_sense_is_refused():
    packed = Packed("cpu")
    good = dict(cu_seqlens_q=packed.ends[0], cu_seqlens_k=packed.ends[1], total_q=len(packed.q), total_k=len(packed.k))
    make = lambda **change: get_scheduler_metadata(**dict(batch_size=8, max_seqlen_q=1, max_seqlen_k=1, num_heads_q=4, num_heads_kv=2, headdim=64, cache_seqlens=None) | good | change)
    assert make().shape == (0,)
    for change, sentence in (
        (dict(total_q=None), "there is cu_seqlens_k and no total_q"),
        (dict(batch_size=7), "batch_size is 7, and cu_seqlens_q has 8 sequences"),
        (dict(cu_seqlens_q=packed.ends[0][:5]), "q has 4 sequences and k 8"),
        (dict(cache_seqlens=packed.ends[0]), "seqused_k is "),
    ):
        with pytest.raises(ValueError, match=sentence):
            make(**change)
    with pytest.raises(TypeError, match="cu_seqlens_q is NoneType"):
        make(cu_seqlens_q=None)


@pytest.mark.hopper
@pytest.mark.parametrize("used", [None, *USED], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_layers_share_a_table(nan_in_new_tensors, mask, used):
    for dtype, head_dims in ((BF16, (64, 64)), (F16, (128, 128)), (BF16, (256, 256)), (BF16, (192, 128))):
        packed = Packed("cuda", dtype, head_dims=head_dims, used=used)
        for softcap in (0.0, 5.0):
            table = table_of(packed, softcap=softcap, **mask)
            assert table.is_cuda and table.dtype == I32 and len(table) > 80
            for seed in range(3):
                packed.q.copy_(torch.randn_like(packed.q, dtype=torch.float32))
                given = packed.call(HINTS, **mask, softcap=softcap, scheduler_metadata=table, return_attn_probs=True)
                own = packed.call(HINTS, **mask, softcap=softcap, return_attn_probs=True)
                assert all(torch.equal(x, y) for x, y in zip(given, own, strict=True))
            into = torch.empty_like(own[0])
            assert packed.call(HINTS, **mask, softcap=softcap, scheduler_metadata=table, out=into) is into
            assert torch.equal(into, own[0])


@pytest.mark.hopper
def test_codes_share_a_table():
    packed = Packed("cuda", head_dims=(128, 128))
    q, k, v = (x.to(E4M3) for x in (packed.q, packed.k, packed.v))
    packed.q, packed.k, packed.v = q, k, v
    table = table_of(packed, causal=True)
    assert torch.equal(packed.call(HINTS, causal=True, scheduler_metadata=table), packed.call(HINTS, causal=True))


@pytest.mark.hopper
def test_a_graph_makes_the_table_again():
    packed = Packed("cuda")

    def layers():
        table = table_of(packed, causal=True)
        return [packed.call(HINTS, causal=True, scheduler_metadata=table) for _ in range(3)]

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    for lengths in (LENGTHS, LENGTHS[::-1], [(20, 30)] * 8):
        for x, side in zip(packed.ends, (0, 1), strict=True):
            x.copy_(ends([pair[side] for pair in lengths], "cuda"))
        graph.replay()
        expected = packed.call(HINTS, causal=True)
        assert all(torch.equal(x, expected) for x in out)


@pytest.mark.hopper
def test_gradients_and_traces_make_their_own():
    packed = Packed("cuda")
    stale = torch.zeros_like(table_of(packed))
    expected = packed.call(HINTS)
    leaf = packed.q.clone().requires_grad_()
    o = packed.call(HINTS, (leaf, packed.k, packed.v), scheduler_metadata=stale)
    assert torch.equal(o, expected)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (packed.q, packed.k, packed.v, *packed.ends)]
        assert flash_attn_varlen_func(*fake, *HINTS, scheduler_metadata=mode.from_tensor(stale)).shape == o.shape


@pytest.mark.hopper
def test_tables_that_make_no_sense_do_no_harm():
    packed = Packed("cuda")
    table = table_of(packed, causal=True)
    with pytest.raises(ValueError, match=f"scheduler_metadata has {len(table) - 1} numbers, a call of these tensors takes {len(table)}"):
        packed.call(HINTS, causal=True, scheduler_metadata=table[:-1])
    expected = packed.call(HINTS, causal=True)
    for seed in range(100):
        random = torch.Generator(device="cuda").manual_seed(seed)
        any_number = torch.randint(-(2**31), 2**31, table.shape, generator=random, device="cuda").to(I32)
        some = torch.rand(table.shape, generator=random, device="cuda") < (1.0, 0.1, 0.02)[seed % 3]
        packed.call(HINTS, causal=True, scheduler_metadata=torch.where(some, any_number, table))
    torch.cuda.synchronize()
    assert torch.equal(packed.call(HINTS, causal=True, scheduler_metadata=table), expected)
    assert BEHIND[0] > 0 and torch.equal(packed.call(HINTS, causal=True), expected)
