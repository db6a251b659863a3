"""Attention by its definition, its gradients, the error law that judges results by them,
and quantization by its definition.
"""

import math

import torch


def standard(q, k, v, scale=None, window=(-1, -1), softcap=0.0, dtype=torch.float64):
    """O and LSE, computed and rounded in `dtype` as a framework without a fused kernel does.
    Autograd can differentiate it.
    """
    q, k, v = heads_first(q, k, v, dtype)
    scores, empty = scores_of(q, k, scale, window, softcap)
    # A row without visible keys: 0, where softmax would say NaN.
    p = scores.softmax(-1).masked_fill(empty, 0)
    return (p @ v).transpose(1, 2), scores.logsumexp(-1).masked_fill(empty.squeeze(-1), -math.inf)


def heads_first(q, k, v, dtype):
    """Q, K and V (batch, heads_q, seqlen, head_dim)."""
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def scores_of(q, k, scale, window, softcap):
    """Scores, those of hidden keys -inf, and which rows see no key: their scores are as without a mask."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if isinstance(window, torch.Tensor):
        # Which keys each query sees, (batch or 1, heads_q or 1, seqlen_q, seqlen_k).
        hidden = ~window
        empty = hidden.all(-1, keepdim=True)
        return scores.masked_fill(hidden & ~empty, -math.inf), empty
    # Masks align at the bottom right: the last query stands at the last key.
    (rows, keys), (left, right, *chunk) = scores.shape[-2:], window
    position = torch.arange(rows, device=q.device)[:, None] + keys - rows
    distance = position - torch.arange(keys, device=q.device)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    if chunk:
        hidden |= position // chunk[0] != torch.arange(keys, device=q.device) // chunk[0]
    empty = hidden.all(-1, keepdim=True)
    return scores.masked_fill(hidden & ~empty, -math.inf), empty


def gradients(q, k, v, dout, dlse=None, scale=None, window=(-1, -1), softcap=0.0, dtype=torch.float64, magnitudes=False):
    """dQ, dK and dV by the chain rule, each matrix rounded to `dtype`. As in fused kernels, D is that of the rounded O.

    With `magnitudes` they are the sums of the absolute values of what is added up, dP, D and dLSE taken apart.
    """
    heads = (k.shape[2], q.shape[2] // k.shape[2])
    q, k, v = heads_first(q, k, v, dtype)
    dout = dout.to(dtype).transpose(1, 2)
    scores, empty = scores_of(q, k, scale, window, softcap)
    p = scores.softmax(-1).masked_fill(empty, 0)
    o = p @ v
    if magnitudes:
        q, k, v, dout, o = q.abs(), k.abs(), v.abs(), dout.abs(), -o.abs()
        dlse = None if dlse is None else dlse.abs()
    # The matrices of one type, what lies between them not rounded to 16 bits.
    wide = torch.promote_types(dtype, torch.float32)
    dp = dout @ v.transpose(-1, -2)
    delta = (dout.to(wide) * o.to(wide)).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.to(wide).unsqueeze(-1)
    ds = p.to(wide) * (dp.to(wide) - delta) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        # Hidden scores are -inf, and their P is 0.
        ds = ds * (1 - (scores.to(wide) / softcap).clamp(min=-1).square())
    ds = ds.to(dtype)
    dq, dk, dv = ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout
    dk, dv = (x.unflatten(1, heads).sum(2) for x in (dk, dv))
    return tuple(x.transpose(1, 2) for x in (dq, dk, dv))


def law_of(oracle, baseline, lse, magnitude, dtype):
    """How far from the oracle a result may be: 2 max |baseline - oracle| + atol + noise.

    atol is what adding and subtracting 0.3 costs in `dtype`, noise the rounding of exponents to float32.
    """
    rounded = oracle.to(dtype)
    atol = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    seen = lse[lse.isfinite()]
    size = 1 + (seen.abs().max().item() if seen.numel() else 0)
    noise = 8 * 2.0**-24 * size * (magnitude.abs().max().item() if magnitude.numel() else 0)
    return 2 * (baseline - oracle).abs().max().item() + atol + noise


def judge(out, lse, q, k, v, **options):
    """Fails unless O and LSE are as near to the definition as their precision can be expected to be.

    The oracle is float64, the baseline `standard` attention in the precision of O on the same inputs.
    """
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    oracle, oracle_lse = standard(q, k, v, **options)
    baseline, _ = standard(q, k, v, dtype=q.dtype, **options)
    assert (out.shape, lse.shape) == (oracle.shape, oracle_lse.shape)
    if oracle.numel() == 0:
        return
    seen = oracle_lse.isfinite()
    bound = law_of(oracle, baseline, oracle_lse, v, q.dtype)
    error = (out - oracle).abs().max().item()
    assert error <= bound, f"o is {error:.3e} from the oracle where the law allows {bound:.3e}"
    assert (lse[~seen] == -math.inf).all(), "lse of rows that see no key"
    assert (out.transpose(1, 2)[~seen] == 0).all(), "o of rows that see no key"
    off = (lse - oracle_lse)[seen].abs() / oracle_lse[seen].abs().clamp(min=1)
    assert (off <= 1e-5).all(), f"lse is {off.max().item():.3e} from the oracle, relative to max(1, |oracle|)"


def judge_gradients(results, q, k, v, dout=None, dlse=None, **options):
    """Fails unless dQ, dK and dV are as near to float64 autograd as their precision can be expected to be.

    The baseline is `gradients` in their precision. What nothing is added up for is 0.
    """
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, lse = standard(*leaves, **options)
    dout = torch.zeros_like(o) if dout is None else dout.to(o.dtype)
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    oracles = torch.autograd.grad((o, lse), leaves, (dout, dlse.to(lse.dtype)))
    baselines = gradients(q, k, v, dout, dlse, dtype=q.dtype, **options)
    magnitudes = gradients(q, k, v, dout, dlse, magnitudes=True, **options)
    for name, x, like, oracle, baseline, magnitude in zip(
        ("dq", "dk", "dv"), results, (q, k, v), oracles, baselines, magnitudes, strict=True
    ):
        assert (x.dtype, x.shape) == (like.dtype, like.shape), name
        # Heads lie outside rows where they do so in the input.
        assert x.is_contiguous() or (x.stride(1) < x.stride(2) and like.stride(1) < like.stride(2)), name
        if x.numel() == 0:
            continue
        bound = law_of(oracle, baseline, lse.detach(), magnitude, q.dtype)
        error = (x - oracle).abs().max().item()
        assert error <= bound, f"{name} is {error:.3e} from the oracle where the law allows {bound:.3e}"
        assert (x[magnitude == 0] == 0).all(), f"{name} where nothing is added up"


def rotated(x, cos, sin, interleaved=False, positions=0):
    """Rotary embedding in float32, each product and each sum rounded. Rows at positions outside the tables are NaN."""
    batch, seqlen, _, head_dim = x.shape
    if not isinstance(positions, torch.Tensor):
        positions = torch.arange(positions, positions + seqlen, device=x.device).expand(batch, -1)
    known = (positions >= 0) & (positions < len(cos))
    row = positions.where(known, 0).long()
    cos, sin = cos.float()[row].unsqueeze(2), sin.float()[row].unsqueeze(2)
    pairs = cos.shape[-1]
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    x = x.float()
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out.where(known[:, :, None, None], math.nan)


def incoherent(head_dim, seed):
    """M of incoherent processing, (head_dim, head_dim): random signs and a Hadamard matrix, twice if they do not fit.
    """
    width = 1 << (head_dim.bit_length() - 1)

    def sign(index):
        mask = (1 << 64) - 1
        z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return -1.0 if (z ^ (z >> 31)) >> 63 else 1.0

    def signs(start):
        return torch.tensor([sign(start + i) for i in range(head_dim)], dtype=torch.float64).diag()

    def hadamard(start):
        entries = [[(-1.0) ** (i & j).bit_count() / math.sqrt(width) for j in range(width)] for i in range(width)]
        matrix = torch.eye(head_dim, dtype=torch.float64)
        matrix[start : start + width, start : start + width] = torch.tensor(entries, dtype=torch.float64)
        return matrix

    matrix = signs(0) @ hadamard(0)
    return matrix if width == head_dim else matrix @ signs(head_dim) @ hadamard(head_dim - width)


def as_products_read(codes):
    """Codes (batch, seqlen, heads, head_dim) as (batch, heads, head_dim, keys): whole 128 keys, zeros at the end, and
    each 16 keys in the order in which products read them."""
    batch, seqlen, heads, head_dim = codes.shape
    keys = torch.zeros(batch, heads, head_dim, -(-seqlen // 128) * 128, dtype=torch.uint8, device=codes.device)
    keys[..., :seqlen] = codes.view(torch.uint8).permute(0, 2, 3, 1)
    order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    return keys.unflatten(-1, (-1, 16))[..., order].flatten(-2).contiguous().view(codes.dtype)


def quantized(
    x,
    cos=None,
    sin=None,
    interleaved=False,
    positions=0,
    hadamard_seed=None,
    block_rows=128,
    scale=None,
    transposed=False,
    scales_of="blocks",
    heads_per_scale=1,
):
    """Codes and scales of `fa3.quantize` by their definition."""
    y = x.float() if cos is None else rotated(x, cos, sin, interleaved, positions)
    batch, seqlen, heads, head_dim = y.shape
    if hadamard_seed is not None:
        y = (y.double() @ incoherent(head_dim, hadamard_seed).to(y.device)).float()
    y = y.where(y.isfinite(), math.nan)
    # Whole blocks, and one more of zeros: there is a maximum where there are no rows.
    blocks = -(-seqlen // block_rows)
    padded = y.new_zeros(batch, (blocks + 1) * block_rows, heads, head_dim)
    padded[:, :seqlen] = y.abs().nan_to_num(0.0)
    if scale is not None:
        scales = torch.full((1,), scale, dtype=torch.float32, device=y.device)
        by_row = scales
    elif scales_of == "tensor":
        scales = scale_of(torch.nn.functional.pad(padded.flatten(), (0, 1)).amax(0, keepdim=True))
        by_row = scales
    elif scales_of == "heads":
        scales = scale_of(padded.unflatten(2, (-1, heads_per_scale)).amax((1, 3, 4)))
        by_row = scales.repeat_interleave(heads_per_scale, 1)[:, None, :, None]
    else:
        amax = padded[:, : blocks * block_rows].unflatten(1, (blocks, block_rows)).amax((2, 4)).transpose(1, 2)
        scales = scale_of(amax).contiguous()
        by_row = scales.transpose(1, 2).repeat_interleave(block_rows, 1)[:, :seqlen, :, None]
    codes = (y / by_row).clamp(-448, 448).to(torch.float8_e4m3fn)
    return as_products_read(codes) if transposed else codes, scales


def quantized_channels(x, transposed=False):
    """Codes, scales and means of `fa3.quantize_channels` by their definition, the means summed in float64."""
    y = x.float()
    y = y.where(y.isfinite(), math.nan)
    mean = (y.double().nan_to_num(0.0).sum(1) / max(x.shape[1], 1)).float()
    centred = y - mean.unsqueeze(1)
    # With a row of zeros, of which there is a maximum where there are no others.
    amax = torch.nn.functional.pad(centred.abs().nan_to_num(0.0), (0, 0, 0, 0, 0, 1)).amax(1)
    scales = scale_of(amax)
    codes = (centred / scales.unsqueeze(1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return as_products_read(codes) if transposed else codes, scales, mean


def scale_of(amax):
    """The scale of numbers up to amax: 1 for zeros."""
    return (amax / 448).clamp(min=torch.finfo(torch.float32).tiny).masked_fill(amax == 0, 1.0)
