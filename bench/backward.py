"""Our backward pass beside other implementations of it: one GPU, one process, taking turns.

    python3 bench/backward.py --fa3 path/to/fa3_C.so
    python3 bench/backward.py --fa3 path/to/fa3_C.so --deterministic
    python3 bench/backward.py --fa3 path/to/fa3_C.so --step

Ours is the installed Python package fa3. The others are FlashAttention-3's C++, where --fa3 gives its
compiled extension, and cuDNN and FlashAttention-2 as PyTorch has them (--peers chooses among these two; without
a name it leaves both out). The settings are the 36 of peers.py. dO is N(0, 1). The backward pass counts 2.5 times the
forward pass's operations. With --step, both passes are measured as training runs them, and count 3.5 times as much.

A ratio is another implementation's time divided by ours. Cells that an implementation does not support are named and
left out: FlashAttention-3 has no deterministic form for head_dim 256.

Every dQ, dK and dV is compared with float64 on one head up to 16k keys, and the exit code is 1 if one is wrong.
"""

import dataclasses
import sys

import distributions
import gradients
import implementations
import judge
import ratios
import settings
import timing

# A relative error that rounding to 16 bits never makes.
WRONG = 2e-2

# The longest sequence for which the float64 matrices of one head fit into the GPU's memory.
LONGEST_CHECKED = 16384

# With `spike`, one key has a row's weight, and its gradient is the difference of two nearly equal 16-bit numbers.
KINDS = [kind for kind in distributions.KINDS if kind != "spike"]


def parse(words=None):
    """The options of the command line."""
    parser = settings.common_options(__doc__, rounds=7, slice_ms=25.0)
    settings.add_dtypes(parser, ["bf16"])
    text = "default: cudnn, and none with --deterministic"
    parser.add_argument("--peers", choices=list(implementations.TORCH), nargs="*", help=text)
    parser.add_argument("--data", choices=KINDS, default="normal", help="distribution; default: normal")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in every run")
    parser.add_argument("--step", action="store_true", help="forward and backward pass")
    options = parser.parse_args(words)
    if options.peers is None:
        options.peers = [] if options.deterministic else ["cudnn"]
    return options


def takers(makers, cell, *arguments):
    """Binds these arguments to each implementation that supports them. Prints why the others do not."""
    functions = {}
    for name, make in makers.items():
        try:
            function = make(*arguments)
            function()
        except RuntimeError as error:
            if name == "ours":
                raise
            why = str(error).strip().splitlines() or [type(error).__name__]
            print(f"{cell}  {name} refuses: {why[0]}", flush=True)
        else:
            functions[name] = function
    return functions


def errors(functions, dout, q, k, v, causal):
    """Relative errors of dQ, dK and dV by implementation, for the last head of the last sequence."""
    expected = gradients.exact(*(x[-1, :, -1] for x in (dout, q, k, v)), causal)
    relative = {}
    for name, function in functions.items():
        found = (x[-1, :, -1] for x in function())
        relative[name] = dict(zip(("dq", "dk", "dv"), map(judge.distance, found, expected)))
    return relative


def print_wrong(relative):
    """Prints errors that are too large, or NaN. Returns whether there are none."""
    right = True
    for name, of_gradients in relative.items():
        for what, error in of_gradients.items():
            if not error < WRONG:
                print(f"WRONG: {name} has a relative error of {error:.3g} in {what}", flush=True)
                right = False
    return right


def main():
    """Measures all cells. Returns the exit code."""
    options = parse()
    settings.print_machine()
    make, work = gradients.backward, gradients.BACKWARD
    if options.step:
        make, work = gradients.step, gradients.STEP
    makers = make(options.fa3, options.peers)
    results, of_cells, right = [], [], True
    for cell in settings.chosen(options, settings.PAPER):
        for dtype in options.dtype:
            q, k, v = distributions.draw(options.data, cell.shape, settings.DTYPES[dtype])
            dout, _, _ = distributions.draw("normal", cell.shape, settings.DTYPES[dtype], seed=2)
            functions = takers(makers, cell, dout, q, k, v, cell.causal, options.deterministic)
            checked = functions if cell.seqlen <= LONGEST_CHECKED else {}
            relative = errors(checked, dout, q, k, v, cell.causal)
            ms = timing.in_turns(functions, options.rounds, options.slice_ms)
            of_cells.append((cell, ratios.report(cell, dtype, ms, work)))
            right = print_wrong(relative) and right
            results.append({**dataclasses.asdict(cell), "dtype": dtype, "ms": ms, "errors": relative})
    ratios.summarise(of_cells)
    settings.write_json(options.json, results)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
