"""The backward pass beside torch's own work on a GPU: streams, graphs, memory, other GPUs; and how long a call takes. A
launch that finds another's workspace computes something else, and gradients start as NaN."""

import contextlib
import shutil

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from host_time import microseconds
from packing import assert_equal
from reference import judge_gradients
from torch.nn.functional import scaled_dot_product_attention

from fa3 import flash_attn_func

pytestmark = [pytest.mark.hopper, pytest.mark.usefixtures("nan_in_new_tensors")]


def step(q, k, v, dout, dlse=None, **options):
    """O, LSE and the gradients, the same bits in every run."""
    options.setdefault("deterministic", True)
    results = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    used, given = (results[:1], (dout,)) if dlse is None else (results, (dout, dlse))
    return [x.detach() for x in results] + list(torch.autograd.grad(used, (q, k, v), given))


@pytest.fixture
def problem(randn):
    """Q, K and V that require grad, dO and dLSE, with more tiles than SMs."""

    def make(seqlen=1024, head_dim=128, dtype=torch.bfloat16):
        leaves = [randn(4, seqlen, 16, head_dim, dtype=dtype).requires_grad_() for _ in "qkv"]
        return *leaves, randn(4, seqlen, 16, head_dim, dtype=dtype), randn(4, 16, seqlen, dtype=torch.float32)

    return make


def capture(function, **options):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        results = function()
    return graph, results


