"""A table of doors: functions of this package, or of software that calls it, by which attention and its gradients are
computed. Tests run one law over all of them.
"""

from dataclasses import dataclass
from typing import Callable

import torch
from caching import Cached
from dense import tensors
from packing import USED, Packed, normal
from reference import judge, judge_gradients

import fa3
from fa3 import flash_attn, sglang
from fa3.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

BF16 = torch.bfloat16
ATEN = torch.ops.aten
# The features that a door may offer, as options of `flash_attn_func`.
FEATURES = {
    "plain": dict(),
    "causal": dict(causal=True),
    "left": dict(causal=True, window_size=(9, 0)),
    "window": dict(window_size=(9, 3)),
    "chunks": dict(causal=True, attention_chunk=15),
    "scale": dict(softmax_scale=0.3),
    "softcap": dict(softcap=5.0),
    "sinks": dict(causal=True, s_aux=[-3.0, 0.5, 9.0, -torch.inf]),
}
ALL = list(FEATURES)
OF_2 = ["plain", "causal", "left", "window", "scale", "softcap"]


class Dense:
    """A dense batch, with the methods that `Packed` has."""

    def __init__(self, device, dtype=BF16, heads=(4, 2), keys=40):
        self.q, self.k, self.v = tensors(device, 33, keys, heads, dtype=dtype)

    def call(self, tensors, **options):
        return fa3.flash_attn_func(*tensors, return_attn_probs=True, **options)

    def given(self, of_lse=False):
        return normal(*self.q.shape[:3], self.v.shape[3], dtype=self.q.dtype, seed=3, device=self.q.device), None

    def judge(self, out, lse, **options):
        judge(out, lse, self.q, self.k, self.v, **options)

    def judge_gradients(self, results, dout, **options):
        judge_gradients(results, self.q, self.k, self.v, dout, **options)


def shared(batch):
    """A batch in which Q, K and V have equal numbers of rows and of heads."""
    return lambda device, dtype: batch(device, dtype, heads=(4, 4), **(dict(keys=33) if batch is Dense else dict(lengths=[(n, n) for n in (7, 0, 33, 130)], behind=(5, 5))))


def cached(**options):
    return lambda device, dtype: Cached(device, dtype, **options)


@dataclass
class Door:
    """`call` computes O and LSE of a batch from its tensors and options. Its gradients are autograd's if `backward` is
    True. If it is a function, it computes them; if it is False, there are none.
    """

    batch: Callable
    call: Callable
    offers: list
    backward: Callable | bool = True
    # Whether the door is an operator of torch, in whose place our kernels must be.
    is_torchs: bool = False


def lists(b):
    return dict(cu_seqlens_q=b.ends[0], cu_seqlens_k=b.ends[1], max_seqlen_q=130, max_seqlen_k=257)


def first_two(results):
    return results[0], results[1]


def names_of_interface(b, used, window_size=(-1, -1), **options):
    """The low-level interface takes the two sides of a window, and its backward pass says sequed for seqused."""
    options |= dict(window_size_left=window_size[0], window_size_right=window_size[1], sm_margin=2)
    return options | (lists(b) | dict(zip((f"{used}_q", f"{used}_k"), b.used)) if isinstance(b, Packed) else {})


def of_interface(b, x, **options):
    place = torch.full((*x[0].shape[:-1], x[2].shape[-1]), torch.nan, dtype=x[0].dtype, device=x[0].device)
    out, lse, *more = _flash_attn_forward(*x, **names_of_interface(b, "seqused", **options), out_=place)
    assert out is place and more == [None, None]
    return out, lse


def backward_of_interface(b, dout, x, out, lse, causal=False, **options):
    given = dict(is_causal=causal, **names_of_interface(b, "sequed", **options))
    outputs = dict(zip(("dq", "dk", "dv"), (torch.full_like(y, torch.nan) for y in x)))
    results = _flash_attn_backward(dout, *x, out, lse, **given, **outputs)
    assert all(y is z for y, z in zip(results, outputs.values())) and results[3] is None
    return results[:3]


def earlier(b, x, **options):
    """Passes tensors by position, and other arguments by the names that earlier versions had."""
    lists = *b.ends, None, None, None, 130, 257
    out = torch.empty_like(x[0])
    results = _flash_attn_forward(*x, *[None] * 4, *lists, *[None] * 9, out=out, **options)
    assert results[0] is out
    return first_two(results)


def backward_of_earlier(b, dout, x, out, lse, **options):
    outputs = [torch.full_like(y, torch.nan) for y in x]
    return _flash_attn_backward(dout, *x, out, lse, *b.ends, None, None, 130, 257, *outputs, **options)[:3]


def pages_of_interface(b, x, **options):
    """Calls the function as Megatron-LM does, with hints that change no result."""
    numbers = dict(max_seqlen_q=7, max_seqlen_k=200, scheduler_metadata=torch.zeros(3), pack_gqa=True, num_splits=3)
    given = dict(cu_seqlens_q=b.ends, seqused_k=b.lengths, page_table=b.table)
    return first_two(_flash_attn_forward(q=x[0], k=x[1], v=x[2], **given, **numbers, **options))


def of_2(function, arrange=lambda b, x: (*x, *(lists(b).values() if isinstance(b, Packed) else ()))):
    return lambda b, x, **options: first_two(function(*arrange(b, x), return_attn_probs=True, **options))


