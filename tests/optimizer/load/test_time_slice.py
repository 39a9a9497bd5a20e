"""Time slices on this kernel."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from penstock_optimizer.load.generator import (
    SHORTEST_NANOSECONDS,
    USUAL_NANOSECONDS,
    set_time_slice,
    time_slice_nanoseconds,
)

Found = TypeVar("Found")
needs_slices = pytest.mark.skipif(
    time_slice_nanoseconds() is None and os.sched_getscheduler(0) == os.SCHED_OTHER,
    reason="this kernel has no time slices of threads (Linux 6.12 and later have)",
)


def in_a_usual_thread(call: Callable[[], Found]) -> Found:
    """Slices are set per thread, and so is the class, which may be another one here."""

    def run() -> Found:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        return call()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@needs_slices
def test_a_thread_gets_a_short_slice_and_its_usual_one_back() -> None:
    def call() -> list[tuple[bool, int | None]]:
        return [
            (set_time_slice(nanoseconds), time_slice_nanoseconds())
            for nanoseconds in (USUAL_NANOSECONDS, SHORTEST_NANOSECONDS, USUAL_NANOSECONDS)
        ]

    before, short, after = in_a_usual_thread(call)

    assert short == (True, SHORTEST_NANOSECONDS)
    assert before == after
    assert before[1] is not None
    assert before[1] > SHORTEST_NANOSECONDS


@needs_slices
def test_niceness_and_class_stay_as_they_are() -> None:
    def call() -> tuple[bool, int, int]:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, 5)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return set_time_slice(SHORTEST_NANOSECONDS), os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(0)

    assert in_a_usual_thread(call) == (True, 5, os.SCHED_BATCH)


def test_a_thread_of_another_class_is_left_alone() -> None:
    def call() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return set_time_slice(SHORTEST_NANOSECONDS), os.sched_getscheduler(0)

    assert in_a_usual_thread(call) == (False, os.SCHED_IDLE)


def test_a_slice_that_the_kernel_refuses_or_rounds_is_reported_as_not_set() -> None:
    assert not in_a_usual_thread(lambda: set_time_slice(SHORTEST_NANOSECONDS // 2))


def test_an_architecture_without_known_system_call_numbers_is_left_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")

    assert not set_time_slice(SHORTEST_NANOSECONDS)
    assert time_slice_nanoseconds() is None
