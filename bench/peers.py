"""Our forward pass beside other implementations of it: one GPU, one process, taking turns.

    python3 bench/peers.py --fa3 path/to/fa3_C.so

Ours is the installed Python package fa3. The others are FlashAttention-3's C++, where --fa3 gives its
compiled extension, and cuDNN and FlashAttention-2 as PyTorch has them (--peers chooses among these two;
without a name it leaves both out). The settings are the paper's 36: head_dim 64, 128 and 256, 512 to 16k
keys, without a mask and causal, 16k tokens, hidden size 2048. Inputs are N(0, 1).

Ratios are what counts, another implementation's time divided by ours: boards throttle, so that TFLOP/s of
different runs do not compare. Every result is held to float64 on some rows, and the exit code is 1 if one is
wrong.
"""

import sys
from dataclasses import asdict

import implementations
import settings
from measure import measure

CELLS = settings.product([64, 128, 256], [512, 1024, 2048, 4096, 8192, 16384], [False, True])


def parse():
    """What the command line asks for."""
    parser = settings.common_options(__doc__, rounds=7)
    settings.add_dtypes(parser, ["bf16"])
    parser.add_argument("--slice-ms", type=float, default=25.0, metavar="MS", help="default: 25")
    peers = list(implementations.TORCH)
    parser.add_argument("--peers", choices=peers, nargs="*", default=peers, help="default: both")
    return parser.parse_args()


def report(cell, dtype, measured):
    """Prints the line of a cell. Returns the ratio of each other implementation's time to ours."""
    rates = "  ".join(f"{name} {cell.tflops(ms):5.0f}" for name, ms in measured.ms.items())
    others = {name: ms / measured.ms["ours"] for name, ms in measured.ms.items() if name != "ours"}
    line = f"{cell}  {dtype:4}  TFLOP/s: {rates}"
    if others:
        best = min(others, key=others.get)
        line += f"  ratio {others[best]:.3f} ({best})"
    print(line, flush=True)
    return others


def summarise(ratios):
    """Prints geometric means and the worst cell."""
    _, others = ratios[0]
    if not others:
        return
    best = [(min(others.values()), cell) for cell, others in ratios]
    print(f"\ngeometric mean to the best: {settings.geometric_mean([ratio for ratio, _ in best]):.3f}")
    for name in others:
        mean = settings.geometric_mean([others[name] for _, others in ratios])
        print(f"geometric mean to {name}: {mean:.3f}")
    worst, cell = min(best, key=lambda pair: pair[0])
    print(f"worst cell, to the best: {worst:.3f} ({cell})")


def main():
    """Measures all cells. Returns the exit code."""
    options = parse()
    settings.print_machine()
    functions = implementations.implementations(options.fa3)
    functions |= {name: implementations.TORCH[name] for name in options.peers}
    results, ratios, right = [], [], True
    for cell in settings.chosen(options, CELLS):
        for dtype in options.dtype:
            measured = measure(functions, "normal", cell, dtype, options.rounds, options.slice_ms)
            ratios.append((cell, report(cell, dtype, measured)))
            right = measured.print_wrong() and right
            results.append({**asdict(cell), "dtype": dtype, **asdict(measured)})
    summarise(ratios)
    settings.write_json(options.json, results)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
