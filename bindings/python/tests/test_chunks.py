"""Chunks of keys: a query sees only keys of its own chunk."""

import pytest
import torch
from caching import Cached
from packing import normal
from reference import judge, judge_gradients

from fa3 import flash_attn_func, flash_attn_varlen_func

BF16 = torch.bfloat16
MASKS = [
    dict(causal=True, attention_chunk=70),
    dict(attention_chunk=64),
    dict(window_size=(20, 9), attention_chunk=33),
    # Longer than all keys.
    dict(attention_chunk=1000),
]


def window(causal=False, window_size=(-1, -1), attention_chunk=0):
    """The mask as the reference takes it."""
    left, right = window_size
    return left, 0 if causal else right, attention_chunk


def problem(device, rows, keys):
    shapes = [(2, rows, 4, 64), (2, keys, 2, 64), (2, keys, 2, 64), (2, rows, 4, 64)]
    return [normal(*shape, dtype=BF16, seed=seed, device=device) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("rows, keys", [(150, 150), (60, 200), (150, 40)])
def test_results_and_gradients(device, rows, keys, mask):
    q, k, v, dout = problem(device, rows, keys)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, **mask, return_attn_probs=True)
    judge(out.detach(), lse.detach(), *(x.detach() for x in leaves), window=window(**mask))
    results = torch.autograd.grad(out, leaves, dout)
    judge_gradients(results, *(x.detach() for x in leaves), dout, window=window(**mask))


def test_chunks_are_sequences(device):
    """Under a causal mask, chunks of as many rows are what sequences of their own are."""
    q, k, v, _ = problem(device, 160, 160)
    out = flash_attn_func(q, k, v, causal=True, attention_chunk=40)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    ends = torch.arange(0, 321, 40, dtype=torch.int32, device=device)
    apart = flash_attn_varlen_func(*packed, ends, ends, 40, 40, causal=True)
    torch.testing.assert_close(out.flatten(0, 1), apart, rtol=1e-2, atol=1e-2)
    both = torch.tensor([0, 160, 320], dtype=torch.int32, device=device)
    of_lists = flash_attn_varlen_func(*packed, both, both, 160, 160, causal=True, attention_chunk=40)
    torch.testing.assert_close(of_lists, apart, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("rows", [1, [2, 0, 7, 1, 3, 1]], ids=str)
@pytest.mark.parametrize("layout", ["padded", 16])
def test_caches(device, layout, rows, splits):
    """Chunks are counted from a sequence's first key, behind its padding."""
    cached = Cached(device, layout=layout, rows=rows)
    for mask in MASKS[:3]:
        out, lse = cached.call(return_softmax_lse=True, num_splits=splits, **mask)
        for q, k, v, of_o, of_lse in cached.sequences():
            judge(out[of_o], lse[of_lse].contiguous(), q, k, v, window=window(**mask))
