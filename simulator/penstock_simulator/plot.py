"""The two charts of a trace, as inline SVG: late requests against replica-hours, and replicas over time.

Colours and fonts come from the page's CSS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from penstock_simulator.compare import Point, TraceResult
from penstock_simulator.policies.catalogue import POLICIES, PolicyKind

WIDTH, HEIGHT = 460.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 12.0, 36.0
FLOOR = 1e-4
"""Late shares under this are drawn here."""
ORDER = tuple(PolicyKind)


def frontier(result: TraceResult, headroom: float) -> str:
    """Late requests (logarithmic) against replica-hours, a line for each policy; ours at its headroom is filled."""
    points = [point for point in result.points if point.late_share < 0.5]
    if not points:
        return ""
    most = max(point.replica_hours for point in points) * 1.05
    low, high = math.log10(FLOOR), math.log10(max(0.2, *(point.late_share for point in points)))

    def x(hours: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * hours / most

    def y(share: float) -> float:
        part = (math.log10(max(share, FLOOR)) - low) / (high - low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part

    parts = [_axes("replica-hours")]
    for share, label in ((1e-4, "0.01 %"), (1e-3, "0.1 %"), (1e-2, "1 %"), (1e-1, "10 %")):
        parts += [_grid(y(share)), _label(LEFT - 5, y(share) + 4, label, "end")]
    parts += [_label(x(hours), HEIGHT - BOTTOM + 16, f"{hours:g}", "middle") for hours in ticks(most)]
    for kind in ORDER:
        line = [point for point in result.of(kind) if point.late_share < 0.5]
        if not line:
            continue
        style = f"p{ORDER.index(kind)}"
        path = " ".join(f"{x(point.replica_hours):.1f},{y(point.late_share):.1f}" for point in line)
        parts.append(f'<polyline class="{style}" points="{path}"/>')
        parts += [_dot(point, x(point.replica_hours), y(point.late_share), style, headroom) for point in line]
    return _svg(parts, f"{result.trace.name}: late requests against replica-hours")


def timeline(result: TraceResult, rate_of_one: float) -> str:
    """Replicas over time in one run of each policy, over the load in replicas' worth."""
    loads = result.trace.rates / rate_of_one
    seconds = len(loads)
    highest = max([float(loads.max()), *(max(outcome.replicas) for outcome in result.runs.values())]) * 1.05

    def x(second: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * second / seconds

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / highest

    step = max(1, seconds // 400)
    area = " ".join(f"{x(at):.1f},{y(float(loads[at])):.1f}" for at in range(0, seconds, step))
    parts = [
        _axes("minutes"),
        f'<polygon class="load" points="{x(0):.1f},{y(0):.1f} {area} {x(seconds):.1f},{y(0):.1f}"/>',
    ]
    parts += [
        text
        for value in ticks(highest)
        for text in (_grid(y(value)), _label(LEFT - 5, y(value) + 4, f"{value:g}", "end"))
    ]
    parts += [
        _label(x(minutes * 60), HEIGHT - BOTTOM + 16, f"{minutes:g}", "middle") for minutes in ticks(seconds / 60)
    ]
    for kind, outcome in result.runs.items():
        path = [f"{x(0):.1f},{y(outcome.replicas[0]):.1f}"]
        for at in range(1, seconds):
            before, after = outcome.replicas[at - 1], outcome.replicas[at]
            if before != after:
                path += [f"{x(at):.1f},{y(before):.1f}", f"{x(at):.1f},{y(after):.1f}"]
        path.append(f"{x(seconds):.1f},{y(outcome.replicas[-1]):.1f}")
        parts.append(f'<polyline class="p{ORDER.index(kind)}" points="{" ".join(path)}"/>')
    return _svg(parts, f"{result.trace.name}: replicas over time")


def legend(kinds: Sequence[PolicyKind]) -> str:
    """A list of the policies with their colours."""
    items = "".join(
        f'<li><svg width="18" height="10" aria-hidden="true"><line class="p{ORDER.index(kind)}" x1="0" x2="18" y1="5" '
        f'y2="5"/></svg> {escape(POLICIES[kind].title)}</li>'
        for kind in kinds
    )
    return f'<ul class="legend">{items}</ul>'


def ticks(most: float) -> list[float]:
    """Round values from 0 to at most a limit, five or so."""
    raw = most / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= raw)
    return [round(index * step, 6) for index in range(int(most / step) + 1)]


def _dot(point: Point, x: float, y: float, style: str, headroom: float) -> str:
    chosen = POLICIES[point.kind].is_ours and point.knob == headroom
    facts = POLICIES[point.kind]
    title = (
        f"{facts.title}, {facts.knob} {point.knob:g}: {point.late_share:.2%} late, {point.replica_hours:.2f} "
        f"replica-hours, {point.flips:.1f} flips"
    )
    shape = f'class="{style}{" chosen" if chosen else ""}" cx="{x:.1f}" cy="{y:.1f}" r="{5 if chosen else 2.5}"'
    return f"<circle {shape}><title>{escape(title)}</title></circle>"


def _svg(parts: Sequence[str], title: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _axes(what: str) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return _label(middle, HEIGHT - 4, what, "middle")


def _grid(y: float) -> str:
    return f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
