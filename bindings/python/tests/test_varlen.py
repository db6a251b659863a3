"""Attention over packed sequences, `fa3.flash_attn_varlen_func`: each sequence against its own definition, on the CPU
and on a GPU. Needs torch.
"""

import itertools
import math
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import LENGTHS, MASKS, USED, Packed, assert_equal, ends, garbage, normal
from reference import standard
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fa3 import flash_attn_func, flash_attn_varlen_func

F32, F16, BF16, E4M3, I32 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32


@pytest.fixture(params=[Packed.check, Packed.check_gradients], ids=["results", "gradients"])
def check(request):
    """Computes and judges results, or gradients."""
    return request.param


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("heads, head_dims", [((4, 4), (64, 64)), ((6, 2), (128, 128)), ((3, 1), (72, 40)), ((2, 1), (192, 128)), ((2, 2), (256, 256))])
def test_each_sequence_has_its_own_results(nan_in_new_tensors, device, check, heads, head_dims, mask):
    for dtype in (F16, BF16) if device == "cuda" else (F32, BF16):
        check(Packed(device, dtype, heads=heads, head_dims=head_dims), **mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("scores", [dict(softmax_scale=0.3), dict(softcap=5.0), dict(softmax_scale=0.5, softcap=4.0)], ids=str)
def test_scales_and_soft_caps(nan_in_new_tensors, device, check, scores, mask):
    check(Packed(device), **scores, **mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("used", USED, ids=["both", "keys", "queries", "all"])
def test_rows_that_are_not_in_use(nan_in_new_tensors, device, check, used, mask):
    check(Packed(device, used=used), **mask)


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


def test_hints_change_no_result(device, check):
    packed = Packed(device)
    hints = [(None, None), (130, 257), (1, 1), (0, 0), (-1, -5), (2**62, 2**62), (129, 10), (16, 4000)]
    hints += [tuple(torch.tensor(x) for x in (130, 257)), tuple(torch.tensor(x, device=device) for x in (130, 257))]
    expected = check(packed)
    for given in hints:
        results = check(packed, hints=given)
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
def test_no_rows_no_keys_and_no_sequences(nan_in_new_tensors, device, check, lengths, behind):
    for used in (None, ([0] * len(lengths),) * 2):
        packed = Packed(device, lengths=lengths, behind=behind, used=used)
        for mask in MASKS[:2]:
            check(packed, **mask)


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
    for count in (1, 7, 1500):
        packed = Packed("cuda", lengths=[(300, 400)], behind=(0, 0))
        total, heads, head_dim = packed.q.shape
        memory = torch.full((total + 20, heads, head_dim), 7.0, dtype=BF16, device="cuda")
        for used in (False, True):
            for numbers in garbage(generator):
                packed.ends = numbers(count + 1).cuda(), numbers(count + 1).cuda()
                packed.used = (numbers(count).cuda(), numbers(count).cuda()) if used else None
                packed.call(out=memory[10:-10], **mask)
                torch.cuda.synchronize()
                assert (memory[:10] == 7).all() and (memory[-10:] == 7).all()
    Packed("cuda").check(**mask)


@pytest.fixture(params=["results", "gradients", "gradients in order"])
def steps(request):
    """A packed problem, a function that computes something of it, and one that judges what was computed."""
    packed = Packed("cuda", used=USED[0])
    if request.param == "results":
        return packed, [], lambda *hints: packed.call(*hints, causal=True, return_attn_probs=True), packed.judge
    given, deterministic = packed.given(), request.param == "gradients in order"
    compute = lambda *hints: packed.gradients(*given, *hints, causal=True, deterministic=deterministic)
    return packed, given, compute, lambda *results, **options: packed.judge_gradients(results, *given, **options)


@pytest.mark.hopper
def test_nothing_waits_for_a_gpu(steps):
    packed, _, compute, _ = steps
    compute()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for hints in ((None, None), (200, 300), tuple(torch.tensor(x) for x in (200, 300)), (packed.ends[0][-1], packed.ends[1][-1])):
            compute(hints)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.hopper
def test_a_graph_computes_other_lengths(steps):
    packed, given, compute, judge = steps
    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = compute()
    for lengths in (LENGTHS, LENGTHS[::-1], [(40, 50)] * 8, [(0, 0)] * 7 + [(300, 400)]):
        packed.lengths = lengths
        for side in (0, 1):
            packed.ends[side].copy_(ends([x[side] for x in lengths], "cuda"))
            packed.used[side].copy_(torch.tensor([max(x[side] - 3, 0) for x in lengths], dtype=I32))
        for x in (packed.q, packed.k, packed.v, *given):
            x.copy_(torch.randn_like(x))
        for x in results:
            x.fill_(math.nan)
        graph.replay()
        judge(*results, causal=True)


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


def test_tracers_see_the_operator():
    def attend(q, ends, hint):
        return flash_attn_varlen_func(q, q, q, ends, ends, hint, 40, causal=True, window_size=(5, 3), softcap=30.0)

    with FakeTensorMode():
        given = torch.empty(64, 8, 128, dtype=BF16, device="cuda"), torch.empty(4, dtype=I32, device="cuda")
        graph = make_fx(attend)(*given, torch.tensor(5, device="cuda"))
    [node] = [node for node in graph.graph.nodes if node.target is torch.ops.fa3.varlen_forward.default]
    # The right side of a causal window is 0. A hint in a trace is none.
    assert list(node.args[5:]) == [None, None, None, 40, None, 5, 0, 0, 30.0, 0]


def test_out_is_refused_inside_of_transforms():
    x, lists = normal(8, 2, 64), ends([3, 5], "cpu")
    with pytest.raises(NotImplementedError, match="^out is not supported inside of torch.func's transforms$"):
        torch.func.vmap(lambda x: flash_attn_varlen_func(x, x, x, lists, lists, None, None, out=x))(x[None])


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
