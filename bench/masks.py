"""Masks of intervals compared with FlexAttention: one GPU, one process, in turns.

    python3 bench/masks.py
    python3 bench/masks.py --only documents --rounds 5
    python3 bench/masks.py --only images --head-dim 64 128 256 512 --pages 1 16 64

Q, K and V are (1, seqlen, heads, head_dim) in bf16. Ours is `fa3.flash_attn_func(..., intervals=)`. FlexAttention is
torch's, compiled, with the same mask as a function and as a `BlockMask`, which is made before the measurement. `flag`
is our own kernel for the mask, if we have one. Beside images, whose mask is nearly causal, `causal` is our kernel of
the causal mask. With `--pages` the forward pass also reads K and V from a cache with pages of that many rows, in a
random order, by `fa3.flash_attn_with_kvcache`; FlexAttention reads them without pages. TFLOP/s count visible scores
only: 4 * head_dim operations for each score in the forward pass, and 10 * head_dim in the backward pass. The ratio is
FlexAttention's time divided by ours.

Rows of O are compared with float64, gradients with FlexAttention's, and the exit code is 1 if one is wrong.
"""

import sys
from typing import NamedTuple

import torch

import settings
import timing
from judge import distance, print_wrong

# The largest relative error that a right result may have.
WRONG = 0.02


class Mask(NamedTuple):
    """A mask: its intervals, FlexAttention's function, the arguments of our own kernel, if any, and whether our kernel
    of the causal mask is measured beside.
    """

    intervals: torch.Tensor
    function: object
    flag: dict | None = None
    is_nearly_causal: bool = False


def documents(seqlen):
    """Documents of Zipf-like lengths, each with a causal mask."""
    from fa3 import masks

    lengths = (seqlen / torch.arange(1, 33).double()).long()
    ids = torch.arange(32).repeat_interleave(lengths)[torch.arange(seqlen) * lengths.sum() // seqlen].cuda()
    return Mask(masks.document(ids, causal=True), lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k))


def window_and_sink(seqlen, device="cuda"):
    """A causal window of 1,024 keys, together with the first 64 keys."""
    from fa3 import masks

    intervals = masks.sliding_window_with_sink(seqlen, seqlen, 1023, 0, 64, device=device)
    return Mask(intervals, lambda b, h, q, k: (q >= k) & ((q - k < 1024) | (k < 64)))


def prefix(seqlen):
    """A quarter of the rows see all of each other, and the mask is causal elsewhere."""
    from fa3 import masks

    first = seqlen // 4
    intervals = masks.prefix_lm(first, seqlen, seqlen, device="cuda")
    return Mask(intervals, lambda b, h, q, k: (q >= k) | (k < first))


