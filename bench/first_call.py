"""The first call of a process: each measurement is the median over fresh processes, one in each round.

    python3 bench/first_call.py
    python3 bench/first_call.py --rounds 5 --json first_call.json

A process imports fa3, makes tensors, and times one thing until the GPU has its result: the first forward pass, the
first training step (forward and backward), or the first decoding step over pages. Torch's own start, which makes the
CUDA context, is over by then. Three places have compiled kernels: `archive` is the package's kernels.sm_90a, `driver`
is the driver's cache on disk, which an earlier process has filled, and `compiler` has neither.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import settings

FIRSTS = ["forward", "training", "decode"]


def measured(first):
    """Milliseconds of the import and of the first call, in this process."""
    import time

    import torch

    torch.zeros(1, device="cuda").normal_()
    torch.cuda.synchronize()
    start = time.perf_counter()
    import fa3

    imported = time.perf_counter() - start

    def of(*shape, grad=False):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)

    grad = first == "training"
    if first == "decode":
        q, k, v = of(8, 1, 32, 128), of(256, 64, 8, 128), of(256, 64, 8, 128)
        table = torch.arange(256, device="cuda", dtype=torch.int32).view(8, 32)
        lengths = torch.full((8,), 2000, device="cuda", dtype=torch.int32)
        more = {"cache_seqlens": lengths, "page_table": table, "causal": True}
    else:
        q, k, v = of(2, 2048, 32, 128, grad=grad), of(2, 2048, 8, 128, grad=grad), of(2, 2048, 8, 128, grad=grad)
        more = {"causal": True}
    torch.cuda.synchronize()
    start = time.perf_counter()
    if first == "decode":
        fa3.flash_attn_with_kvcache(q, k, v, **more)
    else:
        o = fa3.flash_attn_func(q, k, v, **more)
        if grad:
            # With a gradient of O, the first `backward` of a process would import sympy.
            o.sum().backward()
    torch.cuda.synchronize()
    return 1e3 * imported, 1e3 * (time.perf_counter() - start)


def of_process(first, environment):
    """Milliseconds of the import and of the first call, in a fresh process."""
    command = [sys.executable, __file__, "--in-process", first]
    run = subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def places(folder):
    """For each place of compiled kernels, the environment of its processes."""
    import importlib.util

    package = pathlib.Path(importlib.util.find_spec("fa3").origin).parent
    archive = package / "kernels.sm_90a"
    if archive.exists():
        yield "archive", {"CUDA_CACHE_DISABLE": "1"}
        archive.rename(folder / "kernels")
    else:
        print(f"skipped: archive: no {archive} (`fa3 archive` makes it)")
    try:
        yield "driver", {"CUDA_CACHE_PATH": str(folder)}
        yield "compiler", {"CUDA_CACHE_DISABLE": "1"}
    finally:
        if (folder / "kernels").exists():
            (folder / "kernels").rename(archive)


def main():
    """Measures all. Returns the exit code."""
    parser = settings.parser_of(__doc__, rounds=20, has_fa3=False)
    parser.add_argument("--in-process", choices=FIRSTS, help="measure it in this process")
    options = parser.parse_args()
    if options.in_process:
        print(json.dumps(measured(options.in_process)))
        return 0
    settings.print_machine()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for place, environment in places(pathlib.Path(folder)):
            for first in FIRSTS:
                of_process(first, environment)
                found = [of_process(first, environment) for _ in range(options.rounds)]
                imported, called = (statistics.median(of) for of in zip(*found))
                print(f"{place:8}  {first:8}  import {imported:6.1f} ms  first call {called:7.1f} ms", flush=True)
                results.append({"place": place, "first": first, "import_ms": imported, "call_ms": called})
    settings.write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
