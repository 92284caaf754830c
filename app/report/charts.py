"""Charts as inline SVG: no library, no script. All are `WIDTH` units wide and take their colours from the page.

Labels stand on a line of their own above the mark, so that a long one fits on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from app.marked import one_line

WIDTH = 400
_LINE = 56  # characters of a label and its text together
_ROOM_FOR_ENDS = 60.0  # of a cell, that its interval is written in
_COLOURS = ("var(--one)", "var(--two)")
_FRAME = (46.0, 8.0, 390.0, 168.0)  # left, top, right, bottom of a plot with axes


@dataclass(frozen=True)
class Line:
    """Points (x, y) of one series; `band` holds (x, low, high)."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    dots: bool = False


@dataclass(frozen=True)
class Bar:
    """One or two values (the second in the other colour) with the text that tells them."""

    label: str
    text: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, where it has one; `series` picks colour and height."""

    value: float
    low: float | None = None
    high: float | None = None
    series: int = 0


@dataclass(frozen=True)
class Row:
    label: str
    text: str
    estimates: Sequence[Estimate] = field(default_factory=tuple)


def line_chart(lines: Sequence[Line], title: str, x_name: str = "step") -> Markup:
    """Series over one axis; empty where there is no point."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [v for line in lines for b in line.band for v in b[1:]]
    if not xs:
        return Markup("")
    left, top, right, bottom = _FRAME
    low_x, high_x = min(xs), max(xs)
    marks = ticks(min(ys), max(ys))
    low, high = marks[0], marks[-1]

    def place(x: float, y: float) -> str:
        across = (x - low_x) / ((high_x - low_x) or 1.0)
        return f"{left + across * (right - left):.1f},{bottom - (y - low) / (high - low) * (bottom - top):.1f}"

    parts = [_y_axis(marks, low, high)]
    parts += [_text(left, bottom + 16, f"{low_x:,.0f}"), _text(right, bottom + 16, f"{x_name} {high_x:,.0f}", "end")]
    for number, line in enumerate(lines):
        colour = _COLOURS[number % 2]
        if line.band:
            edge = [place(x, h) for x, _, h in line.band] + [place(x, w) for x, w, _ in reversed(line.band)]
            parts.append(f'<polygon points="{" ".join(edge)}" fill="{colour}" opacity=".18"/>')
        pairs = [place(x, y) for x, y in line.points]
        parts.append(f'<polyline points="{" ".join(pairs)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if line.dots or len(pairs) == 1:
            parts += [f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{colour}"/>' for p in pairs]
    return _svg(parts, bottom + 22, title)


def histogram(bins: Sequence[tuple[str, int]], title: str, limit: str = "") -> Markup:
    """Counts of neighbouring bins, each with the label of its left edge; `limit` is written under the last."""
    if not bins:
        return Markup("")
    left, top, right, bottom = _FRAME
    marks = ticks(0, max(count for _, count in bins))
    width = (right - left) / len(bins)
    parts = [_y_axis(marks, 0, marks[-1])]
    every = math.ceil(len(bins) / 6)
    for number, (label, count) in enumerate(bins):
        height = count / (marks[-1] or 1) * (bottom - top)
        x = left + number * width
        parts.append(
            f'<rect x="{x + 0.5:.1f}" y="{bottom - height:.1f}" width="{max(0.5, width - 1):.1f}"'
            f' height="{height:.1f}" fill="{_COLOURS[0]}"/>'
        )
        if number % every == 0 and (number + 0.8 * every <= len(bins) or not limit):
            parts.append(_text(x, bottom + 16, label))
    parts.append(_text(right, bottom + 16, limit, "end"))
    return _svg(parts, bottom + 22, title)


def bars(rows: Sequence[Bar], title: str) -> Markup:
    """Horizontal bars from nothing to the largest value of all."""
    top = max((v for row in rows for v in row.values if v is not None), default=0.0)
    if not rows:
        return Markup("")
    parts: list[str] = []
    y = 0.0
    for row in rows:
        parts.append(_head(y + 12, row.label, row.text))
        y += 17
        for number, value in enumerate(row.values):
            length = WIDTH * (value or 0.0) / top if top else 0.0
            parts.append(f'<rect x="0" y="{y:.1f}" width="{WIDTH}" height="7" rx="2" fill="var(--line)" opacity=".5"/>')
            if value is not None:
                wide, colour = f"{max(1.0, length):.1f}", _COLOURS[number % 2]
                parts.append(f'<rect x="0" y="{y:.1f}" width="{wide}" height="7" rx="2" fill="{colour}"/>')
            y += 9
        y += 7
    return _svg(parts, y, title)


def intervals(rows: Sequence[Row], title: str, percent: bool = False) -> Markup:
    """Values as dots with their 95 % intervals as lines, all over one axis."""
    numbers = [v for row in rows for e in row.estimates for v in (e.value, e.low, e.high) if v is not None]
    if not numbers:
        return Markup("")
    marks = ticks(min(numbers), max(numbers))
    low, high = marks[0], marks[-1]

    def x(value: float) -> float:
        return 6 + (value - low) / (high - low) * (WIDTH - 12)

    parts: list[str] = []
    y = 0.0
    for row in rows:
        parts.append(_head(y + 12, row.label, row.text))
        bottom = y + 18 + 12 * len(row.estimates)
        parts += [
            f'<line x1="{x(m):.1f}" y1="{y + 17:.1f}" x2="{x(m):.1f}" y2="{bottom:.1f}" stroke="var(--line)"/>'
            for m in marks
        ]
        y += 24
        for e in row.estimates:
            parts += _dot(e, x, y)
            y += 12
        y += 4
    names = [f"{100 * m:g} %" if percent else f"{m:g}" for m in marks]
    for number, (mark, name) in enumerate(zip(marks, names, strict=True)):
        anchor = "start" if number == 0 else "end" if number == len(marks) - 1 else "middle"
        parts.append(_text(x(mark) + (-5 if number == 0 else 5 if anchor == "end" else 0), y + 12, name, anchor))
    return _svg(parts, y + 18, title)


def _dot(e: Estimate, x: Callable[[float], float], y: float) -> list[str]:
    parts, colour = [], _COLOURS[e.series % 2]
    if e.low is not None and e.high is not None:
        ends = f'x1="{x(e.low):.1f}" y1="{y:.1f}" x2="{x(e.high):.1f}" y2="{y:.1f}"'
        parts.append(f'<line {ends} stroke="{colour}" stroke-width="3" opacity=".55" stroke-linecap="round"/>')
    return [*parts, f'<circle cx="{x(e.value):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>']


def heatmap(
    axes: tuple[str, str],
    columns: Sequence[str],
    rows: Sequence[str],
    cells: Sequence[Sequence[Estimate | None]],
    title: str,
) -> Markup:
    """Speed-ups as coloured cells, blue above 1 and orange below, with their intervals; None was not measured.

    Args:
        axes: what rows are of, and what columns are of.
    """
    if not columns or not rows:
        return Markup("")
    left, top, height = 92.0, 36.0, 40.0
    width = min(90.0, (WIDTH - left) / len(columns))
    spread = max([abs(math.log(c.value)) for line in cells for c in line if c] + [0.05])
    parts = [_text(left - 8, 28, axes[0], "end"), _text(left + len(columns) * width / 2, 12, axes[1], "middle")]
    parts += [_text(left + (i + 0.5) * width, 28, name, "middle") for i, name in enumerate(columns)]
    for j, (name, line) in enumerate(zip(rows, cells, strict=True)):
        y = top + j * height
        parts.append(_text(left - 8, y + 24, name, "end"))
        for i, cell in enumerate(line):
            parts += _cell(left + i * width, y, width, height, cell, spread)
    return _svg(parts, top + 4 + len(rows) * height, title)


def _cell(x: float, y: float, width: float, height: float, cell: Estimate | None, spread: float) -> list[str]:
    colour, strength, said = "var(--line)", 0.3, "-"
    ends = ""
    if cell is not None:
        colour = _COLOURS[0] if cell.value >= 1 else _COLOURS[1]
        strength = 0.12 + 0.6 * abs(math.log(cell.value)) / spread
        said = f"{cell.value:.2f}x"
        if cell.low is not None and cell.high is not None and width >= _ROOM_FOR_ENDS:
            ends = f"{cell.low:.2f}-{cell.high:.2f}"
    box = f'x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" height="{height - 2:.1f}"'
    parts = [f'<rect {box} rx="3" fill="{colour}" opacity="{strength:.2f}"/>']
    parts.append(_text(x + width / 2, y + (18 if ends else 24), said, "middle", "var(--ink)"))
    if ends:
        small = _text(x + width / 2, y + 32, ends, "middle", "var(--ink)")
        parts.append(small.replace("<text ", '<text font-size="10" ', 1))
    return parts


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers, evenly spaced, the first at or below `low` and the last at or above `high`, at least two."""
    span = high - low if high > low else abs(high) or 1.0
    raw = span / wanted
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [round(n * step, 10) for n in range(first, last + 1)]


def _y_axis(marks: Sequence[float], low: float, high: float) -> str:
    left, top, right, bottom = _FRAME
    parts = []
    for mark in marks:
        y = bottom - (mark - low) / ((high - low) or 1.0) * (bottom - top)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="var(--line)"/>')
        parts.append(_text(left - 6, y + 4, f"{mark:,.6g}", "end"))
    return "".join(parts)


def _head(y: float, label: str, text: str) -> str:
    label = one_line(label, 10**6)
    room = max(12, _LINE - len(text))
    shown = label if len(label) <= room else f"{label[: room - 3]}..."
    return _text(0, y, shown, "start", "var(--ink)") + _text(WIDTH, y, text, "end")


def _text(x: float, y: float, words: str, anchor: str = "start", fill: str = "var(--soft)") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'


def _svg(parts: Sequence[str], height: float, title: str) -> Markup:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}" font-size="13">'
    return Markup(head + "".join(parts) + "</svg>")
