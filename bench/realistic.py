"""The speed and the accuracy of the forward pass on data other than N(0, 1), compared with FlashAttention-3.

    python3 bench/realistic.py --fa3 path/to/fa3_C.so

The cost of our lazy softmax depends on its data; the cost of FlashAttention-3's hardly does. bench/distributions.py
describes the kinds of data; `real` is the activations of a real model. A line has FlashAttention-3's time divided
by ours, the root mean square error of our O against float64 on some rows, and that error divided by
FlashAttention-3's. Without --fa3 it has our TFLOP/s and our error. The exit code is 1 if a result is wrong.
"""

import sys
from dataclasses import asdict

import distributions
import implementations
import settings
from measure import measure

CELLS = [
    settings.Cell(128, 4096, False),
    settings.Cell(128, 4096, True),
    settings.Cell(64, 4096, True),
    settings.Cell(256, 4096, True),
    settings.Cell(128, 1024, True),
    settings.Cell(128, 16384, True),
]


def parse():
    """The options of the command line."""
    parser = settings.common_options(__doc__, rounds=5, slice_ms=15.0)
    settings.add_kinds(parser, list(distributions.KINDS))
    settings.add_dtypes(parser, ["bf16", "f16"])
    return parser.parse_args()


def report(kind, cell, dtype, measured):
    """Prints the line of a cell. Returns the ratio of FlashAttention-3's time to ours, if it was measured."""
    ms, rmse = measured.ms, measured.rmse
    line = f"{kind:8}  {cell}  {dtype:4}  TFLOP/s {cell.tflops(ms['ours']):4.0f}  RMSE {rmse['ours']:.2e}"
    ratio = None
    if "fa3" in ms:
        ratio = ms["fa3"] / ms["ours"]
        # If one key has all the weight, FlashAttention-3's error may be 0.
        error = f"{rmse['ours'] / rmse['fa3']:.2f}" if rmse["fa3"] else "-"
        line += f" ({error} x FA3's)  ratio {ratio:.3f}"
    print(line, flush=True)
    return ratio


def summarise(ratios):
    """Prints the geometric mean and the worst cell of each kind."""
    print()
    for kind, cells in ratios.items():
        print(f"{kind:8}  {settings.mean_and_worst(cells)}")


def main():
    """Measures all cells. Returns the exit code."""
    options = parse()
    settings.print_machine()
    functions = implementations.implementations(options.fa3)
    results, ratios, right = [], {}, True
    for kind in options.kind:
        for cell in settings.chosen(options, CELLS):
            for dtype in options.dtype:
                measured = measure(functions, kind, cell, dtype, options.rounds, options.slice_ms)
                ratio = report(kind, cell, dtype, measured)
                right = measured.print_wrong() and right
                if ratio is not None:
                    ratios.setdefault(kind, []).append((ratio, f"{cell}  {dtype}"))
                results.append({"kind": kind, **asdict(cell), "dtype": dtype, **asdict(measured)})
    if ratios:
        summarise(ratios)
    settings.write_json(options.json, results)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
