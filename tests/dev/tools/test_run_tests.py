"""`make test` runs all parts even if the first fails, repeats a few failed tests, and reports both."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import run_tests

PYTEST = """
import sys
part = {"not extended and not full_cluster": "parallel", "not extended and full_cluster": "clusters"}.get(sys.argv[4])
part = part or ("computing" if "-n" in sys.argv else "low-priority")
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
        "=== output of low-priority ===",
        "=== output of clusters ===",
        "=== output of computing ===",
    ]
    assert sum(line.startswith("FAILED (exit status 1): ") for line in lines) == len(failing)
    assert lines[-1] == last


TESTS = """
from pathlib import Path

import pytest

RUNS = Path(__file__).with_suffix(".runs")

@pytest.mark.parametrize("number", range({tests}))
def test_some(number):
    with RUNS.open("a") as runs:
        runs.write(f"{{number}}\\n")
    assert RUNS.read_text().splitlines().count(str(number)) > {failures}
"""
"""Tests that fail as often as given, and pass then."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("amounts", "contracts"),
    [
        ((1, 6, 1), "contracts/"),
        ((run_tests.MAX_REPEATED, 1, 1), "contracts/"),
        ((1, 2, 2), "contracts/"),
        ((run_tests.MAX_REPEATED + 1, 1, 1), "contracts/"),
        ((1, 1, 1), "computing/"),
    ],
    ids=["passed-alone", "several-files", "failed-twice", "too-many", "contract"],
)
def test_a_few_failed_tests_run_again_and_are_reported(
    amounts: tuple[int, int, int],
    contracts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    files, tests, failures = amounts
    for name in ("others", "low_priority", "computing", "clusters"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text("def test_one():\n    pass\n")
    for number in range(files):
        (tmp_path / f"computing/test_some{number}.py").write_text(TESTS.format(tests=tests, failures=failures))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  extended\n  full_cluster\n")
    (tmp_path / "conftest.py").write_text(
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items:\n"
        "        if 'clusters' in item.path.parts:\n"
        "            item.add_marker('full_cluster')\n"
    )
    # Only the plugin that `-n` needs: the others take longer to import than these tests take.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_tests, "COMPUTING_TESTS", ("computing",))
    monkeypatch.setattr(run_tests, "CONTRACTS", contracts)
    monkeypatch.setattr(run_tests, "LOW_PRIORITY_TESTS", ("low_priority",))
    monkeypatch.setattr(run_tests, "FULL_CLUSTER_TESTS", ("clusters",))

    status = run_tests.main("2")

    lines = capfd.readouterr().out.splitlines()
    repeated = files <= run_tests.MAX_REPEATED and contracts != "computing/"
    runs = [(tmp_path / f"computing/test_some{number}.runs").read_text().splitlines() for number in range(files)]
    assert [len(one) for one in runs] == [tests * (1 + repeated)] * files
    assert status == (not repeated or failures > 1)
    assert lines[-1] == ("make test: FAILED in computing tests" if status else "make test: passed")
    failed = [f"computing/test_some{number}.py::test_some[{one}]" for number in range(files) for one in range(tests)]
    at_second = [f"  failed at first, passed alone: {test}" for test in failed]
    assert [line for line in lines if "passed alone" in line] == (at_second if status == 0 else [])
