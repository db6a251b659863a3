"""Bad calls are refused in the same sentence whether tensors have memory, are fake or meta, or are traced for an
export: what can be traced can be run. Needs torch but no GPU.
"""

import math
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode

from fa3 import flash_attn_fp8_func, flash_attn_func, flash_attn_varlen_func, quantize, quantize_channels

BF16, F32, F64, E4M3 = torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn


def shape(*extents, dtype=BF16, strides=None):
    """A tensor to be, on whatever device."""
    return extents, strides, dtype


X = shape(2, 16, 4, 64)
ONES = shape(2, 4, dtype=F32)

# Of every device: a sentence, and what is other than in a good call.
ATTENTION = [
    ("q has 3, k 4 and v 4 dimensions, expected 4: (batch, seqlen, heads, head_dim)", dict(q=shape(16, 4, 64))),
    ("heads_q 8 is not a multiple of heads_kv 3", dict(q=shape(2, 16, 8, 64), k=shape(2, 16, 3, 64), v=shape(2, 16, 3, 64))),
    ("k has head_dim 32, expected 64", dict(k=shape(2, 16, 4, 32))),
    ("k has batch 3, expected 2", dict(k=shape(3, 16, 4, 64), v=shape(3, 16, 4, 64))),
    ("v has seqlen 15, expected 16", dict(v=shape(2, 15, 4, 64))),
    ("v has heads 2, expected 4", dict(v=shape(2, 16, 2, 64))),
    ("k is torch.float16, expected torch.bfloat16 like q", dict(k=shape(2, 16, 4, 64, dtype=torch.float16))),
    ("a tensor is torch.float64, expected", dict(q=shape(2, 16, 4, 64, dtype=F64))),
    ("q has head_dim 584, more than 576", dict(q=shape(2, 16, 4, 584), k=shape(2, 16, 4, 584))),
    ("v has head_dim 520, more than 512", dict(v=shape(2, 16, 4, 520))),
    ("softmax scale NaN is outside", dict(softmax_scale=math.nan)),
    ("softmax scale 0 is outside", dict(softmax_scale=0.0)),
    ("soft cap -1 is outside", dict(softcap=-1.0)),
    ("out_dtype is torch.float64, expected torch.float16 or torch.bfloat16", dict(out_dtype=F64)),
    ("o cannot be torch.float16 when q is torch.bfloat16", dict(out_dtype=torch.float16)),
    ("transposed v is (2, 16, 4, 64), expected a contiguous (2, 4, 4, 128)", dict(v_transposed=True)),
]
CODES = {name: shape(2, 16, 4, 64, dtype=E4M3) for name in "qkv"}
ATTENTION += [
    (sentence, CODES | change)
    for sentence, change in [
        ("q_descale is torch.float32 (2, 3) on ", dict(q_descale=shape(2, 3, dtype=F32))),
        ("k_descale is torch.bfloat16 (2, 4) on ", dict(k_descale=shape(2, 4))),
        ("some descales are of blocks", dict(q_descale=shape(2, 4, 1, dtype=F32), k_descale=ONES, v_descale=ONES)),
        ("there is v_mean without v_descale", dict(v_mean=shape(2, 4, 64, dtype=F32))),
        ("v_mean is torch.float32 (2, 4) on ", dict(v_mean=ONES, v_descale=shape(2, 4, 64, dtype=F32))),
        ("v is torch.bfloat16, expected torch.float8_e4m3fn like q", dict(v=X)),
    ]
]
# By the rules of a GPU, and by those of the CPU and of meta tensors: None is no refusal.
PLACES = [
    ("the forward kernels take torch.float16, torch.bfloat16 and torch.float8_e4m3fn, not torch.float32", None, {name: shape(2, 16, 4, 64, dtype=F32) for name in "qkv"}),
    ("have no tile for head_dim 272", None, {name: shape(2, 16, 4, 272, dtype=E4M3) for name in "qkv"}),
    ("q has head_dim 60, not a multiple of 8 as torch.bfloat16 needs", None, {name: shape(2, 16, 4, 60) for name in "qkv"}),
    ("v has head_dim 60, not a multiple of 8 as torch.bfloat16 needs", None, dict(v=shape(2, 16, 4, 60))),
    ("v has stride 257 in seqlen, not a multiple of 8 elements", None, dict(v=shape(2, 16, 4, 64, strides=(8192, 257, 64, 1)))),
    ("sm_margin -1 is outside 0 to 131: the device has 132 sms", "sm_margin -1 is negative", dict(sm_margin=-1)),
    ("sm_margin 132 is outside 0 to 131: the device has 132 sms", None, dict(sm_margin=132)),
]
CASES = [(sentence, sentence, change) for sentence, change in ATTENTION] + PLACES

