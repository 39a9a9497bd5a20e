"""Opens the engine of an artefact of text generation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from penstock.errors import ArtefactError
from penstock_runtime.generation.engine import StepEngine


def open_generation_engine(
    folder: Path, cores: int | None = None, memory: int | None = None, which: Literal["chosen", "baseline"] = "chosen"
) -> StepEngine:
    """Load the graph of an artefact's plan for `cores` cores. `memory`: bytes that weights and cache may take."""
    _ = cores, memory, which
    raise ArtefactError(f"{folder} is for text-generation, for which this version has no engine")
