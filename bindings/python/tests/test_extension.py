"""The extension module, which takes plain integers. Needs neither torch nor a GPU."""

import ast
import importlib.metadata
import inspect
import re
import sys
from pathlib import Path

import pytest

import fa3
import fa3._fa3 as extension
from fa3._without_torch import stand_in

NO_SUCH_DEVICE = 0x7000_0000
# The public functions that need torch, with their modules.
FUNCTIONS = [
    ("attention", "flash_attn_func"),
    ("attention", "flash_attn_qkvpacked_func"),
    ("fp8", "flash_attn_fp8_func"),
    ("varlen", "flash_attn_varlen_func"),
    ("varlen", "flash_attn_varlen_qkvpacked_func"),
    ("kvcache", "flash_attn_with_kvcache"),
    ("kvcache", "get_scheduler_metadata"),
    ("flash_attn_interface", "_flash_attn_forward"),
    ("flash_attn_interface", "_flash_attn_backward"),
    ("quantize", "quantize"),
    ("quantize", "quantize_channels"),
    ("combine", "flash_attn_combine"),
]


def tensor(shape=(2, 16, 4, 64), dtype="bf16", address=0x1000, strides=None):
    batch, seqlen, heads, head_dim = shape
    contiguous = (seqlen * heads * head_dim, heads * head_dim, head_dim, 1)
    return (dtype, address, shape, strides or contiguous)


def run(operation, tensors, options, device=NO_SUCH_DEVICE, stream=0):
    given = {name: x for name, x in tensors.items() if x is not None}
    return extension.run(extension.Operation(operation, **options), device, stream, given, None)


def vector(address, count, dtype="f32"):
    return None if address is None else (dtype, address, (count,), (1,))


def attention(q, k, v):
    """The tensors Q, K, V and O of a call, by name."""
    batch, seqlen, heads, _ = q[2]
    return dict(q=q, k=k, v=v, o=tensor((batch, seqlen, heads, v[2][-1]), q[0], 0x100000))


def forward(
    q=tensor(), k=tensor(), v=tensor(), v_mean=None, scale=None, window=(-1, -1, 0), softcap=None, sm_margin=0
):
    options = dict(softmax_scale=scale, window=window, softcap=softcap, sm_margin=sm_margin)
    run("forward", attention(q, k, v) | dict(v_mean=vector(v_mean, 1)), options)


def packed(count, lists, hints):
    """The lists of packed sequences, and the hints of their longest lengths."""
    (ends_q, ends_k), (used_q, used_k) = lists
    ends = dict(cu_seqlens_q=vector(ends_q, count + 1, "i32"), cu_seqlens_k=vector(ends_k, count + 1, "i32"))
    used = dict(seqused_q=vector(used_q, count, "i32"), seqused_k=vector(used_k, count, "i32"))
    return ends | used, dict(max_seqlen_q=hints[0], max_seqlen_k=hints[1])


def packed_forward(
    q=tensor((1, 16, 4, 64)),
    k=tensor((1, 20, 2, 64)),
    count=3,
    lists=((0x50000, 0x60000), (None, 0x70000)),
    hints=(9, None),
    device=NO_SUCH_DEVICE,
    stream=0,
    v_mean=None,
):
    sequences, options = packed(count, lists, hints)
    tensors = attention(q, k, k) | sequences | dict(v_mean=vector(v_mean, 1))
    return run("forward", tensors, options, device, stream)


def fp8_forward(q=tensor(), k=tensor(), v=tensor(), rotation=None, seed=None, v_channels=False, scale=None, window=(-1, -1, 0)):
    tables, positions = rotation or ({}, {})
    options = dict(hadamard_seed=seed, v_channels=v_channels, softmax_scale=scale, window=window)
    run("fp8_forward", attention(q, k, v) | tables, options | positions)


def gradients(q, k, v, dout):
    """The tensors of a backward pass, by name."""
    written = dict(dq=q, dk=k, dv=v)
    addresses = (0x200000, 0x300000, 0x400000)
    outputs = {name: tensor(x[2], x[0], at) for (name, x), at in zip(written.items(), addresses)}
    batch, rows, heads, _ = q[2]
    lse = ("f32", 0x180000, (batch, heads, rows), (heads * rows, rows, 1))
    return attention(q, k, v) | outputs | dict(dout=dout, lse=lse)


