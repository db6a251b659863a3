"""Packed sequences, compared with other implementations and with our own dense batches: one GPU, one process, in turns.

    python3 bench/packed.py --fa3 path/to/fa3_C.so
    python3 bench/packed.py --fa3 path/to/fa3_C.so --mix zipf odd --heads 32 8 --causal 1
    python3 bench/packed.py --fa3 path/to/fa3_C.so --backward
    python3 bench/packed.py --lengths lengths.txt

Ours is the installed Python package fa3; FlashAttention-3's C++ is measured where --fa3 gives its compiled extension.
A mix is a list of the sequences' lengths, about 16k tokens. --lengths reads other lengths, separated by blanks, from a
file. Where all sequences are equally long, a dense batch of them is measured as well.

TFLOP/s count visible scores only. Compare ratios: another implementation's time divided by ours. Each O, or each
gradient, is compared with float64, on one head of K of two sequences: the longest one of at most 8192 rows, and the
shortest one of at least 2 rows. The exit code is 1 if one is wrong.
"""

import dataclasses
import pathlib
import sys

import torch

import distributions
import gradients
import settings
import timing
from judge import distance, exact, largest, print_wrong

# A relative error that rounding to 16 bits never makes.
WRONG = 2e-2

# The lengths of sequences that are compared with float64. One row alone would have gradients of 0 under a causal mask.
CHECKED = range(2, 8192 + 1)

MIXES = {
    "8x2048": [2048] * 8,
    "32x512": [512] * 32,
    "128x128": [128] * 128,
    "8192+64x128": [8192] + [128] * 64,
    "zipf": [8192 // number for number in range(1, 13)] + [64] * 20,
    "odd": [1537, 3, 911, 4099, 77, 2600, 1, 5003, 640, 1229],
    "1x16384": [16384],
}

# (head_dim, query heads, key/value heads) of the table in docs/performance-packed.md.
SHAPES = [(128, 16, 16), (128, 32, 8), (64, 32, 32), (256, 8, 8)]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting."""

    head_dim: int
    heads: int
    heads_kv: int
    mix: str
    lengths: tuple
    causal: bool

    def tflops(self, milliseconds, work):
        """TFLOP/s for `work` times a forward pass's operations on the visible scores, which a causal mask halves."""
        scores = sum(length**2 for length in self.lengths) / (2 if self.causal else 1)
        return work * 4 * self.heads * self.head_dim * scores / milliseconds / 1e9

    def __str__(self):
        heads = f"{self.heads}/{self.heads_kv}"
        mask = "causal" if self.causal else "dense "
        return f"d {self.head_dim:<3}  heads {heads:5}  {self.mix:12}  {mask}"


def parse(words=None):
    """The options of the command line."""
    parser = settings.parser_of(__doc__, rounds=7, slice_ms=25.0)
    parser.add_argument("--mix", choices=list(MIXES), nargs="+", help="default: all")
    parser.add_argument("--lengths", type=pathlib.Path, metavar="FILE", help="lengths in place of the mixes")
    parser.add_argument("--head-dim", type=settings.count, metavar="N", help="with --heads: one shape")
    parser.add_argument("--heads", type=settings.count, nargs=2, metavar="N", help="of Q, and of K and V")
    parser.add_argument("--backward", action="store_true", help="the backward pass in place of the forward pass")
    parser.add_argument("--deterministic", action="store_true", help="its deterministic forms")
    parser.add_argument("--causal", type=int, choices=[0, 1], nargs="+", default=[0, 1])
    parser.add_argument("--data", choices=list(distributions.KINDS), default="normal")
    settings.add_dtypes(parser, ["bf16"])
    options = parser.parse_args(words)
    if (options.heads is None) != (options.head_dim is None):
        parser.error("--heads and --head-dim are one shape: give both")
    if options.mix and options.lengths:
        parser.error("--lengths takes the place of --mix")
    return options


def cells(options):
    """The settings that the options choose."""
    if options.lengths:
        mixes = {options.lengths.name: [int(length) for length in options.lengths.read_text().split()]}
    else:
        mixes = {mix: MIXES[mix] for mix in options.mix or MIXES}
    shapes = [(options.head_dim, *options.heads)] if options.heads else SHAPES
    return [
        Cell(*shape, mix, tuple(lengths), bool(causal))
        for shape in shapes
        for mix, lengths in mixes.items()
        for causal in options.causal
    ]


def forward(options, cell, q, k, v):
    """Implementations, bound to tensors. Each returns O (total, heads, head_dim) and LSE (heads, total)."""
    from fa3 import flash_attn_func, flash_attn_varlen_func

    longest, starts = max(cell.lengths), starts_of(cell, q.device)
    mask = {"causal": cell.causal, "return_attn_probs": True}

    def ours():
        return flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, **mask)

    bound = {"ours": ours}
    if len(set(cell.lengths)) == 1:
        batches = [batch_of(cell, x) for x in (q, k, v)]
        bound["dense"] = lambda: flash_attn_func(*batches, **mask)
    if options.fa3:
        torch.ops.load_library(options.fa3)
        bound["fa3"] = lambda: torch.ops.flash_attn_3.fwd(q, k, v, **flash_attention_3(cell, starts))[:2]
    return bound


