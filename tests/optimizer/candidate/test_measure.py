"""Measuring, with engines and predictors of known times."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.manifest import GemmShare
from penstock.recipe import Precision
from penstock_optimizer.candidate import measure
from penstock_optimizer.candidate.isolation import CpuTime
from penstock_optimizer.candidate.measure import (
    IO,
    OPERATIONS,
    ROWS,
    Contention,
    EncoderShape,
    PredictRequest,
    chain_recipes,
    gemm_shares,
    measure_chain,
    sample_plan,
    time_runs,
    write_chain,
)
from penstock_optimizer.search.space import wide_thresholds
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.errors import InferenceFailed, Overloaded
from tests.operator.virtual_time import run


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("run_seconds", "seconds", "runs"), [(0.1, 1.0, 10), (5.0, 1.0, 3), (0.001, 1.0, 60), (0.5, 0.0, 3)]
)
def test_runs_fill_the_time_and_are_at_least_three(run_seconds: float, seconds: float, runs: int) -> None:
    clock = Clock()

    def run() -> None:
        clock.now += run_seconds

    times = time_runs(run, seconds, clock=clock, contention=Contention(CpuTime))

    assert len(times) == pytest.approx(runs, abs=1)
    assert times == pytest.approx([run_seconds * 1e3] * len(times))


class Waits:
    """The CPU times of a process that ran for a second in each measurement, and waited for these shares of it."""

    def __init__(self, shares: list[float]) -> None:
        self.shares = iter(shares)
        self.now = CpuTime()
        self.calls = 0

    def __call__(self) -> CpuTime:
        self.calls += 1
        if self.calls % 2 == 0:  # at the end of a measurement
            share = next(self.shares)
            self.now += CpuTime(int(1e9 * (1 - share)), int(1e9 * share))
        return self.now


@pytest.mark.parametrize(
    ("shares", "counted"),
    [
        ([0.0] * 9, [1, 2, 3, 4]),
        ([0.0, 0.5, 0.0, 0.02, 0.0], [1, 3, 4]),
        ([0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0], [5, 6, 7]),
        ([0.5] * 20, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
    ids=["quiet", "once", "first half", "busy"],
)
def test_disturbed_runs_are_measured_again_within_twice_the_time(shares: list[float], counted: list[int]) -> None:
    clock = Clock()
    number = -1

    def run() -> None:
        nonlocal number
        number += 1
        clock.now += 1 + number / 1000

    contention = Contention(Waits(shares))

    times = time_runs(run, 4, clock=clock, contention=contention)

    assert [round(time - 1000) for time in times] == counted
    assert contention.total.share == pytest.approx(sum(shares[:number]) / number)


def test_a_thread_that_shares_its_cpu_waits() -> None:
    """A real process that computes on one CPU next to another one."""
    program = (
        "import os, sys, time\n"
        "from penstock_optimizer.candidate.measure import Contention\n"
        "os.sched_setaffinity(0, [int(sys.argv[1])])\n"
        "contention = Contention()\n"
        "with contention.measured():\n"
        "    end = time.process_time() + 0.3\n"
        "    while time.process_time() < end: pass\n"
        "print(contention.total.share)\n"
    )
    cpu = str(min(os.sched_getaffinity(0)))
    spin = "import os, sys\nos.sched_setaffinity(0, [int(sys.argv[1])])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin, cpu], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            found = subprocess.run([sys.executable, "-c", program, cpu], capture_output=True, text=True, check=True)
        finally:
            other.kill()
    assert float(found.stdout) > 0.3


def test_the_first_run_is_not_counted_and_garbage_collection_is_off() -> None:
    clock = Clock()
    states: list[bool] = []

    def run() -> None:
        clock.now += 100 if not states else 1
        states.append(gc.isenabled())

    assert max(time_runs(run, 0, clock=clock)) == pytest.approx(1e3)
    assert states[1:] == [False] * (len(states) - 1)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({8: 1.2, 16: 1.0, 32: 0.8, 64: 0.6}, (32, 32)),
        ({8: 0.8, 16: 0.7}, (8, 8)),
        ({8: 1.2, 16: 1.1}, (None, None)),
        ({8: 1.2, 16: 0.8, 32: 1.1, 64: 0.7, 128: 0.6}, (16, 16)),  # one disturbance among gains
        ({8: 0.8, 16: 1.2, 32: 1.2, 64: 0.6}, (64, 64)),  # one fast run among losses
        ({8: 0.9, 16: 0.9}, (None, 8)),  # twice the processor time, which no other client needs
        ({8: 0.98, 16: 0.98}, (None, None)),  # noise
        ({8: 1.0, 16: 0.95, 32: 0.9, 64: 0.8}, (64, 16)),
        ({}, (None, None)),
    ],
)
def test_single_rows_run_wide_from_the_length_at_which_it_is_faster(
    ratios: Mapping[int, float], expected: tuple[int | None, int | None]
) -> None:
    assert wide_thresholds(list(ratios), lambda _: 10.0, lambda tokens: 10.0 * ratios[tokens]) == expected


@given(st.lists(st.floats(0.5, 1.5), max_size=8))
def test_a_client_alone_never_runs_wide_from_later_than_one_among_others(ratios: list[float]) -> None:
    found = wide_thresholds(range(len(ratios)), lambda _: 1.0, ratios.__getitem__)

    assert found.among_others is None or (found.alone is not None and found.alone <= found.among_others)


class FakePredictor:
    """`cores` requests at once, each taking its own time."""

    def __init__(self, cores: int) -> None:
        self._cores = asyncio.Semaphore(cores)
        self.seen: list[float] = []
        self.most_waiting = 0
        self._waiting = 0

    async def predict(self, inputs: Any, parameters: Mapping[str, Any]) -> None:
        self.seen.append(inputs)
        self._waiting += 1
        self.most_waiting = max(self.most_waiting, self._waiting)
        async with self._cores:
            await asyncio.sleep(inputs)
        self._waiting -= 1


@pytest.fixture(autouse=True)
def _clock_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping requests are timed in virtual time; code with its own clock is not."""
    clock = SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(measure, "time", clock)


