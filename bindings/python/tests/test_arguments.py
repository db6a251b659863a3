"""Arguments that become numbers: which values are accepted, and which are refused in one sentence, however the call
runs. Needs torch but no GPU.
"""

import functools
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode

from fa3 import (
    arguments,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    quantize,
    quantize_channels,
)

SHAPE = (1, 8, 2, 64)
GRAD = "requires grad, and has no gradient: give a number"

NUMBERS = {
    flash_attn_func: ["softmax_scale", "softcap"],
    flash_attn_qkvpacked_func: ["softmax_scale", "softcap"],
    flash_attn_fp8_func: ["softmax_scale", "softcap"],
    flash_attn_varlen_func: ["softmax_scale", "softcap"],
    flash_attn_varlen_qkvpacked_func: ["dropout_p", "softmax_scale", "softcap"],
    quantize: ["scale"],
}
INTEGERS = {
    flash_attn_func: ["attention_chunk", "num_splits", "sm_margin"],
    flash_attn_qkvpacked_func: ["attention_chunk", "sm_margin", "num_heads_q"],
    flash_attn_fp8_func: ["q_positions", "k_positions", "hadamard_seed"],
    flash_attn_varlen_func: ["attention_chunk", "num_splits", "sm_margin"],
    flash_attn_varlen_qkvpacked_func: ["attention_chunk", "sm_margin", "num_heads_q"],
    quantize: ["positions", "hadamard_seed", "block_rows", "heads_per_scale"],
}
FLAGS = {
    flash_attn_func: ["causal", "pack_gqa", "deterministic", "return_attn_probs", "v_transposed"],
    flash_attn_qkvpacked_func: ["causal", "deterministic", "return_attn_probs"],
    flash_attn_fp8_func: ["causal", "interleaved", "v_channels", "return_attn_probs"],
    flash_attn_varlen_func: ["causal", "pack_gqa", "deterministic", "return_attn_probs"],
    flash_attn_varlen_qkvpacked_func: ["causal", "deterministic", "return_attn_probs"],
    quantize: ["interleaved", "transposed"],
    quantize_channels: ["transposed"],
}


def cases(of):
    return [pytest.param(function, name, id=f"{function.__name__}-{name}") for function, names in of.items() for name in names]


def tensors(function):
    x = torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda")
    if function is flash_attn_qkvpacked_func:
        return (torch.stack([x, x, x], 2),)
    if function is flash_attn_varlen_qkvpacked_func:
        return (torch.stack([x[0], x[0], x[0]], 1), torch.empty(2, dtype=torch.int32, device="cuda"), None)
    if function is flash_attn_varlen_func:
        ends = torch.empty(2, dtype=torch.int32, device="cuda")
        return (x[0], x[0], x[0], ends, ends, None, None)
    return (x,) if function in (quantize, quantize_channels) else (x, x, x)


