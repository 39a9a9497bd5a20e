"""The report of an optimisation, from the manifest alone: one self-contained HTML file with the evidence for people.

Pure functions word the texts and rows that the template prints, and draw the charts (agreement against speed, capacity,
matrix products); `render_report` fills the template.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from penstock.capacity import CapacityCurve
from penstock.hardware import NOT_RUN
from penstock.manifest import CandidateFacts, GemmShare, Manifest, Metric, Outcome, served_latency
from penstock.recipe import EngineName, Plan
from penstock_report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    latency_chart,
    linear_scale,
    linear_ticks,
    log_scale,
    log_ticks,
    marker,
    polyline,
    short,
    svg,
    swatch,
    x_axis,
    x_name,
    y_axis,
)
from penstock_report.page import document

HEADLINE_LENGTHS = (32, 128)
"""The lengths whose speed-up is shown at the top, if they were measured."""
TABLE_LENGTHS = (8, 32, 128, 512)
OUTCOME_WORDS = {
    Outcome.CHOSEN: "chosen",
    Outcome.REFERENCE: "fp32, the judge",
    Outcome.SLOWER: "slower",
    Outcome.REJECTED: "rejected",
    Outcome.FAILED: "failed",
    Outcome.SKIPPED: "not tried",
}


@dataclass(frozen=True)
class Tile:
    """One figure at the top of the page."""

    figure: str
    meaning: str


@dataclass(frozen=True)
class LengthRow:
    """One length: the fp32 reference against the chosen plan. Milliseconds."""

    tokens: int
    reference: str
    chosen: str
    speed_up: str
    share: str
    """Of the matrix-product ceiling; empty when unknown."""


@dataclass(frozen=True)
class CandidateRow:
    """One line of the table of candidates."""

    name: str
    style: int
    outcome: str
    word: str
    reason: str
    metrics: tuple[tuple[str, bool], ...]
    """Wording and whether it passed."""
    latency: tuple[str, ...]
    """Milliseconds at the table's lengths; `-` where not measured."""
    facts: str
    """Batching, fused nodes, size, build time."""


def lengths_shown(manifest: Manifest) -> tuple[int, ...]:
    """The lengths of the candidates' table: the usual ones, as far as they were measured, else a spread of those."""
    measured = sorted({point.tokens for one in manifest.candidates for point in one.latency})
    usual = tuple(length for length in TABLE_LENGTHS if length in measured)
    if len(usual) >= 3 or len(measured) <= len(usual):
        return usual
    # A model with a lower limit: its longest length replaces 512.
    return tuple(sorted({*usual, measured[-1]}))


def of_outcome(manifest: Manifest, outcome: Outcome) -> CandidateFacts | None:
    """The first candidate with this outcome."""
    return next((one for one in manifest.candidates if one.outcome is outcome), None)


def chosen_candidate(manifest: Manifest) -> CandidateFacts | None:
    """The candidate that is served; the reference when nothing beat it."""
    return of_outcome(manifest, Outcome.CHOSEN) or of_outcome(manifest, Outcome.REFERENCE)


def reference_candidate(manifest: Manifest) -> CandidateFacts | None:
    """The fp32 graph, also when it was chosen itself."""
    baseline = manifest.baseline.plan.recipe
    return next((one for one in manifest.candidates if one.recipe == baseline), None)


def has_first_looks(manifest: Manifest) -> bool:
    """Whether some candidates were settled by a first look, at fewer lengths and at another moment than the rest."""
    reference = reference_candidate(manifest)
    full = len(reference.latency) if reference else 0
    return any(0 < len(one.latency) < full for one in manifest.candidates)


def main_metric(manifest: Manifest) -> Metric | None:
    """The metric that the agreement chart shows: the first that the guard held the chosen candidate (or else any
    other) against, among those where 1 is perfect."""
    first = chosen_candidate(manifest)
    for candidate in (*([first] if first else []), *manifest.candidates):
        for metric in candidate.verdict.metrics if candidate.verdict else ():
            if metric.higher_is_better and metric.budget <= 1:
                return metric
    return None


