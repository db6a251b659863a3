"""Calls of several threads on one stream. A call may launch several kernels, which pass data to each other in the
stream's workspace. So kernels of other calls that use it must not come between. Needs a C compiler and no GPU."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import calls_of_threads
from fa3 import _fa3

HERE = Path(__file__).parent


def printed(name, environment):
    """The output of a script of this folder. Its driver is a stand-in that notes launches."""
    run = subprocess.run([sys.executable, HERE / name], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def seen(stand_in_driver):
    """The launches that `calls_of_threads` prints."""
    return printed("calls_of_threads.py", stand_in_driver)


def test_every_operation_is_called():
    documented = re.findall(r"^- (\w+): ", _fa3.Operation.__doc__, re.MULTILINE)
    assert {make.__name__ for make in calls_of_threads.FUNCTIONS} - {"quantize_channels"} == set(documented)


def test_a_call_is_on_its_stream_as_a_whole(seen):
    """A call's kernels are adjacent on its stream. Only calls of one kernel, by other threads, may come between."""
    assert not seen["failures"]
    several = {name: kernels for name, kernels in seen["kernels"].items() if len(kernels) > 1}
    assert several.keys() >= {"forward", "append", "fp8_forward", "backward", "quantize"}
    for launches in seen["launches"].values():
        launches = [launch for launch in launches if launch[1] in several]
        calls = 0
        while launches:
            thread, name, _ = launches[0]
            kernels = several[name]
            call, launches = launches[: len(kernels)], launches[len(kernels) :]
            assert call == [[thread, name, kernel] for kernel in kernels]
            calls += 1
        assert calls == 2 * len(several) * calls_of_threads.CALLS


def test_a_call_that_is_made_again_is_on_the_current_stream_as_a_whole(stand_in_driver):
    """Calls are kept without a stream and a workspace: each call takes the current stream, and its workspace."""
    torch = pytest.importorskip("torch", reason="skipped: torch is not installed")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("skipped: torch is older than 2.10")
    found = printed("repeats_of_threads.py", stand_in_driver)
    of_streams = {}
    for thread, wanted, stream, kernel in found["launches"]:
        assert stream == wanted
        of_streams.setdefault(stream, []).append((thread, kernel))
    kernels = ["schedule", "fwd"]
    assert len(of_streams) == 2
    for launches in of_streams.values():
        calls = list(zip(launches[::2], launches[1::2]))
        assert len(launches) == 2 * len(calls) == 80
        assert all(a[0] == b[0] and [a[1], b[1]] == kernels for a, b in calls)
    # A stream's counters are the package's own, which are zero already; a graph has its own.
    assert (found["zeroed"], found["captured"], found["longer"], found["longer at last"]) == (0, 1, 0, 0)