def refused(function, error, sentence, **options):
    """Checks that a call is refused with the same sentence for fake tensors, which go through the operator as in a
    trace. The check comes before the direct and the traced path separate.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error, match=f"^{sentence}$"):
        function(*tensors(function), **options)


@pytest.mark.parametrize("function, name", cases(NUMBERS))
def test_numbers(function, name):
    for given, words in (("1", "'1'"), ([1.0], "a list"), (1j, "1j"), (object(), "a object")):
        refused(function, TypeError, f"{name} is {words}, expected a number", **{name: given})
    refused(function, ValueError, f"{name} 10{{309}} is too large or too small a number", **{name: 10**309})


@pytest.mark.parametrize("function, name", cases(INTEGERS))
def test_integers(function, name):
    for given, words in ((1.5, "1.5"), ("1", "'1'"), ([1], "a list")):
        refused(function, TypeError, f"{name} is {words}, expected an integer", **{name: given})
    if name != "hadamard_seed":
        for given in (2**63, -(2**63) - 1):
            refused(function, ValueError, f"{name} {given} is too large or too small a number", **{name: given})


def test_hints():
    """A hint that the call would have to wait for counts as None. A hint of a wrong type is refused."""
    for given in (None, torch.tensor(5, device="meta"), torch.nn.Parameter(torch.tensor(5), requires_grad=False)):
        assert arguments.hint("max_seqlen_q", given) is None
    for given in (5, torch.tensor(5), torch.tensor(5, dtype=torch.uint8)):
        assert arguments.hint("max_seqlen_q", given) == 5
    with FakeTensorMode():
        assert arguments.hint("max_seqlen_q", torch.tensor(5)) is None
    packed = [torch.zeros(1)] * 5
    for given, error, sentence in (
        ("5", TypeError, "max_seqlen_k is '5', expected an integer"),
        (5.0, TypeError, "max_seqlen_k is 5.0, expected an integer"),
        (torch.tensor(5.0), TypeError, "max_seqlen_k is 5.0, expected an integer"),
        (torch.tensor([5]), TypeError, "max_seqlen_k is a tensor of shape (1,), expected a number"),
        (2**63, ValueError, f"max_seqlen_k {2**63} is too large or too small a number"),
    ):
        with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
            flash_attn_varlen_func(*packed, None, given)


@pytest.mark.parametrize("function, name", cases(FLAGS))
def test_flags(function, name):
    for given, words in (("no", "'no'"), (0.5, "0.5"), ([], "a list")):
        refused(function, TypeError, f"{name} is {words}, expected True or False", **{name: given})


@pytest.mark.parametrize("function", [x for x in NUMBERS if x is not quantize], ids=lambda x: x.__name__)
def test_windows(function):
    for given, error, sentence in (
        (5, TypeError, "window_size is 5, expected (left, right)"),
        ((1, 2, 3), ValueError, "window_size is (1, 2, 3), expected (left, right)"),
        (("5", 0), TypeError, "the left side of window_size is '5', expected an integer"),
        ((0, 2.0), TypeError, "the right side of window_size is 2.0, expected an integer"),
        (torch.tensor(5), TypeError, "window_size is a tensor of shape (), expected (left, right)"),
        (torch.tensor([5, 5, 5]), TypeError, "window_size is a tensor of shape (3,), expected (left, right)"),
        (torch.tensor([[5, 5]]), TypeError, "window_size is a tensor of shape (1, 2), expected (left, right)"),
        (
            torch.ones(2, dtype=torch.int64, device="meta"),
            TypeError,
            "the left side of window_size is a tensor on meta, for which the call would wait: give a number",
        ),
    ):
        refused(function, error, re.escape(sentence), window_size=given)
    side = torch.tensor(1.0, requires_grad=True)
    refused(function, NotImplementedError, f"the left side of window_size {GRAD}", window_size=(side, 0))


def test_a_window_may_be_a_tensor():
    """FlashAttention-3's tests pass torch.randint(0, seqlen, (2,))."""
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert arguments.window(torch.tensor([37, 11], dtype=dtype)) == (37, 11)
    assert arguments.window(torch.tensor([[-1], [3]])[:, 0]) == (-1, 3)
    for wrong in (torch.tensor([1.0, 2.0]), torch.tensor([1j, 2j])):
        with pytest.raises(TypeError, match="^the left side of window_size is .*, expected an integer$"):
            arguments.window(wrong)
    q, k, v = (torch.randn(1, 90, 2, 16) for _ in range(3))
    for mask in (dict(), dict(causal=True)):
        given, expected = (flash_attn_func(q, k, v, window_size=x, **mask) for x in (torch.tensor([37, 11]), (37, 11)))
        assert torch.equal(given, expected)


@pytest.mark.parametrize("function, name", cases(NUMBERS) + cases(INTEGERS) + cases(FLAGS))
def test_a_number_that_requires_grad_is_refused(function, name):
    if "positions" in name:
        pytest.skip("skipped: a tensor there is one of positions, and of integers")
    given = torch.tensor(1.0, requires_grad=True)
    refused(function, NotImplementedError, f"{name} {GRAD}", **{name: given})


def test_transforms_over_a_number_are_refused():
    x = torch.zeros(SHAPE, dtype=torch.bfloat16)

    def loss(scale):
        return flash_attn_func(x, x, x, scale).float().sum()

    with pytest.raises(NotImplementedError, match=f"^softmax_scale {GRAD}$"):
        torch.func.grad(loss)(torch.tensor(0.5))
    with pytest.raises(NotImplementedError, match="^softmax_scale has a tangent"):
        torch.func.jvp(loss, (torch.tensor(0.5),), (torch.tensor(1.0),))


