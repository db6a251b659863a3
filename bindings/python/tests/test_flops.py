"""When the formulas of operations reach torch's counter. Each case runs in a process of its own. Needs torch."""

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="skipped: torch is not installed")

COUNT = """
def count():
    from torch.utils.flop_counter import FlopCounterMode

    q = torch.zeros(2, 16, 4, 64, dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        fa3.flash_attn_func(q, q, q)
    assert counter.get_total_flops() == 2 * 4 * 16 * 16 * 2 * (64 + 64)
"""
CASES = {
    "after": """
import importlib, importlib.util, inspect, sys
import torch, fa3
assert not {"triton", "torch.utils.flop_counter"} & sys.modules.keys()
assert importlib.util.find_spec("torch.utils.flop_counter").origin.endswith("flop_counter.py")
assert "torch.utils.flop_counter" not in sys.modules
count()
module = sys.modules["torch.utils.flop_counter"]
assert "def mm_flop" in inspect.getsource(module) and module.__loader__ is module.__spec__.loader
importlib.reload(module)
count()
""",
    "before": "import torch, torch.utils.flop_counter, fa3\ncount()",
}


@pytest.mark.parametrize("case", CASES)
def test_operations_are_counted_whenever_torchs_counter_is_imported(case):
    subprocess.run([sys.executable, "-c", COUNT + CASES[case]], check=True)
