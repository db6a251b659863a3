"""Our GEMM compared with PyTorch's matmul (cuBLAS), in one process, taking turns: medians of rounds, and their ratio.

    python3 bench/gemm.py path/to/fa3 [m n k]

Needs an H100, PyTorch and cuda-python.
"""

import sys

import torch

import timing
from launch import Kernel, describe

ROUNDS, SLICE_MS = 15, 15.0


def main(fa3, m=8192, n=8192, k=8192):
    size = ["--m", str(m), "--n", str(n), "--k", str(k)]
    print(f"{torch.cuda.get_device_name()}, {m} x {n} x {k}, TFLOP/s (median of {ROUNDS} rounds of {SLICE_MS} ms)")
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
        ms = timing.in_turns({"ours": ours, "theirs": theirs}, ROUNDS, SLICE_MS)
        rate = lambda name: 2e-9 * m * n * k / ms[name]
        print(
            f"{name:14} {dtype:5} ours {rate('ours'):6.1f}  cuBLAS {rate('theirs'):6.1f}"
            f"  ratio {ms['theirs'] / ms['ours']:.3f}  difference {off:.1e}"
        )
        assert off < 1e-2, "the products differ"


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
