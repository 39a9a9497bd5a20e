"""The repository follows the rules of CONTRIBUTING.md."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from tests.contracts.tracked import ROOT, sources, tracked
from tools.run_tests import COMPUTING_TESTS, FULL_CLUSTER_TESTS, PURE_TESTS

LONGEST_MODULE = 520
"""CONTRIBUTING.md asks for about 500 lines."""


def test_modules_are_within_the_size_limit() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}

    long = {name: lines for name, lines in lengths.items() if lines > LONGEST_MODULE}

    assert long == {}


def test_every_module_of_the_product_is_linted() -> None:
    ruff = Path(sys.executable).with_name("ruff")
    shown = subprocess.run([ruff, "check", "--show-files", ROOT], capture_output=True, text=True, check=True).stdout

    assert [str(path) for path in sources() if str(path) not in shown.splitlines()] == []


def test_no_module_has_a_catch_all_name() -> None:
    drawers = {"utils.py", "helpers.py", "common.py", "misc.py"}

    assert [path for path in tracked("*.py") if path.name in drawers] == []


def test_the_second_phase_covers_all_tests_on_the_full_cluster() -> None:
    folders = [ROOT / folder for folder in FULL_CLUSTER_TESTS]
    uses = [
        path
        for path in tracked("tests/**.py")
        if path.parent not in {Path(__file__).parent, ROOT / "tests/dev/tools"}
        and re.search(r"\b(full|machine)_(cluster|kubectl|namespace)\b", path.read_text())
    ]

    assert [path for path in uses if not any(path.is_relative_to(one) for one in folders)] == []
    assert all(any(path.is_relative_to(one) for path in uses) for one in folders)


@pytest.mark.parametrize("place", COMPUTING_TESTS)
def test_tests_that_run_at_the_same_time_as_clusters_start_none(place: str) -> None:
    tests = tracked(place if place.endswith(".py") else f"{place}/**.py")

    assert tests
    assert [path for path in tests if re.search(r"\b(control_plane|kubectl)\b", path.read_text())] == []


def test_tests_that_may_get_no_processor_time_for_minutes_look_at_no_clock() -> None:
    clock = re.compile(
        r"\btime\.(monotonic|perf_counter|sleep|time)\(|\btimeout=|\basyncio\.sleep|end_to_end\.optimising"
    )
    tests = [path for place in PURE_TESTS for path in tracked(place if place.endswith(".py") else f"{place}/**.py")]

    assert tests
    assert [path for path in tests if clock.search(path.read_text())] == []


def test_only_files_of_the_second_phase_import_pytorch_while_they_are_collected() -> None:
    """Each process of the first phase would take seconds and a gigabyte for it."""
    packages = {"torch", "transformers", "sentence_transformers"}
    imported = {path: _imported_modules(path) for path in tracked("tests/**.py")}
    heavy = {path for path, names in imported.items() if packages & {name.partition(".")[0] for name in names}}
    while more := {path for path, names in imported.items() if names & set(map(_module, heavy))} - heavy:
        heavy |= more

    assert len(heavy) > len(COMPUTING_TESTS)
    places = [ROOT / place for place in COMPUTING_TESTS]
    assert [path for path in heavy if path.match("test_*.py") and not any(map(path.is_relative_to, places))] == []


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _imported_modules(path: Path) -> set[str]:
    """Dotted names that a file imports outside of functions."""
    text = path.read_text(encoding="utf-8")
    if not re.search(r"^(from tests\.|(from|import) (torch|transformers|sentence_transformers)\b)", text, re.MULTILINE):
        return set()
    names: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return names


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("pyproject.toml", r'^version = "(.+)"$'),
        ("penstock/__init__.py", r'^__version__ = "(.+)"$'),
        ("Dockerfile", r"^ARG VERSION=(.+)$"),
        ("charts/penstock/Chart.yaml", r"^version: (.+)$"),
        ("charts/penstock/Chart.yaml", r"^appVersion: (.+)$"),
        ("charts/penstock-crds/Chart.yaml", r"^version: (.+)$"),
        ("charts/penstock-crds/Chart.yaml", r"^appVersion: (.+)$"),
    ],
)
def test_every_file_has_the_same_version(file: str, pattern: str) -> None:
    assert re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE) == [penstock.__version__]


def test_sources_have_no_todo_comments() -> None:
    marker = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    assert [str(path) for path in sources() if marker.search(path.read_text())] == []


def test_every_local_link_in_the_documents_has_a_target() -> None:
    documents = tracked("*.md")
    assert documents
    link = re.compile(r"\[[^\]]*\]\((?!https?://|#|mailto:)([^)#\s]+)")

    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents
        for target in link.findall(document.read_text())
        if not (document.parent / target).exists()
    ]

    assert broken == []
