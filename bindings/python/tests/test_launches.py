"""How calls reach the extension module, and when they take torch's dispatcher instead. Needs torch but no GPU: tensors
on the CPU claim to be on a GPU, and a stand-in for the extension module notes its calls.
"""

import itertools
import sys

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from torch.overrides import TorchFunctionMode

from fa3 import _fa3, flash_attn_func, gradient, operator, varlen_operator

SHAPE = (2, 16, 4, 64)
OPTIONS = (None, -1, 0, 0, 0.0, 0)


class OnGpu(torch.Tensor):
    """A tensor on the CPU that claims to be on a GPU."""

    is_cuda = True

    def get_device(self):
        return 0


def on_gpu(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype).as_subclass(OnGpu)


@pytest.fixture
def calls(monkeypatch):
    """The calls of the extension module, as tuples of arguments."""
    calls = []
    monkeypatch.setattr(_fa3, "run", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(operator, "current_stream", lambda device: 7)
    return calls


def places(given):
    """The addresses of tensors, by name."""
    return {name: x if isinstance(x, int) else x.data_ptr() for name, x in given.items() if x is not None}


def addresses(**tensors):
    return {name: x.data_ptr() for name, x in tensors.items()}


@pytest.fixture
def modes():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("asked, mode", [*itertools.product([False, True], [None, "error", "warn"])])
def test_the_mode_of_deterministic_algorithms_asks_for_the_same_bits(calls, modes, asked, mode):
    """The mode counts at the time of the backward pass. Its warnings count like its errors."""
    x = on_gpu(SHAPE)
    lse = on_gpu(2, 4, 16, dtype=torch.float32)
    if mode:
        torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
    gradient.launch(x, x, x, x, x, lse, None, *OPTIONS, deterministic=asked)
    [(operation, *_)] = calls
    assert operation.name == "backward" and operation.options["deterministic"] is (asked or mode is not None)


def test_a_call_enters_the_extension_module_once(calls):
    """Within its one call, the extension module asks for the memory that it needs."""
    x, lse = on_gpu(SHAPE), on_gpu(2, 4, 16, dtype=torch.float32)
    operator.launch(x, x, x, *OPTIONS)
    gradient.launch(x, x, x, x, x, lse, None, *OPTIONS)
    sys.modules["fa3.quantize"]._launch(x, None, None, None, False, 0, None, 128, None, False, "heads")
    sys.modules["fa3.fp8"]._launch(x, x, x, None, None, None, None, False, 0, 0, None, True, None, -1, 0, 0.0)
    assert [operation.name for operation, *_ in calls] == ["forward", "backward", "quantize", "fp8_forward"]
    for _, *at, _, allocate in calls:
        assert at == [0, 7]
        address, memory = allocate(1024, 256)
        assert memory.data_ptr() == address and memory.nbytes == 1024 and memory.dtype == torch.uint8
        assert not memory[:256].any()


def test_addresses_and_options_are_in_their_places(calls):
    q, k, v = on_gpu(SHAPE), on_gpu(2, 24, 2, 64), on_gpu(2, 24, 2, 32)
    o, lse = operator.launch(q, k, v, 0.5, 9, 0, 5, 20.0, 2)
    [(operation, _, _, tensors, _)] = calls
    assert places(tensors) == addresses(q=q, k=k, v=v, o=o, lse=lse)
    assert operation.options == dict(softmax_scale=0.5, window=(9, 0, 5), softcap=20.0, sm_margin=2)
    assert o.shape == (2, 16, 4, 32)


def test_addresses_and_options_of_packed_sequences_are_in_their_places(calls):
    q, k, v = on_gpu(16, 4, 64), on_gpu(24, 2, 64), on_gpu(24, 2, 32)
    lists = [on_gpu(n, dtype=torch.int32) for n in (4, 4, 3, 3)]
    numbers = (7, None, 0.5, 9, 0, 5, 20.0, 2)
    o, lse = varlen_operator.launch(q, k, v, *lists, *numbers)
    gradients = varlen_operator.launch_backward(o, q, k, v, o, lse, None, *lists, *numbers, True)
    [(forward, *at, tensors, _), (backward, *at_backward, of_backward, _)] = calls
    assert (forward.name, backward.name) == ("forward", "backward") and at == at_backward == [0, 7]
    inputs = dict(q=q, k=k, v=v) | dict(zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"), lists))
    assert places(tensors) == addresses(**inputs, o=o, lse=lse)
    numbers = dict(softmax_scale=0.5, window=(9, 0, 5), softcap=20.0, sm_margin=2, max_seqlen_q=7, max_seqlen_k=None)
    assert forward.options == numbers and backward.options == numbers | dict(deterministic=True)
    assert (o.shape, lse.shape) == ((16, 4, 32), (4, 16))
    dq, dk, dv = gradients
    assert places(of_backward) == addresses(**inputs, o=o, lse=lse, dout=o, dq=dq, dk=dk, dv=dv)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_addresses_of_sinks_are_in_their_places(calls):
    q, sinks, lse = on_gpu(SHAPE), on_gpu(4, dtype=torch.float32), on_gpu(2, 4, 16, dtype=torch.float32)
    operator.launch(q, q, q, *OPTIONS, s_aux=sinks)
    *_, gradient_of_sinks = gradient.launch(q, q, q, q, q, lse, None, *OPTIONS, s_aux=sinks)
    forward, backward = (places(tensors) for _, _, _, tensors, _ in calls)
    assert forward["sink"] == backward["sink"] == sinks.data_ptr()
    assert backward["dsink"] == gradient_of_sinks.data_ptr()
    assert (gradient_of_sinks.shape, gradient_of_sinks.dtype) == ((4,), torch.float32)


def test_addresses_of_intervals_are_in_their_places(calls):
    q, lse = on_gpu(SHAPE), on_gpu(2, 4, 16, dtype=torch.float32)
    intervals = on_gpu(1, 4, 16, 2, dtype=torch.int32)
    operator.launch(q, q, q, *OPTIONS, intervals=intervals)
    gradient.launch(q, q, q, q, q, lse, None, *OPTIONS, intervals=intervals)
    for _, _, _, tensors, _ in calls:
        assert tensors["intervals"] is intervals


def test_addresses_and_options_of_attention_in_8_bits_are_in_their_places(calls):
    q, k, v = on_gpu(SHAPE), on_gpu(2, 24, 2, 64), on_gpu(2, 24, 2, 32)
    cos, sin = on_gpu(40, 16, dtype=torch.float32), on_gpu(40, 16, dtype=torch.float32)
    listed = on_gpu(2, 24, dtype=torch.int32)
    launch = sys.modules["fa3.fp8"]._launch
    o, lse = launch(q, k, v, cos, sin, None, listed, True, 7, 0, -1, True, 0.5, 9, 0, 20.0)
    [(operation, _, _, tensors, _)] = calls
    assert places(tensors) == addresses(q=q, k=k, v=v, cos=cos, sin=sin, k_positions=listed, o=o, lse=lse)
    positions = dict(interleaved=True, q_first=7, k_first=0)
    scores = dict(softmax_scale=0.5, window=(9, 0, 0), softcap=20.0)
    assert operation.options == dict(hadamard_seed=2**64 - 1, v_channels=True) | positions | scores
    assert (o.shape, o.dtype) == ((2, 16, 4, 32), torch.bfloat16)


class Noting(torch.Tensor):
    """A tensor that notes whether it is copied."""

    is_copied = False

    def contiguous(self):
        self.is_copied = True
        return super().contiguous()

    def clone(self):
        self.is_copied = True
        return super().clone()


X, LIST = torch.zeros(3, 16, 4, 128, dtype=torch.bfloat16), torch.zeros(99, dtype=torch.int32)
ROW, SHIFTED = X[:1, :1, :1, :64], torch.zeros(2 * 16 * 4 * 64 + 8, dtype=torch.bfloat16)
READABLE = [X, X.transpose(1, 2), X[:, ::3, 1:2, :8], X[..., 8:72], ROW.expand(2, 16, 4, 64), SHIFTED[8:].view(2, 16, 4, 64)]
# The stride of a dimension with one entry has no meaning.
READABLE += [X[:1, :, :1, :64].as_strided((1, 16, 1, 64), (3, 64, 5, 1))]
UNREADABLE = [X[:1, :1, :1, :1].expand(2, 16, 4, 64), X.transpose(1, 3)[:, :64], X[..., ::2], X[..., 4:68]]
UNREADABLE += [SHIFTED[1:-7].view(2, 16, 4, 64), torch.zeros(2, 16, 4, 66, dtype=torch.bfloat16)[..., :64]]


@pytest.mark.parametrize(
    "name, x, of_gpu, of_cpu",
    [
        ("q", X[..., :64], False, False),
        ("q", X[..., ::2], True, False),
        ("page_table", LIST[:21].view(3, 7), False, False),
        ("page_table", LIST[:60].view(3, 20)[:, 5:12], False, True),
        ("page_table", LIST[:60].view(3, 20)[:, :14:2], True, True),
        ("page_table", LIST[:21].view(7, 3).t(), True, True),
        ("page_table", LIST[:7].expand(3, 7), True, True),
        ("seqused_k", LIST[1:4], False, False),
        ("seqused_k", LIST[:6:2], True, True),
        # Kernels read 16 bytes of intervals at a time.
        ("intervals", LIST[4:36].view(1, 1, 16, 2), False, False),
        ("intervals", LIST[1:33].view(1, 1, 16, 2), True, False),
        *(("dout", x, False, False) for x in READABLE),
        *((name, x, True, True) for x in UNREADABLE for name in ("o", "dout")),
        ("o", READABLE[1], False, False),
        ("o", READABLE[4], True, True),
    ],
)
def test_what_cannot_be_read_is_copied(name, x, of_gpu, of_cpu):
    tensors, operation = dict.fromkeys("qkv", X[..., :64]), _fa3.Operation("forward")
    if name in ("o", "dout"):
        batch, rows, heads, _ = x.shape
        tensors = dict.fromkeys(("q", "k", "v", "o", "dout", "dq", "dk", "dv"), torch.zeros(x.shape, dtype=x.dtype))
        tensors["lse"], operation = torch.zeros(batch, heads, rows), _fa3.Operation("backward")
    if name in ("page_table", "seqused_k"):
        tensors |= dict(page_table=LIST[:21].view(3, 7), seqused_k=LIST[:3])
    for device, is_copied in ((0, of_gpu), (-1, of_cpu)):
        noting = x.as_subclass(Noting)
        _fa3.run(operation, device, None, tensors | {name: noting}, None)
        assert noting.is_copied is is_copied


def test_options_are_those_of_the_operators():
    """The names of arguments tell which of them have no gradient, and which the backward pass takes."""
    lists = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    for forward, backward, fields, between in (
        (torch.ops.fa3.forward, torch.ops.fa3.backward, operator.Options, ()),
        (torch.ops.fa3.varlen_forward, torch.ops.fa3.varlen_backward, varlen_operator.Options, lists),
    ):
        names = [argument.name for argument in forward.default._schema.arguments]
        assert tuple(names) == ("q", "k", "v", *between, *fields._fields)
        options = fields(*fields._fields)
        names = [argument.name for argument in backward.default._schema.arguments]
        expected = ("dout", "q", "k", "v", "o", "lse", "dlse", *between, *options.of_backward(), "intervals", "score", "score_tables")
        assert tuple(names) == expected


class Seen(TorchFunctionMode):
    """A user's mode that notes which functions of torch are called."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def forward_on_cpu(monkeypatch):
    """Notes calls of the operator through the dispatcher. Calls that bypass it fail."""
    seen = []

    def forward(q, k, v, *_):
        seen.append(q)
        return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)

    def compute(*_):
        raise AssertionError("the dispatcher was left out")

    library = torch.library.Library("fa3", "IMPL")
    library.impl("forward", forward, "CPU", allow_override=True)
    monkeypatch.setattr(operator, "compute", compute)
    yield seen
    library._destroy()


def test_a_mode_of_functions_sees_the_operator(forward_on_cpu):
    x = torch.zeros(SHAPE, dtype=torch.bfloat16)
    with Seen() as seen:
        flash_attn_func(x, x, x)
    assert len(forward_on_cpu) == 1
    assert any("fa3.forward" in str(function) or function is torch.ops.fa3.forward for function in seen.functions)


@pytest.mark.parametrize("owner, name", [
    (torch.Tensor, "_is_zerotensor"),
    (torch._C, "_is_tracing"),
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_len_torch_function_stack"),
    (torch._C, "_are_functorch_transforms_active"),
])
def test_where_torch_cannot_be_asked_the_dispatcher_is(monkeypatch, forward_on_cpu, owner, name):
    assert operator._can_ask()
    with monkeypatch.context() as without:
        if owner is torch._C:
            without.delattr(owner, name)
        else:
            without.setattr(operator, "Tensor", object)
        can_ask = operator._can_ask()
    assert not can_ask
    monkeypatch.setattr(operator, "_CAN_ASK", can_ask)
    x = torch.zeros(SHAPE, dtype=torch.bfloat16)
    flash_attn_func(x, x, x)
    assert len(forward_on_cpu) == 1


def test_the_stream_is_known_without_torchs_own_way(monkeypatch):
    class Stream:
        cuda_stream = 9

    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    assert operator.current_stream(0) == 9
