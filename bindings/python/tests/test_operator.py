"""The operator that tracers, compilers and fake tensors see. Needs torch but no GPU."""

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode

from fa3 import flash_attn_func

BF16 = torch.bfloat16


def normal(*shape, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def test_the_schema_is_what_graphs_are_saved_with():
    expected = (
        "fa3::forward(Tensor q, Tensor k, Tensor v, float? softmax_scale, SymInt window_left, SymInt window_right, "
        "SymInt attention_chunk, float softcap, SymInt sm_margin, Tensor? q_descale=None, Tensor? k_descale=None, "
        "Tensor? v_descale=None, bool v_transposed=False, ScalarType? out_dtype=None, "
        "bool deterministic=False, Tensor? v_mean=None, Tensor? s_aux=None, "
        "Tensor? qv=None, Tensor? intervals=None) -> (Tensor o, Tensor lse)"
    )
    assert str(torch.ops.fa3.forward.default._schema) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize(
    "q, k, v",
    [
        ((2, 33, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64)),
        ((1, 9, 3, 72), (1, 5, 1, 72), (1, 5, 1, 40)),
        ((2, 0, 2, 64), (2, 5, 2, 64), (2, 5, 2, 64)),
        ((2, 5, 2, 64), (2, 0, 2, 64), (2, 0, 2, 64)),
    ],
    ids=["grouped heads", "another head_dim of v", "no rows", "no keys"],
)
def test_the_operator_is_what_it_says(dtype, q, k, v):
    """Schema, fake results beside real ones, and what becomes of it under torch.compile: torch's own checks."""
    q, k, v = (normal(*shape, dtype=dtype) for shape in (q, k, v))
    for x in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        torch.library.opcheck(torch.ops.fa3.forward.default, (x, k, v, None, 7, 0, 6, 30.0, 0))


def test_a_compiled_call_has_the_options_of_a_plain_one():
    def attend(q, k, v):
        return flash_attn_func(q, k, v, 0.5, causal=True, window_size=(5, 3), attention_chunk=9, softcap=20.0, sm_margin=2, return_attn_probs=True)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    q, k, v = normal(2, 33, 4, 64), normal(2, 40, 2, 64), normal(2, 40, 2, 64)
    for result, expected in zip(compiled(q, k, v), attend(q, k, v), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("rows_first", [True, False])
def test_fake_results_are_contiguous_whatever_the_strides(rows_first):
    with FakeTensorMode():
        shape = (2, 64, 8, 128) if rows_first else (2, 8, 64, 128)
        q = torch.empty(shape, dtype=BF16, device="cuda")
        q = q if rows_first else q.transpose(1, 2)
        out, lse = torch.ops.fa3.forward(q, q, q, None, -1, -1, 0, 0.0, 0)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 64, 8, 128), BF16, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 8, 64), torch.float32, True)


def test_fake_tensors_of_other_ranks_are_refused():
    with FakeTensorMode():
        q, k = (torch.empty(*shape, dtype=BF16, device="cuda") for shape in ((64, 8, 128), (2, 64, 8, 128)))
        with pytest.raises(ValueError, match="^q has 3, k 4 and v 4 dimensions, expected 4"):
            flash_attn_func(q, k, k)
