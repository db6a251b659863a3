"""Our forward pass compared with other implementations of it: one GPU, one process, taking turns.

    python3 bench/peers.py --fa3 path/to/fa3_C.so

Ours is the installed Python package fa3. The others are FlashAttention-3's C++, where --fa3 gives its
compiled extension, and cuDNN and FlashAttention-2 as PyTorch has them (--peers chooses among these two;
without a name it leaves both out). The settings are the paper's 36: head_dim 64, 128 and 256, 512 to 16k
keys, without a mask and causal, 16k tokens, hidden size 2048. Inputs are N(0, 1).

Compare ratios, another implementation's time divided by ours: boards throttle, so that TFLOP/s of different runs are
not comparable. Every result is compared with float64 on some rows, and the exit code is 1 if one is wrong.
"""

import sys
from dataclasses import asdict

import implementations
import ratios
import settings
from measure import measure


def parse():
    """The options of the command line."""
    parser = settings.common_options(__doc__, rounds=7, slice_ms=25.0)
    settings.add_dtypes(parser, ["bf16"])
    peers = list(implementations.TORCH)
    parser.add_argument("--peers", choices=peers, nargs="*", default=peers, help="default: both")
    return parser.parse_args()


def main():
    """Measures all cells. Returns the exit code."""
    options = parse()
    settings.print_machine()
    functions = implementations.implementations(options.fa3)
    functions |= {name: implementations.TORCH[name] for name in options.peers}
    results, of_cells, right = [], [], True
    for cell in settings.chosen(options, settings.PAPER):
        for dtype in options.dtype:
            measured = measure(functions, "normal", cell, dtype, options.rounds, options.slice_ms)
            of_cells.append((cell, ratios.report(cell, dtype, measured.ms)))
            right = measured.print_wrong() and right
            results.append({**asdict(cell), "dtype": dtype, **asdict(measured)})
    ratios.summarise(of_cells)
    settings.write_json(options.json, results)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
