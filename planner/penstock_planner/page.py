"""A comparison as cells of a table, JSON, CSV, and a self-contained HTML page without scripts."""

from __future__ import annotations

import csv
import io
import json
import math
from html import escape
from typing import Any

from penstock.hardware import NOT_RUN
from penstock.prices import currency_sign
from penstock_planner.compare import HardwareComparison, OfferRow, Sizing, counted
from penstock_planner.evidence import as_json
from penstock_report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    linear_ticks,
    log_scale,
    log_ticks,
    marker,
    short,
    svg,
    x_axis,
    y_axis,
)
from penstock_report.page import bullets, card, document, header, table

COLUMNS = (
    "hardware_class", "cores", "feasible", "plan", "node", "p95_mean_milliseconds", "p95_peak_milliseconds",
    "capacity_per_replica", "replicas_mean", "replicas_peak", "reserved_per_month", "used_per_month",
    "reserved_per_million", "used_per_million", "reserved_per_month_low", "reserved_per_month_high", "origin", "basis",
    "why", "currency",
)  # fmt: skip


def heads(comparison: HardwareComparison) -> tuple[str, ...]:
    """The heads of a table; a million requests are `M`."""
    money = currency_sign(comparison.currency).strip()
    return (
        "class", "cores", "plan", "p95 ms", "replicas", "node", f"{money}/month reserved", f"{money}/month used",
        f"{money}/M reserved", f"{money}/M used", "figures", "outcome",
    )  # fmt: skip


def judged(comparison: HardwareComparison) -> tuple[OfferRow, ...]:
    """The rows with figures."""
    return tuple(row for row in comparison.rows if row.sizing is not None)


def unjudged(comparison: HardwareComparison) -> tuple[str, ...]:
    """The offers without figures, by their reason."""
    found: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.sizing is None:
            found.setdefault(row.why, []).append(row.name)
    return tuple(f"{'; '.join(names)}: {why}" for why, names in found.items())


def origin_text(row: OfferRow) -> str:
    """Where the figures of a row come from; of Inferentia with the sentence that nothing was run."""
    if row.evidence is None:
        return ""
    return f"{row.evidence.origin.value}{f', {NOT_RUN}' if NOT_RUN in row.offer.caveats else ''}"


def cells(row: OfferRow) -> tuple[str, ...]:
    """The cells of one row, in the order of `heads`."""
    name, cores = row.offer.hardware_class, str(row.offer.cores)
    sizing, evidence, node = row.sizing, row.evidence, row.node
    if sizing is None or evidence is None or node is None:
        return (name, cores, "", "", "", "", "", "", "", "", "", row.why)
    return (
        name,
        cores,
        evidence.plan,
        _span(short(sizing.p95_mean), short(sizing.p95_peak)),
        _span(str(sizing.replicas_mean), str(sizing.replicas_peak)),
        node.name,
        f"{sizing.reserved_per_month:,.0f}{_range(row)}",
        f"{sizing.used_per_month:,.0f}",
        f"{sizing.reserved_per_million:.3g}",
        f"{sizing.used_per_million:.3g}",
        origin_text(row),
        row.why,
    )


def _span(mean: str, peak: str) -> str:
    """Of the mean and of the peak; once if they are equal."""
    return mean if mean == peak else f"{mean} to {peak}"


def _range(row: OfferRow) -> str:
    """The interval of the reserved cost; empty where it has one value."""
    low, high = cost_interval(row)
    return "" if math.isclose(low, high) else f" ({low:,.0f} to {high:,.0f})"


def cost_interval(row: OfferRow) -> tuple[float, float]:
    """Lowest and highest reserved cost of a month within the interval of the evidence; the row must have a sizing."""
    found = [one.reserved_per_month for one in (row.sizing, row.slow, row.fast) if one is not None]
    return min(found), max(found)


MOST_NAMED = 3
"""More classes than this with the same caveat are counted, not named."""


def caveats(comparison: HardwareComparison) -> tuple[str, ...]:
    """What limits the figures, by class, each once."""
    found: dict[str, list[str]] = {}
    for row in comparison.rows:
        for text in (*row.offer.caveats, *(row.evidence.caveats if row.evidence else ())):
            classes = found.setdefault(text, [])
            if row.offer.hardware_class not in classes:
                classes.append(row.offer.hardware_class)
    return tuple(
        f"{', '.join(classes) if len(classes) <= MOST_NAMED else f'{len(classes)} classes'}: {text}"
        for text, classes in found.items()
    )


