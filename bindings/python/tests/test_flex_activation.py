"""`fa3.activate(flex=True)`: torch's FlexAttention on this package's kernels. Without a GPU the CPU counts as one."""

import contextlib

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")
flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="skipped: torch has no FlexAttention")

from packing import normal
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fa3
from fa3 import activation

if not hasattr(torch.nn.attention, "register_flash_attention_impl") or torch.version.cuda is None:
    pytest.skip("skipped: torch has no place for another flash attention", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")
ROWS, HEADS = 64, 4


@pytest.fixture
def active(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(activation, "_has_kernels", lambda device: True)
    with fa3.activate(flex=True):
        yield


@pytest.fixture
def calls(monkeypatch):
    """The number of calls of torch's own function."""
    made = []
    own = flex._apply_kernel_options
    monkeypatch.setattr(flex, "_apply_kernel_options", lambda *given: (made.append(given), own(*given))[1])
    return made


def tensors(device, heads_kv=2, dtype=torch.bfloat16):
    shapes = [(2, heads, ROWS, 64) for heads in (HEADS, heads_kv, heads_kv)]
    return [normal(*shape, dtype=dtype, seed=i, device=device).requires_grad_() for i, shape in enumerate(shapes)]


def alibi(s, b, h, q_idx, kv_idx):
    return s - (q_idx - kv_idx).abs() * 0.1 * (h + 1)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_eager_calls(active, device, calls):
    x = tensors(device)
    mask = create_block_mask(causal, None, None, ROWS, ROWS, device=device)
    aux = flex.AuxRequest(lse=True)
    out, of_aux = flex_attention(*x, alibi, mask, 0.2, enable_gqa=True, return_aux=aux, kernel_options={"BLOCK_M": 64})
    right, lse = fa3.flex_attention(*x, alibi, mask, 0.2, True, return_lse=True)
    assert not calls and torch.equal(out, right) and torch.equal(of_aux.lse, lse) and of_aux.max_scores is None
    in_rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in x]
    assert out.is_contiguous() and flex_attention(*in_rows, enable_gqa=True).transpose(1, 2).is_contiguous()
    found, expected = (torch.autograd.grad(o.float().sum() + l.sum(), x) for o, l in ((out, of_aux.lse), (right, lse)))
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_other_calls_are_torchs(active, device, calls):
    q, k, v = (x.detach() for x in tensors(device, HEADS))
    learned = torch.ones(HEADS, device=device, requires_grad=True)
    many = lambda s, b, h, q, k: sum((s * n for n in range(3, 103)), s)
    others = [
        dict(score_mod=lambda s, b, h, q, k: torch.sin(s)),
        dict(score_mod=many),
        dict(return_aux=flex.AuxRequest(max_scores=True)),
    ]
    flex_attention(q, k, v, lambda s, b, h, q, k: s + learned[h])
    assert not calls
    if device == "cuda":  # kernels have no gradients of tables that are read in such a way
        others.insert(0, dict(score_mod=lambda s, b, h, q, k: s + learned[(q + k) % HEADS]))
    for i, options in enumerate(others, 1):
        # On the CPU torch computes no maximum.
        with contextlib.suppress(NotImplementedError):
            flex_attention(q, k, v, **options)
        assert len(calls) == i
    with pytest.raises(ValueError, match="same number of heads"):
        flex_attention(q, k[:, :2], v[:, :2])
    flex_attention(q.float(), k.float(), v.float(), alibi)
    assert len(calls) == len(others) + 1


def operators(function, *given):
    """The attention of a compiled call, by its operators, and the call's result."""
    found = []

    def backend(graph, inputs):
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compiler.reset()
    result = torch.compile(function, backend=backend, fullgraph=True)(*given)
    return [name for name in found if name in ("fa3.forward", "flex_attention")], result


def test_compiled_calls(active, device):
    x = tensors(device)
    mask = create_block_mask(causal, None, None, ROWS, ROWS, device=device)
    odd = create_block_mask(lambda b, h, q, k: (k % 2 == 0) | (q == k), None, None, ROWS, ROWS, device=device)
    unknown = flex.BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, mask_mod=causal)
    unknown.seq_lengths = ROWS, ROWS
    many = lambda s, b, h, q, k: sum((s * n for n in range(3, 103)), s)
    for score_mod, block_mask, name in (
        (alibi, mask, "fa3.forward"),
        (alibi, odd, "fa3.forward"),
        (alibi, unknown, "flex_attention"),
        (lambda s, b, h, q, k: torch.sin(s), None, "flex_attention"),
        (many, None, "flex_attention"),
    ):
        call = lambda q, k, v: flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True)
        found, out = operators(call, *(x.detach() for x in x))
        assert found == [name]
        if name == "fa3.forward":
            assert torch.equal(out, fa3.flex_attention(*x, score_mod, block_mask, None, True))


def test_what_was_compiled_before_is_compiled_again(device, monkeypatch):
    x = [x.detach() for x in tensors(device, HEADS)]
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, backend="aot_eager")
    before = compiled(*x, alibi)
    if device == "cpu":
        monkeypatch.setattr(activation, "_has_kernels", lambda device: True)
    with fa3.activate(flex=True):
        with fa3.activate(flex=True):
            pass
        assert torch.equal(compiled(*x, alibi), fa3.flex_attention(*x, alibi))
    assert torch.equal(compiled(*x, alibi), before)
    assert flex_attention.__code__.co_filename == flex.__file__ == create_block_mask.__code__.co_filename


def test_another_function_of_torch_is_refused(monkeypatch):
    monkeypatch.setattr(flex, "flex_attention", lambda query, key: query)
    with pytest.raises(NotImplementedError, match="has another <lambda>, expected 2.11's"):
        fa3.activate(flex=True)
    assert torch.nn.attention.current_flash_attention_impl() is None
