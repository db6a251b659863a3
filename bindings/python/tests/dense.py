"""Batches of sequences of one length: their results and gradients, judged by the definition."""

import torch
from packing import normal
from reference import judge, judge_gradients

from fa3 import flash_attn_func


def check(q, k, v, causal=False, window_size=(-1, -1), softmax_scale=None, softcap=0.0):
    """Computes O and LSE, judges, and returns what was computed."""
    options = dict(causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap)
    results = flash_attn_func(q, k, v, **options, return_attn_probs=True)
    # Without LSE it is the same.
    assert torch.equal(results[0], flash_attn_func(q, k, v, **options))
    judge(*results, q, k, v, scale=softmax_scale, window=(window_size[0], 0) if causal else window_size, softcap=softcap)
    return results


def gradients(q, k, v, dout=None, dlse=None, deterministic=True, **options):
    """dQ, dK and dV of O and LSE with these gradients, the same bits in every run."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    results = flash_attn_func(*leaves, return_attn_probs=True, deterministic=deterministic, **options)
    used = [(result, given) for result, given in zip(results, (dout, dlse), strict=True) if given is not None]
    return torch.autograd.grad([result for result, _ in used], leaves, [given for _, given in used])


def check_gradients(
    q, k, v, causal=False, window_size=(-1, -1), softmax_scale=None, softcap=0.0, of_o=True, of_lse=True, deterministic=True
):
    """Computes with random gradients of O and LSE, judges, and returns what was computed."""
    batch, seqlen, heads, _ = q.shape
    dout = normal(batch, seqlen, heads, v.shape[3], dtype=q.dtype, seed=1, device=q.device) if of_o else None
    dlse = normal(batch, heads, seqlen, dtype=torch.float32, seed=2, device=q.device) if of_lse else None
    options = dict(causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap)
    results = gradients(q, k, v, dout, dlse, deterministic, **options)
    window = (window_size[0], 0) if causal else window_size
    judge_gradients(results, q, k, v, dout, dlse, scale=softmax_scale, window=window, softcap=softcap)
    return results
