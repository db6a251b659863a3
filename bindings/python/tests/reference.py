"""The definitions of attention, its gradients and quantization, and the error law that judges results by them."""

import math

import torch


# The options of this package's functions that the definition of attention has, too.
SCORES = "softmax_scale", "causal", "window_size", "attention_chunk", "softcap", "s_aux", "qv", "intervals"


def scores_in(options):
    """The options that change what attention computes."""
    return {name: x for name, x in options.items() if name in SCORES}


def standard(q, k, v, qv=None, s_aux=None, dtype=torch.float64, **options):
    """O and LSE, with each intermediate result rounded to `dtype`, as in a framework without a fused kernel. Autograd
    can differentiate the function.
    """
    q, k, v = heads_first(q, k, v, qv, dtype)
    scores, _ = scores_of(q, k, **options)
    p, lse, _ = softmax(scores, s_aux)
    return (p @ v).transpose(1, 2), lse


def heads_first(q, k, v, qv, dtype):
    """Q, K and V as (batch, heads_q, seqlen, head_dim). The columns of qv join Q's, and then V's columns join K's."""
    if qv is not None:
        q, k = torch.cat([qv, q], -1), torch.cat([v, k], -1)
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def scores_of(q, k, softmax_scale=None, softcap=0.0, **mask):
    """The scores, which are -inf for hidden keys, and their derivatives by Q K^T."""
    slope = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q @ k.transpose(-1, -2) * slope
    if softcap:
        scores = softcap * (scores / softcap).tanh()
        # The derivative is not rounded to 16 bits.
        slope = slope * (1 - (scores.to(torch.promote_types(scores.dtype, torch.float32)) / softcap).square())
    return scores.masked_fill(hidden_keys(*scores.shape[-2:], q.device, **mask), -math.inf), slope


def hidden_keys(rows, keys, device, causal=False, window_size=(-1, -1), attention_chunk=0, intervals=None):
    """A mask of the keys that each query does not see. With intervals it also has the batch and head dimensions."""
    key = torch.arange(keys, device=device)
    # Masks align at the bottom right: the last query stands at the last key.
    position = torch.arange(rows, device=device)[:, None] + keys - rows
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device=device)
    if left >= 0:
        hidden |= position - key > left
    if right >= 0:
        hidden |= key - position > right
    if attention_chunk:
        hidden |= position // attention_chunk != key // attention_chunk
    if intervals is not None:
        hidden = hidden | ~((intervals[..., 0::2, None] <= key) & (key < intervals[..., 1::2, None])).any(-2)
    return hidden


def softmax(scores, s_aux=None):
    """P, LSE, and the sinks' part of P. Each sink is one more column of the scores."""
    keys = scores.shape[-1]
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.to(scores)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    # A row without visible keys has P = 0, where softmax would give NaN.
    empty = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0)
    p = scores.softmax(-1).masked_fill(empty, 0)
    return p[..., :keys], scores.logsumexp(-1).masked_fill(empty[..., 0], -math.inf), p[..., keys:]


