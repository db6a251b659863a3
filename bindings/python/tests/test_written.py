"""Autograd learns which tensors a call writes: their versions rise, and a backward pass that saved them raises. Needs
torch; what needs a GPU is skipped without one.
"""

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from fa3 import flash_attn_combine, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from fa3.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

BF16, I32 = torch.bfloat16, torch.int32


class Parameter(torch.nn.Parameter):
    """A subclass of tensors: its calls go through torch's dispatcher."""


def writing_operators():
    """The operators of this package that write to an argument."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fa3::")]
    operators = [getattr(torch.ops.fa3, name.removeprefix("fa3::")).default for name in names]
    return [x for x in operators if any(is_written(argument) for argument in x._schema.arguments)]


def is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


def stand_in(argument):
    """Any value of an argument's type."""
    kind = argument.type.kind()
    if kind == "OptionalType":
        return None
    return torch.zeros(1) if kind == "TensorType" else {"BoolType": False, "FloatType": 0.0, "StringType": ""}.get(kind, 0)


def test_there_are_operators_that_write():
    names = {x._schema.name.removeprefix("fa3::") for x in writing_operators()}
    of_out = {f"{name}_out" for name in ("forward", "varlen_forward", "cached_forward", "append_forward", "combine")}
    assert names >= of_out | {"append_forward", "backward_out", "varlen_backward_out"}


@pytest.mark.parametrize("overload", writing_operators(), ids=lambda x: x._schema.name)
def test_operators_tell_autograd_what_their_schema_says(overload):
    """Versions rise even if the call fails, since a failed call may have written."""
    arguments = overload._schema.arguments
    given = {x.name: stand_in(x) for x in arguments}
    before = {name: x._version for name, x in given.items() if isinstance(x, torch.Tensor)}
    with pytest.raises((ValueError, TypeError, NotImplementedError)):
        overload(*(given[x.name] for x in arguments if not x.kwarg_only), **{x.name: given[x.name] for x in arguments if x.kwarg_only})
    for x in arguments:
        if x.name in before:
            assert (given[x.name]._version > before[x.name]) == is_written(x), x.name


def cases(device):
    """Calls by name, with the tensors that they write. Some go through torch's dispatcher, and others bypass it."""
    q, k, v, dout = (torch.randn(2, 8, 4, 64, device=device).to(BF16) for _ in range(4))
    rows, out_of_rows = q.flatten(0, 1), torch.empty(16, 4, 64, dtype=BF16, device=device)
    ends, lengths = (torch.tensor(x, dtype=I32, device=device) for x in ([0, 8, 16], [3, 4]))
    out, cache, other = torch.empty_like(q), torch.zeros_like(q), torch.zeros_like(q)
    o, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    parts, lse_parts = torch.stack([o, o]), torch.stack([lse, lse]).transpose(-1, -2)
    dq, dk, dv = (torch.empty_like(q) for _ in range(3))
    packed = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=8, max_seqlen_k=8)
    flat = dict(dq=dq.flatten(0, 1), dk=dk.flatten(0, 1), dv=dv.flatten(0, 1))
    _, flat_lse, *_ = _flash_attn_forward(rows, rows, rows, **packed)
    appended = dict(cache_seqlens=lengths, k=k[:, :1], v=v[:, :1])
    for subclass in (lambda x: x, lambda x: Parameter(x, requires_grad=False)):
        x = subclass(q)
        yield lambda: flash_attn_func(x, k, v, out=out), [out]
        yield lambda: flash_attn_varlen_func(subclass(rows), rows, rows, ends, ends, 8, 8, out=out_of_rows), [out_of_rows]
        yield lambda: flash_attn_with_kvcache(x, k, v, out=out), [out]
        yield lambda: flash_attn_with_kvcache(x[:, :1], cache, other, **appended), [cache, other]
        yield lambda: flash_attn_with_kvcache(x, cache, other, **appended, out=out), [cache, other, out]
        yield lambda: flash_attn_combine(subclass(parts), lse_parts, out=out), [out]
        yield lambda: _flash_attn_forward(x, k, v, out_=out), [out]
        yield lambda: _flash_attn_backward(dout, x, k, v, o, lse, dq=dq, dk=dk, dv=dv), [dq, dk, dv]
        yield (
            lambda: _flash_attn_backward(rows, subclass(rows), rows, rows, rows, flat_lse, **packed, **flat),
            list(flat.values()),
        )


def test_a_backward_pass_refuses_what_was_written_meanwhile(device):
    for call, written in cases(device):
        weight = torch.ones((), device=device, requires_grad=True)
        results = [(x * weight).sum() for x in written]
        call()
        for result in results:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.backward()


def test_inference_tensors_are_written_everywhere(device):
    """Inference tensors have no versions, and cannot be saved for a backward pass."""
    with torch.inference_mode():
        for call, written in cases(device):
            call()
        q, cache = torch.ones(2, 1, 4, 64, dtype=BF16, device=device), torch.zeros(2, 8, 4, 64, dtype=BF16, device=device)
    for x in (q.clone(), q):
        lengths = torch.zeros(2, dtype=I32, device=device)
        with torch.no_grad():
            flash_attn_with_kvcache(x, cache, cache.clone(), q, q, cache_seqlens=lengths)
    assert cache[:, 0].eq(1).all()


def test_a_compiled_step_refuses_what_an_eager_one_does(device):
    def step(weight, cache, q, k, lengths):
        kept = (cache * weight).sum()
        flash_attn_with_kvcache(q, cache, torch.zeros_like(cache), k, k, cache_seqlens=lengths)
        return kept

    q, k = (torch.randn(2, 1, 4, 64, device=device).to(BF16) for _ in "qk")
    given = torch.zeros(2, 8, 4, 64, dtype=BF16, device=device), q, k, torch.zeros(2, dtype=I32, device=device)
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        weight = torch.ones((), dtype=BF16, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            function(weight, *given).backward()
