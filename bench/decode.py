"""Decoding, and prefill over a KV cache, compared with FlashAttention-3: one GPU, one process, in turns.

    python3 bench/decode.py --fa3 path/to/fa3_C.so
    python3 bench/decode.py --fa3 path/to/fa3_C.so --table decode --layout 16 64 256
    python3 bench/decode.py --table speculative --layout seqused --num-splits 1
    python3 bench/decode.py --table decode --e4m3
    python3 bench/decode.py --table decode --e4m3-q

Ours is the installed Python package fa3; FlashAttention-3's C++ is measured where --fa3 gives its compiled extension. A
CUDA graph has a call for each of several caches. Together these are so large that a cache has left L2 when its turn
comes again. The time of a call is the time of a replay divided by the number of calls. A layout is `contiguous`;
`seqused`, which has lengths as data; or the number of rows of a page. Pages lie in random order in one pool. With
--append a call also appends the new rows to the cache, and rotates these rows and Q. With --split-keys a sequence has
the same bits in any batch, and ours is also measured without it. With --e4m3 the caches are e4m3 and Q is not, and ours
is also measured over 16-bit caches of the same numbers. With --e4m3-q Q is e4m3, too.

TB/s count the keys and values in use, read once. TFLOP/s count the visible scores. The ratio is the other
implementation's time divided by ours, for example our time over 16-bit caches divided by our time over e4m3 caches. O
is compared with float64 on two heads of the first and of the last sequence, and the exit code is 1 if one is wrong.
"""

import argparse
import dataclasses
import math
import sys

import torch

import judge
import settings
import timing

# Relative errors that rounding never makes: rounding to 16 bits, and rounding P to e4m3.
WRONG, WRONG_IN_8_BITS = 2e-2, 5e-2

# The bytes of all caches together, which are several times the size of L2.
ROTATED = 400 * 2**20

DTYPE = torch.bfloat16

E4M3 = torch.float8_e4m3fn

DEVICE = "cuda"


@dataclasses.dataclass(frozen=True)
class Setting:
    """A row of a table: the new rows of each sequence, and its keys including these rows."""

    name: str
    heads: int
    heads_kv: int
    new: int
    lengths: tuple

    @property
    def batch(self):
        """How many sequences there are."""
        return len(self.lengths)


def _gqa(name, new, *lengths):
    return Setting(name, 32, 8, new, lengths)


# For each table, its settings, and the layouts with which they are measured.
TABLES = {
    "decode": (
        [
            _gqa("batch 1, 1k", 1, 1024),
            _gqa("batch 1, 8k", 1, 8192),
            _gqa("batch 16, 4k", 1, *[4096] * 16),
            _gqa("batch 16, 16k", 1, *[16384] * 16),
            _gqa("batch 64, 2k", 1, *[2048] * 64),
            _gqa("batch 128, 1k", 1, *[1024] * 128),
            _gqa("32k, 16 x 1k, 15 x 64", 1, 32768, *[1024] * 16, *[64] * 15),
            _gqa("batch 1, 8k, 8 new", 8, 8192),
        ],
        ["64"],
    ),
    # The settings of the figure in the FlashAttention-3 talk.
    "speculative": (
        [
            Setting(f"MQA 16, batch {batch}, {keys}k", 16, 1, 4, (keys * 1024,) * batch)
            for batch in (1, 4, 16, 64)
            for keys in (1, 4, 16, 64)
        ],
        ["seqused"],
    ),
    "prefill": (
        [
            _gqa("batch 4, 4k on 4k", 4096, *[4096] * 4),
            _gqa("batch 4, 512 on 8k", 512, *[8192] * 4),
            _gqa("batch 1, 2k on 32k", 2048, 32768),
        ],
        ["contiguous", "seqused", "16", "64", "128", "256"],
    ),
}


