"""Plans for AWS Inferentia: data parallel or pipeline, and the batch, ranked by published or estimated figures. Pure.

Inferentia compiles a model ahead of time for fixed shapes. Candidates are one copy of the model for each NeuronCore
(data parallel) or, on Inf1 only, one copy over several cores (pipeline), each for a few batch sizes.

No figure here was measured by Penstock: everything made from this module carries `NOT_RUN`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.hardware import NeuronGeneration
from penstock_optimizer.neuron.published import SHAPES, Mode, ModelShape, PublishedFigure, shape_of

BATCHES = (1, 2, 4, 6, 8, 16)
"""Batch sizes to compile for."""
LARGEST_PIPELINE = 64
"""NeuronCores of one pipeline at most: those of 16 devices."""
WEIGHTS_PER_CORES = 20_000_000
"""Weights for each group of four cores in `pipeline_cores`."""
HOST_MILLISECONDS = 0.5
"""CPU time of Penstock's HTTP server and tokeniser for a request of 32 tokens on one core: `python -m
benchmarks.overhead` measured 0.29 to 0.50 ms (docs/reference/figures.md). One process serves a replica."""
_DEVICE = NeuronGeneration.INF1.cores_per_device


class NeuronGoal(StrEnum):
    """What to rank by."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    COST = "cost"


class Basis(StrEnum):
    """Where a figure comes from."""

    PUBLISHED = "published"
    ESTIMATED = "estimated"


def pipeline_cores(weights: int, granted: int) -> int:
    """NeuronCores of a pipeline on Inf1 for a model with this number of weights on the device.

    4 * round(weights / 2e7), from "NeuronCore Pipeline" in the documentation of the Neuron SDK, with halves rounded to
    the even neighbour; at least 1; at most the granted cores and 64; whole devices where it is more than one core.
    """
    quotient, rest = divmod(weights, WEIGHTS_PER_CORES)
    half = WEIGHTS_PER_CORES // 2
    rounded = quotient + (rest > half or (rest == half and quotient % 2 == 1))
    cores = min(4 * rounded, granted, LARGEST_PIPELINE)
    whole = cores - cores % _DEVICE
    return max(whole, 1)


@dataclass(frozen=True, order=True)
class NeuronCandidate:
    """What to compile."""

    mode: Mode
    cores_per_model: int
    batch: int

    @property
    def summary(self) -> str:
        """Such as `data parallel, batch 6` or `pipeline over 16 cores, batch 1`."""
        how = "data parallel" if self.mode is Mode.DATA_PARALLEL else f"pipeline over {self.cores_per_model} cores"
        return f"{how}, batch {self.batch}"


def candidates(
    generation: NeuronGeneration, granted: int, weights: int, *, batches: Sequence[int] = BATCHES
) -> tuple[NeuronCandidate, ...]:
    """What to compile for `granted` NeuronCores: data parallel first, then pipelines, the number of the formula first.

    The compiler may refuse a number of cores: the neighbours by one device, and all cores, are tried as well. Inf2 has
    no pipelines. ValueError unless `granted` are the cores of whole devices.
    """
    if granted < 1 or granted % generation.cores_per_device:
        raise ValueError(f"{granted} NeuronCores are not whole devices of {generation.cores_per_device}")
    found = [NeuronCandidate(Mode.DATA_PARALLEL, 1, batch) for batch in batches]
    if generation is NeuronGeneration.INF1:
        first = pipeline_cores(weights, granted)
        most = min(granted, LARGEST_PIPELINE)
        near = (first, first - _DEVICE, first + _DEVICE, most)
        counts = dict.fromkeys(count - count % _DEVICE for count in near if _DEVICE <= count <= most)
        found += [NeuronCandidate(Mode.PIPELINE, count, batch) for count in counts for batch in batches]
    return tuple(found)


@dataclass(frozen=True)
class NeuronFigure:
    """A candidate with its throughput and latency."""

    generation: NeuronGeneration
    candidate: NeuronCandidate
    cores: int
    """Granted NeuronCores, all busy."""
    per_second: float
    """Sequences per second of all of them."""
    latency_milliseconds: float
    """The p95, or the nearest published quantile; of an estimate the time of one batch."""
    basis: Basis
    evidence: str
    """The source of the row, or how the estimate was made."""
    instance: str = ""
    lowest_per_second: float | None = None
    """Lowest and highest published throughput of the same configuration, where several were published."""
    highest_per_second: float | None = None

    def over_http(self, per_second: float, *, slower: float = 1.0, host_slower: float = 1.0) -> tuple[float, float]:
        """Requests/s and milliseconds of a replica that runs this, with HTTP and the tokeniser; `per_second` is the
        device's, and the factors say how much slower than these figures device and host may be."""
        host = HOST_MILLISECONDS * host_slower
        return min(per_second / slower, 1000 / host), self.latency_milliseconds * slower + host


def published_figures(
    rows: Iterable[PublishedFigure], generation: NeuronGeneration, granted: int, shape: ModelShape, tokens: int
) -> tuple[NeuronFigure, ...]:
    """Figures of published rows for this family, number of cores and length. Of a candidate the row of the newest SDK
    counts, the slower one of two; its interval is from all rows of the candidate."""
    by_candidate: dict[NeuronCandidate, list[PublishedFigure]] = {}
    for row in rows:
        family = shape_of(row.model)
        same = row.hardware_class == generation.value and row.instance_cores == granted and row.tokens == tokens
        usable = row.uses_the_whole_instance and not row.is_anomalous
        if same and usable and family is not None and family.family == shape.family:
            key = NeuronCandidate(row.mode, row.cores_per_model, row.batch)
            by_candidate.setdefault(key, []).append(row)
    found = []
    for candidate, same_rows in by_candidate.items():
        best = max(same_rows, key=lambda row: (row.release, -row.per_second))
        rates = [row.per_second for row in same_rows]
        found.append(
            NeuronFigure(
                generation, candidate, granted, best.per_second, best.latency_milliseconds, Basis.PUBLISHED,
                f"{best.model} at {best.tokens} tokens on {best.instance}, {best.software}: {best.source}",
                instance=best.instance,
                lowest_per_second=min(rates) if len(rates) > 1 else None,
                highest_per_second=max(rates) if len(rates) > 1 else None,
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda figure: figure.candidate))


@dataclass(frozen=True)
class LinearTime:
    """Milliseconds of one batch: `constant + each * batch`, at 128 tokens."""

    constant: float
    each: float


INF2_TIMES = {
    "bert-base": LinearTime(0.348, 0.673),
    "bert-large": LinearTime(0.757, 2.016),
    "distilbert": LinearTime(0.252, 0.367),
    "albert-base": LinearTime(0.346, 0.618),
}
"""One core with both cores of the device busy, bf16: weighted least squares over the published rows. They agree with
the rows within 5 % (bert-base, distilbert) and 10 % (bert-large)."""
INF2_INTERCEPT, INF2_PER_WEIGHT, INF2_PER_OPERATION = 0.294, 0.522e-9, 0.0290e-9
"""Milliseconds of one batch of a model without published rows: a + b * block weights + c * operations of the batch. The
fit has the least relative squared error over the published rows of inf2.xlarge at 128 tokens."""
INF2_LEFT_OUT_ERROR = 0.21
"""Largest relative error of the time for a family that is left out of the fit (leave-one-out; -15 % to 21 %)."""
INF1_DATA_PARALLEL = LinearTime(14.7, 1.61)
"""BERT-base with all four cores of a device busy. Rows differ from it by up to 20 %: batch 8 is slower than a line."""
INF1_PIPELINES = {4: LinearTime(2.858, 0.582), 16: LinearTime(0.1496, 0.4084)}
"""BERT-base: time of the slowest stage by cores of the pipeline, through the published batches 1 and 6."""
FITTED_TOKENS = 128
LARGEST_FITTED_BATCH = {NeuronGeneration.INF1: 6, NeuronGeneration.INF2: 16}
"""Published rows of Inf1 have a lower throughput at batch 8 than at 6, which a line does not show."""


def estimated_figures(
    generation: NeuronGeneration, granted: int, shape: ModelShape, tokens: int
) -> tuple[NeuronFigure, ...]:
    """Figures of the fitted times, whose part for each sequence is scaled by operations. On Inf1 the constant is scaled
    by weights; on Inf2 a model without published rows has the time of `INF2_INTERCEPT` and its neighbours.

    Pipelines of other lengths than 4 and 16 cores have no fit and are left out.
    """
    base = SHAPES["bert-base"]
    found = []
    for candidate in candidates(generation, granted, shape.device_weights):
        if candidate.mode is Mode.PIPELINE:
            time = INF1_PIPELINES.get(candidate.cores_per_model)
            fitted = base
        elif generation is NeuronGeneration.INF1:
            time, fitted = INF1_DATA_PARALLEL, base
        else:
            time, fitted = INF2_TIMES.get(shape.family) or _inf2_time(shape), shape
        if time is None or candidate.batch > LARGEST_FITTED_BATCH[generation]:
            continue
        compute = shape.operations(tokens) / fitted.operations(FITTED_TOKENS)
        constant = time.constant * shape.device_weights / fitted.device_weights
        batch_milliseconds = constant + time.each * compute * candidate.batch
        copies = granted // candidate.cores_per_model
        # All stages of a pipeline are busy with batches of their own: a batch passes through each of them.
        stages = _in_flight(candidate.cores_per_model) if candidate.mode is Mode.PIPELINE else 1.0
        found.append(
            NeuronFigure(
                generation, candidate, granted, copies * candidate.batch / batch_milliseconds * 1000,
                batch_milliseconds * stages, Basis.ESTIMATED,
                f"{_fit(generation, shape, fitted)} at {FITTED_TOKENS} tokens, scaled by operations",
            )
        )  # fmt: skip
    return tuple(found)


def _inf2_time(shape: ModelShape) -> LinearTime:
    constant = INF2_INTERCEPT + INF2_PER_WEIGHT * shape.block_weights
    return LinearTime(constant, INF2_PER_OPERATION * shape.operations(FITTED_TOKENS))


def _fit(generation: NeuronGeneration, shape: ModelShape, fitted: ModelShape) -> str:
    if generation is NeuronGeneration.INF2 and shape.family not in INF2_TIMES:
        return f"time fitted to all published encoders (leave-one-out error up to {INF2_LEFT_OUT_ERROR:.0%})"
    return f"times fitted to published rows of {fitted.family}"


def _in_flight(cores: int) -> float:
    """Batches in a pipeline: four over 4 cores, twelve over 16, as published; in proportion between and beyond."""
    return 4.0 if cores <= 4 else 4.0 + (cores - 4) * 8.0 / 12.0


def figures_for(
    rows: Iterable[PublishedFigure], generation: NeuronGeneration, granted: int, shape: ModelShape, tokens: int
) -> tuple[NeuronFigure, ...]:
    """Published figures, and estimates for the candidates that have none."""
    published = published_figures(rows, generation, granted, shape, tokens)
    known = {figure.candidate for figure in published}
    estimates = estimated_figures(generation, granted, shape, tokens)
    return (*published, *(figure for figure in estimates if figure.candidate not in known))


def rank(figures: Iterable[NeuronFigure], goal: NeuronGoal) -> tuple[NeuronFigure, ...]:
    """The figures of one number of granted cores, best first: all cost the same for an hour.

    Published figures come before estimated ones that are less than 5 % better: an estimate is not more exact.
    """

    def key(figure: NeuronFigure) -> tuple[float, ...]:
        margin = 1.05 if figure.basis is Basis.ESTIMATED else 1.0
        if goal is NeuronGoal.LATENCY:
            return (figure.latency_milliseconds * margin, 1 / figure.per_second)
        return (margin / figure.per_second, figure.latency_milliseconds)

    return tuple(sorted(figures, key=key))


def buckets(lengths: Iterable[int], *, longest: int) -> tuple[int, ...]:
    """Compiled lengths in tokens for these lengths: powers of two from 32 that are used, and the longest input."""
    used = set()
    for length in lengths:
        power = 32 if length <= 32 else 2 ** math.ceil(math.log2(length))
        used.add(min(power, longest))
    return tuple(sorted(used | {longest}))
