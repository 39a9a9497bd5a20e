"""The guard of live traffic: a few answers are computed again with the fp32 graph, in spare time, and compared.

A request is chosen before it is answered, at random times that keep the comparison within its share of the CPU. One of
its rows is computed again in a thread of the lowest priority (`SCHED_IDLE`), and only while no row waits. Of the
outcome, numbers remain; token ids and vectors are in the memory of this process until they were compared, and texts are
not kept at all.

Some rows run on the served plan once more, and on the fp32 graph in another batch: those of every answer that looks
damaged, and one of `CHECK_EVERY` others. If these differ from the first result, the comparison itself is wrong (an
answer of another request, for example), and nothing follows from it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from penstock.evidence import MeanEvidence, upper_bound
from penstock.logs import log_event
from penstock.manifest import GraphIO, LiveLimits
from penstock.tasks import TaskName
from penstock_runtime.engines.base import Engine
from penstock_runtime.rows import Float, Row, run_rows
from penstock_runtime.serving.loaded_model import LiveReference, LoadedModel
from penstock_runtime.tasks.base import Judged, Task

logger = logging.getLogger("penstock.shadow")

COSINE_SCALE, COSINE_BUDGET = 0.05, 0.95
"""Vectors: 1 - cosine of a divergence of 1, and the cosine below which an answer is severely damaged."""
DIVERGENCE_SCALE, TIE = 0.5, 0.02
"""Labels: the Kullback-Leibler divergence (nats) of a divergence of 1, and the lead of the reference's label with which
another label is severe damage. As in the accuracy guard."""
CHECK_EVERY = 10
CHECK_LIMIT = 0.01
"""Largest share of the checks that may fail: a rounding may fall differently in another batch."""
SAME = 0.02
"""Divergence up to which two runs of the same plan count as the same."""
LEAST_CHECKS = 5
"""Before an alarm counts."""
WAITING = 4
"""Rows that wait for their comparison."""
DISTINCT = 10_000
"""Texts that are remembered: each counts once, so that one frequent text is not taken for a share of the traffic."""
POLL_SECONDS, IDLE_POLLS = 0.005, 2000
"""How often is looked whether no row waits."""
WALL_SHARE = 4
"""A comparison counts as a fourth of its duration at least, so that there are fewer where other programs take cores:
the thread of the lowest priority may be stopped while it holds the interpreter's lock."""
FIRST_SECONDS = 0.05
"""The assumed CPU time of the first comparison."""
ALPHA = 0.05
MARGIN = 1.25
LEAST_LIMIT = 0.002
FEWEST_TEXTS = 60


class AnswerDamage(NamedTuple):
    """The damage of one answer, from 0 to 1."""

    divergence: float
    severe: float
    """1: outside the budget of one answer; of an answer with many tokens, the share of them."""


def compare(task: Task, row: Row, reference: Any, served: Any) -> AnswerDamage:
    """The damage of a row's served result (`Task.reduce`) by that of the fp32 graph."""
    match task.name:
        case TaskName.QUESTION_ANSWERING:
            return _spans(reference.answers, served.answers)
        case TaskName.FILL_MASK:
            return _choices(reference, served)
        case TaskName.TOKEN_CLASSIFICATION:
            return _labels(reference, served)
        case TaskName.TEXT_CLASSIFICATION | TaskName.ZERO_SHOT_CLASSIFICATION | TaskName.TEXT_RANKING:
            return _labels(_probabilities(reference), _probabilities(served))
    sides = [task.judged(row, one) if isinstance(task, Judged) else (one,) for one in (reference, served)]
    return _worst([_vectors(*pair) for pair in zip(*sides, strict=True)])


def _worst(found: Sequence[AnswerDamage]) -> AnswerDamage:
    return AnswerDamage(max(one.divergence for one in found), max(one.severe for one in found))


