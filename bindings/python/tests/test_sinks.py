"""Sinks (`s_aux`): a logit for each query head in the softmax's denominator, as GPT-OSS has them."""

import math

import pytest
import torch

from fa3 import flash_attn_func, flash_attn_varlen_func

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
# Below, among and above the scores, and none.
SINKS = [-3.0, 0.5, 9.0, -math.inf]
HEADS = len(SINKS)


def normal(*shape, dtype=F32, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def reference(q, k, v, sinks, causal):
    """O and LSE in float64 by GPT-OSS's definition: a sink is one more column of scores, which is dropped."""
    q, k, v, sinks = (x.double() for x in (q, k, v, sinks))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[3])
    if causal:
        rows, keys = scores.shape[2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(keys - rows + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, column], -1)
    lse = scores.logsumexp(-1)
    p = torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp())
    return torch.einsum("bhqk,bkhd->bqhd", p[..., :-1], v), lse


def tensors(device, dtype, rows=40, keys=30):
    q, k, v = normal(2, rows, HEADS, 64), normal(2, keys, 2, 64, seed=1), normal(2, keys, 2, 64, seed=2)
    return [x.to(device, dtype) for x in (q, k, v, torch.tensor(SINKS))]


def close(x, y, dtype):
    bound = 1e-4 if dtype == F32 else 3e-2
    torch.testing.assert_close(x.double(), y.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("causal", [False, True])
def test_results_and_gradients_are_those_of_the_definition(device, causal):
    # Under the mask the first rows see their sinks alone.
    dtype = F32 if device == "cpu" else BF16
    leaves = [x.requires_grad_() for x in tensors(device, dtype)]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    dout, dlse = normal(2, 40, HEADS, 64, seed=3, device=device), normal(2, HEADS, 40, seed=4, device=device)
    given, expected = flash_attn_func(*leaves[:3], causal=causal, s_aux=leaves[3], return_attn_probs=True), reference(*doubles, causal)
    # Where there is no sink and no key, LSE is -inf and has no gradient.
    dlse = dlse.masked_fill(expected[1] == -math.inf, 0.0)
    close(given[0], expected[0], dtype)
    close(given[1], expected[1], dtype)
    gradients = torch.autograd.grad(given, leaves, [dout.to(dtype), dlse])
    finite = expected[1].masked_fill(expected[1] == -math.inf, 0.0)
    wanted = torch.autograd.grad([expected[0], finite], doubles, [dout.double(), dlse.double()])
    for x, y, leaf in zip(gradients, wanted, leaves, strict=True):
        assert x.dtype == leaf.dtype and x.shape == leaf.shape
        close(x, y.nan_to_num(0.0), dtype)


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
def test_sinks_of_every_type(device, dtype):
    q, k, v, sinks = tensors(device, BF16)
    expected = flash_attn_func(q, k, v, s_aux=sinks)
    sinks = sinks.to(dtype).requires_grad_()
    out = flash_attn_func(q, k, v, s_aux=sinks)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    out.sum().backward()
    assert sinks.grad.dtype == dtype and sinks.grad.isfinite().all()


def test_packed_sequences_are_those_alone(device):
    # Without keys, with one row, and longer ones; rows behind the last one have no sink.
    lengths, dtype = [(7, 9), (5, 0), (1, 1), (90, 40)], F32 if device == "cpu" else BF16
    ends = [torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=I32, device=device) for x in zip(*lengths)]
    q, k, v = (normal(n, h, 64, dtype=dtype, seed=n, device=device) for n, h in ((110, HEADS), (50, 2), (51, 2)))
    v, sinks = v[:50], torch.tensor(SINKS, device=device)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
    out, lse = flash_attn_varlen_func(*leaves[:3], *ends, 90, 40, causal=True, s_aux=leaves[3], return_attn_probs=True)
    dout, dlse = normal(110, HEADS, 64, dtype=dtype, device=device), normal(HEADS, 110, device=device)
    dlse = dlse.masked_fill(lse == -math.inf, 0.0)
    gradients = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    dsink = torch.zeros(HEADS, dtype=F32, device=device)
    for i, (rows, keys) in enumerate(lengths):
        of_q, of_k = (slice(x[i].item(), x[i].item() + n) for x, n in zip(ends, (rows, keys)))
        alone = [x.detach()[None].requires_grad_() for x in (q[of_q], k[of_k], v[of_k])]
        sink = sinks.clone().requires_grad_()
        one, lse_of_one = flash_attn_func(*alone, causal=True, s_aux=sink, return_attn_probs=True)
        torch.testing.assert_close(out[of_q], one[0])
        torch.testing.assert_close(lse[:, of_q], lse_of_one[0])
        *of_one, of_sink = torch.autograd.grad((one, lse_of_one), (*alone, sink), (dout[None, of_q], dlse[None, :, of_q]))
        for x, y, part in zip(gradients, of_one, (of_q, of_k, of_k)):
            torch.testing.assert_close(x[part], y[0])
        dsink += of_sink
    torch.testing.assert_close(gradients[3], dsink, rtol=1e-4, atol=1e-4)
    assert (lse[:, 103:] == -math.inf).all() and (out[103:] == 0).all()