@dataclasses.dataclass
class Caches:
    """Keys and values of several batches, and their page tables and lengths."""

    # For each batch, a tensor (batch, rows, heads_kv, head_dim) or (pages, page_rows, ...).
    k: list
    v: list
    # The page table of each batch, or None without pages; and the lengths, or None if they are not data.
    tables: list | None
    seqused: torch.Tensor | None

    @staticmethod
    def draw(setting, head_dim, layout, dtype):
        """Draws at least two caches, which together exceed L2."""
        bytes_of_one = 2 * dtype.itemsize * sum(setting.lengths) * setting.heads_kv * head_dim
        copies = max(2, math.ceil(ROTATED / bytes_of_one))
        lengths = torch.tensor(setting.lengths, dtype=torch.int32, device=DEVICE)
        row = setting.heads_kv, head_dim
        if not layout.isdigit():
            # All caches are drawn as one tensor: dozens of small tensors would take longer than everything else.
            shape = copies, setting.batch, max(setting.lengths), *row
            k, v = (torch.randn(shape, dtype=DTYPE, device=DEVICE).to(dtype) for _ in "kv")
            return Caches(list(k), list(v), None, None if layout == "contiguous" else lengths)
        page_rows = int(layout)
        pages = [-(-length // page_rows) for length in setting.lengths]
        shape = copies * sum(pages), page_rows, *row
        k, v = (torch.randn(shape, dtype=DTYPE, device=DEVICE).to(dtype) for _ in "kv")
        return Caches([k] * copies, [v] * copies, page_tables(copies, pages), lengths)

    def of_16_bits(self):
        """These caches, converted to 16 bits."""
        # The pages of all caches are in one pool, which is converted once.
        pools = {id(x): x.to(DTYPE) for x in (*self.k, *self.v)}
        k, v = ([pools[id(x)] for x in of] for of in (self.k, self.v))
        return Caches(k, v, self.tables, self.seqused)

    def __len__(self):
        return len(self.k)

    def rows(self, number, sequence, length):
        """K and V of a sequence of a batch: (length, heads_kv, head_dim)."""
        k, v = self.k[number], self.v[number]
        if self.tables is None:
            return k[sequence, :length], v[sequence, :length]
        pages = self.tables[number][sequence, : -(-length // k.shape[1])].long()
        # Torch cannot index every dtype.
        k, v = (x.view(torch.uint8)[pages].view(x.dtype) for x in (k, v))
        return k.flatten(0, 1)[:length], v.flatten(0, 1)[:length]


def page_tables(copies, pages):
    """Page tables of several batches, in random order in one pool. `pages` lists each sequence's number of pages."""
    order = torch.randperm(copies * sum(pages), dtype=torch.int32, device=DEVICE)
    tables = []
    for own in order.split(sum(pages)):
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=DEVICE)
        for sequence, entries in enumerate(own.split(pages)):
            table[sequence, : len(entries)] = entries
        tables.append(table)
    return tables


@dataclasses.dataclass
class New:
    """The new rows that a call appends, and the tables of their rotation."""

    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    # The lengths before the call appends the rows.
    before: torch.Tensor

    @staticmethod
    def draw(setting, head_dim):
        """Draws random rows, and the usual tables that rotate all columns."""
        shape = setting.batch, setting.new, setting.heads_kv, head_dim
        k, v = (torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in "kv")
        frequencies = 10000 ** (-torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
        angles = torch.arange(max(setting.lengths), device=DEVICE)[:, None] * frequencies
        before = torch.tensor(setting.lengths, dtype=torch.int32, device=DEVICE) - setting.new
        return New(k, v, angles.cos().to(DTYPE), angles.sin().to(DTYPE), before)


def parse(words=None):
    """The options of the command line."""
    parser = settings.parser_of(__doc__, rounds=7, slice_ms=25.0)
    parser.add_argument("--table", choices=list(TABLES), nargs="+", default=list(TABLES), help="default: all")
    parser.add_argument("--layout", type=_layout, nargs="+", help="default: the table's layouts")
    parser.add_argument("--only", metavar="TEXT", help="only settings whose names contain it")
    parser.add_argument("--head-dim", type=settings.count, default=128, metavar="N", help="default: 128")
    parser.add_argument("--num-splits", type=int, default=0, metavar="N", help="of ours; 1: keys are not shared")
    parser.add_argument("--split-keys", type=split_keys, metavar="N", help="of ours: splits of N keys, or fixed")
    parser.add_argument("--append", action="store_true", help="append new rows, and rotate them and Q")
    parser.add_argument("--e4m3", action="store_true", help="caches of e4m3, beside ours of 16 bits")
    parser.add_argument("--e4m3-q", action="store_true", help="the same with Q of e4m3")
    options = parser.parse_args(words)
    options.e4m3 |= options.e4m3_q
    if options.e4m3 and options.fa3:
        parser.error("--fa3 with --e4m3: the extension that is measured has no kernels of e4m3")
    if options.e4m3_q and options.append:
        parser.error("--append with --e4m3-q: rows of e4m3 are not rotated")
    return options


def split_keys(text):
    """The value of --split-keys."""
    return text if text == "fixed" else settings.count(text)


def _layout(text):
    if text in ("contiguous", "seqused") or text.isdigit() and int(text) > 0:
        return text
    raise argparse.ArgumentTypeError(f"expected contiguous, seqused or the rows of a page, found {text}")


def cells(options):
    """Yields the table's name, a setting and a layout for each cell that the options choose."""
    for name in options.table:
        rows, layouts = TABLES[name]
        for setting in rows:
            for layout in options.layout or layouts:
                # A contiguous cache has no lengths, so all sequences must have equally many keys.
                fits = layout != "contiguous" or len(set(setting.lengths)) == 1 and not options.append
                if fits and (options.only or "") in setting.name:
                    yield name, setting, layout


def implementations(options, q, caches, new):
    """For each implementation, by name, a function that returns O of the batch with a given index."""
    from fa3 import flash_attn_with_kvcache

    lengths = caches.seqused if new is None else new.before

    def table(number):
        return None if caches.tables is None else caches.tables[number]

    def ours(number, caches=caches, q=q.to(E4M3) if options.e4m3_q else q, split_keys=options.split_keys):
        more = {}
        if new is not None:
            more = dict(k=new.k, v=new.v, rotary_cos=new.cos, rotary_sin=new.sin, rotary_interleaved=False)
        return flash_attn_with_kvcache(
            q,
            caches.k[number],
            caches.v[number],
            cache_seqlens=lengths,
            page_table=table(number),
            causal=True,
            num_splits=options.num_splits,
            split_keys=split_keys,
            **more,
        )

    bound = {"ours": ours}
    if options.split_keys:
        bound["free"] = lambda number: ours(number, split_keys=None)
    if options.e4m3:
        wide = caches.of_16_bits()
        bound["16 bits"] = lambda number: ours(number, wide, q)
    if options.fa3:
        torch.ops.load_library(options.fa3)

        def fa3(number):
            more = {}
            if new is not None:
                more = dict(k_new=new.k, v_new=new.v, rotary_cos=new.cos, rotary_sin=new.sin)
                more["is_rotary_interleaved"] = False
            return torch.ops.flash_attn_3.fwd(
                q,
                caches.k[number],
                caches.v[number],
                seqused_k=lengths,
                page_table=table(number),
                softmax_scale=q.shape[-1] ** -0.5,
                is_causal=True,
                num_splits=0,
                **more,
            )[0]

        bound["fa3"] = fa3
    return bound


def replayed(function, count):
    """A function that replays a CUDA graph, which has one call for each batch."""
    # The first call compiles, loads and allocates, which cannot be captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            function(number)
    return graph.replay


def milliseconds(calls, count, options):
    """Milliseconds of a call of each function, by name: graphs of `count` calls are replayed in turns."""
    graphs = {name: replayed(call, count) for name, call in calls.items()}
    taken = timing.in_turns(graphs, options.rounds, options.slice_ms)
    return {name: of_all / count for name, of_all in taken.items()}


def error(setting, q, caches, new, function):
    """The largest relative error of O of the first batch, over two heads of the first and of the last sequence."""
    o, found = function(0), [0.0]
    for sequence in {0, setting.batch - 1}:
        # The cache now also has the appended rows, rotated.
        k, v = (x.double() for x in caches.rows(0, sequence, setting.lengths[sequence]))
        for head in {0, setting.heads - 1}:
            of_k = head * setting.heads_kv // setting.heads
            rows = q[sequence, :, head].double()
            if new is not None:
                rows = rotated(rows, new, setting.lengths[sequence] - setting.new)
            right = judge.exact(rows, k[:, of_k], v[:, of_k])
            found.append(judge.distance(o[sequence, :, head], right))
    return judge.largest(found)


def rotated(rows, new, first):
    """Rotates rows of one head by halves. `first` is the position of the first row."""
    cos, sin = (x[first : first + len(rows)].double() for x in (new.cos, new.sin))
    left, right = rows.chunk(2, -1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1).to(DTYPE).double()


def rate(table, setting, head_dim, dtype, milliseconds):
    """TFLOP/s of prefill, or TB/s of decoding from a cache of this dtype, as text."""
    if table == "prefill":
        # The first new row sees all keys except the other new rows.
        scores = sum(setting.new * (keys - (setting.new - 1) / 2) for keys in setting.lengths)
        return f"{4 * setting.heads * head_dim * scores / milliseconds / 1e9:5.0f} TFLOP/s"
    bytes_read = 2 * dtype.itemsize * sum(setting.lengths) * setting.heads_kv * head_dim
    return f"{bytes_read / milliseconds / 1e9:5.2f} TB/s"


def main():
    """Measures all cells. Returns the exit code."""
    options = parse()
    settings.print_machine()
    results, ratios, right = [], [], True
    for table, setting, layout in cells(options):
        torch.manual_seed(0)
        dtype = E4M3 if options.e4m3 else DTYPE
        caches = Caches.draw(setting, options.head_dim, layout, dtype)
        q = torch.randn(setting.batch, setting.new, setting.heads, options.head_dim, dtype=DTYPE, device=DEVICE)
        q = q.to(E4M3).to(DTYPE) if options.e4m3_q else q
        new = New.draw(setting, options.head_dim) if options.append else None
        bound = implementations(options, q, caches, new)
        errors = {name: error(setting, q, caches, new, function) for name, function in bound.items()}
        ms = milliseconds(bound, len(caches), options)
        heads = f"{setting.heads}/{setting.heads_kv}"
        cell = f"{table:11}  d {options.head_dim:<3}  heads {heads:5}  {setting.name:22}  {layout:10}"
        text = "  ".join(
            f"{name} {1e3 * of_one:8.1f} us "
            f"{rate(table, setting, options.head_dim, dtype if name == 'ours' else DTYPE, of_one)}"
            for name, of_one in ms.items()
        )
        other = next((name for name in ms if name != "ours"), None)
        if other:
            ratios.append((ms[other] / ms["ours"], cell))
            text += f"  ratio {ratios[-1][0]:.3f}"
        print(f"{cell}  {text}", flush=True)
        right = judge.print_wrong(errors, WRONG_IN_8_BITS if options.e4m3_q else WRONG) and right
        row = dataclasses.asdict(setting) | {"table": table, "layout": layout, "head_dim": options.head_dim}
        asked = {"append": options.append, "num_splits": options.num_splits, "split_keys": options.split_keys}
        asked |= {"e4m3": options.e4m3, "e4m3_q": options.e4m3_q}
        results.append(row | asked | {"ms": ms, "errors": errors})
        # Memory is freed before other caches are drawn.
        del caches, bound
    if ratios:
        print(f"to {other}: {settings.mean_and_worst(ratios)}, {len(ratios)} cells")
    settings.write_json(options.json, results)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