def requests(seconds: Sequence[float]) -> list[PredictRequest]:
    return [PredictRequest(value, {}) for value in seconds]


def test_a_plan_is_sampled_alone_and_at_saturation() -> None:
    predictor = FakePredictor(cores=2)
    sample = run(sample_plan(predictor, requests([0.002] * 18 + [0.02] * 2)))

    assert sample.p50_milliseconds == pytest.approx(2)
    assert sample.p95_milliseconds == pytest.approx(20)
    # 20 requests take 76 ms of one core, and there are two.
    assert sample.requests_per_second == pytest.approx(2 * 20 / 0.076, rel=0.05)
    assert sample.loaded_p95_milliseconds is None
    assert predictor.most_waiting >= measure.OUTSTANDING


def test_every_lone_measurement_has_the_whole_mix() -> None:
    predictor = FakePredictor(cores=1)
    run(measure.lone_latency(predictor, requests([0.001, 0.002, 0.003])))

    assert {predictor.seen.count(value) for value in (0.001, 0.002, 0.003)} == {len(predictor.seen) // 3}


def test_a_slow_model_is_cut_to_a_few_seconds() -> None:
    predictor = FakePredictor(cores=1)
    run(measure.lone_latency(predictor, requests([0.5] * 50)))

    assert len(predictor.seen) == pytest.approx(measure.MOST_LONE_SECONDS / 0.5, abs=1)


def test_latency_under_a_load_that_is_too_high_counts_the_waiting() -> None:
    predictor = FakePredictor(cores=1)
    light = run(measure.loaded_p95(FakePredictor(cores=1), requests([0.005]), 20))
    heavy = run(measure.loaded_p95(predictor, requests([0.02]), 100))

    assert 5 <= light < 20
    # Some 200 requests arrive in two seconds, and take four to end.
    assert heavy == pytest.approx(2000, rel=0.25)


class FullPredictor(FakePredictor):
    """Refuses requests beyond a queue length, as the server's queue does."""

    async def predict(self, inputs: Any, parameters: Mapping[str, Any]) -> None:
        if self._waiting >= 64:
            raise Overloaded("64 sequences wait already")
        await super().predict(inputs, parameters)


def test_a_refusal_under_a_load_that_is_too_high_is_a_miss_and_no_fault() -> None:
    # Of 200 requests some 40 are answered within the two seconds; the 64 that wait then take 3.2 s more.
    found = run(measure.loaded_p95(FullPredictor(cores=1), requests([0.05]), 100))

    assert 1e3 * measure.DRAIN_SECONDS < found <= 1e3 * (measure.LOADED_SECONDS + measure.DRAIN_SECONDS)


def test_few_refusals_leave_the_p95_of_the_answers() -> None:
    class Refuses(FakePredictor):
        async def predict(self, inputs: Any, parameters: Mapping[str, Any]) -> None:
            if len(self.seen) == 50:
                self.seen.append(inputs)
                raise Overloaded("once")
            await super().predict(inputs, parameters)

    assert run(measure.loaded_p95(Refuses(cores=4), requests([0.005]), 100)) < 20


def test_a_measurement_of_a_model_far_too_slow_for_the_rate_ends_early() -> None:
    predictor = FakePredictor(cores=1)

    async def timed() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        return await measure.loaded_p95(predictor, requests([1.0]), 100), loop.time() - begin

    found, seconds = run(timed())

    # 200 requests would take 200 s.
    assert seconds == pytest.approx(measure.LOADED_SECONDS + measure.DRAIN_SECONDS)
    assert found > 1e3 * measure.DRAIN_SECONDS


def test_an_extreme_rate_is_measured_in_limited_time() -> None:
    predictor = FullPredictor(cores=1)
    found = run(measure.loaded_p95(predictor, requests([0.05]), 1_000_000))

    assert len(predictor.seen) < 200
    assert found > 1e3 * measure.DRAIN_SECONDS


def test_an_answer_that_is_an_error_still_ends_the_measurement() -> None:
    class Broken(FakePredictor):
        async def predict(self, inputs: Any, parameters: Mapping[str, Any]) -> None:
            raise InferenceFailed("NaN")

    with pytest.raises(InferenceFailed):
        run(measure.loaded_p95(Broken(cores=1), requests([0.005]), 100))


# The ceiling


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (Precision.FP32, [("onnxruntime", "fp32"), ("openvino", "fp32")]),
        (Precision.BF16, [("openvino", "bf16")]),
        (Precision.INT8_DYNAMIC, [("onnxruntime", "int8-static"), ("openvino", "int8-static")]),
        (Precision.INT8_ROWWISE, [("onnxruntime", "int8-static"), ("openvino", "int8-static")]),
    ],
)
def test_the_ceiling_is_measured_in_the_precision_of_the_plan(
    precision: Precision, expected: list[tuple[str, str]]
) -> None:
    found = chain_recipes(precision)

    assert [(recipe.engine.value, recipe.precision.value) for recipe in found] == expected


