"""Optimisations of the small model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from penstock.manifest import Manifest
from penstock.resources.endpoint import ModelEndpoint
from penstock_optimizer.job.progress import ProgressEvent
from penstock_optimizer.optimise import optimise

ENOUGH_SECONDS = 400.0
"""A time budget larger than any machine needs: such an optimisation runs all its stages."""
QUICK = {"engines": ["onnxruntime"], "precisions": ["fp32", "int8-dynamic"]}
"""A few recipes, which are built and measured in seconds."""


def endpoint(folder: Path, optimization: dict[str, Any], **spec: Any) -> ModelEndpoint:
    return ModelEndpoint.from_object(
        {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "ModelEndpoint",
            "metadata": {"name": "small"},
            "spec": {
                "model": f"file://{folder}",
                "task": "feature-extraction",
                "cores": 1,
                "optimization": optimization,
                **spec,
            },
        }
    )


class Made:
    """One optimisation and its events."""

    def __init__(self, endpoint: ModelEndpoint, store: Path, *, seconds: float = ENOUGH_SECONDS) -> None:
        self.endpoint, self.store = endpoint, store
        self.events: list[ProgressEvent] = []
        begin = time.monotonic()
        self.artefact = optimise(
            endpoint, store=store, models=store / "models", budget_seconds=seconds, on_progress=self.events.append
        )
        self.seconds = time.monotonic() - begin
        self.manifest = Manifest.load(self.artefact)
