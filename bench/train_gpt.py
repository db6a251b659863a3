"""Trains a small GPT three times, to compare training with our gradients and with PyTorch's.

    python3 bench/train_gpt.py
    python3 bench/train_gpt.py --steps 300 --json losses.json --svg losses.svg

The three runs start from the same weights and see the same batches of the text in docs, byte by byte. They differ in
attention: ours (the installed Python package fa3) and PyTorch's, both with autocast to bfloat16, and PyTorch's without
a fused kernel, all in float32.

Losses of single batches are noisy, so means over the last 20 steps are compared. The exit code is 1 if our mean is, at
any step, further from float32's than 0.02 plus twice the largest distance of PyTorch's in bfloat16.
"""

import argparse
import contextlib
import math
import pathlib
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpt
import judge
import settings
import svg

DOCS = pathlib.Path(__file__).parent.parent / "docs"
LEAST_BYTES = 100_000

# The number of sequences of a batch, and the number of tokens of a sequence.
BATCH, CONTEXT = 16, 512

# The model has 5 million parameters.
SIZES = gpt.Sizes(blocks=6, heads=4, head_dim=64, context=CONTEXT)

# AdamW's options. The learning rate rises linearly, and then falls to a tenth like a cosine.
RATE, WARM_UP, BETAS, DECAY = 1e-3, 30, (0.9, 0.95), 0.1
LARGEST_NORM = 1.0

# The number of steps of a mean, and the number of steps between two printed lines.
SMOOTHED, PRINTED = 20, 25

# Ours may differ from float32 by ALLOWED plus TIMES the difference of PyTorch's.
ALLOWED, TIMES = 0.02, 2


def ours(q, k, v):
    """Causal attention of (batch, seqlen, heads, head_dim)."""
    # Imported here, so that this module can be imported where fa3 is not installed.
    from fa3 import flash_attn_func

    return flash_attn_func(q, k, v, causal=True)


def sdpa(q, k, v):
    """Causal attention by PyTorch, with the kernel that it chooses."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def definition(q, k, v):
    """Causal attention by PyTorch without a fused kernel: it makes the matrices of scores."""
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v)


# By run: the attention function, and whether the run uses autocast.
RUNS = {"ours": (ours, True), "sdpa": (sdpa, True), "f32": (definition, False)}
COLOURS = {"f32": ("#999999", 7), "sdpa": ("#e69f00", 3.5), "ours": ("#1f83c4", 1.2)}


def corpus():
    """The bytes of the documentation."""
    text = b"\n".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))
    if len(text) < LEAST_BYTES:
        raise SystemExit(f"{DOCS} has {len(text)} bytes of text, expected at least {LEAST_BYTES}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(text, steps, seed):
    """Yields the inputs and targets of each step, (BATCH, CONTEXT). Only `seed` chooses them."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT, (steps, BATCH, 1), generator=generator)
    for start in starts.to(text.device):
        chunk = text[start + torch.arange(CONTEXT + 1, device=text.device)]
        yield chunk[:, :-1], chunk[:, 1:]


def rate(step, steps):
    """The learning rate of a step."""
    fallen = RATE * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    return fallen * min(1, (step + 1) / WARM_UP)


def train(attention, autocast, text, steps, seed):
    """Trains a model, and returns the loss of every step."""
    torch.manual_seed(seed)
    model = gpt.Gpt(SIZES, attention).to(text.device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, BETAS, weight_decay=DECAY)
    losses = []
    for step, (inputs, targets) in enumerate(batches(text, steps, seed)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        low = torch.autocast(text.device.type, torch.bfloat16) if autocast else contextlib.nullcontext()
        with low:
            loss = functional.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def smoothed(losses):
    """At each step, the mean loss of the last SMOOTHED steps."""
    windows = (losses[max(0, end - SMOOTHED) : end] for end in range(1, len(losses) + 1))
    return [sum(window) / len(window) for window in windows]


def largest_difference(one, other):
    """The largest difference of two curves at any step; NaN if a curve has NaN."""
    return judge.largest(abs(x - y) for x, y in zip(one, other))


def trains_alike(curves):
    """Whether ours is at every step about as near to float32 as PyTorch's is. `curves` are smoothed losses by name."""
    allowed = ALLOWED + TIMES * largest_difference(curves["sdpa"], curves["f32"])
    apart = largest_difference(curves["ours"], curves["f32"])
    alike = apart <= allowed
    verdict = "alike" if alike else "WRONG"
    print(f"{verdict}: ours and f32 differ by at most {apart:.4f}, allowed are {allowed:.4f}")
    return alike


def chart(curves):
    """The curves as the text of an SVG file. The widest is drawn first, so that those upon it leave it visible."""
    series = [svg.Series(name, color, curves[name], width) for name, (color, width) in COLOURS.items()]
    steps = max(map(len, curves.values()))
    labels = {step: str(step + 1) for step in {0, steps // 2, steps - 1}}
    return svg.curves(svg.Panel("by step", "loss", labels, series))


def parse(words=None):
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=settings.count, default=300, metavar="N", help="default: 300")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="writes every loss")
    parser.add_argument("--svg", type=pathlib.Path, metavar="FILE", help="draws the smoothed losses")
    return parser.parse_args(words)


def main():
    """Trains the three models, and compares them. Returns the exit code."""
    options = parse()
    settings.print_machine()
    text = corpus().cuda()
    losses = {}
    for name, (attention, autocast) in RUNS.items():
        began = time.monotonic()
        losses[name] = train(attention, autocast, text, options.steps, options.seed)
        print(f"{name:4}  {time.monotonic() - began:5.1f} s", flush=True)
    print("\nstep  " + "  ".join(f"{name:>7}" for name in losses))
    for step in sorted({1, *range(PRINTED, options.steps + 1, PRINTED), options.steps}):
        print(f"{step:4}  " + "  ".join(f"{curve[step - 1]:7.4f}" for curve in losses.values()))
    curves = {name: smoothed(curve) for name, curve in losses.items()}
    print()
    for one, other in (("ours", "sdpa"), ("sdpa", "f32"), ("ours", "f32")):
        apart = largest_difference(curves[one], curves[other])
        print(f"largest difference of the smoothed losses, {one} and {other}: {apart:.4f}")
    alike = trains_alike(curves)
    settings.write_json(options.json, [{"name": name, "loss": curve} for name, curve in losses.items()])
    if options.svg is not None:
        options.svg.write_text(chart(curves))
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
