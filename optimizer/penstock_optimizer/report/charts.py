"""The charts of the optimisation report: agreement against speed, capacity, and matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from penstock.capacity import CapacityCurve
from penstock.manifest import GemmShare
from penstock_report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    linear_scale,
    linear_ticks,
    log_scale,
    log_ticks,
    marker,
    polyline,
    short,
    svg,
    x_axis,
    x_name,
    y_axis,
)  # fmt: skip

FINEST_LOSS = 1e-5
"""Agreement closer to 1 than this is drawn here: beyond, float32 itself differs between engines."""


def agreement_chart(series: Sequence[Series], *, metric: str, budget: float | None) -> str:
    """Agreement with fp32 against speed-up. The vertical axis is logarithmic in the distance from perfect agreement."""
    drawn = [one for one in series if one.speed_up and one.agreement is not None]
    if not drawn:
        return ""
    losses = [max(1 - (one.agreement or 0.0), FINEST_LOSS) for one in drawn]
    if budget is not None and budget < 1:
        losses.append(1 - budget)
    speeds = [one.speed_up or 1.0 for one in drawn]
    x = linear_scale(min(0.9, *speeds) * 0.93, max(1.2, *speeds) * 1.05, LEFT, WIDTH - RIGHT)
    y = log_scale(losses, TOP, HEIGHT - BOTTOM, margin=0.1)
    ticks = [tick for tick in (10.0**power for power in range(-5, 1)) if y.low <= tick <= y.high]
    if len(ticks) < 2:
        ticks = log_ticks(y.low, y.high, most=6)
    parts = [y_axis(y, ticks, f"{metric.replace('_', ' ')} to fp32", label=_one_minus)]
    parts.append(
        x_axis(x, linear_ticks(x.low, x.high, most=8), "times as fast as fp32", label=lambda value: f"{short(value)}×")
    )
    if budget is not None and budget < 1:
        at = y(1 - budget)
        parts.append(
            f'<rect class="forbidden" x="{LEFT}" y="{at:.1f}" width="{WIDTH - LEFT - RIGHT}" '
            f'height="{max(HEIGHT - BOTTOM - at, 0):.1f}"/>'
            f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="limit-label" x="{LEFT + 6}" y="{at + 13:.1f}">under the budget of {budget:g}</text>'
        )
    for one in drawn:
        agreement, speed_up = one.agreement or 0.0, one.speed_up or 1.0
        title = f"{one.name}: {metric.replace('_', ' ')} {agreement:.4f}, {speed_up:.2f} times fp32"
        at = y(max(1 - agreement, FINEST_LOSS))
        parts.append(marker(one.style, x(speed_up), at, size=5.5, classes=one.emphasis, title=title))
    return svg("Agreement with fp32 against speed", parts)


def capacity_chart(curve: CapacityCurve) -> str:
    """p50 and p95 by arrival rate, with the objective and the rate within it."""
    points = [point for point in curve.points if point.samples]
    if len(points) < 2:
        return ""
    limit = curve.p95_objective_milliseconds
    values = [max(value, 0.01) for point in points for value in (point.p50_milliseconds, point.p95_milliseconds)]
    # An overloaded point is drawn at the upper edge: its value depends on how long was measured.
    ceiling = max(limit * 4, *(point.p50_milliseconds for point in points[:-1])) if limit else max(values)
    highest = max(min(max(values), ceiling), limit or 0.0)
    x = linear_scale(0, max(point.arrivals_per_second for point in points) * 1.04, LEFT, WIDTH - RIGHT)
    y = log_scale([min(values), highest], HEIGHT - BOTTOM, TOP, margin=0.08)
    parts = [y_axis(y, log_ticks(y.low, y.high), "ms"), x_axis(x, linear_ticks(x.low, x.high), "requests/s")]
    if limit is not None:
        at = y(limit)
        parts.append(
            f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="limit-label" x="{LEFT + 6}" y="{at - 5:.1f}">p95 objective {short(limit)} ms</text>'
        )
    rate = curve.requests_per_second
    if rate is not None:
        at = x(rate)
        anchor = "end" if at > WIDTH - 60 else "start" if at < 2 * LEFT else "middle"
        parts.append(
            f'<line class="reached" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="reached-label" text-anchor="{anchor}" x="{at:.1f}" '
            f'y="{TOP - 6}">{short(rate)}/s</text>'
        )
    curves = (
        ("p50", "reference", [point.p50_milliseconds for point in points]),
        ("p95", "chosen", [point.p95_milliseconds for point in points]),
    )
    rates = [point.arrivals_per_second for point in points]
    for style, (label, emphasis, heights) in enumerate(curves):
        line = [(x(at), y(height)) for at, height in zip(rates, heights, strict=True)]
        parts.append(polyline(line, f"line s{style} {emphasis}"))
        for point, height in zip(points, heights, strict=True):
            refused = f", {point.refused_share:.0%} refused" if point.refused_share else ""
            title = f"{label} {short(height)} ms at {short(point.arrivals_per_second)} requests/s{refused}"
            parts.append(marker(style, x(point.arrivals_per_second), y(height), size=3, classes=emphasis, title=title))
        parts.append(
            f'<text class="series-label {emphasis}" text-anchor="end" x="{x(rates[0]) - 7:.1f}" '
            f'y="{y(heights[0]) + 4:.1f}">{label}</text>'
        )
    return svg("Latency of one replica by arrival rate", parts)


def gemm_chart(shares: Sequence[GemmShare]) -> str:
    """The share of the measured matrix-product ceiling at each length, as bars."""
    if not shares:
        return ""
    x_step = (WIDTH - LEFT - RIGHT) / len(shares)
    y = linear_scale(0, max(1.0, *(one.share for one in shares)), HEIGHT - BOTTOM, TOP)
    parts = [y_axis(y, linear_ticks(0, y.high), "share of the ceiling", label=lambda value: f"{value:.0%}")]
    for index, one in enumerate(shares):
        left = LEFT + index * x_step + x_step * 0.18
        top = y(one.share)
        title = f"{one.tokens} tokens: {short(one.reached_gops)} of {short(one.ceiling_gops)} GOP/s"
        parts.append(
            f'<rect class="bar" x="{left:.1f}" y="{top:.1f}" width="{x_step * 0.64:.1f}" '
            f'height="{HEIGHT - BOTTOM - top:.1f}"><title>{escape(title)}</title></rect>'
            f'<text class="bar-label" text-anchor="middle" x="{left + x_step * 0.32:.1f}" y="{top - 4:.1f}">'
            f"{one.share:.0%}</text>"
            f'<text class="tick" text-anchor="middle" x="{left + x_step * 0.32:.1f}" y="{HEIGHT - BOTTOM + 15}">'
            f"{one.tokens}</text>"
        )
    parts.append(x_name("tokens"))
    return svg("Share of the matrix-product ceiling by length", parts)


def _one_minus(loss: float) -> str:
    """`0.99` for 0.01: agreement as people know it, with as many digits as it needs."""
    digits = max(1, -math.floor(math.log10(loss) + 1e-9))
    return f"{1 - loss:.{digits}f}"
