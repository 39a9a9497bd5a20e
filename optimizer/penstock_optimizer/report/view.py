"""The report of an optimisation, from the manifest alone: one self-contained HTML file with the evidence for people.

Pure functions word the texts and rows that the template prints; `render_report` fills the template.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from penstock.capacity import TokenCurve
from penstock.hardware import NOT_RUN
from penstock.manifest import CandidateFacts, Manifest, Metric, Outcome, served_latency
from penstock.recipe import EngineName, Plan
from penstock_optimizer.report.charts import agreement_chart, capacity_chart, gemm_chart
from penstock_report.charts import Series, latency_chart, short, swatch
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
class TokenSpeedRow:
    """One number of clients of text generation. Rates a second, p95 in milliseconds."""

    clients: int
    tokens: str
    requests: str
    first: str
    following: str
    kept: bool
    """Both times are within their limits."""
    best: bool
    """No other point within the limits has more tokens per second."""


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
    lengths = [length for length in HEADLINE_LENGTHS if length in manifest.speed_up] or sorted(manifest.speed_up)[-1:]
    found += [Tile(f"{manifest.speed_up[length]:.1f}×", f"as fast as fp32 at {length} tokens") for length in lengths]
    metric, chosen = main_metric(manifest), chosen_candidate(manifest)
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


def token_rows(curve: TokenCurve) -> list[TokenSpeedRow]:
    """The points of a capacity curve of text generation."""
    return [
        TokenSpeedRow(
            clients=point.clients,
            tokens=short(point.tokens_per_second),
            requests=short(point.requests_per_second),
            first=short(point.first_token_p95_milliseconds),
            following=short(point.next_token_p95_milliseconds),
            kept=curve.meets(point),
            best=point == curve.within,
        )
        for point in curve.points
    ]


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
    rows = []
    for position, one in enumerate(manifest.candidates):
        measured = one.milliseconds
        verdict = one.verdict
        rows.append(
            CandidateRow(
                name=one.recipe.name,
                style=position,
                outcome=one.outcome.value,
                word=OUTCOME_WORDS[one.outcome],
                reason=one.reason,
                metrics=tuple(
                    (f"{metric.name.replace('_', ' ')} {metric.value:.4g} ({_bound(metric)})", metric.passed)
                    for metric in (verdict.metrics if verdict else ())
                ),
                latency=tuple(short(measured[tokens]) if tokens in measured else "-" for tokens in lengths),
                facts=_facts(one),
            )
        )
    return rows


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
        token_rows=token_rows(manifest.token_capacity),
        capacity_chart=Markup(capacity_chart(manifest.capacity)),  # noqa: S704
        gemm_chart=Markup(gemm_chart(manifest.gemm)),  # noqa: S704
        first_looks=has_first_looks(manifest),
        tried=sum(one.outcome is not Outcome.SKIPPED for one in manifest.candidates),
    )
    return document(f"{manifest.model.source} · Penstock report", html)
