"""Evidence of what one replica takes: a capacity curve, where it comes from, and how exact it is.

Measured curves come from the manifests of artefacts, from OptimizedModels, and from a file of the user. Published
figures are closed loops: `curve_of_closed_loop` estimates a curve from one by a queueing formula. Text generation is
measured by number of clients: `curve_of_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.capacity import CapacityCurve, CapacityPoint, TokenCurve
from penstock.errors import SettingError, printable
from penstock.hardware import CpuIdentity
from penstock.manifest import Manifest
from penstock.resources.result import Result
from penstock_operator.decide import Service


class Origin(StrEnum):
    """Where a figure comes from; the most reliable first."""

    MEASURED_HERE = "measured here"
    """On this machine."""
    MEASURED_ON_CLASS = "measured on the class"
    """On another machine of the same hardware class."""
    GIVEN = "given"
    """From the user's file of measurements."""
    MEASURED_BY_PROJECT = "measured by the project"
    """On a machine of the same class, with the same kind of model; shipped with the planner."""
    PUBLISHED = "published"
    ESTIMATED = "estimated"


LEAST_NOISE = 0.05
"""A measured rate is taken to be no more exact than this share, also if repeated measurements agree better."""
UNKNOWN_NOISE = 0.10
"""For measurements without their noise, as in an OptimizedModel."""
CLOSED_LOOP_ERROR = 0.25
"""For a curve that a queueing formula gives, when no spread of the throughput was published."""


@dataclass(frozen=True)
class Interval:
    """Speed of the replica as factors of the figure: 0.9 to 1.1 is 10 % slower to 10 % faster."""

    low: float
    high: float

    @classmethod
    def around(cls, share: float) -> Interval:
        """A symmetric one; `share` under 1."""
        return cls(1 - share, 1 + share)

    def times(self, other: Interval) -> Interval:
        """Of a product of two figures."""
        return Interval(self.low * other.low, self.high * other.high)


@dataclass(frozen=True)
class Evidence:
    """What one replica on this many cores of a class takes."""

    hardware_class: str
    cores: int
    """Physical cores, NeuronCores or GPUs."""
    plan: str
    """What runs, in one line."""
    curve: CapacityCurve
    origin: Origin
    basis: str
    """Where exactly: artefact, machine, publication, or how it was estimated."""
    interval: Interval
    caveats: tuple[str, ...] = ()
    tokens_per_request: float | None = None
    """Only of text generation, where the p95 is of the time to the first token: mean output tokens of a request."""
    resident_bytes: int | None = None
    """Memory of a replica under load; None: not measured."""

    @property
    def is_rough(self) -> bool:
        """Whether it is judged at the slow end of its interval: estimates, publications, and whatever may be off by
        `CLOSED_LOOP_ERROR` or more."""
        return self.origin in {Origin.ESTIMATED, Origin.PUBLISHED} or self.interval.low <= 1 - CLOSED_LOOP_ERROR


def wider(curve: CapacityCurve, factor: float) -> CapacityCurve:
    """The curve of this many times as many cores: more requests at the same latencies. An estimate from above of the
    latency: a longer text may run on all cores."""
    return curve.model_copy(
        update={
            "points": tuple(
                point.model_copy(
                    update={
                        "arrivals_per_second": point.arrivals_per_second * factor,
                        "completed_per_second": point.completed_per_second * factor,
                    }
                )
                for point in curve.points
            )
        }
    )


