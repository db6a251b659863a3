"""Torch's own attention before and after `fa3.activate()`, in a small GPT: one GPU, one process, in turns.

    python3 bench/activation.py
    python3 bench/activation.py --only varlen --work train --compile no
    python3 bench/activation.py --head-dim 64 --compile model

A training step is a forward pass, a backward pass and a fused AdamW step; prefill is a forward pass under
`torch.inference_mode()` that gives the logits of the last token. All is in bf16, with random weights.

`before` is plain torch, whose `scaled_dot_product_attention` may choose cuDNN. `after` is torch under `fa3.activate()`.
Activation does not touch FlexAttention: there `after` is `fa3.flash_attn_func` with intervals of the same mask. SDPA's
training step has sequences of --context tokens. The other settings have one row of --tokens, either in documents of
Zipf-like lengths, or under a window of 1,024 keys together with the first 64 keys.

--compile says what torch.compile compiles: nothing (FlexAttention itself is compiled in any case), each block (all
share one graph), or the whole model, which takes minutes more. The ratio is the time before divided by the time after.
Attention's time is the time of calls with one block's shape, times the number of blocks. In a training step the calls
include gradients.

O, the gradients, the losses of the first steps and the logits are compared with the results before, and the exit code
is 1 if one is wrong.
"""

import contextlib
import functools
import sys
from typing import NamedTuple

import torch
from torch.nn import functional

import gpt
import judge
import masks
import settings
import timing
import train_gpt

DEVICE, BACKEND = "cuda", "inductor"

# AdamW's learning rate, and the number of steps or passes whose results are compared.
RATE, COMPARED = 1e-4, 3

# The largest relative errors that right results may have: of attention, of the losses of training steps, of logits.
WRONG = {"attention": 0.02, "train": 0.005, "prefill": 0.05}

DOCUMENTS = 32


class Pair(NamedTuple):
    """Attention before and after the activation: two functions of Q, K and V (batch, seqlen, heads, head_dim)."""

    before: object
    after: object
    is_activated: bool

    @property
    def contexts(self):
        """The context managers in which functions run, by function, for `timing.in_turns`."""
        import fa3

        return {"after": fa3.activate} if self.is_activated else {}

    def within(self, by):
        """The context in which the function `by` runs."""
        return self.contexts.get(by, contextlib.nullcontext)()


class Cell(NamedTuple):
    """One setting."""

    work: str
    kind: str
    batch: int
    seqlen: int
    head_dim: int

    def __str__(self):
        return f"{self.work:7}  {self.kind:20}  {self.batch} x {self.seqlen:<5}  d {self.head_dim:<3}"


def sdpa(tokens):
    """Causal attention of dense batches."""
    return Pair(train_gpt.sdpa, sdpa_after, True)


def sdpa_after(q, k, v):
    """The same call as `train_gpt.sdpa`, in a second function. torch.compile chooses between cuDNN and flash attention
    when it traces, and would otherwise reuse the graph from before the activation.
    """
    return train_gpt.sdpa(q, k, v)


def document_ends(tokens):
    """Makes cu_seqlens of documents, and the longest length. Lengths follow Zipf's law, in a random order."""
    shares = 1 / torch.arange(1, DOCUMENTS + 1).double()
    shares = shares[torch.randperm(DOCUMENTS, generator=torch.Generator().manual_seed(0))]
    ends = functional.pad((shares.cumsum(0) / shares.sum() * tokens).round(), (1, 0)).int()
    return ends.to(DEVICE), int(ends.diff().max())