def _vectors(reference: Any, served: Any) -> AnswerDamage:
    if reference.dtype.names:  # pairs of a token and its weight
        tokens = np.union1d(reference["index"], served["index"])
        reference, served = (_dense(one, tokens) for one in (reference, served))
    a, b = reference.ravel().astype(np.float64), served.ravel().astype(np.float64)
    if a.shape != b.shape:
        return AnswerDamage(1.0, 1.0)
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    cosine = float(a @ b) / norm if norm else 1.0
    return AnswerDamage(min(1.0, max(0.0, 1 - cosine) / COSINE_SCALE), float(cosine < COSINE_BUDGET))


def _dense(pairs: Any, tokens: Any) -> Float:
    vector = np.zeros(len(tokens), np.float32)
    vector[np.searchsorted(tokens, pairs["index"])] = pairs["value"]
    return vector


def _probabilities(logits: Float) -> Float:
    """[1, labels]; of a single logit its sigmoid, and the rest."""
    scores = np.array([0.0, logits[0]]) if logits.size == 1 else logits.astype(np.float64)
    powers = np.exp(scores - scores.max())
    found: Float = (powers / powers.sum())[np.newaxis]
    return found


def _labels(reference: Float, served: Float) -> AnswerDamage:
    """Of distributions [items, labels]."""
    if reference.shape != served.shape:
        return AnswerDamage(1.0, 1.0)
    if not reference.size:
        return AnswerDamage(0.0, 0.0)
    before, after = (np.clip(one.astype(np.float64), 1e-9, 1.0) for one in (reference, served))
    divergence = np.sum(before * np.log(before / after), axis=1)
    items, best = np.arange(len(before)), after.argmax(axis=1)
    lost = before.max(axis=1) - before[items, best] > TIE
    return AnswerDamage(float(np.clip(divergence / DIVERGENCE_SCALE, 0, 1).mean()), float(lost.mean()))


def _choices(reference: Any, served: Any) -> AnswerDamage:
    """Of the best tokens of each mask, with their scores."""
    found = []
    for (tokens, scores), (others, _) in zip(reference, served, strict=True):
        kept = len(set(tokens) & set(others)) / max(1, len(tokens))
        known = dict(zip(tokens, scores, strict=True))
        lost = bool(others) and scores[0] - known.get(others[0], 0.0) > TIE
        found.append(AnswerDamage(1 - kept, float(lost)))
    return AnswerDamage(*np.mean(found, axis=0).tolist()) if found else AnswerDamage(0.0, 0.0)


def _spans(reference: Any, served: Any) -> AnswerDamage:
    """Of the best answer: the characters that both have."""
    (first, start, end), (_, other_start, other_end) = reference[0], served[0]
    both = max(0, min(end, other_end) - max(start, other_start))
    total = (end - start) + (other_end - other_start)
    agreement = 2 * both / total if total else 1.0
    known = next((score for score, *place in reference if place == [other_start, other_end]), 0.0)
    return AnswerDamage(1 - agreement, float(not agreement and first - known > TIE))


def limits_of(outcomes: Sequence[AnswerDamage]) -> LiveLimits | None:
    """What the guard of live traffic tests against, from the outcomes of texts that judged the plan; None: too few.

    The upper ends of the intervals: that none of n texts was damaged does not mean that none will be.
    """
    if len(outcomes) < FEWEST_TEXTS:
        return None
    divergence = np.array([one.divergence for one in outcomes])
    mean = float(divergence.mean() + 2.33 * divergence.std() / math.sqrt(len(outcomes)))
    severe = upper_bound([one.severe for one in outcomes], ALPHA)
    return LiveLimits(
        texts=len(outcomes),
        divergence=min(0.5, max(LEAST_LIMIT, MARGIN * mean)),
        severe=min(0.5, max(LEAST_LIMIT, severe)),
    )


def measured_limits(
    model: LoadedModel, reference: tuple[Engine, GraphIO], rows: Sequence[Row], seconds: float
) -> LiveLimits | None:
    """The limits of a model by these rows, as many as take `seconds`; None: too few. Closes the reference. Errors of
    both engines."""
    end, outcomes = time.monotonic() + seconds, []
    engine, io = reference
    try:
        for row in rows:
            if time.monotonic() > end:
                break
            sides = [
                model.task.reduce(row, run_rows(run, own, [row])[0])
                for run, own in ((engine.run, io), (model.engine.run, model.io))
            ]
            outcomes.append(compare(model.task, row, *sides))
    finally:
        engine.close()
    return limits_of(outcomes)


