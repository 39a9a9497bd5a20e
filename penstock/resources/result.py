"""The result of an optimisation in a status: plan, accuracy, speed, capacity, processor.

The artefact has all measurements (`penstock.manifest`, `report.html`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field

from penstock.capacity import CapacityCurve, CapacityPoint, TokenCurve, TokenPoint
from penstock.hardware import CpuIdentity, Isa
from penstock.manifest import CandidateFacts, LatencyPoint, Manifest, Outcome, served_latency
from penstock.recipe import Batching, EngineName, Plan, Precision
from penstock.resources.base import NO_SCHEMA_DEFAULT, Facts
from penstock.resources.endpoint_parts.vector_space import IndexCertificate
from penstock.resources.fields.text_fields import Digest, ShortText, Uri


class ArtefactReference(Facts):
    """An artefact in the store."""

    digest: Digest = Field(description="sha256 of its manifest.json, which names every file with its own.")
    uri: Uri = Field(description="Its URI in the store.")
    bytes: int | None = Field(default=None, ge=0, description="The size of all its files.")


class PlanFacts(Facts):
    """The plan that was chosen."""

    summary: ShortText = Field(description="In one line, such as `openvino-int8, 2x1 threads`.")
    engine: EngineName
    precision: Precision
    options: tuple[Annotated[str, Field(max_length=64)], ...] = Field(
        default=(), max_length=8, description="Choices within the precision, such as `per-channel`."
    )
    streams: int = Field(ge=1, description="Runs that may execute at the same time.")
    threads_per_stream: int = Field(ge=1, description="Threads of one run.")
    batching: Batching = Field(description="Which rows may share a run.")

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The facts of a plan."""
        recipe = plan.recipe
        return cls(
            summary=cut(plan.summary, 256),
            engine=recipe.engine,
            precision=recipe.precision,
            options=tuple(cut(option, 64) for option in recipe.options[:8]),
            streams=plan.streams,
            threads_per_stream=plan.threads_per_stream,
            batching=plan.batching,
        )


class MetricFacts(Facts):
    """One measured agreement with the fp32 model."""

    name: Annotated[str, Field(max_length=64)] = Field(description="Such as `min_cosine`.")
    value: float = Field(description="What was measured.")
    lower: float | None = Field(default=None, description="Lower end of the 95 % confidence interval.")
    budget: float = Field(description="The budget for it.")


class AccuracyFacts(Facts):
    """The accuracy of the chosen plan, as measured by the guard."""

    within_budget: bool = Field(description="Whether the answers are within the accuracy budget.")
    reason: ShortText = Field(default="", description="In one sentence.")
    texts: int = Field(default=0, ge=0, description="Texts that were judged.")
    metrics: tuple[MetricFacts, ...] = Field(default=(), max_length=16, description="What was measured of the answers.")


class LatencyFacts(Facts):
    """The time of one run of one text."""

    tokens: int = Field(ge=1, description="The length of the text.")
    p50_milliseconds: float = Field(ge=0, description="Its median time, milliseconds.")
    speed_up: float | None = Field(default=None, ge=0, description="Time of the fp32 graph over this time.")


class RateFacts(Facts):
    """One measured rate of one replica."""

    requests_per_second: float = Field(gt=0, description="Arrivals, at random.")
    completed_per_second: float = Field(ge=0, description="Answers.")
    p95_milliseconds: float = Field(ge=0, description="95 % of them came within this, milliseconds.")
    refused_share: float = Field(default=0.0, ge=0, le=1, description="The share that was refused.")


class CapacityFacts(Facts):
    """What one replica takes, through the real HTTP server."""

    requests_per_second: float | None = Field(
        default=None, ge=0, description="The highest rate within the objective; none: not even the lowest is."
    )
    p95_objective_milliseconds: float | None = Field(default=None, gt=0, description="The p95 that it keeps.")
    points: tuple[RateFacts, ...] = Field(default=(), max_length=16, description="Measured rates, rising.")
    tokens_per_request: float | None = Field(
        default=None, gt=0, description="Mean of the tokens computed for a request, special ones included."
    )
    provisional: bool = Field(
        default=False,
        description="true: of published figures for models of this size. A pod measures it before it is ready.",
        json_schema_extra=NO_SCHEMA_DEFAULT,
    )

    @classmethod
    def of(cls, curve: CapacityCurve, *, provisional: bool = False) -> Self:
        """The facts of a curve."""
        points = sorted(curve.points, key=lambda point: point.arrivals_per_second)
        rate = curve.requests_per_second
        return cls(
            requests_per_second=None if rate is None else _rounded(rate),
            p95_objective_milliseconds=curve.p95_objective_milliseconds,
            tokens_per_request=None if curve.tokens_per_request is None else _rounded(curve.tokens_per_request),
            points=tuple(
                RateFacts(
                    requests_per_second=_rounded(point.arrivals_per_second),
                    completed_per_second=_rounded(point.completed_per_second),
                    p95_milliseconds=_rounded(point.p95_milliseconds),
                    refused_share=_rounded(point.refused_share),
                )
                for point in points[:16]
            ),
            provisional=provisional,
        )

    @property
    def is_measured(self) -> bool:
        """Whether the points were measured."""
        return bool(self.points) and not self.provisional

    @property
    def curve(self) -> CapacityCurve:
        """As the autoscaler takes it. p50 and p99 are in the manifest only: the p95 replaces both here."""
        points = tuple(
            CapacityPoint(
                arrivals_per_second=point.requests_per_second,
                completed_per_second=point.completed_per_second,
                p50_milliseconds=point.p95_milliseconds,
                p95_milliseconds=point.p95_milliseconds,
                p99_milliseconds=point.p95_milliseconds,
                refused_share=point.refused_share,
                samples=0,
            )
            for point in self.points
        )
        return CapacityCurve(
            points=points,
            p95_objective_milliseconds=self.p95_objective_milliseconds,
            tokens_per_request=self.tokens_per_request,
        )


