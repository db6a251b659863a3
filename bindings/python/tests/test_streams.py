"""Both passes beside torch's own work on a GPU: streams, graphs, memory, compilers, the profiler; and how long a call
takes on the host. Launches take work tiles from a counter in a workspace. A launch that used the counter of another
would compute tiles twice or not at all. Outputs start as NaN.
"""

import ctypes
import json
import time

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from host_time import microseconds
from packing import assert_equal, needs_a_compiler
from torch.nn.functional import scaled_dot_product_attention

from fa3 import _fa3, flash_attn_func, flash_attn_varlen_func

pytestmark = [pytest.mark.hopper, pytest.mark.usefixtures("nan_in_new_tensors")]


def forward(q, k, v, *_, **options):
    return flash_attn_func(q, k, v, return_attn_probs=True, **options)


def both(q, k, v, dout, dlse, **options):
    """Computes O, LSE and the gradients, with the same bits in every run."""
    results = forward(*(x.requires_grad_() for x in (q, k, v)), deterministic=True, **options)
    return [x.detach() for x in results] + list(torch.autograd.grad(results, (q, k, v), (dout, dlse)))


@pytest.fixture(params=[forward, both])
def step(request):
    return request.param


@pytest.fixture
def make(randn):
    """Makes Q, K, V, dO and dLSE with more work tiles than SMs. Under a causal mask these tiles differ in length, so
    that launches take them from a counter.
    """

    def make(seqlen=1024, head_dim=128, dtype=torch.bfloat16):
        tensors = [randn(4, seqlen, 16, head_dim, dtype=dtype) for _ in range(4)]
        return *tensors, randn(4, 16, seqlen, dtype=torch.float32)

    return make


@pytest.fixture
def problem(make, step):
    """Makes a problem: (a function that computes it, the expected results)."""

    def problem():
        given = make()
        expected = step(*given, causal=True)
        torch.cuda.synchronize()
        return lambda: step(*given, causal=True), expected

    return problem


def capture(function, **options):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        results = function()
    return graph, results


def poison(results):
    with torch.no_grad():
        for result in results:
            result.fill_(float("nan"))