@dataclass
class LiveEvidence:
    """The state of the tests of one process."""

    limits: LiveLimits
    answers: int = 0
    divergence: float = 0.0
    """Sum over the answers."""
    severe: float = 0.0
    """Sum over the answers."""
    checks: int = 0
    failed_checks: int = 0
    _tests: tuple[MeanEvidence, MeanEvidence] = field(init=False)
    _instrument: MeanEvidence = field(init=False)

    def __post_init__(self) -> None:
        self._tests = (
            MeanEvidence.with_restarts(self.limits.divergence),
            MeanEvidence.with_restarts(self.limits.severe),
        )
        self._instrument = MeanEvidence.with_restarts(CHECK_LIMIT)

    def add(self, outcome: AnswerDamage) -> None:
        """One compared answer."""
        self.answers += 1
        self.divergence += outcome.divergence
        self.severe += outcome.severe
        for test, value in zip(self._tests, outcome, strict=True):
            test.add(value)

    def check(self, *, same: bool) -> None:
        """One check of the comparison itself."""
        self.checks += 1
        self.failed_checks += not same
        self._instrument.add(0.0 if same else 1.0)

    @property
    def value(self) -> float:
        """The evidence that live answers are worse than those that judged the plan. 1 until it has enough checks."""
        found = sum(test.value for test in self._tests) / len(self._tests)
        return found if self.checks >= LEAST_CHECKS else min(found, 1.0)

    @property
    def instrument(self) -> float:
        """The evidence that the comparison itself is wrong."""
        return self._instrument.value

    def as_json(self) -> dict[str, Any]:
        """For `/info`."""
        return {
            "answers": self.answers,
            "evidence": round(self.value, 4),
            "checks": self.checks,
            "failed_checks": self.failed_checks,
            "check_evidence": round(self.instrument, 4),
            "mean_divergence": round(self.divergence / self.answers, 6) if self.answers else None,
            "severe": round(self.severe, 3),
            "limits": self.limits.model_dump(mode="json"),
        }


@dataclass
class ShadowState:
    """What a process has compared so far."""

    evidence: LiveEvidence
    cpu_seconds: float = 0.0
    """Of all comparisons, with loading the fp32 graph."""
    lost: dict[str, int] = field(default_factory=lambda: {"busy": 0, "failed": 0, "repeated": 0})
    """Answers that were chosen and not compared, by reason."""

    def as_json(self) -> dict[str, Any]:
        """For `/info`."""
        return {**self.evidence.as_json(), "cpu_seconds": round(self.cpu_seconds, 2), "lost": dict(self.lost)}


class _Sample(NamedTuple):
    row: Row
    served: Any