def cache_of_2(b, x, **options):
    given = dict(cache_seqlens=b.lengths, block_table=b.table if b.page_rows else None)
    return flash_attn.flash_attn_with_kvcache(*x, **given, return_softmax_lse=True, **options)


def pages_of_2(b, x, **options):
    """flash-attn 2 takes the lengths of a paged cache as cu_seqlens."""
    ends = torch.nn.functional.pad(b.lengths.cumsum(0), (1, 0)).int()
    results = flash_attn.flash_attn_varlen_func(*x, b.ends, ends, 7, 200, return_attn_probs=True, block_table=b.table, **options)
    return first_two(results)


def cache_of_sglang(b, x, s_aux=None, **options):
    given = dict(cache_seqlens=b.lengths, page_table=b.table, cu_seqlens_q=b.ends, max_seqlen_q=7, num_splits=0)
    given |= dict(cu_seqlens_k_new=torch.zeros_like(b.ends), scheduler_metadata=torch.arange(9, device=x[0].device))
    named = dict(zip(("q", "k_cache", "v_cache"), x))
    return first_two(sglang.flash_attn_with_kvcache(**named, **given, sinks=s_aux, return_softmax_lse=True, **options))


def rows_of_sglang(b, x, s_aux=None, **options):
    given = lists(b) if isinstance(b, Packed) else dict(cu_seqlens_q=None, cu_seqlens_k=None)
    return first_two(sglang.flash_attn_varlen_func(*x, **given, sinks=s_aux, return_softmax_lse=True, **options))


def sdpa(b, x, causal=False, softmax_scale=None):
    """Calls the operator that torch calls once it has chosen flash attention."""
    heads_first = [y.transpose(1, 2) for y in x]
    out, lse, *_ = ATEN._scaled_dot_product_flash_attention(*heads_first, is_causal=causal, scale=softmax_scale)
    return out.transpose(1, 2), lse


def below_sdpa(b, x, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """Passes wrong maximum lengths: for a dense batch the shapes of the tensors count."""
    sides = dict(window_size_left=window_size[0], window_size_right=window_size[1])
    return first_two(ATEN._flash_attention_forward(*x, None, None, 1000, 1000, 0.0, causal, False, scale=softmax_scale, **sides))


def varlen_attn(b, x, causal=False, softmax_scale=None, window_size=(-1, -1)):
    from torch.nn.attention import varlen

    window = (window_size[0], 0) if causal else window_size
    options = dict(window_size=window, scale=softmax_scale, return_aux=varlen.AuxRequest(lse=True))
    return varlen.varlen_attn(*x, *b.ends, 130, 257, **options)


PAGES = cached(layout=16, rows=[2, 0, 7, 1, 3, 1])
DOORS = {
    "flash_attn_func": Door(Dense, lambda b, x, **options: b.call(x, **options), ALL),
    "flash_attn_varlen_func": Door(Packed, lambda b, x, **o: b.call((130, 257), x, return_attn_probs=True, **o), ALL),
    "flash_attn_with_kvcache": Door(PAGES, lambda b, x, **o: b.call(x, return_softmax_lse=True, **o), ALL, False),
    "interface": Door(Dense, of_interface, ALL[:-1], backward_of_interface),
    "interface, packed": Door(lambda device, dtype: Packed(device, dtype, used=USED[0]), of_interface, ALL[:-1], backward_of_interface),
    "interface, earlier": Door(Packed, earlier, ALL[:-1], backward_of_earlier),
    "interface, pages": Door(PAGES, pages_of_interface, ALL[:-1], False),
    "2": Door(Dense, of_2(flash_attn.flash_attn_func), OF_2),
    "2, kv": Door(Dense, of_2(flash_attn.flash_attn_kvpacked_func, lambda b, x: (x[0], torch.stack(x[1:], 2))), OF_2),
    "2, qkv": Door(shared(Dense), of_2(flash_attn.flash_attn_qkvpacked_func, lambda b, x: [torch.stack(x, 2)]), OF_2),
    "2, packed": Door(Packed, of_2(flash_attn.flash_attn_varlen_func), OF_2),
    "2, packed kv": Door(
        Packed,
        of_2(flash_attn.flash_attn_varlen_kvpacked_func, lambda b, x: (x[0], torch.stack(x[1:], 1), *lists(b).values())),
        OF_2,
    ),
    "2, packed qkv": Door(
        shared(Packed),
        of_2(flash_attn.flash_attn_varlen_qkvpacked_func, lambda b, x: (torch.stack(x, 1), b.ends[0], 130)),
        OF_2,
    ),
    "2, pages": Door(PAGES, pages_of_2, OF_2, False),
    "2, cache": Door(cached(rows=3), cache_of_2, OF_2, False),
    "2, pages of a cache": Door(cached(layout=16), cache_of_2, OF_2, False),
    "sglang": Door(cached(layout=1, rows=[2, 0, 7, 1, 3, 1]), cache_of_sglang, [*OF_2, "sinks"], False),
    "sglang, packed": Door(Packed, rows_of_sglang, OF_2),
    "sglang, dense": Door(Dense, rows_of_sglang, [*OF_2, "sinks"]),
    "sdpa": Door(Dense, sdpa, ["plain", "causal", "scale"], is_torchs=True),
    "below sdpa": Door(Dense, below_sdpa, ["plain", "causal", "left", "window", "scale"], is_torchs=True),
    "varlen_attn": Door(Packed, varlen_attn, ["plain", "causal", "left", "window", "scale"], is_torchs=True),
}
