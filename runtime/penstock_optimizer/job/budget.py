"""The time budget of an optimisation, divided so that the last stages always get their turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

CAPACITY_SHARE = 0.18
MOST_CAPACITY_SECONDS = 75.0
PLANS_SHARE = 0.25
MOST_PLANS_SECONDS = 90.0
FINISH_SHARE = 0.05
"""For the GEMM ceiling, the report and writing the artefact."""
MOST_FINISH_SECONDS = 20.0
RAISE_BUDGET = "Raise spec.optimization.budgetSeconds, or --budget"
"""What to do where too little of it was left."""
KILL_SECONDS = 1.0
"""A call to a worker is cut this much before its stage ends: killing and cleaning take time too."""


@dataclass
class Budget:
    """Counts down from `seconds`."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._start

    @property
    def finish_seconds(self) -> float:
        """Reserved for what comes after measuring."""
        return min(self.seconds * FINISH_SHARE, MOST_FINISH_SECONDS)

    @property
    def capacity_seconds(self) -> float:
        """Reserved for the capacity curve."""
        return min(self.seconds * CAPACITY_SHARE, MOST_CAPACITY_SECONDS)

    @property
    def plans_seconds(self) -> float:
        """Reserved for the plan search."""
        return min(self.seconds * PLANS_SHARE, MOST_PLANS_SECONDS)

    def left_for_candidates(self) -> float:
        """Seconds until building and judging must end; may be negative."""
        return self.left_for_plans() - self.plans_seconds

    def left_for_plans(self) -> float:
        """Seconds until the plan search must end; may be negative."""
        return self.left_for_capacity() - self.capacity_seconds

    def left_for_capacity(self) -> float:
        """Seconds until the capacity curve must end; may be negative."""
        return self.seconds - self.finish_seconds - self.spent

    def left(self) -> float:
        """Seconds until the whole must end; may be negative."""
        return self.seconds - self.spent

    def plans_deadline(self) -> Callable[[], bool]:
        """True while the plan search, which begins now, may go on: to its own limit, or to what is left."""
        end = self.spent + min(self.plans_seconds, self.left_for_plans())
        return lambda: self.spent < end