def traced_texts(comparison: HardwareComparison) -> tuple[str, ...]:
    """A sentence for each row under the trace."""
    sign, found = currency_sign(comparison.currency), []
    for one in comparison.traced:
        named = {"on_demand": "on demand", "spot": "spot", "reserved": "reserved for the most"}
        costs = ", ".join(f"{sign}{cost:,.0f} {named[kind]}" for kind, cost in one.costs.items() if cost is not None)
        by_hour = " ".join(f"{mean:.1f}".removesuffix(".0") for mean in one.by_hour)
        end = " (in the middle)" if one.row.is_likely else " (at the slow end)" if one.row.is_rough else ""
        found.append(
            f"{one.row.name}{end}: {one.late_share:.2%} late, {one.replica_hours:,.1f} replica-hours in "
            f"{one.hours:,.3g} h, at most {counted(one.most_replicas, 'replica')}; a month: {costs}\n"
            f"replicas by hour: {by_hour}"
        )
    return tuple(found)


def _load_json(comparison: HardwareComparison) -> dict[str, Any]:
    load = comparison.load
    return {
        "mean_requests_per_second": load.mean,
        "peak_requests_per_second": load.peak,
        "p95_milliseconds": load.p95_milliseconds,
        "headroom": load.headroom,
        "max_replicas": load.most_replicas,
    }


def _sizing_json(sizing: Sizing | None) -> dict[str, Any] | None:
    if sizing is None:
        return None
    return {name: _rounded(value) for name, value in vars(sizing).items()}


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def as_dict(comparison: HardwareComparison) -> dict[str, Any]:
    """The whole comparison as JSON values."""
    return {
        "load": _load_json(comparison),
        "currency": comparison.currency,
        "chosen": next((index for index, row in enumerate(comparison.rows) if row is comparison.best), None),
        "likely": next((index for index, row in enumerate(comparison.rows) if row.is_likely), None),
        "nearest": comparison.nearest,
        "notes": list(comparison.notes),
        "caveats": list(caveats(comparison)),
        "trace": [
            {
                "hardware_class": one.row.offer.hardware_class,
                "cores": one.row.offer.cores,
                "late_share": _rounded(one.late_share),
                "replica_hours": _rounded(one.replica_hours),
                "replicas_by_hour": [round(mean, 2) for mean in one.by_hour],
                "most_replicas": one.most_replicas,
                "per_month": {kind: _rounded(cost) for kind, cost in one.costs.items()},
            }
            for one in comparison.traced
        ],
        "rows": [
            {
                "hardware_class": row.offer.hardware_class,
                "cores": row.offer.cores,
                "feasible": row.is_feasible,
                "why": row.why,
                "plan": row.evidence.plan if row.evidence else None,
                "node": row.node.name if row.node else None,
                "figures": _sizing_json(row.sizing),
                "at_slow_end": _sizing_json(row.slow),
                "at_fast_end": _sizing_json(row.fast),
                "evidence": as_json(row.evidence) if row.evidence else None,
                "caveats": list(row.offer.caveats),
            }
            for row in comparison.rows
        ],
    }


def json_text(comparison: HardwareComparison) -> str:
    """`as_dict`, as indented text."""
    return json.dumps(as_dict(comparison), indent=2, ensure_ascii=False) + "\n"


