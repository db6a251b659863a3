"""Sustained speed, power and energy of the forward or the backward pass, compared with FlashAttention-3.

    python3 bench/sustained.py --fa3 path/to/fa3_C.so
    python3 bench/sustained.py --fa3 path/to/fa3_C.so --backward

Boards throttle within tens of milliseconds of load. Here each implementation runs alone for some seconds at a
time, and they take turns. A line has FlashAttention-3's time divided by ours (the ratio), and for each
implementation TFLOP/s, the board's power in W, the SMs' clock in MHz, and the energy of a call in mJ. Power
is from the board's energy counter, which NVML reads.
"""

import dataclasses
import statistics

import gradients
import implementations
import nvml
import settings
import timing
from distributions import draw

CELLS = settings.product([64, 128, 256], [1024, 4096, 16384], [False, True])

# The number of seconds until the clock has settled.
WARM_UP = 0.5


def parse():
    """The options of the command line."""
    parser = settings.common_options(__doc__, rounds=3)
    settings.add_kinds(parser, ["normal"])
    settings.add_dtypes(parser, ["bf16"])
    text = "how long an implementation runs in a round; default: 2"
    parser.add_argument("--slice", type=float, default=2.0, metavar="SECONDS", help=text)
    text = f"how long it runs before, until the clock has settled; default: {WARM_UP}"
    parser.add_argument("--warm-up", type=float, default=WARM_UP, metavar="SECONDS", help=text)
    parser.add_argument("--backward", action="store_true", help="the backward pass")
    return parser.parse_args()


def bound(options, cell, dtype, q, k, v):
    """The implementations, bound to their arguments."""
    if not options.backward:
        return implementations.bind(implementations.implementations(options.fa3), q, k, v, cell.causal)
    dout, _, _ = draw("normal", cell.shape, settings.DTYPES[dtype], seed=2)
    makers = gradients.backward(options.fa3, [])
    return {name: make(dout, q, k, v, cell.causal, False) for name, make in makers.items()}


def measure(functions, rounds, warm_up, seconds, meter):
    """By implementation, the median of each quantity over the rounds."""
    names = list(functions)
    slices = {name: [] for name in names}
    for turn in range(rounds):
        for name in timing.rotated(names, turn):
            taken = timing.sustain(functions[name], warm_up, seconds, meter)
            slices[name].append(taken)
    return {name: median(taken) for name, taken in slices.items()}


def median(slices):
    """The median of each quantity, or None if a slice does not have it."""
    columns = zip(*(dataclasses.astuple(taken) for taken in slices))
    return timing.Sustained(*(None if None in column else statistics.median(column) for column in columns))


def report(kind, cell, dtype, taken, work):
    """Prints the lines of a cell with `work` times the forward pass's operations. Returns the ratio of
    FlashAttention-3's time to ours, or None if FlashAttention-3 is not measured.
    """
    ratio = taken["fa3"].ms / taken["ours"].ms if "fa3" in taken else None
    print(f"{kind:8}  {cell}  {dtype:4}" + ("" if ratio is None else f"  ratio {ratio:.3f}"))
    print_taken(cell, taken, work)
    return ratio


def print_taken(cell, taken, work=1.0):
    """Prints a line for each implementation of a cell, whose operations are `work` times the forward pass's."""
    width = max(map(len, taken))
    for name, one in taken.items():
        power, clock = number(one.watts), number(one.sm_mhz)
        energy = number(one.millijoules)
        rate = work * cell.tflops(one.ms)
        print(f"    {name:{width}}  {rate:4.0f} TFLOP/s  {power} W  {clock} MHz  {energy} mJ", flush=True)


def number(value):
    """A number as text, or "-" for None."""
    return "-" if value is None else f"{value:.0f}"


def open_meter():
    """NVML's meter of the GPU. If there is none, prints why and returns None."""
    try:
        return nvml.Meter()
    except nvml.NvmlError as error:
        print(f"no power and no clock: {error}")
        return None


def main():
    """Measures all cells."""
    options = parse()
    settings.print_machine()
    work = gradients.BACKWARD if options.backward else 1.0
    meter = open_meter()
    results, ratios = [], []
    for kind in options.kind:
        for cell in settings.chosen(options, CELLS):
            for dtype in options.dtype:
                q, k, v = draw(kind, cell.shape, settings.DTYPES[dtype])
                functions = bound(options, cell, dtype, q, k, v)
                taken = measure(functions, options.rounds, options.warm_up, options.slice, meter)
                ratios.append((report(kind, cell, dtype, taken, work), f"{kind}  {cell}  {dtype}"))
                what = {"kind": kind, **dataclasses.asdict(cell), "dtype": dtype}
                results.append({**what, "sustained": {name: one.numbers() for name, one in taken.items()}})
    if options.fa3 is not None:
        print(f"\n{settings.mean_and_worst(ratios)}")
    settings.write_json(options.json, results)


if __name__ == "__main__":
    main()
