"""Results in memory that is there: `out=` of the forward pass, and gradients in the layout of their tensors. Needs
torch; what needs a GPU is skipped without one.
"""

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import normal
from torch._subclasses.fake_tensor import FakeTensorMode

from fa3 import flash_attn_func

BF16 = torch.bfloat16
OPTIONS = (None, -1, 0, 0, 0.0, 0)


def problem(device, dtype=BF16):
    q = normal(2, 33, 4, 64, device=device, dtype=dtype)
    k, v = (normal(2, 40, 2, d, device=device, dtype=dtype, seed=d) for d in (64, 32))
    return q, k, v


def heads_outside(x):
    """The same tensor with heads outside rows, as torch's scaled_dot_product_attention has it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def places(shape, device, dtype=BF16):
    """Memory for O, and what lies around it."""
    batch, seqlen, heads, head_dim = shape
    for whole, part in [
        ((batch, seqlen, heads, head_dim), lambda x: x),
        ((batch, heads, seqlen, head_dim), lambda x: x.transpose(1, 2)),
        ((seqlen, batch, heads, head_dim), lambda x: x.transpose(0, 1)),
        ((batch, seqlen + 3, heads + 1, head_dim + 16), lambda x: x[:, 2:-1, 1:, 8:-8]),
    ]:
        memory = torch.full(whole, torch.nan, dtype=dtype, device=device)
        yield memory, part(memory)


def test_codes_have_an_o_there(device):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in problem(device)) if device == "cpu" else (
        normal(2, 40, 4, 64, device=device).to(torch.float8_e4m3fn) for _ in "qkv"
    )
    expected = flash_attn_func(q, k, v, out_dtype=torch.float16)
    for _, out in places(expected.shape, device, torch.float16):
        assert torch.equal(flash_attn_func(q, k, v, out_dtype=torch.float16, out=out), expected)


def test_a_place_that_o_cannot_have_is_refused(device):
    q, k, v = problem(device)
    o = torch.empty(2, 33, 4, 32, dtype=BF16, device=device)
    base = torch.empty(2, 33, 4, 64, dtype=BF16, device=device)
    for out, sentence in [
        (o[:, :, :2], r"out is torch.bfloat16 \(2, 33, 2, 32\) on .*, expected torch.bfloat16 \(2, 33, 4, 32\) on "),
        (o.float(), r"out is torch.float32 \(2, 33, 4, 32\) on "),
        (o.to("meta"), r"out is torch.bfloat16 \(2, 33, 4, 32\) on meta, expected "),
        (base[..., ::2], "o has stride 2 in head_dim, expected 1"),
        (o[:, :1].expand(-1, 33, -1, -1), "output o has stride 0 in seqlen, where 32 or more keeps its rows apart"),
        (q[..., :32], r"output o \[0x[0-9a-f]+, 0x[0-9a-f]+\) overlaps q \["),
    ]:
        with pytest.raises(ValueError, match=f"^{sentence}"):
            flash_attn_func(q, k, v, out=out)
    with pytest.raises(TypeError, match="^out is int, expected torch.Tensor"):
        flash_attn_func(q, k, v, out=1)
    if device == "cuda":
        with pytest.raises(ValueError, match="^o has stride 4356 in batch, not a multiple of 8 elements"):
            flash_attn_func(q, k, v, out=torch.empty(2, 33, 4, 33, dtype=BF16, device=device)[..., :32])


def test_gradients_lie_as_their_tensors(device):
    q, k, v = problem(device)
    dout = normal(2, 33, 4, 32, device=device, seed=5)

    def gradients(*leaves):
        leaves = [x.detach().requires_grad_() for x in leaves]
        return torch.autograd.grad(flash_attn_func(*leaves, causal=True), leaves, dout)

    expected = gradients(q, k, v)
    for arrange in (heads_outside, lambda x: torch.cat([x, x], -1)[..., : x.shape[3]]):
        leaves = [arrange(x) for x in (q, k, v)]
        for x, right, leaf in zip(gradients(*leaves), expected, leaves, strict=True):
            assert torch.equal(x, right)
            assert x.stride() == (leaf if arrange is heads_outside else right).stride()


def test_gradients_are_written_where_they_are_wanted(device):
    q, k, v = problem(device)
    dout = normal(2, 33, 4, 32, device=device, seed=5)
    o, lse = torch.ops.fa3.forward(q, k, v, *OPTIONS)
    given = (dout, q, k, v, o, lse, None, *OPTIONS)
    expected = torch.ops.fa3.backward(*given)
    for each in zip(*(places(x.shape, device) for x in (q, k, v)), strict=True):
        outputs = dict(zip(("dq", "dk", "dv"), (part for _, part in each)))
        torch.ops.fa3.backward_out(*given, **outputs)
        for x, right, (memory, _) in zip(outputs.values(), expected, each, strict=True):
            assert torch.equal(x, right)
            assert memory.isnan().sum() == memory.numel() - x.numel(), "something else was written"
    like = dict(dq=torch.empty_like(q), dk=torch.empty_like(k), dv=torch.empty_like(v))
    sentence = r"^dk is torch.bfloat16 \(2, 33, 4, 64\), expected torch.bfloat16 \(2, 40, 2, 64\)"
    with pytest.raises(ValueError, match=sentence):
        torch.ops.fa3.backward_out(*given, **like | dict(dk=torch.empty_like(q)))
    with pytest.raises(ValueError, match=r"^output d[qk] \[0x[0-9a-f]+, 0x[0-9a-f]+\) overlaps "):
        torch.ops.fa3.backward_out(*given, **like | dict(dk=k))
    with pytest.raises(ValueError, match="^output dv has stride 0 in batch"):
        torch.ops.fa3.backward_out(*given, **like | dict(dv=v[:1].expand(2, -1, -1, -1)))


def test_results_lie_between_the_elements_of_what_is_read(device):
    """Q, K, V, O and gradients are parts of one tensor (batch, rows, parts, heads, head_dim), rows or heads first."""
    for are_heads_first in (False, True):
        memory = normal(2, 5, 8, 40, 64, device=device) if are_heads_first else normal(2, 40, 5, 8, 64, device=device)
        parts = memory.transpose(2, 3).unbind(1) if are_heads_first else memory.unbind(2)
        q, k, v, o, _ = parts
        kept = [x.clone() for x in (q, k, v)]
        expected = flash_attn_func(*kept, causal=True)
        assert flash_attn_func(q, k, v, causal=True, out=o) is o and torch.equal(o, expected)
        assert all(torch.equal(x, before) for x, before in zip((q, k, v), kept))
        with pytest.raises(ValueError, match=r"^output o \[0x[0-9a-f]+, 0x[0-9a-f]+\) overlaps v "):
            flash_attn_func(q, k, v, out=v)
    memory = normal(2, 40, 6, 4, 64, device=device)
    q, k, v, *outputs = (memory[:, :, i] for i in range(6))
    dout = normal(2, 40, 4, 64, device=device, seed=5)
    o, lse = torch.ops.fa3.forward(q, k, v, *OPTIONS)
    expected = torch.ops.fa3.backward(dout, q.clone(), k.clone(), v.clone(), o, lse, None, *OPTIONS, deterministic=True)
    named = dict(zip(("dq", "dk", "dv"), outputs))
    torch.ops.fa3.backward_out(dout, q, k, v, o, lse, None, *OPTIONS, deterministic=True, **named)
    assert all(torch.equal(x, right) for x, right in zip(outputs, expected))


def test_gradients_are_parts_of_one_tensor(device):
    """(batch, rows, heads_q + 2 heads_kv, head_dim), in any order, and (batch, heads, rows, ...)."""
    q, k, v = (normal(2, 40, heads, 64, device=device, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    dout = normal(2, 40, 4, 64, device=device, seed=5)
    o, lse = torch.ops.fa3.forward(q, k, v, *OPTIONS)
    given = (dout, q, k, v, o, lse, None, *OPTIONS)
    expected = torch.ops.fa3.backward(*given)
    for heads_first in (False, True):
        for order in (("dq", "dk", "dv"), ("dv", "dq", "dk")):
            shape = (2, 8, 40, 64) if heads_first else (2, 40, 8, 64)
            memory = torch.full((*shape[:3], 72), float("nan"), dtype=BF16, device=device)
            whole = memory[..., :64].transpose(1, 2) if heads_first else memory[..., :64]
            parts = dict(zip(order, whole.split([4 if name == "dq" else 2 for name in order], dim=2), strict=True))
            torch.ops.fa3.backward_out(*given, **parts)
            for name, right in zip(("dq", "dk", "dv"), expected, strict=True):
                assert torch.equal(parts[name], right), name
            assert memory[..., 64:].isnan().all(), "something else was written"
    whole = torch.empty(2, 40, 8, 64, dtype=BF16, device=device)
    parts = dict(dq=whole[:, :, :4], dk=whole[:, :, 4:6], dv=whole[:, :, 6:])
    shared = [dict(dk=whole[:, :, 3:5]), dict(dv=whole[:, :, 5:7]), dict(dv=whole[:, :, 4:6]), dict(dk=whole[:, :, :2])]
    for change in shared:
        with pytest.raises(ValueError, match=r"^output d[qkv] \[0x[0-9a-f]+, 0x[0-9a-f]+\) overlaps d[qkv] "):
            torch.ops.fa3.backward_out(*given, **parts | change)


def test_fake_tensors_are_refused_what_others_are():
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 16, 4, 64, dtype=BF16, device="cuda") for _ in "qkv")
        out = torch.empty(2, 4, 16, 64, dtype=BF16, device="cuda").transpose(1, 2)
        assert flash_attn_func(q, k, v, out=out) is out
        with pytest.raises(ValueError, match="^o has stride 68 in heads, not a multiple of 8 elements"):
            flash_attn_func(q, k, v, out=torch.empty(2, 16, 4, 68, dtype=BF16, device="cuda")[..., :64])
