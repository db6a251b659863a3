"""All forms of the e4m3 forward pass, compared with FlashAttention-3's: one GPU, one process, taking turns.

    python3 bench/fp8.py --fa3 path/to/fa3_C.so
    python3 bench/fp8.py --fa3 path/to/fa3_C.so --forms ours fa3
    python3 bench/fp8.py --fa3 path/to/fa3_C.so --sustained 2 --rounds 3 --seqlen 1024 4096 16384

The settings are as in peers.py. All forms have the same bf16 inputs, and only the chains' times include quantization:

    ours            V in rows, a scale for each head: FlashAttention-3's interface
    fa3             FlashAttention-3's C++ on the same codes and scales, where --fa3 gives its extension
    transposed      these codes and scales, V transposed in memory
    blocks          a scale for each 128 rows, V transposed
    blocks-rows     a scale for each 128 rows, V in rows
    channels        as blocks, but V by channels
    bf16            our forward pass in bf16
    chain           flash_attn_fp8_func from bf16: three quantizations, then attention
    chain-channels  as chain, but V by channels

A cell has TFLOP/s and the error of each form: the root mean square of the difference from float64 attention of the bf16
inputs, on some rows of O, relative to O. Mean ratios of times over all cells follow at the end. The exit code is 1 if
an error is too large or NaN. FlashAttention-3's error is not judged: its sums shrink with many keys.

With --sustained each form runs alone for some seconds at a time, as in sustained.py, and a cell also has the
board's power, the SMs' clock and the energy of a call.
"""

import functools
import sys
from dataclasses import asdict

import torch

import distributions
import implementations
import measure
import settings
import sustained
import timing

FORMS = [
    "ours",
    "fa3",
    "transposed",
    "blocks",
    "blocks-rows",
    "channels",
    "bf16",
    "chain",
    "chain-channels",
]

# A ratio is the first form's time divided by the second form's.
RATIOS = [
    ("fa3", "ours"),
    ("fa3", "transposed"),
    ("fa3", "blocks"),
    ("fa3", "blocks-rows"),
    ("fa3", "channels"),
    ("bf16", "chain"),
    ("bf16", "chain-channels"),
]

# A relative error that rounding to e4m3 never makes: rounding makes about 0.05 on N(0, 1), and up to 0.2 with outliers.
WRONG = 0.3

BOUNDS = {form: WRONG for form in FORMS if form != "fa3"} | {"bf16": measure.WRONG}


def parse(words=None):
    """The options of the command line."""
    parser = settings.common_options(__doc__, rounds=7, slice_ms=25.0)
    settings.add_kinds(parser, ["normal"])
    text = "default: all, but fa3 only with --fa3"
    parser.add_argument("--forms", choices=FORMS, nargs="+", help=text)
    text = "each form runs alone, for so long in a round; default: in turns"
    parser.add_argument("--sustained", type=float, metavar="SECONDS", help=text)
    options = parser.parse_args(words)
    if options.forms is None:
        options.forms = [form for form in FORMS if form != "fa3" or options.fa3 is not None]
    if "fa3" in options.forms and options.fa3 is None:
        parser.error("the form fa3 needs --fa3")
    return options