QUANTIZATION = [
    ("x is torch.float32, expected torch.float16 or torch.bfloat16", dict(x=shape(2, 16, 4, 64, dtype=F32))),
    ("x has 3 dimensions, expected 4", dict(x=shape(16, 4, 64))),
    ("has head_dim 72, not a multiple of 16", dict(x=shape(2, 16, 4, 72))),
    ("x has head_dim 272", dict(x=shape(2, 16, 4, 272))),
    ("block_rows is 32, expected 64 or 128", dict(block_rows=32)),
    ("a scale for each 3 heads, of which the tensor has 4", dict(scales_of="heads", heads_per_scale=3)),
    ("the scale 0 is outside 2^-64 to 2^64", dict(scale=0.0)),
    ("the scale NaN is outside 2^-64 to 2^64", dict(scale=math.nan)),
    ("there is one of cos and sin", dict(cos=shape(16, 32, dtype=F32))),
    ("rotary_dim 80 is not a positive multiple of 16", dict(cos=shape(16, 40, dtype=F32), sin=shape(16, 40, dtype=F32))),
    ("the last row is at position 16, the tables", dict(cos=shape(16, 32, dtype=F32), sin=shape(16, 32, dtype=F32), positions=1)),
]
TABLES = dict(cos=shape(16, 32, dtype=F32), sin=shape(16, 32, dtype=F32))
LISTED = shape(2, 16, dtype=torch.int32)
FROM_16_BITS = [
    ("k is torch.float32, expected torch.float16 or torch.bfloat16", dict(k=shape(2, 16, 4, 64, dtype=F32))),
    ("q is torch.float8_e4m3fn, expected torch.float16", {name: shape(2, 16, 4, 64, dtype=E4M3) for name in "qkv"}),
    ("k is torch.float16, expected torch.bfloat16 like q", dict(k=shape(2, 16, 4, 64, dtype=torch.float16))),
    ("q has 3, k 4 and v 4 dimensions, expected 4", dict(q=shape(16, 4, 64))),
    ("k has batch 3, expected 2", dict(k=shape(3, 16, 4, 64), v=shape(3, 16, 4, 64))),
    ("v has seqlen 15, expected 16", dict(v=shape(2, 15, 4, 64))),
    ("heads_q 4 is not a multiple of heads_kv 3", dict(k=shape(2, 16, 3, 64), v=shape(2, 16, 3, 64))),
    ("k has head_dim 32, expected 64", dict(k=shape(2, 16, 4, 32))),
    ("q: x has head_dim 72, not a multiple of 16", dict(q=shape(2, 16, 4, 72), k=shape(2, 16, 4, 72))),
    ("v: x has head_dim 72, not a multiple of 16", dict(v=shape(2, 16, 4, 72))),
    ("q: x has head_dim 272", dict(q=shape(2, 16, 4, 272), k=shape(2, 16, 4, 272))),
    ("softmax scale NaN is outside", dict(softmax_scale=math.nan)),
    ("soft cap -1 is outside", dict(softcap=-1.0)),
    ("there is one of cos and sin", dict(cos=shape(16, 32, dtype=F32))),
    ("interleaved and positions are of a rotation", dict(interleaved=True)),
    ("interleaved and positions are of a rotation", dict(k_positions=1)),
    ("interleaved and positions are of a rotation", dict(q_positions=LISTED)),
    ("cos is torch.float64, expected torch.float32", TABLES | dict(cos=shape(16, 32, dtype=F64))),
    ("cos is (16, 32) and sin (15, 32), expected both", TABLES | dict(sin=shape(15, 32, dtype=F32))),
    ("q: rotary_dim 80 is not a positive multiple of 16", {name: shape(16, 40, dtype=F32) for name in ("cos", "sin")}),
    ("q: the last row is at position 16, the tables", TABLES | dict(q_positions=1)),
    ("k: the last row is at position 16, the tables", TABLES | dict(q_positions=LISTED, k_positions=1)),
    ("q_positions are torch.float32, expected torch.int32", TABLES | dict(q_positions=shape(2, 16, dtype=F32))),
    ("k_positions are (2, 15), expected (batch, seqlen), here (2, 16)", TABLES | dict(k_positions=shape(2, 15, dtype=torch.int32))),
]
# By the rules of a GPU alone.
STRIDES_FROM_16_BITS = [
    ("v: x has stride 257 in seqlen, not a multiple of 8 elements", dict(v=shape(2, 16, 4, 64, strides=(8192, 257, 64, 1)))),
    (None, TABLES | dict(q_positions=LISTED, k_positions=LISTED, v_channels=True)),
]


