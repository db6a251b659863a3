"""Bad calls are refused in one sentence, whether tensors have memory, are fake or meta, or are traced for an export. So
a call that can be traced can run. Needs torch but no GPU.
"""

import math
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode

import fa3
from fa3.flash_mla import flash_mla_with_kvcache

BF16, F16, F32, F64, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn
I32, I64 = torch.int32, torch.int64


def shape(*extents, dtype=BF16, strides=None):
    """The description of a tensor, which a test then makes on some device."""
    return extents, strides, dtype


def ints(*extents):
    return shape(*extents, dtype=I32)


def floats(*extents):
    return shape(*extents, dtype=F32)


X, ROWS, ENDS, COUNT = shape(2, 16, 4, 64), shape(16, 4, 64), ints(4), ints(3)
TABLES = dict(cos=floats(16, 32), sin=floats(16, 32))
CODES, PACKED_CODES = ({name: shape(*rows, 4, 64, dtype=E4M3) for name in "qkv"} for rows in ((2, 16), (16,)))
CODES_CACHED = dict.fromkeys(["k_cache", "v_cache"], shape(2, 9, 2, 64, dtype=E4M3))
INT8_CACHED = dict.fromkeys(["k_cache", "v_cache"], shape(2, 9, 2, 64, dtype=torch.int8))
KEYS, NEW = shape(2, 9, 2, 64), shape(2, 1, 2, 64)
OF_BACKWARD = "dout", "q", "k", "v", "o", "lse", "dlse"
LISTS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"


def backward(**tensors):
    return torch.ops.fa3.backward(*(tensors[name] for name in OF_BACKWARD), None, -1, -1, 0, 0.0, 0)


def varlen_backward(**tensors):
    names = *OF_BACKWARD, *LISTS
    return torch.ops.fa3.varlen_backward(*(tensors[name] for name in names), 9, None, None, -1, -1, 0, 0.0, 0)