class TokenRateFacts(Facts):
    """One replica with a number of clients, each of which sends its next request after an answer."""

    clients: int = Field(ge=1, description="Clients at the same time.")
    requests_per_second: float = Field(gt=0, description="Answers.")
    tokens_per_second: float = Field(gt=0, description="Output tokens of all answers.")
    first_token_p95_milliseconds: float = Field(gt=0, description="p95 of the time to the first token.")
    next_token_p95_milliseconds: float = Field(gt=0, description="p95 of the time between two tokens.")


class TokenCapacityFacts(Facts):
    """What one replica of text generation takes, through the scheduler that serves."""

    tokens_per_second: float | None = Field(
        default=None, ge=0, description="Most output tokens per second within both limits; none: one client is over."
    )
    first_token_objective_milliseconds: float | None = Field(
        default=None, gt=0, description="The limit of p95 of the time to the first token."
    )
    next_token_objective_milliseconds: float | None = Field(
        default=None, gt=0, description="The limit of p95 of the time between two tokens."
    )
    points: tuple[TokenRateFacts, ...] = Field(default=(), max_length=16, description="By rising number of clients.")

    @property
    def curve(self) -> TokenCurve:
        """As the autoscaler takes it."""
        return TokenCurve(
            points=tuple(TokenPoint(samples=1, **point.model_dump()) for point in self.points),
            first_token_objective_milliseconds=self.first_token_objective_milliseconds,
            next_token_objective_milliseconds=self.next_token_objective_milliseconds,
        )


class CpuFacts(Facts):
    """The processor that all this was measured on."""

    vendor: str = Field(max_length=32, description="Such as GenuineIntel; on Arm the implementer.")
    family: int = Field(description="On Arm the architecture version.")
    model: int = Field(description="On Arm the part number.")
    stepping: int = Field(description="On Arm the revision.")
    model_name: str = Field(max_length=128, description="As /proc/cpuinfo has it.")
    isa: Isa

    @classmethod
    def of(cls, cpu: CpuIdentity) -> Self:
        """The facts of an identity."""
        return cls(
            vendor=cut(cpu.vendor, 32),
            family=cpu.family,
            model=cpu.model,
            stepping=cpu.stepping,
            model_name=cut(cpu.model_name, 128),
            isa=cpu.isa,
        )

    @property
    def identity(self) -> CpuIdentity:
        """As an identity, without the flags."""
        return CpuIdentity(
            vendor=self.vendor,
            family=self.family,
            model=self.model,
            stepping=self.stepping,
            model_name=self.model_name,
            isa=self.isa,
        )


class RejectedFacts(Facts):
    """A candidate that is not served."""

    recipe: str = Field(max_length=128, description="Engine, precision and options.")
    outcome: Outcome = Field(description="What became of it.")
    reason: ShortText = Field(default="", description="Why.")


