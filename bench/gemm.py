"""Our GEMM beside PyTorch's matmul (cuBLAS) in one process, taking turns: medians of rounds, and their ratio.

    python3 bench/gemm.py path/to/fa3 [m n k]

Needs an H100, PyTorch and cuda-python.
"""

import statistics
import sys

import torch

from launch import Kernel, describe

ROUNDS, CALLS = 15, 10


def milliseconds(run):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS


def measure(runs):
    """Median milliseconds of each, in turns."""
    for run in runs:
        milliseconds(run)
    rounds = [[milliseconds(run) for run in runs] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds)]


def main(fa3, m=8192, n=8192, k=8192):
    size = ["--m", str(m), "--n", str(n), "--k", str(k)]
    print(f"{torch.cuda.get_device_name()}, {m} x {n} x {k}, TFLOP/s (median of {ROUNDS} rounds of {CALLS})")
    for name, dtype in [("gemm", "bf16"), ("gemm", "f16"), ("gemm_cluster", "bf16"), ("gemm_fp8", "e4m3")]:
        kernel = Kernel(describe(fa3, name, *size, "--dtype", dtype))
        a, b, c = tensors = kernel.tensors()
        ours = kernel.bind(tensors)
        ours()
        if dtype == "e4m3":
            one = torch.ones((), device="cuda")
            theirs = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=False)
        else:
            theirs = lambda: torch.matmul(a, b.t())
        reference = theirs().float()
        off = ((c.float() - reference).norm() / reference.norm()).item()
        ours_ms, theirs_ms = measure([ours, theirs])
        rate = lambda ms: 2e-9 * m * n * k / ms
        print(
            f"{name:14} {dtype:5} ours {rate(ours_ms):6.1f}  cuBLAS {rate(theirs_ms):6.1f}"
            f"  ratio {theirs_ms / ours_ms:.3f}  difference {off:.1e}"
        )
        assert off < 1e-2, "the products differ"


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
