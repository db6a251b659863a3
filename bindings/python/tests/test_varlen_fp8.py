"""Attention in 8 bits of packed sequences, `fa3.flash_attn_varlen_fp8_func`: each has the bits that it has alone. Needs
torch.
"""

import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import normal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fa3 import flash_attn_fp8_func, flash_attn_varlen_fp8_func

BF16, F16 = torch.bfloat16, torch.float16
ON_GPU = pytest.param("cuda", marks=pytest.mark.hopper)
# Rows of Q and of K of each sequence: blocks of 128 in part and in full, nothing of either.
LENGTHS = [(100, 140), (0, 30), (33, 0), (130, 300), (1, 1), (128, 256)]
# Rows that are no sequence's.
BEHIND = (20, 7)


@pytest.fixture(params=["cpu", ON_GPU])
def device(request):
    if request.param == "cuda":
        request.getfixturevalue("nan_in_new_tensors")
    return request.param


def ends(side, device="cpu", lengths=LENGTHS):
    return torch.tensor([0, *(pair[side] for pair in lengths)], device=device).cumsum(0).to(torch.int32)


def pack(device="cpu", dtype=BF16, heads=(2, 1), head_dims=(64, 32), lengths=LENGTHS):
    """Q, K and V, of which rows of no sequence are NaN, and lists."""
    lists = ends(0, device, lengths), ends(1, device, lengths)
    q, k, v = (
        normal(sum(pair[side] for pair in lengths) + BEHIND[side], n, dim, device=device, dtype=dtype, seed=seed)
        for seed, (side, n, dim) in enumerate(((0, heads[0], head_dims[0]), (1, heads[1], head_dims[0]), (1, heads[1], head_dims[1])))
    )
    for x, rows in zip((q, k, v), (BEHIND[0], BEHIND[1], BEHIND[1]), strict=True):
        x[len(x) - rows :] = math.nan
    return q, k, v, *lists