def backward(q=tensor(), k=tensor(), v=tensor(), dout=tensor(), softcap=None):
    run("backward", gradients(q, k, v, dout), dict(softcap=softcap))


def packed_backward(
    q=tensor((1, 16, 4, 64)),
    k=tensor((1, 20, 2, 64)),
    dout=tensor((1, 16, 4, 64)),
    count=3,
    lists=((0x50000, 0x60000), (None, 0x70000)),
    hints=(9, None),
    device=-1,
    stream=None,
):
    sequences, options = packed(count, lists, hints)
    return run("backward", gradients(q, k, k, dout) | sequences, options | dict(deterministic=True), device, stream)


def quantize(x=tensor(), rotation=None, seed=None, **scales):
    tables, positions = rotation or ({}, {})
    tensors = dict(x=x, codes=tensor(dtype="e4m3", address=0x10000), scales=vector(0x20000, 1))
    run("quantize", tensors | tables, dict(hadamard_seed=seed) | scales | positions)


def quantize_channels(x=tensor()):
    tensors = dict(x=x, codes=tensor(dtype="e4m3", address=0x10000), scales=vector(0x20000, 1), mean=vector(0x30000, 1))
    run("quantize", tensors, {})


def tables(rows, rotary_dim):
    shape = (rows, rotary_dim // 2), (rotary_dim // 2, 1)
    return dict(cos=("f32", 0x30000, *shape), sin=("f32", 0x40000, *shape))


def rotation(rows=16, rotary_dim=64, first=0):
    return tables(rows, rotary_dim), dict(first_position=first)


def qk_rotation(rows=16, rotary_dim=64, of_q=(None, 0), of_k=(None, 0)):
    lists = dict(q_positions=vector(of_q[0], 32, "i32"), k_positions=vector(of_k[0], 32, "i32"))
    return tables(rows, rotary_dim) | lists, dict(q_first=of_q[1], k_first=of_k[1])


def test_the_version_is_the_packages():
    assert fa3.__version__ == extension.__version__
    manifest = Path(__file__).parents[1] / "Cargo.toml"
    assert re.search(r'^version = "(.*)"$', manifest.read_text(), re.MULTILINE)[1] == fa3.__version__


def test_the_licences_are_installed():
    files = {file.name for file in importlib.metadata.files("fa3")}
    assert {"LICENSE-APACHE", "LICENSE-MIT"} <= files


def test_importing_needs_no_torch():
    for name in fa3.__all__:
        if "torch" in sys.modules:
            assert getattr(fa3, name)
        elif name != "__version__":
            # Feature tests, documentation tools and `from fa3 import` work without torch. Only a call needs it.
            assert hasattr(fa3, name)
            with pytest.raises(ImportError, match=f"^fa3.{name} needs PyTorch, which is not installed$"):
                getattr(fa3, name)(None, None, None, causal=True)
    assert not hasattr(fa3, "flash_attention")


def test_what_stands_for_a_function_without_torch_documents_it():
    package = Path(fa3.__file__).parent
    for module, name in FUNCTIONS:
        function = stand_in(module, name)
        tree = ast.parse((package / f"{module}.py").read_text())
        *_, definition = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        assert inspect.getdoc(function) == inspect.cleandoc(ast.get_docstring(definition))
        # Types are text in one of the two, and may have quotes of their own.
        texts = ast.unparse(definition.args), str(inspect.signature(function))
        arguments, signature = (re.sub("['\"]", "", text).replace(" = ", "=") for text in texts)
        assert signature.startswith(f"({arguments}) -> ")
        assert (function.__name__, function.__module__) == (name, f"fa3.{module}")
        with pytest.raises(ImportError, match=f"^fa3.{name} needs PyTorch, which is not installed$"):
            function()


def test_the_stub_has_the_doors_parameters():
    stub = ast.parse((Path(__file__).parents[1] / "python/fa3/_fa3.pyi").read_text())
    doors = [(extension, node) for node in stub.body if isinstance(node, ast.FunctionDef)]
    classes = [node for node in stub.body if isinstance(node, ast.ClassDef)]
    assert set(extension.__all__) == {x.name for x in (*(door for _, door in doors), *classes)} | {"__version__"}
    doors += [(extension.Repeats, x) for x in classes[1].body if isinstance(x, ast.FunctionDef) and x.name[0] != "_"]
    for owner, door in doors:
        parameters = inspect.signature(getattr(owner, door.name)).parameters
        assert [argument.arg for argument in door.args.args] == list(parameters)


@pytest.mark.parametrize(
    "operation, tensors, options, sentence",
    [
        ("attend", {}, {}, "there is no operation attend"),
        ("forward", dict(bias=vector(0x50000, 4)), {}, "the operation has no tensor bias"),
        ("forward", dict(dout=tensor()), {}, "the operation has no tensor dout"),
        ("forward", {}, dict(deterministic=True), "the operation has no option deterministic"),
        ("append", {}, {}, "there is no k_new"),
    ],
)
def test_what_an_operation_does_not_know_is_refused(operation, tensors, options, sentence):
    with pytest.raises((TypeError, ValueError), match=f"^{sentence}$"):
        run(operation, attention(tensor(), tensor(), tensor()) | tensors, options)


WITH_LSE = [x for x in FUNCTIONS if x[0] in ("attention", "fp8", "varlen") or x[1] == "flash_attn_with_kvcache"]


@pytest.mark.parametrize("module, name", WITH_LSE)
def test_types_say_how_many_tensors_there_are(module, name):
    package = Path(__file__).parents[1] / "python/fa3"

    tree = ast.parse((package / f"{module}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    *overloads, (arguments, result) = [(ast.unparse(x.args), ast.unparse(x.returns)) for x in functions]
    flag = "return_softmax_lse" if module == "kvcache" else "return_attn_probs"
    both = "tuple[Tensor, Tensor, None, None]" if module == "kvcache" else "tuple[Tensor, Tensor]"
    without = arguments.replace("return_max_logits: bool=False", "return_max_logits: Literal[False]=False")
    rest, more = without.split(f"{flag}: bool=False")
    star = "" if "*, " in rest else "*, "
    assert overloads == [
        (f"{rest}{flag}: Literal[False]=False{more}", "Tensor"),
        (f"{rest}{star}{flag}: Literal[True]{more.removeprefix(', *')}", both),
        (arguments, result),
    ]


# Bad calls that torch's tensors and this package's functions cannot express.
BAD = [
    (forward, dict(q=tensor(dtype="f64")), "a tensor is f64, expected one of torch.float32, torch.float16, torch.bfloat16 and torch.float8_e4m3fn"),
    (forward, dict(q=tensor(strides=(4096, 256, 64, 2))), "q has stride 2 in head_dim, expected 1"),
    (forward, dict(scale=-1.0), "softmax scale -1 is outside 1e-18 to 1e18"),
    (forward, dict(scale=10**309), f"1{'0' * 309} is too large or too small a number"),
    (forward, dict(window=(-2, 0, 0)), "window size -2 is outside -1 to 2^32 - 1"),
    (forward, dict(window=(0, 0, -1)), "attention_chunk -1 is outside 0 to 2^32 - 1"),
    (forward, dict(window=(0, 2**63, 0)), "9223372036854775808 is too large or too small a number"),
    (forward, dict(sm_margin=-(2**64)), "-18446744073709551616 is too large or too small a number"),
    (forward, dict(v_mean=0x30000), "block scales take torch.float8_e4m3fn, dense or packed, and channel scales torch.float8_e4m3fn, dense, not torch.bfloat16"),
    (packed_forward, dict(q=tensor((2, 16, 4, 64))), "q has batch 2, expected 1"),
    (packed_forward, dict(k=tensor((2, 20, 2, 64))), "k has batch 2, expected 1"),
    (packed_forward, dict(q=tensor((1, 1 << 30, 4, 64)), k=tensor((1, 1 << 30, 2, 64)), device=0, stream=None), "sequences may have 16777220 row blocks, the limit of a table is 2097152"),
    (packed_forward, dict(hints=(2**63, None)), "9223372036854775808 is too large or too small a number"),
    (packed_forward, dict(v_mean=0x30000), "block scales take torch.float8_e4m3fn, dense or packed, and channel scales torch.float8_e4m3fn, dense, not torch.bfloat16, packed"),
    (packed_backward, dict(q=tensor((2, 16, 4, 64)), dout=tensor((2, 16, 4, 64))), "q has batch 2, expected 1"),
    (
        packed_backward,
        dict(dout=tensor((1, 15, 4, 64))),
        "dout is torch.bfloat16 (1, 15, 4, 64), expected torch.bfloat16 (16, 4, 64): (total_q, heads_q, head_dim_v)",
    ),
    (packed_backward, dict(hints=(2**63, None)), "9223372036854775808 is too large or too small a number"),
    (backward, dict(dout=tensor(strides=(4096, 256, 64, 0))), "dout has stride 0 in head_dim, expected 1"),
    (backward, dict(dout=tensor(strides=(4096, 258, 64, 1))), "dout has stride 258 in seqlen, not a multiple of 8 elements (16 bytes)"),
    (
        backward,
        dict(dout=tensor((2, 15, 4, 64))),
        "dout is torch.bfloat16 (2, 15, 4, 64), expected torch.bfloat16 (2, 16, 4, 64): (batch, seqlen_q, heads_q, head_dim_v)",
    ),
    (backward, dict(softcap=-2.0), "soft cap -2 is outside 1e-18 to 1e18"),
    # The signs for such a head_dim would not fit into memory.
    (quantize, dict(x=tensor((0, 0, 1, 2**60)), seed=0), "x has head_dim 1152921504606846976, more than 2147483647"),
    (quantize, dict(x=tensor(strides=(4096, 256, 64, 2))), "x has stride 2 in head_dim, expected 1"),
    (quantize, dict(block_rows=32), "scales of blocks of 32 rows, expected 64 or 128"),
    (quantize, dict(heads_per_scale=-1), "-1 is too large or too small a number"),
    # Of scale, heads_per_scale and block_rows, the first one that is given counts.
    (quantize, dict(heads_per_scale=3, block_rows=32), "a scale for each 3 heads, of which the tensor has 4"),
    (quantize, dict(scale=0.0, heads_per_scale=3), "the scale 0 is outside 2^-64 to 2^64"),
    (quantize, dict(seed=-1), "-1 is too large or too small a number"),
    (quantize, dict(seed=2**64), "18446744073709551616 is too large or too small a number"),
    (quantize, dict(rotation=rotation(first=-1)), "-1 is too large or too small a number"),
    (quantize_channels, dict(x=tensor((2, 16, 4, 72))), "x has head_dim 72, not a multiple of 16 up to 256"),
    (quantize_channels, dict(x=tensor(strides=(4096, 256, 64, 2))), "x has stride 2 in head_dim, expected 1"),
    (fp8_forward, dict(q=tensor((0, 0, 1, 2**60)), k=tensor((0, 0, 1, 2**60)), seed=0), "q has head_dim 1152921504606846976, more than 2147483647"),
    (fp8_forward, dict(q=tensor(strides=(4096, 256, 64, 2))), "q has stride 2 in head_dim, expected 1"),
    (fp8_forward, dict(v=tensor(strides=(4096, 257, 64, 1))), "v: x has stride 257 in seqlen, not a multiple of 8 elements (16 bytes)"),
    (fp8_forward, dict(window=(-2, 0, 0)), "window size -2 is outside -1 to 2^32 - 1"),
    (fp8_forward, dict(seed=2**64), "18446744073709551616 is too large or too small a number"),
    # q has a list of positions but no rows, and so no last position.
    (fp8_forward, dict(rotation=qk_rotation(rows=0, of_q=(0x50000, 0))), "q: the last row is at position 0, the tables of cosines and sines have 0 rows"),
    (fp8_forward, dict(rotation=qk_rotation(of_k=(None, -1))), "-1 is too large or too small a number"),
]


@pytest.mark.parametrize("function, arguments, sentence", BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_problems_are_value_errors(function, arguments, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        function(**arguments)


@pytest.mark.parametrize("hint", [0, 1, 16, 10**9, -1, -(2**63)])
def test_hints_of_packed_sequences_may_be_any(hint):
    for device in (-1, 0):
        assert packed_forward(hints=(hint, hint), device=device, stream=None) is None
        assert packed_backward(hints=(hint, hint), device=device) is None


def test_other_ranks_are_value_errors():
    for shape, sentence in (((4, 64), "q has 2 dimensions, expected 4"), ((1,) * 6, "q has 6 dimensions and 6 strides")):
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            run("forward", dict(q=("bf16", 0x1000, shape, (64,) * (len(shape) - 1) + (1,)), k=tensor(), v=tensor()), {})


def test_other_types_are_type_errors():
    with pytest.raises(TypeError):
        run("forward", dict(q=("bf16", "0", (1,), (1,))), {})
    with pytest.raises(TypeError):
        forward(scale="1")
    with pytest.raises(TypeError):
        quantize(seed=0.5)


@pytest.mark.parametrize(
    "call",
    [
        forward,
        packed_forward,
        backward,
        lambda: quantize(rotation=rotation(), seed=2**64 - 1, block_rows=128),
        *(lambda heads=heads: quantize(heads_per_scale=heads) for heads in (1, 2, None)),
        quantize_channels,
        *(lambda v=v: fp8_forward(rotation=qk_rotation(of_q=(0x50000, 0)), seed=2**64 - 1, v_channels=v) for v in (False, True)),
    ],
)
def test_a_missing_device_is_a_runtime_error(call):
    with pytest.raises(RuntimeError, match="libcuda cannot be loaded|no device 1879048192: the driver has|CUDA_ERROR"):
        call()


@pytest.mark.parametrize(
    "q, sentence",
    [
        (tensor(address=0), "q has a null address"),
        (tensor(address=0x1001), "q lies at 0x1001, not a multiple of 2 bytes"),
        (tensor(strides=(4096, -256, 64, 1)), "q has stride -256 in seqlen"),
    ],
)
def test_memory_that_the_cpu_cannot_read_is_refused(q, sentence):
    for operation in ("forward", "fp8_forward"):
        with pytest.raises(ValueError, match=f"^{sentence}"):
            run(operation, attention(q, tensor(), tensor()), {}, device=-1)


@pytest.mark.parametrize(
    "lists, sentence",
    [
        (((0, 0x60000), (None, None)), "cu_seqlens_q has a null address"),
        (((0x50001, 0x60000), (None, None)), "cu_seqlens_q lies at 0x50001, not a multiple of 4 bytes"),
        (((0x50000, 2**64 - 8), (None, None)), "cu_seqlens_k at 0xfffffffffffffff8 with 16 bytes runs past the end"),
        (((0x50000, 0x60000), (0, None)), "seqused_q has a null address"),
        (((0x50000, 0x60000), (None, 0x70002)), "seqused_k lies at 0x70002, not a multiple of 4 bytes"),
    ],
)
def test_lists_that_the_cpu_cannot_read_are_refused(lists, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        packed_forward(lists=lists, device=-1)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        packed_backward(lists=lists, stream=0)


@pytest.mark.parametrize("device", [-1, 0, NO_SUCH_DEVICE])
def test_without_a_stream_a_call_is_only_checked(device):
    """The addresses are no memory: a call that read them would crash."""
    q = tensor(address=0)
    inputs = attention(q, q, q)
    assert run("forward", inputs, {}, device, None) is None
    assert run("backward", gradients(q, q, q, q), {}, device, None) is None
    for mean in (None, vector(0, 1)):
        assert run("quantize", dict(x=q, codes=q, scales=vector(0, 1), mean=mean), dict(block_rows=128), device, None) is None
    given, options = qk_rotation(of_q=(0, 0), of_k=(None, 0))
    options |= dict(hadamard_seed=7, v_channels=True)
    assert run("fp8_forward", inputs | given, options, device, None) is None
    with pytest.raises(ValueError, match="^soft cap -1 is outside"):
        run("forward", inputs, dict(softcap=-1.0), device, None)
