"""Kernels that are compiled before the calls that need them. Needs no GPU; some tests need a C compiler."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

import fa3

# A number that no GPU has.
NO_SUCH_DEVICE = 0x7000_0000


def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


def attend(**options):
    q = empty(1, 64, 4, 64)
    return fa3.flash_attn_func(q, q, q, **options)


def test_later_calls_find_their_kernels(stand_in_driver):
    script = Path(__file__).with_name("warms_up.py")
    run = subprocess.run([sys.executable, script], env=stand_in_driver, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    # One kernel forward and at least two backward.
    step, model = seen["warmed"]
    assert step["compiler"] > 2 and model["compiler"] > 8
    by_then, known, unknown = seen["compiled"]
    assert by_then >= model["compiler"] and (known, unknown) == (by_then, by_then + 1)


def test_a_call_that_no_gpu_computes_is_refused_at_once():
    with pytest.raises(ValueError, match="head_dim"):
        fa3.warm_up(lambda: fa3.flash_attn_func(*(empty(1, 64, 4, 640) for _ in "qkv")))
    with pytest.raises(TypeError, match="^object is neither a function nor a configuration"):
        fa3.warm_up(object())
    # A call after a refused one is not recorded: float32 is computed on the CPU alone.
    q = torch.empty(1, 64, 4, 64, device="meta")
    assert fa3.flash_attn_func(q, q, q).shape == q.shape


def test_the_drivers_errors_are_the_futures():
    warming = fa3.warm_up(attend, lambda: attend(causal=True), device=NO_SUCH_DEVICE)
    with pytest.raises(RuntimeError, match="libcuda cannot be loaded|no device 1879048192: the driver has|CUDA_ERROR"):
        warming.result(timeout=60)
    assert warming.done()


@pytest.mark.parametrize(
    "numbers",
    [
        dict(num_key_value_heads=2, head_dim=64, dtype=torch.float16),
        dict(hidden_size=512, sliding_window=100),
    ],
)
def test_a_models_calls(numbers, monkeypatch):
    """The calls of a configuration have its heads, types and windows."""
    recorded = []
    monkeypatch.setattr(fa3._fa3, "warm_up", lambda device, calls: recorded.extend(calls) or [])
    config = SimpleNamespace(num_attention_heads=8, **numbers)
    assert fa3.warm_up(config, training=True, device=0).result() == {}
    names = [operation.name for operation, _ in recorded]
    windows = 2 if "sliding_window" in numbers else 1
    assert [names.count(name) for name in ("forward", "backward")] == [4 * windows, 3 * windows]
    for operation, tensors in recorded:
        (dtype, _, q, _), (_, _, k, _) = tensors["q"], tensors["k"]
        assert dtype == numbers.get("dtype", torch.bfloat16)
        assert (q[2], k[2], q[3]) == (8, numbers.get("num_key_value_heads", 8), 64)
    lefts = {operation.options["window"][0] for operation, _ in recorded}
    assert lefts == {-1, numbers.get("sliding_window", 0) - 1}


@pytest.mark.hopper
def test_a_warm_call_on_a_gpu():
    warmed = fa3.warm_up(lambda: attend(causal=True)).result()
    assert sum(warmed.values()) == 1
    q = torch.randn(1, 64, 4, 64, dtype=torch.bfloat16, device="cuda")
    assert not fa3.flash_attn_func(q, q, q, causal=True).isnan().any()