class Shadow:
    """Compares a few answers of one served model. Used from one event loop."""

    def __init__(
        self,
        model: LoadedModel,
        reference: LiveReference,
        *,
        cpu_share: float,
        is_idle: Callable[[], bool],
        again: Callable[[Row], Awaitable[Any]],
    ) -> None:
        """`cpu_share`: of the cores of the plan. `is_idle`: no row waits. `again`: the result of a row on the served
        plan."""
        self.state = ShadowState(LiveEvidence(reference.limits))
        self._model, self._reference = model, reference
        self._allowed = cpu_share * model.plan.streams * model.plan.threads_per_stream
        self._is_idle, self._again = is_idle, again
        self._waiting: deque[_Sample] = deque()
        self._next = 0.0
        self._cost = FIRST_SECONDS
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._random = random.Random(os.urandom(16))  # noqa: S311 - for sampling
        self._secret = self._random.getrandbits(64)
        self._loaded: tuple[Engine, GraphIO] | None = None
        self._last: Row | None = None
        self._pool = ThreadPoolExecutor(1, "penstock-shadow", initializer=_lowest_priority)
        self._work: asyncio.Task[None] | None = None

    def wants(self, now: float) -> bool:
        """Whether to compare the answer of a request that has arrived; decided before there is an answer."""
        if now < self._next:
            return False
        self._next = now + self._random.expovariate(self._allowed / self._cost)
        return True

    def offer(self, rows: Sequence[Row], reduced: Sequence[Any]) -> None:
        """The answer of a request that `wants` chose: one of its rows is compared."""
        at = self._random.randrange(len(rows))
        key = hash((self._secret, *rows[at].ids, *(rows[at].type_ids or ())))
        if key in self._seen:
            self.state.lost["repeated"] += 1
        elif len(self._waiting) >= WAITING:
            self.state.lost["busy"] += 1
        else:
            self._seen[key] = None
            if len(self._seen) > DISTINCT:
                self._seen.popitem(last=False)
            self._waiting.append(_Sample(rows[at], reduced[at]))
            if self._work is None or self._work.done():
                self._work = asyncio.create_task(self._compare_all())

    async def close(self) -> None:
        """Stop comparing, and free the fp32 graph."""
        self._next = math.inf
        self._waiting.clear()
        if self._work is not None:
            await self._work
        self._pool.shutdown()
        if self._loaded is not None:
            self._loaded[0].close()
            self._loaded = None

    async def _compare_all(self) -> None:
        while self._waiting:
            sample = self._waiting.popleft()
            for _ in range(IDLE_POLLS):
                if self._is_idle():
                    break
                await asyncio.sleep(POLL_SECONDS)
            else:
                self.state.lost["busy"] += 1
                continue
            try:
                await self._compare(sample)
            except Exception as error:  # fails this row only, which counts as no outcome
                self.state.lost["failed"] += 1
                if self.state.lost["failed"] == 1:
                    # The type only: a message may name a part of the input.
                    reason = type(error).__name__
                    logger.warning(
                        "an answer could not be compared with fp32: %s",
                        reason,
                        extra=log_event("ShadowFailed", reason=reason),
                    )

    async def _compare(self, sample: _Sample) -> None:
        task, loop = self._model.task, asyncio.get_running_loop()
        checked, last, self._last = self._random.randrange(CHECK_EVERY) == 0, self._last, sample.row
        other, started = last if checked else None, perf_counter()
        reduced, batched, seconds = await loop.run_in_executor(self._pool, self._run, sample.row, other)
        outcome = compare(task, sample.row, reduced, sample.served)
        if checked or outcome.severe:
            begin = perf_counter()
            again = await self._again(sample.row)
            seconds += perf_counter() - begin
            same = compare(task, sample.row, again, sample.served).divergence <= SAME
            if batched is not None:
                same = same and compare(task, sample.row, reduced, batched).divergence <= SAME
            self.state.evidence.check(same=same)
        self.state.evidence.add(outcome)
        self.state.cpu_seconds += seconds
        cost = max(seconds, (perf_counter() - started) / WALL_SHARE)
        self._cost += (cost - self._cost) / min(16, self.state.evidence.answers)

    def _run(self, row: Row, other: Row | None) -> tuple[Any, Any, float]:
        """The row's result by fp32 alone, with another row in its batch (None: not asked for), and the CPU time. In the
        thread of the lowest priority."""
        begin = time.thread_time()
        if self._loaded is None:
            # Here: the threads of an engine have the priority of the thread that loads it.
            self._loaded = self._reference.load()
            self.state.cpu_seconds += time.thread_time() - begin
            begin = time.thread_time()
        engine, io = self._loaded
        reduce = self._model.task.reduce
        alone = reduce(row, run_rows(engine.run, io, [row])[0])
        together = None if other is None else reduce(row, run_rows(engine.run, io, [row, other])[0])
        return alone, together, time.thread_time() - begin


def _lowest_priority() -> None:
    """Of the calling thread: it runs only where a core has nothing else to do."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