def csv_text(comparison: HardwareComparison) -> str:
    """A line for each row, with `COLUMNS`; figures are empty where there are none."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in comparison.rows:
        sizing, evidence = row.sizing, row.evidence
        values: list[Any] = [row.offer.hardware_class, row.offer.cores, str(row.is_feasible).lower()]
        if sizing is None or evidence is None or row.node is None:
            values += [""] * (len(COLUMNS) - len(values) - 2)
        else:
            low, high = cost_interval(row)
            values += [
                evidence.plan, row.node.name, _rounded(sizing.p95_mean), _rounded(sizing.p95_peak),
                _rounded(sizing.capacity), sizing.replicas_mean, sizing.replicas_peak,
                _rounded(sizing.reserved_per_month), _rounded(sizing.used_per_month),
                _rounded(sizing.reserved_per_million), _rounded(sizing.used_per_million), _rounded(low),
                _rounded(high), origin_text(row), evidence.basis,
            ]  # fmt: skip
        writer.writerow([*values, row.why, comparison.currency])
    return buffer.getvalue()


def headline(comparison: HardwareComparison) -> str:
    """The outcome in a sentence."""
    load, best = comparison.load, comparison.best
    rates = f"{round(load.mean, 2):g} requests/s, {round(load.peak, 2):g} at the peak"
    asked = f"{rates}, p95 within {load.p95_milliseconds:g} ms"
    if best is None:
        known = any(row.sizing is not None and not row.offer.not_chosen for row in comparison.rows)
        outcome = "Nothing surely meets the objective" if comparison.likely else "Nothing meets the objective"
        return f"{outcome if known else 'No class can be chosen'} ({asked}); {comparison.nearest}"
    return f"{_bought(best, comparison.currency)} ({asked})"


def likely_text(comparison: HardwareComparison) -> str:
    """The likely row in a sentence, and the command that decides; empty without one."""
    row = comparison.likely
    return "" if row is None else f"{_bought(row, comparison.currency)}; {row.why.removeprefix('likely: ')}"


def _bought(row: OfferRow, currency: str) -> str:
    assert row.sizing is not None  # noqa: S101 - chosen and likely rows have figures
    assert row.node is not None  # noqa: S101
    assert row.evidence is not None  # noqa: S101
    sizing, sign = row.sizing, currency_sign(currency)
    replicas = _span(str(sizing.replicas_mean), str(sizing.replicas_peak))
    nodes = "" if row.node.is_share else f" on {math.ceil(sizing.replicas_peak / row.node.replicas)} {row.node.name}"
    return (
        f"{row.name}, {row.evidence.plan} ({origin_text(row)}): "
        f"{counted(replicas, 'replica')}{nodes}, p95 {short(sizing.p95_peak)} ms at the peak, "
        f"{sign}{sizing.reserved_per_month:,.0f} a month reserved{_range(row)}, {sign}{sizing.used_per_month:,.0f} used"
    )


def chart(comparison: HardwareComparison) -> str:
    """Reserved cost of a month over the p95 at the peak, both logarithmic; empty if no row has figures."""
    drawn = [
        (row, row.sizing) for row in comparison.rows if row.sizing is not None and row.sizing.reserved_per_month > 0
    ]
    if not drawn:
        return ""
    limit = comparison.load.p95_milliseconds
    x = log_scale([*(sizing.p95_peak for _, sizing in drawn), limit], LEFT, WIDTH - RIGHT)
    costs = [value for row, _ in drawn for value in cost_interval(row)]
    y = log_scale(costs, HEIGHT - BOTTOM, TOP, margin=0.08)
    ticks = log_ticks(y.low, y.high)
    if len(ticks) < 2:
        ticks = linear_ticks(y.low, y.high, most=4)
    sign = currency_sign(comparison.currency)
    parts = [
        y_axis(y, ticks, f"{sign.strip()} a month, reserved"),
        x_axis(x, log_ticks(x.low, x.high), "p95 ms at the peak"),
    ]
    at = x(limit)
    parts.append(
        f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="limit-label" text-anchor="middle" x="{at:.1f}" y="{TOP - 6}">objective</text>'
    )
    styles = {name: index for index, name in enumerate(dict.fromkeys(row.offer.hardware_class for row, _ in drawn))}
    best = comparison.best
    for row, sizing in drawn:
        low, high = cost_interval(row)
        px, py = x(sizing.p95_peak), y(sizing.reserved_per_month)
        kind = "chosen" if best is not None and row.offer is best.offer else "" if row.is_feasible else "out"
        title = f"{row.name}: {short(sizing.p95_peak)} ms, {sign}{sizing.reserved_per_month:,.0f} a month; {row.why}"
        parts.append(
            f'<line class="whisker" x1="{px:.1f}" x2="{px:.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}"/>'
            + marker(styles[row.offer.hardware_class], px, py, size=4.5, classes=kind, title=title)
            + f'<text x="{px + 7:.1f}" y="{py + 4:.1f}">{escape(row.name)}</text>'
        )
    return svg("Cost of a month over p95 latency", parts)


def html_page(comparison: HardwareComparison, *, title: str) -> str:
    """The comparison as a page."""
    rows = (_table_row(comparison, row) for row in judged(comparison))
    lists = {
        "Under the trace": traced_texts(comparison),
        "Without figures": unjudged(comparison),
        "Limits of the figures": caveats(comparison),
        "Notes": comparison.notes,
        "Sources": _sources(comparison),
    }
    likely = likely_text(comparison)
    sentences = [headline(comparison), *([f"Likely: {likely}"] if likely else [])]
    return document(
        title,
        header(title, "".join(f'<p class="sentence">{escape(text)}</p>' for text in sentences))
        + card("Cost over latency", chart(comparison), note="Lines are the intervals of the figures.")
        + card("Hardware", table(heads(comparison), rows))
        + "".join(card(name, bullets(texts)) for name, texts in lists.items() if texts),
    )


def _table_row(comparison: HardwareComparison, row: OfferRow) -> str:
    best = comparison.best
    kind = "chosen" if best is not None and row.offer is best.offer else "" if row.is_feasible else "out"
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>"


def _sources(comparison: HardwareComparison) -> tuple[str, ...]:
    return tuple(f"{row.name}: {row.evidence.basis}" for row in comparison.rows if row.evidence is not None)
