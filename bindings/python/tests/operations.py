"""The operations of this package in one table, over which tests run laws that hold for each of them."""

from dataclasses import dataclass, field, replace
from typing import Callable

import torch
from caching import Cached
from packing import Packed, ends, normal

import fa3
from fa3.flash_mla import flash_mla_with_kvcache

F32, BF16, E4M3, I32 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32
OF_CODES = "q is torch.float8_e4m3fn, for which attention has no gradients"


@dataclass
class Operation:
    """A public function, and valid arguments of it.

    `make(device, n)` gives arguments by name, whose sizes depend on `n`. `options` are added to each call.
    `no_gradient` is the sentence that refuses a backward pass, or None if there are gradients. `inputs` names the
    tensors whose tangents are refused. `transforms` is the sentence that refuses torch.func's transforms, if it
    differs. `writes` names the arguments that a call writes. `takes_out` says whether O may be given as `out`.
    """

    function: Callable
    make: Callable
    options: dict = field(default_factory=dict)
    no_gradient: str | None = None
    inputs: str = "q, k or v"
    transforms: str | None = None
    writes: tuple = ()
    takes_out: bool = True

    def call(self, **given):
        """All results, as a tuple."""
        results = self.function(**(self.options | given))
        return tuple(x for x in results if x is not None) if isinstance(results, (tuple, list)) else (results,)

    def tensors(self, device, n=3):
        return {name: x for name, x in self.make(device, n).items() if isinstance(x, torch.Tensor)}

    def numbers(self, device, n=3):
        return {name: x for name, x in self.make(device, n).items() if not isinstance(x, torch.Tensor)}

    @property
    def has_numbers(self):
        return bool(self.numbers("cpu"))


