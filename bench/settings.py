"""Cells of the paper's benchmark, the options that choose them, and results as JSON."""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import statistics

import torch

import distributions

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}

# The number of tokens and the hidden size, which all of the paper's settings share.
TOKENS, HIDDEN = 16384, 2048


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of the paper's benchmark: 16k tokens, hidden size 2048."""

    head_dim: int
    seqlen: int
    causal: bool

    @property
    def shape(self):
        """(batch, seqlen, heads, head_dim)."""
        return max(1, TOKENS // self.seqlen), self.seqlen, HIDDEN // self.head_dim, self.head_dim

    def tflops(self, milliseconds):
        """TFLOP/s as the paper counts them."""
        batch, seqlen, heads, head_dim = self.shape
        operations = 4 * batch * heads * seqlen**2 * head_dim / (2 if self.causal else 1)
        return operations / milliseconds / 1e9

    def __str__(self):
        return f"d {self.head_dim:<3}  seqlen {self.seqlen:<5}  {'causal' if self.causal else 'dense ':6}"


def product(head_dims, seqlens, causal):
    """Cells of every combination, in which the sequence length changes fastest."""
    return [Cell(d, s, c) for d, c, s in itertools.product(head_dims, causal, seqlens)]


# The paper's 36 settings.
PAPER = product([64, 128, 256], [512, 1024, 2048, 4096, 8192, 16384], [False, True])


def parser_of(description, rounds, slice_ms=None, has_fa3=True):
    """A parser of the options that all benchmarks have. If `slice_ms` is None, there is no option for it."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if has_fa3:
        parser.add_argument("--fa3", metavar="FA3_C.SO", help="FlashAttention-3's compiled extension")
    parser.add_argument("--rounds", type=count, default=rounds, metavar="N", help=f"default: {rounds}")
    if slice_ms is not None:
        text = f"how long an implementation runs in a round; default: {slice_ms:g}"
        parser.add_argument("--slice-ms", type=float, default=slice_ms, metavar="MS", help=text)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="writes everything measured")
    return parser


def common_options(description, rounds, slice_ms=None):
    """A parser of the options that all benchmarks have, and of the options that choose cells."""
    parser = parser_of(description, rounds, slice_ms)
    parser.add_argument("--head-dim", type=_head_dim, nargs="+", metavar="N", help="head dimensions")
    parser.add_argument("--seqlen", type=count, nargs="+", metavar="N", help="rows and keys of a sequence")
    parser.add_argument(
        "--causal", type=int, choices=[0, 1], nargs="+", help="0: without a mask; 1: causal; 0 1: both"
    )
    return parser


def add_kinds(parser, default):
    """The option that chooses distributions."""
    text = f"distributions of the inputs; default: {' '.join(default)}"
    parser.add_argument("--kind", choices=list(distributions.KINDS), nargs="+", default=default, help=text)


def add_dtypes(parser, default):
    """The option that chooses element types."""
    text = f"default: {' '.join(default)}"
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=default, help=text)


def chosen(options, default):
    """The cells to measure: `default` if no option chooses any.

    Otherwise every combination, where an option that is absent stands for all values in `default`.
    """
    given = [options.head_dim, options.seqlen, options.causal]
    if not any(given):
        return default
    known = [
        list(dict.fromkeys(values))
        for values in zip(*((cell.head_dim, cell.seqlen, cell.causal) for cell in default))
    ]
    head_dims, seqlens, causal = (x or y for x, y in zip(given, known))
    return product(head_dims, seqlens, map(bool, causal))


def count(text):
    """A positive number, as an option's type."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, found {number}")
    return number


def geometric_mean(ratios):
    """The geometric mean of at least one number above 0."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def mean_and_worst(ratios):
    """The geometric mean and the least of at least one pair (ratio, where it was measured), as text."""
    mean = geometric_mean([ratio for ratio, _ in ratios])
    worst, where = min(ratios, key=lambda pair: pair[0])
    return f"geometric mean {mean:.3f}  worst {worst:.3f} ({where})"


def machine():
    """The GPU, and the versions of torch and CUDA."""
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}


def print_machine():
    """Prints the GPU and the versions."""
    print("{gpu}, PyTorch {torch}, CUDA {cuda}".format(**machine()))


def write_json(path, measured):
    """Writes the results and the machine as JSON, if there is a path. `measured` is a list of dictionaries."""
    if path is None:
        return
    path.write_text(json.dumps({"machine": machine(), "measured": measured}, indent=2) + "\n")


def _head_dim(text):
    number = count(text)
    if HIDDEN % number:
        why = f"{HIDDEN} columns are no whole number of heads with head_dim {number}"
        raise argparse.ArgumentTypeError(why)
    return number