ROWS, ENDS, COUNT = shape(16, 4, 64), shape(4, dtype=torch.int32), shape(3, dtype=torch.int32)
PACKED = [
    ("q has 4, k 3 and v 3 dimensions, expected 3: (total, heads, head_dim)", dict(q=X)),
    ("k is torch.float16, expected torch.bfloat16 like q", dict(k=shape(16, 4, 64, dtype=torch.float16))),
    ("a tensor is torch.float64, expected", dict(q=shape(16, 4, 64, dtype=F64))),
    ("v has seqlen 15, expected 16", dict(v=shape(15, 4, 64))),
    ("heads_q 4 is not a multiple of heads_kv 3", dict(k=shape(16, 3, 64), v=shape(16, 3, 64))),
    ("cu_seqlens_q is torch.int64 (4,), expected torch.int32 (sequences + 1,)", dict(cu_seqlens_q=shape(4, dtype=torch.int64))),
    ("cu_seqlens_k is torch.int32 (1, 4), expected torch.int32", dict(cu_seqlens_k=shape(1, 4, dtype=torch.int32))),
    ("cu_seqlens_q is torch.int32 (0,), expected torch.int32", dict(cu_seqlens_q=shape(0, dtype=torch.int32))),
    ("q has 3 sequences and k 2, expected as many", dict(cu_seqlens_k=COUNT)),
    ("seqused_q is torch.int32 (4,), expected torch.int32 (3,): (sequences,)", dict(seqused_q=ENDS)),
    ("seqused_k is torch.float32 (3,), expected torch.int32", dict(seqused_k=shape(3, dtype=F32))),
    ("softmax scale NaN is outside", dict(softmax_scale=math.nan)),
    ("soft cap -1 is outside", dict(softcap=-1.0)),
    ("out is torch.bfloat16 (15, 4, 64) on ", dict(out=shape(15, 4, 64))),
    ("output o has stride 0 in seqlen", dict(out=shape(16, 4, 64, strides=(0, 64, 1)))),
    ("o cannot be torch.float16 when q is torch.bfloat16", dict(out_dtype=torch.float16)),
]
PACKED += [
    (sentence, {name: shape(16, 4, 64, dtype=E4M3) for name in "qkv"} | change)
    for sentence, change in [
        ("q_descale is torch.float32 (2, 4) on ", dict(q_descale=ONES)),
        ("v_descale is torch.float32 (3, 4, 1) on ", dict(v_descale=shape(3, 4, 1, dtype=F32))),
        ("out_dtype is torch.float64, expected torch.float16 or torch.bfloat16", dict(out_dtype=F64)),
    ]
]
# By the rules of a GPU, which only the CPU has other ones than.
PLACES_OF_PACKED = [
    ("the forward kernels take torch.float16, torch.bfloat16 and torch.float8_e4m3fn, not torch.float32", {name: shape(16, 4, 64, dtype=F32) for name in "qkv"}),
    ("have no tile for head_dim 272", {name: shape(16, 4, 272, dtype=E4M3) for name in "qkv"}),
    ("q has head_dim 60, not a multiple of 8 as torch.bfloat16 needs", {name: shape(16, 4, 60) for name in "qkv"}),
    ("v has stride 257 in seqlen, not a multiple of 8 elements", dict(v=shape(16, 4, 64, strides=(257, 64, 1)))),
    ("o has stride 257 in seqlen, not a multiple of 8 elements", dict(out=shape(16, 4, 64, strides=(257, 64, 1)))),
    (None, dict(seqused_q=COUNT, seqused_k=COUNT, causal=True, max_seqlen_q=10**6, out=shape(16, 4, 64, strides=(64, 1024, 1)))),
]