@pytest.mark.parametrize("int8", [False, True])
def test_both_engines_run_the_chain_of_products(tmp_path: Path, int8: bool) -> None:
    graph = tmp_path / "chain.onnx"
    write_chain(graph, int8=int8)
    rates = []
    for recipe in chain_recipes(Precision.INT8_STATIC if int8 else Precision.FP32):
        engine = load_engine(graph, IO, recipe, Threads(1, 1))
        rates.append(measure_chain(engine, runs=1))
        engine.close()

    assert all(rate > 1 for rate in rates)


def test_a_chain_that_takes_a_second_has_the_rate_of_its_operations() -> None:
    clock = Clock()

    class Slow:
        def run(self, batch: Any) -> dict[str, Any]:
            assert batch.input_ids.shape[0] == ROWS
            assert batch.input_ids.dtype == np.int64
            clock.now += 1.0
            return {}

    assert measure_chain(Slow(), runs=2, clock=clock) == pytest.approx(OPERATIONS / 1e9)  # type: ignore[arg-type]


def test_the_share_of_the_ceiling_is_operations_over_time_over_ceiling() -> None:
    shape = EncoderShape(384, 6, 1536)
    (share,) = gemm_shares(shape, {128: 10.0}, 500.0)

    reached = shape.operations(128) / 0.010 / 1e9
    assert share == GemmShare(tokens=128, ceiling_gops=500.0, reached_gops=reached, share=reached / 500.0)
