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


# Functions of rows and keys that make intervals, for masks that are more than a window.


def documents(rows, keys):
    """A causal mask within documents of 100 rows."""
    row = torch.arange(rows)
    return torch.stack((row // 100 * 100, row + 1), -1)[None, None]


def sink_and_window(rows, keys):
    """The first 4 keys, and the last 70 keys up to the row's position, which is shifted by 3 for each head."""
    row = torch.arange(rows) + torch.arange(4)[:, None] * 3
    sink = torch.tensor([0, 4]).expand(*row.shape, 2)
    return torch.cat((row[..., None] - 69, row[..., None] + 1, sink), -1)[None]


def anything(rows, keys):
    """Random intervals for each sequence and head. Some numbers lie outside all bounds, and some rows see no key."""
    generator = torch.Generator().manual_seed(0)
    bounds = torch.randint(-20, keys + 30, (2, 4, rows, 4), generator=generator)
    bounds[..., 0] = torch.where(bounds[..., 0] % 7 == 0, -(2**31), bounds[..., 0])
    bounds[..., 3] = torch.where(bounds[..., 3] % 7 == 0, 2**31 - 1, bounds[..., 3])
    bounds[:, :, ::9] = torch.tensor([5, 5, 9, 3])
    return bounds


def padding(rows, keys):
    """The first keys of each of two sequences. The second sequence has none."""
    ends = torch.tensor([keys // 3, 0])
    return torch.stack((torch.zeros(2, dtype=torch.int64), ends), -1)[:, None, None].expand(2, 1, rows, 2)


def touching(rows, keys):
    """A window in two parts that touch. The second part comes first."""
    row = torch.arange(rows)
    return torch.stack((row, torch.full_like(row, 2**31 - 1), row - 70, row), -1)[None, None].expand(2, 4, rows, 4)


INTERVALS = [documents, sink_and_window, anything, padding, touching]
