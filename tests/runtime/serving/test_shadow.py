"""The guard of live traffic, with the real MiniLM: int8 of the native engine against fp32."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.manifest import GraphIO, LiveLimits
from penstock.recipe import Batching, EngineName, Plan, Precision, Recipe
from penstock.tasks import TaskName
from penstock_optimizer.export import Flavour
from penstock_optimizer.quantise import build
from penstock_runtime.engines.base import Engine, Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.rows import Row
from penstock_runtime.serving.loaded_model import LiveReference, LoadedModel, load_graph
from penstock_runtime.serving.predictor import Predictor
from penstock_runtime.serving.shadow import (
    LEAST_CHECKS,
    AnswerDamage,
    LiveEvidence,
    Shadow,
    compare,
    limits_of,
    measured_limits,
)
from tests.damaged_memory import damage_tile
from tests.runtime import minilm

NATIVE = Recipe(engine=EngineName.NATIVE, precision=Precision.INT8_ROWWISE, options=("per-channel",))
PLAN = Plan(recipe=NATIVE, streams=1, threads_per_stream=1, batching=Batching.PADDED, max_batch_rows=8)
ALARM = 100.0
ALL = 0.5
"""Share of the CPU time: whatever is answered is compared."""


def reference() -> tuple[Engine, GraphIO]:
    path, io = minilm.graph(minilm.ORT_FP32)
    return load_engine(path, io, minilm.ORT_FP32, Threads(1, 1)), io


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GraphIO]:
    plain = minilm.exported(Flavour.FUSED)
    rows = [row for text in minilm.texts(16, seed=7) for row in minilm.prepared(text)]
    made = build(NATIVE, plain.path, plain.io, rows, tmp_path_factory.mktemp("native"), threads=1)
    return made.path, made.io


@pytest.fixture
def model(native: tuple[Path, GraphIO]) -> Iterator[LoadedModel]:
    loaded = load_graph(minilm.task(), *native, PLAN)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def limits(native: tuple[Path, GraphIO]) -> LiveLimits:
    loaded = load_graph(minilm.task(), *native, PLAN)
    rows = [row for text in minilm.texts(300, seed=11, median=8) for row in minilm.prepared(text)]
    found = measured_limits(loaded, reference(), rows, 600)
    loaded.close()
    assert found is not None
    return found


async def serve(model: LoadedModel, limits: LiveLimits, texts: list[str], **changes: Any) -> Shadow:
    """Answer texts one after another, until there is an alarm of either kind, and compare the answers."""
    model.live = LiveReference(limits, reference)
    predictor = Predictor(model, owns_model=False, live_guard_share=ALL)
    shadow = predictor._served.shadow
    assert shadow is not None
    for name, value in changes.items():
        setattr(shadow, name, value)
    for text in texts:
        shadow._next = 0.0
        await predictor.predict(text, {})
        if shadow._work is not None:
            await shadow._work
        if max(shadow.state.evidence.value, shadow.state.evidence.instrument) >= ALARM:
            break
    await predictor.drain()
    return shadow


def test_live_answers_of_a_sound_replica_raise_no_alarm(model: LoadedModel, limits: LiveLimits) -> None:
    shadow = asyncio.run(serve(model, limits, minilm.texts(150, seed=3, median=8)))

    evidence = shadow.state.evidence
    assert evidence.answers + shadow.state.lost["repeated"] == 150
    assert evidence.checks >= LEAST_CHECKS
    assert (evidence.failed_checks, shadow.state.lost["busy"], shadow.state.lost["failed"]) == (0, 0, 0)
    assert evidence.value < 1
    assert 0 < evidence.divergence / evidence.answers < limits.divergence
    assert shadow.state.cpu_seconds > 0


def test_a_damaged_tile_of_weights_in_memory_raises_an_alarm(
    model: LoadedModel, limits: LiveLimits, native: tuple[Path, GraphIO]
) -> None:
    assert damage_tile(os.getpid(), native[0], layer=5, length=4096) == 1

    shadow = asyncio.run(serve(model, limits, minilm.texts(150, seed=4, median=8)))

    assert shadow.state.evidence.value >= ALARM
    assert shadow.state.evidence.answers < 100
    # It gives the same damaged answer again: the comparison is right.
    assert shadow.state.evidence.failed_checks == 0


def test_traffic_unlike_the_judged_texts_raises_an_alarm(model: LoadedModel, limits: LiveLimits) -> None:
    """Limits of texts that quantisation hardly changes, and answers to texts of another language."""
    dice = random.Random(5)
    texts = ["".join(chr(dice.randint(0x3041, 0x3096)) for _ in range(dice.randint(2, 12))) for _ in range(400)]
    rows = [row for text in ["the school of music"] * 100 for row in minilm.prepared(text)]
    found = measured_limits(model, reference(), rows, 600)
    assert found is not None
    assert found.divergence < limits.divergence

    shadow = asyncio.run(serve(model, found.model_copy(update={"severe": limits.severe}), texts))

    assert shadow.state.evidence.value >= ALARM
    assert shadow.state.evidence.failed_checks == 0


def test_answers_of_other_requests_are_a_fault_of_the_comparison_and_raise_no_alarm(
    model: LoadedModel, limits: LiveLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the answers of a batch were given to its rows in another order."""
    answers: list[Any] = []
    offer = Shadow.offer

    def mixed(self: Shadow, rows: Any, reduced: Any) -> None:
        answers.append(reduced)
        offer(self, rows, answers[max(0, len(answers) - 2)])

    monkeypatch.setattr(Shadow, "offer", mixed)

    shadow = asyncio.run(serve(model, limits, minilm.texts(100, seed=6, median=8)))

    assert shadow.state.evidence.instrument >= ALARM
    assert shadow.state.evidence.failed_checks > 1