def gradients(q, k, v, dout, dlse=None, s_aux=None, dtype=torch.float64, magnitudes=False, **options):
    """dQ, dK, dV and the gradient of sinks by the chain rule, with each matrix rounded to `dtype`. As in fused kernels,
    D = rowsum(dO * O) comes from the rounded O. With `magnitudes`, each is the sum of the absolute values of its terms,
    where dP, D and dLSE are separate terms.
    """
    heads = (k.shape[2], q.shape[2] // k.shape[2])
    q, k, v = heads_first(q, k, v, None, dtype)
    dout = dout.to(dtype).transpose(1, 2)
    scores, slope = scores_of(q, k, **options)
    p, _, p_sink = softmax(scores, s_aux)
    o = p @ v
    if magnitudes:
        q, k, v, dout, o = q.abs(), k.abs(), v.abs(), dout.abs(), -o.abs()
        dlse = None if dlse is None else dlse.abs()
    # Matrices are rounded to `dtype`. Values between them are not rounded to 16 bits.
    wide = torch.promote_types(dtype, torch.float32)
    dp = dout @ v.transpose(-1, -2)
    delta = (dout.to(wide) * o.to(wide)).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.to(wide).unsqueeze(-1)
    # dS of hidden keys is 0, whatever the derivative at -inf.
    ds = (p.to(wide) * (dp.to(wide) - delta) * slope).masked_fill(scores == -math.inf, 0).to(dtype)
    dq, dk, dv = ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout
    dk, dv = (x.unflatten(1, heads).sum(2) for x in (dk, dv))
    of_sinks = () if s_aux is None else (-(p_sink.to(wide) * delta).sum((0, 2, 3)),)
    return *(x.transpose(1, 2) for x in (dq, dk, dv)), *of_sinks


def law_of(oracle, baseline, lse, magnitude, dtype):
    """The largest difference from the oracle that a result may have: 2 max |baseline - oracle| + atol + noise. atol is
    twice the error of adding and subtracting 0.3 in `dtype`. noise is the error of rounding exponents to float32.
    """
    rounded = oracle.to(dtype)
    atol = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    seen = lse[lse.isfinite()]
    size = 1 + (seen.abs().max().item() if seen.numel() else 0)
    noise = 8 * 2.0**-24 * size * (magnitude.abs().max().item() if magnitude.numel() else 0)
    return 2 * (baseline - oracle).abs().max().item() + atol + noise


def judge(out, lse, q, k, v, qv=None, **options):
    """Fails unless O and LSE are as near to the definition as their precision can be expected to be.

    The oracle is `standard` attention in float64, and the baseline is `standard` attention in the dtype of O.
    """
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    oracle, oracle_lse = standard(q, k, v, qv, **options)
    baseline, _ = standard(q, k, v, qv, dtype=q.dtype, **options)
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


def judge_gradients(results, q, k, v, dout=None, dlse=None, s_aux=None, **options):
    """Fails unless dQ, dK, dV and the gradient of sinks are as near to float64 autograd as their precision can be
    expected to be. The baseline is `gradients` in their precision. An element that is a sum of no terms must be 0. The
    gradient of sinks may be left out.
    """
    tensors = dict(dq=q, dk=k, dv=v) | ({} if s_aux is None else dict(ds_aux=s_aux))
    leaves = [x.detach().double().requires_grad_() for x in tensors.values()]
    o, lse = standard(*leaves[:3], s_aux=None if s_aux is None else leaves[3], **options)
    dout = torch.zeros_like(o) if dout is None else dout.to(o.dtype)
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    oracles = torch.autograd.grad((o, lse), leaves, (dout, dlse.to(lse.dtype)))
    baselines = gradients(q, k, v, dout, dlse, s_aux, dtype=q.dtype, **options)
    magnitudes = gradients(q, k, v, dout, dlse, s_aux, magnitudes=True, **options)
    assert len(results) in (3, len(leaves))
    for (name, like), x, oracle, baseline, magnitude in zip(
        tensors.items(), results, oracles, baselines, magnitudes
    ):
        assert (x.dtype, x.shape) == (like.dtype, like.shape), name
        # A gradient's heads may be outside its rows in memory only if the input's are.
        assert x.is_contiguous() or (x.stride(1) < x.stride(2) and like.stride(1) < like.stride(2)), name
        if x.numel() == 0:
            continue
        bound = law_of(oracle, baseline, lse.detach(), magnitude, q.dtype)
        error = (x - oracle).abs().max().item()
        assert error <= bound, f"{name} is {error:.3e} from the oracle where the law allows {bound:.3e}"
        assert (x[magnitude == 0] == 0).all(), f"{name} where nothing is added up"


def judge_codes(out, lse, q, k, v, error=0.05, **options):
    """Fails unless O and LSE of codes are near to attention of the numbers that codes and scales represent. P is
    rounded to e4m3, by up to 1/16 of a number; these errors average out over keys.
    """
    right, right_lse = standard(q, k, v, **options)
    seen = right_lse.isfinite()
    assert ((lse - right_lse)[seen].abs() < 0.1).all() and (lse[~seen] == -math.inf).all()
    found = (out - right).norm()
    assert found <= error * right.norm(), f"o is {found / right.norm():.3f} from the definition"


def rotated(x, cos, sin, interleaved=False, positions=0):
    """Rotary embedding, with products and sums rounded to float32. Rows at positions outside the tables are NaN."""
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
    """M of incoherent processing, (head_dim, head_dim): random signs times a Hadamard matrix. If head_dim is no power
    of 2, two such products.
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
    """Codes (batch, seqlen, heads, head_dim) as (batch, heads, head_dim, keys), padded with zeros to a multiple of 128
    keys. Each 16 keys have the order in which matrix products read them.
    """
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
    # Blocks are whole, and one more has zeros, so that there is a maximum even if there are no rows.
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
    """Codes, scales and means of `fa3.quantize_channels` by their definition. The means are summed in float64."""
    y = x.float()
    y = y.where(y.isfinite(), math.nan)
    mean = (y.double().nan_to_num(0.0).sum(1) / max(x.shape[1], 1)).float()
    centred = y - mean.unsqueeze(1)
    # A row of zeros is added, so that there is a maximum even if there are no rows.
    amax = torch.nn.functional.pad(centred.abs().nan_to_num(0.0), (0, 0, 0, 0, 0, 1)).amax(1)
    scales = scale_of(amax)
    codes = (centred / scales.unsqueeze(1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return as_products_read(codes) if transposed else codes, scales, mean


def scale_of(amax):
    """The scale for numbers up to amax. It is 1 if all numbers are 0."""
    return (amax / 448).clamp(min=torch.finfo(torch.float32).tiny).masked_fill(amax == 0, 1.0)
