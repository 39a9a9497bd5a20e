"""What the server is doing, for `/info`, `/readyz` and the metrics: written by its driver, read by the routes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.manifest import CandidateFacts, Manifest
from penstock.recipe import Plan, Recipe
from penstock.tasks import TaskName
from penstock_runtime.host import CoreGrant, Host


class Phase(StrEnum):
    """Where the process is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class Progress:
    """A running optimisation."""

    stage: str
    """Such as `export`, `candidates`, `plans`, `capacity`."""
    done: int = 0
    total: int = 0
    message: str = ""
    """Such as the recipe being judged."""
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


@dataclass(slots=True)
class Status:
    """Mutable; only ever touched from the event loop's thread."""

    name: str
    """The endpoint's name: `model` in the APIs that have one."""
    task: TaskName
    phase: Phase = Phase.LOADING
    message: str = "the model is loading"
    """Why it is not ready."""
    plan: Plan | None = None
    """Being served."""
    manifest: Manifest | None = None
    """Of the artefact, once there is one."""
    digest: str = ""
    """Of the artefact, such as `sha256:...`, where it is served by digest."""
    optimization: Progress | None = None
    """While one runs."""
    optimization_error: str = ""
    """Why the last one gave nothing."""
    host: Host | None = None
    """The machine as it was found at start."""
    grant: CoreGrant | None = None
    """The cores that the engine uses, and whether they are its own."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Limits that come with the model, such as `max_input_tokens`."""

    def candidate(self) -> CandidateFacts | None:
        """What the optimisation found about the recipe being served."""
        if self.manifest is None or self.plan is None:
            return None
        return _find(self.manifest, self.plan.recipe)


def _find(manifest: Manifest, recipe: Recipe) -> CandidateFacts | None:
    for candidate in manifest.candidates:
        if candidate.recipe == recipe:
            return candidate
    return None
