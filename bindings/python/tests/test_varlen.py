"""Attention over packed sequences, `fa3.flash_attn_varlen_func`, and its gradients: each sequence is compared with its
own definition, on the CPU and on a GPU. Outputs start as NaN, so that elements that are not written show. Needs torch.
"""

import itertools
import math
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

import covering
from dense import INTERVALS, anything
from packing import LENGTHS, MASKS, USED, Packed, assert_equal, ends, garbage, normal
from reference import judge_codes

from fa3 import flash_attn_func, flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func, masks

F32, F16, BF16, E4M3, I32 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32
LISTS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
# (max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, attention_chunk, softcap, sm_margin)
NUMBERS = (130, 257, 0.5, 9, 0, 50, 20.0, 2)
OPTIONS = dict(softmax_scale=0.5, causal=True, window_size=(9, 3), attention_chunk=50, softcap=20.0, sm_margin=2)


@pytest.fixture(params=[Packed.check, Packed.check_gradients], ids=["results", "gradients"])
def check(request):
    """Runs a test with `Packed.check`, for results, and with `Packed.check_gradients`, for gradients."""
    return request.param


def both(packed, tensors=None, dout=None, dlse=None, **options):
    """Computes O, LSE and gradients, with the same bits in every run."""
    given = packed.given() if dout is None else (dout, dlse)
    results = packed.call(tensors=tensors, return_attn_probs=True, **options)
    return *results, *packed.gradients(*given, tensors=tensors, deterministic=True, **options)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("heads, head_dims", [((4, 4), (64, 64)), ((6, 2), (128, 128)), ((3, 1), (72, 40)), ((2, 1), (192, 128)), ((2, 2), (256, 256))])