def tables(device, rows, rotary_dim=32):
    angles = torch.outer(torch.arange(float(rows)), 100.0 ** -torch.linspace(0, 1, rotary_dim // 2))
    return dict(cos=angles.cos().to(device), sin=angles.sin().to(device))


def spans(lists):
    q, k = (x.tolist() for x in lists)
    yield from ((slice(*of_q), slice(*of_k)) for of_q, of_k in zip(zip(q, q[1:]), zip(k, k[1:]), strict=True))


def bits(x):
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def check(device, dtype=BF16, heads=(2, 1), head_dims=(64, 32), lengths=LENGTHS, listed=False, **options):
    q, k, v, *lists = pack(device, dtype, heads, head_dims, lengths)
    hints = max(pair[0] for pair in lengths), max(pair[1] for pair in lengths)
    given = options
    if listed:
        # Some are in no table.
        of_q, of_k = (torch.arange(len(x), device=device) * 7 % 210 - 3 for x in (q, k))
        given = options | dict(q_positions=of_q, k_positions=of_k)
    out, lse = flash_attn_varlen_fp8_func(q, k, v, *lists, *hints, **given, return_attn_probs=True)
    assert (out.shape, out.dtype, lse.shape) == ((len(q), heads[0], head_dims[1]), dtype, (heads[0], len(q)))
    for rows, keys in spans(lists):
        if rows.start == rows.stop:
            continue
        of_alone = options | dict(q_positions=of_q[None, rows], k_positions=of_k[None, keys]) if listed else options
        alone = q[None, rows], k[None, keys], v[None, keys]
        o, of_lse = flash_attn_fp8_func(*alone, **of_alone, return_attn_probs=True)
        assert torch.equal(bits(out[rows]), bits(o[0])), (rows, keys)
        assert torch.equal(bits(lse[:, rows]), bits(of_lse[0])), (rows, keys)
    assert (out[-BEHIND[0] :] == 0).all() and (lse[:, -BEHIND[0] :] == -math.inf).all()
    only = flash_attn_varlen_fp8_func(q, k, v, *lists, *hints, **given)
    assert torch.equal(bits(only), bits(out))


@pytest.mark.parametrize("scores", [dict(), dict(causal=True, softcap=5.0), dict(softmax_scale=0.3, window_size=(37, 11))], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_sequences_have_the_bits_that_they_have_alone(device, dtype, scores):
    check(device, dtype, **scores)
    if device == "cuda":
        long = [(1500, 1500), (3, 700), (0, 0), (900, 4000)]
        for head_dim in (64, 128, 256):
            check(device, dtype, (4, 2), (head_dim, head_dim), long, **scores)


def test_rows_are_rotated_in_their_own_sequences(device):
    check(device, **tables(device, 350), q_positions=40)
    check(device, **tables(device, 350), interleaved=True, hadamard_seed=None, causal=True)
    check(device, **tables(device, 200), listed=True)


def test_positions_that_tables_lack_are_nan(device):
    q, k, v, *lists = pack(device)
    out = flash_attn_varlen_fp8_func(q, k, v, *lists, None, None, **tables(device, 300), q_positions=200)
    last = int(lists[0][-1])
    # Of the fourth and the sixth sequence rows from 100 on are at positions from 300 on.
    expected = torch.zeros(len(q), dtype=torch.bool, device=device)
    for rows, _ in spans(lists):
        expected[rows.start + 100 : rows.stop] = rows.stop - rows.start > 100
    assert torch.equal(out[:last].isnan().all((1, 2)), expected[:last])


def test_lists_and_channels_that_make_no_sense_are_refused():
    q, k, v, *lists = pack()
    with pytest.raises(ValueError, match="q: cu_seqlens falls from 100 to 50 at entry 2"):
        wrong = lists[0].clone()
        wrong[2] = 50
        flash_attn_varlen_fp8_func(q, k, v, wrong, lists[1], None, None)
    with pytest.raises(TypeError, match="v_channels"):
        flash_attn_varlen_fp8_func(q, k, v, *lists, None, None, v_channels=True)
    with pytest.raises(ValueError, match=r"q_positions are \(3,\), expected \(total,\), here \(412,\)"):
        positions = torch.zeros(3, dtype=torch.int32)
        flash_attn_varlen_fp8_func(q, k, v, *lists, None, None, **tables("cpu", 350), q_positions=positions)
    with pytest.raises(ValueError, match="head_dim 24"):
        flash_attn_varlen_fp8_func(*(x[..., :24] for x in (q, k, k)), *lists, None, None)
    leaf = q.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradients"):
        flash_attn_varlen_fp8_func(leaf, k, v, *lists, None, None).sum().backward()


def test_fake_calls_are_refused_and_operations_are_counted():
    q, k, v, *lists = pack()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v, *lists)]
        with pytest.raises(ValueError, match="head_dim 24"):
            flash_attn_varlen_fp8_func(*(x[..., :24] for x in (fake[0], fake[1], fake[1])), *fake[3:], None, None)
    with FlopCounterMode(display=False) as counter:
        flash_attn_varlen_fp8_func(q, k, v, *lists, 130, 300)
    assert counter.get_total_flops() == 2 * len(q) * 300 * 2 * (64 + 32)


@pytest.mark.hopper
def test_a_graph_computes_other_lengths():
    q, k, v, *lists = pack("cuda")
    call = lambda: flash_attn_varlen_fp8_func(q, k, v, *lists, None, None, causal=True)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in (LENGTHS, [(50, 100), (60, 70), (0, 0), (1, 300), (2, 2), (200, 200)]):
        for x, side in zip(lists, (0, 1), strict=True):
            x.copy_(ends(side, "cuda", lengths))
        for x, end in zip((q, k, v), (lists[0][-1], lists[1][-1], lists[1][-1]), strict=True):
            x.copy_(normal(*x.shape, seed=5))
            x[int(end) :] = math.nan
        graph.replay()
        assert torch.equal(bits(out), bits(call()))


@pytest.mark.hopper
def test_lists_that_make_no_sense_do_no_harm():
    q, k, v, *lists = pack("cuda")
    count = len(lists[0])
    for seed in range(50):
        random = torch.Generator().manual_seed(seed)
        wrong = [torch.randint(-(2**31), 2**31 - 1, (count,), generator=random).to("cuda", torch.int32) for _ in lists]
        near = [torch.randint(-5, len(q) + 5, (count,), generator=random).to("cuda", torch.int32) for _ in lists]
        for given in (wrong, near):
            flash_attn_varlen_fp8_func(q, k, v, *given, None, None, **tables("cuda", 50))
    torch.cuda.synchronize()
