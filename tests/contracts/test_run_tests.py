"""`make test` runs all parts even if the first fails, and its last line names the failed ones."""

from __future__ import annotations

import sys

import pytest

from tools import run_tests

PYTEST = """
import sys
part = {"not extended and not full_cluster": "parallel", "not extended": "computing"}.get(sys.argv[2], "clusters")
print(f"=== output of {part} ===")
sys.exit(part in FAILING)
"""
"""In place of pytest: prints which part it is, and fails for those in FAILING."""


def run(failing: set[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """The exit status and the lines of output."""
    monkeypatch.setattr(run_tests, "PYTEST", (sys.executable, "-c", f"FAILING = {failing!r}\n{PYTEST}"))
    status = run_tests.main("2")
    return status, capfd.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("failing", "last"),
    [
        (set(), "make test: passed"),
        ({"parallel"}, "make test: FAILED in parallel tests"),
        ({"computing"}, "make test: FAILED in computing tests"),
        (
            {"parallel", "clusters"},
            "make test: FAILED in parallel tests, cluster tests",
        ),
    ],
)
def test_every_part_runs_and_is_reported(
    failing: set[str], last: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    status, lines = run(failing, monkeypatch, capfd)

    assert status == bool(failing)
    assert [line for line in lines if line.startswith("===")] == [
        "=== output of parallel ===",
        "=== output of clusters ===",
        "=== output of computing ===",
    ]
    assert sum(line.startswith("FAILED (exit status 1): ") for line in lines) == len(failing)
    assert lines[-1] == last
