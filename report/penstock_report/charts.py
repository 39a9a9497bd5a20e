"""Charts as inline SVG: scales, ticks, axes, markers, and latency by length.

Drawn by hand: SVG follows the reader's light or dark theme through the page's CSS variables, is a tenth of the size of
a plotting library's output, and stays readable on a phone. Colours and fonts come from the page's CSS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end] in pixels, by way of `warp` (the logarithm, or nothing)."""

    low: float
    high: float
    start: float
    end: float
    warp: Callable[[float], float] = float

    def __call__(self, value: float) -> float:
        """The position; values outside are moved to the edge."""
        low, high = self.warp(self.low), self.warp(self.high)
        if high == low:
            return (self.start + self.end) / 2
        share = (self.warp(min(max(value, self.low), self.high)) - low) / (high - low)
        return self.start + share * (self.end - self.start)


def log_scale(values: Sequence[float], start: float, end: float, *, margin: float = 0.04) -> Scale:
    """A logarithmic scale around positive values, with a margin on both sides as a share of its length."""
    low, high = math.log(min(values)), math.log(max(values))
    reach = max(high - low, math.log(1.5)) * margin
    return Scale(math.exp(low - reach), math.exp(high + reach), start, end, math.log)


def linear_scale(low: float, high: float, start: float, end: float) -> Scale:
    """A plain scale; an empty range is widened."""
    return Scale(low, high if high > low else low + 1.0, start, end)


def log_ticks(low: float, high: float, *, most: int = 7) -> list[float]:
    """Round values within [low, high]: 1, 2 and 5 times powers of ten, or the powers alone when those are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    return ticks or [low]


def linear_ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Round values within [low, high], evenly spaced by 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


def short(value: float) -> str:
    """A number for a tick or a cell: three significant digits at most, no exponent for everyday sizes."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


WIDTH, HEIGHT = 440.0, 300.0
"""Units are about pixels on a phone; wider screens scale the drawing up."""
LEFT, RIGHT, TOP, BOTTOM = 50.0, 14.0, 28.0, 40.0
LABEL_GAP = 30.0
"""Tick labels on the horizontal axis nearer than this are left out."""
SHAPES = 6
"""Marker shapes, so that series differ without colour."""


@dataclass(frozen=True)
class Series:
    """One candidate on the charts."""

    name: str
    style: int
    """Number of its colour and shape."""
    latency: Mapping[int, float]
    """Tokens -> median milliseconds."""
    emphasis: str
    """CSS class: `chosen`, `reference`, `other` or `out` (rejected, failed)."""
    speed_up: float | None = None
    agreement: float | None = None


def marker(style: int, x: float, y: float, *, size: float = 4.0, classes: str = "", title: str = "") -> str:
    """A small shape, centred."""
    s = size
    points = {
        1: [(-s, -s), (s, -s), (s, s), (-s, s)],
        2: [(0, -s * 1.35), (s * 1.35, 0), (0, s * 1.35), (-s * 1.35, 0)],
        3: [(0, -s * 1.3), (s * 1.2, s), (-s * 1.2, s)],
        4: [(0, s * 1.3), (s * 1.2, -s), (-s * 1.2, -s)],
        5: [(-s * 1.3, 0), (-s * 0.6, -s * 1.15), (s * 0.6, -s * 1.15), (s * 1.3, 0), (s * 0.6, s * 1.15),
            (-s * 0.6, s * 1.15)],
    }  # fmt: skip
    label = f"<title>{escape(title)}</title>" if title else ""
    attributes = f'class="mark s{style} {classes}"'
    shape = points.get(style % SHAPES)
    if shape is None:
        return f'<circle {attributes} cx="{x:.1f}" cy="{y:.1f}" r="{s * 1.1:.1f}">{label}</circle>'
    return f'<polygon {attributes} points="{corners((x + dx, y + dy) for dx, dy in shape)}">{label}</polygon>'


def swatch(series: Series) -> str:
    """A line with the series' marker, for the legend."""
    return (
        f'<svg class="swatch" viewBox="0 0 26 12" aria-hidden="true"><line class="line s{series.style} '
        f'{series.emphasis}" x1="1" y1="6" x2="25" y2="6"/>{marker(series.style, 13, 6, classes=series.emphasis)}</svg>'
    )


def latency_chart(series: Sequence[Series]) -> str:
    """Median latency by length, both logarithmic; empty when nothing was measured."""
    drawn = [one for one in series if one.latency]
    if not drawn:
        return ""
    tokens = sorted({length for one in drawn for length in one.latency})
    x = log_scale([float(length) for length in tokens], LEFT, WIDTH - RIGHT)
    y = log_scale([value for one in drawn for value in one.latency.values()], HEIGHT - BOTTOM, TOP)
    parts = [y_axis(y, log_ticks(y.low, y.high), "median ms"), x_axis(x, tokens, "tokens")]
    # The ones that matter are drawn last, on top.
    order = {"out": 0, "other": 1, "reference": 2, "chosen": 3}
    for one in sorted(drawn, key=lambda one: order[one.emphasis]):
        points = [(x(length), y(one.latency[length])) for length in sorted(one.latency)]
        parts.append(polyline(points, f"line s{one.style} {one.emphasis}"))
        for length, (px, py) in zip(sorted(one.latency), points, strict=True):
            title = f"{one.name}: {short(one.latency[length])} ms at {length} tokens"
            parts.append(marker(one.style, px, py, size=3.0, classes=one.emphasis, title=title))
    return svg("Latency by length for each candidate", parts)


def svg(title: str, parts: Sequence[str]) -> str:
    """The whole drawing of these parts."""
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def polyline(points: Iterable[tuple[float, float]], classes: str) -> str:
    """A line through points in pixels."""
    return f'<polyline class="{classes}" points="{corners(points)}"/>'


def corners(points: Iterable[tuple[float, float]]) -> str:
    """The `points` attribute of a polyline or polygon."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def y_axis(scale: Scale, ticks: Sequence[float], name: str, *, label: Callable[[float], str] = short) -> str:
    """Labelled grid lines, and the name of the axis above them."""
    lines = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale(tick):.1f}" y2="{scale(tick):.1f}"/>'
        f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{scale(tick) + 4:.1f}">{escape(label(tick))}</text>'
        for tick in ticks
    )
    return f'{lines}<text class="axis" x="0" y="12">{escape(name)}</text>'


def x_axis(scale: Scale, ticks: Sequence[float], name: str, *, label: Callable[[float], str] = short) -> str:
    """Labelled grid lines, and the name of the axis below them. A label near another one is left out."""
    parts = []
    free_from = -math.inf
    # From the right, so that the longest length keeps its label.
    for tick in sorted(ticks, reverse=True):
        at = scale(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        if -at >= free_from:
            free_from = -at + LABEL_GAP
            parts.append(
                f'<text class="tick" text-anchor="middle" x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}">'
                f"{escape(label(tick))}</text>"
            )
    return "".join(parts) + x_name(name)


def x_name(name: str) -> str:
    """The name of the horizontal axis."""
    return (
        f'<text class="axis" text-anchor="middle" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}">'
        f"{escape(name)}</text>"
    )
