"""How the library behaves beside torch's own work on a GPU: streams, graphs, compilers, profiler;
and how long a call takes.
"""

import json
import shutil
import time

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from host_time import microseconds
from packing import assert_equal

from fa3 import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func

pytestmark = pytest.mark.hopper


def attend(q, k, v):
    return flash_attn_func(q, k, v, causal=True, return_attn_probs=True)


def test_the_current_stream_is_used(randn):
    q, k, v = (randn(4, 2048, 16, 128) for _ in "qkv")
    q2 = randn(4, 2048, 16, 128)
    expected = attend(q2, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Work before it, which it must wait for, and after it, which must wait for it.
        torch.cuda._sleep(20_000_000)
        q.copy_(q2)
        results = attend(q, k, v)
        copies = [x.clone() for x in results]
    stream.synchronize()
    assert_equal(copies, expected)


def test_two_streams_at_once(randn):
    problems = [[randn(2, 1024, 8, 64) for _ in "qkv"] for _ in range(2)]
    expected = [attend(*problem) for problem in problems]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream, problem in zip(streams, problems):
            with torch.cuda.stream(stream):
                results.append(attend(*problem))
        torch.cuda.synchronize()
        for result, right in zip(results, expected):
            assert_equal(result, right)


@pytest.mark.parametrize("causal", [False, True])
def test_graphs(randn, causal):
    def step(q, k, v):
        first = flash_attn_func(q, k, v, causal=causal)
        return flash_attn_func(first, k, v, causal=causal, return_attn_probs=True)

    q, k, v = (randn(4, 1024, 16, 128) for _ in "qkv")
    # A call before the capture compiles the kernel.
    step(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(q, k, v)
    for _ in range(3):
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert_equal(results, step(q, k, v))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_functions(randn, backend):
    if backend == "inductor" and not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("skipped: inductor needs a C compiler")

    # Nothing beside attention rounds, so that the results are the same bit for bit.
    def layer(qkv):
        out, lse = flash_attn_qkvpacked_func(qkv.neg() * 2, causal=True, window_size=(99, -1), return_attn_probs=True)
        return out.transpose(1, 2).relu(), -lse

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for seqlen in (300, 301):
        qkv = randn(2, seqlen, 3, 4, 64)
        assert_equal(compiled(qkv), layer(qkv))


def test_parameters_and_modes_reach_the_operator(randn):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.operators = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.operators.append(function)
            return function(*args, **(kwargs or {}))

    q, k, v = (randn(2, 100, 4, 64) for _ in "qkv")
    expected = attend(q, k, v)
    with Seen() as seen:
        assert_equal(attend(q, k, v), expected)
    assert torch.ops.fa3.forward.default in seen.operators
    with torch.no_grad():
        assert_equal(attend(torch.nn.Parameter(q), k, v), expected)


def test_a_margin_leaves_sms_to_others(randn, tmp_path):
    q, k, v = (randn(4, 2048, 16, 128) for _ in "qkv")
    attend(q, k, v)
    grids = []
    for margin in (0, 32):
        flash_attn_func(q, k, v, causal=True, sm_margin=margin)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            flash_attn_func(q, k, v, causal=True, sm_margin=margin)
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
    q, k, v = (randn(1, 128, 4, 128) for _ in "qkv")
    long = [randn(2, 640, 8, 128) for _ in "qkv"]
    packed, ends = [x[0] for x in (q, k, v)], torch.tensor([0, 40, 128], dtype=torch.int32, device="cuda")
    first = time.perf_counter()
    flash_attn_func(q, k, v, causal=True)
    print(f"\nfirst call of this process with these shapes: {(time.perf_counter() - first) * 1e3:.1f} ms")
    times = {
        "torch.empty_like": lambda: torch.empty_like(q),
        "flash_attn_func": lambda: flash_attn_func(q, k, v),
        "flash_attn_func, causal": lambda: flash_attn_func(q, k, v, causal=True),
        "flash_attn_func, causal, dynamic": lambda: flash_attn_func(*long, causal=True),
        "flash_attn_func, with LSE": lambda: flash_attn_func(q, k, v, return_attn_probs=True),
        "flash_attn_varlen_func": lambda: flash_attn_varlen_func(*packed, ends, ends, 88, 88),
        "torch.ops.fa3.forward": lambda: torch.ops.fa3.forward(q, k, v, None, -1, 0, 0, 0.0, 0),
    }
    for name, function in times.items():
        function()
        times[name] = microseconds(function, calls=100)
        print(f"{name:36}{times[name]:8.2f} us")
    # Hosts differ. O is allocated as `torch.empty_like` does it, which is about a quarter of a call.
    most = 8 * times["torch.empty_like"]
    assert times["flash_attn_func"] < most and times["flash_attn_func, causal"] < most
