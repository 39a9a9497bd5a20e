"""A comparison as files: figures as CSV, and a self-contained page with charts. No scripts, nothing is loaded."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from penstock_report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    Series,
    corners,
    linear_scale,
    linear_ticks,
    marker,
    polyline,
    svg,
    swatch,
    x_axis,
    y_axis,
)  # fmt: skip
from penstock_report.page import bullets, card, document, header, table
from penstock_simulator.choices import PolicyKind
from penstock_simulator.compare import Compared, Experiment, Point, PolicyVerdict, TraceResult, judge, together
from penstock_simulator.policies import POLICIES

COLUMNS = (
    "trace", "policy", "knob", "requests", "late", "late_share", "lost", "replica_hours", "flips", "most_flips",
    "most_replicas", "cost",
)  # fmt: skip


def figures_csv(results: Sequence[TraceResult], price_per_hour: float | None) -> str:
    """All points, a row each: means over the seeds; cost is empty without a price."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results:
        name = result.trace.name
        for point in result.points:
            cost = "" if price_per_hour is None else f"{point.replica_hours * price_per_hour:.4f}"
            writer.writerow(
                [
                    name, point.kind.value, f"{point.knob:g}", f"{point.requests:.0f}", f"{point.late:.1f}",
                    f"{point.late_share:.6f}", f"{point.lost:.1f}", f"{point.replica_hours:.4f}", f"{point.flips:.2f}",
                    point.most_flips, point.most_replicas, cost,
                ]
            )  # fmt: skip
    return buffer.getvalue()


def page(experiment: Experiment, results: Sequence[TraceResult], price_per_hour: float | None) -> str:
    """The report as HTML."""
    service, model = experiment.service, experiment.model
    sections = "".join(_section(experiment, result, price_per_hour) for result in results)
    lines = overall(experiment, results)
    conditions = (
        f"One replica takes {service.rate:.3g} requests/s within p95 {service.p95_objective_milliseconds:g} ms and "
        f"saturates at {model.saturation:.3g}: {model.servers} servers of {model.mean_service_seconds * 1000:.3g} ms "
        f"each. Start-up {experiment.fleet.start_up_seconds:g} s, dispatch {experiment.fleet.dispatch.value}, "
        f"Prometheus scrapes every {experiment.scrape_interval} s, {experiment.limits.min_replicas} to "
        f"{experiment.limits.max_replicas} replicas; means over seeds {', '.join(map(str, experiment.seeds))}. Rivals "
        "are read at our replica-hours, off the line through their best points."
    )
    outcome = (
        f"<p>{escape(headline(results))}</p><p>{escape(flips_text(experiment, results))}</p>"
        f'<p class="note">{escape(conditions)}</p>{legend(experiment.policies)}'
    )
    return document(
        "Penstock: autoscaling simulated",
        header("Autoscaling, simulated", outcome)
        + (card("One setting for all traces", bullets(lines)) if lines else "")
        + sections,
    )


def headline(results: Sequence[TraceResult]) -> str:
    """The outcome in a sentence or two."""
    verdicts = [(result, verdict) for result in results for verdict in result.verdicts]
    if not verdicts:
        return "Nothing to compare with: name more policies."
    at_ours = [(_pair(result, verdict), verdict) for result, verdict in verdicts]
    text = _counted("Fewer late requests at equal replica-hours in {} comparisons", at_ours)
    ranges = [
        (f"{result.trace.name}, {POLICIES[verdict.ours].title} against {POLICIES[verdict.rival].title}", verdict.over)
        for result, verdict in verdicts
        if verdict.over is not None
    ]
    if ranges:
        text += _counted(" On average over all replica-hours that both can take: in {}", ranges)
    return text


def _counted(sentence: str, compared: Sequence[tuple[str, Compared]]) -> str:
    """In how many ours has fewer, in how many as many, and the names of the rest."""
    fewer, even = (sum(one.fewer for _, one in compared), sum(one.even for _, one in compared))
    lost = [name for name, one in compared if not one.fewer and not one.even]
    text = sentence.format(f"{fewer} of {len(compared)}") + (f", as many in {even}." if even else ".")
    return f"{text} Not: {'; '.join(lost)}." if lost else text


