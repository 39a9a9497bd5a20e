"""Standard output that cannot be written: one error line, or silence when the reader closed the pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.endpoints import PROGRAM, ROOT, SECONDS, clean_environment, run, write_endpoint
from tests.cli.test_errors import assert_one_sentence

COMMANDS = {
    "facts": (["host"], ""),
    "facts, unbuffered": (["host"], "1"),
    "JSON": (["host", "--json"], ""),
    "help": (["--help"], ""),
    "help of a command, unbuffered": (["host", "--help"], "1"),
    "version": (["--version"], ""),
}
"""Words and PYTHONUNBUFFERED: what cannot be written is noticed at once, or when it is flushed."""


def run_into(output: int, words: list[str], unbuffered: str) -> subprocess.CompletedProcess[str]:
    """A command whose standard output is this file descriptor."""
    return subprocess.run(
        [sys.executable, "-m", *PROGRAM, *words],
        cwd=ROOT,
        env=clean_environment(PYTHONUNBUFFERED=unbuffered),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.parametrize(("words", "unbuffered"), COMMANDS.values(), ids=COMMANDS)
def test_an_output_on_a_full_disk_is_one_error_line(words: list[str], unbuffered: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = run_into(full, words, unbuffered)
    finally:
        os.close(full)

    assert done.returncode == 1
    assert_one_sentence(done.stderr, "what is printed cannot be written: No space left on device", "a disk with room")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("words", "unbuffered"), COMMANDS.values(), ids=COMMANDS)
def test_a_closed_pipe_ends_the_command_without_a_message(words: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_into(writer, words, unbuffered)
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (1, "")


def test_buffered_output_is_written_at_the_end_or_an_error(tmp_path: Path) -> None:
    """`sys.stdout.write` keeps it back."""
    program = (
        "import sys\nfrom penstock_cli.main import checked_stdout\n"
        "with checked_stdout():\n    sys.stdout.write('äöü')\nprint(' done')"
    )
    environment = {**clean_environment(), "PYTHONUNBUFFERED": "", "PYTHONIOENCODING": "utf-8"}
    for path in (tmp_path / "out", Path("/dev/full")):
        with path.open("wb") as output:
            done = subprocess.run(
                [sys.executable, "-c", program],
                cwd=ROOT, env=environment, stdout=output, stderr=subprocess.PIPE, text=True, timeout=SECONDS,
                check=False,
            )  # fmt: skip
        assert ("HostError: what is printed cannot be written" in done.stderr) == (path.name == "full")
        assert "Exception ignored" not in done.stderr
    assert (tmp_path / "out").read_text(encoding="utf-8") == "äöü done\n"


def test_a_closed_output_is_no_error() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", *PROGRAM, "host"],
        cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")


ENCODINGS = {
    "ASCII": {"PYTHONIOENCODING": "ascii"},
    "Latin-1": {"PYTHONIOENCODING": "latin-1"},
    "the C locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.mark.parametrize("variables", ENCODINGS.values(), ids=ENCODINGS)
def test_characters_outside_the_output_encoding_are_escaped(variables: dict[str, str], tmp_path: Path) -> None:
    file = write_endpoint(tmp_path / "far.yaml", "file:///no/模型")
    done = run("optimize", file, environment=variables)

    assert done.returncode == 1
    assert r"model      file:///no/\u6a21\u578b" in done.stdout
    assert_one_sentence(done.stderr, "is not there", "Give the folder")


@pytest.mark.parametrize(
    ("variables", "begin"),
    [
        ({"TERM": "xterm", "NO_COLOR": ""}, "\x1b[31m\x1b[1merror:\x1b[0m "),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "error: "),
        ({"TERM": "dumb", "NO_COLOR": ""}, "error: "),
    ],
)
def test_errors_have_colours_only_where_they_are_wanted(variables: dict[str, str], begin: str, tmp_path: Path) -> None:
    screen, terminal = os.openpty()
    try:
        subprocess.run(
            [sys.executable, "-m", *PROGRAM, "optimize", str(tmp_path / "missing.yaml")],
            cwd=ROOT, env=clean_environment(**variables), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=terminal, timeout=SECONDS, check=False,
        )  # fmt: skip
        assert os.read(screen, 4096).decode().startswith(begin)
    finally:
        os.close(screen)
        os.close(terminal)


@pytest.mark.parametrize(("ignored", "status"), [(False, 130), (True, 0)], ids=["in front", "ignored by its shell"])
def test_ctrl_c_during_the_imports_prints_no_traceback(ignored: bool, status: int, tmp_path: Path) -> None:
    # Represents the moment of the key press: one of the first things that are imported.
    (tmp_path / "click.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nraise SystemExit(0)\n")
    begin = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " if ignored else ""
    program = f"{begin}import sys; sys.path.insert(0, {str(tmp_path)!r}); from penstock_cli.entry import main; main()"

    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (status, "")
