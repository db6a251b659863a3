"""XLA's handler for GPUs, over a driver that computes nothing. Needs a C compiler, but neither JAX, torch nor a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def found(stand_in_driver):
    script = Path(__file__).with_name("frames.py")
    done = subprocess.run([sys.executable, script], env=stand_in_driver, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_handler_states_the_older_version(found):
    """It is XLA's or its own version. It has no traits: a call may allocate, so it cannot be replayed."""
    assert found["metadata"] == [[0, 1, 0, 24], [0, 3, 0, 24], [0, 4, 0, 24]]


def test_kernels_are_launched_on_xlas_stream(found):
    assert found["small"] is found["large"] is None
    streams, kernels = zip(*found["launched"])
    assert set(streams) == {7} and kernels[0].startswith("fwd") and len(kernels) >= 3


def test_a_large_workspace_is_xlas_memory(found):
    """It is freed after the launch. A small one is cached for the stream."""
    assert found["small allocated"] == []
    assert found["allocated"] == found["freed"] and len(found["freed"]) == 1


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("stage", "there is nothing to do in stage 1 of XLA's FFI"),
        ("major", "XLA's FFI has version 1.3, expected 0"),
        ("without device", "Api of XLA's FFI has 184 bytes, expected 192 or more"),
        ("short frame", "CallFrame of XLA's FFI has 160 bytes, expected 168 or more"),
    ],
)
def test_other_versions_and_stages_are_refused(found, name, sentence):
    _, (code, given) = found[name]
    assert (code, given) == (3, sentence)


def test_an_error_of_xlas_goes_back_to_it(found):
    assert found["refused"] == 0xBAD