# Calls that succeed: (function, arguments). REFUSED has bad variants of each call, under the call's name.
GOOD = dict(
    attention=(fa3.flash_attn_func, dict(q=X, k=X, v=X)),
    codes=(fa3.flash_attn_func, CODES),
    packed=(fa3.flash_attn_varlen_func, dict(q=ROWS, k=ROWS, v=ROWS, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, max_seqlen_q=None, max_seqlen_k=9)),
    from_16_bits=(fa3.flash_attn_fp8_func, dict(q=X, k=X, v=X)),
    packed_from_16_bits=(fa3.flash_attn_varlen_fp8_func, dict(q=ROWS, k=ROWS, v=ROWS, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, max_seqlen_q=None, max_seqlen_k=9)),
    cache=(fa3.flash_attn_with_kvcache, dict(q=shape(2, 1, 4, 64), k_cache=KEYS, v_cache=KEYS)),
    append=(fa3.flash_attn_with_kvcache, dict(q=shape(2, 1, 4, 64), k_cache=KEYS, v_cache=KEYS, k=NEW, v=NEW, cache_seqlens=3)),
    interface=(fa3._flash_attn_forward, dict(q=X, k=X, v=X)),
    interface_backward=(fa3._flash_attn_backward, dict(dout=X, q=X, k=X, v=X, out=X, softmax_lse=floats(2, 4, 16))),
    qkv=(fa3.flash_attn_qkvpacked_func, dict(qkv=shape(2, 8, 3, 4, 64))),
    packed_qkv=(fa3.flash_attn_varlen_qkvpacked_func, dict(qkv=shape(8, 3, 2, 64), cu_seqlens=ENDS, max_seqlen=5)),
    mla=(flash_mla_with_kvcache, dict(q=shape(2, 1, 4, 576), k_cache=shape(5, 64, 1, 576), block_table=ints(2, 2), cache_seqlens=ints(2), head_dim_v=512)),
    combine=(fa3.flash_attn_combine, dict(out_partial=floats(3, 2, 5, 3, 64), lse_partial=floats(3, 2, 5, 3))),
    quantize=(fa3.quantize, dict(x=X)),
    quantize_channels=(fa3.quantize_channels, dict(x=X)),
    backward=(backward, dict(zip(OF_BACKWARD, (X, X, X, X, X, floats(2, 4, 16), floats(2, 4, 16))))),
    varlen_backward=(varlen_backward, dict(zip((*OF_BACKWARD, *LISTS), (*[ROWS] * 5, floats(4, 16), floats(4, 16), ENDS, ENDS, COUNT, COUNT)))),
)
# By table: (sentence, the arguments that differ from the good call). The name of an error other than ValueError stands
# before its sentence. The names of devices are left out.
REFUSED = dict(
    attention=[
        ("q has 3, k 4 and v 4 dimensions, expected 4: (batch, seqlen, heads, head_dim)", dict(q=shape(16, 4, 64))),
        ("heads_q 8 is not a multiple of heads_kv 3", dict(q=shape(2, 16, 8, 64), k=shape(2, 16, 3, 64), v=shape(2, 16, 3, 64))),
        ("k has head_dim 32, expected 64", dict(k=shape(2, 16, 4, 32))),
        ("k has batch 3, expected 2", dict(k=shape(3, 16, 4, 64), v=shape(3, 16, 4, 64))),
        ("v has seqlen 15, expected 16", dict(v=shape(2, 15, 4, 64))),
        ("v has heads 2, expected 4", dict(v=shape(2, 16, 2, 64))),
        ("k is torch.float16, expected torch.bfloat16 like q", dict(k=shape(2, 16, 4, 64, dtype=F16))),
        ("TypeError: a tensor is torch.float64, expected torch.float16, torch.bfloat16, torch.float8_e4m3fn or, CPU, torch.float32", dict(q=shape(2, 16, 4, 64, dtype=F64))),
        ("q has head_dim 584, more than 576", dict(q=shape(2, 16, 4, 584), k=shape(2, 16, 4, 584))),
        ("v has head_dim 520, more than 512", dict(v=shape(2, 16, 4, 520))),
        ("softmax scale NaN is outside 1e-18 to 1e18", dict(softmax_scale=math.nan)),
        ("softmax scale 0 is outside 1e-18 to 1e18", dict(softmax_scale=0.0)),
        ("soft cap -1 is outside 1e-18 to 1e18", dict(softcap=-1.0)),
        ("out_dtype is torch.float64, expected torch.float16 or torch.bfloat16", dict(out_dtype=F64)),
        ("o cannot be torch.float16 when q is torch.bfloat16", dict(out_dtype=torch.float16)),
        ("transposed v is (2, 16, 4, 64), expected a contiguous (2, 4, 4, 128): (batch, heads_kv, head_dim_v, seqlen_k rounded up to 128)", dict(v_transposed=True)),
        ("q has 4, k 3 and v 4 dimensions, expected 4: (batch, seqlen, heads, head_dim)", dict(q=shape(2, 16, 4, 64), k=shape(16, 4, 64))),
        ("TypeError: k is NoneType, expected torch.Tensor", dict(k=None)),
        ("TypeError: out is int, expected torch.Tensor", dict(out=1)),
        ("out is torch.bfloat16 (2, 16, 2, 64), expected torch.bfloat16 (2, 16, 4, 64): (batch, seqlen_q, heads_q, head_dim_v)", dict(out=shape(2, 16, 2, 64))),
        ("out is torch.float32 (2, 16, 4, 64), expected torch.bfloat16 (2, 16, 4, 64): (batch, seqlen_q, heads_q, head_dim_v)", dict(out=floats(2, 16, 4, 64))),
        ("o has stride 2 in head_dim, expected 1", dict(out=shape(2, 16, 4, 64, strides=(8192, 512, 128, 2)))),
        ("output o has stride 0 in seqlen, where 64 or more keeps its rows apart", dict(out=shape(2, 16, 4, 64, strides=(256, 0, 64, 1)))),
        ("s_aux is torch.float32 (3,), expected torch.float32, torch.float16 or torch.bfloat16 (4,): (heads_q,)", dict(s_aux=floats(3))),
        ("s_aux is torch.float64 (4,), expected torch.float32, torch.float16 or torch.bfloat16 (4,): (heads_q,)", dict(s_aux=shape(4, dtype=F64))),
        ("s_aux is torch.float32 (1, 4), expected torch.float32, torch.float16 or torch.bfloat16 (4,): (heads_q,)", dict(s_aux=floats(1, 4))),
        ("TypeError: s_aux is list, expected torch.Tensor", dict(s_aux=[0.0] * 4)),
        ("intervals is torch.int64 (1, 1, 16, 2), expected torch.int32 (batch or 1, heads_q or 1, seqlen_q, 2 or 4)", dict(intervals=shape(1, 1, 16, 2, dtype=I64))),
        ("intervals is torch.int32 (1, 16, 2), expected torch.int32 (batch or 1, heads_q or 1, seqlen_q, 2 or 4)", dict(intervals=ints(1, 16, 2))),
        ("intervals have shape [1, 1, 15, 2], expected (2 or 1, 4 or 1, 16, 2 or 4)", dict(intervals=ints(1, 1, 15, 2))),
        ("intervals and qv exclude each other", dict(intervals=ints(1, 1, 16, 2), qv=X)),
        ("TypeError: intervals is list, expected torch.Tensor", dict(intervals=[0, 3])),
        ("qv has head_dim 32, expected 64", dict(qv=shape(2, 16, 4, 32))),
        ("qv has heads 2, expected 4", dict(qv=shape(2, 16, 2, 64))),
        ("qv has seqlen 20, expected 16", dict(qv=shape(2, 20, 4, 64))),
        ("qv has 3 dimensions, expected 4 as q has", dict(qv=ROWS)),
        ("qv is torch.float32, expected torch.bfloat16 like q", dict(qv=floats(2, 16, 4, 64))),
        ("q has head_dim 72 and qv 512, together more than 576", dict(q=shape(2, 16, 4, 72), k=shape(2, 16, 4, 72), v=shape(2, 16, 4, 512), qv=shape(2, 16, 4, 512))),
        ("TypeError: qv is list, expected torch.Tensor", dict(qv=[1])),
        ("v_mean is for torch.float8_e4m3fn, q is torch.bfloat16", dict(v_mean=floats(2, 4, 64))),
        ("transposed v is torch.float8_e4m3fn in dense batches, not torch.bfloat16", dict(v=shape(2, 4, 64, 128), v_transposed=True)),
    ],
    codes=[
        ("q_descale is torch.float32 (2, 3), expected torch.float32 (2, 4): (batch, heads_kv)", dict(q_descale=floats(2, 3))),
        ("k_descale is torch.bfloat16 (2, 4), expected torch.float32 (2, 4): (batch, heads_kv)", dict(k_descale=shape(2, 4))),
        ("some descales are of blocks, (batch, heads, blocks), expected all of them or none", dict(q_descale=floats(2, 4, 1), k_descale=floats(2, 4), v_descale=floats(2, 4))),
        ("there is v_mean without v_descale, expected both: the means and the scales of v's channels", dict(v_mean=floats(2, 4, 64))),
        ("v_mean is torch.float32 (2, 4), expected torch.float32 (2, 4, 64): (batch, heads_kv, head_dim_v)", dict(v_mean=floats(2, 4), v_descale=floats(2, 4, 64))),
        ("v is torch.bfloat16, expected torch.float8_e4m3fn like q", dict(v=X)),
        ("qv takes torch.float32, torch.float16 or torch.bfloat16, not torch.float8_e4m3fn", dict(qv=shape(2, 16, 4, 64, dtype=E4M3))),
        ("intervals take torch.float32, torch.float16 or torch.bfloat16, not torch.float8_e4m3fn", dict(intervals=ints(1, 1, 16, 2))),
        ("q_descale is torch.float32 (2, 1), expected torch.float32 (2, 4): (batch, heads_kv)", dict(q_descale=floats(2, 1))),
        ("some descales are of blocks, (batch, heads, blocks), expected all of them or none", dict(k_descale=floats(2, 4, 1), v_descale=floats(2, 4, 1))),
        ("q_descale is torch.float32 (2, 4, 2), expected torch.float32 (2, 4, 1): (batch, heads, blocks), with 64 or 128 rows of q and 128 of k and v in a block", dict(q_descale=floats(2, 4, 2), k_descale=floats(2, 4, 1), v_descale=floats(2, 4, 1))),
        ("k_descale is torch.float32 (2, 1, 1), expected torch.float32 (2, 4, 1): (batch, heads, blocks), with 64 or 128 rows of q and 128 of k and v in a block", dict(q_descale=floats(2, 4, 1), k_descale=floats(2, 1, 1), v_descale=floats(2, 4, 1))),
        ("v_descale is torch.float32 (2, 4, 2), expected torch.float32 (2, 4, 1): (batch, heads, blocks), with 64 or 128 rows of q and 128 of k and v in a block", dict(q_descale=floats(2, 4, 1), k_descale=floats(2, 4, 1), v_descale=floats(2, 4, 2))),
        ("v_descale is torch.float32 (2, 4, 3), expected torch.float32 (2, 4, 64): (batch, heads_kv, head_dim_v)", dict(q_descale=floats(2, 4, 1), k_descale=floats(2, 4, 1), v_descale=floats(2, 4, 3), v_mean=floats(2, 4, 64))),
        ("v_mean is torch.float32 (2, 4, 32), expected torch.float32 (2, 4, 64): (batch, heads_kv, head_dim_v)", dict(v_descale=floats(2, 4, 64), v_mean=floats(2, 4, 32))),
        ("v_mean is torch.float16 (2, 4, 64), expected torch.float32 (2, 4, 64): (batch, heads_kv, head_dim_v)", dict(v_descale=floats(2, 4, 64), v_mean=shape(2, 4, 64, dtype=F16))),
        ("v_descale is torch.float32 (2, 4, 64), expected torch.float32 (2, 4, 1): (batch, heads, blocks), with 64 or 128 rows of q and 128 of k and v in a block", dict(q_descale=floats(2, 4, 1), k_descale=floats(2, 4, 1), v_descale=floats(2, 4, 64))),
        ("some descales are of blocks, (batch, heads, blocks), expected both of q and k or none, as v_mean is given", dict(q_descale=floats(2, 4, 1), v_descale=floats(2, 4, 64), v_mean=floats(2, 4, 64))),
        ("transposed v is (2, 16, 4, 64), expected a contiguous (2, 4, 4, 128): (batch, heads_kv, head_dim_v, seqlen_k rounded up to 128)", dict(v_transposed=True)),
        ("transposed v is (2, 4, 64, 128), expected a contiguous (2, 4, 64, 128): (batch, heads_kv, head_dim_v, seqlen_k rounded up to 128)", dict(v=shape(2, 4, 64, 128, dtype=E4M3, strides=(65536, 16384, 256, 1)), v_transposed=True)),
    ],
    packed=[
        ("q has 4, k 3 and v 3 dimensions, expected 3: (total, heads, head_dim)", dict(q=X)),
        ("k is torch.float16, expected torch.bfloat16 like q", dict(k=shape(16, 4, 64, dtype=F16))),
        ("TypeError: a tensor is torch.float64, expected torch.float16, torch.bfloat16, torch.float8_e4m3fn or, CPU, torch.float32", dict(q=shape(16, 4, 64, dtype=F64))),
        ("v has seqlen 15, expected 16", dict(v=shape(15, 4, 64))),
        ("heads_q 4 is not a multiple of heads_kv 3", dict(k=shape(16, 3, 64), v=shape(16, 3, 64))),
        ("cu_seqlens_q is torch.int64 (4,), expected torch.int32 (sequences + 1,)", dict(cu_seqlens_q=shape(4, dtype=I64))),
        ("cu_seqlens_k is torch.int32 (1, 4), expected torch.int32 (sequences + 1,)", dict(cu_seqlens_k=ints(1, 4))),
        ("cu_seqlens_q is torch.int32 (0,), expected torch.int32 (sequences + 1,)", dict(cu_seqlens_q=ints(0))),
        ("q has 3 sequences and k 2, expected as many", dict(cu_seqlens_k=COUNT)),
        ("seqused_q is torch.int32 (4,), expected torch.int32 (3,): (sequences,)", dict(seqused_q=ENDS)),
        ("seqused_k is torch.float32 (3,), expected torch.int32 (3,): (sequences,)", dict(seqused_k=floats(3))),
        ("softmax scale NaN is outside 1e-18 to 1e18", dict(softmax_scale=math.nan)),
        ("soft cap -1 is outside 1e-18 to 1e18", dict(softcap=-1.0)),
        ("out is torch.bfloat16 (15, 4, 64), expected torch.bfloat16 (16, 4, 64): (total_q, heads_q, head_dim_v)", dict(out=shape(15, 4, 64))),
        ("output o has stride 0 in seqlen, where 64 or more keeps its rows apart", dict(out=shape(16, 4, 64, strides=(0, 64, 1)))),
        ("o cannot be torch.float16 when q is torch.bfloat16", dict(out_dtype=torch.float16)),
        ("q_descale is torch.float32 (2, 4), expected torch.float32 (3, 4): (sequences, heads_kv)", PACKED_CODES | dict(q_descale=floats(2, 4))),
        ("v_descale is torch.float32 (3, 4, 1), expected torch.float32 (3, 4): (sequences, heads_kv)", PACKED_CODES | dict(v_descale=floats(3, 4, 1))),
        ("out_dtype is torch.float64, expected torch.float16 or torch.bfloat16", PACKED_CODES | dict(out_dtype=F64)),
        ("s_aux is torch.float32 (3,), expected torch.float32, torch.float16 or torch.bfloat16 (4,): (heads_q,)", dict(s_aux=floats(3))),
        ("s_aux is torch.float64 (4,), expected torch.float32, torch.float16 or torch.bfloat16 (4,): (heads_q,)", dict(s_aux=shape(4, dtype=F64))),
        ("s_aux is torch.float32 (1, 4), expected torch.float32, torch.float16 or torch.bfloat16 (4,): (heads_q,)", dict(s_aux=floats(1, 4))),
        *((f"TypeError: {name} is NoneType, expected torch.Tensor", {name: None}) for name in "qkv"),
        *((f"TypeError: {name} is list, expected torch.Tensor", {name: [1, 2]}) for name in ("seqused_q", "seqused_k", "q_descale", "out", "s_aux")),
        ("scheduler_metadata is torch.int64 (4,), expected torch.int32 (numbers,)", dict(scheduler_metadata=shape(4, dtype=I64))),
        ("TypeError: scheduler_metadata is int, expected torch.Tensor", dict(scheduler_metadata=4)),
        ("there are page_table and cu_seqlens_k, expected one of them", dict(page_table=ints(3, 2))),
    ],
    from_16_bits=[
        ("TypeError: k is torch.float32, expected torch.float16 or torch.bfloat16", dict(k=floats(2, 16, 4, 64))),
        ("TypeError: q is torch.float8_e4m3fn, expected torch.float16 or torch.bfloat16", CODES),
        ("k is torch.float16, expected torch.bfloat16 like q", dict(k=shape(2, 16, 4, 64, dtype=F16))),
        ("q has 3, k 4 and v 4 dimensions, expected 4: (batch, seqlen, heads, head_dim)", dict(q=shape(16, 4, 64))),
        ("k has batch 3, expected 2", dict(k=shape(3, 16, 4, 64), v=shape(3, 16, 4, 64))),
        ("v has seqlen 15, expected 16", dict(v=shape(2, 15, 4, 64))),
        ("heads_q 4 is not a multiple of heads_kv 3", dict(k=shape(2, 16, 3, 64), v=shape(2, 16, 3, 64))),
        ("k has head_dim 32, expected 64", dict(k=shape(2, 16, 4, 32))),
        ("q: x has head_dim 72, not a multiple of 16 up to 256", dict(q=shape(2, 16, 4, 72), k=shape(2, 16, 4, 72))),
        ("v: x has head_dim 72, not a multiple of 16 up to 256", dict(v=shape(2, 16, 4, 72))),
        ("q: x has head_dim 272, not a multiple of 16 up to 256", dict(q=shape(2, 16, 4, 272), k=shape(2, 16, 4, 272))),
        ("softmax scale NaN is outside 1e-18 to 1e18", dict(softmax_scale=math.nan)),
        ("soft cap -1 is outside 1e-18 to 1e18", dict(softcap=-1.0)),
        ("there is one of cos and sin, expected both or none", dict(cos=floats(16, 32))),
        ("interleaved and positions are of a rotation, which needs cos and sin", dict(interleaved=True)),
        ("interleaved and positions are of a rotation, which needs cos and sin", dict(k_positions=1)),
        ("interleaved and positions are of a rotation, which needs cos and sin", dict(q_positions=ints(2, 16))),
        ("TypeError: cos is torch.float64, expected torch.float32, torch.float16 or torch.bfloat16", TABLES | dict(cos=shape(16, 32, dtype=F64))),
        ("cos is (16, 32) and sin (15, 32), expected both (positions, rotary_dim / 2)", TABLES | dict(sin=floats(15, 32))),
        ("q: rotary_dim 80 is not a positive multiple of 16 up to head_dim 64", {name: floats(16, 40) for name in ("cos", "sin")}),
        ("q: the last row is at position 16, the tables of cosines and sines have 16 rows", TABLES | dict(q_positions=1)),
        ("k: the last row is at position 16, the tables of cosines and sines have 16 rows", TABLES | dict(q_positions=ints(2, 16), k_positions=1)),
        ("TypeError: q_positions are torch.float32, expected torch.int32 or torch.int64", TABLES | dict(q_positions=floats(2, 16))),
        ("k_positions are (2, 15), expected (batch, seqlen), here (2, 16)", TABLES | dict(k_positions=ints(2, 15))),
        ("TypeError: k is NoneType, expected torch.Tensor", dict(k=None)),
        ("v is torch.float16, expected torch.bfloat16 like q", dict(v=shape(2, 16, 4, 64, dtype=F16))),
    ],
    quantize=[
        ("TypeError: x is torch.float32, expected torch.float16 or torch.bfloat16", dict(x=floats(2, 16, 4, 64))),
        ("x has 3 dimensions, expected 4: (batch, seqlen, heads, head_dim)", dict(x=shape(16, 4, 64))),
        ("x has head_dim 72, not a multiple of 16 up to 256", dict(x=shape(2, 16, 4, 72))),
        ("x has head_dim 272, not a multiple of 16 up to 256", dict(x=shape(2, 16, 4, 272))),
        ("block_rows is 32, expected 64 or 128", dict(block_rows=32)),
        ("a scale for each 3 heads, of which the tensor has 4", dict(scales_of="heads", heads_per_scale=3)),
        ("the scale 0 is outside 2^-64 to 2^64", dict(scale=0.0)),
        ("the scale NaN is outside 2^-64 to 2^64", dict(scale=math.nan)),
        ("there is one of cos and sin, expected both or none", dict(cos=floats(16, 32))),
        ("rotary_dim 80 is not a positive multiple of 16 up to head_dim 64", dict(cos=floats(16, 40), sin=floats(16, 40))),
        ("the last row is at position 16, the tables of cosines and sines have 16 rows", dict(cos=floats(16, 32), sin=floats(16, 32), positions=1)),
        ("TypeError: x is list, expected torch.Tensor", dict(x=[1])),
        ("scales_of is 'rows', expected 'blocks', 'heads' or 'tensor'", dict(scales_of="rows")),
        ("scale is 0.5 and scales_of 'heads', expected only one of them", dict(scale=0.5, scales_of="heads")),
        ("block_rows 64 is of scales of blocks, scales_of is 'tensor'", dict(block_rows=64, scales_of="tensor")),
        ("heads_per_scale 2 is of scales of heads, scales_of is 'blocks'", dict(heads_per_scale=2)),
        ("heads_per_scale 0 is of scales of heads, scales_of is 'tensor'", dict(scales_of="tensor", heads_per_scale=0)),
        *((f"a scale for each {heads} heads, of which the tensor has 4", dict(scales_of="heads", heads_per_scale=heads)) for heads in (0, -1)),
        ("the scale inf is outside 2^-64 to 2^64", dict(scale=1e300)),
        ("interleaved and positions are of a rotation, which needs cos and sin", dict(positions=1)),
        ("TypeError: sin is torch.float64, expected torch.float32, torch.float16 or torch.bfloat16", TABLES | dict(sin=shape(16, 32, dtype=F64))),
        ("cos is (16, 32) and sin (15, 32), expected both (positions, rotary_dim / 2)", TABLES | dict(sin=floats(15, 32))),
        ("TypeError: positions are torch.float32, expected torch.int32 or torch.int64", TABLES | dict(positions=floats(2, 16))),
        ("positions are (16,), expected (batch, seqlen), here (2, 16)", TABLES | dict(positions=ints(16))),
        ("-1 is too large or too small a number", TABLES | dict(positions=-1)),
        ("hadamard_seed -1 is outside 0 to 2^64 - 1", dict(hadamard_seed=-1)),
        (f"hadamard_seed {2**64} is outside 0 to 2^64 - 1", dict(hadamard_seed=2**64)),
        ("TypeError: sin is int, expected torch.Tensor", TABLES | dict(sin=1)),
    ],
    packed_from_16_bits=[
        ("TypeError: flash_attn_varlen_fp8_func() got an unexpected keyword argument 'v_channels'", dict(v_channels=True)),
        ("q_positions are (3,), expected (total,), here (16,)", TABLES | dict(q_positions=ints(3))),
        ("q: x has head_dim 24, not a multiple of 16 up to 256", dict(q=shape(16, 4, 24), k=shape(16, 4, 24), v=shape(16, 4, 24))),
    ],
    cache=[
        ("page_table is torch.int32 (5,), expected torch.int32 (rows, pages), as there is cache_batch_idx", dict(page_table=ints(5), cache_batch_idx=ints(2))),
        ("cache_batch_idx is torch.int32 (3,), expected torch.int32 (2,): (sequences,)", dict(page_table=ints(5, 3), cache_batch_idx=ints(3))),
        ("attention_chunk -1 is outside 0 to 2^32 - 1", dict(attention_chunk=-1)),
        *((f"split_keys is {keys!r}, expected 'fixed', a multiple of 128, or None", dict(split_keys=keys)) for keys in (-128, 0, 1, 64, 100, "equal")),
        ("TypeError: split_keys is 1.5, expected an integer", dict(split_keys=1.5)),
        ("there are split_keys and num_splits 1, expected one of them", dict(split_keys=128, num_splits=1)),
        ("there are page_table and block_table, expected one of them", dict(page_table=ints(2, 3), block_table=ints(2, 3))),
        ("page_table is torch.float32 (2, 3), expected torch.int32 (2, pages): (sequences, pages)", dict(page_table=floats(2, 3))),
        ("page_table is torch.int32 (3, 3), expected torch.int32 (2, pages): (sequences, pages)", dict(page_table=ints(3, 3))),
        ("TypeError: page_table is list, expected torch.Tensor", dict(page_table=[[0], [1]])),
        ("cache_batch_idx is torch.int64 (2,), expected torch.int32 (batch,)", dict(cache_batch_idx=shape(2, dtype=I64))),
        ("cache_seqlens is torch.int32 (3,), expected torch.int32 (2,): (sequences,)", dict(cache_seqlens=COUNT)),
        ("cache_seqlens is torch.int64 (2,), expected torch.int32 (2,): (sequences,)", dict(cache_seqlens=shape(2, dtype=I64))),
        ("cache_seqlens is -1, expected 0 to 2^31 - 1", dict(cache_seqlens=-1)),
        ("cache_seqlens is 2147483648, expected 0 to 2^31 - 1", dict(cache_seqlens=2**31)),
        ("TypeError: cache_seqlens is 1.5, expected an integer", dict(cache_seqlens=1.5)),
        ("TypeError: cache_seqlens is a list, expected an integer or an int32 tensor (batch,)", dict(cache_seqlens=[10, 20])),
        ("cache_leftpad is torch.int32 (1,), expected torch.int32 (2,): (sequences,)", dict(cache_leftpad=ints(1))),
        ("q has 4 dimensions, expected 3: (total_q, heads, head_dim), as there is cu_seqlens_q", dict(cu_seqlens_q=COUNT)),
        ("k_cache has batch 8, expected 2, as q has: cache_batch_idx says which are meant", dict(k_cache=shape(8, 9, 2, 64), v_cache=shape(8, 9, 2, 64))),
        ("k_cache has batch 3, expected 2, as q has: cache_batch_idx says which are meant", dict(k_cache=shape(3, 9, 2, 64), v_cache=shape(3, 9, 2, 64))),
        ("v_cache has seqlen 8, expected 9", dict(v_cache=shape(2, 8, 2, 64))),
        ("k_cache has 3 and v_cache 4 dimensions, expected 4: (batch or pages, rows, heads_kv, head_dim)", dict(k_cache=shape(9, 2, 64))),
        ("TypeError: v_cache is NoneType, expected torch.Tensor", dict(v_cache=None)),
        ("TypeError: num_splits is 0.5, expected an integer", dict(num_splits=0.5)),
        ("out is torch.float32 (2, 1, 4, 32), expected torch.bfloat16 (2, 1, 4, 64): (batch, seqlen_q, heads_q, head_dim_v)", dict(out=floats(2, 1, 4, 32))),
        ("s_aux is torch.float32 (3,), expected torch.float32, torch.float16 or torch.bfloat16 (4,): (heads_q,)", dict(s_aux=floats(3))),
        ("qv has head_dim 32, expected 64", dict(qv=shape(2, 1, 4, 32))),
        ("k_cache is torch.float8_e4m3fn and v_cache is torch.bfloat16, expected both of one type, or v_cache of torch.float8_e4m3fn beside q and k_cache of torch.bfloat16", dict(k_cache=shape(2, 9, 2, 64, dtype=E4M3))),
        ("k_cache is torch.float8_e4m3fn, expected torch.float32 like q", CODES_CACHED | dict(q=floats(2, 1, 4, 64))),
        ("k_descale is torch.float32 (1, 2), expected torch.float32 (2, 2): (sequences, heads_kv)", CODES_CACHED | dict(k_descale=floats(1, 2))),
        ("only k_cache and v_cache may be torch.int8, both of them beside q of 16 bits and with scales of tokens and heads: q is torch.bfloat16, k_cache torch.int8 and v_cache torch.int8, without such scales", INT8_CACHED),
        ("k_descale is for torch.float8_e4m3fn, k_cache is torch.int8", INT8_CACHED | dict(k_descale=floats(2, 2))),
        ("v_descale is None, expected torch.float32 (2, 9, 2): (batch or pages, rows, heads_kv)", CODES_CACHED | dict(k_descale=floats(2, 9, 2))),
        ("k_descale is torch.float32 (2, 2, 9), expected torch.float32 (2, 9, 2): (batch or pages, rows, heads_kv)", CODES_CACHED | dict(k_descale=floats(2, 2, 9), v_descale=floats(2, 9, 2))),
        ("scales of tokens and heads belong to k_cache and v_cache of torch.float8_e4m3fn or torch.int8 beside q of 16 bits, not to k_cache of torch.float8_e4m3fn beside q of torch.bfloat16 with qv", CODES_CACHED | dict.fromkeys(["k_descale", "v_descale"], floats(2, 9, 2)) | dict(qv=shape(2, 1, 4, 64))),
    ],
    append=[
        ("there is k without v, expected both or none", dict(v=None)),
        ("there is rotary_cos without k and v, the new rows that it is of", dict(k=None, v=None, rotary_cos=floats(9, 16))),
        ("there are k and v without cache_seqlens, which says where they go", dict(cache_seqlens=None)),
        ("there is one of rotary_cos and rotary_sin, expected both or none", dict(rotary_cos=floats(9, 16))),
        ("TypeError: rotary_cos is torch.float16, expected torch.float32 or torch.bfloat16", dict(rotary_cos=shape(9, 16, dtype=F16), rotary_sin=shape(9, 16, dtype=F16))),
        ("rotary_cos is torch.float32 (9, 16) and rotary_sin torch.float32 (9, 8), expected both alike: (positions, rotary_dim / 2)", dict(rotary_cos=floats(9, 16), rotary_sin=floats(9, 8))),
        ("k has 3 and v 4 dimensions, expected 4: (batch, rows, heads_kv, head_dim), as there is no cu_seqlens_k_new", dict(k=shape(2, 2, 64))),
        ("cu_seqlens_k_new is of 1 sequences, expected 2", dict.fromkeys("kv", shape(2, 2, 64)) | dict(cu_seqlens_k_new=ints(2))),
        ("k has 4 and v 4 dimensions, expected 3: (total, heads_kv, head_dim), as there is cu_seqlens_k_new", dict(cu_seqlens_k_new=COUNT)),
        ("v is torch.bfloat16, expected torch.float32: all tensors except a cache of torch.float8_e4m3fn have one type", dict(k=floats(2, 1, 2, 64))),
        ("TypeError: rotary_seqlens is list, expected torch.Tensor", dict(rotary_seqlens=[1, 2])),
    ],
    interface=[
        ("there are out and out_, expected one of them", dict(out=X, out_=X)),
        ("TypeError: rotary_interleaved is 'no', expected True or False", dict(rotary_interleaved="no")),
        ("TypeError: max_seqlen_q is '1', expected an integer", dict(max_seqlen_q="1")),
        ("q has 4 dimensions, expected 3: (total, heads, head_dim), as there is cu_seqlens of it", dict(cu_seqlens_q=ints(2))),
        ("k has 4 dimensions, expected 3: (total, heads, head_dim), as there is cu_seqlens of it", dict(cu_seqlens_k=ints(2))),
        ("there are cu_seqlens_k and page_table, which is of a cache: expected one of them", dict(cu_seqlens_k=ints(2), page_table=ints(2))),
        ("TypeError: k is NoneType, expected torch.Tensor", dict(k=None)),
        ("window_size is (1, 2), and its sides are 3 and -1: expected one of them", dict(window_size=(1, 2), window_size_left=3)),
        ("TypeError: the left side of window_size is a tuple, expected an integer", dict(window_size_left=(1, 2))),
        ("soft cap -1 is outside 1e-18 to 1e18", dict(softcap=-1.0)),
    ],
    interface_backward=[
        ("seqused_q is torch.float32 (2,), expected torch.int32 (2,): (sequences,)", dict(sequed_q=floats(2))),
        ("TypeError: softmax_lse is NoneType, expected torch.Tensor", dict(softmax_lse=None)),
        ("TypeError: dq is list, expected torch.Tensor", dict(dq=[1])),
        ("TypeError: is_causal is 2.0, expected True or False", dict(is_causal=2.0)),
        ("dk is torch.bfloat16 (2, 15, 4, 64), expected torch.bfloat16 (2, 16, 4, 64)", dict(dk=shape(2, 15, 4, 64))),
        ("o is torch.float16 (2, 16, 4, 64), expected torch.bfloat16 (2, 16, 4, 64): (batch, seqlen_q, heads_q, head_dim_v)", dict(out=shape(2, 16, 4, 64, dtype=F16))),
        ("dq has stride 4160 in batch, expected 4096: sequences one after the other, as there are lengths of them", dict(sequed_q=ints(2), dq=shape(2, 16, 4, 64, strides=(4160, 256, 64, 1)))),
        ("window_size is (1, 2), and its sides are 3 and -1: expected one of them", dict(window_size=(1, 2), window_size_left=3)),
        ("TypeError: the left side of window_size is a tuple, expected an integer", dict(window_size_left=(1, 2))),
        ("soft cap -1 is outside 1e-18 to 1e18", dict(softcap=-1.0)),
    ],
    qkv=[
        ("TypeError: qkv is list, expected torch.Tensor", dict(qkv=[1])),
        ("qkv is (2, 8, 6, 64), expected (batch, seqlen, 3, heads, head_dim)", dict(qkv=shape(2, 8, 6, 64))),
        ("qkv is (2, 8, 2, 4, 64), expected (batch, seqlen, 3, heads, head_dim)", dict(qkv=shape(2, 8, 2, 4, 64))),
        *((f"qkv is (2, 8, {heads}, 64), expected (batch, seqlen, 4 + 2 * heads_kv, head_dim) with num_heads_q 4", dict(qkv=shape(2, 8, heads, 64), num_heads_q=4)) for heads in (4, 7)),
    ],
    packed_qkv=[
        ("NotImplementedError: dropout_p is not supported yet", dict(dropout_p=0.1)),
        ("alibi_slopes is torch.float32 (2, 2, 2), expected torch.float32 (heads_q,) or (batch, heads_q)", dict(alibi_slopes=floats(2, 2, 2))),
        ("TypeError: alibi_slopes is list, expected torch.Tensor", dict(alibi_slopes=[1.0])),
        ("attention_chunk -1 is outside 0 to 2^32 - 1", dict(attention_chunk=-1)),
        ("TypeError: qkv is list, expected torch.Tensor", dict(qkv=[1])),
        ("TypeError: cu_seqlens is NoneType, expected torch.Tensor", dict(cu_seqlens=None)),
        ("qkv is (1, 8, 3, 2, 64), expected (total, 3, heads, head_dim)", dict(qkv=shape(1, 8, 3, 2, 64))),
        ("qkv is (8, 2, 2, 64), expected (total, 3, heads, head_dim)", dict(qkv=shape(8, 2, 2, 64))),
        ("qkv is (8, 7, 64), expected (total, 4 + 2 * heads_kv, head_dim) with num_heads_q 4", dict(qkv=shape(8, 7, 64), num_heads_q=4)),
    ],
    mla=[
        ("NotImplementedError: is_fp8_kvcache without indices is not supported yet", dict(is_fp8_kvcache=True)),
        ("indices is torch.float32 (1,), expected torch.int32 (2, 1, topk)", dict(indices=floats(1))),
        *((f"head_dim_v is {columns}, expected 1 to 575: a part of q's columns", dict(head_dim_v=columns)) for columns in (0, 576)),
        ("TypeError: head_dim_v is 1.5, expected an integer", dict(head_dim_v=1.5)),
        ("k_cache has 3 dimensions, expected 4: (batch or pages, rows, heads, head_dim)", dict(k_cache=shape(5, 64, 576))),
        ("head_dim_v is 512, expected 1 to 511: a part of k_cache's columns", dict(k_cache=shape(5, 64, 1, 512))),
        ("k_cache has head_dim 58, expected 64", dict(k_cache=shape(5, 64, 1, 570))),
        ("TypeError: block_table is list, expected torch.Tensor", dict(block_table=[[0]])),
        ("TypeError: cache_seqlens is int, expected torch.Tensor", dict(cache_seqlens=5)),
    ],
    combine=[
        ("out_partial has 5 and lse_partial 3 dimensions, expected 5 and 4: (num_splits, batch, seqlen, heads, head_dim_v) and (num_splits, batch, seqlen, heads), or 4 and 3 of packed sequences", dict(lse_partial=floats(2, 5, 3))),
        ("TypeError: a tensor is torch.float64, expected torch.float16, torch.bfloat16, torch.float8_e4m3fn or, CPU, torch.float32", dict(out_partial=shape(3, 2, 5, 3, 64, dtype=F64))),
        ("lse_partial is torch.float16, expected torch.float32", dict(lse_partial=shape(3, 2, 5, 3, dtype=F16))),
        ("lse_partial has heads 2, expected 3", dict(lse_partial=floats(3, 2, 5, 2))),
        ("lse_partial has num_splits 2, expected 3", dict(lse_partial=floats(2, 2, 5, 3))),
        ("out_partial has num_splits 0", dict(out_partial=floats(0, 2, 5, 3, 64), lse_partial=floats(0, 2, 5, 3))),
        ("out_dtype is torch.float64, expected torch.float32, torch.float16 or torch.bfloat16", dict(out_dtype=F64)),
        ("o has head_dim 60, not a multiple of 8 as torch.bfloat16 needs (16-byte rows)", dict(out_partial=floats(3, 2, 5, 3, 60), out_dtype=BF16)),
        ("out is torch.float16 (2, 5, 3, 64), expected torch.float32 (2, 5, 3, 64): (batch, seqlen, heads, head_dim_v)", dict(out=shape(2, 5, 3, 64, dtype=F16))),
        ("TypeError: lse_partial is int, expected torch.Tensor", dict(lse_partial=1)),
        ("TypeError: out is list, expected torch.Tensor", dict(out=[1])),
    ],
    backward=[
        ("q has 3, k 4 and v 4 dimensions, expected 4: (batch, seqlen, heads, head_dim)", dict(q=ROWS)),
        ("heads_q 4 is not a multiple of heads_kv 3", dict(k=shape(2, 16, 3, 64), v=shape(2, 16, 3, 64))),
        ("v has seqlen 16, expected 15", dict(k=shape(2, 15, 4, 64))),
        ("v is torch.float16, expected torch.bfloat16 like q", dict(v=shape(2, 16, 4, 64, dtype=F16))),
        ("dout is torch.bfloat16 (2, 15, 4, 64), expected torch.bfloat16 (2, 16, 4, 64): (batch, seqlen_q, heads_q, head_dim_v)", dict(dout=shape(2, 15, 4, 64))),
        ("dout is torch.float16 (2, 16, 4, 64), expected torch.bfloat16 (2, 16, 4, 64): (batch, seqlen_q, heads_q, head_dim_v)", dict(dout=shape(2, 16, 4, 64, dtype=F16))),
        ("o is torch.bfloat16 (2, 15, 4, 64), expected torch.bfloat16 (2, 16, 4, 64): (batch, seqlen_q, heads_q, head_dim_v)", dict(o=shape(2, 15, 4, 64))),
        ("lse is torch.float32 (2, 16, 4), expected torch.float32 (2, 4, 16): (batch, heads_q, seqlen_q)", dict(lse=floats(2, 16, 4))),
        ("lse is torch.float32 (2, 4, 15), expected torch.float32 (2, 4, 16): (batch, heads_q, seqlen_q)", dict(lse=floats(2, 4, 15))),
        ("dlse is torch.float64 (2, 4, 16), expected torch.float32 (2, 4, 16): (batch, heads_q, seqlen_q)", dict(dlse=shape(2, 4, 16, dtype=F64))),
    ],
    varlen_backward=[
        ("q has 4, k 3 and v 3 dimensions, expected 3: (total, heads, head_dim)", dict(q=X)),
        ("dout is torch.bfloat16 (15, 4, 64), expected torch.bfloat16 (16, 4, 64): (total_q, heads_q, head_dim_v)", dict(dout=shape(15, 4, 64))),
        ("dout is torch.float16 (16, 4, 64), expected torch.bfloat16 (16, 4, 64): (total_q, heads_q, head_dim_v)", dict(dout=shape(16, 4, 64, dtype=F16))),
        ("o is torch.bfloat16 (15, 4, 64), expected torch.bfloat16 (16, 4, 64): (total_q, heads_q, head_dim_v)", dict(o=shape(15, 4, 64))),
        ("lse is torch.float32 (16, 4), expected torch.float32 (4, 16): (heads_q, total_q)", dict(lse=floats(16, 4))),
        ("dlse is torch.float64 (4, 16), expected torch.float32 (4, 16): (heads_q, total_q)", dict(dlse=shape(4, 16, dtype=F64))),
        ("cu_seqlens_q is torch.int64 (4,), expected torch.int32 (sequences + 1,)", dict(cu_seqlens_q=shape(4, dtype=I64))),
        ("q has 3 sequences and k 2, expected as many", dict(cu_seqlens_k=COUNT)),
        ("seqused_k is torch.int32 (4,), expected torch.int32 (3,): (sequences,)", dict(seqused_k=ENDS)),
        ("heads_q 4 is not a multiple of heads_kv 3", dict(k=shape(16, 3, 64), v=shape(16, 3, 64))),
        ("k is torch.float16, expected torch.bfloat16 like q", dict(k=shape(16, 4, 64, dtype=F16))),
    ],
)
# (table, sentence on a GPU, sentence on the CPU and for meta tensors, changed arguments). None is no refusal.
TYPES = "the forward kernels take torch.float16, torch.bfloat16 and torch.float8_e4m3fn, not torch.float32"
PLACES = [
    ("attention", TYPES, None, {name: floats(2, 16, 4, 64) for name in "qkv"}),
    ("attention", "the forward kernels have no tile for head_dim 272 and head_dim_v 272: of FP8 they take up to 256 and 256", None, {name: shape(2, 16, 4, 272, dtype=E4M3) for name in "qkv"}),
    ("attention", "q has head_dim 60, not a multiple of 8 as torch.bfloat16 needs (16-byte rows)", None, {name: shape(2, 16, 4, 60) for name in "qkv"}),
    ("attention", "v has head_dim 60, not a multiple of 8 as torch.bfloat16 needs (16-byte rows)", None, dict(v=shape(2, 16, 4, 60))),
    ("attention", "v has stride 257 in seqlen, not a multiple of 8 elements (16 bytes)", None, dict(v=shape(2, 16, 4, 64, strides=(8192, 257, 64, 1)))),
    ("attention", "o has stride 68 in heads, not a multiple of 8 elements (16 bytes)", None, dict(out=shape(2, 16, 4, 64, strides=(4352, 272, 68, 1)))),
    ("attention", "o has stride 8196 in batch, not a multiple of 8 elements (16 bytes)", None, dict(out=shape(2, 16, 4, 64, strides=(8196, 256, 64, 1)))),
    ("attention", "sm_margin -1 is outside 0 to 131: the device has 132 sms", "sm_margin -1 is negative", dict(sm_margin=-1)),
    ("attention", "sm_margin 132 is outside 0 to 131: the device has 132 sms", None, dict(sm_margin=132)),
    ("attention", None, None, dict(out=shape(2, 16, 4, 64, strides=(4096, 64, 1024, 1)))),
    ("attention", "the forward kernels have no tile for qv with head_dim 72 and head_dim_v 256: they take up to 64 and 512", None, dict(q=shape(2, 16, 4, 72), k=shape(2, 16, 4, 72), v=shape(2, 16, 4, 256), qv=shape(2, 16, 4, 256))),
    ("attention", TYPES, None, dict.fromkeys(["q", "k", "v", "qv"], floats(2, 16, 4, 64))),
    ("from_16_bits", "v: x has stride 257 in seqlen, not a multiple of 8 elements (16 bytes)", None, dict(v=shape(2, 16, 4, 64, strides=(8192, 257, 64, 1)))),
    ("from_16_bits", None, None, TABLES | dict(q_positions=ints(2, 16), k_positions=ints(2, 16), v_channels=True)),
    ("packed", TYPES, None, {name: floats(16, 4, 64) for name in "qkv"}),
    ("packed", "the forward kernels have no tile for head_dim 272 and head_dim_v 272: of FP8 they take up to 256 and 256", None, {name: shape(16, 4, 272, dtype=E4M3) for name in "qkv"}),
    ("packed", "q has head_dim 60, not a multiple of 8 as torch.bfloat16 needs (16-byte rows)", None, {name: shape(16, 4, 60) for name in "qkv"}),
    ("packed", "v has stride 257 in seqlen, not a multiple of 8 elements (16 bytes)", None, dict(v=shape(16, 4, 64, strides=(257, 64, 1)))),
    ("packed", "o has stride 257 in seqlen, not a multiple of 8 elements (16 bytes)", None, dict(out=shape(16, 4, 64, strides=(257, 64, 1)))),
    ("packed", None, None, dict(seqused_q=COUNT, seqused_k=COUNT, causal=True, max_seqlen_q=10**6, out=shape(16, 4, 64, strides=(64, 1024, 1)))),
    ("cache", "the forward kernels have no tile for head_dim 512 and head_dim_v 512: of FP8 they take up to 256 and 256", None, dict(q=shape(2, 1, 4, 512, dtype=E4M3), k_cache=shape(2, 9, 2, 512, dtype=E4M3), v_cache=shape(2, 9, 2, 512, dtype=E4M3))),
    ("combine", "out_partial has stride 990 in batch, not a multiple of 4 elements (16 bytes)", None, dict(out_partial=shape(3, 2, 5, 3, 64, dtype=F32, strides=(1980, 990, 198, 66, 1)))),
]
# `quantize_channels` refuses a bad x with the sentences of `quantize`.
REFUSED["quantize_channels"] = [(sentence, change) for sentence, change in REFUSED["quantize"] if change.keys() == {"x"}]
EVERYWHERE = [(table, sentence, sentence, change) for table, rows in REFUSED.items() for sentence, change in rows]


