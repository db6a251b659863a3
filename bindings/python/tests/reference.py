"""Attention by its definition, and the error law that judges a result by it."""

import math

import torch


def standard(q, k, v, scale=None, window=(-1, -1), softcap=0.0, dtype=torch.float64):
    """O and LSE, computed and rounded in `dtype` as a framework without a fused kernel does."""
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    # Masks align at the bottom right: the last query stands at the last key.
    (rows, keys), (left, right) = scores.shape[-2:], window
    position = torch.arange(rows, device=q.device)[:, None] + keys - rows
    distance = position - torch.arange(keys, device=q.device)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    scores = scores.masked_fill(hidden, -math.inf)
    # A row without visible keys: 0, where softmax would say NaN.
    p = scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0)
    return (p @ v).transpose(1, 2), scores.logsumexp(-1)


def judge(out, lse, q, k, v, **options):
    """Fails unless O and LSE are as near to the definition as their precision can be expected to be.

    The law: max |o - oracle| <= 2 max |standard - oracle| + atol + noise. The oracle is float64, `standard` attention is computed
    in the precision of O on the same inputs. atol is what adding and subtracting 0.3 costs in that precision, noise the
    rounding of exponents to float32.
    """
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    oracle, oracle_lse = standard(q, k, v, **options)
    baseline, _ = standard(q, k, v, dtype=q.dtype, **options)
    assert (out.shape, lse.shape) == (oracle.shape, oracle_lse.shape)
    if oracle.numel() == 0:
        return
    rounded = oracle.to(q.dtype)
    atol = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    seen = oracle_lse.isfinite()
    size = 1 + (oracle_lse[seen].abs().max().item() if seen.any() else 0)
    noise = 8 * 2.0**-24 * size * (v.abs().max().item() if v.numel() else 0)
    bound = 2 * (baseline - oracle).abs().max().item() + atol + noise
    error = (out - oracle).abs().max().item()
    assert error <= bound, f"o is {error:.3e} from the oracle where the law allows {bound:.3e}"
    assert (lse[~seen] == -math.inf).all(), "lse of rows that see no key"
    assert (out.transpose(1, 2)[~seen] == 0).all(), "o of rows that see no key"
    off = (lse - oracle_lse)[seen].abs() / oracle_lse[seen].abs().clamp(min=1)
    assert (off <= 1e-5).all(), f"lse is {off.max().item():.3e} from the oracle, relative to max(1, |oracle|)"
