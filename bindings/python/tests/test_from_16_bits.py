"""8-bit attention of 16-bit tensors. `fa3.flash_attn_fp8_func` has the bits of `quantize` and then `flash_attn_func`,
and `fa3.flash_attn_varlen_fp8_func` has the bits that each sequence has alone. Needs torch.
"""

import itertools
import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import Packed, normal, on
from packing import ends as ends_of

from fa3 import flash_attn_fp8_func, flash_attn_func, flash_attn_varlen_fp8_func, quantize, quantize_channels

pytestmark = pytest.mark.usefixtures("nan_in_new_tensors")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SCORES = [dict(), dict(causal=True, softcap=5.0), dict(softmax_scale=0.3, window_size=(37, 11))]
# The rows of Q and the keys of each sequence: whole blocks of 128, parts of blocks, and none.
LENGTHS = [(100, 140), (0, 30), (33, 0), (130, 300), (1, 1), (128, 256)]


def inputs(device, dtype=BF16, seqlens=(140, 300), heads=(4, 2), head_dims=(64, 32)):
    (rows, keys), (heads_q, heads_kv), (head_dim, head_dim_v) = seqlens, heads, head_dims
    q = normal(2, rows, heads_q, head_dim, device=device, dtype=dtype)
    k = normal(2, keys, heads_kv, head_dim, device=device, dtype=dtype, seed=1)
    return q, k, 2 + normal(2, keys, heads_kv, head_dim_v, device=device, dtype=dtype, seed=2)


