"""Runs the process of an optimisation job's pod, from its settings to its exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from penstock.errors import Interrupted, PenstockError
from penstock.logs import log_event
from penstock.resources.job_summary import Summary
from penstock_optimizer.pod.pod_job import JobEvents, JobVariables, PodJob, serve_progress
from penstock_runtime.host.termination import DEFAULT_LOG, exit_code, write_termination_message
from penstock_runtime.logs import configure_logs
from penstock_runtime.settings import SETTINGS

logger = logging.getLogger("penstock.pod")


def main() -> None:
    """Optimise. Exit codes: 0, published; 1, a person must correct something; 75, another run may succeed."""
    configure_logs("info")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    events = JobEvents()
    log = DEFAULT_LOG
    job: PodJob | None = None

    def end(summary: Summary, code: int) -> NoReturn:
        """Report the result and exit. Worker processes end when their input does."""
        write_termination_message(log, summary.to_message())
        events.summary(summary)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    def interrupted(number: int, _: FrameType | None) -> NoReturn:
        # Exit at once: the work folder has all results so far, and no cleaning up is needed.
        error = Interrupted(
            f"the optimisation was ended by {signal.Signals(number).name} before it was through",
            remedy="It is tried again; it goes on from where it was when its work folder survives",
        )
        end(Summary.failed(error, baseline=job.baseline if job is not None else None), exit_code(error))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupted)
    try:
        variables = JobVariables.read(os.environ, others=[setting.variable for setting in SETTINGS])
        log = variables.termination_log
        if variables.progress_port is not None:
            serve_progress(events, variables.progress_host, variables.progress_port)
        job = PodJob(variables, events)
        summary = job.run()
    except BaseException as error:  # every end has to be reported
        if isinstance(error, PenstockError):
            logger.error("the optimisation failed: %s", error, extra=log_event("OptimizationFailed", reason=error))  # noqa: TRY400 - complete
        else:
            logger.exception("the optimisation failed", extra=log_event("OptimizationDefect", reason=error))
        end(Summary.failed(error, baseline=job.baseline if job is not None else None), exit_code(error))
    end(summary, 0)
