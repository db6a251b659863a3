"""Gradients of packed sequences: each sequence against float64 autograd by the error law, on the CPU and on a GPU; and
how torch's own machinery sees them. They start as NaN, so that what is not written shows. Needs torch.
"""

import itertools
import math
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import MASKS, USED, Packed, assert_equal, ends, garbage, normal
from torch.utils.flop_counter import FlopCounterMode

from fa3 import flash_attn_func, flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
# max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, softcap, sm_margin
NUMBERS = (130, 257, 0.5, 9, 0, 50, 20.0, 2)
OPTIONS = dict(softmax_scale=0.5, causal=True, window_size=(9, 3), attention_chunk=50, softcap=20.0, sm_margin=2)


@pytest.mark.parametrize("of_o, of_lse", [(True, False), (False, True)], ids=["o", "lse"])
def test_gradients_of_o_and_of_lse(nan_in_new_tensors, device, of_o, of_lse):
    for mask in MASKS[:3]:
        results = Packed(device).check_gradients(of_o, of_lse, **mask)
        # LSE does not depend on V.
        assert of_o or not results[2].any()


@pytest.mark.parametrize("used", [None, USED[0]], ids=["all", "in part"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_nothing_reaches_a_sequence_from_outside(device, mask, used):
    """Not even NaN, which a product with 0 would not hide."""
    packed = Packed(device, used=used)
    dout, dlse = packed.given()
    expected = packed.gradients(dout, dlse, deterministic=True, **mask)
    of_q, of_k = (x[:, None, None] for x in packed.in_use())
    tensors = packed.q.where(of_q, math.nan), packed.k.where(of_k, math.nan), packed.v.where(of_k, math.nan)
    wild = dout.where(of_q, math.nan), dlse.where(of_q[:, 0, 0], math.nan)
    assert_equal(packed.gradients(*wild, tensors=tensors, deterministic=True, **mask), expected)
    # One sequence of NaN reaches itself.
    [q, k] = list(packed.sequences())[4]
    dout = dout.clone()
    dout[q] = math.nan
    for x, right, rows in zip(packed.gradients(dout, dlse, deterministic=True, **mask), expected, (q, k, k), strict=True):
        others = torch.ones(len(x), dtype=torch.bool, device=device)
        others[rows] = False
        assert torch.equal(x[others], right[others]) and x[rows].isnan().any()


def test_many_sequences(device):
    """More than are sorted at once; most of them shorter than a tile."""
    count = 2500 if device == "cuda" else 300
    lengths = [(5 * (i * 37 % 10), 9 * (i * 53 % 7)) for i in range(count)] + [(300, 500)]
    packed = Packed(device, F32 if device == "cpu" else BF16, lengths=lengths, heads=(2, 1))
    dout, dlse = packed.given()
    results = packed.gradients(dout, dlse, causal=True)
    for q, k in packed.sequences():
        leaves = [x.detach().requires_grad_() for x in (packed.q[None, q], packed.k[None, k], packed.v[None, k])]
        alone = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
        expected = torch.autograd.grad(alone, leaves, (dout[None, q], dlse[None, :, q]))
        for x, right, rows in zip(results, expected, (q, k, k), strict=True):
            torch.testing.assert_close(x[None, rows], right, rtol=0.02, atol=0.02)


def test_strides_are_as_they_are(device):
    lengths = [(50, 50), (3, 3), (0, 0), (201, 201)]
    packed = Packed(device, lengths=lengths, heads=(4, 4), behind=(2, 2))
    dout, dlse = packed.given()
    expected = packed.check_gradients(causal=True)
    for arrange in (
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.stack([x, x, x], 1)[:, 1],
        lambda x: torch.cat([x, x], -1)[..., : x.shape[2]],
    ):
        tensors = [arrange(x) for x in (packed.q, packed.k, packed.v)]
        results = packed.gradients(dout, dlse, tensors=tensors, causal=True, deterministic=True)
        assert_equal(results, expected)
        # With heads outside rows where the tensor lies so.
        assert all(x.stride() == y.stride() if x.stride(0) < x.stride(1) else y.is_contiguous() for x, y in zip(tensors, results))
    for given in (dout.transpose(0, 1).contiguous().transpose(0, 1), torch.stack([dout, dout], -1)[..., 0]):
        of_lse = dlse.t().contiguous().t()
        assert_equal(packed.gradients(given, of_lse, causal=True, deterministic=True), expected)
    one = dout[0, 0].clone().expand(dout.shape)
    assert_equal(packed.gradients(one, dlse, deterministic=True), packed.gradients(one.contiguous(), dlse, deterministic=True))
    if device == "cpu":
        # Memory of a file or a message may begin anywhere.
        lists = [bytearray([0, *x.view(torch.uint8).tolist()]) for x in packed.ends]
        packed.ends = tuple(torch.frombuffer(x, dtype=I32, offset=1) for x in lists)
        assert packed.ends[0].data_ptr() % 4 != 0
        assert_equal(packed.gradients(dout, dlse, causal=True), expected)


def test_gradients_are_written_where_they_are_wanted(device):
    packed = Packed(device, used=USED[0])
    dout, dlse = packed.given()
    lists, tensors = (*packed.ends, *packed.used), (packed.q, packed.k, packed.v)
    o, lse = torch.ops.fa3.varlen_forward(*tensors, *lists, *NUMBERS)
    given = (dout, *tensors, o, lse, dlse, *lists, *NUMBERS)
    expected = torch.ops.fa3.varlen_backward(*given, deterministic=True)
    for place in (
        lambda total, heads, d: ((total, heads, d), lambda x: x),
        lambda total, heads, d: ((heads, total, d), lambda x: x.transpose(0, 1)),
        lambda total, heads, d: ((total + 3, heads + 1, d + 16), lambda x: x[2:-1, 1:, 8:-8]),
    ):
        places = [place(*x.shape) for x in tensors]
        memory = [torch.full(whole, math.nan, dtype=BF16, device=device) for whole, _ in places]
        outputs = [part(x) for x, (_, part) in zip(memory, places, strict=True)]
        torch.ops.fa3.varlen_backward_out(*given, deterministic=True, **dict(zip(("dq", "dk", "dv"), outputs)))
        assert_equal(outputs, expected)
        for whole, part in zip(memory, outputs, strict=True):
            assert whole.isnan().sum() == whole.numel() - part.numel(), "something else was written"
    like = dict(zip(("dq", "dk", "dv"), (torch.empty_like(x) for x in tensors)))
    for change, sentence in [
        (dict(dk=torch.empty_like(packed.q)), "dk is torch.bfloat16 ("),
        (dict(dk=packed.k), "output dk [0x"),
        (dict(dv=packed.v[:1].expand_as(packed.v)), "output dv has stride 0 in seqlen"),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
            torch.ops.fa3.varlen_backward_out(*given, **like | change)


def test_lists_that_make_no_sense_are_named():
    """On the CPU, where they are read."""
    x, lse, good = normal(8, 2, 16), torch.zeros(2, 8), torch.tensor([0, 8], dtype=I32)
    for position, given, sentence in [
        (0, [1, 5], "q: cu_seqlens starts at 1, not at 0"),
        (1, [0, 11], "cu_seqlens ends at 11, past the 8 rows of k"),
        (2, [9], "q: seqused is 9 for sequence 0, outside 0 to 8"),
        (3, [-1], "k and v: seqused is -1 for sequence 0, outside 0 to 8"),
    ]:
        lists = [good, good, None, None]
        lists[position] = torch.tensor(given, dtype=I32)
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            torch.ops.fa3.varlen_backward(x, x, x, x, x, lse, None, *lists, *NUMBERS)


@pytest.mark.hopper
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_lists_that_make_no_sense_touch_nothing_else_on_a_gpu(mask):
    generator = torch.Generator().manual_seed(0)
    window = (-1, 0) if mask.get("causal") else mask.get("window_size", (-1, -1))
    for count in (1, 7, 1500):
        packed = Packed("cuda", lengths=[(300, 400)], behind=(0, 0))
        tensors = packed.q, packed.k, packed.v
        out, lse = packed.call(return_attn_probs=True, **mask)
        memory = [torch.full((len(x) + 20, *x.shape[1:]), 7.0, dtype=BF16, device="cuda") for x in tensors]
        outputs = dict(zip(("dq", "dk", "dv"), (x[10:-10] for x in memory)))
        for used, deterministic in itertools.product((False, True), (False, True)):
            for numbers in garbage(generator):
                lists = [numbers(n).cuda() for n in (count + 1, count + 1, count, count)]
                lists = lists if used else [*lists[:2], None, None]
                options = (None, None, None, *window, 0, 0.0, 0, deterministic)
                torch.ops.fa3.varlen_backward_out(out, *tensors, out, lse, None, *lists, *options, **outputs)
                torch.cuda.synchronize()
                assert all((x[:10] == 7).all() and (x[-10:] == 7).all() for x in memory)
    Packed("cuda").check_gradients(**mask)


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


# What torch sees.


def test_the_options_reach_the_backward_pass(device, calls, are_lists):
    packed = Packed(device, used=USED[0])
    dout, dlse = packed.given()
    for deterministic in (False, True):
        packed.gradients(dout, dlse, (130, 257), deterministic=deterministic, **OPTIONS)
    assert [name for name, _ in calls] == ["forward", "backward"] * 2
    lists = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"), (*packed.ends, *packed.used)))
    for _, given in calls:
        are_lists(given, (130, 257), **lists)
        names = ("softmax_scale", "window", "softcap", "sm_margin")
        assert [given[name] for name in names] == [0.5, (9, 0, 50), 20.0, 2]
    assert [given["deterministic"] for _, given in calls[1::2]] == [False, True]


@pytest.mark.parametrize("warn_only", [False, True])
def test_torchs_mode_asks_for_the_same_bits(calls, warn_only):
    """As it is when the backward pass runs."""
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


@pytest.mark.hopper
def test_compiled_into_graphs():
    """Torch's own graphs, of both passes."""

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


def test_operations_are_counted_without_reading_lengths():
    """Right where sequences are of one length; with a hint, as if all had as many keys."""

    def flops(function, *tensors, **options):
        leaves = [x.requires_grad_() for x in tensors]
        with FlopCounterMode(display=False) as counter:
            function(*leaves, **options).sum().backward()
        return counter.get_total_flops()

    def packed(hints=(None, None)):
        tensors = normal(60, 4, 64), normal(90, 2, 64), normal(90, 2, 32)
        of_q, of_k = ends([20] * 3, "cpu"), ends([30] * 3, "cpu")
        return flops(lambda q, k, v: flash_attn_varlen_func(q, k, v, of_q, of_k, *hints), *tensors)

    dense = flops(flash_attn_func, normal(3, 20, 4, 64), normal(3, 30, 2, 64), normal(3, 30, 2, 32))
    assert dense == 3 * 4 * 20 * 30 * 2 * (64 + 32 + 3 * 64 + 2 * 32)
    assert packed() == packed((20, 30)) == packed((1, 30)) == dense
    assert packed((20, 45)) == dense * 3 // 2


@pytest.mark.parametrize(
    "sentence, change",
    [
        ("q has 4, k 3 and v 3 dimensions, expected 3: (total, heads, head_dim)", dict(q=lambda x: x[None])),
        ("dout is torch.float16 (44, 4, 64), expected torch.bfloat16 (44, 4, 64): (total_q, heads_q, head_dim_v)", dict(dout=lambda x: x.half())),
        ("o is torch.bfloat16 (43, 4, 64), expected torch.bfloat16 (44, 4, 64)", dict(o=lambda x: x[1:])),
        ("lse is torch.float32 (44, 4), expected torch.float32 (4, 44): (heads_q, total_q)", dict(lse=lambda x: x.t())),
        ("dlse is torch.float64 (4, 44), expected torch.float32 (4, 44)", dict(dlse=lambda x: x.double())),
        ("cu_seqlens_q is torch.int64 (3,), expected torch.int32", dict(cu_seqlens_q=lambda x: x.long())),
        ("q has 2 sequences and k 1, expected as many", dict(cu_seqlens_k=lambda x: x[:2])),
        ("seqused_k is torch.int32 (3,), expected torch.int32 (2,): (sequences,)", dict(seqused_k=lambda x: x.repeat(2)[:3])),
        ("heads_q 4 is not a multiple of heads_kv 3", dict(k=lambda x: x.repeat(1, 2, 1)[:, :3], v=lambda x: x.repeat(1, 2, 1)[:, :3])),
        ("k is torch.float16, expected torch.bfloat16 like q", dict(k=lambda x: x.half())),
    ],
)
def test_bad_tensors_of_the_operator(device, sentence, change):
    """Refused in the same sentence whether tensors have memory or not."""
    packed = Packed(device, lengths=[(9, 9), (30, 20)], behind=(5, 0), used=([5, 5], [6, 6]))
    dout, dlse = packed.given()
    names = ("dout", "q", "k", "v", "o", "lse", "dlse", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    lists = (*packed.ends, *packed.used)
    given = dict(zip(names, (dout, packed.q, packed.k, packed.v, dout, dlse, dlse, *lists), strict=True))
    given |= {name: function(given[name]) for name, function in change.items()}
    for move in (lambda x: x, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")):
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
            torch.ops.fa3.varlen_backward(*(move(x) for x in given.values()), *NUMBERS)


def test_other_devices_are_refused():
    packed = Packed("cpu", lengths=[(9, 9)])
    dout, dlse = packed.given()
    lists = (packed.ends[0], packed.ends[1].to("meta"), None, None)
    places = "^cu_seqlens_k is on meta and q on cpu, expected one CUDA device or the CPU$"
    with pytest.raises(ValueError, match=places):
        torch.ops.fa3.varlen_backward(dout, packed.q, packed.k, packed.v, dout, dlse, None, *lists, *NUMBERS)


@pytest.mark.parametrize("num_heads_q", [None, 4])
def test_gradients_of_one_tensor(device, num_heads_q):
    """Q, K and V are views of it, and so are their gradients."""
    lengths = [7, 0, 64, 129]
    shape = (sum(lengths) + 5, 3, 4, 64) if num_heads_q is None else (sum(lengths) + 5, 8, 64)
    qkv, lists = normal(*shape, device=device).requires_grad_(), ends(lengths, device)
    options = dict(softmax_scale=0.5, causal=True, window_size=(70, 5), softcap=20.0, deterministic=True)
    out, lse = flash_attn_varlen_qkvpacked_func(qkv, lists, 129, return_attn_probs=True, num_heads_q=num_heads_q, **options)
    parts = qkv.detach().unbind(1) if num_heads_q is None else qkv.detach().split([4, 2, 2], 1)
    leaves = [x.requires_grad_() for x in parts]
    expected = flash_attn_varlen_func(*leaves, lists, lists, 129, 129, return_attn_probs=True, **options)
    assert_equal((out, lse), expected)
    given = normal(*out.shape, device=device, seed=3), normal(*lse.shape, device=device, dtype=F32, seed=4)
    [result] = torch.autograd.grad((out, lse), qkv, given)
    gradients = torch.autograd.grad(expected, leaves, given)
    assert_equal(result.unbind(1) if num_heads_q is None else result.split([4, 2, 2], 1), gradients)


def test_one_tensor_is_not_copied(device, calls, are_lists):
    qkv, lists = normal(8, 3, 2, 64, device=device), ends([3, 5], device)
    # As flash-attn 2 is called, dropout_p in its place.
    flash_attn_varlen_qkvpacked_func(qkv, lists, 5, 0.0, 0.5, True, (4, 3), 20.0, None, True, False)
    [(_, given)] = calls
    assert [given[name][1] for name in "qkv"] == [qkv[:, i].data_ptr() for i in range(3)]
    are_lists(given, (5, 5), cu_seqlens_q=lists, cu_seqlens_k=lists)
    assert (given["softmax_scale"], given["window"], given["softcap"]) == (0.5, (4, 0, 0), 20.0)


@pytest.mark.parametrize(
    "error, sentence, change",
    [
        (NotImplementedError, "dropout_p is not supported yet", dict(dropout_p=0.1)),
        (NotImplementedError, "alibi_slopes is not supported yet", dict(alibi_slopes=torch.ones(2))),
        (ValueError, "attention_chunk -1 is outside 0 to 2^32 - 1", dict(attention_chunk=-1)),
        (TypeError, "qkv is list, expected torch.Tensor", dict(qkv=[1])),
        (TypeError, "cu_seqlens is NoneType, expected torch.Tensor", dict(cu_seqlens=None)),
        (ValueError, "qkv is (1, 8, 3, 2, 64), expected (total, 3, heads, head_dim)", dict(qkv=normal(1, 8, 3, 2, 64))),
        (ValueError, "qkv is (8, 2, 2, 64), expected (total, 3, heads, head_dim)", dict(qkv=normal(8, 2, 2, 64))),
        (
            ValueError,
            "qkv is (8, 7, 64), expected (total, 4 + 2 * heads_kv, head_dim) with num_heads_q 4",
            dict(qkv=normal(8, 7, 64), num_heads_q=4),
        ),
    ],
)
def test_one_tensor_of_the_wrong_kind_is_refused(error, sentence, change):
    given = dict(qkv=normal(8, 3, 2, 64), cu_seqlens=ends([3, 5], "cpu"), max_seqlen=5) | change
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        flash_attn_varlen_qkvpacked_func(**given)


# Training.


class Block(torch.nn.Module):
    """A small language model of one layer, with attention over documents."""

    def __init__(self, vocabulary=17, width=32, heads=2):
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.qkv, self.project = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.head, self.heads = torch.nn.Linear(width, vocabulary), heads

    def forward(self, tokens, attend):
        x = self.embed(tokens)
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        x = x + self.project(attend(*qkv.unbind(-3)).flatten(-2))
        return self.head(x)


def test_training_on_packed_documents_is_training_on_each(device):
    """Losses of twenty steps on documents in one row are those of the same documents one at a time."""
    lengths = [31, 5, 64, 1, 17]
    tokens = torch.randint(17, (sum(lengths),), generator=torch.Generator().manual_seed(0)).to(device)
    lists = ends(lengths, device)
    # The last token of a document has no next one.
    target = torch.cat([torch.cat([x[1:], x.new_tensor([-100])]) for x in tokens.split(lengths)])
    dtype = F32 if device == "cpu" else BF16

    def packed(model):
        def attend(*qkv):
            q, k, v = (x.to(dtype) for x in qkv)
            return flash_attn_varlen_func(q, k, v, lists, lists, 64, 64, causal=True).to(qkv[0].dtype)

        return model(tokens, attend)

    def alone(model):
        def attend(*qkv):
            return flash_attn_func(*(x.to(dtype) for x in qkv), causal=True).to(qkv[0].dtype)

        return torch.cat([model(document[None], attend)[0] for document in tokens.split(lengths)])

    def train(forward):
        torch.manual_seed(0)
        model = Block().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(20):
            loss = torch.nn.functional.cross_entropy(forward(model), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return torch.tensor(losses)

    losses, expected = train(packed), train(alone)
    assert expected[-1] < 0.8 * expected[0]
    torch.testing.assert_close(losses, expected, rtol=1e-5 if device == "cpu" else 0.01, atol=1e-5)
