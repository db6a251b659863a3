"""Latent attention and head_dim 512 beside FlashAttention-3 and FlashMLA: one GPU, one process, in turns.

    python3 bench/latent.py --fa3 path/to/fa3_C.so
    python3 bench/latent.py --fa3 path/to/fa3_C.so --page 1 --only "128 heads"
    python3 bench/latent.py --flashmla path/to/flashmla_C.so --only heads

Decoding is as in DeepSeek's models, with one new token. For each key, all heads share a latent vector of 512 columns
and 64 rotated columns, which are a row of one paged cache. Ours is `fa3.flash_mla.flash_mla_with_kvcache`;
FlashAttention-3's C++ gets views of the same cache, as `qv`, where --fa3 gives its compiled extension. FlashMLA's gets
the cache itself and its scheduler metadata made before, where --flashmla gives its extension and pages have 64 rows. A
CUDA graph has a call for each of several caches, which together are larger than L2. TFLOP/s count 2 · (576 + 512)
operations for each query head and key, and TB/s count the cache's rows in use, read once. Prefill is causal, with
head_dim 512, and its TFLOP/s count visible scores. FlashAttention-3 lacks this head_dim, so torch's own attention is
measured.

The ratio is the other implementation's time divided by ours. O is compared with float64 on two heads of the first and
of the last sequence, and the exit code is 1 if one is wrong.
"""

import functools
import math
import sys

import torch

import decode
import judge
import settings

# The number of latent columns, and of rotated columns.
LATENT, ROTARY = 512, 64

# Settings of decoding by name: (query heads, the number of keys of each sequence).
DECODING = {
    f"{heads} heads, batch {batch}, {keys}k": (heads, (keys * 1024,) * batch)
    for heads, batches in ((128, (128,)), (16, (1, 16, 128)))
    for batch in batches
    for keys in ((1, 4, 8) if batch == 128 else (4,))
} | {"16 heads, 32k, 16 x 1k, 15 x 64": (16, (32768, *[1024] * 16, *[64] * 15))}

# Settings of prefill by name: (batch, tokens, query heads, heads of keys and values).
PREFILL = {
    "head_dim 512, 1 x 8k, 16/16": (1, 8192, 16, 16),
    "head_dim 512, 1 x 8k, 32/4": (1, 8192, 32, 4),
    "head_dim 512, 4 x 2k, 16/16": (4, 2048, 16, 16),
}


def parse(words=None):
    """The options of the command line."""
    parser = settings.parser_of(__doc__, rounds=7, slice_ms=25.0)
    parser.add_argument("--flashmla", metavar="FLASHMLA_C.SO", help="FlashMLA's compiled extension")
    parser.add_argument("--page", type=settings.count, nargs="+", default=[64], metavar="ROWS", help="default: 64")
    parser.add_argument("--only", metavar="TEXT", help="only settings whose names contain it")
    return parser.parse_args(words)


def rates(heads, lengths, ms):
    """TFLOP/s and TB/s of decoding."""
    keys = sum(lengths)
    return 2 * (2 * LATENT + ROTARY) * heads * keys / ms / 1e9, 2 * (LATENT + ROTARY) * keys / ms / 1e9


