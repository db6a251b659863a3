"""Intervals: a mask that is data, one or two intervals of keys for each query."""

import pytest
import torch
from packing import normal
from reference import judge, judge_gradients

from fa3 import flash_attn_func

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32


def tensors(device, rows, keys, head_dim=64, dtype=BF16):
    shapes = [(2, rows, 4, head_dim), (2, keys, 2, head_dim), (2, keys, 2, head_dim)]
    return [normal(*shape, dtype=dtype, seed=seed, device=device) for seed, shape in enumerate(shapes)]


def documents(rows, keys):
    """Causal in documents of 100 rows."""
    row = torch.arange(rows)
    return torch.stack((row // 100 * 100, row + 1), -1)[None, None]


def sink_and_window(rows, keys):
    """The first 4 keys and the last 70 up to the row's own, of heads that count from other rows."""
    row = torch.arange(rows) + torch.arange(4)[:, None] * 3
    sink = torch.tensor([0, 4]).expand(*row.shape, 2)
    return torch.cat((row[..., None] - 69, row[..., None] + 1, sink), -1)[None]


def anything(rows, keys):
    """Anything, of each sequence and head, senseless numbers among it; no key of some rows."""
    generator = torch.Generator().manual_seed(0)
    bounds = torch.randint(-20, keys + 30, (2, 4, rows, 4), generator=generator)
    bounds[..., 0] = torch.where(bounds[..., 0] % 7 == 0, -(2**31), bounds[..., 0])
    bounds[..., 3] = torch.where(bounds[..., 3] % 7 == 0, 2**31 - 1, bounds[..., 3])
    bounds[:, :, ::9] = torch.tensor([5, 5, 9, 3])
    return bounds


def padding(rows, keys):
    """The first keys of each sequence, of more than one; the second has none."""
    ends = torch.tensor([keys // 3, 0])
    return torch.stack((torch.zeros(2, dtype=torch.int64), ends), -1)[:, None, None].expand(2, 1, rows, 2)


KINDS = [documents, sink_and_window, anything, padding]


def visible(bounds, keys):
    """The keys that each query sees, (batch or 1, heads or 1, rows, keys)."""
    key = torch.arange(keys)
    inside = (bounds[..., 0::2, None] <= key) & (key < bounds[..., 1::2, None])
    return inside.any(-2)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("rows, keys, head_dim", [(250, 250, 64), (70, 900, 128), (300, 40, 256)])
def test_results_are_those_of_the_definition(device, kind, rows, keys, head_dim):
    q, k, v = tensors(device, rows, keys, head_dim)
    bounds = kind(rows, keys)
    intervals = bounds.to(device, I32)
    out, lse = flash_attn_func(q, k, v, intervals=intervals, return_attn_probs=True)
    judge(out, lse, q, k, v, window=visible(bounds, keys).to(device))


def test_intervals_are_the_masks_that_they_say(device):
    q, k, v = tensors(device, 300, 300)
    row = torch.arange(300, device=device)
    for mask, start, end in [
        (dict(causal=True), torch.zeros_like(row), row + 1),
        (dict(window_size=(70, 30)), row - 70, row + 31),
        (dict(attention_chunk=64), row // 64 * 64, row // 64 * 64 + 64),
        (dict(), torch.zeros_like(row), torch.full_like(row, 2**31 - 1)),
    ]:
        expected = flash_attn_func(q, k, v, **mask, return_attn_probs=True)
        one = torch.stack((start, end), -1).to(I32)[None, None]
        middle = (start + end.clamp(max=300)) // 2
        two = torch.stack((middle, end, start, middle), -1).to(I32).expand(2, 4, 300, 4)
        for intervals in (one, two):
            given = flash_attn_func(q, k, v, intervals=intervals, return_attn_probs=True)
            for x, y in zip(given, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_soft_cap_sinks_and_given_memory(device):
    q, k, v = tensors(device, 200, 170)
    bounds = sink_and_window(200, 170)
    sinks = torch.tensor([-3.0, 0.5, 2.0, 9.0], device=device)
    out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
    given = dict(softcap=3.0, s_aux=sinks, softmax_scale=0.5, intervals=bounds.to(device, I32))
    flash_attn_func(q, k, v, out=out, **given)
    scores = 3.0 * (torch.einsum("bqhd,bkhd->bhqk", q.double(), k.repeat_interleave(2, 2).double()) * 0.5 / 3.0).tanh()
    scores = scores.masked_fill(~visible(bounds, 170).to(device), -torch.inf)
    column = sinks.double().view(1, 4, 1, 1).expand(2, 4, 200, 1)
    p = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    expected = torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(2, 2).double())
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def test_operators():
    q, k, v = tensors("cpu", 40, 30, dtype=F32)
    intervals = sink_and_window(40, 30).to(I32)
    options = (None, -1, -1, 0, 0.0, 0, None, None, None, False, None, False, None, None, None, intervals)
    torch.library.opcheck(torch.ops.fa3.forward.default, (q, k, v, *options))
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sinks = torch.tensor([-3.0, 0.5, 2.0, 9.0], requires_grad=True)
    for more, wanted in ({}, leaves), ({"s_aux": sinks}, [*leaves, sinks]):
        results = [call(*leaves, intervals=intervals, **more) for call in (flash_attn_func, compiled)]
        gradients = [torch.autograd.grad(x.sum(), wanted) for x in results]
        for x, y in zip((results[0], *gradients[0]), (results[1], *gradients[1]), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    transformed = torch.func.grad(lambda q: flash_attn_func(q, k.detach(), v.detach(), intervals=intervals).sum())
    of_q = torch.autograd.grad(flash_attn_func(*leaves, intervals=intervals).sum(), q)[0]
    torch.testing.assert_close(transformed(q.detach()), of_q, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("rows, keys, head_dim", [(250, 250, 64), (300, 140, 128), (90, 200, 256)])
def test_gradients_are_those_of_the_definition(device, kind, rows, keys, head_dim):
    leaves = [x.requires_grad_() for x in tensors(device, rows, keys, head_dim)]
    bounds = kind(rows, keys)
    dout = normal(2, rows, 4, head_dim, dtype=BF16, seed=5, device=device)
    # On the CPU it is the same.
    for deterministic in [False, True][: 1 if device == "cpu" else 2]:
        out = flash_attn_func(*leaves, intervals=bounds.to(device, I32), deterministic=deterministic)
        results = torch.autograd.grad(out, leaves, dout)
        judge_gradients(results, *(x.detach() for x in leaves), dout, window=visible(bounds, keys).to(device))


@pytest.mark.parametrize(
    "change, error, sentence",
    [
        (dict(intervals=documents(40, 30)), ValueError, r"intervals is torch.int64 \(1, 1, 40, 2\) on cpu, expected torch.int32"),
        (dict(intervals=documents(40, 30)[0].to(I32)), ValueError, r"intervals is torch.int32 \(1, 40, 2\)"),
        (dict(intervals=documents(39, 30).to(I32)), ValueError, r"intervals have shape \[1, 1, 39, 2\], expected \(2 or 1, 4 or 1"),
        (dict(causal=True), ValueError, "intervals exclude any other mask, and the mask causal is given"),
        (dict(attention_chunk=8), ValueError, "the mask chunks"),
        (dict(qv=torch.zeros(2, 40, 4, 64)), ValueError, "intervals and qv exclude each other"),
        (dict(intervals=[0, 3]), TypeError, "intervals"),
    ],
)
def test_what_makes_no_sense_is_refused(change, error, sentence):
    q, k, v = tensors("cpu", 40, 30, dtype=F32)
    given = dict(intervals=documents(40, 30).to(I32)) | change
    with pytest.raises(error, match=sentence):
        flash_attn_func(q, k, v, **given)
    on_meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with pytest.raises(error, match=sentence.replace("on cpu", "on meta")):
        flash_attn_func(*(x.to("meta") for x in (q, k, v)), **on_meta)


def test_float8_is_refused():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors("cpu", 40, 30))
    with pytest.raises(ValueError, match="intervals take torch.float32, torch.float16 or torch.bfloat16, not torch.float8_e4m3fn"):
        flash_attn_func(q, k, v, intervals=documents(40, 30).to(I32))
