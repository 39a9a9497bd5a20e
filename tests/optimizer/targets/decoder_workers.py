"""Candidates of text generation that end their processes as a crash would."""

from __future__ import annotations

import os
import signal
import time

from penstock.recipe import Precision
from penstock_optimizer.candidate.decoder import BuiltGraph, DecoderCandidate, JudgedAnswers, MeasuredSpeed


def end_by(number: signal.Signals) -> None:
    """End this process by a signal."""
    os.kill(os.getpid(), number)
    time.sleep(3600)


class FailingCandidate(DecoderCandidate):
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


class NoReferenceCandidate(DecoderCandidate):
    """Is killed when it measures the fp32 model."""

    def refer(self, seconds: float, least: int) -> MeasuredSpeed:
        """See `DecoderCandidate`."""
        end_by(signal.SIGKILL)
        return super().refer(seconds, least)