class Decoding:
    """Caches of latent vectors, and the queries of a step."""

    def __init__(self, heads, lengths, page):
        self.lengths = lengths
        columns = LATENT + ROTARY
        pages = [-(-length // page) for length in lengths]
        self.count = max(2, math.ceil(decode.ROTATED / (2 * columns * sum(lengths))))
        self.cache = self._normal(self.count * sum(pages), page, 1, columns)
        self.q = self._normal(len(lengths), 1, heads, columns)
        self.seqused = torch.tensor(lengths, dtype=torch.int32, device=decode.DEVICE)
        self.tables = decode.page_tables(self.count, pages)
        self.scale = columns**-0.5

    @staticmethod
    def _normal(*shape):
        return torch.randn(shape, dtype=decode.DTYPE, device=decode.DEVICE)

    def ours(self, number):
        """O of a batch by our kernels."""
        from fa3.flash_mla import flash_mla_with_kvcache

        return flash_mla_with_kvcache(self.q, self.cache, self.tables[number], self.seqused, LATENT, causal=True)[0]

    def fa3(self, number):
        """O of a batch by FlashAttention-3."""
        (qv, q), (v, k) = (x.tensor_split((LATENT,), dim=3) for x in (self.q, self.cache))
        lists = dict(seqused_k=self.seqused, page_table=self.tables[number])
        return torch.ops.flash_attn_3.fwd(q, k, v, q_v=qv, **lists, softmax_scale=self.scale, is_causal=True)[0]

    @functools.cached_property
    def flashmla_metadata(self):
        """FlashMLA's tiles and splits, which depend on lengths alone."""
        return self._flashmla(0, None, None)[2:4]

    def flashmla(self, number):
        """O of a batch by FlashMLA."""
        return self._flashmla(number, *self.flashmla_metadata)[0]

    def _flashmla(self, number, *metadata):
        lists = self.seqused, self.tables[number]
        return torch.ops._flashmla_C.dense_decode_fwd(
            self.q, self.cache, LATENT, *lists, self.scale, True, *metadata, None
        )

    def error(self, o):
        """The largest relative error of O of the first batch, over two heads of the first and of the last sequence."""
        found = []
        for sequence in {0, len(self.lengths) - 1}:
            length, page = self.lengths[sequence], self.cache.shape[1]
            pages = self.tables[0][sequence, : -(-length // page)].long()
            keys = self.cache[pages].flatten(0, 1)[:length, 0].double()
            for head in {0, self.q.shape[2] - 1}:
                scores = keys @ self.q[sequence, 0, head].double() * self.scale
                right = scores.softmax(-1) @ keys[:, :LATENT]
                found.append(judge.distance(o[sequence, 0, head], right))
        return judge.largest(found)

    def rates(self, ms):
        """TFLOP/s and TB/s, as text."""
        return "{:5.0f} TFLOP/s {:5.2f} TB/s".format(*rates(self.q.shape[2], self.lengths, ms))


class Prefill:
    """Q, K and V of head_dim 512."""

    count = 1

    def __init__(self, batch, tokens, heads, heads_kv):
        self.q, self.k, self.v = (
            torch.randn(batch, tokens, of, LATENT, dtype=decode.DTYPE, device=decode.DEVICE)
            for of in (heads, heads_kv, heads_kv)
        )

    def ours(self, _):
        """O by our kernels."""
        from fa3 import flash_attn_func

        return flash_attn_func(self.q, self.k, self.v, causal=True)

    def torch(self, _):
        """O by torch's own attention."""
        heads_first = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)

    def error(self, o):
        """The largest relative error of O of the last 256 rows."""
        tokens, group = self.q.shape[1], self.q.shape[2] // self.k.shape[2]
        last, found = slice(tokens - 256, tokens), []
        for head in {0, self.q.shape[2] - 1}:
            rows = (self.q[-1, last, head], self.k[-1, :, head // group], self.v[-1, :, head // group])
            found.append(judge.distance(o[-1, last, head], judge.exact(*rows)))
        return judge.largest(found)

    def rates(self, ms):
        """TFLOP/s, as text."""
        batch, tokens, heads, columns = self.q.shape
        return f"{2 * batch * heads * columns * tokens * (tokens + 1) / ms / 1e9:5.0f} TFLOP/s"


def cells(options):
    """Yields the name of each setting, with a function that draws its tensors."""
    for name, (heads, lengths) in DECODING.items():
        for page in options.page:
            yield f"{name}, pages of {page}", lambda page=page: Decoding(heads, lengths, page)
    for name, shape in PREFILL.items():
        yield name, lambda: Prefill(*shape)


def main():
    """Measures all cells. Returns the exit code."""
    options = parse()
    settings.print_machine()
    if options.fa3:
        torch.ops.load_library(options.fa3)
    if options.flashmla:
        torch.ops.load_library(options.flashmla)
    results, right = [], True
    for name, draw in cells(options):
        if (options.only or "") not in name:
            continue
        torch.manual_seed(0)
        drawn = draw()
        bound = {"ours": drawn.ours}
        if isinstance(drawn, Prefill):
            bound["torch"] = drawn.torch
        else:
            if options.fa3:
                bound["fa3"] = drawn.fa3
            if options.flashmla and drawn.cache.shape[1] == 64:
                bound["flashmla"] = drawn.flashmla
        errors = {by: drawn.error(function(0)) for by, function in bound.items()}
        ms = decode.milliseconds(bound, drawn.count, options)
        text = "  ".join(f"{by} {1e3 * of_one:8.1f} us {drawn.rates(of_one)}" for by, of_one in ms.items())
        ratios = "".join(f"  ratio {of_one / ms['ours']:.3f}" for by, of_one in ms.items() if by != "ours")
        print(f"{name:46}  {text}{ratios}", flush=True)
        right = judge.print_wrong(errors, decode.WRONG) and right
        shape = {"heads": drawn.q.shape[2], "lengths": drawn.lengths} if isinstance(drawn, Decoding) else {}
        results.append({"setting": name, "ms": ms, "errors": errors} | shape)
        # Memory is freed before other inputs are drawn.
        del drawn, bound
    settings.write_json(options.json, results)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
