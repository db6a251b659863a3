"""What the tests need of the machine, and what they say where it is missing."""

import inspect

import pytest

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
    reason = _no_hopper()
    for item in items:
        if reason and item.get_closest_marker("hopper"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.hopper)])
def device(request):
    return request.param


@pytest.fixture
def calls(monkeypatch):
    """Calls of the extension module from now on: names of functions, and their arguments by name."""
    from fa3 import _fa3

    calls = []

    def spied(name, function):
        signature = inspect.signature(function)

        def spy(*arguments):
            given = signature.bind(*arguments).arguments
            # Without a stream a call is only checked.
            if given["stream"] is not None:
                calls.append((name, given))
            return function(*arguments)

        return spy

    names = ("forward", "cached_forward", "fp8_forward", "backward", "quantize", "quantize_channels", "combine")
    for name in names:
        monkeypatch.setattr(_fa3, name, spied(name, getattr(_fa3, name)))
    return calls


@pytest.fixture
def nan_in_new_tensors(monkeypatch):
    """Outputs start as NaN, so that what is not written shows. Torch has that in its mode of deterministic algorithms
    alone, which must not decide how gradients are added up: that is for the test to say.
    """
    # Compilers hold torch's own answer to the mode.
    monkeypatch.setattr("fa3.gradient.asks_for_same_bits", lambda: False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def randn():
    """Random tensors on the GPU, the same in every run."""
    generator = torch.Generator("cuda").manual_seed(0)

    def make(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=torch.float32, generator=generator).to(dtype)

    return make
