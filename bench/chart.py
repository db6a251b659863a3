"""Draws the results of bench/peers.py, bench/decode.py or bench/latent.py.

    python3 bench/peers.py --fa3 path/to/fa3_C.so --json peers.json
    python3 bench/chart.py peers.json docs/figures/forward.svg
    python3 bench/decode.py --fa3 path/to/fa3_C.so --table speculative --layout 64 --json decode.json
    python3 bench/chart.py decode.json decode.svg

The chart of the forward pass has TFLOP/s by seqlen, in panels by head_dim and mask. The chart of decoding has
microseconds by the number of keys, in panels by query heads, with a line for each batch. Needs matplotlib.
"""

import argparse
import json
import pathlib

import matplotlib.pyplot as plt

import settings

# The name in the legend and the colour of each implementation. Colour-blind readers can tell the colours apart, too.
STYLES = {
    "fa3": ("FlashAttention-3 (C++)", "#e69f00"),
    "cudnn": ("cuDNN", "#999999"),
    "ours": ("fa3 (this repository)", "#0072b2"),
}


def panels(measured):
    """TFLOP/s by (causal, head_dim), implementation and seqlen."""
    panels = {}
    for entry in measured:
        cell = settings.Cell(entry["head_dim"], entry["seqlen"], entry["causal"])
        panel = panels.setdefault((cell.causal, cell.head_dim), {name: {} for name in STYLES})
        for name, ms in entry["ms"].items():
            if name in panel:
                panel[name][cell.seqlen] = cell.tflops(ms)
    return panels


def draw_panel(axes, title, panel):
    """Draws the bars of a panel, with the bars of one seqlen side by side."""
    width = 0.8 / len(panel)
    for index, (name, bars) in enumerate(panel.items()):
        places = [place + width * (index - (len(panel) - 1) / 2) for place in range(len(bars))]
        label, color = STYLES[name]
        axes.bar(places, bars.values(), width, color=color, label=label)
    seqlens = [f"{seqlen // 1024}k" if seqlen >= 1024 else str(seqlen) for seqlen in panel["ours"]]
    axes.set_xticks(range(len(seqlens)), seqlens)
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)


def lines(measured):
    """Microseconds by query heads, then by (implementation, batch), then by keys, for settings with one length."""
    panels = {}
    for entry in measured:
        if len(set(entry.get("lengths", ()))) == 1:
            for name, ms in entry["ms"].items():
                if name in STYLES:
                    line = panels.setdefault(entry["heads"], {}).setdefault((name, len(entry["lengths"])), {})
                    line[entry["lengths"][0]] = 1e3 * ms
    return panels


def draw_forward(measured):
    """The figure of the forward pass."""
    of_settings = panels(measured)
    head_dims = sorted({head_dim for _, head_dim in of_settings})
    figure, axes = plt.subplots(2, len(head_dims), figsize=(10, 4.6), sharey=True, squeeze=False)
    for row, causal in enumerate([False, True]):
        axes[row][0].set_ylabel("TFLOP/s")
        for column, head_dim in enumerate(head_dims):
            title = f"head_dim {head_dim}, {'causal' if causal else 'no mask'}"
            draw_panel(axes[row][column], title, of_settings[causal, head_dim])
    return figure, axes


def draw_decoding(measured):
    """The figure of decoding: a colour for each implementation."""
    of_heads = lines(measured)
    figure, axes = plt.subplots(1, len(of_heads), figsize=(10, 4.6), sharey=True, squeeze=False)
    axes[0][0].set_ylabel("microseconds")
    for panel, (heads, of_lines) in zip(axes[0], of_heads.items()):
        for (name, batch), points in of_lines.items():
            label, color = STYLES[name]
            panel.plot(*zip(*sorted(points.items())), color=color, marker="o", label=f"{label}, batch {batch}")
        panel.set(title=f"{heads} query heads", xlabel="keys", xscale="log", yscale="log")
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def main():
    """Draws the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=pathlib.Path, help="the file that a script wrote")
    parser.add_argument("svg", type=pathlib.Path, help="the chart")
    options = parser.parse_args()
    measured = json.loads(options.json.read_text())["measured"]
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fa3", "font.size": 9})
    figure, axes = draw_decoding(measured) if "lengths" in measured[0] else draw_forward(measured)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(STYLES), frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(options.svg, metadata={"Date": None})


if __name__ == "__main__":
    main()