def images(seqlen):
    """A causal mask, and images of 256 rows, one in each 1,024, which see themselves."""
    from fa3 import masks

    starts = torch.arange(512, seqlen, 1024, device="cuda")
    row = torch.arange(seqlen, device="cuda")
    image = torch.where(row % 1024 // 256 == 2, row // 1024, -1)
    return Mask(
        masks.with_spans(torch.stack((starts, starts + 256), -1)[None], seqlen, seqlen),
        lambda b, h, q, k: (q >= k) | (image[q] == image[k]) & (image[q] >= 0),
        is_nearly_causal=True,
    )


def causal(seqlen):
    """The causal mask, for which we have a flag."""
    from fa3 import masks

    return Mask(masks.causal(seqlen, seqlen, device="cuda"), lambda b, h, q, k: q >= k, {"causal": True})


def window(seqlen):
    """A window of 1,024 keys, for which we have a flag."""
    from fa3 import masks

    intervals = masks.sliding_window(seqlen, seqlen, 1023, 0, device="cuda")
    return Mask(intervals, lambda b, h, q, k: (q >= k) & (q - k < 1024), {"window_size": (1023, 0)})


MASKS = {
    "documents": documents,
    "window and sink": window_and_sink,
    "prefix": prefix,
    "images": images,
    "causal": causal,
    "window": window,
}


def parse(words=None):
    """The options of the command line."""
    parser = settings.parser_of(__doc__, rounds=5, slice_ms=20.0, has_fa3=False)
    parser.add_argument("--only", metavar="TEXT", help="only settings whose names contain it")
    parser.add_argument("--seqlen", type=settings.count, nargs="+", default=[8192, 16384], metavar="N")
    parser.add_argument("--head-dim", type=settings.count, nargs="+", default=[64, 128], metavar="N")
    parser.add_argument("--pages", type=settings.count, nargs="+", default=[], metavar="N", help="rows of a page")
    return parser.parse_args(words)


def passes(mask, q, k, v):
    """Forward passes by name, each of the same Q, K and V."""
    from fa3 import flash_attn_func
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    flex, seqlen = torch.compile(flex_attention, dynamic=False), q.shape[1]
    blocks = create_block_mask(mask.function, None, None, seqlen, seqlen, device="cuda")
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    functions = {
        "ours": lambda: flash_attn_func(q, k, v, intervals=mask.intervals),
        "flex": lambda: flex(*heads_first, block_mask=blocks, enable_gqa=True).transpose(1, 2),
    }
    if mask.flag:
        functions["flag"] = lambda: flash_attn_func(q, k, v, **mask.flag)
    if mask.is_nearly_causal:
        functions["causal"] = lambda: flash_attn_func(q, k, v, causal=True)
    return functions


def over_pages(functions, mask, rows, q, k, v):
    """The forward passes whose K and V are in pages of `rows` rows, and FlexAttention's."""
    from fa3 import flash_attn_with_kvcache

    pages = torch.randperm(q.shape[1] // rows, device=q.device)
    k, v = (torch.empty_like(x).index_copy_(0, pages, x) for x in (x[0].unflatten(0, (-1, rows)) for x in (k, v)))
    given = dict(cache_seqlens=q.shape[1], page_table=pages.to(torch.int32)[None])
    ours = {"ours": dict(intervals=mask.intervals), "flag": mask.flag, "causal": dict(causal=True)}
    return {
        by: functions[by] if by == "flex" else lambda more=ours[by]: flash_attn_with_kvcache(q, k, v, **given, **more)
        for by in functions
    }


def gradients(functions, dout, tensors):
    """Backward passes by name. The graphs of their forward passes are kept."""
    outputs = {by: function() for by, function in functions.items()}
    return {
        by: lambda o=o: torch.autograd.grad(o, tensors, dout, retain_graph=True) for by, o in outputs.items()
    }


def error(o, mask, q, k, v):
    """The relative error of the last 128 rows of the last head of O."""
    from fa3 import masks

    seqlen = q.shape[1]
    sees = masks.to_dense(mask.intervals[:, :, seqlen - 128 :], seqlen)[0, 0]
    rows, keys, values = (x.double() for x in (q[0, -128:, -1], k[0, :, -1], v[0, :, -1]))
    scores = (rows @ keys.T * q.shape[3] ** -0.5).masked_fill(~sees, -torch.inf)
    return distance(o[0, -128:, -1], scores.softmax(-1) @ values)


def visible(intervals):
    """The number of visible scores of a head."""
    starts, ends = intervals[..., 0::2], intervals[..., 1::2]
    return int((ends - starts).clamp(min=0).sum())


def measure(name, mask, seqlen, head_dim, options):
    """Measures both passes under a mask. Yields results, and prints a line for each."""
    heads, heads_kv = 2048 // head_dim, 512 // head_dim
    q, k, v, dout = (
        torch.randn(1, seqlen, of, head_dim, dtype=torch.bfloat16, device="cuda")
        for of in (heads, heads_kv, heads_kv, heads)
    )
    tensors = [x.requires_grad_() for x in (q, k, v)]
    functions = passes(mask, q, k, v)
    try:
        functions["flex"]()
    except Exception as exception:
        print(f"flex: {type(exception).__name__}: {' '.join(str(exception).split())[:200]}", flush=True)
        del functions["flex"]
    with torch.no_grad():
        for rows in (None, *options.pages):
            each = functions if rows is None else over_pages(functions, mask, rows, q, k, v)
            results = {by: function() for by, function in each.items()}
            errors = {by: error(o, mask, q, k, v) for by, o in results.items() if by != "causal"}
            of = "forward" if rows is None else f"pages {rows}"
            yield report(name, of, 4, each, errors, (seqlen, heads, head_dim, mask), options)
    if head_dim > 256 or "flex" not in functions:
        return
    functions = gradients(functions, dout, tensors)
    right = [x.double() for x in functions["flex"]()]
    results = {by: function() for by, function in functions.items()}
    errors = {by: max(map(distance, x, right)) for by, x in results.items() if by != "causal"}
    yield report(name, "backward", 10, functions, errors, (seqlen, heads, head_dim, mask), options)


def report(name, direction, products, functions, errors, shape, options):
    """Measures a pass, and prints its line."""
    seqlen, heads, head_dim, mask = shape
    flops = products * head_dim * heads * visible(mask.intervals)
    ms = timing.in_turns(functions, options.rounds, options.slice_ms)
    text = "  ".join(f"{by} {1e3 * of:8.1f} us {flops / of / 1e9:4.0f} TFLOP/s" for by, of in ms.items())
    setting = {"mask": name, "pass": direction, "seqlen": seqlen, "head_dim": head_dim}
    to_flex = f"  ratio {ratio(ms):.3f}" if "flex" in ms else ""
    to_causal = f"  of causal {ms['causal'] / ms['ours']:.3f}" if "causal" in ms else ""
    print(f"{name:16} {direction:8} {seqlen:6} d {head_dim:3}  {text}{to_flex}{to_causal}", flush=True)
    print_wrong(errors, WRONG)
    return setting | {"ms": ms, "errors": errors}


def ratio(ms):
    """FlexAttention's time divided by ours."""
    return ms["flex"] / ms["ours"]


def main():
    """Measures all masks. Returns the exit code."""
    options = parse()
    settings.print_machine()
    results = []
    for name, draw in MASKS.items():
        for seqlen in options.seqlen:
            for head_dim in options.head_dim:
                if (options.only or "") in name:
                    torch.manual_seed(0)
                    torch.compiler.reset()
                    results += measure(name, draw(seqlen), seqlen, head_dim, options)
    for direction in dict.fromkeys(result["pass"] for result in results):
        ratios = [
            (ratio(result["ms"]), f"{result['mask']}  {result['seqlen']}  d {result['head_dim']}")
            for result in results
            if result["pass"] == direction and "flex" in result["ms"]
        ]
        if ratios:
            print(f"{direction}, to FlexAttention: {settings.mean_and_worst(ratios)}")
    settings.write_json(options.json, results)
    return 0 if all(given < WRONG for result in results for given in result["errors"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