def tables(device, rows=320, rotary_dim=32):
    angles = torch.outer(torch.arange(float(rows)), 100.0 ** -torch.linspace(0, 1, rotary_dim // 2))
    return dict(cos=angles.cos().to(device), sin=angles.sin().to(device))


def listed(device, seqlen, rows=320, dtype=torch.int64, first=-3):
    """Positions, some of which are outside tables with `rows` rows."""
    return (first + 7 * torch.arange(2 * seqlen).view(2, seqlen) % (rows + 5)).to(device, dtype)


def parts(q, k, v, *, q_positions=0, k_positions=0, hadamard_seed=0, v_channels=False, rotation={}, **options):
    """Computes O and LSE by `quantize` and then `flash_attn_func`."""
    rotation_of_q = rotation | (dict(positions=q_positions) if rotation else {})
    rotation_of_k = rotation | (dict(positions=k_positions) if rotation else {})
    q_codes, q_descale = quantize(q, **rotation_of_q, hadamard_seed=hadamard_seed)
    k_codes, k_descale = quantize(k, **rotation_of_k, hadamard_seed=hadamard_seed)
    v_mean = None
    if v_channels:
        v_codes, v_descale, v_mean = quantize_channels(v, transposed=True)
    else:
        v_codes, v_descale = quantize(v, transposed=True)
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, v_mean=v_mean)
    kinds = dict(v_transposed=True, out_dtype=q.dtype, return_attn_probs=True)
    return flash_attn_func(q_codes, k_codes, v_codes, **descales, **kinds, **options)


def assert_same_bits(results, expected):
    """Compares bits, so that a NaN equals itself."""
    for result, right in zip(results, expected, strict=True):
        kind = torch.int16 if right.element_size() == 2 else torch.int32
        assert (result.dtype, result.shape) == (right.dtype, right.shape)
        assert torch.equal(result.contiguous().view(kind), right.contiguous().view(kind))


@pytest.mark.parametrize("v_channels", [False, True], ids=["blocks", "channels"])
@pytest.mark.parametrize("scores", SCORES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_it_is_what_its_parts_are(device, dtype, scores, v_channels):
    cases = [((140, 300), (4, 2), (64, 32)), ((33, 129), (2, 2), (128, 128)), ((5, 0), (2, 1), (32, 32)), ((0, 5), (2, 1), (32, 32))]
    if device == "cuda":
        cases += [((1500, 1500), (6, 2), (128, 64)), ((700, 900), (2, 1), (256, 256))]
    for seqlens, heads, head_dims in cases:
        q, k, v = inputs(device, dtype, seqlens, heads, head_dims)
        for seed in (None, 2**64 - 1):
            given = dict(hadamard_seed=seed, v_channels=v_channels)
            results = flash_attn_fp8_func(q, k, v, return_attn_probs=True, **given, **scores)
            assert all(x.is_contiguous() for x in results)
            assert_same_bits(results, parts(q, k, v, **given, **scores))
            assert_same_bits([flash_attn_fp8_func(q, k, v, **given, **scores)], results[:1])


def positions(device, q, k):
    """Positions of Q and of K: first positions, and lists of int64 and int32, which are contiguous or not."""
    of_q, of_k = listed(device, q.shape[1]), listed(device, k.shape[1], dtype=torch.int32, first=0)
    strided = torch.stack([of_q, of_q], -1)[..., 0]
    yield from itertools.product((7, of_q), (3, of_k))
    yield strided, of_k
    yield of_q + 2**40, 0
    yield of_q.int(), of_k[:1].expand(2, -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_are_rotated_by_their_positions(device, dtype, interleaved):
    q, k, v = inputs(device)
    rotation = {name: x.to(dtype) for name, x in tables(device).items()} | dict(interleaved=interleaved)
    for of_q, of_k in positions(device, q, k):
        given = dict(q_positions=of_q, k_positions=of_k, causal=True)
        results = flash_attn_fp8_func(q, k, v, return_attn_probs=True, **given, **rotation)
        assert_same_bits(results, parts(q, k, v, rotation=rotation, **given))


def test_rows_without_a_position_are_nan(device):
    q, k, v = inputs(device, seqlens=(20, 30))
    of_q = torch.arange(20).repeat(2, 1)
    of_q[0, 3], of_q[1, 7] = -1, 320
    is_nowhere = ((of_q < 0) | (of_q >= 320)).to(device)
    assert is_nowhere.sum() == 2
    out = flash_attn_fp8_func(q, k, v, **tables(device), q_positions=of_q.to(device))
    assert torch.equal(out.isnan(), is_nowhere[:, :, None, None].expand_as(out))


def test_the_cpu_takes_any_strides():
    """The CPU also takes strides that a GPU does not take, and addresses that are not aligned."""
    q, k, v = inputs("cpu")
    expected = flash_attn_fp8_func(q, k, v, causal=True, return_attn_probs=True)
    apart = [torch.stack([x, x], -1)[..., 1] for x in (q, k, v)]
    raw = [bytearray([0, *x.flatten().view(torch.uint8).tolist()]) for x in (q, k, v)]
    shifted = [torch.frombuffer(y, dtype=BF16, offset=1).view_as(x) for x, y in zip((q, k, v), raw)]
    for tensors in (apart, shifted):
        assert_same_bits(flash_attn_fp8_func(*tensors, causal=True, return_attn_probs=True), expected)


def test_a_call_enters_the_extension_module_once(device, calls):
    q, k, v = inputs(device)
    for v_channels in (False, True):
        flash_attn_fp8_func(q, k, v, **tables(device), q_positions=listed(device, 140), v_channels=v_channels)
    assert [name for name, _ in calls] == ["fp8_forward"] * 2
    # LSE is not even allocated if it is not wanted.
    assert all("lse" not in given for _, given in calls)


@pytest.mark.filterwarnings("ignore:.*performance drop")
def test_vmap_is_a_loop():
    q, k, v = (normal(3, 2, 20, heads, 32, seed=heads) for heads in (4, 2, 1))
    v = v.expand_as(k)
    expected = [flash_attn_fp8_func(*tensors) for tensors in zip(q, k, v)]
    assert torch.equal(torch.func.vmap(flash_attn_fp8_func)(q, k, v), torch.stack(expected))


# Tests of packed sequences.


class Sequences(Packed):
    """Packed sequences. Rows that belong to no sequence are NaN."""

    def __init__(self, device, dtype=BF16, heads=(2, 1), head_dims=(64, 32), lengths=LENGTHS):
        super().__init__(device, dtype, lengths, heads, head_dims, (20, 7))
        for x, end in zip((self.q, self.k, self.v), (self.ends[0], self.ends[1], self.ends[1])):
            x[int(end[-1]) :] = math.nan

    def call(self, hints=(None, None), ends=None, **options):
        return flash_attn_varlen_fp8_func(self.q, self.k, self.v, *(ends or self.ends), *hints, **options)

    def check(self, listed=False, **options):
        hints = [max(pair[side] for pair in self.lengths) for side in (0, 1)]
        # Some positions are outside the tables.
        of_q, of_k = (torch.arange(len(x), device=x.device) * 7 % 210 - 3 for x in (self.q, self.k))
        given = options | (dict(q_positions=of_q, k_positions=of_k) if listed else {})
        out, lse = self.call(hints, **given, return_attn_probs=True)
        (total, heads, _), head_dim_v = self.q.shape, self.v.shape[2]
        assert (out.shape, out.dtype, lse.shape) == ((total, heads, head_dim_v), self.q.dtype, (heads, total))
        for rows, keys in self.sequences():
            if rows.start < rows.stop:
                of_alone = options | (dict(q_positions=of_q[None, rows], k_positions=of_k[None, keys]) if listed else {})
                alone = self.q[None, rows], self.k[None, keys], self.v[None, keys]
                expected = flash_attn_fp8_func(*alone, **of_alone, return_attn_probs=True)
                assert_same_bits((out[None, rows], lse[None, :, rows]), expected)
        self.judge_behind(out, lse)
        assert_same_bits([self.call(hints, **given)], [out])


LONG = [(1500, 1500), (3, 700), (0, 0), (900, 4000)]


@pytest.mark.parametrize("scores", SCORES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    "device, given",
    on("cpu", [{}]) + on("cuda", [{}, *(dict(heads=(4, 2), head_dims=(d, d), lengths=LONG) for d in (64, 128, 256))]),
    ids=str,
)
def test_sequences_have_the_bits_that_they_have_alone(device, given, dtype, scores):
    Sequences(device, dtype, **given).check(**scores)


def test_rows_are_rotated_in_their_own_sequences(device):
    sequences = Sequences(device)
    sequences.check(**tables(device, 350), q_positions=40)
    sequences.check(**tables(device, 350), interleaved=True, hadamard_seed=None, causal=True)
    sequences.check(**tables(device, 200), listed=True)


def test_positions_that_tables_lack_are_nan(device):
    sequences = Sequences(device)
    out = sequences.call(**tables(device, 300), q_positions=200)
    # Rows from 100 on, which only two sequences have, are at positions outside the tables of 300 rows.
    expected = torch.zeros(len(out), dtype=torch.bool, device=device)
    for rows, _ in sequences.sequences():
        expected[rows.start + 100 : rows.stop] = rows.stop - rows.start > 100
    assert torch.equal(out.isnan().all((1, 2)), expected)


def test_lists_that_make_no_sense_are_named():
    """The CPU reads the lists, and refuses invalid ones."""
    sequences = Sequences("cpu")
    wrong = sequences.ends[0].clone()
    wrong[2] = 50
    with pytest.raises(ValueError, match="^q: cu_seqlens falls from 100 to 50 at entry 2$"):
        sequences.call(ends=(wrong, sequences.ends[1]))


@pytest.mark.hopper
def test_a_graph_computes_other_lengths():
    sequences = Sequences("cuda")
    sequences.call(causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sequences.call(causal=True)
    (ends_q, ends_k), tensors = sequences.ends, (sequences.q, sequences.k, sequences.v)
    for lengths in (LENGTHS, [(50, 100), (60, 70), (0, 0), (1, 300), (2, 2), (200, 200)]):
        for x, side in zip(sequences.ends, (0, 1), strict=True):
            x.copy_(ends_of([pair[side] for pair in lengths], "cuda"))
        for x, end in zip(tensors, (ends_q[-1], ends_k[-1], ends_k[-1]), strict=True):
            x.copy_(normal(*x.shape, seed=5))
            x[int(end) :] = math.nan
        graph.replay()
        assert_same_bits([out], [sequences.call(causal=True)])


@pytest.mark.hopper
def test_lists_that_make_no_sense_do_no_harm():
    sequences = Sequences("cuda")
    count = len(sequences.ends[0])
    for seed in range(50):
        random = torch.Generator().manual_seed(seed)
        for least, most in ((-(2**31), 2**31 - 1), (-5, len(sequences.q) + 5)):
            given = [torch.randint(least, most, (count,), generator=random).to("cuda", torch.int32) for _ in "qk"]
            sequences.call(ends=given, **tables("cuda", 50))
    torch.cuda.synchronize()
