"""A snapshot of the state of this process that a test must leave as it found it, and its restoration.

Tests of one file, and of the files that pytest-xdist gives to the same worker, share a process. What one of them leaves
behind (an environment variable, a signal handler, a limit) changes the results of others, and only in some orders.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import pytest

from penstock_runtime.host.cores import pin_process
from penstock_runtime.no_telemetry import REFUSALS

SET_FOR_LIBRARIES = frozenset(
    {*REFUSALS, "TOKENIZERS_PARALLELISM", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"}
)
"""Environment variables that our code sets for the rest of a process, always to the same value, and those that
scikit-learn (KMP) and torch set while they are imported."""
VENDORED = ("setuptools/_vendor", "onnxruntime/transformers")
"""Ends of the paths that setuptools and onnxruntime append to sys.path while they are imported."""
SET_BY_PYTEST = frozenset({"PYTEST_CURRENT_TEST"})
LIMITS = {
    name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
}
"""Of resources, by name. RLIMIT_OFILE is another name of RLIMIT_NOFILE."""
SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM})
"""Those that can have a handler. pytest-timeout has another one of SIGALRM for each test."""


@dataclass(frozen=True)
class ProcessState:
    """What a test could change for the tests after it."""

    environment: dict[str, str]
    directory: str
    umask: int
    cpus: set[int]
    niceness: int
    signal_handlers: dict[int, Any]
    limits: dict[str, tuple[int, int]]
    module_search_path: list[str]
    recursion_limit: int
    logging: dict[str, Any]
    excepthook: Any

    @classmethod
    def now(cls) -> ProcessState:
        """The present state."""
        umask = os.umask(0o077)
        os.umask(umask)
        ours = SET_FOR_LIBRARIES | SET_BY_PYTEST
        return cls(
            environment={name: value for name, value in os.environ.items() if name not in ours},
            directory=os.getcwd(),  # noqa: PTH109 - a string, as os.chdir takes it
            umask=umask,
            cpus=os.sched_getaffinity(0),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
            signal_handlers={number: signal.getsignal(number) for number in SIGNALS},
            limits={name: resource.getrlimit(number) for name, number in LIMITS.items()},
            module_search_path=_own_search_path(),
            recursion_limit=sys.getrecursionlimit(),
            logging=_logging(),
            excepthook=sys.excepthook,
        )

    def differences(self, after: ProcessState) -> list[str]:
        """A sentence for each field, and for each name in it, that is another one in `after`."""
        found = []
        for field in fields(self):
            old, new = getattr(self, field.name), getattr(after, field.name)
            if isinstance(old, dict):
                found += [
                    f"{field.name}[{name!r}]: {old.get(name)!r} before, {new.get(name)!r} after"
                    for name in sorted(old.keys() | new.keys())
                    if old.get(name) != new.get(name)
                ]
            elif old != new:
                found.append(f"{field.name}: {old!r} before, {new!r} after")
        return found

    def restore(self) -> None:
        """Bring the process back to this state, so that only the test that changed it fails."""
        present = ProcessState.now()
        for name in present.environment.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        os.chdir(self.directory)
        os.umask(self.umask)
        if present.cpus != self.cpus:
            pin_process(self.cpus)
        for number, handler in self.signal_handlers.items():
            if handler is not None and handler != present.signal_handlers[number]:
                signal.signal(number, handler)
        for name, limit in self.limits.items():
            if limit != present.limits[name]:
                resource.setrlimit(LIMITS[name], limit)
        sys.path[:] = [*self.module_search_path, *(path for path in sys.path if path.endswith(VENDORED))]
        sys.setrecursionlimit(self.recursion_limit)
        sys.excepthook = self.excepthook
        for name in present.logging.keys() | self.logging.keys():
            if name.startswith(_LEVEL):
                logging.getLogger(name.removeprefix(_LEVEL)).setLevel(self.logging.get(name, logging.NOTSET))
        logging.disable(self.logging["disable"])
        logging.root.setLevel(self.logging["root level"])
        logging.root.handlers[:] = [
            *self.logging["root handlers"],
            *(one for one in logging.root.handlers if _is_of_pytest(one)),
        ]


@contextmanager
def signals_to_this_process_fail() -> Iterator[None]:
    """Until the end of the block, `os.kill` and `signal.raise_signal` fail the test that would signal this process.

    A handler that is not installed, or not any more, would let the signal end the tests of other files, too. Processes
    that are forked from this one are free to signal themselves.
    """
    own, kill, raise_signal = os.getpid(), os.kill, signal.raise_signal

    def checked_kill(pid: int, number: int) -> None:
        # 0 asks whether the process exists; ids from 0 down are those of process groups.
        if number and os.getpid() == own and (pid in {own, 0, -1} or pid == -os.getpgrp()):
            pytest.fail(f"signal {number} to the process of the tests: {_REMEDY}")
        kill(pid, number)

    def checked_raise(number: int) -> None:
        if os.getpid() == own:
            pytest.fail(f"signal {number} to the process of the tests: {_REMEDY}")
        raise_signal(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", checked_kill)
        patch.setattr(signal, "raise_signal", checked_raise)
        yield


_REMEDY = "send it in a process that the test starts (tests/penstock/test_process.py has an example)"
_LEVEL = "level of "


def _own_search_path() -> list[str]:
    return [path for path in sys.path if not path.endswith(VENDORED)]


def _logging() -> dict[str, Any]:
    ours = {
        f"{_LEVEL}{name}": logger.level
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith("penstock") and isinstance(logger, logging.Logger) and logger.level
    }
    return {
        "disable": logging.root.manager.disable,
        "root level": logging.root.level,
        "root handlers": [one for one in logging.root.handlers if not _is_of_pytest(one)],
        **ours,
    }


def _is_of_pytest(handler: logging.Handler) -> bool:
    return type(handler).__module__.startswith("_pytest.")