def varlen(tokens):
    """Causal attention of packed documents."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = document_ends(tokens)

    def attend(q, k, v):
        return varlen_attn(q[0], k[0], v[0], ends, ends, longest, longest, window_size=(-1, 0))[None]

    return Pair(attend, attend, True)


def flex(mask, tokens):
    """FlexAttention, and our attention with the same mask as intervals."""
    from fa3 import flash_attn_func
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(mask.function, None, None, tokens, tokens, device=DEVICE)
    compiled = torch.compile(flex_attention, dynamic=False, backend=BACKEND)

    def before(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=blocks).transpose(1, 2)

    def after(q, k, v):
        return flash_attn_func(q, k, v, intervals=mask.intervals)

    return Pair(before, after, False)


def flex_documents(tokens):
    """The documents of `varlen`, each with a causal mask."""
    from fa3 import masks as of_intervals

    ends, _ = document_ends(tokens)
    ids = torch.searchsorted(ends, torch.arange(tokens, device=DEVICE), right=True)
    intervals = of_intervals.document_from_cu_seqlens(ends, tokens, causal=True)
    return flex(masks.Mask(intervals, lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)), tokens)


def flex_window_and_sink(tokens):
    """A causal window together with the first keys."""
    return flex(masks.window_and_sink(tokens, DEVICE), tokens)


KINDS = {
    "sdpa": sdpa,
    "varlen_attn": varlen,
    "flex documents": flex_documents,
    "flex window and sink": flex_window_and_sink,
}


def parse(words=None):
    """The options of the command line."""
    parser = settings.parser_of(__doc__, rounds=3, slice_ms=100.0, has_fa3=False)
    works, compiles = ["train", "prefill"], ["no", "blocks", "model"]
    parser.add_argument("--work", choices=works, nargs="+", default=works, help="default: both")
    parser.add_argument("--only", metavar="TEXT", default="", help="only attention whose name contains it")
    parser.add_argument("--compile", choices=compiles, nargs="+", default=compiles[:2], help="default: no blocks")
    parser.add_argument("--tokens", type=settings.count, default=16384, metavar="N", help="of a training step")
    parser.add_argument("--context", type=settings.count, nargs="+", default=[4096, 16384], metavar="N")
    parser.add_argument("--prefill", type=settings.count, nargs="+", default=[8192, 32768], metavar="N")
    parser.add_argument("--head-dim", type=settings.count, nargs="+", default=[128], metavar="N")
    parser.add_argument("--width", type=settings.count, default=1536, metavar="N", help="default: 1536")
    parser.add_argument("--blocks", type=settings.count, default=12, metavar="N", help="default: 12")
    options = parser.parse_args(words)
    for whole, parts, what in (
        (options.width, options.head_dim, "heads of"),
        (options.tokens, options.context, "sequences of"),
    ):
        for part in parts:
            if whole % part:
                parser.error(f"{whole} is no whole number of {what} {part}")
    if max(options.tokens, *options.prefill) >= train_gpt.LEAST_BYTES:
        parser.error(f"expected fewer than {train_gpt.LEAST_BYTES} tokens")
    return options


def cells(options):
    """The settings that the options choose."""
    for head_dim in options.head_dim:
        for work in options.work:
            for kind in KINDS:
                if options.only not in kind:
                    continue
                seqlens = options.prefill if work == "prefill" else [options.tokens]
                if (work, kind) == ("train", "sdpa"):
                    seqlens = options.context
                for seqlen in seqlens:
                    batch = options.tokens // seqlen if work == "train" else 1
                    yield Cell(work, kind, batch, seqlen, head_dim)


def model(cell, attention, how, options):
    """A model that is compiled as `--compile` says. All models of a cell begin with the same weights."""
    torch.manual_seed(0)
    sizes = gpt.Sizes(options.blocks, options.width // cell.head_dim, cell.head_dim, cell.seqlen)
    with torch.device(DEVICE):
        made = gpt.Gpt(sizes, attention).bfloat16()
    for module in {"no": [], "blocks": made.blocks, "model": [made]}[how]:
        module.compile(fullgraph=True, dynamic=False, backend=BACKEND)
    return made


def train(made, inputs, targets):
    """A function that does a training step, and returns its loss."""
    optimizer = torch.optim.AdamW(made.parameters(), RATE, fused=True)

    def step():
        loss = functional.cross_entropy(made(inputs).flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def prefill(made, inputs, targets):
    """A function that returns the logits of the last token."""

    @torch.inference_mode()
    def run():
        return made(inputs, only_last=True).float()

    return run


WORKS = {"train": train, "prefill": prefill}


def works(cell, pair, how, options):
    """The timed functions, before and after."""
    text = train_gpt.corpus()[: cell.batch * cell.seqlen + 1].to(DEVICE)
    given = [x.view(cell.batch, cell.seqlen) for x in (text[:-1], text[1:])]
    attentions = {"before": pair.before, "after": pair.after}
    return {by: WORKS[cell.work](model(cell, of, how, options), *given) for by, of in attentions.items()}


def work_error(functions, pair):
    """The relative difference between the first results after and before the activation."""
    results = {}
    for by, function in functions.items():
        with pair.within(by):
            results[by] = torch.stack([function() for _ in range(COMPARED)])
    return judge.distance(results["after"], results["before"].double())


def calls(cell, pair, options):
    """Attention's calls alone, with Q, K and V strided as in the model: each returns O, and in training the gradients.
    """
    torch.manual_seed(0)
    shape = cell.batch, cell.seqlen, options.width // cell.head_dim, cell.head_dim
    is_training = cell.work == "train"
    # Tensors must be inference tensors as in the model, or FlexAttention would be compiled again.
    with torch.inference_mode(not is_training):
        qkv = torch.randn(*shape[:2], 3, *shape[2:], dtype=torch.bfloat16, device=DEVICE)
        dout = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
        tensors = [x.detach().requires_grad_(is_training) for x in qkv.unbind(2)]

    def call(attend):
        with torch.inference_mode(not is_training):
            out = attend(*tensors)
            return (out, *torch.autograd.grad(out, tensors, dout)) if is_training else (out,)

    return {by: functools.partial(call, attend) for by, attend in (("before", pair.before), ("after", pair.after))}


def call_error(functions, pair):
    """The largest relative difference between O and gradients after and before the activation."""
    results = {}
    for by, function in functions.items():
        with pair.within(by):
            results[by] = function()
    return judge.largest(judge.distance(x, right.double()) for x, right in zip(results["after"], results["before"]))


def measure(cell, options):
    """Measures a cell. Yields a result for each way to compile, and prints its line."""
    torch.compiler.reset()
    pair = KINDS[cell.kind](cell.seqlen)
    functions = calls(cell, pair, options)
    errors = {"attention": call_error(functions, pair)}
    attention = timing.in_turns(functions, options.rounds, options.slice_ms, pair.contexts)
    attention = {by: options.blocks * ms for by, ms in attention.items()}
    for how in options.compile:
        functions = works(cell, pair, how, options)
        errors[cell.work] = work_error(functions, pair)
        ms = timing.in_turns(functions, options.rounds, options.slice_ms, pair.contexts)
        yield report(cell, pair, how, ms, attention, dict(errors))


def report(cell, pair, how, ms, attention, errors):
    """Prints a line."""
    after = "activate()" if pair.is_activated else "intervals"
    share = 100 * attention["before"] / ms["before"]
    print(
        f"{cell}  {how:6}  before {ms['before']:8.2f} ms  {after:10} {ms['after']:8.2f} ms  ratio {ratio(ms):.3f}  "
        f"attention {attention['before']:8.2f}  {attention['after']:8.2f} ms  ratio {ratio(attention):.3f}, "
        f"{share:3.0f} % of before",
        flush=True,
    )
    result = {**cell._asdict(), "compile": how, "after": after, "ms": ms, "attention_ms": attention, "errors": errors}
    for what, error in wrong(result).items():
        print(f"WRONG: {what} after differs from before by {error:.3g}", flush=True)
    return result


def ratio(ms):
    """The time before divided by the time after."""
    return ms["before"] / ms["after"]


def wrong(result):
    """The errors that are too large, or NaN."""
    return {what: error for what, error in result["errors"].items() if not error < WRONG[what]}


def summarise(results):
    """Prints the mean ratios, by the kind of work."""
    for work in WORKS:
        for after in ("activate()", "intervals"):
            ratios = [
                (ratio(x["ms"]), f"{x['kind']}  {x['batch']} x {x['seqlen']}  d {x['head_dim']}  {x['compile']}")
                for x in results
                if (x["work"], x["after"]) == (work, after)
            ]
            if ratios:
                print(f"{work}, {after}: {settings.mean_and_worst(ratios)}")


def main(words=None):
    """Measures all cells. Returns the exit code."""
    options = parse(words)
    settings.print_machine()
    results = [result for cell in cells(options) for result in measure(cell, options)]
    summarise(results)
    settings.write_json(options.json, results)
    return 1 if any(map(wrong, results)) else 0


if __name__ == "__main__":
    sys.exit(main())
