"""Tasks of the leader that fail start again, and the loss of the lease ends them."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise

import pytest

from penstock_operator.cluster.errors import NotLeading
from penstock_operator.metrics import REGISTRY
from penstock_operator.supervision import STEADY_SECONDS, supervised
from tests.operator.virtual_time import run


def restarts(name: str) -> float:
    return REGISTRY.get_sample_value("penstock_operator_task_restarts_total", {"task": name}) or 0.0


def test_a_task_that_fails_is_logged_and_counted_and_starts_again_with_growing_delays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    starts: list[float] = []

    async def work() -> None:
        starts.append(asyncio.get_running_loop().time())
        if len(starts) < 10:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())

    async def fail() -> None:
        raise RecursionError("too deep")

    with caplog.at_level(logging.ERROR):
        run(supervised("the example", work))

    delays = [after - before for before, after in pairwise(starts)]
    assert len(starts) == 10
    assert 0.5 <= delays[0] <= 1
    assert delays[0] < delays[2] < delays[4]
    assert max(delays) <= 60
    assert restarts("the example") == 9
    assert {record.__dict__["event"] for record in caplog.records} == {"TaskRestarted"}
    assert {record.__dict__["reason"] for record in caplog.records} == {"RecursionError"}


def test_a_task_that_ran_for_long_starts_again_soon() -> None:
    starts: list[float] = []

    async def work() -> None:
        starts.append(asyncio.get_running_loop().time())
        if len(starts) in {8, 9}:
            await asyncio.sleep(2 * STEADY_SECONDS)
        if len(starts) < 10:
            raise OverflowError

    run(supervised("the steady example", work))

    assert starts[9] - starts[8] <= 2 * STEADY_SECONDS + 1


@pytest.mark.parametrize("grouped", [False, True])
def test_the_loss_of_the_lease_ends_a_task(grouped: bool) -> None:
    error = NotLeading("the lease is not held")

    async def work() -> None:
        raise ExceptionGroup("of a task group", [ValueError(), error]) if grouped else error

    with pytest.raises(ExceptionGroup if grouped else NotLeading):
        run(supervised("the follower", work))
    assert restarts("the follower") == 0


def test_a_task_can_be_cancelled() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    async def scenario() -> bool:
        task = asyncio.create_task(supervised("the cancelled example", work))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert run(scenario())
