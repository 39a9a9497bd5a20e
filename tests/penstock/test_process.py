"""A process ends on a signal, also as process 1 of a container and during its imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.process import sigterm_interrupts

BEGINS = """
import os, sys, time
{first}
sys.stdout.write(f"{{os.getpid()}}\\n")
sys.stdout.flush()
while True:
    time.sleep(0.05)  # busy with something else
"""
"""Waits in short steps: Python checks for signals before each step, and would miss one that arrives just before a long
wait. Event loops of real processes are woken."""


@contextmanager
def first_of_a_container(code: str) -> Iterator[subprocess.Popen[str]]:
    """Run it as process 1 of a PID namespace, until the block ends."""
    if os.geteuid() != 0:
        pytest.skip("a PID namespace needs root here")
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def inner(process: subprocess.Popen[str]) -> int:
    """The id outside of the namespace of its process 1."""
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_process_1_of_a_container_ends_at_a_signal(number: signal.Signals) -> None:
    code = BEGINS.format(first="from penstock.process import exit_on_signal; exit_on_signal()")
    with first_of_a_container(code) as process:
        os.kill(inner(process), number)

        assert process.wait(20) == 128 + number


def test_the_command_line_as_process_1_ends_at_a_signal() -> None:
    waits = BEGINS.format(first="")
    code = f"from penstock_cli import main as m; m.cli = lambda args: exec({waits!r}); m.main([])"
    with first_of_a_container(code) as process:
        os.kill(inner(process), signal.SIGTERM)

        assert process.wait(20) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_only_within_the_context_manager(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        signal.raise_signal(number)

    assert signal.getsignal(number) is before


def test_a_hangup_that_is_ignored_as_by_nohup_does_not_interrupt() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        with sigterm_interrupts():
            signal.raise_signal(signal.SIGHUP)

        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_without_exit_on_signal_the_kernel_ignores_a_signal_to_process_1() -> None:
    """The reason for exit_on_signal: when this test fails, it is no longer needed."""
    with first_of_a_container(BEGINS.format(first="")) as process:
        os.kill(inner(process), signal.SIGTERM)

        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)


@pytest.mark.parametrize("module", ["penstock_runtime.pod", "penstock_optimizer.pod"])
def test_pods_listen_before_their_slow_imports(module: str) -> None:
    code = (
        f"import sys, {module}.__main__; print(sorted({{'asyncio', 'numpy', 'pydantic', 'uvloop'}} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert output.strip() == "[]"
