"""Attention over packed sequences, `fa3.flash_attn_varlen_func`: each sequence against its own definition, on the CPU
and on a GPU. Needs torch.
"""

import itertools
import math
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import LENGTHS, MASKS, USED, Packed, assert_equal, ends, normal
from reference import standard
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fa3 import flash_attn_func, flash_attn_varlen_func

F32, F16, BF16, E4M3, I32 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32
ON_GPU = pytest.param("cuda", marks=pytest.mark.hopper)


@pytest.fixture(params=["cpu", ON_GPU])
def device(request):
    return request.param


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("heads, head_dims", [((4, 4), (64, 64)), ((6, 2), (128, 128)), ((3, 1), (72, 40)), ((2, 1), (192, 128)), ((2, 2), (256, 256))])
def test_each_sequence_has_its_own_results(nan_in_new_tensors, device, heads, head_dims, mask):
    for dtype in (F16, BF16) if device == "cuda" else (F32, BF16):
        Packed(device, dtype, heads=heads, head_dims=head_dims).check(**mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("scores", [dict(softmax_scale=0.3), dict(softcap=5.0), dict(softmax_scale=0.5, softcap=4.0)], ids=str)
def test_scales_and_soft_caps(nan_in_new_tensors, device, scores, mask):
    Packed(device).check(**scores, **mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("used", USED, ids=["both", "keys", "queries", "all"])
def test_rows_that_are_not_in_use(nan_in_new_tensors, device, used, mask):
    Packed(device, used=used).check(**mask)


@pytest.mark.parametrize("used", [None, USED[0]], ids=["all", "in part"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_nothing_reaches_a_sequence_from_outside(device, mask, used):
    """Not even NaN, which a product with 0 would not hide."""
    packed = Packed(device, used=used)
    expected = packed.call(return_attn_probs=True, **mask)
    of_q, of_k = (x[:, None, None] for x in packed.in_use())
    tensors = packed.q.where(of_q, math.nan), packed.k.where(of_k, math.nan), packed.v.where(of_k, math.nan)
    assert_equal(packed.call(tensors=tensors, return_attn_probs=True, **mask), expected)
    # One sequence of NaN reaches itself.
    [q, k] = list(packed.sequences())[4]
    tensors = [x.clone() for x in (packed.q, packed.k, packed.v)]
    for x, rows in zip(tensors, (q, k, k), strict=True):
        x[rows] = math.nan
    out, lse = packed.call(tensors=tensors, return_attn_probs=True, **mask)
    others = torch.ones(len(out), dtype=torch.bool, device=device)
    others[q] = False
    assert_equal((out[others], lse[:, others]), (expected[0][others], expected[1][:, others]))
    assert out[q].isnan().any()


def test_hints_change_no_result(device):
    packed = Packed(device)
    hints = [(None, None), (130, 257), (1, 1), (0, 0), (-1, -5), (2**62, 2**62), (129, 10), (16, 4000)]
    hints += [tuple(torch.tensor(x) for x in (130, 257)), tuple(torch.tensor(x, device=device) for x in (130, 257))]
    expected = packed.call(return_attn_probs=True)
    for given in hints:
        results = packed.check(given)
        if device == "cpu":
            assert_equal(results, expected)


def test_hints_are_numbers_of_any_kind(calls):
    numpy = pytest.importorskip("numpy", reason="skipped: numpy is not installed")
    packed = Packed("cpu", lengths=[(9, 9)])
    for hint in (5, torch.tensor(5), torch.tensor(5, dtype=torch.int16), numpy.int64(5)):
        packed.call((hint, hint))
    assert [(given["max_seqlen_q"], given["max_seqlen_k"]) for _, given in calls] == [(5, 5)] * 4
    assert all(given["cu_seqlens_q"][2] == (2,) for _, given in calls)


@pytest.mark.parametrize("lengths, behind", [([], (0, 0)), ([], (5, 7)), ([(0, 0)] * 3, (0, 0)), ([(0, 8)] * 2, (0, 0)), ([(9, 0)], (0, 0)), ([(0, 0)], (4, 0))], ids=str)
def test_no_rows_no_keys_and_no_sequences(nan_in_new_tensors, device, lengths, behind):
    for used in (None, ([0] * len(lengths),) * 2):
        packed = Packed(device, lengths=lengths, behind=behind, used=used)
        for mask in MASKS[:2]:
            packed.check(**mask)


def test_many_sequences(device):
    """More than are sorted at once; most of them shorter than a tile."""
    count = 2500 if device == "cuda" else 300
    lengths = [(5 * (i * 37 % 10), 9 * (i * 53 % 7)) for i in range(count)] + [(300, 500)]
    packed = Packed(device, lengths=lengths, heads=(2, 1))
    dense = [flash_attn_func(packed.q[None, q], packed.k[None, k], packed.v[None, k], causal=True) for q, k in packed.sequences()]
    out = packed.call(causal=True)[: sum(x for x, _ in lengths)]
    torch.testing.assert_close(out, torch.cat(dense, 1)[0], rtol=0.02, atol=0.01)


def test_strides_are_as_they_are(device):
    lengths = [(50, 50), (3, 3), (0, 0), (201, 201)]
    packed = Packed(device, lengths=lengths, heads=(4, 4), behind=(2, 2))
    expected = packed.check(causal=True)
    tensors = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (packed.q, packed.k, packed.v)]
    assert_equal(packed.call(tensors=tensors, causal=True, return_attn_probs=True), expected)
    tensors = torch.stack([packed.q, packed.k, packed.v], 1).unbind(1)
    assert not tensors[0].is_contiguous()
    assert_equal(packed.call(tensors=tensors, causal=True, return_attn_probs=True), expected)
    # A head for all.
    packed.k, packed.v = packed.k[:, :1].expand(-1, 4, -1), packed.v[:, :1].expand(-1, 4, -1)
    packed.check(causal=True)
    if device == "cpu":
        wide = torch.stack([packed.q, packed.q], -1)[..., 1]
        assert_equal([packed.call(tensors=(wide, packed.k, packed.v))], [packed.call()])
        # Memory of a file or a message may begin anywhere.
        lists = [bytearray([0, *x.view(torch.uint8).tolist()]) for x in packed.ends]
        packed.ends = tuple(torch.frombuffer(x, dtype=I32, offset=1) for x in lists)
        assert packed.ends[0].data_ptr() % 4 != 0
        packed.check()


@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_codes_and_their_scales(device, head_dim, mask):
    packed = Packed(device, lengths=[(20, 30), (0, 4), (5, 0), (130, 150)], head_dims=(head_dim, head_dim))
    q, k, v = (x.to(E4M3) for x in (packed.q, packed.k, packed.v))
    of_q, of_k, of_v = (torch.rand(4, 2, generator=torch.Generator().manual_seed(i)).to(device) + 0.5 for i in range(3))
    of_k[0, 1] = 0.0
    scales = dict(q_descale=of_q, k_descale=of_k, v_descale=of_v)
    for given, dtype in itertools.product(({}, scales), (None, F16, BF16)):
        out, lse = packed.call(tensors=(q, k, v), **given, out_dtype=dtype, return_attn_probs=True, **mask)
        assert out.dtype == (dtype or BF16)
        for i, (rows, keys) in enumerate(packed.sequences()):
            exact = [x[None, part].float() for x, part in ((q, rows), (k, keys), (v, keys))]
            if given:
                by_head = (x[i].repeat_interleave(heads // 2)[:, None] for x, heads in ((of_q, 4), (of_k, 2), (of_v, 2)))
                exact = [x * scale for x, scale in zip(exact, by_head, strict=True)]
            window = (-1, 0) if mask.get("causal") else mask.get("window_size", (-1, -1))
            right, right_lse = standard(*exact, window=window)
            seen = right_lse.isfinite()
            assert ((lse[None, :, rows] - right_lse)[seen].abs() < 0.1).all() and (lse[None, :, rows][~seen] == -math.inf).all()
            assert (out[None, rows] - right).norm() <= 0.05 * right.norm()
        used, _ = packed.in_use()
        assert (out[~used] == 0).all() and (lse[:, ~used] == -math.inf).all()


@pytest.mark.parametrize("with_lse", [True, False])
def test_o_is_written_where_it_is_wanted(device, with_lse):
    packed = Packed(device, used=USED[0])
    expected = packed.call(causal=True, return_attn_probs=True)
    total, heads, head_dim = expected[0].shape
    for whole, part in [
        ((total, heads, head_dim), lambda x: x),
        ((heads, total, head_dim), lambda x: x.transpose(0, 1)),
        ((total + 3, heads + 1, head_dim + 16), lambda x: x[2:-1, 1:, 8:-8]),
    ]:
        memory = torch.full(whole, math.nan, dtype=BF16, device=device)
        out = part(memory)
        results = packed.call(causal=True, return_attn_probs=with_lse, out=out)
        assert (results[0] if with_lse else results) is out
        assert_equal(results if with_lse else [results], expected if with_lse else expected[:1])
        assert memory.isnan().sum() == memory.numel() - out.numel(), "something else was written"


def test_a_result_in_given_memory_has_no_gradient(device):
    packed = Packed(device, lengths=[(5, 5)])
    out = torch.empty_like(packed.q)
    sentence = "^flash_attn_varlen_func: out=... does not support automatic differentiation, but one of the arguments"
    for name in "qkv":
        leaf = getattr(packed, name)
        leaf.requires_grad_()
        given = packed.q, packed.k, packed.v, *packed.ends, None, None, None, None, None, -1, 0, 0, 0.0, 0
        for call in (lambda: packed.call(out=out), lambda: torch.ops.fa3.varlen_forward_out(*given, o=out)):
            with pytest.raises(RuntimeError, match=sentence):
                call()
        leaf.requires_grad_(False)


def test_lists_that_make_no_sense_are_named():
    """On the CPU, where they are read."""
    for lengths, sentence in [
        (dict(cu_seqlens_q=[1, 5]), "q: cu_seqlens starts at 1, not at 0"),
        (dict(cu_seqlens_q=[0, -1]), "q: cu_seqlens falls from 0 to -1 at entry 1"),
        (dict(cu_seqlens_k=[0, 11]), "cu_seqlens ends at 11, past the 10 rows of k"),
        (dict(cu_seqlens_q=[0, 6, 8], cu_seqlens_k=[0, 6, 5]), "k and v: cu_seqlens falls from 6 to 5 at entry 2"),
        (dict(seqused_q=[9]), "q: seqused is 9 for sequence 0, outside 0 to 8"),
        (dict(seqused_k=[-1]), "k and v: seqused is -1 for sequence 0, outside 0 to 10"),
    ]:
        for dtype in (BF16, E4M3):
            q, k = normal(8, 2, 16).to(dtype), normal(10, 2, 16).to(dtype)
            lists = dict(cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 10]) | lengths
            lists = {name: torch.tensor(x, dtype=I32) for name, x in lists.items()}
            with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
                flash_attn_varlen_func(q, k, k, **lists, max_seqlen_q=8, max_seqlen_k=10)


@pytest.mark.hopper
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_lists_that_make_no_sense_touch_nothing_else_on_a_gpu(mask):
    generator = torch.Generator().manual_seed(0)
    extremes = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31), 10**6, 100, 2**30], dtype=I32)
    for count in (1, 7, 1500):
        packed = Packed("cuda", lengths=[(300, 400)], behind=(0, 0))
        total, heads, head_dim = packed.q.shape
        memory = torch.full((total + 20, heads, head_dim), 7.0, dtype=BF16, device="cuda")
        for used in (False, True):
            for garbage in (
                lambda n: torch.randint(-(2**31), 2**31 - 1, (n,), generator=generator, dtype=I32),
                lambda n: torch.randint(-500, 500, (n,), generator=generator, dtype=I32),
                lambda n: extremes[torch.randint(8, (n,), generator=generator)],
                lambda n: torch.arange(n, 0, -1, dtype=I32),
            ):
                packed.ends = garbage(count + 1).cuda(), garbage(count + 1).cuda()
                packed.used = (garbage(count).cuda(), garbage(count).cuda()) if used else None
                packed.call(out=memory[10:-10], **mask)
                torch.cuda.synchronize()
                assert (memory[:10] == 7).all() and (memory[-10:] == 7).all()
    Packed("cuda").check(**mask)


@pytest.mark.hopper
def test_nothing_waits_for_a_gpu():
    packed = Packed("cuda", used=USED[0])
    packed.call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for hints in ((None, None), (200, 300), tuple(torch.tensor(x) for x in (200, 300)), (packed.ends[0][-1], packed.ends[1][-1])):
            packed.call(hints, causal=True, return_attn_probs=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.hopper
def test_a_graph_computes_other_lengths():
    packed = Packed("cuda", used=USED[0])
    packed.call(causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = packed.call(causal=True, return_attn_probs=True)
    for lengths in (LENGTHS, LENGTHS[::-1], [(40, 50)] * 8, [(0, 0)] * 7 + [(300, 400)]):
        packed.lengths = lengths
        for side in (0, 1):
            packed.ends[side].copy_(ends([x[side] for x in lengths], "cuda"))
            packed.used[side].copy_(torch.tensor([max(x[side] - 3, 0) for x in lengths], dtype=I32))
        for x in (packed.q, packed.k, packed.v):
            x.copy_(torch.randn_like(x))
        for x in results:
            x.fill_(math.nan)
        graph.replay()
        packed.judge(*results, causal=True)


def test_a_call_enters_the_extension_module_once(device, calls, are_lists):
    packed = Packed(device, used=USED[0])
    packed.call(causal=True)
    [(name, given)] = calls
    assert name == "forward"
    # An LSE that nobody wants is not even allocated.
    assert "lse" not in given
    lists = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"), (*packed.ends, *packed.used)))
    are_lists(given, (None, None), **lists)


# What torch sees.


NUMBERS = (None, 7, 0, 6, 30.0, 0)


def test_the_schema_is_what_graphs_are_saved_with():
    arguments = (
        "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
        "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? softmax_scale, SymInt window_left, SymInt window_right, "
        "SymInt attention_chunk, float softcap, SymInt sm_margin, Tensor? q_descale=None, Tensor? k_descale=None, "
        "Tensor? v_descale=None, ScalarType? out_dtype=None, bool deterministic=False, Tensor? s_aux=None, "
        "Tensor? qv=None"
    )
    assert str(torch.ops.fa3.varlen_forward.default._schema) == f"fa3::varlen_forward({arguments}) -> (Tensor o, Tensor lse)"
    into = f"fa3::varlen_forward_out({arguments}, *, Tensor(a!) o) -> Tensor lse"
    assert str(torch.ops.fa3.varlen_forward_out.default._schema) == into


@pytest.mark.parametrize("lengths", [LENGTHS, [], [(0, 0)]], ids=str)
def test_the_operators_are_what_they_say(device, lengths):
    """Schema, fake results beside real ones, and what becomes of them under torch.compile: torch's own checks."""
    for used, hints in ((None, (None, None)), (([0] * len(lengths),) * 2, (130, 257))):
        packed = Packed(device, lengths=lengths, head_dims=(64, 32), used=used)
        for q in (packed.q, packed.q.transpose(0, 1).contiguous().transpose(0, 1)):
            arguments = (q, packed.k, packed.v, *packed.ends, *(packed.used or (None, None)), *hints, *NUMBERS)
            torch.library.opcheck(torch.ops.fa3.varlen_forward.default, arguments)
            out = dict(o=torch.empty(len(q), 4, 32, dtype=BF16, device=device))
            torch.library.opcheck(torch.ops.fa3.varlen_forward_out.default, arguments, out)


def test_compiled_calls_are_those_of_plain_ones(device):
    def attend(q, k, v, ends_q, ends_k, used_q, used_k):
        options = dict(softmax_scale=0.3, causal=True, window_size=(5, 3), softcap=20.0, sm_margin=1)
        used = dict(seqused_q=used_q, seqused_k=used_k)
        hints = torch.tensor(30), 200
        return flash_attn_varlen_func(q * 2, k, v, ends_q, ends_k, *hints, **used, **options, return_attn_probs=True)

    def into(q, k, v, ends_q, ends_k, used_q, used_k, out):
        flash_attn_varlen_func(q, k, v, ends_q, ends_k, None, None, used_q, used_k, out=out)
        return out + 1

    packed = Packed(device, used=USED[0])
    given = packed.q, packed.k, packed.v, *packed.ends, *packed.used
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert_equal(compiled(*given), attend(*given))
    out = torch.empty(4, len(packed.q), 64, dtype=BF16, device=device).transpose(0, 1)
    compiled = torch.compile(into, backend="aot_eager", fullgraph=True)
    expected = packed.call()
    assert_equal([compiled(*given, out), out], [expected + 1, expected])


def test_other_totals_and_counts_compile_nothing_anew(device):
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def attend(q, k, v, ends_q, ends_k, hint):
        return flash_attn_varlen_func(q, k, v, ends_q, ends_k, hint, hint, causal=True) * 2

    torch._dynamo.reset()
    for i in range(3, 7):
        packed = Packed(device, lengths=[(10 * i + j, 12 * i) for j in range(i)])
        # The first one may be compiled for a hint that is a constant, the second one for any.
        hint = 50 if i == 3 else 20 * i
        given = packed.q, packed.k, packed.v, *packed.ends
        for x in given:
            torch._dynamo.mark_dynamic(x, 0)
        assert_equal([attend(*given, hint)], [packed.call((hint, hint), causal=True) * 2])
        assert len(compiled) == (1 if i == 3 else 2)


def test_an_export_takes_other_lengths():
    class Attend(torch.nn.Module):
        def forward(self, q, kv, ends_q, ends_k):
            return flash_attn_varlen_func(q, kv, kv, ends_q, ends_k, None, None, causal=True)

    def given(lengths):
        packed = Packed("cpu", lengths=lengths)
        return packed.q, packed.k, *packed.ends

    auto = torch.export.Dim.AUTO
    program = torch.export.export(Attend(), given([(3, 4), (5, 6)]), dynamic_shapes=[{0: auto}] * 4)
    others = given(LENGTHS)
    assert torch.equal(program.module()(*others), Attend()(*others))


def test_lengths_that_only_the_data_will_tell():
    """A trace may not know how many rows there are, or how long they are. Then they are not checked."""

    class Masked(torch.nn.Module):
        def forward(self, x, mask, ends):
            rows = x[mask]
            ends = torch.cat([ends, mask.sum(dtype=I32)[None]])
            return flash_attn_varlen_func(rows, rows, rows, ends, ends, None, (ends[1:] - ends[:-1]).max())

    x, mask, start = torch.randn(30, 2, 16), torch.arange(30) % 2 == 0, torch.tensor([0, 4], dtype=I32)
    program = torch.export.export(Masked(), (x, mask, start))
    mask = torch.arange(30) % 3 == 0
    assert torch.equal(program.module()(x, mask, start), Masked()(x, mask, start))


@pytest.mark.parametrize("place", ["cuda", "cpu", "meta"])
def test_fake_results_are_contiguous_whatever_the_strides(place):
    with FakeTensorMode():
        q = torch.empty(8, 300, 128, dtype=F16, device=place).transpose(0, 1)
        k, v = (torch.empty(200, 2, dim, dtype=F16, device=place) for dim in (128, 64))
        lists = [torch.empty(n, dtype=I32, device=place) for n in (4, 4, 3, 3)]
        out, lse = flash_attn_varlen_func(q, k, v, *lists[:2], 100, 200, *lists[2:], return_attn_probs=True)
        codes = [torch.empty(200, 2, 128, device=place).to(E4M3) for _ in "qkv"]
        scales = dict(q_descale=torch.empty(3, 2, device=place))
        assert flash_attn_varlen_func(*codes, *lists[:2], None, None, **scales, out_dtype=F16).dtype == F16
    assert (out.shape, out.dtype, out.is_contiguous(), out.device) == ((300, 8, 64), F16, True, q.device)
    assert (lse.shape, lse.dtype, lse.is_contiguous(), lse.device) == ((8, 300), F32, True, q.device)


def test_tracers_see_the_operator():
    def attend(q, ends, hint):
        return flash_attn_varlen_func(q, q, q, ends, ends, hint, 40, causal=True, window_size=(5, 3), softcap=30.0)

    with FakeTensorMode():
        given = torch.empty(64, 8, 128, dtype=BF16, device="cuda"), torch.empty(4, dtype=I32, device="cuda")
        graph = make_fx(attend)(*given, torch.tensor(5, device="cuda"))
    [node] = [node for node in graph.graph.nodes if node.target is torch.ops.fa3.varlen_forward.default]
    # The right side of a causal window is 0. A hint in a trace is none.
    assert list(node.args[5:]) == [None, None, None, 40, None, 5, 0, 0, 30.0, 0]


@pytest.mark.parametrize("compiled", [False, True])
def test_codes_have_no_gradients(device, compiled):
    """The forward pass runs, with the same results. Its gradients are refused in a sentence."""
    packed = Packed(device, lengths=[(5, 6), (7, 8)])
    tensors = [x.to(E4M3) for x in (packed.q, packed.k, packed.v)]
    expected = packed.call(tensors=tensors, causal=True, return_attn_probs=True)

    def attend(q, k, v, ends_q, ends_k):
        return flash_attn_varlen_func(q, k, v, ends_q, ends_k, None, None, causal=True, return_attn_probs=True)

    if compiled:
        # Torch would give up after eight calls of one function.
        torch.compiler.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for position in range(3):
        leaves = list(tensors)
        leaves[position] = leaves[position].clone().requires_grad_()
        results = attend(*leaves, *packed.ends)
        assert_equal(results, expected)
        for result in results:
            assert result.requires_grad
            with pytest.raises(NotImplementedError, match="^q is torch.float8_e4m3fn, for which attention has no gradients$"):
                result.float().sum().backward(retain_graph=True)
        with torch.no_grad():
            assert not attend(*leaves, *packed.ends)[0].requires_grad


def test_tangents_are_refused():
    x, lists = normal(8, 2, 64), ends([3, 5], "cpu")

    def attend(x):
        return flash_attn_varlen_func(x, x, x, lists, lists, None, None).sum()

    tangent = "^q, k, v or a descale has a tangent"
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=tangent):
        attend(forward_ad.make_dual(x, x))
    with pytest.raises(NotImplementedError, match=tangent):
        torch.func.jvp(attend, (x,), (x,))
    with pytest.raises(NotImplementedError, match="^out is not supported inside of torch.func's transforms$"):
        torch.func.vmap(lambda x: flash_attn_varlen_func(x, x, x, lists, lists, None, None, out=x))(x[None])


def test_negated_tensors_are_what_they_stand_for(device):
    packed = Packed(device)
    q, k, v = packed.q, packed.k, packed.v
    expected = [packed.call(tensors=(-q, k, v)), packed.call(tensors=(q, k, -v))]
    assert_equal([packed.call(tensors=(torch._neg_view(q), k, v)), packed.call(tensors=(q, k, torch._neg_view(v)))], expected)


def test_operations_are_counted_without_reading_lengths():
    """Right where sequences are of one length; with a hint, as if all had as many keys."""

    def flops(function, *arguments, **options):
        with FlopCounterMode(display=False) as counter:
            function(*arguments, **options)
        return counter.get_total_flops()

    q, k, v = normal(60, 4, 64), normal(90, 2, 64), normal(90, 2, 32)
    of_q, of_k = ends([20] * 3, "cpu"), ends([30] * 3, "cpu")
    dense = flops(flash_attn_func, q.view(3, 20, 4, 64), k.view(3, 30, 2, 64), v.view(3, 30, 2, 32))
    assert dense == 3 * 4 * 20 * 30 * 2 * 96
    for hints in ((None, None), (20, 30), (1, 30)):
        assert flops(flash_attn_varlen_func, q, k, v, of_q, of_k, *hints) == dense
    assert flops(flash_attn_varlen_func, q, k, v, of_q, of_k, 20, 45) == dense * 3 // 2
    assert flops(flash_attn_varlen_func, q, k, v, of_q, of_k, 20, 10**6) == dense * 3
    assert flops(flash_attn_varlen_func, q, k, v, of_q, of_k, None, None, out=torch.empty(60, 4, 32).to(BF16)) == dense