def made(change, device):
    """A call's arguments with tensors on a device."""

    def tensor(extents, strides, dtype):
        if strides is None:
            return torch.zeros(extents, dtype=dtype, device=device)
        return torch.empty_strided(extents, strides, dtype=dtype, device=device)

    return {name: tensor(*x) if isinstance(x, tuple) and len(x) == 3 else x for name, x in change.items()}


def of_attention(change):
    return {"q": X, "k": X, "v": X} | change


class Module(torch.nn.Module):
    """A function, for an export. Tensors come in a dictionary."""

    def __init__(self, function, options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, tensors):
        return self.function(**tensors, **self.options)


def export(function, arguments, dynamic=False):
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    options = {name: x for name, x in arguments.items() if name not in tensors}
    shapes = {name: {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} for name in tensors} if dynamic else None
    return torch.export.export(Module(function, options), (tensors,), dynamic_shapes=shapes and (shapes,))


def sentence_of(function, arguments):
    """The sentence that a call is refused with, or None."""
    try:
        function(**arguments)
    except (ValueError, TypeError) as error:
        return str(error)


def check(function, change, of_gpu, of_cpu):
    """Compares what a call is refused with everywhere, but for the names of devices."""

    def agrees(given, expected):
        assert (given is None) == (expected is None) and (expected or "") in (given or ""), given
        return given and re.sub(" on [a-z0-9:]+", "", given)

    with torch.no_grad():
        sentence = agrees(sentence_of(function, made(change, "cpu")), of_cpu)
        assert agrees(sentence_of(function, made(change, "meta")), of_cpu) == sentence
        with FakeTensorMode():
            assert agrees(sentence_of(function, made(change, "cpu")), of_cpu) == sentence
            same = agrees(sentence_of(function, made(change, "cuda")), of_gpu) == sentence
            assert same == (of_gpu == of_cpu)
        if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
            agrees(sentence_of(function, made(change, "cuda")), of_gpu)


