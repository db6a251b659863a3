"""Lists of blocks beside dense attention, both passes: one GPU, one process, in turns.

    python3 bench/blocks.py
    python3 bench/blocks.py --block-size 128 --deterministic 1 --seqlen 16384

Q, K and V are (1, seqlen, heads, head_dim) in bf16. Each head's blocks of rows list random blocks of keys, or the
blocks nearest to the diagonal, a part of all blocks. TFLOP/s count the listed scores only: 4 * head_dim operations for
each score in the forward pass, and 10 * head_dim in the backward pass.

O and dQ of the last rows and dK and dV of the last keys of the last head are compared with float64, and the exit code
is 1 if one is wrong.
"""

import sys

import torch

import settings
import timing
from judge import distance, print_wrong

# The largest relative error that a right result may have.
WRONG = 0.02

KINDS = ("random", "nearest")


def parse(words=None):
    """The options of the command line."""
    parser = settings.parser_of(__doc__, rounds=5, slice_ms=40.0, has_fa3=False)
    parser.add_argument("--block-size", type=int, choices=[64, 128], default=64)
    parser.add_argument("--heads", type=settings.count, default=16, metavar="N")
    parser.add_argument("--seqlen", type=settings.count, nargs="+", default=[8192, 32768], metavar="N")
    parser.add_argument("--head-dim", type=settings.count, nargs="+", default=[64, 128], metavar="N")
    parser.add_argument("--part", type=float, nargs="+", default=[1, 0.5, 0.25, 0.1], metavar="PART")
    parser.add_argument("--deterministic", type=int, nargs="+", choices=[0, 1], default=[0, 1])
    return parser.parse_args(words)


def lists(kind, heads, blocks, part, device="cuda"):
    """Counts and indices of the blocks of keys that each block of rows lists, a part of `blocks`."""
    listed = max(1, round(part * blocks))
    if kind == "random":
        index = torch.rand(heads, blocks, blocks, device=device).argsort(-1)[..., :listed]
    else:
        first = (torch.arange(blocks, device=device) - listed // 2).clamp(0, blocks - listed)
        index = (first[:, None] + torch.arange(listed, device=device)).expand(heads, -1, -1)
    count = torch.full((1, heads, blocks), listed, dtype=torch.int32, device=device)
    return count, index[None].to(torch.int32).contiguous()


def errors(sees, size, dout, inputs, results):
    """Relative errors of the last block of O, dQ, dK and dV of the last head. `sees` says which blocks it lists."""
    dout, q, k, v, o, dq, dk, dv = (x[0, :, -1].double() for x in (dout, *inputs, *results))
    scale = q.shape[-1] ** -0.5
    sees = sees.repeat_interleave(size, 0).repeat_interleave(size, 1)[: len(q), : len(k)]

    def gradient(rows, keys, lse):
        """P and dS of these rows and keys."""
        p = torch.exp(scale * q[rows] @ k[keys].T - lse).masked_fill(~sees[rows, keys], 0)
        return p, p * (dout[rows] @ v[keys].T - (dout[rows] * o[rows]).sum(-1, keepdim=True))

    every, last = slice(None), slice(-size, None)
    pieces = [slice(first, first + 1024) for first in range(0, len(q), 1024)]
    lse = torch.cat([(scale * q[x] @ k.T).masked_fill(~sees[x], -torch.inf).logsumexp(-1, True) for x in pieces])
    p, ds = gradient(last, every, lse[last])
    p_keys, ds_keys = gradient(every, last, lse)
    right = {
        "O": (o[last], p @ v),
        "dQ": (dq[last], scale * ds @ k),
        "dK": (dk[last], scale * ds_keys.T @ q),
        "dV": (dv[last], p_keys.T @ dout),
    }
    return {name: distance(*pair) for name, pair in right.items()}


def measure(kind, seqlen, head_dim, options, device="cuda"):
    """Measures both passes, dense and under lists of each part. Yields results, and prints a line for each pass."""
    from fa3 import flash_attn_func, masks

    size, heads = options.block_size, options.heads
    blocks = -(-seqlen // size)
    q, k, v, dout = (
        torch.randn(1, seqlen, heads, head_dim, dtype=torch.bfloat16, device=device) for _ in range(4)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    of_part = {part: lists(kind, heads, blocks, part, device) for part in options.part}
    words = {
        part: masks.block_sparse(*given, key_blocks=blocks, block_size=size) for part, given in of_part.items()
    }
    words = {"dense": None} | words

    def forward(intervals, deterministic=False):
        return flash_attn_func(q, k, v, intervals=intervals, deterministic=deterministic)

    def report(name, products, functions):
        """Measures a pass, and prints its line."""
        ms = timing.in_turns(functions, options.rounds, options.slice_ms)
        flops = products * head_dim * heads * seqlen**2
        rates = {by: flops * (1 if by == "dense" else by) / of / 1e9 for by, of in ms.items()}
        text = "  ".join(f"{by}: {rate:4.0f}" for by, rate in rates.items())
        print(f"{kind:8} {name:22} {seqlen:6} d {head_dim:3}  TFLOP/s  {text}", flush=True)
        setting = {"kind": kind, "pass": name, "seqlen": seqlen, "head_dim": head_dim, "block_size": size}
        return setting | {"ms": {str(by): of for by, of in ms.items()}}

    with torch.no_grad():
        of_words = {by: lambda of=of: forward(of) for by, of in words.items()}
        yield report("forward", 4, of_words) | {"errors": {}}
    for deterministic in options.deterministic:
        outputs = {by: forward(of, bool(deterministic)) for by, of in words.items()}
        functions = {
            by: lambda o=o: torch.autograd.grad(o, inputs, dout, retain_graph=True) for by, o in outputs.items()
        }
        wrong = {}
        for part, (_, index) in of_part.items():
            sees = torch.zeros(blocks, blocks, dtype=torch.bool, device=device)
            sees.scatter_(1, index[0, -1].long(), True)
            results = [x.detach() for x in (outputs[part], *functions[part]())]
            found = errors(sees, size, dout, [x.detach() for x in inputs], results)
            wrong |= {f"{name} of {part}": error for name, error in found.items()}
        name = "backward, same bits" if deterministic else "backward"
        yield report(name, 10, functions) | {"errors": wrong}
        print_wrong(wrong, WRONG)


def main():
    """Measures all settings. Returns the exit code."""
    options = parse()
    settings.print_machine()
    results = []
    for kind in KINDS:
        for head_dim in options.head_dim:
            for seqlen in options.seqlen:
                torch.manual_seed(0)
                results += measure(kind, seqlen, head_dim, options)
    settings.write_json(options.json, results)
    return 0 if all(given < WRONG for result in results for given in result["errors"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