def test_the_stream_of_the_forward_pass_is_used(problem):
    q, k, v, dout, dlse = problem()
    other = problem()
    expected = step(*other, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Work before it, which it must wait for, and after it, which must wait for it.
        torch.cuda._sleep(20_000_000)
        with torch.no_grad():
            for x, new in zip((q, k, v, dout, dlse), other):
                x.copy_(new)
        results = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        copies = [x.detach().clone() for x in results]
        copies += [x.clone() for x in torch.autograd.grad(results, (q, k, v), (dout, dlse))]
    stream.synchronize()
    assert_equal(copies, expected)


def test_a_backward_pass_from_another_stream(problem):
    q, k, v, dout, dlse = problem()
    expected = step(q, k, v, dout, dlse)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        results = flash_attn_func(q, k, v, deterministic=True, return_attn_probs=True)
    gradients = torch.autograd.grad(results, (q, k, v), (dout, dlse))
    # Torch has made the current stream wait for the gradients, but not for the results.
    assert_equal(gradients, expected[2:])
    stream.synchronize()
    assert_equal(results, expected[:2])


def test_two_streams_at_once(problem):
    problems = [problem(), problem()]
    expected = [step(*given, causal=True) for given in problems]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream, given in zip(streams, problems):
            with torch.cuda.stream(stream):
                results.append(step(*given, causal=True))
        torch.cuda.synchronize()
        for result, right in zip(results, expected):
            assert_equal(result, right)


@pytest.mark.parametrize("causal", [False, True])
def test_graphs(problem, causal):
    given = problem()
    # A call before the capture compiles the kernels.
    step(*given, causal=causal)
    torch.cuda.synchronize()
    graph, results = capture(lambda: step(*given, causal=causal))
    for _ in range(3):
        with torch.no_grad():
            for x in given:
                x.copy_(torch.randn_like(x))
            for result in results:
                result.fill_(float("nan"))
        graph.replay()
        assert_equal(results, step(*given, causal=causal))


def test_the_first_call_of_all_is_captured(problem):
    """Kernels that no other test has, so that they are compiled during the capture."""
    given = problem(head_dim=160, dtype=torch.float16)
    options = dict(window_size=(613, 0), softcap=11.0)
    torch.cuda.synchronize()
    graph, results = capture(lambda: step(*given, **options))
    graph.replay()
    assert_equal(results, step(*given, **options))


@pytest.mark.parametrize("same_stream", [True, False], ids=["same stream", "other stream"])
def test_replays_beside_launches(problem, same_stream):
    captured, launched = problem(), problem()
    expected, expected_launched = step(*captured, causal=True), step(*launched, causal=True)
    stream = torch.cuda.Stream()
    other = stream if same_stream else torch.cuda.Stream()
    torch.cuda.synchronize()
    graph, results = capture(lambda: step(*captured, causal=True), stream=stream)
    torch.cuda.synchronize()
    seen = []
    for _ in range(10):
        with torch.cuda.stream(stream):
            for result in results:
                result.fill_(float("nan"))
            graph.replay()
            seen.append([x.clone() for x in results])
        with torch.cuda.stream(other):
            seen.append(step(*launched, causal=True))
    torch.cuda.synchronize()
    for results in seen[::2]:
        assert_equal(results, expected)
    for results in seen[1::2]:
        assert_equal(results, expected_launched)


def test_compiled_graphs(problem):
    if not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("skipped: inductor needs a C compiler")
    q, k, v, dout, dlse = problem()

    def layer(q, k, v):
        out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        return -out, -lse

    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    results = layer(q, k, v)
    expected = [*results, *torch.autograd.grad(results, (q, k, v), (dout, dlse))]
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        results = compiled(q, k, v)
        assert_equal([*results, *torch.autograd.grad(results, (q, k, v), (dout, dlse))], expected)
        # The next step writes over them.
        del results


def test_the_memory_of_a_backward_pass(problem):
    q, k, v, dout, _ = problem()
    step(q, k, v, dout)
    torch.cuda.empty_cache()
    out = flash_attn_func(q, k, v, deterministic=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = torch.autograd.grad(out, (q, k, v), dout)
    # The gradients; dQ in float32; 8 bytes for each row of a head of Q, and 4 for each 64 of them.
    rows = 4 * 16 * 1024
    workspace = 4 * q.numel() + 8 * rows + 4 * (rows // 64)
    # A cached block that is up to 1 MB larger than asked counts as a whole, for each of four.
    most = sum(2 * x.numel() for x in results) + workspace + (4 << 20)
    assert torch.cuda.max_memory_allocated() - before <= most
    del results, out
    torch.cuda.synchronize()
    # O and LSE are gone as well.
    assert torch.cuda.memory_allocated() < before


def test_other_gpus(randn):
    if torch.cuda.device_count() < 2:
        pytest.skip("skipped: one GPU only")
    given = [randn(2, 200, 4, 64).to("cuda:1") for _ in range(4)]
    leaves, dout = [x.requires_grad_() for x in given[:3]], given[3]
    with contextlib.nullcontext() if torch.cuda.get_device_capability(1) == (9, 0) else pytest.raises(RuntimeError):
        results = torch.autograd.grad(flash_attn_func(*leaves, causal=True), leaves, dout)
        judge_gradients(results, *leaves, dout, window=(-1, 0))


def test_host_time_of_a_repeated_call(randn):
    # Without the fixture's NaN, which take longer than the calls.
    torch.use_deterministic_algorithms(False)
    leaves = [randn(1, 128, 4, 128).requires_grad_() for _ in "qkv"]
    dout = randn(1, 128, 4, 128)
    q, k, v = (x.detach() for x in leaves)
    options = (None, -1, -1, 0, 0.0, 0)
    out, lse = torch.ops.fa3.forward(q, k, v, *options)

    def torchs(q, k, v):
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    times = {
        "torch's own": lambda: torchs(*leaves),
        "torch's own and its gradients": lambda: torch.autograd.grad(torchs(*leaves), leaves, dout),
        "flash_attn_func, no gradients": lambda: flash_attn_func(q, k, v),
        "flash_attn_func": lambda: flash_attn_func(*leaves),
        "flash_attn_func and its gradients": lambda: torch.autograd.grad(flash_attn_func(*leaves), leaves, dout),
        "torch.ops.fa3.forward": lambda: torch.ops.fa3.forward(*leaves, *options),
        "torch.ops.fa3.backward": lambda: torch.ops.fa3.backward(dout, q, k, v, out, lse, None, *options),
    }
    print()
    for name, function in times.items():
        function()
        times[name] = microseconds(function)
        print(f"{name:36}{times[name]:8.2f} us")
    # Hosts differ, and so do the threads of autograd there.
    assert times["flash_attn_func"] < 6 * times["torch's own"]
    assert times["flash_attn_func and its gradients"] < 4 * times["torch's own and its gradients"]
