"""Times of a NeuronCore as fitted to published rows. They are simulated: no measurement of a device is behind a run.

The fits are for BERT-base and its family at 128 tokens in bf16; other shapes are scaled by operations and weights.
"""

from __future__ import annotations

from dataclasses import dataclass

BASE_WEIGHTS = 85_000_000
"""Weights of BERT-base on the device: without embeddings."""
BASE_OPERATIONS = 22.3e9
"""Operations of BERT-base for a text of 128 tokens."""
INF2_TIMES = {"base": (0.348, 0.673), "large": (0.757, 2.016), "distil": (0.252, 0.367)}
"""Milliseconds (constant, for each row) of one Inf2 core while both cores of the chip are busy."""
_INF1_ROW = 1.61
_PIPELINES = {4: (2.858, 0.582), 16: (0.1496, 0.4084)}
"""Inf1 pipelines, by cores: time of the slowest stage."""
_IN_FLIGHT = {4: 4, 16: 12}
"""Batches in a pipeline at its full rate."""


@dataclass(frozen=True)
class Work:
    """One run on a device."""

    batch: int
    weights: int = BASE_WEIGHTS
    operations: float = BASE_OPERATIONS
    """Of one row."""

    @property
    def family(self) -> str:
        """The fitted family with the nearest number of weights."""
        sizes = {"distil": 43_000_000, "base": BASE_WEIGHTS, "large": 303_000_000}
        return min(sizes, key=lambda name: abs(sizes[name] - self.weights))


def core_milliseconds(generation: str, work: Work, busy: int) -> float:
    """Time of one run on one core while `busy` cores of its chip run, itself among them."""
    if generation == "inf2":
        constant, each = INF2_TIMES[work.family]
        weights = {"distil": 43_000_000, "base": BASE_WEIGHTS, "large": 303_000_000}[work.family]
        operations = BASE_OPERATIONS * {"distil": 0.5, "base": 1.0, "large": 3.56}[work.family]
        return constant * work.weights / weights + each * work.operations / operations * work.batch
    # The cores of a chip share its memory's bandwidth: alone a run reads the weights in less time.
    constant = max(6.6, 3.4 * busy + 1.1)
    each = 1.3 if busy == 1 else _INF1_ROW
    return constant * work.weights / BASE_WEIGHTS + each * work.operations / BASE_OPERATIONS * work.batch


def stage_milliseconds(cores: int, work: Work) -> float:
    """Time of the slowest stage of an Inf1 pipeline over 4 or 16 cores; ValueError for other numbers of cores."""
    if cores not in _PIPELINES:
        raise ValueError(f"no published times for a pipeline over {cores} cores")
    constant, each = _PIPELINES[cores]
    return constant * work.weights / BASE_WEIGHTS + each * work.operations / BASE_OPERATIONS * work.batch


def pipeline_milliseconds(cores: int, work: Work, *, in_flight: int) -> float:
    """Latency of one run of a pipeline: the sum of its stages, or the time in the queue when more are in flight."""
    stages = _IN_FLIGHT[cores]
    return stage_milliseconds(cores, work) * max(stages, in_flight)


@dataclass(frozen=True)
class Simulated:
    """Throughput and latency of a busy device. Simulated."""

    per_second: float
    latency_milliseconds: float


def saturated(generation: str, work: Work, *, cores: int, cores_per_model: int = 1, in_flight: int = 1) -> Simulated:
    """All `cores` busy, with `in_flight` runs for each copy of the model."""
    copies = cores // cores_per_model
    if cores_per_model == 1:
        busy = min(cores, 4 if generation == "inf1" else 2)
        time = core_milliseconds(generation, work, busy)
        return Simulated(copies * work.batch / time * 1000, time * in_flight)
    stage = stage_milliseconds(cores_per_model, work)
    latency = pipeline_milliseconds(cores_per_model, work, in_flight=in_flight)
    return Simulated(copies * work.batch / stage * 1000, latency)
