"""`make test` runs all parts even if the first fails, and passes only if all that it should run has run and passed."""

from __future__ import annotations

import datetime as dt
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools import run_tests
from tools.run_tests import EXCEPTIONS, FAILED, UNSTABLE, Exceptions, Part, verdict

ROOT = Path(__file__).parents[3]
PYTEST = """
import sys
part = {"not extended and not full_cluster": "parallel", "not extended and full_cluster": "clusters"}.get(sys.argv[4])
part = part or ("pure" if "timeout=3600" in sys.argv else "computing" if "-n" in sys.argv else "low-priority")
print(f"=== output of {part} ===")
sys.exit(part in FAILING)
"""
"""A program that takes pytest's arguments, prints which part it is, and fails for those in FAILING."""


@pytest.mark.parametrize(
    "failing", [(), ("parallel",), ("pure",), ("computing",), ("parallel", "clusters")], ids=" ".join
)
def test_every_part_runs_and_counts(
    failing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run_tests, "PYTEST", (sys.executable, "-c", f"FAILING = {failing!r}\n{PYTEST}"))

    status = run_tests.main("2")

    lines = capfd.readouterr().out.splitlines()
    assert status == (FAILED if failing else 0)
    shown = [line.split()[-2] for line in lines if line.startswith("===")]
    assert shown == ["parallel", "low-priority", "clusters", "pure", "computing"]
    assert all(f"{name.rstrip('s')} tests" in lines[-1] for name in failing)


def part(*, status: int = 0, repeated: tuple[str, ...] = (), skipped: tuple[tuple[str, str], ...] = ()) -> Part:
    made = object.__new__(Part)
    made.name, made.status, made.repeated, made.skipped = "a part", status, [*repeated], [*skipped]
    return made


TEST = "tests/one/test_a.py::test_x[1]"
ALLOWED = Exceptions(("tests/two/test_b.py::test_y",), (("no .* here", ("tests/one/",)),))


@pytest.mark.parametrize(
    ("parts", "status", "named"),
    [
        ([part(), part(skipped=((TEST, "no browser here"),))], 0, ""),
        ([part(repeated=("tests/two/test_b.py::test_y[2]",))], 0, ""),
        ([part(repeated=(TEST,))], UNSTABLE, TEST),
        ([part(skipped=((TEST, "no torch"),))], FAILED, f"{TEST}: no torch"),
        ([part(skipped=(("tests/two/test_b.py", "no browser here"),))], FAILED, "tests/two/test_b.py"),
        ([part(status=2)], FAILED, "a part"),
        # A failure is more than an unstable test.
        ([part(status=1), part(repeated=(TEST,))], FAILED, "a part"),
    ],
)
def test_what_is_not_listed_is_no_success(parts: list[Part], status: int, named: str) -> None:
    found, sentence = verdict((*parts,), ALLOWED)

    assert found == status
    assert named in sentence
    assert (sentence == "passed") is (status == 0)


def test_few_tests_are_listed_as_unstable_each_with_a_reason_and_a_date() -> None:
    found = tomllib.loads((ROOT / EXCEPTIONS).read_text()).get("unstable", [])

    assert len(found) <= 5
    for one in found:
        assert (ROOT / one["test"].partition("::")[0]).is_file()
        assert len(one["reason"]) > 20
        assert isinstance(one["since"], dt.date)


def test_allowed_skips_name_files_that_exist_and_are_about_no_package() -> None:
    exceptions = Exceptions.read(ROOT / EXCEPTIONS)
    files = [name for _, names in exceptions.skips for name in names]

    assert [name for name in files if not (ROOT / name).exists()] == []
    for name in files:
        for reason in ("could not import 'torch': No module named 'torch'", "no Go here", "no C compiler"):
            assert not exceptions.allows_skip(name, reason)


TESTS = """
from pathlib import Path

import pytest

RUNS = Path(__file__).with_suffix(".runs")

@pytest.mark.parametrize("number", range({tests}))
def test_some(number):
    with RUNS.open("a") as runs:
        runs.write(f"{{number}}\\n")
    assert RUNS.read_text().splitlines().count(str(number)) > {failures}

def test_skipped():
    pytest.skip("no reason")
"""
"""Tests that fail as often as given, and pass then."""
CONFTEST = (ROOT / "tests/conftest.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("amounts", "contracts", "repeated"),
    [
        ((1, 3, 1), "contracts/", True),
        ((1, 2, 2), "contracts/", True),
        ((run_tests.MAX_REPEATED + 1, 1, 1), "contracts/", False),
        ((1, 1, 1), "computing/", False),
    ],
    ids=["passed-alone", "failed-twice", "too-many", "contract"],
)
def test_a_few_failed_tests_run_again(
    amounts: tuple[int, int, int], contracts: str, repeated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, tests, failures = amounts
    (tmp_path / "computing").mkdir()
    for number in range(files):
        (tmp_path / f"computing/test_some{number}.py").write_text(TESTS.format(tests=tests, failures=failures))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    hook = CONFTEST[CONFTEST.index("def pytest_sessionfinish") :]
    (tmp_path / "conftest.py").write_text(f"import pytest\n\n{hook}")
    # Only the plugin that `-n` needs: the others take longer to import than these tests take.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_tests, "CONTRACTS", contracts)

    made = Part("computing tests", tmp_path / "cache", "-n", "2", "--dist", "loadfile", "computing", background=True)
    made.finish()
    made.repeat_failed_tests()

    runs = [(tmp_path / f"computing/test_some{number}.runs").read_text().splitlines() for number in range(files)]
    assert [len(one) for one in runs] == [tests * (1 + repeated)] * files
    passed = repeated and failures == 1
    assert made.status == (0 if passed else 1)
    assert made.repeated == (
        [f"computing/test_some0.py::test_some[{number}]" for number in range(tests)] if passed else []
    )
    assert made.skipped == [(f"computing/test_some{number}.py::test_skipped", "no reason") for number in range(files)]


def test_files_that_pass_only_after_others_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    shared: dict[str, Any] = {
        "a": "import sys\ndef test_a(): sys.left = 1\n",
        "b": "import sys\ndef test_b(): sys.left\n",
    }
    for name, text in shared.items():
        (tmp_path / f"tests/test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  extended\n  full_cluster\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.chdir(tmp_path)

    assert run_tests.each_file_alone("2") == FAILED

    assert capfd.readouterr().out.splitlines()[-1] == "each file alone: FAILED in tests/test_b.py"