def test_a_text_counts_once_and_a_failure_of_fp32_is_no_outcome(
    model: LoadedModel, limits: LiveLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = asyncio.run(serve(model, limits, ["the same text"] * 20))
    assert (same.state.evidence.answers, same.state.lost["repeated"]) == (1, 19)

    def fails() -> tuple[Engine, GraphIO]:
        raise MemoryError

    monkeypatch.setattr("tests.runtime.serving.test_shadow.reference", fails)
    broken = asyncio.run(serve(model, limits, minilm.texts(20, seed=8, median=8)))
    assert (broken.state.evidence.answers, broken.state.lost["failed"] + broken.state.lost["repeated"]) == (0, 20)


def test_it_takes_no_more_than_its_share_of_the_cpu_time(model: LoadedModel, limits: LiveLimits) -> None:
    """On a clock of the test: the comparisons that it wants in an hour take the share."""

    async def wanted(share: float) -> int:
        model.live = LiveReference(limits, reference)
        predictor = Predictor(model, owns_model=False, live_guard_share=share)
        shadow = predictor._served.shadow
        assert shadow is not None
        shadow._cost = 0.01
        found = sum(shadow.wants(tick / 1000) for tick in range(3_600_000))
        await predictor.drain()
        return found

    # 3,600 s * 2 % / 10 ms, with a standard deviation of 85.
    assert 6800 < asyncio.run(wanted(0.02)) < 7600


def test_the_thread_has_the_lowest_priority_and_the_share_of_zero_is_off(
    model: LoadedModel, limits: LiveLimits
) -> None:
    model.live = LiveReference(limits, reference)
    assert Predictor(model, owns_model=False).live_guard() is None

    async def policy() -> int:
        predictor = Predictor(model, owns_model=False, live_guard_share=0.02)
        shadow = predictor._served.shadow
        assert shadow is not None
        found = await asyncio.get_running_loop().run_in_executor(shadow._pool, os.sched_getscheduler, 0)
        await predictor.drain()
        return found

    assert asyncio.run(policy()) == os.SCHED_IDLE


def test_texts_that_were_compared_are_forgotten_in_time(
    model: LoadedModel, limits: LiveLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_runtime.serving.shadow.DISTINCT", 2)

    shadow = asyncio.run(serve(model, limits, ["one", "two", "two", "three", "one"]))

    assert (shadow.state.evidence.answers, shadow.state.lost["repeated"]) == (4, 1)


ROW = Row([1, 2, 3])
LABELS = np.array([[0.7, 0.3], [0.5, 0.5]], np.float32)


class Of:
    """A task by its name."""

    def __init__(self, name: TaskName) -> None:
        self.name = name


def spans(*found: tuple[float, int, int]) -> Any:
    return type("Answers", (), {"answers": list(found)})()


@pytest.mark.parametrize(
    ("task", "before", "after", "least", "most"),
    [
        (TaskName.FEATURE_EXTRACTION, np.ones(4), np.ones(4) * 2, (0, 0), (1e-6, 0)),
        (TaskName.FEATURE_EXTRACTION, np.ones(4), np.array([1, 1, 1, 0.0]), (1, 1), (1, 1)),
        (TaskName.SENTENCE_SIMILARITY, np.ones(4), np.array([1, 1, 1, 0.8]), (0.05, 0), (0.2, 0)),
        (TaskName.FEATURE_EXTRACTION, np.ones((3, 4)), np.ones((2, 4)), (1, 1), (1, 1)),
        (TaskName.TEXT_CLASSIFICATION, np.array([2.0, -1]), np.array([2.0, -1]), (0, 0), (0, 0)),
        (TaskName.TEXT_CLASSIFICATION, np.array([2.0, -1]), np.array([-1.0, 2]), (1, 1), (1, 1)),
        (TaskName.TEXT_CLASSIFICATION, np.array([0.01, 0.0]), np.array([0.0, 0.01]), (0, 0), (0.01, 0)),
        (TaskName.TEXT_RANKING, np.array([3.0]), np.array([-3.0]), (1, 1), (1, 1)),
        (TaskName.TOKEN_CLASSIFICATION, LABELS, LABELS[:, ::-1], (0.3, 0.5), (0.6, 0.5)),
        (TaskName.TOKEN_CLASSIFICATION, LABELS[:0], LABELS[:0], (0, 0), (0, 0)),
        (TaskName.FILL_MASK, [([5, 6], [0.8, 0.1])], [([6, 7], [0.6, 0.3])], (0.5, 1), (0.5, 1)),
        (TaskName.FILL_MASK, [([5, 6], [0.4, 0.39])], [([6, 5], [0.4, 0.39])], (0, 0), (0, 0)),
        (TaskName.QUESTION_ANSWERING, spans((0.9, 3, 8)), spans((0.8, 3, 8)), (0, 0), (0, 0)),
        (TaskName.QUESTION_ANSWERING, spans((0.9, 3, 8)), spans((0.8, 10, 12)), (1, 1), (1, 1)),
        (TaskName.QUESTION_ANSWERING, spans((0.9, 3, 8), (0.89, 10, 12)), spans((0.9, 10, 12)), (1, 0), (1, 0)),
    ],
)
def test_the_damage_of_an_answer(task: TaskName, before: Any, after: Any, least: Any, most: Any) -> None:
    found = compare(Of(task), ROW, before, after)  # type: ignore[arg-type]

    assert all(low - 1e-9 <= one <= high + 1e-9 for low, one, high in zip(least, found, most, strict=True))


def test_limits_are_the_upper_ends_of_intervals_and_need_some_texts() -> None:
    quiet = [AnswerDamage(0.01, 0.0)] * 1000

    found = limits_of(quiet)

    assert found is not None
    assert found.divergence == pytest.approx(0.0125)
    assert 0.003 < found.severe < 0.004
    assert limits_of(quiet[:59]) is None


def test_no_alarm_counts_before_the_comparison_was_checked() -> None:
    evidence = LiveEvidence(LiveLimits(texts=1000, divergence=0.015, severe=0.003))
    for _ in range(20):
        evidence.add(AnswerDamage(1.0, 1.0))
    assert evidence.value == 1.0

    for _ in range(LEAST_CHECKS):
        evidence.check(same=True)
    assert evidence.value >= ALARM
