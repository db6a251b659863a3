"""Draws what bench/peers.py, bench/decode.py or bench/latent.py wrote, or the figures of the documentation.

    python3 bench/peers.py --fa3 path/to/fa3_C.so --json peers.json
    python3 bench/chart.py peers.json forward.svg
    python3 bench/decode.py --fa3 path/to/fa3_C.so --table speculative --layout 64 --json decode.json
    python3 bench/chart.py decode.json decode.svg
    python3 bench/chart.py docs

The chart of the paper's settings has TFLOP/s by seqlen, in panels by head_dim and mask. The chart of decoding has TB/s
by the number of keys, in panels by batch. The chart of latent attention has TFLOP/s of 128 heads and TB/s of 16. Given
the folder docs, it draws the files in docs/figures again, each from the table of its page.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import re

import decode
import latent
import settings
import svg

# The name in the legend and the colour of each implementation. Colour-blind readers can tell the colours apart, too, on
# white and on black.
STYLES = {
    "fa3": ("FlashAttention-3 (C++)", "#e69f00"),
    "cudnn": ("cuDNN", "#999999"),
    "ours": ("fa3 (this repository)", "#1f83c4"),
}


def size(number):
    """A number of rows as text, as in 16k."""
    return f"{number // 1024}k" if number >= 1024 else str(number)


def panel(title, unit, of_names):
    """A panel of bars: numbers by label, by implementation."""
    labels = list(dict.fromkeys(itertools.chain.from_iterable(of_names.values())))
    series = [
        svg.Series(*STYLES[name], [of_names[name].get(label) for label in labels])
        for name in STYLES
        if of_names.get(name)
    ]
    return svg.Panel(title, unit, dict(enumerate(labels)), series)


def of_paper(rates):
    """The chart of the paper's settings, of TFLOP/s by (causal, head_dim), implementation and seqlen."""
    panels = [
        panel(f"head_dim {head_dim}, {'causal' if causal else 'no mask'}", "TFLOP/s", of_names)
        for (causal, head_dim), of_names in sorted(rates.items())
    ]
    return svg.bars(panels, len({head_dim for _, head_dim in rates}))


def rates_of_paper(measured):
    """TFLOP/s as `of_paper` draws them, from the results of bench/peers.py."""
    rates = {}
    for entry in measured:
        cell = settings.Cell(entry["head_dim"], entry["seqlen"], entry["causal"])
        of_names = rates.setdefault((cell.causal, cell.head_dim), {})
        for name, ms in entry["ms"].items():
            of_names.setdefault(name, {})[size(cell.seqlen)] = cell.tflops(ms)
    return rates


def of_decoding(measured):
    """The chart of decoding: a panel for each batch, of the settings whose sequences have one length."""
    panels = {}
    for entry in measured:
        if entry["table"] == "prefill" or len(set(entry["lengths"])) > 1:
            continue
        title = f"batch {len(entry['lengths'])}, {entry['new']} new, {entry['layout']}"
        of_names = panels.setdefault(title, {})
        for name, ms in entry["ms"].items():
            bytes_each = 1 if entry["e4m3"] and name == "ours" else 2
            read = 2 * bytes_each * sum(entry["lengths"]) * entry["heads_kv"] * entry["head_dim"]
            of_names.setdefault(name, {})[size(entry["lengths"][0])] = read / ms / 1e9
    return svg.bars([panel(title, "TB/s", of_names) for title, of_names in panels.items()], 2)


def of_latent(measured):
    """The chart of latent attention: a panel for each number of heads, with the unit of what bounds it."""
    panels = {}
    for entry in measured:
        if len(set(entry.get("lengths", ()))) == 1:
            heads, lengths = entry["heads"], entry["lengths"]
            for name, ms in entry["ms"].items():
                of_names = panels.setdefault(heads, {})
                label = f"{len(lengths)} x {size(lengths[0])}"
                of_names.setdefault(name, {})[label] = latent.rates(heads, lengths, ms)[heads < 64]
    units = {heads: ("TFLOP/s", "TB/s")[heads < 64] for heads in panels}
    return svg.bars([panel(f"{heads} heads", units[heads], panels[heads]) for heads in panels], 2)


def chart(measured):
    """The chart of what a script wrote."""
    first = measured[0]
    if "lengths" not in first:
        return of_paper(rates_of_paper(measured))
    return of_decoding(measured) if "heads_kv" in first else of_latent(measured)


def table(page, head):
    """The cells of the rows of the first table of a page whose first line begins with `head`."""
    _, found, after = page.partition(f"\n{head}")
    if not found:
        raise ValueError(f"the page has no table {head}")
    lines = itertools.takewhile(lambda line: line.startswith("|"), after.splitlines()[2:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def table_of_paper(page):
    """TFLOP/s as `of_paper` draws them, from the table with the columns ours, FA3 and cuDNN."""
    rates = {}
    for first, *columns in table(page, "| | ours | FA3 | cuDNN |"):
        head_dim, causal = re.fullmatch(r"d (\d+)(, causal)?", first).groups()
        numbers = [[float(x) for x in column.split(" / ")] for column in columns[:3]]
        lengths = [size(cell.seqlen) for cell in settings.PAPER[:6]]
        of_names = {name: dict(zip(lengths, column)) for name, column in zip(("ours", "fa3", "cudnn"), numbers)}
        rates[causal is not None, int(head_dim)] = of_names
    return rates


def table_of_decoding(page):
    """Yields results as bench/decode.py writes them, from the table of speculative decoding."""
    rows, _ = decode.TABLES["speculative"]
    shapes = {row.name.removeprefix("MQA 16, "): row for row in rows}
    for name, ours, _, fa3, _ in table(page, "| batch, keys | ours, us |"):
        row, ms = shapes[name], {"ours": float(ours) / 1e3, "fa3": float(fa3) / 1e3}
        setting = {"table": "speculative", "layout": "pages of 64", "head_dim": 128, "e4m3": False}
        yield dataclasses.asdict(row) | setting | {"ms": ms}


def table_of_latent(page):
    """Yields results as bench/latent.py writes them, from the table of latent attention over pages of 64 rows."""
    for name, ours, _, _, fa3, _ in table(page, "| one new token, 512 + 64 columns |"):
        if name in latent.DECODING:
            heads, lengths = latent.DECODING[name]
            yield {"heads": heads, "lengths": lengths, "ms": {"ours": float(ours) / 1e3, "fa3": float(fa3) / 1e3}}


# For each figure, its page, and the function that draws that page's table.
FIGURES = {
    "forward.svg": ("performance.md", lambda page: of_paper(table_of_paper(page))),
    "backward.svg": ("performance-backward.md", lambda page: of_paper(table_of_paper(page))),
    "decode.svg": ("performance-decode.md", lambda page: chart(list(table_of_decoding(page)))),
    "latent.svg": ("latent.md", lambda page: chart(list(table_of_latent(page)))),
}


def figures(docs):
    """The figures of the documentation by name."""
    return {name: draw((docs / page).read_text()) for name, (page, draw) in FIGURES.items()}


def main():
    """Draws the chart, or the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=pathlib.Path, help="the file that a script wrote, or the folder docs")
    parser.add_argument("svg", type=pathlib.Path, nargs="?", help="the chart of the file")
    options = parser.parse_args()
    if options.data.is_dir() != (options.svg is None):
        parser.error("a file is drawn into another file, and a folder's figures into its folder figures")
    if options.svg:
        options.svg.write_text(chart(json.loads(options.data.read_text())["measured"]))
        return
    for name, text in figures(options.data).items():
        (options.data / "figures" / name).write_text(text)


if __name__ == "__main__":
    main()
