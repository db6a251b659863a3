"""Dense batches: their results and gradients, judged by the definition."""

import torch
from packing import normal
from reference import judge, judge_gradients

from fa3 import flash_attn_func

BF16, F32 = torch.bfloat16, torch.float32


def tensors(device, rows=33, keys=40, heads=(4, 2), head_dims=(64, 64), dtype=BF16, batch=2):
    """Makes Q, K and V."""
    shapes = [(rows, heads[0], head_dims[0]), (keys, heads[1], head_dims[0]), (keys, heads[1], head_dims[1])]
    return [normal(batch, *shape, dtype=dtype, seed=seed, device=device) for seed, shape in enumerate(shapes)]


def check(q, k, v, **options):
    """Computes O and LSE, judges, and returns what was computed."""
    results = flash_attn_func(q, k, v, **options, return_attn_probs=True)
    # A call without LSE must give the same O.
    assert torch.equal(results[0], flash_attn_func(q, k, v, **options))
    judge(*results, q, k, v, **options)
    return results


def gradients(q, k, v, dout=None, dlse=None, deterministic=True, s_aux=None, **options):
    """dQ, dK, dV and the gradient of the sinks, for the gradients `dout` and `dlse` of O and LSE."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, s_aux) if x is not None]
    sinks = dict(s_aux=None if s_aux is None else leaves[3])
    results = flash_attn_func(*leaves[:3], **sinks, return_attn_probs=True, deterministic=deterministic, **options)
    used = [(result, given) for result, given in zip(results, (dout, dlse), strict=True) if given is not None]
    return torch.autograd.grad([result for result, _ in used], leaves, [given for _, given in used])


def check_gradients(q, k, v, of_o=True, of_lse=True, deterministic=True, **options):
    """Computes gradients from random gradients of O and LSE, judges them, and returns them."""
    batch, seqlen, heads, _ = q.shape
    dout = normal(batch, seqlen, heads, v.shape[3], dtype=q.dtype, seed=1, device=q.device) if of_o else None
    dlse = normal(batch, heads, seqlen, dtype=F32, seed=2, device=q.device) if of_lse else None
    results = gradients(q, k, v, dout, dlse, deterministic, **options)
    judge_gradients(results, q, k, v, dout, dlse, **options)
    return results
