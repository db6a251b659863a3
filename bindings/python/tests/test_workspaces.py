"""Launches that draw tiles from a counter in a workspace, where two could meet: on streams, in graphs, in both. One
that finds a counter that is not its own computes tiles twice or not at all, and outputs start as NaN."""

import ctypes
import shutil

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from fa3 import _fa3, flash_attn_func

pytestmark = [pytest.mark.hopper, pytest.mark.usefixtures("nan_in_new_tensors")]


@pytest.fixture
def problem(randn):
    """Makes Q, K and V with more tiles than SMs, which differ in length under a causal mask:
    such tiles are drawn from a counter.
    """

    def make():
        tensors = [randn(4, 1024, 16, 128) for _ in "qkv"]
        expected = attend(*tensors)
        torch.cuda.synchronize()
        return tensors, expected

    return make


def attend(q, k, v, **options):
    return flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **options)


def capture(function, **options):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        results = function()
    return graph, results


def poison(results):
    for result in results:
        result.fill_(float("nan"))


def assert_equal(results, expected):
    for result, right in zip(results, expected, strict=True):
        assert torch.equal(result, right)


def test_the_first_call_of_a_stream_is_captured(problem):
    tensors, expected = problem()
    graph, results = capture(lambda: attend(*tensors), stream=torch.cuda.Stream())
    for _ in range(3):
        poison(results)
        graph.replay()
        assert_equal(results, expected)


def test_the_first_call_of_all_is_captured(randn):
    """A kernel that no other test has, so that it is compiled during the capture."""
    q, k, v = (randn(4, 1024, 16, 160, dtype=torch.float16) for _ in "qkv")
    options = dict(window_size=(613, 0), softcap=11.0)
    torch.cuda.synchronize()
    graph, results = capture(lambda: attend(q, k, v, **options))
    graph.replay()
    assert_equal(results, attend(q, k, v, **options))


def test_what_is_captured_is_computed_by_replays_alone(problem):
    """A capture leaves nothing behind that the stream's own launches find, nor the other way round."""
    tensors, expected = problem()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert_equal(attend(*tensors), expected)
    graph, results = capture(lambda: attend(*tensors), stream=stream)
    with torch.cuda.stream(stream):
        assert_equal(attend(*tensors), expected)
        graph.replay()
        assert_equal(results, expected)


@pytest.mark.parametrize("same_stream", [True, False], ids=["same stream", "other stream"])
def test_replays_beside_launches(problem, same_stream):
    (captured, expected), (launched, expected_launched) = problem(), problem()
    stream = torch.cuda.Stream()
    other = stream if same_stream else torch.cuda.Stream()
    graph, results = capture(lambda: [*attend(*captured), *attend(*captured)], stream=stream)
    torch.cuda.synchronize()
    seen = []
    for _ in range(20):
        with torch.cuda.stream(stream):
            poison(results)
            graph.replay()
            seen.append([x.clone() for x in results])
        with torch.cuda.stream(other):
            seen.append(attend(*launched))
    torch.cuda.synchronize()
    for results in seen[::2]:
        assert_equal(results, [*expected, *expected])
    for results in seen[1::2]:
        assert_equal(results, expected_launched)


def test_two_graphs_at_once(problem):
    problems = [problem(), problem()]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    # Both are captured on the same stream, whose counter they must not share.
    graphs = [capture(lambda: attend(*tensors)) for tensors, _ in problems]
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

    def both():
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            results = attend(*right)
        results = [*attend(*left), *results]
        main.wait_stream(side)
        return results

    graph, results = capture(both)
    for _ in range(20):
        poison(results)
        graph.replay()
        assert_equal(results, [*expected, *expected_right])


def test_two_streams_at_once(problem):
    problems = [problem(), problem()]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(20):
        results = []
        for stream, (tensors, _) in zip(streams, problems):
            with torch.cuda.stream(stream):
                results.append(attend(*tensors))
        torch.cuda.synchronize()
        for result, (_, expected) in zip(results, problems):
            assert_equal(result, expected)


def test_streams_that_are_gone_while_their_work_is_not(problem):
    """The driver may give the next stream the handle of one that was destroyed."""
    tensors, expected = problem()
    driver = ctypes.CDLL("libcuda.so.1")
    non_blocking, results = 1, []
    for _ in range(16):
        raw = ctypes.c_void_p()
        assert driver.cuStreamCreate(ctypes.byref(raw), non_blocking) == 0
        with torch.cuda.stream(torch.cuda.ExternalStream(raw.value)):
            torch.cuda._sleep(1_000_000)
            results.append(attend(*tensors))
        assert driver.cuStreamDestroy_v2(raw) == 0
    torch.cuda.synchronize()
    for result in results:
        assert_equal(result, expected)


def test_a_stream_that_was_used_in_inference_mode_is_used_outside(problem):
    tensors, expected = problem()
    with torch.cuda.stream(torch.cuda.Stream()):
        with torch.inference_mode():
            assert_equal(attend(*tensors), expected)
        assert_equal(attend(*tensors), expected)


def test_no_memory_of_torch_is_kept(problem):
    tensors, _ = problem()
    with torch.cuda.stream(torch.cuda.Stream()):
        before = torch.cuda.memory_allocated()
        attend(*tensors)
        assert torch.cuda.memory_allocated() == before


def test_compiled_graphs(problem):
    """Their first run is no capture, but has the graph's pool of memory, where nothing may be left;
    the second is captured.
    """
    if not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("skipped: inductor needs a C compiler")
    tensors, expected = problem()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def layer(q, k, v):
        out, lse = attend(q, k, v)
        return -out, -lse

    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        assert_equal([-x for x in layer(*tensors)], expected)
        assert_equal(attend(*tensors), expected)


def test_a_workspace_is_asked_for_where_none_is_kept(problem):
    tensors, expected = problem()
    results = [torch.empty_like(x) for x in expected]
    asked = []

    def allocate(bytes, zeros):
        memory = torch.zeros(bytes, dtype=torch.uint8, device="cuda")
        asked.append((bytes, zeros))
        return memory.data_ptr(), memory

    def launch(stream, allocate):
        named = zip(("q", "k", "v", "o", "lse"), (*tensors, *results))
        _fa3.run(_fa3.Operation("forward", window=(-1, 0, 0)), 0, stream.cuda_stream, dict(named), allocate)

    launch(torch.cuda.current_stream(), allocate)
    assert_equal(results, expected)
    assert not asked
    # While the stream is captured none is kept for it.
    graph, _ = capture(lambda: launch(torch.cuda.current_stream(), allocate))
    assert asked == [(256, 256)]

    def refuse(bytes, zeros):
        raise MemoryError(f"no {bytes} bytes")

    # What it raises is raised.
    with pytest.raises(MemoryError, match="^no 256 bytes$"):
        capture(lambda: launch(torch.cuda.current_stream(), refuse))
