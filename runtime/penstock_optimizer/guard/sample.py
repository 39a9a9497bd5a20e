"""A request of the calibration or judging set, and what was observed when it ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """A request in the HF shape."""

    inputs: Any
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Observed:
    """One sample's outcome."""

    answer: Any
    """In the HF shape, as `Task.assemble` gives it."""
    reduced: tuple[Any, ...] = ()
    """What `Task.reduce` made of each row."""