def test_the_number_that_a_tensor_holds():
    leaf = torch.tensor(0.5, requires_grad=True)
    for given in (torch.tensor(0.5), leaf.detach(), torch.tensor(0.5, dtype=torch.bfloat16)):
        assert arguments.number("softmax_scale", given) == 0.5
    with torch.no_grad():
        assert arguments.number("softmax_scale", leaf) == 0.5
        assert arguments.number("softmax_scale", torch.nn.Parameter(leaf.detach())) == 0.5
    assert arguments.integer("sm_margin", torch.tensor(3)) == 3 and arguments.flag("causal", torch.tensor(True)) is True
    with pytest.raises(TypeError, match=r"^softcap is a tensor of shape \(2,\), expected a number$"):
        arguments.number("softcap", torch.zeros(2))
    with pytest.raises(TypeError, match="^sm_margin is 3.0, expected an integer$"):
        arguments.integer("sm_margin", torch.tensor(3.0))
    with FakeTensorMode(), pytest.raises(TypeError, match="^softcap is a tensor on cuda:0, for which the call would wait"):
        arguments.number("softcap", torch.tensor(1.0, device="cuda"))


def test_numbers_of_numpy():
    numpy = pytest.importorskip("numpy", reason="skipped: numpy is not installed")
    assert arguments.number("softmax_scale", numpy.float32(0.5)) == 0.5
    assert arguments.number("softmax_scale", numpy.array(0.5)) == 0.5
    assert arguments.integer("sm_margin", numpy.int64(3)) == 3 and arguments.flag("causal", numpy.bool_(True)) is True
    with pytest.raises(TypeError, match="^softmax_scale is a ndarray, expected a number$"):
        arguments.number("softmax_scale", numpy.zeros(2))


def test_descales_are_tensors():
    for name in ("q_descale", "k_descale", "v_descale", "v_mean"):
        refused(flash_attn_func, TypeError, f"{name} is float, expected torch.Tensor", **{name: 1.0})
    for name in ("cos", "sin"):
        for function in (quantize, flash_attn_fp8_func):
            refused(function, TypeError, f"{name} is float, expected torch.Tensor", **{name: 1.0})
    refused(flash_attn_func, ValueError, "out_dtype is bf16, expected torch.float16 or torch.bfloat16", out_dtype="bf16")
    refused(quantize, TypeError, "scales_of is 3, expected 'blocks', 'heads' or 'tensor'", scales_of=3)


@pytest.mark.parametrize("options", [dict(softmax_scale="1"), dict(sm_margin=1.5), dict(window_size=(0, 1.5))], ids=str)
def test_compiled_calls_are_refused_by_the_same_sentence(options):
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises((TypeError, ValueError)) as plain:
        flash_attn_func(*tensors(flash_attn_func), **options)
    attend = torch.compile(functools.partial(flash_attn_func, **options), backend="aot_eager")
    x = torch.zeros(SHAPE, dtype=torch.bfloat16)
    with pytest.raises(type(plain.value), match=f"^{re.escape(str(plain.value))}"):
        attend(x, x, x)


def test_symbols_stay_symbols():
    """If a window grows with the sequence length, one graph serves all lengths."""
    seen = []

    def backend(graph, _):
        seen.append(graph)
        return lambda *_: (torch.zeros(1),)

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def attend(x):
        return flash_attn_func(x, x, x, window_size=(x.shape[1] // 2, 0), sm_margin=x.shape[1] // 8) * 2

    for seqlen in (16, 40, 64):
        attend(torch.zeros(2, seqlen, 4, 64, dtype=torch.bfloat16))
    assert len(seen) == 1


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_for_another_function(layout):
    x = torch.nested.nested_tensor([torch.zeros(n, 4, 16) for n in (3, 5)], layout=layout, requires_grad=True)
    for given in (x, x.detach()):
        with pytest.raises(TypeError, match="is a nested tensor: flash_attn_varlen_func takes its values, with its"):
            flash_attn_func(given, given, given)
    with pytest.raises(TypeError, match="^qkv is a nested tensor"):
        flash_attn_qkvpacked_func(x)
    if layout == torch.jagged:
        with pytest.raises(TypeError, match="^q is a nested tensor"):
            flash_attn_with_kvcache(x, x, x)