def agreement(manifest: Manifest, candidate: CandidateFacts, metric: Metric | None) -> float | None:
    """The candidate's value of the main metric; 1 for the reference itself; None where it was not judged by it."""
    if metric is None:
        return None
    if candidate.recipe == manifest.baseline.plan.recipe:
        return 1.0
    metrics = candidate.verdict.metrics if candidate.verdict is not None else ()
    return next((one.value for one in metrics if one.name == metric.name), None)


def typical_speed_up(candidate: CandidateFacts, reference: CandidateFacts | None) -> float | None:
    """Geometric mean over the lengths that both were measured at."""
    ours, theirs = candidate.milliseconds, reference.milliseconds if reference else {}
    common = [theirs[tokens] / ours[tokens] for tokens in ours.keys() & theirs.keys() if ours[tokens] > 0]
    if not common:
        return None
    return float(math.prod(common) ** (1 / len(common)))


def series(manifest: Manifest) -> list[Series]:
    """The candidates as the charts draw them, in the order of the table."""
    reference = reference_candidate(manifest)
    metric = main_metric(manifest)
    emphasis = {Outcome.CHOSEN: "chosen", Outcome.REFERENCE: "reference", Outcome.SLOWER: "other"}
    return [
        Series(
            name=one.recipe.name,
            style=position,
            latency=one.milliseconds,
            emphasis=emphasis.get(one.outcome, "out"),
            speed_up=typical_speed_up(one, reference),
            agreement=agreement(manifest, one, metric),
        )
        for position, one in enumerate(manifest.candidates)
    ]


def headline(manifest: Manifest) -> str:
    """What was chosen, in one sentence."""
    plan = manifest.chosen.plan
    cpu = manifest.cpu.model_name
    cores = f"{manifest.cores} core{'s' if manifest.cores > 1 else ''}"
    where = f"on {cores} of {cpu} ({manifest.cpu.isa.value})"
    if plan.short is not None:
        short = f"rows of up to {plan.short.longest_tokens} tokens by {plan.short.recipe.name}"
        return f"{plan.recipe.name} is served {where}, {short}."
    if plan.recipe.engine is EngineName.NEURON:
        return f"{plan.recipe.name} is to be served on {manifest.cores} NeuronCores, {NOT_RUN}."
    if manifest.serves_fp32:
        others = [one for one in manifest.candidates if one.recipe != plan.recipe]
        return f"The fp32 graph itself is served {where}: {why_fp32(others)}."
    return f"{plan.recipe.name} is served {where}."


def why(manifest: Manifest) -> str:
    """The reason of the choice, and how the others fared."""
    chosen = chosen_candidate(manifest)
    counts = {
        word: sum(one.outcome is outcome for one in manifest.candidates)
        for outcome, word in (
            (Outcome.SLOWER, "slower"),
            (Outcome.REJECTED, "outside the accuracy budget"),
            (Outcome.FAILED, "failed"),
            (Outcome.SKIPPED, "not tried"),
        )
    }
    others = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    reason = (chosen.reason if chosen else "").rstrip(".")
    sentence = f"{reason[:1].upper()}{reason[1:]}." if reason else ""
    return f"{sentence} Of the other candidates: {others}." if others else sentence


