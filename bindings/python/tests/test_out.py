"""Results in given memory: `out=` of the forward pass, and gradients in the layout of their tensors. Needs torch; what
needs a GPU is skipped without one.
"""

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from operations import heads_outside
from packing import normal

from fa3 import flash_attn_func

BF16 = torch.bfloat16
OPTIONS = (None, -1, 0, 0, 0.0, 0)


def problem(device, dtype=BF16):
    q = normal(2, 33, 4, 64, device=device, dtype=dtype)
    k, v = (normal(2, 40, 2, d, device=device, dtype=dtype, seed=d) for d in (64, 32))
    return q, k, v


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


def test_results_lie_between_the_elements_of_what_is_read(device):
    """Q, K, V, O and gradients are slices of one tensor (batch, rows, parts, heads, head_dim), or with heads first."""
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
    """Gradients are slices of one tensor, in any order: (batch, rows, heads_q + 2 heads_kv, ...), or heads first."""
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