@pytest.mark.parametrize("of_gpu, of_cpu, change", CASES, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_attention_is_refused_everywhere(of_gpu, of_cpu, change):
    check(flash_attn_func, of_attention(change), of_gpu, of_cpu)


@pytest.mark.parametrize("sentence, change", QUANTIZATION, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_quantization_is_refused_everywhere(sentence, change):
    change = {"x": X} | change
    check(quantize, change, sentence, sentence)
    if change.keys() == {"x"}:
        check(quantize_channels, change, sentence, sentence)


@pytest.mark.parametrize("sentence, change", FROM_16_BITS, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_attention_in_8_bits_is_refused_everywhere(sentence, change):
    check(flash_attn_fp8_func, of_attention(change), sentence, sentence)


@pytest.mark.parametrize("of_gpu, change", STRIDES_FROM_16_BITS, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_attention_in_8_bits_takes_any_strides_on_the_cpu(of_gpu, change):
    check(flash_attn_fp8_func, of_attention(change), of_gpu, None)


def of_packed(change):
    packed = dict(q=ROWS, k=ROWS, v=ROWS, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, max_seqlen_q=None, max_seqlen_k=9)
    return packed | change


@pytest.mark.parametrize("sentence, change", PACKED, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_packed_sequences_are_refused_everywhere(sentence, change):
    check(flash_attn_varlen_func, of_packed(change), sentence, sentence)


@pytest.mark.parametrize("of_gpu, change", PLACES_OF_PACKED, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_the_cpu_takes_more_packed_tensors(of_gpu, change):
    check(flash_attn_varlen_func, of_packed(change), of_gpu, None)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("of_gpu, of_cpu, change", CASES[1:12] + PLACES, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_what_cannot_run_cannot_be_exported(of_gpu, of_cpu, change, dynamic):
    arguments = made(of_attention(change), "cpu")
    if of_cpu is None:
        export(flash_attn_func, arguments, dynamic)
    else:
        with pytest.raises(Exception, match=re.escape(of_cpu)):
            export(flash_attn_func, arguments, dynamic)


def test_what_is_exported_takes_other_lengths():
    """Checks leave no guards behind: batch and lengths stay free."""
    program = export(flash_attn_func, made({"q": X, "k": X, "v": X, "causal": True}, "cpu"), dynamic=True)
    q, k, v = torch.randn(3, 20, 4, 64).to(BF16), *(torch.randn(3, 30, 4, 64).to(BF16) for _ in "kv")
    out = program.module()({"q": q, "k": k, "v": v})
    assert torch.equal(out, flash_attn_func(q, k, v, causal=True))


def test_bad_gradients_are_refused_everywhere():
    """Bad gradients are those of the operator: autograd calls it with none of them."""
    x, lse = X, shape(2, 4, 16, dtype=F32)
    names = ("dout", "q", "k", "v", "o", "lse", "dlse")
    good = dict(zip(names, (x, x, x, x, x, lse, lse)))
    options = (None, -1, -1, 0, 0.0, 0)

    def backward(**tensors):
        return torch.ops.fa3.backward(*(tensors[name] for name in names), *options)

    for sentence, change in [
        ("dout is torch.bfloat16 (2, 15, 4, 64), expected torch.bfloat16 (2, 16, 4, 64)", dict(dout=shape(2, 15, 4, 64))),
        ("lse is torch.float32 (2, 16, 4), expected torch.float32 (2, 4, 16)", dict(lse=shape(2, 16, 4, dtype=F32))),
        ("heads_q 4 is not a multiple of heads_kv 3", dict(k=shape(2, 16, 3, 64), v=shape(2, 16, 3, 64))),
        ("q has 3, k 4 and v 4 dimensions", dict(q=shape(16, 4, 64))),
    ]:
        check(backward, good | change, sentence, sentence)
    check(backward, good, None, None)


def test_bad_gradients_of_packed_sequences_are_refused_everywhere():
    names = ("dout", "q", "k", "v", "o", "lse", "dlse", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    lse = shape(4, 16, dtype=F32)
    good = dict(zip(names, (ROWS, ROWS, ROWS, ROWS, ROWS, lse, lse, ENDS, ENDS, COUNT, COUNT), strict=True))
    options = (9, None, None, -1, -1, 0, 0.0, 0)

    def backward(**tensors):
        return torch.ops.fa3.varlen_backward(*(tensors[name] for name in names), *options)

    for sentence, change in [
        ("q has 4, k 3 and v 3 dimensions, expected 3: (total, heads, head_dim)", dict(q=X)),
        ("dout is torch.bfloat16 (15, 4, 64), expected torch.bfloat16 (16, 4, 64)", dict(dout=shape(15, 4, 64))),
        ("lse is torch.float32 (16, 4), expected torch.float32 (4, 16)", dict(lse=shape(16, 4, dtype=F32))),
        ("cu_seqlens_q is torch.int64 (4,), expected torch.int32", dict(cu_seqlens_q=shape(4, dtype=torch.int64))),
        ("seqused_k is torch.int32 (4,), expected torch.int32 (3,): (sequences,)", dict(seqused_k=ENDS)),
        ("heads_q 4 is not a multiple of heads_kv 3", dict(k=shape(16, 3, 64), v=shape(16, 3, 64))),
    ]:
        check(backward, good | change, sentence, sentence)


def test_meta_tensors_have_shapes():
    q, k, v = (torch.empty(2, rows, heads, 64, dtype=BF16, device="meta") for rows, heads in ((16, 4), (20, 2), (20, 2)))
    q.requires_grad_()
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out.shape, lse.shape, out.device.type) == ((2, 16, 4, 64), (2, 4, 16), "meta")
    [dq] = torch.autograd.grad(out, q, torch.empty_like(out))
    assert dq.shape == q.shape and dq.is_meta
    codes, scales = quantize(q.detach(), transposed=True)
    assert (codes.shape, scales.shape) == ((2, 4, 64, 128), (2, 4, 1))


def test_lengths_that_only_the_data_will_tell():
    """A trace may not know how many rows there are. Then they are not checked."""

    class Masked(torch.nn.Module):
        def forward(self, x, mask):
            rows = x[mask].unsqueeze(0)
            return flash_attn_func(rows, rows, rows)

    x, mask = torch.randn(30, 2, 16), torch.arange(30) % 2 == 0
    program = torch.export.export(Masked(), (x, mask))
    mask = torch.arange(30) % 3 == 0
    assert torch.equal(program.module()(x, mask), Masked()(x, mask))
