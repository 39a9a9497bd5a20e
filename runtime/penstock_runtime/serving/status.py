"""State of the server for `/info`, `/readyz` and the metrics: written by the process, read by the routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.manifest import CandidateFacts, Manifest
from penstock.recipe import Plan, Recipe
from penstock.resources.endpoint_parts.guard_policy import GuardPolicy
from penstock.resources.result import CapacityFacts
from penstock.tasks import TaskName
from penstock.vector_space import VectorSpace
from penstock_runtime.host import CoreGrant, Host


class ServerPhase(StrEnum):
    """Phase of the process."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class OptimizationProgress:
    """A running optimisation."""

    stage: str
    """Such as `export`, `candidates`, `plans`, `capacity`."""
    done: int = 0
    total: int = 0
    message: str = ""
    """Such as the recipe being evaluated."""
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    def as_json(self) -> dict[str, Any]:
        """As `/info` shows it."""
        return {
            "stage": self.stage,
            "done": self.done,
            "total": self.total,
            "message": self.message,
            "seconds": round(time.time() - self.started, 1),
        }


class CapacityState(StrEnum):
    """Of the measurement of a replica's capacity before the server is ready."""

    PENDING = "pending"
    """It is measured once the model is loaded, unless another replica has measured it."""
    MEASURING = "measuring"
    MEASURED = "measured"
    KNOWN = "known"
    """Another replica has measured it."""
    FAILED = "failed"
    """The server is ready without it."""


@dataclass(slots=True, eq=False)
class CapacityReport:
    """The capacity of this replica, where a pod measures it."""

    state: CapacityState = CapacityState.PENDING
    message: str = ""
    """Why it failed, or what limits the figures."""
    facts: CapacityFacts | None = None
    known: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by `POST /capacity/known`."""

    def fail(self, why: str) -> None:
        """The capacity was not measured, for this reason."""
        self.state, self.message = CapacityState.FAILED, why

    def as_json(self) -> dict[str, Any]:
        """As `/info` shows it."""
        facts = None if self.facts is None else self.facts.to_object()
        return {"state": self.state.value, "message": self.message, "facts": facts}


@dataclass(slots=True)
class ServerStatus:
    """Mutable; used from the event loop's thread only."""

    name: str
    """The endpoint's name: `model` in the APIs that have one."""
    task: TaskName
    phase: ServerPhase = ServerPhase.LOADING
    message: str = "the model is loading"
    """Why it is not ready."""
    failure: str = ""
    """Why it is draining, if it cannot serve any longer; empty: a signal."""
    crashes: int = 0
    """Earlier servers of this pod that a signal ended."""
    plan: Plan | None = None
    """The plan being served."""
    manifest: Manifest | None = None
    """Manifest of the artefact, once there is one."""
    digest: str = ""
    """Digest of the artefact, such as `sha256:...`, if it is served by digest."""
    optimization: OptimizationProgress | None = None
    """The running optimisation."""
    optimization_error: str = ""
    """The error of the last optimisation."""
    capacity: CapacityReport | None = None
    """None: the capacity is not measured here."""
    host: Host | None = None
    """The machine, as read at the start."""
    grant: CoreGrant | None = None
    """The cores that the engine uses, and whether they are exclusive."""
    tokens: int | None = None
    """Number of accepted bearer tokens; None: requests need none."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Limits that come with the model, such as `max_input_tokens`."""
    labels: Sequence[str] = ()
    """Labels of the model's head, in the order of its outputs; empty: it has none, or is not loaded."""
    pooling: str = ""
    """The model's own pooling; empty: none, or not loaded."""
    space: VectorSpace | None = None
    """The space of the model's vectors; None: it has none, its artefact does not state it, or it is not loaded."""
    truncate: bool = True
    """Texts that are too long are cut, unless a request has another rule."""
    started: int = field(default_factory=lambda: int(time.time()))
    """When the server was started, seconds since the epoch."""
    route_prompts: Mapping[str, str] = field(default_factory=dict)
    """The name of the default prompt of each route that has a separate one, by path."""

    guard_policy: GuardPolicy | None = None
    """Of a classifier in front of a language model; None: it answers no gateways but by `/classify`."""

    def candidate(self) -> CandidateFacts | None:
        """The optimisation's facts about the recipe being served."""
        if self.manifest is None or self.plan is None:
            return None
        return _find(self.manifest, self.plan.recipe)


def _find(manifest: Manifest, recipe: Recipe) -> CandidateFacts | None:
    for candidate in manifest.candidates:
        if candidate.recipe == recipe:
            return candidate
    return None