def tiles(manifest: Manifest) -> list[Tile]:
    """The figures at the top."""
    found: list[Tile] = []
    metric, chosen = main_metric(manifest), chosen_candidate(manifest)
    lengths = [length for length in HEADLINE_LENGTHS if length in manifest.speed_up] or sorted(manifest.speed_up)[-1:]
    of_what = "at {} tokens"
    if chosen is not None and chosen.generation is not None:
        lengths, of_what = lengths[-1:], "for a prompt of {} tokens"
        if manifest.typical_speed_up is not None:
            found.append(Tile(f"{manifest.typical_speed_up:.1f}×", "as many tokens/s of an answer as fp32, one client"))
    found += [
        Tile(f"{manifest.speed_up[length]:.1f}×", f"as fast as fp32 {of_what.format(length)}") for length in lengths
    ]
    value = agreement(manifest, chosen, metric) if chosen else None
    if metric is not None and value is not None:
        found.append(Tile(f"{value:.4f}", f"{metric.name.replace('_', ' ')} to fp32 (budget {metric.budget:g})"))
    rate = manifest.capacity.requests_per_second
    limit = manifest.capacity.p95_objective_milliseconds
    if rate is not None and limit is not None:
        found.append(Tile(f"{short(rate)}/s", f"requests within p95 {short(limit)} ms, one replica over HTTP"))
    if (best := manifest.token_capacity.within) is not None:
        clients = "client" if best.clients == 1 else "clients"
        tokens = f"{short(best.tokens_per_second)}/s"
        found.append(Tile(tokens, f"output tokens, one replica with {best.clients} {clients}"))
    return found


def length_rows(manifest: Manifest) -> list[LengthRow]:
    """fp32 against what serves each length."""
    found = reference_candidate(manifest)
    reference = found.milliseconds if found else {}
    served = served_latency(manifest.chosen.plan, manifest.candidates)
    chosen = {point.tokens: point.p50_milliseconds for point in served}
    shares = {one.tokens: one.share for one in manifest.gemm}
    return [
        LengthRow(
            tokens=tokens,
            reference=short(reference[tokens]),
            chosen=short(chosen[tokens]),
            speed_up=f"{reference[tokens] / chosen[tokens]:.2f}×",
            share=f"{shares[tokens]:.0%}" if tokens in shares else "",
        )
        for tokens in sorted(reference.keys() & chosen.keys())
        if chosen[tokens] > 0
    ]


def candidate_rows(manifest: Manifest, lengths: Sequence[int]) -> list[CandidateRow]:
    """All candidates, in the order in which they were tried."""
    return [
        CandidateRow(
            name=one.recipe.name,
            style=position,
            outcome=one.outcome.value,
            word=OUTCOME_WORDS[one.outcome],
            reason=one.reason,
            metrics=tuple(
                (f"{metric.name.replace('_', ' ')} {metric.value:.4g} ({_bound(metric)})", metric.passed)
                for metric in (one.verdict.metrics if one.verdict else ())
            ),
            latency=tuple(short(one.milliseconds[at]) if at in one.milliseconds else "-" for at in lengths),
            facts=_facts(one),
        )
        for position, one in enumerate(manifest.candidates)
    ]


def plan_text(plan: Plan) -> str:
    """A plan in full, such as `openvino-int8, 2x1 threads, padded up to 8 rows / 512 tokens / 15 % padding,
    all cores from 64 tokens`."""
    parts = [plan.summary]
    if plan.max_batch_rows > 1:
        padding = f" / {plan.max_padding_share:.0%} padding" if plan.max_padding_share else ""
        parts.append(
            f"{plan.batching.value} up to {plan.max_batch_rows} rows / {plan.max_batch_tokens} tokens{padding}"
        )
    else:
        parts.append("one row a run")
    if plan.streams > 1 and plan.may_run_wide:
        parts.append(_wide_text(plan))
    short = plan.of_short_rows
    if plan.short is not None and short is not None:
        how = plan_text(short).removeprefix(f"{short.summary}, ")
        parts[0] = plan.unrouted.summary
        return f"{', '.join(parts)}; up to {plan.short.longest_tokens} tokens {short.recipe.name}, {how}"
    return ", ".join(parts)


