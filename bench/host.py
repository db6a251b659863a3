"""The host time of calls: each measurement is the median over fresh processes, one in each round.

    python3 bench/host.py
    python3 bench/host.py --package old/bindings/python/python new/bindings/python/python
    python3 bench/host.py --stand-in --instructions

A process makes a call over and over and takes the least time of many blocks, since other processes use the host too.
The problems are small, so that the GPU is never what a call waits for. Calls of torch are beside ours: under activation
they run on our kernels. With --package the processes of several folders with the package take turns.

With --stand-in there need be no GPU: the driver is one that computes nothing (stand_in_driver.c of the tests), and
tensors lie in the host's memory. So the driver's own part and torch's allocation on a GPU are not in these times.
--instructions counts instructions of a call as well, with `perf`.
"""

import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import torch

import settings

TESTS = pathlib.Path(__file__).parents[1] / "bindings" / "python" / "tests"
sys.path.append(str(TESTS))

import host_time


def calls(device):
    """Calls by their names."""
    import fa3

    def of(*shape):
        return torch.randn(shape, device=device).to(torch.bfloat16)

    def integers(values):
        return torch.tensor(values, device=device, dtype=torch.int32)

    q, k, v = of(1, 128, 8, 128), of(1, 128, 2, 128), of(1, 128, 2, 128)
    o, lse = torch.empty_like(q), torch.empty(1, 8, 128, device=device)
    packed, ends = [x[0] for x in (q, k, v)], integers([0, 40, 128])
    one, pages, table, lengths = of(2, 1, 8, 128), of(16, 16, 2, 128), integers([[*range(8)]] * 2), integers([99, 100])
    options = (None, -1, 0, 0, 0.0, 0)
    return {
        "torch.empty_like": lambda: torch.empty_like(q),
        "forward": lambda: fa3.flash_attn_func(q, k, v, causal=True),
        "forward, with LSE": lambda: fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
        "packed": lambda: fa3.flash_attn_varlen_func(*packed, ends, ends, 88, 88, causal=True),
        "decoding": lambda: fa3.flash_attn_with_kvcache(
            one, pages, pages, cache_seqlens=lengths, page_table=table, causal=True
        ),
        "torch.ops, forward": lambda: torch.ops.fa3.forward(q, k, v, *options),
        "torch.ops, backward": lambda: torch.ops.fa3.backward(o, q, k, v, o, lse, None, *options),
    }


def calls_of_torch():
    """Calls of torch's own functions by their names, on a GPU."""
    from torch.nn.attention import varlen
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (torch.randn(1, 8, 128, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    ends = torch.tensor([0, 40, 128], device="cuda", dtype=torch.int32)
    return {
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        "varlen_attn": lambda: varlen.varlen_attn(*packed, ends, ends, 88, 88),
    }


def calls_below_torch():
    """Calls of torch's operators, which our kernels compute in this process on the CPU's dispatch key."""
    from fa3 import activation

    activation._has_kernels = lambda device: True
    seed = torch.zeros(2, dtype=torch.uint64)
    getattr(activation, "_seeds", {})[0] = seed, seed[0]
    calls_below_torch.library = activation._put("CPU", dict.fromkeys(activation._Kernels({}).by_name()))
    q, k, v = (torch.randn(1, 8, 128, 128).to(torch.bfloat16) for _ in "qkv")
    packed, ends = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)], torch.tensor([0, 40, 128], dtype=torch.int32)
    aten = torch.ops.aten
    return {
        "sdpa's operator, active": lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True),
        "varlen_attn's, active": lambda: aten._flash_attention_forward(*packed, ends, ends, 88, 88, 0.0, True, False),
    }


def pretend():
    """Makes this process's tensors be on a GPU for the package, whose driver is the stand-in."""
    import fa3

    driver, get = ctypes.CDLL("libcuda.so.1"), ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    driver.exchange_on_gpu.restype, driver.exchange_on_gpu.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    name = b"dlpack_exchange_api"
    torchs = get(torch.Tensor.__dlpack_c_exchange_api__, name)
    torch.Tensor.__dlpack_c_exchange_api__ = new(driver.exchange_on_gpu(torchs), name, None)
    torch.Tensor.get_device = lambda self: 0
    fa3.operator.current_stream = lambda device: 7


def measured(stand_in, only, blocks, block):
    """Microseconds of each call, in this process."""
    if stand_in:
        pretend()
    found = {}

    def measure(made, suffix=""):
        for name, call in made.items():
            if only in (None, name):
                for _ in range(20):
                    call()
                found[name + suffix] = host_time.microseconds(call, blocks, block)

    with torch.no_grad():
        measure(calls("cpu" if stand_in else "cuda"))
        if stand_in:
            measure(calls_below_torch())
        else:
            import fa3

            measure(calls_of_torch())
            with fa3.activate():
                measure(calls_of_torch(), ", active")
    return found


def of_process(arguments, package, environment, prefix=()):
    """The results of a fresh process, and its messages."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    if package:
        environment["PYTHONPATH"] = str(package)
    command = [*prefix, sys.executable, __file__, "--in-process", *arguments]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(run.stdout.splitlines()[-1]), run.stderr


def instructions(name, package, environment):
    """Instructions of a call: what more calls of a process take."""

    def of(blocks):
        perf = "perf", "stat", "-x,", "-e", "instructions:u"
        arguments = ["--stand-in", "--only", name, "--blocks", str(blocks)]
        return int(of_process(arguments, package, environment, perf)[1].strip().splitlines()[-1].split(",")[0])

    return (of(40) - of(20)) / 20 / 100


def stand_in(folder):
    """The environment of a process whose driver is the stand-in, compiled in this folder."""
    library = pathlib.Path(folder) / "libcuda.so.1"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", library, TESTS / "stand_in_driver.c"]
    subprocess.run(command, check=True)
    return {"LD_LIBRARY_PATH": str(folder), "FA3_STAND_IN_AT_ONCE": "1"}


def main():
    """Measures all. Returns the exit code."""
    parser = settings.parser_of(__doc__, rounds=20, has_fa3=False)
    parser.add_argument("--package", nargs="+", default=[None], metavar="FOLDER", help="folders that have fa3")
    parser.add_argument("--stand-in", action="store_true", help="over a driver that computes nothing")
    parser.add_argument("--instructions", action="store_true", help="counts instructions of calls, too")
    parser.add_argument("--only", metavar="NAME", help="this call only")
    parser.add_argument("--blocks", type=int, default=50, help="blocks of 100 calls")
    parser.add_argument("--in-process", action="store_true", help="measure in this process")
    options = parser.parse_args()
    if options.in_process:
        print(json.dumps(measured(options.stand_in, options.only, options.blocks, 100)))
        return 0
    arguments = [*(["--only", options.only] if options.only else []), "--blocks", str(options.blocks)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {}
        if options.stand_in:
            environment, arguments = stand_in(folder), [*arguments, "--stand-in"]
        else:
            settings.print_machine()
        rounds = [
            [of_process(arguments, package, environment)[0] for package in options.package]
            for _ in range(options.rounds)
        ]
        results = []
        for name in rounds[0][0]:
            times = [statistics.median(turn[i][name] for turn in rounds) for i in range(len(options.package))]
            said = f"{name:26}" + "".join(f"{x:8.2f} us" for x in times)
            results.append({"call": name, "us": times})
            if options.instructions:
                counts = [instructions(name, package, environment) for package in options.package]
                said += "".join(f"{x:9.0f} instructions" for x in counts)
                results[-1]["instructions"] = counts
            print(said, flush=True)
    settings.write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
