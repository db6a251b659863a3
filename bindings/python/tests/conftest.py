"""Fixtures that several test files share, and the reasons for which tests are skipped."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# JAX reads these when it is first used: two devices on the CPU, so that a program runs on both, and no more of a GPU's
# memory than tests need, beside torch's.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

try:
    import torch
except ModuleNotFoundError:
    torch = None


def _no_hopper():
    if torch is None:
        return "skipped: torch is not installed"
    if not torch.cuda.is_available():
        return "skipped: no GPU that torch can use"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"skipped: {torch.cuda.get_device_name()} is no Hopper"
    return None


def pytest_configure(config):
    config.addinivalue_line("markers", "hopper: needs torch and a Hopper GPU")


def pytest_collection_modifyitems(items):
    # To skip each of these thousands of tests would take longer than most of them.
    if _no_hopper():
        items[:] = [item for item in items if not item.get_closest_marker("hopper")]


def pytest_terminal_summary(terminalreporter):
    if reason := _no_hopper():
        terminalreporter.write_line(f"{reason}: all tests for a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.hopper)])
def device(request):
    return request.param


@pytest.fixture(scope="session")
def stand_in_driver(tmp_path_factory):
    """The environment of a process whose driver is `stand_in_driver.c`."""
    if shutil.which("cc") is None:
        pytest.skip("skipped: no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("stand_in_driver.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    # A machine with a driver may also have the driver's library under this name.
    (folder / "libcuda.so").symlink_to(library)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


@pytest.fixture
def calls(monkeypatch):
    """The calls of the extension module from now on: (operation, its tensors and options by name)."""
    from fa3 import _fa3

    calls, run = [], _fa3.run

    def numbers(x):
        return (x.dtype, x.data_ptr(), x.shape, x.stride()) if isinstance(x, torch.Tensor) else x

    def spy(operation, device, stream, tensors, allocate):
        # A tensor that is copied for the call is noted with the address of its copy.
        copies = {}
        with monkeypatch.context() as during:
            for name in ("contiguous", "clone"):
                copy = getattr(torch.Tensor, name)
                during.setattr(torch.Tensor, name, lambda x, copy=copy: copies.setdefault(id(x), copy(x)))
            result = run(operation, device, stream, tensors, allocate)
        # A call without a stream is only checked, and is not noted.
        if stream is not None:
            given = {name: numbers(copies.get(id(x), x)) for name, x in tensors.items() if x is not None}
            calls.append((operation.name, {**given, **operation.options}))
        return result

    monkeypatch.setattr(_fa3, "run", spy)
    # Calls that are made again would not run it.
    monkeypatch.setattr(_fa3.Repeats, "attend", lambda *_: None)
    return calls


@pytest.fixture
def are_lists():
    """A function that checks which lists of sequences a call was given, and which hints of the longest sequences."""

    def check(given, longest, **lists):
        lists = {name: x.data_ptr() for name, x in lists.items() if x is not None}
        tensors = {name: x for name, x in given.items() if isinstance(x, tuple)}
        assert {name: x[1] for name, x in tensors.items() if x[0] == torch.int32} == lists
        assert (given["max_seqlen_q"], given["max_seqlen_k"]) == longest

    return check


@pytest.fixture
def active(device, monkeypatch):
    """Puts our kernels in the place of torch's operators on the test's device. On the CPU the rules of a GPU apply."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("skipped: torch has no place for another flash attention")
    from fa3 import activate, activation

    if device == "cuda":
        with activate():
            yield
    else:
        monkeypatch.setattr(activation, "_has_kernels", lambda device: True)
        library = activation._put("CPU", dict.fromkeys(activation._Kernels({}).by_name()))
        yield
        library._destroy()


@pytest.fixture
def nan_in_new_tensors(monkeypatch):
    """Fills new tensors with NaN, so that elements that are not written show. Torch does this only in its deterministic
    mode, which must not decide how gradients are accumulated: each test says that itself.
    """
    # Our function is patched and not torch's, since a compiler knows torch's mode without calling a function.
    monkeypatch.setattr("fa3.gradient.asks_for_same_bits", lambda: False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def randn():
    """Makes random tensors on the GPU, equal in every run."""
    generator = torch.Generator("cuda").manual_seed(0)

    def make(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=torch.float32, generator=generator).to(dtype)

    return make
