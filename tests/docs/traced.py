"""Runs one of our programs and records the files that it and its child processes execute.

    EXECUTED=FOLDER python -m tests.docs.traced MODULE WORDS

writes one file for each process into FOLDER, with a line for each executed file, as `executed.Recorder` has them. The
time budget of an optimisation is short (`tests.shortened`).
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from penstock import process
from tests.docs.executed import recorder
from tests.shortened import shortened


class Written(set[str]):
    """Lines that are in the file as soon as they are added: a process may end by a signal."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def add(self, line: str) -> None:
        if line not in self:
            super().add(line)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def command(name: str) -> list[str]:
    """The command of a child process that is recorded as well; see `penstock.process.python_module`."""
    return [sys.executable, "-m", "tests.docs.traced", name]


if __name__ == "__main__":
    _, module, *words = sys.argv
    sys.argv = [module, *words]
    process.python_module = command
    with shortened(), recorder() as one:
        one.files = Written(Path(os.environ["EXECUTED"]) / str(os.getpid()))
        with one.record():
            runpy.run_module(module, run_name="__main__", alter_sys=True)