def made(change, device):
    """The arguments of a call, with tensors on a device."""

    def tensor(extents, strides, dtype):
        if strides is None:
            return torch.zeros(extents, dtype=dtype, device=device)
        return torch.empty_strided(extents, strides, dtype=dtype, device=device)

    return {name: tensor(*x) if isinstance(x, tuple) and len(x) == 3 else x for name, x in change.items()}


class Module(torch.nn.Module):
    """Wraps a function for an export. It takes tensors as a dictionary."""

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


def said(function, arguments):
    """The sentence of a refusal, without the names of devices; None if the call is computed."""
    try:
        function(**arguments)
    except (ValueError, TypeError, NotImplementedError) as error:
        sentence = re.sub(r" on [a-z]+(:\d+)?(?=[, :]|$)", "", str(error))
        return sentence if type(error) is ValueError else f"{type(error).__name__}: {sentence}"


@pytest.mark.parametrize("table, of_gpu, of_cpu, change", EVERYWHERE + PLACES, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_calls_are_refused_everywhere(table, of_gpu, of_cpu, change):
    function, good = GOOD[table]
    with torch.no_grad():
        for device in ("cpu", "meta"):
            assert said(function, made(good | change, device)) == of_cpu
        with FakeTensorMode():
            assert said(function, made(good | change, "cpu")) == of_cpu
            assert said(function, made(good | change, "cuda")) == of_gpu
        if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
            assert said(function, made(good | change, "cuda")) == of_gpu


@pytest.mark.parametrize("table", GOOD)
def test_good_calls_are_not_refused(table):
    """The good calls, from which the tables' bad calls differ."""
    function, good = GOOD[table]
    with torch.no_grad(), FakeTensorMode():
        for device in ("cpu", "meta", "cuda"):
            assert said(function, made(good, device)) is None


EXPORTED = [case for case in EVERYWHERE if case[0] == "attention"][1:12] + [case for case in PLACES[:9]]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("table, of_gpu, of_cpu, change", EXPORTED, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_what_cannot_run_cannot_be_exported(table, of_gpu, of_cpu, change, dynamic):
    function, good = GOOD[table]
    arguments = made(good | change, "cpu")
    if of_cpu is None:
        export(function, arguments, dynamic)
    else:
        with pytest.raises(Exception, match=re.escape(of_cpu.removeprefix("TypeError: ").partition(", expected")[0])):
            export(function, arguments, dynamic)


def test_what_is_exported_takes_other_lengths():
    """Checks leave no guards in an exported program: it takes any batch and lengths."""
    program = export(fa3.flash_attn_func, made({"q": X, "k": X, "v": X, "causal": True}, "cpu"), dynamic=True)
    q, k, v = torch.randn(3, 20, 4, 64).to(BF16), *(torch.randn(3, 30, 4, 64).to(BF16) for _ in "kv")
    out = program.module()({"q": q, "k": k, "v": v})
    assert torch.equal(out, fa3.flash_attn_func(q, k, v, causal=True))


def test_meta_tensors_have_shapes():
    q, k, v = (torch.empty(2, rows, heads, 64, dtype=BF16, device="meta") for rows, heads in ((16, 4), (20, 2), (20, 2)))
    q.requires_grad_()
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out.shape, lse.shape, out.device.type) == ((2, 16, 4, 64), (2, 4, 16), "meta")
    [dq] = torch.autograd.grad(out, q, torch.empty_like(out))
    assert dq.shape == q.shape and dq.is_meta
    codes, scales = fa3.quantize(q.detach(), transposed=True)
    assert (codes.shape, scales.shape) == ((2, 4, 64, 128), (2, 4, 1))
