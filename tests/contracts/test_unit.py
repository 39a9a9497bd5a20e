"""`make unit` works without the packages that it must not need."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import unit

ROOT = Path(__file__).parents[2]

WITHOUT = """
import os, sys

# None in place of a module: an import of it fails as if it were not installed.
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
import pytest

status = pytest.main(["--unit", "--collect-only", "-q", "-p", "no:cacheprovider"])
sys.stdout.flush()
# At once: to take all these modules apart takes longer than to import them.
os._exit(status)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some 30 s of CPU, on a machine that others use
def test_unit_tests_can_be_collected_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, ",".join(unit.MISSING_PACKAGES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("::") > 1000


def test_the_excluded_packages_are_those_that_unit_installs_lack() -> None:
    """A package that the group `unit` gets must not be on the list; one that only `test` has must."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    names = {
        group: {one.partition(">")[0].partition("[")[0].replace("-", "_") for one in words if isinstance(one, str)}
        for group, words in groups.items()
    }

    assert names["test"] <= unit.MISSING_PACKAGES
    assert not names["unit"] & unit.MISSING_PACKAGES


@pytest.mark.parametrize(
    ("source", "is_unit"),
    [
        ("import penstock.quantity\n", True),
        ("def test_it():\n    import torch\n", False),
        ("from transformers import AutoTokenizer\n", False),
        ('import pytest\n\ntorch = pytest.importorskip("torch")\n', False),
        ("from testbed.kubectl import Kubectl\n", False),
        ("from tests.runtime.tasks import families\n", False),
        ("from tests.runtime.http.browser import Browser\n", False),
        ('import shutil\n\nHAPROXY = shutil.which("haproxy")\n', False),
    ],
)
def test_a_file_is_selected_by_its_imports(source: str, is_unit: bool, tmp_path: Path) -> None:
    file = tmp_path / "test_example.py"
    file.write_text(source)

    assert unit.is_unit_file(file) == is_unit


@pytest.mark.parametrize("folder", ["testbed", "images", "endtoend_cluster"])
def test_folders_of_tests_on_clusters_and_containers_have_no_unit_tests(folder: str) -> None:
    assert not unit.holds_unit_files(unit.TESTS / folder)