def test_the_current_stream_is_used(make, step):
    given, other = make(), make()
    expected = step(*other, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # The step must wait for the work before it, and the work after the step must wait for the step.
        torch.cuda._sleep(20_000_000)
        with torch.no_grad():
            for x, new in zip(given, other):
                x.copy_(new)
        copies = [x.clone() for x in step(*given, causal=True)]
    stream.synchronize()
    assert_equal(copies, expected)


def test_a_backward_pass_from_another_stream(make):
    q, k, v, dout, dlse = make()
    expected = both(q, k, v, dout, dlse)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        results = forward(q, k, v, deterministic=True)
    gradients = torch.autograd.grad(results, (q, k, v), (dout, dlse))
    # Torch has made the current stream wait for the gradients, but not for O and LSE.
    assert_equal(gradients, expected[2:])
    stream.synchronize()
    assert_equal(results, expected[:2])


def test_two_streams_at_once(problem):
    problems = [problem(), problem()]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(20):
        results = []
        for stream, (call, _) in zip(streams, problems):
            with torch.cuda.stream(stream):
                results.append(call())
        torch.cuda.synchronize()
        for result, (_, expected) in zip(results, problems):
            assert_equal(result, expected)


def test_streams_that_are_gone_while_their_work_is_not(make):
    """The driver may give a new stream the handle of a destroyed one."""
    given = make()
    expected = forward(*given, causal=True)
    torch.cuda.synchronize()
    driver = ctypes.CDLL("libcuda.so.1")
    non_blocking, results = 1, []
    for _ in range(16):
        raw = ctypes.c_void_p()
        assert driver.cuStreamCreate(ctypes.byref(raw), non_blocking) == 0
        with torch.cuda.stream(torch.cuda.ExternalStream(raw.value)):
            torch.cuda._sleep(1_000_000)
            results.append(forward(*given, causal=True))
        assert driver.cuStreamDestroy_v2(raw) == 0
    torch.cuda.synchronize()
    for result in results:
        assert_equal(result, expected)


def test_a_stream_that_was_used_in_inference_mode_is_used_outside(make):
    given = make()
    expected = forward(*given, causal=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        with torch.inference_mode():
            assert_equal(forward(*given, causal=True), expected)
        assert_equal(forward(*given, causal=True), expected)


# Tests of CUDA graphs.


@pytest.mark.parametrize("causal", [False, True])
def test_graphs(make, step, causal):
    given = make()

    def layers():
        """Two layers, of which the second one takes the O of the first one as Q."""
        first = flash_attn_func(*given[:3], causal=causal).detach()
        return step(first, *given[1:], causal=causal)

    # This call before the capture compiles the kernels.
    layers()
    torch.cuda.synchronize()
    graph, results = capture(layers)
    for _ in range(3):
        with torch.no_grad():
            for x in given:
                x.copy_(torch.randn_like(x))
        poison(results)
        graph.replay()
        assert_equal(results, layers())


def test_the_first_call_of_a_stream_is_captured(problem):
    call, expected = problem()
    graph, results = capture(call, stream=torch.cuda.Stream())
    for _ in range(3):
        poison(results)
        graph.replay()
        assert_equal(results, expected)


def test_the_first_call_of_all_is_captured(make, step):
    """No other test has these kernels, so they are compiled during the capture."""
    given = make(head_dim=160, dtype=torch.float16)
    options = dict(window_size=(613, 0), softcap=11.0)
    torch.cuda.synchronize()
    graph, results = capture(lambda: step(*given, **options))
    graph.replay()
    assert_equal(results, step(*given, **options))


def test_what_is_captured_is_computed_by_replays_alone(problem):
    """Captured work leaves no state for the stream's own launches to find, and they leave none for it."""
    call, expected = problem()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert_equal(call(), expected)
    graph, results = capture(call, stream=stream)
    with torch.cuda.stream(stream):
        assert_equal(call(), expected)
        graph.replay()
        assert_equal(results, expected)


@pytest.mark.parametrize("same_stream", [True, False], ids=["same stream", "other stream"])
def test_replays_beside_launches(problem, same_stream):
    (captured, expected), (launched, expected_launched) = problem(), problem()
    stream = torch.cuda.Stream()
    other = stream if same_stream else torch.cuda.Stream()
    graph, results = capture(lambda: [*captured(), *captured()], stream=stream)
    torch.cuda.synchronize()
    seen = []
    for _ in range(20):
        with torch.cuda.stream(stream):
            poison(results)
            graph.replay()
            seen.append([x.clone() for x in results])
        with torch.cuda.stream(other):
            seen.append(launched())
    torch.cuda.synchronize()
    for results in seen[::2]:
        assert_equal(results, [*expected, *expected])
    for results in seen[1::2]:
        assert_equal(results, expected_launched)


def test_two_graphs_at_once(problem):
    problems = [problem(), problem()]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    # Both graphs are captured on one stream, but must not share its counter.
    graphs = [capture(call) for call, _ in problems]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (graph, results) in zip(streams, graphs):
            with torch.cuda.stream(stream):
                poison(results)
                graph.replay()
        torch.cuda.synchronize()
        for (_, results), (_, expected) in zip(graphs, problems):
            assert_equal(results, expected)


def test_branches_of_a_graph(problem):
    (left, expected), (right, expected_right) = problem(), problem()

    def branches():
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            results = right()
        results = [*left(), *results]
        main.wait_stream(side)
        return results

    graph, results = capture(branches)
    for _ in range(20):
        poison(results)
        graph.replay()
        assert_equal(results, [*expected, *expected_right])


@pytest.mark.parametrize("with_gradients", [False, True])
def test_compiled_graphs(make, with_gradients):
    """The first run is not captured, but its memory is from the graph's pool, in which it must leave nothing. The
    second run is captured.
    """
    needs_a_compiler()
    q, k, v, dout, dlse = make()
    leaves = [x.requires_grad_(with_gradients) for x in (q, k, v)]

    def layer(q, k, v):
        out, lse = forward(q, k, v, causal=True, deterministic=True)
        return -out, -lse

    def step(function):
        results = function(*leaves)
        return [*results, *(torch.autograd.grad(results, leaves, (dout, dlse)) if with_gradients else ())]

    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    expected = step(layer)
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        assert_equal(step(compiled), expected)
        assert_equal(step(layer), expected)


# Tests of memory.


def test_a_workspace_is_asked_for_where_none_is_kept(make):
    q, k, v, *_ = make()
    expected = forward(q, k, v, causal=True)
    results = [torch.empty_like(x) for x in expected]
    asked = []

    def allocate(bytes, zeros):
        memory = torch.zeros(bytes, dtype=torch.uint8, device="cuda")
        asked.append((bytes, zeros))
        return memory.data_ptr(), memory

    def launch(allocate):
        named = zip(("q", "k", "v", "o", "lse"), (q, k, v, *results))
        names = {torch.bfloat16: "bf16", torch.float32: "f32"}
        given = {name: (names[x.dtype], x.data_ptr(), x.shape, x.stride()) for name, x in named}
        stream = torch.cuda.current_stream().cuda_stream
        _fa3.run(_fa3.Operation("forward", window=(-1, 0, 0)), 0, stream, given, allocate)

    launch(allocate)
    assert_equal(results, expected)
    assert not asked
    # While the stream is captured, no kept workspace is used.
    capture(lambda: launch(allocate))
    assert asked == [(256, 256)]

    def refuse(bytes, zeros):
        raise MemoryError(f"no {bytes} bytes")

    # An exception of `allocate` reaches the caller.
    with pytest.raises(MemoryError, match="^no 256 bytes$"):
        capture(lambda: launch(refuse))


def test_no_memory_of_torch_is_kept(make):
    given = make()
    with torch.cuda.stream(torch.cuda.Stream()):
        before = torch.cuda.memory_allocated()
        forward(*given, causal=True)
        assert torch.cuda.memory_allocated() == before


def test_the_memory_of_a_backward_pass(make):
    q, k, v, dout, dlse = make()
    both(q, k, v, dout, dlse)
    torch.cuda.empty_cache()
    out = flash_attn_func(q, k, v, deterministic=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = torch.autograd.grad(out, (q, k, v), dout)
    # Memory for the gradients; dQ in float32; 8 bytes for each row of a head of Q, and 4 for each 64 of these rows.
    rows = 4 * 16 * 1024
    workspace = 4 * q.numel() + 8 * rows + 4 * (rows // 64)
    # Torch may take a cached block up to 1 MB larger than asked, for each of four tensors.
    most = sum(2 * x.numel() for x in results) + workspace + (4 << 20)
    assert torch.cuda.max_memory_allocated() - before <= most
    del results, out
    torch.cuda.synchronize()
    # O and LSE are gone as well.
    assert torch.cuda.memory_allocated() < before


# Other tests: the profiler and the time on the host.


def test_a_margin_leaves_sms_to_others(make, tmp_path):
    # The fixture fills new tensors with NaN by kernels, which this test must not count.
    torch.use_deterministic_algorithms(False)
    given = make(2048)
    forward(*given, causal=True)
    grids = []
    for margin in (0, 32):
        forward(*given, causal=True, sm_margin=margin)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            forward(*given, causal=True, sm_margin=margin)
            torch.cuda.synchronize()
        path = tmp_path / f"{margin}.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        grids += [event["args"]["grid"][0] for event in events if event.get("cat") == "kernel"]
    if not grids:
        pytest.skip("skipped: the profiler sees no kernels on this machine")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert grids == [sms, sms - 32]


def test_host_time_of_a_repeated_call(randn):
    # The fixture's filling with NaN takes longer than the calls.
    torch.use_deterministic_algorithms(False)
    leaves = [randn(1, 128, 4, 128).requires_grad_() for _ in "qkv"]
    dout, long = randn(1, 128, 4, 128), [randn(2, 640, 8, 128) for _ in "qkv"]
    q, k, v = (x.detach() for x in leaves)
    packed, ends = [x[0] for x in (q, k, v)], torch.tensor([0, 40, 128], dtype=torch.int32, device="cuda")
    options = (None, -1, -1, 0, 0.0, 0)
    first = time.perf_counter()
    flash_attn_func(q, k, v, causal=True)
    print(f"\nfirst call of this process with these shapes: {(time.perf_counter() - first) * 1e3:.1f} ms")
    out, lse = torch.ops.fa3.forward(q, k, v, *options)

    def torchs(q, k, v):
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    times = {
        "torch.empty_like": lambda: torch.empty_like(q),
        "torch's own": lambda: torchs(*leaves),
        "torch's own and its gradients": lambda: torch.autograd.grad(torchs(*leaves), leaves, dout),
        "flash_attn_func": lambda: flash_attn_func(q, k, v),
        "flash_attn_func, causal": lambda: flash_attn_func(q, k, v, causal=True),
        "flash_attn_func, causal, dynamic": lambda: flash_attn_func(*long, causal=True),
        "flash_attn_func, with LSE": lambda: flash_attn_func(q, k, v, return_attn_probs=True),
        "flash_attn_func of leaves": lambda: flash_attn_func(*leaves),
        "flash_attn_func and its gradients": lambda: torch.autograd.grad(flash_attn_func(*leaves), leaves, dout),
        "flash_attn_varlen_func": lambda: flash_attn_varlen_func(*packed, ends, ends, 88, 88),
        "torch.ops.fa3.forward": lambda: torch.ops.fa3.forward(*leaves, *options),
        "torch.ops.fa3.backward": lambda: torch.ops.fa3.backward(dout, q, k, v, out, lse, None, *options),
    }
    for name, function in times.items():
        function()
        times[name] = microseconds(function, calls=100)
        print(f"{name:36}{times[name]:8.2f} us")
    # Hosts differ, and so do autograd's threads. So times are compared with others of this host. O is allocated by
    # `torch.empty_like`, which takes about a quarter of a call.
    most = 8 * times["torch.empty_like"]
    assert times["flash_attn_func"] < most and times["flash_attn_func, causal"] < most
    assert times["flash_attn_func of leaves"] < 6 * times["torch's own"]
    assert times["flash_attn_func and its gradients"] < 4 * times["torch's own and its gradients"]
