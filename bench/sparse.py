"""Sparse latent attention (lists of keys), compared with FlashMLA: one GPU, one process, in turns.

    python3 bench/sparse.py --flashmla path/to/flashmla_C.so
    python3 bench/sparse.py --flashmla path/to/flashmla_C.so --rows 656

Each token has a list of 2048 random rows of a cache. A row has 512 latent columns and 64 rotated columns. Ours are
`fa3.flash_mla`'s functions, over rows of 16 bits, or in decoding over FlashMLA's rows of 656 bytes. FlashMLA decodes
over its rows of 656 bytes, which have half as many bytes, with its scheduler metadata made before, and gets heads of
zeros up to its least number, 64. A CUDA graph of decoding has a call for each of two caches.

TFLOP/s count 2 · (576 + 512) operations for each query head and listed key. The ratio is FlashMLA's time divided by
ours. O is compared with float64 on two tokens, and the exit code is 1 if one is wrong.
"""

import dataclasses
import math
import sys

import torch

import decode
import judge
import settings
from latent import LATENT, ROTARY

COLUMNS, TOPK = LATENT + ROTARY, 2048

# FlashMLA's rows: codes of e4m3, a float32 scale for each 128 codes, and columns of bfloat16.
SCALES, ROW_BYTES = 4, 656

# FlashMLA's least number of heads.
LEAST_HEADS = 64

SCALE = COLUMNS**-0.5


@dataclasses.dataclass(frozen=True)
class Setting:
    """The tokens of a call, and the rows of its cache."""

    name: str
    batch: int
    new: int
    heads: int
    rows: int


DECODING = [
    Setting(f"{heads} heads, batch {batch}" + (f", {new} new" if new > 1 else ""), batch, new, heads, 131072)
    for batch, new, heads in (
        (1, 1, 16), (8, 1, 16), (8, 1, 64), (8, 1, 128), (64, 1, 16), (64, 1, 128), (128, 2, 128)
    )
]  # fmt: skip

PREFILL = [
    Setting(f"{heads} heads, {tokens} tokens, {rows // 1024}k rows", 1, tokens, heads, rows)
    for tokens, rows, heads in ((4096, 32768, 128), (4096, 32768, 64), (1024, 8192, 16))
]


class Inputs:
    """Queries, lists and caches of a setting."""

    def __init__(self, setting, copies, bytes_of_ours):
        self.setting, self.copies, self.bytes_of_ours = setting, copies, bytes_of_ours
        tokens = setting.batch, setting.new
        self.q = torch.randn(*tokens, setting.heads, COLUMNS, dtype=decode.DTYPE, device=decode.DEVICE)
        lists = [torch.randperm(setting.rows, device=decode.DEVICE)[:TOPK] for _ in range(math.prod(tokens))]
        self.indices = torch.stack(lists).int().view(*tokens, TOPK)
        shape = setting.rows // 64, 64, 1, COLUMNS
        self.wide = [torch.randn(shape, dtype=decode.DTYPE, device=decode.DEVICE) for _ in range(copies)]
        self.narrow = [in_656_bytes(x) for x in self.wide]
        if bytes_of_ours == ROW_BYTES:
            self.wide = [from_656_bytes(x) for x in self.narrow]

    def padded_q(self):
        """Q with heads of zeros up to FlashMLA's least number."""
        return torch.nn.functional.pad(self.q, (0, 0, 0, max(0, LEAST_HEADS - self.setting.heads)))

    def error(self, o, rows):
        """The largest relative error of the first and the last token's O over rows (pages, 64, 1, columns)."""
        found, rows = [], rows.flatten(0, 2)
        o, q, lists = (x.flatten(0, 1) for x in (o, self.q, self.indices))
        for token in (0, -1):
            keys = rows[lists[token].long()].double()
            weights = (q[token].double() @ keys.T * SCALE).softmax(-1)
            found.append(judge.distance(o[token], weights @ keys[:, :LATENT]))
        return judge.largest(found)


def in_656_bytes(rows):
    """FlashMLA's rows of these rows: codes times the scale of their 128 columns."""
    groups = rows[..., :LATENT].float().unflatten(-1, (SCALES, -1))
    scales = groups.abs().amax(-1, keepdim=True) / 448
    codes = (groups / scales).to(decode.E4M3).flatten(-2).view(torch.uint8)
    parts = codes, scales.squeeze(-1).view(torch.uint8), rows[..., LATENT:].contiguous().view(torch.uint8)
    return torch.cat(parts, -1)


def from_656_bytes(rows):
    """The rows of bfloat16 that FlashMLA's rows say."""
    codes, scales, rotated = (x.contiguous() for x in rows.split((LATENT, 4 * SCALES, 2 * ROTARY), -1))
    codes = codes.view(decode.E4M3).float().unflatten(-1, (SCALES, -1))
    latent = codes * scales.view(torch.float32).unsqueeze(-1)
    return torch.cat((latent.flatten(-2).to(decode.DTYPE), rotated.view(decode.DTYPE)), -1)


