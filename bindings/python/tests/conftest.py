"""The needs of tests, and the reasons by which they are skipped."""

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
    """Calls of the extension module from now on: operations, and their tensors and options by names."""
    from fa3 import _fa3

    calls, run = [], _fa3.run

    def numbers(x):
        return (x.dtype, x.data_ptr(), x.shape, x.stride()) if isinstance(x, torch.Tensor) else x

    def spy(operation, device, stream, tensors, allocate):
        # What is copied is noted where the copy lies.
        copies = {}
        with monkeypatch.context() as during:
            for name in ("contiguous", "clone"):
                copy = getattr(torch.Tensor, name)
                during.setattr(torch.Tensor, name, lambda x, copy=copy: copies.setdefault(id(x), copy(x)))
            result = run(operation, device, stream, tensors, allocate)
        # Without a stream a call is only checked.
        if stream is not None:
            given = {name: numbers(copies.get(id(x), x)) for name, x in tensors.items() if x is not None}
            calls.append((operation.name, {**given, **operation.options}))
        return result

    monkeypatch.setattr(_fa3, "run", spy)
    return calls


@pytest.fixture
def are_lists():
    """A function that checks which lists a call was given, and hints of the longest sequences."""

    def check(given, longest, **lists):
        lists = {name: x.data_ptr() for name, x in lists.items() if x is not None}
        tensors = {name: x for name, x in given.items() if isinstance(x, tuple)}
        assert {name: x[1] for name, x in tensors.items() if x[0] == torch.int32} == lists
        assert (given["max_seqlen_q"], given["max_seqlen_k"]) == longest

    return check


@pytest.fixture
def active(device, monkeypatch):
    """Our kernels in the places that torch's operators have on the test's device, on the CPU by the rules of a GPU."""
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