def backward(options, cell, dout, q, k, v):
    """Implementations of the backward pass, bound to tensors. Each returns dQ, dK and dV."""
    longest, starts = max(cell.lengths), starts_of(cell, q.device)
    of_dense = (cell.head_dim**-0.5, -1, 0 if cell.causal else -1, 0, 0.0, 0, options.deterministic)
    lists = (starts, starts, None, None, longest, longest)
    results = {name: function() for name, function in forward(options, cell, q, k, v).items()}
    o, lse = results["ours"]
    bound = {"ours": lambda: torch.ops.fa3.varlen_backward(dout, q, k, v, o, lse, None, *lists, *of_dense)}
    if "dense" in results:
        batches = [batch_of(cell, x) for x in (dout, q, k, v)]
        bound["dense"] = lambda: torch.ops.fa3.backward(*batches, *results["dense"], None, *of_dense)
    if "fa3" in results:
        outputs = [torch.empty_like(x) for x in (q, k, v)]
        given = {**flash_attention_3(cell, starts), "deterministic": options.deterministic}

        def fa3():
            torch.ops.flash_attn_3.bwd(dout, q, k, v, *results["fa3"], *outputs, **given)
            return outputs

        bound["fa3"] = fa3
    return bound


def flash_attention_3(cell, starts):
    """The arguments, besides tensors, that FlashAttention-3's two passes share."""
    longest = max(cell.lengths)
    return {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": cell.head_dim**-0.5,
        "is_causal": cell.causal,
    }


def starts_of(cell, device):
    """cu_seqlens of the sequences."""
    return torch.tensor([0, *cell.lengths], device=device).cumsum(0).to(torch.int32)


def batch_of(cell, x):
    """The dense batch of packed sequences that have one length."""
    return x.view(len(cell.lengths), max(cell.lengths), *x.shape[1:])


def exact_gradients(dout, q, k, v, causal):
    """Float64 gradients of one head of K and its query heads in one sequence: dQ of the last query head, dK and dV. dO
    and Q are (rows, heads, head_dim), K and V (rows, head_dim)."""
    of_heads = [gradients.exact(dout[:, head], q[:, head], k, v, causal) for head in range(q.shape[1])]
    return of_heads[-1][0], sum(dk for _, dk, _ in of_heads), sum(dv for _, _, dv in of_heads)


def errors(cell, bound, q, k, v, dout=None):
    """The largest relative error of O by implementation, or of the gradients if dO is given, over the longest and the
    shortest sequence that are checked."""
    order = sorted((length, number) for number, length in enumerate(cell.lengths) if length in CHECKED)
    found = {name: function() for name, function in bound.items()}
    all_errors = {name: [0.0] for name in bound}
    for length, number in {order[0], order[-1]} if order else ():
        begin = sum(cell.lengths[:number])
        rows = slice(begin, begin + length)
        if dout is not None:
            group = slice(-(cell.heads // cell.heads_kv), None)
            given = dout[rows, group], q[rows, group], k[rows, -1], v[rows, -1]
            right = exact_gradients(*given, cell.causal)
        else:
            right = [exact(q[rows, -1], k[rows, -1], v[rows, -1], cell.causal)]
        for name, results in found.items():
            for result, expected in zip(results, right):
                packed = result.reshape(-1, *result.shape[-2:])[rows, -1]
                all_errors[name].append(distance(packed, expected))
    return {name: largest(of_name) for name, of_name in all_errors.items()}


def main():
    """Measures all cells. Returns the exit code."""
    options = parse()
    settings.print_machine()
    results, ratios, right = [], {}, True
    work = gradients.BACKWARD if options.backward else 1
    for cell in cells(options):
        for dtype in options.dtype:
            total = sum(cell.lengths)
            draw = [
                distributions.draw(
                    options.data, (1, total, heads, cell.head_dim), settings.DTYPES[dtype], seed=seed
                )
                for seed, heads in enumerate((cell.heads, cell.heads_kv), 1)
            ]
            q, k, v = (x[0].contiguous() for x in (draw[0][0], draw[1][1], draw[1][2]))
            if options.backward:
                dout = torch.randn_like(q)
                bound = backward(options, cell, dout, q, k, v)
            else:
                dout, bound = None, forward(options, cell, q, k, v)
            wrong = errors(cell, bound, q, k, v, dout)
            ms = timing.in_turns(bound, options.rounds, options.slice_ms)
            rates = "  ".join(f"{name} {cell.tflops(taken, work):5.0f}" for name, taken in ms.items())
            others = {name: taken / ms["ours"] for name, taken in ms.items() if name != "ours"}
            text = "  ".join(f"{ratio:.3f} ({name})" for name, ratio in others.items())
            print(f"{cell}  {dtype:4}  TFLOP/s: {rates}  ratio {text}", flush=True)
            right = print_wrong(wrong, WRONG) and right
            for name, ratio in others.items():
                ratios.setdefault(name, []).append((ratio, str(cell)))
            results.append({**dataclasses.asdict(cell), "dtype": dtype, "ms": ms, "errors": wrong})
    for name, of_name in ratios.items():
        print(f"to {name}: {settings.mean_and_worst(of_name)}, {len(of_name)} cells")
    settings.write_json(options.json, results)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
