"""The repository keeps the habits that CONTRIBUTING.md states."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("penstock/**.py", "cli/**.py", "runtime/**.py", "operator/**.py", "bench/**.py", "simulator/**.py")
LONGEST_MODULE = 520
"""CONTRIBUTING.md asks for about 500 lines."""


def tracked(*patterns: str) -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_modules_are_one_noun_long() -> None:
    sources = tracked(*SOURCES)
    assert sources

    long = {
        str(path.relative_to(ROOT)): n for path in sources if (n := len(path.read_text().splitlines())) > LONGEST_MODULE
    }

    assert long == {}


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils.py", "helpers.py", "common.py", "misc.py"}

    assert [path for path in tracked("*.py") if path.name in drawers] == []


def test_the_second_phase_looks_where_the_tests_on_the_whole_cluster_are() -> None:
    (line,) = re.findall(r"^FULL_CLUSTER_TESTS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    folders = [ROOT / folder for folder in line.split()]
    uses = [
        path
        for path in tracked("tests/**.py")
        if re.search(r"\b(full|machine)_(cluster|kubectl|namespace)\b", path.read_text())
    ]

    assert [
        path for path in uses if path != Path(__file__) and not any(path.is_relative_to(one) for one in folders)
    ] == []
    assert all(any(path.is_relative_to(one) for path in uses) for one in folders)


def test_tests_that_run_at_the_same_time_as_clusters_start_none() -> None:
    (line,) = re.findall(
        r"^COMPUTING_TESTS := \$\(addprefix tests/,((?:.|\n)+?)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    places = line.replace("\\", "").split()
    assert places

    for place in places:
        tests = tracked(f"tests/{place}" if place.endswith(".py") else f"tests/{place}/**.py")
        assert tests, place
        assert [path for path in tests if re.search(r"\b(control_plane|kubectl)\b", path.read_text())] == []


def test_nothing_is_left_to_be_done() -> None:
    marker = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    sources = tracked(*SOURCES)
    assert sources

    assert [str(path) for path in sources if marker.search(path.read_text())] == []


def test_every_local_link_in_the_documents_leads_somewhere() -> None:
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
