"""Functions of scores and masks beside FlexAttention: one GPU, one process, in turns.

    python3 bench/flex.py --quick
    python3 bench/flex.py --cells "alibi d64" "bias d128 8k" --json flex.json

Ours is `fa3.flex_attention`, FlexAttention is torch's, compiled for each cell, with the same function and the same
`BlockMask`, which is made before the measurement. `flag` is `fa3.flash_attn_func` with causal or window_size in place
of the mask, and `plain` is ours without the function. Tensors are bf16; all cells have 16k tokens or one sequence,
and Q has 2048 columns of all heads, K and V 512. A bias of each score has so few heads that its table, f32, takes 8
GiB at most. TFLOP/s count visible scores: 4 * head_dim operations for each in the forward pass, and 10 * head_dim in
the backward pass. The ratio is FlexAttention's time divided by ours.

Rows of O are compared with float64, gradients with FlexAttention's. What raises an exception is printed with it, in the
place of its time. The exit code is 1 if a result is wrong or raised, and 2 without such a GPU.
"""

import gc
import sys
import time
from typing import NamedTuple

import torch

import masks
import settings
import timing
from judge import distance, print_wrong

# The largest relative error that a right result may have.
WRONG = 0.02

WINDOW = 1024

DEVICE = "cuda"


class Case(NamedTuple):
    """A function of scores, a mask, our own arguments for the mask, if any, and tables that have gradients."""

    score_mod: object
    mask_mod: object
    flag: dict | None = None
    learned: tuple = ()