UTILISATIONS = (0.05, 0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
"""Shares of the throughput at which `curve_of_closed_loop` gives points."""
P95_OF_EXPONENTIAL = -math.log(0.05)
"""The 95th percentile of an exponential distribution over its mean: 3.0."""


def curve_of_closed_loop(per_second: float, latency_milliseconds: float, *, batch: int = 1) -> CapacityCurve:
    """A capacity curve from a throughput (sequences/s) in a closed loop and the latency in it.

    By Little's law, c = throughput/batch * latency batches of `batch` sequences ran at the same time. They are servers
    with a constant service time T, and Poisson arrivals wait for them on average (Sakasegawa, 1977, for M/D/c)

        W = T/2c * u^(sqrt(2(c+1)) - 1) / (1 - u)

    at the utilisation u. Waiting times are taken to be exponential, so that their p95 is three times the mean, which is
    added to the whole published latency. From the rate c/T on, partly filled batches occupy all servers although the
    throughput is not reached: a request then also waits for the next begin of a batch, T/2c on average (Bailey, 1954:
    service in batches of up to `batch`), for the share 1 - 1/batch.

    ValueError unless the throughput and the latency are positive.
    """
    if per_second <= 0 or latency_milliseconds <= 0:
        raise ValueError("throughput and latency must be positive")
    servers = max(1.0, per_second / batch * latency_milliseconds / 1000)
    exponent = math.sqrt(2 * (servers + 1)) - 1
    points = []
    for used in UTILISATIONS:
        filled = min(1.0, used * batch) ** exponent * (1 - 1 / batch)
        wait = latency_milliseconds / (2 * servers) * (used**exponent / (1 - used) + filled)
        p95 = latency_milliseconds + P95_OF_EXPONENTIAL * wait
        points.append(
            CapacityPoint(
                arrivals_per_second=per_second * used,
                completed_per_second=per_second * used,
                p50_milliseconds=latency_milliseconds + wait,
                p95_milliseconds=p95,
                p99_milliseconds=p95 + wait,
                samples=0,
            )
        )
    return CapacityCurve(points=tuple(points))


def curve_of_tokens(curve: TokenCurve) -> CapacityCurve:
    """The curve of text generation by arrival rate, with the p95 of the time to the first token: as the autoscaler has
    it (`Service.from_tokens`), up to the rate at which both token times are within the objectives of the measurement.

    A replica that misses them with one client keeps up with no rate: its points count as refused.
    """
    service = Service.from_tokens(curve)
    if service is None:
        return CapacityCurve()
    points = zip(service.rates, service.p95_milliseconds, strict=True)
    return CapacityCurve(
        points=tuple(
            CapacityPoint(
                arrivals_per_second=rate,
                completed_per_second=rate,
                p50_milliseconds=p95,
                p95_milliseconds=p95,
                p99_milliseconds=p95,
                refused_share=0.0 if service.within_objective else 1.0,
                samples=0,
            )
            for rate, p95 in points
            if rate <= service.rate or not service.within_objective
        ),
        p95_objective_milliseconds=curve.first_token_objective_milliseconds,
    )


def _measured(capacity: CapacityCurve, tokens: TokenCurve) -> tuple[CapacityCurve, float | None, list[str]]:
    """The curve, output tokens of a request, and what limits the figures; of encoders or of text generation."""
    service = Service.from_tokens(tokens)
    if service is None:
        return capacity, None, []
    each = service.tokens_per_request
    caveats = ["p95 is of the time to the first token", tokens.summary]
    if each is not None:
        caveats.append(f"a request has {each:.3g} output tokens on average in the measurement")
    return curve_of_tokens(tokens), each, caveats


def of_manifest(manifest: Manifest, hardware_class: str, *, here: CpuIdentity | None, folder: str) -> Evidence | None:
    """The evidence in an artefact; None if it has no capacity curve. `here`: the processor of this machine."""
    curve, tokens, limits = _measured(manifest.capacity, manifest.token_capacity)
    if not curve.points:
        return None
    is_here = here is not None and (here.vendor, here.family, here.model, here.stepping, here.isa) == (
        manifest.cpu.vendor, manifest.cpu.family, manifest.cpu.model, manifest.cpu.stepping, manifest.cpu.isa,
    )  # fmt: skip
    caveats = limits + ([f"lengths of the measurement: {manifest.workload}"] if manifest.workload else [])
    if manifest.pinned is False:
        caveats.append("measured on shared cores")
    if not manifest.cpu.microarchitecture:
        caveats.append("the hypervisor hides the processor: it is assigned to a class by its instruction set")
    return Evidence(
        hardware_class=hardware_class,
        cores=manifest.cores,
        plan=manifest.chosen.plan.summary,
        curve=curve,
        origin=Origin.MEASURED_HERE if is_here else Origin.MEASURED_ON_CLASS,
        basis=f"{folder}, {manifest.cpu.model_name}, {manifest.created[:10]}",
        interval=Interval.around(min(max(manifest.noise, LEAST_NOISE), 0.5)),
        caveats=tuple(map(printable, caveats)),
        tokens_per_request=tokens,
        resident_bytes=manifest.serving_rss_bytes,
    )


def of_result(result: Result, hardware_class: str, *, name: str) -> Evidence | None:
    """The evidence in the status of an OptimizedModel; None if it has no capacity curve."""
    measured = result.token_capacity.curve if result.token_capacity is not None else TokenCurve()
    curve, tokens, limits = _measured(result.capacity.curve, measured)
    if not curve.points or result.capacity.provisional:
        return None
    return Evidence(
        hardware_class=hardware_class,
        cores=result.cores,
        plan=result.plan.summary,
        curve=curve,
        origin=Origin.MEASURED_ON_CLASS,
        basis=f"OptimizedModel {name}, {result.cpu.model_name}",
        interval=Interval.around(UNKNOWN_NOISE),
        caveats=(*limits, *(("measured on shared cores",) if result.pinned is False else ())),
        tokens_per_request=tokens,
        resident_bytes=result.resident_bytes,
    )


class _GivenPoint(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    requests_per_second: float = Field(alias="requestsPerSecond", gt=0)
    p95_milliseconds: float = Field(alias="p95Milliseconds", gt=0)


class _Given(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    hardware_class: str = Field(alias="hardwareClass", min_length=1, max_length=63)
    cores: int = Field(default=1, ge=1, le=1024)
    plan: str = Field(default="", max_length=256)
    source: str = Field(min_length=1, max_length=512)
    points: list[_GivenPoint] = Field(default=[], max_length=64)
    throughput: float | None = Field(default=None, gt=0)
    latency_milliseconds: float | None = Field(default=None, alias="latencyMilliseconds", gt=0)
    batch: int = Field(default=1, ge=1, le=4096)
    error: float = Field(default=UNKNOWN_NOISE, ge=0, lt=1)
    caveats: list[str] = Field(default=[], max_length=16)


class _GivenFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    measurements: list[_Given] = Field(min_length=1, max_length=1000)


def of_file(text: str, *, name: str) -> tuple[Evidence, ...]:
    """The measurements in a YAML or JSON text (docs/how-to/choose-hardware.md has its form).

    SettingError that names the field in `name`.
    """
    remedy = "Write measurements as docs/how-to/choose-hardware.md shows"
    try:
        given = _GivenFile.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise SettingError(f"{name} is not YAML: {problem}", field=name, remedy=remedy) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise SettingError(
            f"{name} is not a file of measurements ({where}: {first['msg']})", field=name, remedy=remedy
        ) from error
    found = []
    for index, one in enumerate(given.measurements):
        if bool(one.points) == (one.throughput is not None):
            raise SettingError(
                f"{name}: measurements.{index} needs points, or throughput and latencyMilliseconds, and not both",
                field=name,
                remedy=remedy,
            )
        caveats = [*one.caveats]
        off = one.error
        if one.points:
            curve = CapacityCurve(points=tuple(map(_point, one.points)))
        elif one.latency_milliseconds is not None and one.throughput is not None:
            curve = curve_of_closed_loop(one.throughput, one.latency_milliseconds, batch=one.batch)
            caveats.append("latency under load estimated by a queueing formula")
            off = max(off, CLOSED_LOOP_ERROR)
        else:
            raise SettingError(
                f"{name}: measurements.{index} has throughput and no latencyMilliseconds", field=name, remedy=remedy
            )
        found.append(
            Evidence(
                hardware_class=one.hardware_class,
                cores=one.cores,
                plan=printable(one.plan) or "as given",
                curve=curve,
                origin=Origin.GIVEN,
                basis=printable(one.source),
                interval=Interval.around(off),
                caveats=tuple(map(printable, caveats)),
            )
        )
    return tuple(found)


def _point(given: _GivenPoint) -> CapacityPoint:
    p95 = given.p95_milliseconds
    return CapacityPoint(
        arrivals_per_second=given.requests_per_second,
        completed_per_second=given.requests_per_second,
        p50_milliseconds=p95,
        p95_milliseconds=p95,
        p99_milliseconds=p95,
        samples=0,
    )


def as_json(evidence: Evidence) -> Mapping[str, Any]:
    """Its provenance as JSON values."""
    return {
        "origin": evidence.origin.value,
        "basis": evidence.basis,
        "speed_interval": [round(evidence.interval.low, 3), round(evidence.interval.high, 3)],
        "caveats": list(evidence.caveats),
    }
