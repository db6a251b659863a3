"""Attention of tensors on the CPU: processes and threads. Needs torch but no GPU."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import normal

from fa3 import flash_attn_func


def test_a_forked_process_computes_too():
    """A forked process, such as a worker that loads data, has none of its parent's threads."""
    x = normal(1, 300, 2, 16)
    expected = flash_attn_func(x, x, x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(flash_attn_func(x, x, x), expected) else 1)
    for _ in range(300):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("it waits without end")


COUNT_THREADS = """
import os, time, torch
from fa3 import flash_attn_func

def threads():
    return len(os.listdir("/proc/self/task"))

x = torch.ones(1, 300, 2, 16)
before = threads()
for wanted, count in [(1, {0}), (4, {1}), (2, {2})]:
    torch.set_num_threads(wanted)
    flash_attn_func(x, x, x)
    # Threads of an earlier call end by themselves.
    end = time.monotonic() + 30
    while threads() != before + count and time.monotonic() < end:
        time.sleep(0.01)
    assert threads() == before + count, (wanted, threads() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="skipped: there is no list of threads")
@pytest.mark.parametrize("environment, counts", [({}, [1, 4, 2]), ({"RAYON_NUM_THREADS": "3"}, [3, 3, 3])], ids=str)
def test_it_computes_with_as_many_threads_as_torch(environment, counts):
    inherited = {name: value for name, value in os.environ.items() if name != "RAYON_NUM_THREADS"}
    run = subprocess.run([sys.executable, "-c", COUNT_THREADS.format(*counts)], env=inherited | environment, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 0, run.stderr