def decoding(inputs, flashmla):
    """For each implementation, by name, a function of a cache's number that gives O, and the rows that it reads."""
    from fa3.flash_mla import flash_mla_with_kvcache

    fp8 = inputs.bytes_of_ours == ROW_BYTES

    def ours(number):
        cache = (inputs.narrow if fp8 else inputs.wide)[number]
        more = dict(softmax_scale=SCALE, is_fp8_kvcache=fp8, indices=inputs.indices)
        return flash_mla_with_kvcache(inputs.q, cache, None, None, LATENT, **more)[0]

    bound = {"ours": (ours, inputs.wide[0])}
    if flashmla:
        q, heads = inputs.padded_q(), inputs.setting.heads

        def call(number, *metadata):
            cache = inputs.narrow[number].view(decode.E4M3)
            more = None, None, *metadata, None, None, None, LATENT, SCALE, None
            return torch.ops._flashmla_C.sparse_decode_fwd(q, cache, inputs.indices, *more)

        metadata = call(0, None, None)[2:4]
        bound["flashmla"] = (lambda number: call(number, *metadata)[0][:, :, :heads], from_656_bytes(inputs.narrow[0]))
    return bound


def prefill(inputs, flashmla):
    """As `decoding`, of a prompt."""
    from fa3.flash_mla import flash_mla_sparse_fwd

    setting, kv = inputs.setting, inputs.wide[0].flatten(0, 1)
    indices, shape = inputs.indices.view(-1, 1, TOPK), (1, setting.new, setting.heads, LATENT)
    bound = {"ours": (lambda _: flash_mla_sparse_fwd(inputs.q[0], kv, indices, SCALE)[0].view(shape), inputs.wide[0])}
    if flashmla:
        q = inputs.padded_q()[0]

        def theirs(_):
            more = SCALE, LATENT, None, None, None
            return torch.ops._flashmla_C.sparse_prefill_fwd(q, kv, indices, *more)[0][None, :, : setting.heads]

        bound["flashmla"] = (theirs, inputs.wide[0])
    return bound


def parse(words=None):
    """The options of the command line."""
    parser = settings.parser_of(__doc__, rounds=7, slice_ms=25.0, has_fa3=False)
    parser.add_argument("--flashmla", metavar="FLASHMLA_C.SO", help="FlashMLA's compiled extension")
    parser.add_argument("--rows", type=int, choices=[2 * COLUMNS, ROW_BYTES], default=2 * COLUMNS, help="bytes of ours")
    parser.add_argument("--only", metavar="TEXT", help="only settings whose names contain it")
    return parser.parse_args(words)


def main():
    """Measures all settings. Returns the exit code."""
    options = parse()
    settings.print_machine()
    if options.flashmla:
        torch.ops.load_library(options.flashmla)
    results, ratios, right = [], [], True
    for table, rows, bind in (("decode", DECODING, decoding), ("prefill", PREFILL, prefill)):
        if table == "prefill" and options.rows == ROW_BYTES:
            print("skipped: prefill: FlashMLA's function has rows of 16 bits alone")
            continue
        for setting in (row for row in rows if (options.only or "") in row.name):
            torch.manual_seed(0)
            inputs = Inputs(setting, 2 if table == "decode" else 1, options.rows)
            bound = bind(inputs, options.flashmla)
            errors = {name: inputs.error(call(0), keys) for name, (call, keys) in bound.items()}
            calls = {name: call for name, (call, _) in bound.items()}
            ms = decode.milliseconds(calls, inputs.copies, options)
            flops = 2 * (COLUMNS + LATENT) * setting.heads * TOPK * setting.batch * setting.new
            text = "  ".join(
                f"{name} {1e3 * one:8.1f} us {flops / one / 1e9:5.0f} TFLOP/s" for name, one in ms.items()
            )
            cell = f"{table:8}{setting.name:34}"
            if options.flashmla:
                ratios.append((ms["flashmla"] / ms["ours"], cell))
                text += f"  ratio {ratios[-1][0]:.3f}"
            print(f"{cell}{text}", flush=True)
            right = judge.print_wrong(errors, decode.WRONG) and right
            row = dataclasses.asdict(setting) | {"table": table, "row_bytes": options.rows}
            results.append(row | {"ms": ms, "errors": errors})
            # Memory is freed before other inputs are drawn.
            del inputs, bound, calls
    if ratios:
        print(f"to flashmla: {settings.mean_and_worst(ratios)}, {len(ratios)} cells")
    settings.write_json(options.json, results)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