def overall(experiment: Experiment, results: Sequence[TraceResult]) -> list[str]:
    """Ours against each rival with one setting for all traces, a line each; none with a single trace."""
    if len(results) < 2:
        return []
    points = together(results)
    lines = []
    for ours in points:
        if not POLICIES[ours.kind].is_ours or ours.knob != experiment.headroom:
            continue
        for rival in experiment.policies:
            verdict = None if POLICIES[rival].is_ours else judge(ours, points, rival)
            if verdict is not None:
                over = over_hours(verdict, ours.requests)
                lines.append(
                    f"{POLICIES[ours.kind].title} against {POLICIES[rival].title}: "
                    f"{equal_hours(verdict, ours.requests)}{'; ' if over else ''}{over}"
                )
    return lines


def flips_text(experiment: Experiment, results: Sequence[TraceResult]) -> str:
    """Where ours turned more often in a run than its load changes, in a sentence; empty when ours is not among them."""
    own = [
        (result.trace, point)
        for result in results
        for point in result.points
        if POLICIES[point.kind].is_ours and point.knob == experiment.headroom
    ]
    if not own:
        return ""
    more = [
        f"{trace.name}, {POLICIES[point.kind].title} {point.most_flips} times ({trace.changes_text})"
        for trace, point in own
        if point.most_flips > trace.changes
    ]
    if not more:
        return "Ours turns no more often than the load changes, in any run."
    return f"Ours turns more often than the load changes, in its worst run: {'; '.join(more)}."


def flips_of(point: Point) -> str:
    """The mean over the seeds, and the most of any, for a cell."""
    return f"{point.flips:.1f} ({point.most_flips})"


def _pair(result: TraceResult, verdict: PolicyVerdict) -> str:
    ours, rival = POLICIES[verdict.ours].title, POLICIES[verdict.rival].title
    requests = result.points[0].requests
    shares = f"{verdict.our_late / requests:.2%} against {rival} {verdict.rival_late / requests:.2%}"
    return f"{result.trace.name}, {ours} {shares} at {verdict.replica_hours:.2f} h"


def _section(experiment: Experiment, result: TraceResult, price_per_hour: float | None) -> str:
    trace = result.trace
    heads = [
        "policy", "knob", "late", "lost", "replica-hours", "flips (most)", "replicas", "late at equal hours",
        "over a range",
    ]  # fmt: skip
    if price_per_hour is not None:
        heads.insert(5, "cost")
    rows = (_row(result, point, price_per_hour) for point in shown(experiment, result))
    charts = f"{frontier(result, experiment.headroom)}{timeline(result, experiment.service.rate)}"
    return card(
        trace.name,
        f'<div class="columns">{charts}</div>{table(heads, rows, numbers=True)}',
        note=f"{trace.description}; {trace.changes_text}",
    )


def shown(experiment: Experiment, result: TraceResult) -> list[Point]:
    """One point a policy: ours at the headroom, rivals at the knob with the nearest replica-hours."""
    ours = [p for p in result.points if POLICIES[p.kind].is_ours and p.knob == experiment.headroom]
    hours = ours[0].replica_hours if ours else 0.0
    points = []
    for kind in experiment.policies:
        own = [point for point in ours if point.kind is kind] or result.of(kind)
        points.append(min(own, key=lambda point: (abs(point.replica_hours - hours), point.late)))
    return points


def _row(result: TraceResult, point: Point, price_per_hour: float | None) -> str:
    facts = POLICIES[point.kind]
    verdict = next((verdict for verdict in result.verdicts if verdict.rival is point.kind), None)
    cells = [
        facts.title, f"{point.knob:g}", f"{point.late_share:.2%}", f"{point.lost / max(point.requests, 1):.2%}",
        f"{point.replica_hours:.2f}", flips_of(point), str(point.most_replicas),
    ]  # fmt: skip
    if price_per_hour is not None:
        cells.insert(5, f"{point.replica_hours * price_per_hour:.2f}")
    last = '<td class="small">ours</td><td></td>' if facts.is_ours else "<td></td><td></td>"
    if verdict is not None:
        last = f'<td class="{_class(verdict)}">{equal_hours(verdict, point.requests)}</td>'
        over = "small" if verdict.over is None else _class(verdict.over)
        last += f'<td class="{over}">{over_hours(verdict, point.requests)}</td>'
    first, *others = cells
    numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in others)
    return f"<tr><td>{escape(first)}</td>{numbers}{last}</tr>"


def _class(compared: Compared) -> str:
    """How a cell looks."""
    return "pass" if compared.fewer else "small" if compared.even else "fail"