def heads_outside(x):
    """The tensor with heads outside rows in memory, if it has heads."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.dim() > 2 else x


def dense(device, n=3, rows=None, keys=None, heads=(4, 2), head_dims=(64, 32)):
    rows, keys = 10 * n + 3 if rows is None else rows, 12 * n if keys is None else keys
    q, k, v = ((rows, heads[0], head_dims[0]), (keys, heads[1], head_dims[0]), (keys, heads[1], head_dims[1]))
    return {name: normal(n, *shape, seed=i, device=device) for i, (name, shape) in enumerate(dict(q=q, k=k, v=v).items())}


def packed(device, n=3, lengths=None, in_part=True, head_dims=(64, 32)):
    lengths = [(10 * n + j, 12 * n) for j in range(n)] if lengths is None else lengths
    used = [max(q - n, 0) for q, _ in lengths], [k for _, k in lengths]
    given = Packed(device, lengths=lengths, head_dims=head_dims, used=used)
    used = given.used if in_part else (None, None)
    lists = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"), (*given.ends, *used), strict=True))
    return dict(q=given.q, k=given.k, v=given.v) | {name: x for name, x in lists.items() if x is not None}


def hinted(device, n=3, **options):
    return packed(device, n, **options) | dict(max_seqlen_q=20 * n + 5, max_seqlen_k=20 * n + 5)


def unhinted(device, n=3, **options):
    return packed(device, n, **options) | dict(max_seqlen_q=None, max_seqlen_k=None)


def codes(make, **more):
    """The arguments of `make` with q, k and v in e4m3, and per-head scales."""

    def made(device, n=3):
        given = make(device, n, **more)
        scales = {f"{name}_descale": normal(n, 2, dtype=F32, device=device).abs() for name in "qkv"}
        return {name: x.to(E4M3) if name in ("q", "k", "v") else x for name, x in given.items()} | scales

    return made


def codes_by_channels(device, n=3):
    """Codes with scales per block of Q and K, and with scales and means per channel of V."""
    given = codes(dense, head_dims=(64, 64))(device, n)
    shapes = dict(q_descale=(n, 4, 1), k_descale=(n, 2, 1), v_descale=(n, 2, 64), v_mean=(n, 2, 64))
    return given | {name: normal(*shape, dtype=F32, device=device).abs() for name, shape in shapes.items()}


def some_causal(device, n=3):
    """Packed sequences, every other one of which is causal."""
    return hinted(device, n) | dict(causal=torch.arange(n, device=device) % 2 == 0)


def tree(device, n=3):
    """Arguments over a cache whose new rows see the first and the third new key."""
    given = cached(device, n, rows=[])
    return given | dict(tree_mask=torch.full(given["q"].shape[:-2], 5, device=device))


def with_intervals(make):
    """Arguments with a mask that has the first keys and the keys around each row, and sinks."""

    def made(device, n=3):
        given = make(device, n)
        row = torch.arange(given["q"].shape[-3])
        bounds = torch.stack([row - 9, row + 4, torch.zeros_like(row), torch.full_like(row, 2)], -1).to(device, I32)
        bounds = bounds.expand(*[1] * (given["q"].dim() - 2), *bounds.shape).contiguous()
        return given | dict(intervals=bounds, s_aux=normal(4, dtype=F32, device=device))

    return made


def scored(operation):
    """The operation with ALiBi, as a Python function of scores over a tensor of slopes."""

    def call(slopes, **given):
        return operation.function(**given, score=lambda s, b, h, q, k: s - slopes[h] * (q - k).abs())

    def made(device, n=3):
        return operation.make(device, n) | dict(slopes=normal(4, dtype=F32, seed=4, device=device))

    return replace(operation, function=call, make=made)


def with_qv(make, **more):
    """Arguments of latent attention."""

    def made(device, n=3):
        given = make(device, n, **more)
        v = given["v_cache" if "v_cache" in given else "v"]
        return given | dict(qv=normal(*given["q"].shape[:-1], v.shape[-1], seed=9, device=device))

    return made


def cached(device, n=3, layout=16, rows=1, head_dims=(64, 32), heads=(4, 2)):
    """Arguments of attention over a cache. Its unused rows are finite, so that any row may be used."""
    rows = rows if isinstance(rows, int) else [j % 4 for j in range(n)]
    given = Cached(device, keys=[10 * n + j for j in range(n)], layout=layout, rows=rows, heads=heads, head_dims=head_dims)
    return dict(q=given.q, k_cache=given.k.nan_to_num(0.5), v_cache=given.v.nan_to_num(0.5)) | given.arguments()


def of_one_length(device, n=3):
    return cached(device, n) | dict(cache_seqlens=8 * n)


def appended(device, n=3, layout=16, rows=1, rotates=True, **options):
    """Arguments with new rows: the last row of each sequence, or the last two rows if new rows are packed."""
    given = cached(device, n, layout=layout, rows=rows, **options)
    heads, *dims = given["k_cache"].shape[2], *(given[name].shape[3] for name in ("k_cache", "v_cache"))
    new = (n, 1) if isinstance(rows, int) else (2 * n,)
    given |= dict(zip("kv", (normal(*new, heads, dim, seed=5, device=device) for dim in dims), strict=True))
    given["cache_seqlens"] = given["cache_seqlens"] - (3 - len(new))
    if len(new) == 1:
        given["cache_seqlens"] = given["cache_seqlens"] - 1
        given["cu_seqlens_k_new"] = ends([2] * n, device)
    if rotates:
        given |= {f"rotary_{name}": normal(300, 16, seed=len(name), device=device) for name in ("cos", "sin")}
    return given


def sparse(device, n=3, rows=2, columns=96, topk=None):
    """Lists of keys with entries that are no row of the cache."""
    cache = normal(5, 16, 1, columns, seed=1, device=device)
    topk = 4 * n if topk is None else topk
    lists = (torch.arange(n * rows * topk).view(n, rows, topk) * 7 % 90 - 2).to(device, I32)
    lengths = (torch.arange(n) * 5).to(device, I32)
    return dict(q=normal(n, rows, 4, columns, device=device), k_cache=cache, indices=lists, topk_length=lengths)


def parts(device, n=3, rows=None, dtype=F32):
    """O and LSE of several parts of the keys. Some rows see no key of a part."""
    rows = (2, 5 * n, 3) if rows is None else rows
    lse = normal(n, *rows, dtype=F32, seed=1, device=device)
    return dict(out_partial=normal(n, *rows, 64, dtype=dtype, device=device), lse_partial=lse.where(lse > -1, -torch.inf))


def tables(device, positions=400, pairs=16):
    angles = torch.outer(torch.arange(float(positions)), 100.0 ** -torch.linspace(0, 1, pairs))
    return dict(cos=angles.cos().to(device), sin=angles.sin().to(device))


def listed(device, batch, rows):
    return (torch.arange(batch * rows).view(batch, rows) * 7 % 300).to(device)


def rotated(device, n=3, **options):
    given = dense(device, n, head_dims=(64, 64), **options)
    return given | tables(device) | dict(q_positions=listed(device, n, given["q"].shape[1]), k_positions=n)


def packed_rotated(device, n=3):
    given = hinted(device, n, in_part=False)
    return given | tables(device) | dict(q_positions=n, k_positions=torch.arange(len(given["k"]), device=device) % 300)


def one(device, n=3, rows=None, rotates=False, listed_rows=False):
    rows = 60 * n if rows is None else rows
    given = dict(x=normal(n, rows, 4, 64, device=device))
    if rotates:
        given |= tables(device) | dict(positions=listed(device, n, rows) if listed_rows else n)
    return given


SCORES = dict(softmax_scale=0.5, causal=True, window_size=(9, 3), softcap=20.0)
OPTIONS = SCORES | dict(attention_chunk=15, sm_margin=2, return_attn_probs=True)
TO_16_BITS = dict(out_dtype=torch.float16)
OF_8_BITS = SCORES | dict(hadamard_seed=2**64 - 3, return_attn_probs=True)
CACHED = SCORES | dict(return_softmax_lse=True)


def refused(inputs, what, **more):
    return dict(no_gradient=f"{inputs} requires grad, and {what} no gradients", inputs=inputs, **more)


FP8 = refused("q, k, v, cos or sin", "attention in 8 bits has", takes_out=False)
CACHE = refused("q, k_cache, v_cache, qv, a descale or s_aux", "attention over a cache has")
APPEND = dict(
    no_gradient="appending k and v to a cache has no gradients, but one of the arguments requires grad",
    transforms="k and v are not supported inside of torch.func's transforms",
    writes=("k_cache", "v_cache"),
)


def attention(make, options=OPTIONS, **more):
    return Operation(fa3.flash_attn_func, make, options, **more)


def of_packed(make, options=OPTIONS, **more):
    return Operation(fa3.flash_attn_varlen_func, make, options, **(dict(inputs="q, k, v or a descale") | more))


def over_cache(make, options=CACHED, **more):
    return Operation(fa3.flash_attn_with_kvcache, make, options, **(CACHE | more))


def appending(make):
    return over_cache(make, **APPEND)


def over_lists(make):
    options = dict(block_table=None, cache_seqlens=None, head_dim_v=64, softmax_scale=0.5)
    refusal = refused("q, a cache or attn_sink", "attention over a cache has")
    return Operation(flash_mla_with_kvcache, make, options, **refusal)


def combining(make, options={}):
    return Operation(fa3.flash_attn_combine, make, options, **refused("out_partial or lse_partial", "a merge has"))


def quantizing(options={}, function=fa3.quantize, **more):
    def make(device, n=3):
        return one(device, n, **more)

    refusal = refused("x, cos or sin", "codes have", takes_out=False)
    if function is fa3.quantize_channels:
        # The backward pass also names cos and sin, which only `quantize` has.
        refusal |= dict(no_gradient="x(, cos or sin)? requires grad, and codes have no gradients", inputs="x")
    return Operation(function, make, options, **refusal)


LATENT = dict(head_dims=(64, 512))
LARGEST = dict(return_max_logits=True)
SHAPES = {
    "grouped heads": dense,
    "any columns": lambda device, n=3: dense(device, n, heads=(3, 1), head_dims=(72, 40)),
    "no rows": lambda device, n=3: dense(device, n, rows=0),
    "no keys": lambda device, n=3: dense(device, n, keys=0),
}
OF_LATENT = "there is qv, for which attention has no gradients"
CODES = dict(options=OPTIONS | TO_16_BITS, no_gradient=OF_CODES)
OF_DENSE_CODES = CODES | dict(inputs="q_descale", transforms="attention has no derivative in forward mode")
OPERATIONS = {
    "dense": attention(dense),
    "dense codes": attention(codes(dense, head_dims=(64, 64)), **OF_DENSE_CODES),
    "dense latent": attention(with_qv(dense, **LATENT), no_gradient=OF_LATENT),
    "dense largest": attention(dense, OPTIONS | LARGEST),
    "dense scored": scored(attention(dense)),
    "packed": of_packed(unhinted),
    "packed hinted": of_packed(hinted),
    "packed codes": of_packed(codes(hinted, head_dims=(64, 64)), **CODES),
    "packed largest": of_packed(hinted, OPTIONS | LARGEST),
    "packed scored": scored(of_packed(hinted)),
    "packed latent": of_packed(with_qv(unhinted, **LATENT), no_gradient=OF_LATENT),
    "cache": over_cache(lambda device, n=3: cached(device, n) | dict(s_aux=normal(4, dtype=F32, device=device))),
    "cache packed": over_cache(lambda device, n=3: cached(device, n, rows=[]) | dict(max_seqlen_q=None)),
    "cache of one length": over_cache(of_one_length),
    "cache latent": over_cache(with_qv(cached, **LATENT)),
    "cache scored": scored(over_cache(cached)),
    "cache largest": over_cache(cached, CACHED | LARGEST),
    "cache sparse": over_lists(sparse),
    "append": appending(appended),
    "append scored": scored(appending(appended)),
    "append packed": appending(lambda device, n=3: appended(device, n, rows=[]) | dict(max_seqlen_q=None)),
    "combine": combining(parts, dict(out_dtype=torch.float16)),
    "fp8": Operation(fa3.flash_attn_fp8_func, lambda device, n=3: dense(device, n, head_dims=(64, 64)), OF_8_BITS, **FP8),
    "fp8 rotated": Operation(fa3.flash_attn_fp8_func, rotated, OF_8_BITS | dict(interleaved=True, v_channels=True), **FP8),
    "packed fp8": Operation(fa3.flash_attn_varlen_fp8_func, packed_rotated, OF_8_BITS, **FP8),
    "quantize": quantizing(dict(interleaved=True, hadamard_seed=2**64 - 3, block_rows=64), rotates=True),
    "quantize listed": quantizing(dict(transposed=True), rotates=True, listed_rows=True),
    "quantize heads": quantizing(dict(hadamard_seed=5, scales_of="heads", heads_per_scale=4)),
    "quantize channels": quantizing(dict(transposed=True), fa3.quantize_channels),
}
# Calls with other sizes and options. The laws of torch's operators hold for them, too.
EDGES = {
    **{f"dense, {name}": attention(make) for name, make in SHAPES.items() if name != "grouped heads"},
    "dense, sinks": attention(lambda device, n=3: dense(device, n) | dict(s_aux=normal(4, dtype=F32, device=device))),
    "dense, intervals": attention(with_intervals(dense), dict(softmax_scale=0.5, softcap=20.0, return_attn_probs=True)),
    "dense, largest of no rows": attention(SHAPES["no rows"], OPTIONS | LARGEST),
    "codes by channels": attention(codes_by_channels, **OF_DENSE_CODES),
    "packed, all rows": of_packed(lambda device, n=3: unhinted(device, n, in_part=False)),
    "packed, intervals": of_packed(with_intervals(hinted), dict(softmax_scale=0.5, softcap=20.0, return_attn_probs=True)),
    "packed, causal sequences": of_packed(some_causal, dict(softmax_scale=0.5, return_attn_probs=True)),
    "packed, no sequences": of_packed(lambda device, n=3: hinted(device, n, lengths=[])),
    "packed, no rows": of_packed(lambda device, n=3: hinted(device, n, lengths=[(0, 0)])),
    "cache, intervals": over_cache(
        with_intervals(lambda device, n=3: cached(device, n, rows=[])), dict(softmax_scale=0.5, softcap=20.0, return_softmax_lse=True)
    ),
    "cache, tree": over_cache(tree, dict(softmax_scale=0.5, return_softmax_lse=True)),
    "cache, entries": over_cache(lambda device, n=3: cached(device, n, layout="seqused")),
    "cache, padded": over_cache(lambda device, n=3: cached(device, n, layout="padded")),
    "cache, all": over_cache(lambda device, n=3: cached(device, n, layout="16 padded indexed", rows=[])),
    "cache sparse, latent columns": over_lists(lambda device, n=3: sparse(device, n, columns=64)),
    "cache sparse, no rows": over_lists(lambda device, n=3: sparse(device, n, rows=0, columns=64)),
    "cache sparse, no entries": over_lists(lambda device, n=3: sparse(device, n, topk=0)),
    "append, entries": appending(lambda device, n=3: appended(device, n, layout="seqused", rotates=False)),
    "append, largest": Operation(fa3.flash_attn_with_kvcache, appended, CACHED | LARGEST, **(CACHE | APPEND)),
    "combine, packed": combining(lambda device, n=3: parts(device, n, rows=(7, 3), dtype=BF16)),
    "combine, no rows": combining(lambda device, n=3: parts(device, n, rows=(2, 0, 3))),
    "fp8, no rows": Operation(fa3.flash_attn_fp8_func, lambda device, n=3: rotated(device, n, rows=0), OF_8_BITS, **FP8),
    "fp8, no keys": Operation(fa3.flash_attn_fp8_func, lambda device, n=3: rotated(device, n, keys=0), OF_8_BITS, **FP8),
    "quantize, given scale": quantizing(dict(scale=0.25), rotates=True),
    "quantize, tensor": quantizing(dict(scales_of="tensor", transposed=True), rotates=True),
    "quantize, each head": quantizing(dict(scales_of="heads")),
    **{f"quantize, {n} rows": quantizing(rows=n) for n in (0, 1, 129)},
    **{f"channels, {n} rows": quantizing(function=fa3.quantize_channels, rows=n) for n in (0, 1, 129)},
}
