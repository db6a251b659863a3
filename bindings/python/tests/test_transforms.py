"""Attention inside of torch.func's transforms, with several gradients at once, and in graphs whose lengths depend on
the data. Needs torch; what needs a GPU is skipped without one.
"""

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import assert_equal, normal

from fa3 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, masks
from fa3.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

I32 = torch.int32


def problem(device, entries=()):
    return [normal(*entries, 2, 8, heads, 16, device=device, seed=heads + len(entries)) for heads in (4, 2, 1)]


def attend(q, k, v, **options):
    return flash_attn_func(q, k, v.expand_as(k), causal=True, deterministic=True, **options)


def test_several_gradients_at_once(device):
    leaves = [x.requires_grad_() for x in problem(device)]
    for out in attend(*leaves, return_attn_probs=True):
        many = normal(3, *out.shape, device=device, dtype=out.dtype, seed=9)
        results = torch.autograd.grad(out, leaves, many, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(out, leaves, x, retain_graph=True) for x in many]
        assert_equal(results, [torch.stack(gradients) for gradients in zip(*each)])


def test_a_jacobian_at_once(device):
    q, k, v = (x[:1, :2, :1] for x in problem(device))
    of = [torch.autograd.functional.jacobian(lambda q: attend(q, k, v), q, vectorize=at_once) for at_once in (True, False)]
    assert_equal(of[:1], of[1:])
    assert_equal([torch.func.jacrev(lambda q: attend(q, k, v))(q)], of[1:])


@pytest.mark.parametrize("name", ["dense", "intervals", "sinks", "packed", "cache", "below"])
def test_a_mapped_call_is_one_for_each_entry(device, name):
    ends = torch.tensor([0, 3, 16], dtype=I32, device=device)
    call = {
        "dense": attend,
        "intervals": lambda q, k, v: flash_attn_func(q, k, k, intervals=masks.padding(ends[:2] + 1, 8, 8)),
        "sinks": lambda q, k, v: attend(q, k, v, s_aux=q.flatten()[:4]),
        "packed": lambda q, k, v: flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, k)), ends, ends, 13, 13),
        "cache": lambda q, k, v: flash_attn_with_kvcache(q, k, k, cache_seqlens=ends[:2] + 1),
        "below": lambda q, k, v: _flash_attn_forward(q, k, k)[0],
    }[name]
    tensors = problem(device, (3,))
    assert_equal([torch.func.vmap(call)(*tensors)], [torch.stack([call(*entry) for entry in zip(*tensors)])])
    if name != "cache":
        gradients = torch.func.grad(lambda *given: call(*given).float().pow(2).sum(), argnums=(0, 1))
        results = torch.func.vmap(gradients)(*tensors)
        assert_equal(results, [torch.stack(x) for x in zip(*(gradients(*entry) for entry in zip(*tensors)))])


def test_what_has_no_transform_says_so():
    q, k, v = problem("cpu")
    lse = torch.zeros(2, 4, 8)
    with pytest.raises(NotImplementedError, match="^_flash_attn_backward is not supported inside of torch.func's transforms$"):
        torch.func.vmap(lambda q: _flash_attn_backward(q, q, k, k, q, lse)[0])(q[None])
    x, lists = normal(8, 2, 64), torch.tensor([0, 3, 8], dtype=I32)
    with pytest.raises(NotImplementedError, match="^out is not supported inside of torch.func's transforms$"):
        torch.func.vmap(lambda x: flash_attn_varlen_func(x, x, x, lists, lists, None, None, out=x))(x[None])
    with pytest.raises(NotImplementedError, match="^attention has no derivative in forward mode$"):
        torch.func.hessian(lambda q: attend(q, k, v).float().sum())(q)


@pytest.mark.parametrize("name", ["dense", "packed", "cache"])
@torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
def test_lengths_that_only_the_data_will_tell(device, name):
    """Rows without padding are views of one tensor, and their longest sequence is read from the data."""
    pages, table = normal(6, 16, 2, 16, device=device), torch.arange(6, dtype=I32, device=device).view(3, 2)

    def step(x, mask):
        rows = x.unflatten(-1, (8, 16)).flatten(0, 1)[mask.flatten()]
        q, k, v = rows.split([4, 2, 2], 1)
        if name == "dense":
            return flash_attn_func(q[None], k[None], v[None], deterministic=True)
        lengths = mask.sum(1, dtype=I32)
        ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=I32), (1, 0))
        longest = lengths.max().item()
        if name == "packed":
            return flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True, deterministic=True)
        lists = dict(cache_seqlens=lengths, page_table=table, cu_seqlens_q=ends, max_seqlen_q=longest)
        return flash_attn_with_kvcache(q.detach(), pages, pages, **lists)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x = normal(3, 20, 128, device=device)
    for longest in (20, 11):
        mask = torch.arange(20, device=device) < torch.tensor([[5], [longest], [1]], device=device)
        results = []
        for function in (step, compiled):
            leaf = x.detach().requires_grad_()
            out = function(leaf, mask)
            results.append([out] if name == "cache" else [out, *torch.autograd.grad(out.float().pow(2).sum(), leaf)])
        assert_equal(*results)


@pytest.mark.parametrize("name", ["dense", "packed"])
def test_an_export_whose_lengths_only_the_data_will_tell(name):
    """If a trace does not know the number or the length of rows, these are not checked."""

    class Masked(torch.nn.Module):
        def forward(self, x, mask, ends):
            rows = x[mask]
            if name == "dense":
                return flash_attn_func(*[rows[None]] * 3)
            ends = torch.cat([ends, mask.sum(dtype=I32)[None]])
            return flash_attn_varlen_func(rows, rows, rows, ends, ends, None, (ends[1:] - ends[:-1]).max())

    x, mask, start = torch.randn(30, 2, 16), torch.arange(30) % 2 == 0, torch.tensor([0, 4], dtype=I32)
    program = torch.export.export(Masked(), (x, mask, start))
    mask = torch.arange(30) % 3 == 0
    assert torch.equal(program.module()(x, mask, start), Masked()(x, mask, start))