def test_a_sink_of_minus_infinity_is_none(device):
    q, k, v, sinks = tensors(device, BF16)
    without = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    given = flash_attn_func(q, k, v, causal=True, s_aux=torch.full_like(sinks, -math.inf), return_attn_probs=True)
    for x, y in zip(given, without):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_float8(device):
    q, k, v, sinks = tensors(device, BF16)
    codes = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    out, lse = flash_attn_func(*codes, s_aux=sinks, return_attn_probs=True)
    o, expected = reference(*(x.to(F32) for x in codes), sinks, False)
    assert (out - o).abs().max() < 0.1 and (lse - expected).abs().max() < 0.1


def test_operators():
    q, k, v, sinks = tensors("cpu", F32)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks[:3].repeat(2)[:HEADS].clone())]
    options = (None, -1, -1, 0, 0.0, 0, None, None, None, False, None, False, None, leaves[3])
    torch.library.opcheck(torch.ops.fa3.forward.default, (*leaves[:3], *options))
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    results = [call(*leaves[:3], s_aux=leaves[3]) for call in (flash_attn_func, compiled)]
    gradients = [torch.autograd.grad(x.sum(), leaves) for x in results]
    transformed = torch.func.grad(lambda q, k, v, s_aux: flash_attn_func(q, k, v, s_aux=s_aux).sum(), argnums=(0, 1, 2, 3))
    gradients.append(transformed(*(x.detach() for x in leaves)))
    for others in gradients[1:]:
        for x, y in zip(others, gradients[0], strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize(
    "sinks, sentence",
    [
        (torch.zeros(3), r"s_aux is torch.float32 \(3,\) on cpu, expected .* \(4,\) on cpu: \(heads_q,\)"),
        (torch.zeros(HEADS, dtype=torch.float64), "s_aux is torch.float64"),
        (torch.zeros(1, HEADS), r"s_aux is torch.float32 \(1, 4\)"),
    ],
)
def test_other_sinks_are_refused(sinks, sentence):
    q, k, v, _ = tensors("cpu", F32)
    ends = torch.tensor([0, 40], dtype=I32), torch.tensor([0, 30], dtype=I32)
    with pytest.raises(ValueError, match=sentence):
        flash_attn_func(q, k, v, s_aux=sinks)
    with pytest.raises(ValueError, match=sentence):
        flash_attn_varlen_func(q[0], k[0], v[0], *ends, 40, 30, s_aux=sinks)
    with pytest.raises(ValueError, match=sentence.replace("on cpu", "on meta")):
        flash_attn_func(*(x.to("meta") for x in (q, k, v)), s_aux=sinks.to("meta"))
    with pytest.raises(TypeError, match="s_aux"):
        flash_attn_func(q, k, v, s_aux=[0.0] * HEADS)