class Cell(NamedTuple):
    """A case and the shape of its tensors."""

    case: str
    head_dim: int
    seqlen: int

    @property
    def heads(self):
        """Heads of Q, and of K and V."""
        heads = 2048 // self.head_dim
        if self.case.endswith("bias"):
            heads = max(1, min(heads, 2**31 // self.seqlen**2))
        return heads, max(1, heads // 4)

    @property
    def batch(self):
        """The number of sequences."""
        return max(1, settings.TOKENS // self.seqlen)

    def __str__(self):
        return f"{self.case} d{self.head_dim} {self.seqlen // 1024}k"


def causal(b, h, q, k):
    """The causal mask."""
    return q >= k


def alibi(heads, device):
    """ALiBi, with the slopes of its paper."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)
    return lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()


def learned_alibi(heads, seqlen, device):
    """ALiBi under a causal mask, whose slopes have gradients."""
    slopes = (2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)).requires_grad_()
    return Case(lambda s, b, h, q, k: s - slopes[h] * (q - k), causal, {"causal": True}, (slopes,))


def documents(seqlen, device):
    """The document of each row, of Zipf-like lengths."""
    lengths = (seqlen / torch.arange(1, 33).double()).long()
    ids = torch.arange(32).repeat_interleave(lengths)[torch.arange(seqlen) * lengths.sum() // seqlen]
    return ids.to(device)


def soft_cap(heads, seqlen, device):
    """A soft cap of 30."""
    return Case(lambda s, b, h, q, k: 30 * torch.tanh(s / 30), causal, {"causal": True})


def alibi_causal(heads, seqlen, device):
    """ALiBi under a causal mask."""
    return Case(alibi(heads, device), causal, {"causal": True})


def relative(heads, seqlen, device):
    """A table by head and by distance, as long as the sequence."""
    table = torch.randn(heads, seqlen, device=device)
    return Case(lambda s, b, h, q, k: s + table[h, (q - k).abs()], causal, {"causal": True})


def learned_relative(heads, seqlen, device):
    """A table by head and by distance, the last of which stands for all larger ones, with gradients."""
    table = torch.randn(heads, 128, device=device, requires_grad=True)
    return Case(lambda s, b, h, q, k: s + table[h, (q - k).clamp(0, 127)], causal, {"causal": True}, (table,))


def document_alibi(heads, seqlen, device):
    """ALiBi in documents, each with a causal mask."""
    ids = documents(seqlen, device)
    return Case(alibi(heads, device), lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k))


def window_alibi(heads, seqlen, device):
    """ALiBi in a causal window."""
    flag = {"window_size": (WINDOW - 1, 0)}
    return Case(alibi(heads, device), lambda b, h, q, k: (q >= k) & (q - k < WINDOW), flag)


def bias(heads, seqlen, device):
    """A bias by head, query and key."""
    table = torch.randn(heads, seqlen, seqlen, device=device)
    return Case(lambda s, b, h, q, k: s + table[h, q, k], causal, {"causal": True})


def learned_bias(heads, seqlen, device):
    """A bias by head, query and key, with gradients."""
    table = torch.randn(heads, seqlen, seqlen, device=device, requires_grad=True)
    return Case(lambda s, b, h, q, k: s + table[h, q, k], causal, {"causal": True}, (table,))


def images(heads, seqlen, device):
    """Documents with a causal mask, in which images of 256 rows, one in each 1024, see themselves."""
    ids, row = documents(seqlen, device), torch.arange(seqlen, device=device)
    begins = torch.cat((row[:1] == 0, ids[1:] != ids[:-1])) | (row % 1024 == 512) | (row % 1024 == 768)
    span = torch.where(row % 1024 // 256 == 2, begins.cumsum(0), -1)

    def mask_mod(b, h, q, k):
        return (ids[q] == ids[k]) & ((q >= k) | (span[q] == span[k]) & (span[q] >= 0))

    return Case(None, mask_mod)


def prefix(heads, seqlen, device):
    """A quarter of the rows see all of each other, and the mask is causal elsewhere."""
    return Case(None, lambda b, h, q, k: (q >= k) | (k < seqlen // 4))


CASES = {
    "soft cap": soft_cap,
    "alibi": alibi_causal,
    "relative": relative,
    "document alibi": document_alibi,
    "window alibi": window_alibi,
    "bias": bias,
    "learned alibi": learned_alibi,
    "learned relative": learned_relative,
    "learned bias": learned_bias,
    "images": images,
    "prefix": prefix,
}
# Cases without a function of scores, which are measured for long sequences only.
MASKS = "images", "prefix"


def parse(words=None):
    """The options of the command line."""
    parser = settings.parser_of(__doc__, rounds=5, slice_ms=20.0, has_fa3=False)
    parser.add_argument("--cells", nargs="+", metavar="TEXT", help="only cells whose names contain one of these")
    parser.add_argument("--quick", action="store_true", help="only head_dim 128 and 8k rows, in 3 rounds of 10 ms")
    parser.add_argument("--minutes", type=float, metavar="N", help="begins no cell after this time")
    options = parser.parse_args(words)
    if options.quick:
        options.rounds, options.slice_ms = 3, 10.0
    return options


def chosen(options):
    """The cells to measure; the slowest to compile, and the ones that need most memory, come last."""
    seqlens, head_dims = ([8192], [128]) if options.quick else ([8192, 2048, 32768], [128, 64, 256])
    cells = [Cell(case, d, n) for n in seqlens for d in head_dims for case in CASES if n > 2048 or case not in MASKS]
    return [cell for cell in cells if not options.cells or any(text in str(cell) for text in options.cells)]


def scored(case, q, k, rows, head):
    """Float64 scores of rows of the first sequence's query head, as the case replaces and hides them."""
    key = torch.arange(k.shape[1], device=k.device)[None]
    of_kv = head * k.shape[2] // q.shape[2]
    s = q[0, rows, head].double() @ k[0, :, of_kv].double().T * q.shape[3] ** -0.5
    at = (torch.tensor(x, device=k.device) for x in (0, head))
    b, h, q_idx = (*at, rows[:, None])
    if case.score_mod is not None:
        s = case.score_mod(s, b, h, q_idx, key)
    return s.masked_fill(~case.mask_mod(b, h, q_idx, key).expand_as(s), -torch.inf)


def error(o, case, q, k, v):
    """The relative error of the last 128 rows of the last head of O, heads first."""
    rows = torch.arange(q.shape[1] - 128, q.shape[1], device=q.device)
    right = scored(case, q, k, rows, q.shape[2] - 1).softmax(-1) @ v[0, :, -1].double()
    return distance(o[0, -1, -128:], right)


def passes(case, cell, q, k, v):
    """Forward passes by name, each of the same Q, K and V. Their results have heads first."""
    import fa3
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(case.mask_mod, None, None, cell.seqlen, cell.seqlen, device=q.device)
    given = *(x.transpose(1, 2) for x in (q, k, v)), case.score_mod, mask
    functions = {
        "ours": lambda: fa3.flex_attention(*given, enable_gqa=True),
        "flex": lambda: compiled(*given, enable_gqa=True),
    }
    if case.flag:
        named = dict(case.flag, score=case.score_mod)
        functions["flag"] = lambda: fa3.flash_attn_func(q, k, v, **named).transpose(1, 2)
    if case.score_mod is not None:
        functions["plain"] = lambda: fa3.flex_attention(*given[:3], None, mask, enable_gqa=True)
    visible = masks.visible(fa3.masks.from_mask_mod(mask))
    return functions, visible


def tried(functions):
    """The functions that do not raise, and their results; the exceptions of the others, as text."""
    works, results, raised = {}, {}, {}
    for by, function in functions.items():
        try:
            results[by] = function()
            torch.cuda.synchronize()
            works[by] = function
        except Exception as exception:
            raised[by] = f"{type(exception).__name__}: {' '.join(str(exception).split())[:200]}"
    return works, results, raised


def gradients(outputs, dout, tensors):
    """Backward passes by name. The graphs of their forward passes are kept."""
    options = dict(retain_graph=True, allow_unused=True)
    return {by: lambda o=o: torch.autograd.grad(o, tensors, dout, **options) for by, o in outputs.items()}


def measure(cell, options):
    """Measures both passes of a cell. Yields results, and prints a line for each."""
    torch.manual_seed(0)
    heads, heads_kv = cell.heads
    shapes = [(cell.batch, cell.seqlen, of, cell.head_dim) for of in (heads, heads_kv, heads_kv, heads)]
    q, k, v, dout = (torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE) for shape in shapes)
    case, dout = CASES[cell.case](heads, cell.seqlen, q.device), dout.transpose(1, 2)
    tensors = [*(x.requires_grad_() for x in (q, k, v)), *case.learned]
    functions, visible = passes(case, cell, q, k, v)
    flops = cell.head_dim * heads * cell.batch * visible
    with torch.no_grad():
        works, results, raised = tried(functions)
        errors = {by: error(o, case, q, k, v) for by, o in results.items() if by != "plain"}
        del results
        yield report(cell, "forward", 4 * flops, works, errors, raised, options)
    _, outputs, raised = tried(works)
    works, results, also_raised = tried(gradients(outputs, dout, tensors))
    right = [x.double() for x in results["flex"]] if "flex" in results else []
    errors = {by: max(map(distance, x, right)) for by, x in results.items() if by != "plain"} if right else {}
    del results, right
    yield report(cell, "backward", 10 * flops, works, errors, raised | also_raised, options)


def report(cell, direction, flops, functions, errors, raised, options):
    """Measures a pass, and prints its line."""
    ms = timing.in_turns(functions, options.rounds, options.slice_ms) if functions else {}
    text = "  ".join(f"{by} {1e3 * of:8.1f} us {flops / of / 1e9:4.0f} TFLOP/s" for by, of in ms.items())
    print(f"{cell!s:24} {direction:8}  {text}  ratio {ratio(ms):.3f}", flush=True)
    for by, exception in raised.items():
        print(f"    {by} raised {exception}", flush=True)
    print_wrong(errors, WRONG)
    setting = {"case": cell.case, "pass": direction, "seqlen": cell.seqlen, "head_dim": cell.head_dim}
    return setting | {"ms": ms, "errors": errors, "raised": raised}


def ratio(ms):
    """FlexAttention's time divided by ours; NaN if one is missing."""
    return ms.get("flex", float("nan")) / ms.get("ours", float("nan"))


def summarise(results):
    """Prints the mean ratio of each case and pass."""
    for case in CASES:
        for direction in ("forward", "backward"):
            measured = [x for x in results if (x["case"], x.get("pass")) == (case, direction)]
            ratios = [(ratio(x["ms"]), f"d {x['head_dim']} {x['seqlen']}") for x in measured]
            ratios = [pair for pair in ratios if pair[0] == pair[0]]
            if ratios:
                print(f"{case:16} {direction:8} to FlexAttention: {settings.mean_and_worst(ratios)}")


def main(words=None):
    """Measures the chosen cells. Returns the exit code."""
    options = parse(words)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("this benchmark needs a GPU of compute capability 9.0", file=sys.stderr)
        return 2
    settings.print_machine()
    results, began = [], time.monotonic()
    for cell in chosen(options):
        if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
            print(f"{cell!s:24} not measured: {options.minutes:g} minutes are over", flush=True)
            continue
        try:
            for result in measure(cell, options):
                results.append(result)
        except Exception as exception:
            text = f"{type(exception).__name__}: {' '.join(str(exception).split())[:300]}"
            print(f"{cell!s:24} raised {text}", flush=True)
            setting = {"case": cell.case, "seqlen": cell.seqlen, "head_dim": cell.head_dim}
            results.append(setting | {"raised": {"cell": text}})
        gc.collect()
        torch.cuda.empty_cache()
        settings.write_json(options.json, results)
    summarise(results)
    right = all(given < WRONG for result in results for given in result.get("errors", {}).values())
    return 0 if right and not any(result["raised"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