def bind(forms, functions, q, k, v, causal):
    """Makes a function without arguments of each form of the forward pass. Q, K and V have 16 bits."""
    # Imported here, so that this module can be imported where fa3 is not installed.
    from fa3 import flash_attn_fp8_func, quantize, quantize_channels

    (q_heads, k_heads, v_heads), of_heads = zip(*(quantize(x, scales_of="heads") for x in (q, k, v)))
    v_heads_transposed, _ = quantize(v, scales_of="heads", transposed=True)
    (q_blocks, q_scales), (k_blocks, k_scales) = quantize(q), quantize(k)
    v_blocks, v_scales = quantize(v)
    v_blocks_transposed, _ = quantize(v, transposed=True)
    v_channels, v_channel_scales, v_mean = quantize_channels(v, transposed=True)

    by_heads = _descales(*of_heads)
    by_blocks = _descales(q_scales, k_scales, v_scales)
    by_channels = {**_descales(q_scales, k_scales, v_channel_scales), "v_mean": v_mean, "v_transposed": True}
    ours = functions["ours"]
    calls = {
        "ours": (ours, (q_heads, k_heads, v_heads), by_heads),
        "fa3": (functions.get("fa3"), (q_heads, k_heads, v_heads), by_heads),
        "transposed": (ours, (q_heads, k_heads, v_heads_transposed), {**by_heads, "v_transposed": True}),
        "blocks": (ours, (q_blocks, k_blocks, v_blocks_transposed), {**by_blocks, "v_transposed": True}),
        "blocks-rows": (ours, (q_blocks, k_blocks, v_blocks), by_blocks),
        "channels": (ours, (q_blocks, k_blocks, v_channels), by_channels),
        "bf16": (ours, (q, k, v), {}),
        "chain": (flash_attn_fp8_func, (q, k, v), {}),
        "chain-channels": (flash_attn_fp8_func, (q, k, v), {"v_channels": True}),
    }
    bound = {}
    for form in forms:
        function, tensors, options = calls[form]
        bound[form] = functools.partial(function, *tensors, causal=causal, **options)
    return bound


def times(bound, options, meter):
    """Milliseconds of a call of each form, and with --sustained the `Sustained` measurements."""
    if options.sustained is None:
        return timing.in_turns(bound, options.rounds, options.slice_ms), {}
    taken = sustained.measure(bound, options.rounds, sustained.WARM_UP, options.sustained, meter)
    return {form: one.ms for form, one in taken.items()}, taken


def report(kind, cell, measured):
    """Prints the lines of a cell: TFLOP/s, and errors."""
    rates = "  ".join(f"{form} {cell.tflops(ms):4.0f}" for form, ms in measured.ms.items())
    errors = "  ".join(f"{form} {error:.2g}" for form, error in measured.relative().items())
    print(f"{kind:8}  {cell}  TFLOP/s: {rates}")
    print(f"    relative error: {errors}", flush=True)


def summarise(of_cells):
    """Prints the mean ratios of times, over all cells and by head_dim.

    Cells are (kind, cell, milliseconds by form).
    """
    for other, form in RATIOS:
        ratios = [
            (ms[other] / ms[form], f"{kind}  {cell}", cell.head_dim)
            for kind, cell, ms in of_cells
            if other in ms and form in ms
        ]
        head_dims = sorted({head_dim for _, _, head_dim in ratios})
        for head_dim in [None, *head_dims] if len(head_dims) > 1 else head_dims:
            chosen = [(ratio, where) for ratio, where, of in ratios if head_dim in (None, of)]
            which = "all" if head_dim is None else f"d {head_dim}"
            print(f"{other + ' / ' + form:21}  {which:5}  {settings.mean_and_worst(chosen)}")


def _descales(q, k, v):
    return {"q_descale": q, "k_descale": k, "v_descale": v}


def main():
    """Measures all cells. Returns the exit code."""
    options = parse()
    settings.print_machine()
    functions = implementations.implementations(options.fa3)
    meter = None if options.sustained is None else sustained.open_meter()
    results, of_cells, right = [], [], True
    for kind in options.kind:
        for cell in settings.chosen(options, settings.PAPER):
            q, k, v = distributions.draw(kind, cell.shape, torch.bfloat16)
            bound = bind(options.forms, functions, q, k, v, cell.causal)
            rmse, size = measure.errors(bound, q, k, v, cell.causal)
            ms, taken = times(bound, options, meter)
            measured = measure.Measured(ms, rmse, size)
            report(kind, cell, measured)
            if taken:
                sustained.print_taken(cell, taken)
            right = measured.print_wrong(BOUNDS) and right
            of_cells.append((kind, cell, ms))
            alone = {form: one.numbers() for form, one in taken.items()}
            results.append({"kind": kind, **asdict(cell), **asdict(measured), "sustained": alone})
    print()
    summarise(of_cells)
    settings.write_json(options.json, results)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