def over_hours(verdict: PolicyVerdict, requests: float) -> str:
    """The means over the common replica-hours, and where ours has fewer, for a cell; empty without such a range."""
    over = verdict.over
    if over is None:
        return ""
    return (
        f"{over.rival_late / requests:.2%}, ours {over.our_late / requests:.2%}, over {over.least:.1f} to "
        f"{over.most:.1f} h; fewer in {over.ahead:.0%} of it"
    )


def equal_hours(verdict: PolicyVerdict, requests: float) -> str:
    """What rival and ours come to at equal replica-hours, for a cell."""
    return (
        f"{verdict.rival_late / requests:.2%}, ours {verdict.our_late / requests:.2%}, at {verdict.replica_hours:.2f} h"
    )


FLOOR = 1e-4
"""Late shares under this are drawn here."""
SHARES = {1e-4: "0.01 %", 1e-3: "0.1 %", 1e-2: "1 %", 1e-1: "10 %"}
"""Ticks of the logarithmic axis, with their labels."""
ORDER = tuple(PolicyKind)
STEPS = 400
"""Corners of the area of the load, at most."""


def frontier(result: TraceResult, headroom: float) -> str:
    """Late requests (logarithmic) against replica-hours, a line for each policy; ours at its headroom is filled."""
    points = [point for point in result.points if point.late_share < 0.5]
    if not points:
        return ""
    x = linear_scale(0, max(point.replica_hours for point in points) * 1.05, LEFT, WIDTH - RIGHT)
    highest = max(0.2, *(point.late_share for point in points))
    y = Scale(FLOOR, highest, HEIGHT - BOTTOM, TOP, math.log)
    parts = [
        y_axis(y, list(SHARES), "late", label=SHARES.__getitem__),
        x_axis(x, linear_ticks(0, x.high), "replica-hours", label="{:g}".format),
    ]
    for position, kind in enumerate(ORDER):
        line = [(point, x(point.replica_hours), y(point.late_share)) for point in result.of(kind) if point in points]
        if line:
            parts.append(polyline([(at, height) for _, at, height in line], f"line s{position + 1}"))
            parts += [_dot(point, at, height, position + 1, headroom) for point, at, height in line]
    return svg(f"{result.trace.name}: late requests against replica-hours", parts)


def timeline(result: TraceResult, rate_of_one: float) -> str:
    """Replicas over time in one run of each policy, over the load in replicas' worth."""
    loads = result.trace.rates / rate_of_one
    seconds = len(loads)
    highest = max([float(loads.max()), *(max(outcome.replicas) for outcome in result.runs.values())]) * 1.05
    x, y = linear_scale(0, seconds, LEFT, WIDTH - RIGHT), linear_scale(0, highest, HEIGHT - BOTTOM, TOP)
    load = [(x(at), y(float(loads[at]))) for at in range(0, seconds, max(1, seconds // STEPS))]
    minutes = [60 * tick for tick in linear_ticks(0, seconds / 60)]
    parts = [
        f'<polygon class="load" points="{corners([(x(0), y(0)), *load, (x(seconds), y(0))])}"/>',
        y_axis(y, linear_ticks(0, highest), "replicas", label="{:g}".format),
        x_axis(x, minutes, "minutes", label=lambda second: f"{second / 60:g}"),
    ]
    for kind, outcome in result.runs.items():
        changes = [(at, pair) for at, pair in enumerate(pairwise(outcome.replicas), 1) if pair[0] != pair[1]]
        path = [(x(0), y(outcome.replicas[0]))]
        path += [(x(at), y(value)) for at, pair in changes for value in pair]
        path.append((x(seconds), y(outcome.replicas[-1])))
        parts.append(polyline(path, f"line s{ORDER.index(kind) + 1}"))
    return svg(f"{result.trace.name}: replicas over time", parts)


def legend(kinds: Sequence[PolicyKind]) -> str:
    """A list of the policies with their colours."""
    series = [Series(POLICIES[kind].title, ORDER.index(kind) + 1, {}, "other") for kind in kinds]
    items = "".join(f"<li>{swatch(one)}{escape(one.name)}</li>" for one in series)
    return f'<ul class="legend">{items}</ul>'


def _dot(point: Point, x: float, y: float, style: int, headroom: float) -> str:
    facts = POLICIES[point.kind]
    chosen = facts.is_ours and point.knob == headroom
    title = (
        f"{facts.title}, {facts.knob} {point.knob:g}: {point.late_share:.2%} late, {point.replica_hours:.2f} "
        f"replica-hours, {point.flips:.1f} flips"
    )
    return marker(style, x, y, size=5 if chosen else 2.5, classes="chosen" if chosen else "", title=title)
