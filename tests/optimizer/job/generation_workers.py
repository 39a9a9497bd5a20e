"""Candidates of text generation whose processes measure briefly or end as a crash would end them."""

from __future__ import annotations

import os
import signal
import time

from penstock.capacity import TokenPoint
from penstock.recipe import Precision
from penstock_optimizer.generation import token_capacity
from penstock_optimizer.generation.candidate_process import (
    BuiltGraph,
    GenerationCandidate,
    JudgedAnswers,
    MeasuredSpeed,
)


def end_by(number: signal.Signals) -> None:
    """End this process by a signal."""
    os.kill(os.getpid(), number)
    time.sleep(3600)


class QuickCandidate(GenerationCandidate):
    """Measures the capacity briefly."""

    def __init__(self) -> None:
        # Of this process, which serves this object alone.
        token_capacity.LEAST_SECONDS = 0.1
        token_capacity.MOST_CLIENTS = 4


class FailingCandidate(QuickCandidate):
    """Is killed, crashes or hangs with some of the precisions."""

    def build(self) -> BuiltGraph:
        """Crashes while it writes."""
        if self._recipe.precision is Precision.INT8_ROWWISE and not self._recipe.options:
            draft = self._graph.parent.with_name(f"{self._graph.parent.name}.draft")
            draft.mkdir(parents=True)
            (draft / self._graph.name).write_text("cut short")
            end_by(signal.SIGSEGV)
        return super().build()

    def judge(self, budget: dict[str, float], seconds: float) -> JudgedAnswers:
        """Is killed, or hangs."""
        if self._recipe.precision is Precision.INT4_WEIGHTS and not self._recipe.options:
            end_by(signal.SIGKILL)
        if self._recipe.precision is Precision.INT4_ROWWISE:
            time.sleep(3600)
        return super().judge(budget, seconds)


class NoCapacityCandidate(QuickCandidate):
    """Is aborted when it measures more than one client."""

    def capacity(self, clients: int, seconds: float) -> TokenPoint | None:
        """See `CandidateProcess`."""
        if clients > 1:
            end_by(signal.SIGABRT)
        return super().capacity(clients, seconds)


class NoReferenceCandidate(QuickCandidate):
    """Is killed when it measures the fp32 model."""

    def refer(self, seconds: float, least: int) -> MeasuredSpeed:
        """See `CandidateProcess`."""
        end_by(signal.SIGKILL)
        return super().refer(seconds, least)
