"""A process ends on a signal, also as process 1 of a container and during its imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.process import python_module

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


INTERRUPTED = """
import signal
from penstock.process import sigterm_interrupts
before = signal.getsignal({number})
try:
    with sigterm_interrupts():
        signal.raise_signal({number})
    print("not interrupted", signal.getsignal({number}) is before)
except KeyboardInterrupt:
    print("interrupted", signal.getsignal({number}) is before)
"""
"""In a process of its own: a signal that is not caught would end the process of other tests, too."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_only_within_the_context_manager(number: signal.Signals) -> None:
    code = INTERRUPTED.format(number=int(number))
    # The handler is the default one also where the tests run under `nohup`.
    words = ["env", "--default-signal=HUP", sys.executable, "-c", code]

    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "interrupted True\n"


def test_a_hangup_that_is_ignored_as_by_nohup_does_not_interrupt() -> None:
    words = ["env", "--ignore-signal=HUP", sys.executable, "-c", INTERRUPTED.format(number=int(signal.SIGHUP))]

    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "not interrupted True\n"


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


HOSTILE_MODULE = "raise SystemExit('code of another folder was run')"


def test_a_child_process_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(HOSTILE_MODULE)

    done = subprocess.run(
        [*python_module("json.tool"), "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_of_an_isolated_process_takes_no_code_from_variables(tmp_path: Path) -> None:
    """A `vocab.txt` that is a zip with sitecustomize.py, named in PYTHONPATH: the start of Python would run it."""
    with zipfile.ZipFile(tmp_path / "vocab.txt", "w") as archive:
        archive.writestr("sitecustomize.py", HOSTILE_MODULE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "vocab.txt")}
    program = "import subprocess\nfrom penstock.process import python_module\n"
    program += "raise SystemExit(subprocess.run([*python_module('json.tool'), '--help']).returncode)"

    def run(*words: str) -> str:
        return subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
        ).stderr

    assert "code of another folder was run" in run("-c", "pass")
    assert run("-I", "-c", program) == ""
