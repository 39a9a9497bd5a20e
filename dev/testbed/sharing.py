"""One cluster for several test processes: the first that wants it starts it, the last that has it ends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed import machine, state
from testbed.build import Say, say
from testbed.daemon import Process
from testbed.machine import Machine, machine_lock

USERS = state.STATE / "machine-users"
"""One record for each process that uses the cluster of this machine."""

LOCK = "sharing.lock"


STARTED_BY_TESTS = USERS / "started-by-tests"


@contextmanager
def shared_machine(*, report: Say = say) -> Iterator[Machine]:
    """The machine's cluster for the block.

    One that `make cluster` started stays. One that tests started ends with the last of its users; users that were
    killed do not count, and a cluster that only such users had is started afresh.
    """
    own = USERS / f"{Process.current().pid}.json"
    with machine_lock(LOCK):
        if STARTED_BY_TESTS.exists() and not _living():
            machine.down(report=report)
            STARTED_BY_TESTS.unlink()
        running = machine.find()
        if running is None:
            running = machine.up(report=report)
            USERS.mkdir(parents=True, exist_ok=True)
            STARTED_BY_TESTS.touch()
        Process.current().write(own)
    try:
        yield running
    finally:
        with machine_lock(LOCK):
            own.unlink(missing_ok=True)
            if STARTED_BY_TESTS.exists() and not _living():
                machine.down(report=report)
                STARTED_BY_TESTS.unlink()


def _living() -> list[Path]:
    """Records of users that still run; other records are removed."""
    living = []
    for record in USERS.glob("*.json"):
        process = Process.read(record)
        if process is not None and process.alive:
            living.append(record)
        else:
            record.unlink(missing_ok=True)
    return living
