"""Charts as text of SVG files: panels of bars or of curves under one legend. They follow the reader's dark mode.

Bars stand on zero, and all axes are linear. Panels of one unit have one scale, so that they can be compared.
"""

import dataclasses
import math
from xml.sax.saxutils import escape

# Sizes in pixels: a panel of bars and one of curves, the room for axes and title, and the legend above all panels.
BARS, CURVES = (340, 200), (720, 370)
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 32, 22
LEGEND = 30
# A character's width, and the narrowest bar that has its number above it.
CHARACTER, NARROWEST = 6.6, 23

# The background is part of a picture, so that it can be read on a page that has another mode.
STYLE = """\
.back { fill: #fff } text { fill: #222 } .grid { stroke: #ddd } .axis { stroke: #555 }
@media (prefers-color-scheme: dark) {
  .back { fill: #16181d } text { fill: #e4e6ea } .grid { stroke: #34383f } .axis { stroke: #aaa }
}"""


@dataclasses.dataclass
class Series:
    """The bars or the curve of one name. Numbers that are None or not finite are left out."""

    name: str
    color: str
    numbers: list
    thickness: float = 2


@dataclasses.dataclass
class Panel:
    """Series over one axis. Bars have a label for each number, curves for some of them, by their indices."""

    title: str
    unit: str
    labels: dict
    series: list


def _drawn(series):
    """The numbers of a series that can be drawn, with their indices."""
    return [(i, x) for i, x in enumerate(series.numbers) if x is not None and math.isfinite(x)]


def _ticks(least, most):
    """Round numbers from at most `least` to at least `most`."""
    step = 10 ** math.floor(math.log10(most - least or 1))
    step = next(step * part for part in (0.2, 0.25, 0.5, 1, 2) if (most - least) / (step * part) <= 5)
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    return [step * tick for tick in range(first, max(last, first + 1) + 1)]


def _text(x, y, text, anchor="middle", more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(str(text))}</text>'


def _line(name, x1, y1, x2, y2):
    return f'<line class="{name}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _panel(panel, left, top, size, ticks, marks):
    """The parts of a panel, whose upper left corner is given. `marks` draws its series."""
    right, bottom = left + size[0] - RIGHT, top + size[1] - BOTTOM
    left, top = left + LEFT, top + TOP

    def at(y):
        return bottom - (y - ticks[0]) / (ticks[-1] - ticks[0]) * (bottom - top)

    yield _text(left, top - 16, f"{panel.title}: {panel.unit}", "start", ' font-weight="600"')
    for tick in ticks:
        yield _line("grid", left, at(tick), right, at(tick))
        yield _text(left - 6, at(tick) + 4, f"{tick:g}", "end")
    drawn, place = marks(panel, left, right, at)
    yield from drawn
    for index, label in panel.labels.items():
        yield _text(place(index), bottom + 16, label)
    yield _line("axis", left, bottom, right, bottom)


def _bars(panel, left, right, at):
    slot = (right - left) / len(panel.labels)
    width = 0.84 * slot / len(panel.series)
    parts = []
    for place, series in enumerate(panel.series):
        for index, number in _drawn(series):
            x, y = left + index * slot + 0.08 * slot + place * width, at(number)
            title = escape(f"{series.name}, {panel.labels[index]}: {number:g} {panel.unit}")
            size = f'width="{0.94 * width:.1f}" height="{at(0) - y:.1f}"'
            rest = f'{size} fill="{series.color}"><title>{title}</title></rect>'
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {rest}')
            if width >= NARROWEST:
                text = f"{number:.{0 if number >= 10 else 2}f}"
                parts.append(_text(x + width / 2, y - 3, text, more=' font-size="10"'))
    return parts, lambda index: left + (index + 0.5) * slot


def _curves(panel, left, right, at):
    count = max(len(series.numbers) for series in panel.series)

    def place(index):
        return left + index / max(1, count - 1) * (right - left)

    parts = []
    for series in panel.series:
        points = " ".join(f"{place(i):.1f},{at(x):.1f}" for i, x in _drawn(series))
        style = f'fill="none" stroke="{series.color}" stroke-width="{series.thickness}"'
        parts.append(f'<polyline points="{points}" {style}/>')
    return parts, place


def _draw(panels, columns, size, marks, least):
    """A chart with panels in rows. All axes include the numbers `least`."""
    width, height = columns * size[0], LEGEND + -(-len(panels) // columns) * size[1]
    names = {series.name: series.color for panel in panels for series in panel.series if _drawn(series)}
    parts, x = [], LEFT
    for name, color in names.items():
        parts.append(f'<rect x="{x:.1f}" y="10" width="12" height="12" fill="{color}"/>')
        parts.append(_text(x + 18, 20, name, "start"))
        x += 40 + CHARACTER * len(name)
    for index, panel in enumerate(panels):
        alike = [series for other in panels if other.unit == panel.unit for series in other.series]
        numbers = least + [x for series in alike for _, x in _drawn(series)] or [0]
        corner = index % columns * size[0], LEGEND + index // columns * size[1]
        parts += _panel(panel, *corner, size, _ticks(min(numbers), max(numbers)), marks)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">'
    )
    background = f'<rect class="back" width="{width}" height="{height}" fill="#fff"/>'
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", background, *parts, "</svg>"]) + "\n"


def bars(panels, columns):
    """A chart of bars, with panels in rows of `columns`."""
    return _draw(panels, columns, BARS, _bars, [0])


def curves(panel):
    """A chart of one panel of curves, whose axis has the range of its numbers."""
    return _draw([panel], 1, CURVES, _curves, [])