def _wide_text(plan: Plan) -> str:
    """Whose rows get all cores, such as `all cores from 64 tokens, from 8 for a client alone`."""
    if plan.wide_from_tokens is None:
        return f"all cores from {plan.alone_wide_from} tokens for a client alone"
    alone = "" if plan.alone_wide_from == plan.wide_from_tokens else f", from {plan.alone_wide_from} for a client alone"
    return f"all cores from {plan.wide_from_tokens} tokens{alone}"


def _bound(metric: Metric) -> str:
    return f"{'at least' if metric.higher_is_better else 'at most'} {metric.budget:g}"


def _facts(candidate: CandidateFacts) -> str:
    parts = [", ".join((candidate.recipe.precision.value, *candidate.recipe.options))]
    if candidate.verdict is not None and candidate.verdict.batching:
        parts.append(f"batching {candidate.verdict.batching}")
    if candidate.verdict is not None and candidate.verdict.texts:
        parts.append(f"judged on {candidate.verdict.texts} texts")
    if candidate.fused_nodes:
        parts.append("fused " + ", ".join(f"{count} {name}" for name, count in sorted(candidate.fused_nodes.items())))
    if (speed := candidate.generation) is not None:
        parts.append(
            f"prompt of {speed.prompt_tokens} tokens in {speed.first_token_milliseconds:.0f} ms, each further token in "
            f"{speed.next_token_p50_milliseconds:.1f} ms (p95 {speed.next_token_p95_milliseconds:.1f}), "
            f"{speed.tokens_per_second:.0f} tokens/s with {speed.clients} clients"
        )
    if candidate.size_bytes:
        parts.append(f"{candidate.size_bytes / 1e6:.1f} MB")
    if candidate.build_seconds:
        parts.append(f"built in {candidate.build_seconds:.1f} s")
    return " · ".join(parts)


def why_fp32(others: Sequence[CandidateFacts]) -> str:
    """Why none of the others is served."""
    outcomes = {one.outcome for one in others} - {Outcome.SKIPPED}
    if any(one.reason_code.is_out_of_time for one in others):
        return "the best so far, as the time budget ended before all others were measured"
    if Outcome.SLOWER in outcomes:
        return "no candidate within the accuracy budget beats fp32 beyond the noise"
    if outcomes == {Outcome.REJECTED}:
        return "no other candidate is within the accuracy budget"
    if outcomes == {Outcome.FAILED}:
        return "every other candidate failed"
    if outcomes:
        return "every other candidate failed or is outside the accuracy budget"
    return "no other candidate was tried"


def render_report(manifest: Manifest) -> str:
    """The whole page as HTML: no scripts, and nothing loaded from anywhere."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        files("penstock_optimizer.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    )
    drawn = series(manifest)
    metric = main_metric(manifest)
    lengths = lengths_shown(manifest)
    html = template.render(
        manifest=manifest,
        headline=headline(manifest),
        why=why(manifest),
        tiles=tiles(manifest),
        plan=plan_text(manifest.chosen.plan),
        length_rows=length_rows(manifest),
        lengths=lengths,
        candidates=candidate_rows(manifest, lengths),
        plans=[(plan_text(trial.plan), trial) for trial in manifest.trials],
        # The charts escape the texts in them.
        swatches=[Markup(swatch(one)) for one in drawn],  # noqa: S704
        latency_chart=Markup(latency_chart(drawn)),  # noqa: S704
        agreement_chart=Markup(  # noqa: S704
            agreement_chart(drawn, metric=metric.name, budget=metric.budget) if metric is not None else ""
        ),
        metric=metric.name.replace("_", " ") if metric is not None else "",
        short=short,
        capacity_chart=Markup(capacity_chart(manifest.capacity)),  # noqa: S704
        gemm_chart=Markup(gemm_chart(manifest.gemm)),  # noqa: S704
        first_looks=has_first_looks(manifest),
        tried=sum(one.outcome is not Outcome.SKIPPED for one in manifest.candidates),
    )
    return document(f"{manifest.model.source} · Penstock report", html)


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
