"""Restarts the tasks of a leader that fail, so that a defect in one of them does not end the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from penstock.logs import log_event
from penstock_operator.cluster.errors import Backoff, NotLeading
from penstock_operator.metrics import TASK_RESTARTS

BACKOFF = Backoff(first_seconds=1.0, limit_seconds=60.0)
STEADY_SECONDS = 300.0
"""A task that ran for this time before it failed begins with the shortest back-off again."""

logger = logging.getLogger(__name__)


async def supervised(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a task, and again with growing back-off whenever it raises an exception. `name`: of the task, for the log and
    the metric.

    Ends when the task ends by itself, and with its exception when that is or contains NotLeading: another replica may
    be writing, so this process has to end.
    """
    loop = asyncio.get_running_loop()
    failures = 0
    # The first restart would not be an increase of a series that begins with it, and no alert would fire.
    TASK_RESTARTS.labels(name)
    while True:
        begin = loop.time()
        try:
            return await run()
        except Exception as error:
            if _lost_the_lease(error):
                raise
            failures = 1 if loop.time() - begin > STEADY_SECONDS else failures + 1
            TASK_RESTARTS.labels(name).inc()
            seconds = BACKOFF.seconds(failures)
            logger.exception(
                "%s failed and starts again in %.1f s: this is a defect of the operator",
                name,
                seconds,
                extra=log_event("TaskRestarted", object=name, reason=_single(error)),
            )
        await asyncio.sleep(seconds)


def _lost_the_lease(error: Exception) -> bool:
    if isinstance(error, ExceptionGroup):
        return error.subgroup(NotLeading) is not None
    return isinstance(error, NotLeading)


def _single(error: Exception) -> Exception:
    """The error itself; of a group, the first one."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