class Result(Facts):
    """The result of an optimisation, with the evidence."""

    plan: PlanFacts
    accuracy: AccuracyFacts
    latency: tuple[LatencyFacts, ...] = Field(default=(), max_length=32, description="Times of one run, by length.")
    speed_up: float | None = Field(
        default=None, ge=0, description="Against fp32: the geometric mean over the measured lengths."
    )
    capacity: CapacityFacts = CapacityFacts()
    token_capacity: TokenCapacityFacts | None = Field(
        default=None, description="Only of text generation, instead of `capacity`."
    )
    cpu: CpuFacts
    cores: int = Field(ge=1, description="The cores that it was measured on.")
    pinned: bool | None = Field(default=None, description="Whether the job had the cores for itself.")
    objective: ShortText = Field(default="", description="What it was optimised for.")
    workload: ShortText = Field(default="", description="The lengths that it was measured with.")
    model_digest: str = Field(default="", max_length=80, description="sha256 of the model's own files.")
    model_resolved: str = Field(
        default="",
        max_length=512,
        description="The model's source with the commit or digest that its branch or tag had at the download.",
    )
    parameters: int = Field(default=0, ge=0, description="Weights.")
    max_tokens: int = Field(default=1, ge=1, description="The longest input that is served.")
    index: IndexCertificate | None = Field(
        default=None, description="How vectors fit the index of spec.vectorSpace; none: not compared."
    )
    resident_bytes: int | None = Field(default=None, ge=0, description="Memory of the serving process under load.")
    seconds: float = Field(default=0, ge=0, description="Duration of the optimisation.")
    cut_short: bool = Field(default=False, description="true when the time budget ended before everything was tried.")
    rejected: tuple[RejectedFacts, ...] = Field(
        default=(), max_length=32, description="Candidates that are not served, and why."
    )
    findings: tuple[ShortText, ...] = Field(
        default=(), max_length=16, description="What limits the figures, such as shared cores or noise."
    )
    left_out: bool = Field(default=False, description="true: the artefact's report has more than fits here.")

    @property
    def requests_per_second(self) -> float | None:
        """Requests per second that one replica takes within the objective, of any task; None: not known."""
        if self.token_capacity is None:
            return self.capacity.requests_per_second
        within = self.token_capacity.curve.within
        return None if within is None else within.requests_per_second

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """The result of a manifest."""
        chosen = _candidate(manifest, Outcome.CHOSEN) or _candidate(manifest, Outcome.REFERENCE)
        short = manifest.chosen.plan.short
        short_recipe = short.recipe if short is not None else None
        provisional = bool(manifest.provisional_capacity.points) and not manifest.capacity.points
        return cls(
            plan=PlanFacts.of(manifest.chosen.plan),
            accuracy=_accuracy(chosen),
            latency=_latency(served_latency(manifest.chosen.plan, manifest.candidates), manifest.speed_up),
            speed_up=None if manifest.typical_speed_up is None else _rounded(manifest.typical_speed_up),
            capacity=CapacityFacts.of(
                manifest.provisional_capacity if provisional else manifest.capacity, provisional=provisional
            ),
            token_capacity=_token_capacity(manifest.token_capacity),
            cpu=CpuFacts.of(manifest.cpu),
            cores=manifest.cores,
            pinned=manifest.pinned,
            objective=cut(manifest.objective, 256),
            workload=cut(manifest.workload, 256),
            model_digest=cut(manifest.model.digest, 80),
            model_resolved=cut(manifest.model.resolved, 512),
            parameters=manifest.model.parameters,
            max_tokens=manifest.model.max_tokens,
            index=None if manifest.index is None else manifest.index.model_copy(update={"hardest": ()}),
            resident_bytes=manifest.serving_rss_bytes,
            seconds=_rounded(manifest.seconds),
            cut_short=manifest.cut_short,
            rejected=tuple(
                RejectedFacts(recipe=cut(one.recipe.name, 128), outcome=one.outcome, reason=cut(one.reason, 256))
                for one in manifest.candidates
                if one.outcome not in {Outcome.CHOSEN, Outcome.REFERENCE} and one.recipe != short_recipe
            )[:32],
            findings=tuple(cut(finding, 256) for finding in manifest.findings[:16]),
        )


def cut(text: str, characters: int) -> str:
    """The text, or its beginning with an ellipsis."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def _candidate(manifest: Manifest, outcome: Outcome) -> CandidateFacts | None:
    return next((one for one in manifest.candidates if one.outcome is outcome), None)


def _rounded(value: float) -> float:
    """Four significant digits, more than the precision of any measurement here."""
    return float(f"{value:.4g}")


def _accuracy(chosen: CandidateFacts | None) -> AccuracyFacts:
    if chosen is None or chosen.verdict is None:
        return AccuracyFacts(within_budget=True, reason="the fp32 graph itself is served")
    verdict = chosen.verdict
    return AccuracyFacts(
        within_budget=verdict.passed,
        reason=cut(verdict.reason, 256),
        texts=verdict.texts,
        metrics=tuple(
            MetricFacts(
                name=cut(metric.name, 64),
                value=_rounded(metric.value),
                lower=None if metric.lower is None else _rounded(metric.lower),
                budget=metric.budget,
            )
            for metric in verdict.metrics[:16]
        ),
    )


def _latency(points: Sequence[LatencyPoint], speed_up: dict[int, float]) -> tuple[LatencyFacts, ...]:
    return tuple(
        LatencyFacts(
            tokens=point.tokens,
            p50_milliseconds=_rounded(point.p50_milliseconds),
            speed_up=_rounded(speed_up[point.tokens]) if point.tokens in speed_up else None,
        )
        for point in points[:32]
    )


def _token_capacity(curve: TokenCurve) -> TokenCapacityFacts | None:
    if not curve.points:
        return None
    within = curve.within
    first, following = curve.first_token_objective_milliseconds, curve.next_token_objective_milliseconds
    return TokenCapacityFacts(
        tokens_per_second=None if within is None else _rounded(within.tokens_per_second),
        first_token_objective_milliseconds=None if first is None else _rounded(first),
        next_token_objective_milliseconds=None if following is None else _rounded(following),
        points=tuple(
            TokenRateFacts(
                clients=point.clients,
                requests_per_second=_rounded(point.requests_per_second),
                tokens_per_second=_rounded(point.tokens_per_second),
                first_token_p95_milliseconds=_rounded(point.first_token_p95_milliseconds),
                next_token_p95_milliseconds=_rounded(point.next_token_p95_milliseconds),
            )
            for point in curve.points[:16]
        ),
    )
