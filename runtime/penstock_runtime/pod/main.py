"""The process of a serving pod, from its settings to its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import uvloop

from penstock.errors import PenstockError
from penstock_runtime.logs import configure_logs
from penstock_runtime.pod.course import PodServing
from penstock_runtime.pod.termination import DEFAULT_LOG, exit_code, failure_message, leave_word
from penstock_runtime.pod.variables import PodVariables
from penstock_runtime.settings import SETTINGS, Settings

logger = logging.getLogger("penstock.pod")


def main() -> None:
    """Serve until told to end. Exit codes: 0; 1, somebody has to put something right; 75, it may pass by itself."""
    configure_logs("info")
    # The tokenizers' own thread pool would compete with the engine for its cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    log = DEFAULT_LOG
    try:
        variables = PodVariables.read(os.environ, others=[setting.variable for setting in SETTINGS])
        log = variables.termination_log
        settings = Settings.load(os.environ, others=variables.names())
        configure_logs(settings.log.log_level)
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        code = 1 if runner.run(PodServing(variables, settings).run()) else 0
    except Exception as error:
        if isinstance(error, PenstockError):
            logger.error("%s", error)  # noqa: TRY400 - it says all that a person needs
        else:  # a defect of ours: the log has all of it, the termination message a sentence
            logger.exception("this pod cannot serve")
        leave_word(log, failure_message(error))
        code = exit_code(error)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Not sys.exit: a thread may still be waiting for a store that hangs, or load a model that nobody needs any more.
    os._exit(code)