def test_each_sequence_has_its_own_results(nan_in_new_tensors, device, check, heads, head_dims, mask):
    for dtype in (F16, BF16) if device == "cuda" else (F32, BF16):
        check(Packed(device, dtype, heads=heads, head_dims=head_dims), **mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    "scores", [dict(softmax_scale=0.3), dict(softcap=5.0), dict(softmax_scale=0.5, softcap=4.0), dict(s_aux=[-3.0, 0.5, 9.0, -math.inf])], ids=str
)
def test_scales_soft_caps_and_sinks(nan_in_new_tensors, device, check, scores, mask):
    scores = {name: torch.tensor(x, device=device) if isinstance(x, list) else x for name, x in scores.items()}
    check(Packed(device, F32 if device == "cpu" and "s_aux" in scores else BF16), **scores, **mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("used", USED, ids=["both", "keys", "queries", "all"])
def test_rows_that_are_not_in_use(nan_in_new_tensors, device, check, used, mask):
    check(Packed(device, used=used), **mask)


@covering.parametrize(used=[None, USED[0]], make=INTERVALS, mask=[dict(), MASKS[1], MASKS[3]], head_dim=[64, 128, 256])
def test_intervals_count_the_keys_of_their_sequence(nan_in_new_tensors, device, check, used, make, mask, head_dim):
    packed = Packed(device, head_dims=(head_dim, head_dim), used=used)
    sinks = torch.tensor([-3.0, 0.5, 9.0, -math.inf], device=device)
    check(packed, intervals=packed.intervals(make), s_aux=sinks, **mask)


@pytest.mark.parametrize("used", [None, USED[0]], ids=["all", "in part"])
def test_wide_heads_under_masks_of_data(nan_in_new_tensors, device, used):
    packed = Packed(device, heads=(4, 1), head_dims=(512, 512), used=used)
    for make, mask in itertools.product(INTERVALS[: 1 if device == "cpu" else None], (dict(), dict(window_size=(37, 11), softcap=3.0))):
        packed.check(intervals=packed.intervals(make), **mask)
    numbers = torch.tensor([1, 0, -3, 0, 0, 1, 2**31 - 1, 0], dtype=I32, device=device)
    of_sequence = iter(numbers.tolist())
    own = packed.intervals(lambda rows, keys: masks.sliding_window(rows, keys, -1, 0 if next(of_sequence) else -1))
    packed.judge(*packed.call(causal=numbers, return_attn_probs=True), intervals=own)


def test_intervals_of_a_dense_batch(device):
    """The sequences of a dense batch lie one behind the other."""
    q, k = normal(2, 30, 4, 64, device=device), normal(2, 40, 2, 64, device=device)
    bounds = anything(30, 40).to(device, I32)
    rows = bounds.transpose(0, 1).flatten(1, 2)
    expected = flash_attn_func(q, k, k, intervals=bounds, return_attn_probs=True)
    for lists in (dict(seqused_k=torch.tensor([40, 40], dtype=I32, device=device)), dict()):
        given = dict(max_seqlen_q=None, max_seqlen_k=None, intervals=rows, return_attn_probs=True, **lists)
        assert_equal(flash_attn_varlen_func(q, k, k, None, None, **given), expected)


@pytest.mark.parametrize("used", [None, USED[0]], ids=["all", "in part"])
@pytest.mark.parametrize("mask", [dict(), dict(window_size=(37, 11), softcap=3.0), dict(attention_chunk=50)], ids=str)
def test_each_sequence_is_causal_or_not(device, used, mask):
    packed = Packed(device, used=used)
    numbers = torch.tensor([1, 0, -3, 0, 0, 1, 2**31 - 1, 0], dtype=I32, device=device)
    of_sequence = iter(numbers.tolist())
    own = packed.intervals(lambda rows, keys: masks.sliding_window(rows, keys, -1, 0 if next(of_sequence) else -1))
    expected = both(packed, intervals=own, **mask)
    for causal in (numbers, numbers != 0, torch.stack([numbers, numbers - 1], 1)[:, 0]):
        assert_equal(both(packed, causal=causal, **mask), expected)


def test_wrong_numbers_of_sequences_are_refused(device):
    packed = Packed(device)
    for causal, intervals, sentence in (
        (torch.ones(8, device=device), None, r"^causal is torch.float32 \(8,\), expected True, False, or torch.bool"),
        (torch.ones(8, 1, dtype=I32, device=device), None, r"^causal is torch.int32 \(8, 1\), expected"),
        (torch.ones(7, dtype=I32, device=device), None, "causal has 7 numbers, expected one for each of 8 sequences"),
        (torch.ones(8, dtype=torch.bool, device=device), anything(4, 3).to(device, I32), "^there are intervals and causal as tensors, expected one"),
    ):
        with pytest.raises(ValueError, match=sentence):
            packed.call(causal=causal, intervals=intervals)
    nothing = Packed(device, lengths=[], behind=(5, 7))
    assert not nothing.call(causal=torch.ones(0, dtype=torch.bool, device=device)).any()


@pytest.mark.parametrize("of_o, of_lse", [(True, False), (False, True)], ids=["o", "lse"])
def test_gradients_of_o_and_of_lse(nan_in_new_tensors, device, of_o, of_lse):
    for mask in MASKS[:3]:
        results = Packed(device).check_gradients(of_o, of_lse, **mask)
        # LSE does not depend on V, so dV is 0 without a gradient of O.
        assert of_o or not results[2].any()


@pytest.mark.parametrize("used", [None, USED[0]], ids=["all", "in part"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_nothing_reaches_a_sequence_from_outside(device, mask, used):
    """Even NaN in other rows reaches no sequence, though a product with 0 would not hide it."""
    packed = Packed(device, used=used)
    dout, dlse = packed.given()
    expected = both(packed, **mask)
    of_q, of_k = (x[:, None, None] for x in packed.in_use())
    tensors = packed.q.where(of_q, math.nan), packed.k.where(of_k, math.nan), packed.v.where(of_k, math.nan)
    wild = dout.where(of_q, math.nan), dlse.where(of_q[:, 0, 0], math.nan)
    assert_equal(both(packed, tensors, *wild, **mask), expected)
    # A sequence of NaN changes only its own results.
    [q, k] = list(packed.sequences())[4]
    tensors = [x.clone() for x in (packed.q, packed.k, packed.v)]
    for x, rows in zip(tensors, (q, k, k), strict=True):
        x[rows] = math.nan
    dout = dout.clone()
    dout[q] = math.nan
    for results, rows in ((both(packed, tensors, dout, dlse, **mask), (q, (..., q), q, k, k)), (both(packed, None, dout, dlse, **mask)[2:], (q, k, k))):
        for x, right, part in zip(results, expected[-len(results) :], rows, strict=True):
            others = torch.ones_like(x, dtype=torch.bool)
            others[part] = False
            assert torch.equal(x[others], right[others]) and x[part].isnan().any()


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
    """There are more sequences than a kernel sorts at once. Most of them are shorter than a tile."""
    count = 2500 if device == "cuda" else 300
    lengths = [(5 * (i * 37 % 10), 9 * (i * 53 % 7)) for i in range(count)] + [(300, 500)]
    packed = Packed(device, F32 if device == "cpu" else BF16, lengths=lengths, heads=(2, 1))
    dout, dlse = packed.given()
    out, *results = both(packed, None, dout, dlse, causal=True)
    for q, k in packed.sequences():
        leaves = [x.detach().requires_grad_() for x in (packed.q[None, q], packed.k[None, k], packed.v[None, k])]
        alone = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
        expected = alone[0], *torch.autograd.grad(alone, leaves, (dout[None, q], dlse[None, :, q]))
        for x, right, rows in zip((out, *results[1:]), expected, (q, q, k, k), strict=True):
            torch.testing.assert_close(x[None, rows], right, rtol=0.02, atol=0.02)


def test_strides_are_as_they_are(device):
    packed = Packed(device, lengths=[(50, 50), (3, 3), (0, 0), (201, 201)], heads=(4, 4), behind=(2, 2))
    dout, dlse = packed.given()
    expected = *packed.check(causal=True), *packed.check_gradients(causal=True)
    arrangements = [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.stack([x, x, x], 1)[:, 1],
        lambda x: torch.cat([x, x], -1)[..., : x.shape[2]],
    ]
    for arrange in arrangements + [lambda x: torch.stack([x, x], -1)[..., 1]][: 1 if device == "cpu" else 0]:
        tensors = [arrange(x) for x in (packed.q, packed.k, packed.v)]
        results = both(packed, tensors, dout, dlse, causal=True)
        assert_equal(results, expected)
        # Gradients have heads outside rows if their tensors have.
        assert all(x.stride() == y.stride() if x.stride(0) < x.stride(1) else y.is_contiguous() for x, y in zip(tensors, results[2:]))
    for given in (dout.transpose(0, 1).contiguous().transpose(0, 1), torch.stack([dout, dout], -1)[..., 0]):
        assert_equal(both(packed, None, given, dlse.t().contiguous().t(), causal=True), expected)
    one = dout[0, 0].clone().expand(dout.shape)
    assert_equal(both(packed, None, one, dlse), both(packed, None, one.contiguous(), dlse))
    if device == "cpu":
        # The memory of a file or a message may begin at any address.
        lists = [bytearray([0, *x.view(torch.uint8).tolist()]) for x in packed.ends]
        packed.ends = tuple(torch.frombuffer(x, dtype=I32, offset=1) for x in lists)
        assert packed.ends[0].data_ptr() % 4 != 0
        assert_equal(both(packed, causal=True), expected)
    # One head of K and V serves all.
    packed.k, packed.v = packed.k[:, :1].expand(-1, 4, -1), packed.v[:, :1].expand(-1, 4, -1)
    packed.check(causal=True)


@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_codes_and_their_scales(device, head_dim, mask):
    packed = Packed(device, lengths=[(20, 30), (0, 4), (5, 0), (130, 150)], head_dims=(head_dim, head_dim))
    q, k, v = (x.to(E4M3) for x in (packed.q, packed.k, packed.v))
    scales = [torch.rand(4, 2, generator=torch.Generator().manual_seed(i)).to(device) + 0.5 for i in range(3)]
    scales[1][0, 1] = 0.0
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales))
    for given, dtype in itertools.product(({}, named), (None, F16, BF16)):
        out, lse = packed.call(tensors=(q, k, v), **given, out_dtype=dtype, return_attn_probs=True, **mask)
        assert out.dtype == (dtype or BF16)
        for i, (rows, keys) in enumerate(packed.sequences()):
            exact = [x[None, part].float() for x, part in ((q, rows), (k, keys), (v, keys))]
            if given:
                exact = [x * scale[i].repeat_interleave(x.shape[2] // 2)[:, None] for x, scale in zip(exact, scales, strict=True)]
            judge_codes(out[None, rows], lse[None, :, rows], *exact, **mask)
        packed.judge_behind(out, lse)


@pytest.mark.parametrize("num_heads_q", [None, 4])
def test_one_tensor_and_its_gradients(device, calls, are_lists, num_heads_q):
    """Q, K and V are views of one tensor, and so are their gradients."""
    lengths = [7, 0, 64, 129]
    shape = (sum(lengths) + 5, 3, 4, 64) if num_heads_q is None else (sum(lengths) + 5, 8, 64)
    qkv, lists = normal(*shape, device=device).requires_grad_(), ends(lengths, device)
    # The arguments have flash-attn 2's order, in which dropout_p follows max_seqlen.
    numbers = 129, 0.0, 0.5, True, (70, 5), 20.0, None, True, True
    out, lse = flash_attn_varlen_qkvpacked_func(qkv, lists, *numbers, num_heads_q=num_heads_q)
    parts = qkv.detach().unbind(1) if num_heads_q is None else qkv.detach().split([4, 2, 2], 1)
    [(_, given)] = calls
    assert [given[name][1] for name in "qkv"] == [x.data_ptr() for x in parts]
    are_lists(given, (129, 129), cu_seqlens_q=lists, cu_seqlens_k=lists)
    assert (given["softmax_scale"], given["window"], given["softcap"]) == (0.5, (70, 0, 0), 20.0)
    leaves = [x.requires_grad_() for x in parts]
    options = dict(softmax_scale=0.5, causal=True, window_size=(70, 5), softcap=20.0, deterministic=True)
    expected = flash_attn_varlen_func(*leaves, lists, lists, 129, 129, return_attn_probs=True, **options)
    assert_equal((out, lse), expected)
    given = normal(*out.shape, device=device, seed=3), normal(*lse.shape, device=device, dtype=F32, seed=4)
    [result] = torch.autograd.grad((out, lse), qkv, given)
    gradients = torch.autograd.grad(expected, leaves, given)
    assert_equal(result.unbind(1) if num_heads_q is None else result.split([4, 2, 2], 1), gradients)


# Tests of the arguments that a call passes on.


def test_a_call_enters_the_extension_module_once(device, calls, are_lists):
    packed = Packed(device, used=USED[0])
    packed.call(causal=True)
    dout, dlse = packed.given()
    for deterministic in (False, True):
        packed.gradients(dout, dlse, (130, 257), deterministic=deterministic, **OPTIONS)
    assert [name for name, _ in calls] == ["forward", *["forward", "backward"] * 2]
    # LSE is not even allocated if it is not wanted.
    assert "lse" not in calls[0][1]
    lists = dict(zip(LISTS, (*packed.ends, *packed.used)))
    are_lists(calls[0][1], (None, None), **lists)
    for _, given in calls[1:]:
        are_lists(given, (130, 257), **lists)
        names = ("softmax_scale", "window", "softcap", "sm_margin")
        assert [given[name] for name in names] == [0.5, (9, 0, 50), 20.0, 2]
    assert [given["deterministic"] for _, given in calls[2::2]] == [False, True]


@pytest.mark.parametrize("warn_only", [False, True])
def test_torchs_mode_asks_for_the_same_bits(calls, warn_only):
    """The mode counts at the time of the backward pass."""
    packed = Packed("cpu", lengths=[(5, 6), (7, 8)])
    leaf = packed.q.requires_grad_()
    out = packed.call()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        torch.autograd.grad(out.float().sum(), leaf, retain_graph=True)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.autograd.grad(out.float().sum(), leaf)
    assert [given["deterministic"] for name, given in calls if name == "backward"] == [True, False]


# Lists that cannot be lengths. The CPU reads lists, and its errors name them.


@pytest.mark.parametrize(
    "lists, sentence",
    [
        (dict(cu_seqlens_q=[1, 5]), "q: cu_seqlens starts at 1, not at 0"),
        (dict(cu_seqlens_q=[0, -1]), "q: cu_seqlens falls from 0 to -1 at entry 1"),
        (dict(cu_seqlens_k=[0, 11]), "cu_seqlens ends at 11, past the 10 rows of k"),
        (dict(cu_seqlens_q=[0, 6, 8], cu_seqlens_k=[0, 6, 5]), "k and v: cu_seqlens falls from 6 to 5 at entry 2"),
        (dict(seqused_q=[9]), "q: seqused is 9 for sequence 0, outside 0 to 8"),
        (dict(seqused_k=[-1]), "k and v: seqused is -1 for sequence 0, outside 0 to 10"),
    ],
    ids=str,
)
def test_lists_that_make_no_sense_are_named(lists, sentence):
    lists = dict(cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 10]) | lists
    lists = {name: torch.tensor(x, dtype=I32) for name, x in lists.items()}
    q, k, lse = normal(8, 2, 16), normal(10, 2, 16), torch.zeros(2, 8)
    for call in (
        lambda: flash_attn_varlen_func(q, k, k, **lists, max_seqlen_q=8, max_seqlen_k=10),
        lambda: flash_attn_varlen_func(*(x.to(E4M3) for x in (q, k, k)), **lists, max_seqlen_q=8, max_seqlen_k=10),
        lambda: torch.ops.fa3.varlen_backward(q, q, k, k, q, lse, None, *(lists.get(name) for name in LISTS), *NUMBERS),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            call()


@pytest.mark.hopper
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_lists_that_make_no_sense_touch_nothing_else_on_a_gpu(mask):
    generator = torch.Generator().manual_seed(0)
    window = (-1, 0) if mask.get("causal") else mask.get("window_size", (-1, -1))
    for count in (1, 7, 1500):
        packed = Packed("cuda", lengths=[(300, 400)], behind=(0, 0))
        tensors = packed.q, packed.k, packed.v
        o, lse = packed.call(return_attn_probs=True, **mask)
        memory = [torch.full((len(x) + 20, *x.shape[1:]), 7.0, dtype=BF16, device="cuda") for x in (o, *tensors)]
        out, *outputs = (x[10:-10] for x in memory)
        for used, numbers in itertools.product((False, True), garbage(generator)):
            packed.ends = numbers(count + 1).cuda(), numbers(count + 1).cuda()
            packed.used = (numbers(count).cuda(), numbers(count).cuda()) if used else None
            packed.call(out=out, **mask)
            for deterministic in (False, True):
                lists = *packed.ends, *(packed.used or (None, None))
                options = (None, None, None, *window, 0, 0.0, 0, deterministic)
                named = dict(zip(("dq", "dk", "dv"), outputs))
                torch.ops.fa3.varlen_backward_out(o, *tensors, o, lse, None, *lists, *options, **named)
            torch.cuda.synchronize()
            assert all((x[:10] == 7).all() and (x[-10:] == 7).all() for x in memory)
    Packed("cuda").check(**mask)
    Packed("cuda").check_gradients(**mask)


# Tests for a GPU only.


@pytest.mark.hopper
def test_gradients_have_the_same_bits_every_time():
    lengths = [(1000, 1500), (40, 3000), (700, 64), (0, 9), (2100, 2100)]
    packed = Packed("cuda", lengths=lengths, heads=(8, 2), head_dims=(128, 128))
    dout, dlse = packed.given()
    for mask in MASKS:
        first = packed.gradients(dout, dlse, deterministic=True, **mask)
        for _ in range(20):
            assert_equal(packed.gradients(dout, dlse, deterministic=True, **mask), first)
        for x, y in zip(packed.gradients(dout, dlse, **mask), first, strict=True):
            assert (x.float() - y.float()).norm() < 1e-3 * y.float().norm()


@pytest.fixture(params=["results", "gradients", "gradients in order"])
def steps(request):
    """(packed problem, tensors, a function that computes results or gradients, a function that judges them)"""
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


@pytest.mark.hopper
def test_compiled_into_graphs():
    """Torch's own graphs capture both passes."""

    def layer(q, k, v, ends_q, ends_k):
        return flash_attn_varlen_func(q, k, v, ends_q, ends_k, 200, 300, causal=True, deterministic=True)

    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    packed = Packed("cuda")
    dout, _ = packed.given()
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        leaves = [torch.randn_like(x).requires_grad_() for x in (packed.q, packed.k, packed.v)]
        results = torch.autograd.grad(compiled(*leaves, *packed.ends), leaves, dout)
        assert_equal(results, torch.autograd.grad(layer(*leaves, *packed.ends), leaves, dout))
