"""A disk that becomes full during a command: the error names the folder, and with more space the command resumes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.endpoints import ROOT, SECONDS, SHORTENED, clean_environment, write_endpoint
from tests.cli.test_errors import assert_one_sentence

pytestmark = pytest.mark.slow

SHELL = """
set -e
folder=$1 size=$2; shift 2
mount -t tmpfs -o size=$size penstock "$folder"
"$@" && echo "status 0" || echo "status $?"
mount -o remount,size=256m "$folder"
"$@" && echo "status 0" || echo "status $?"
"""
"""A private file system of the given size that ends with the command; then one with enough space."""
LENGTHS = {"workload": {"sequenceLengths": [8]}}
SEARCHED = {
    "optimization": {"budgetSeconds": 300, "engines": ["onnxruntime"], "precisions": ["int8-dynamic"]},
    **LENGTHS,
}
FP32_ALONE = {"optimization": {"budgetSeconds": 300, "mode": "Disabled"}, **LENGTHS}


def run_twice(folder: Path, size: str, *words: object) -> subprocess.CompletedProcess[str]:
    """A command whose folder is on a small disk, then the same on a large one."""
    folder.mkdir()
    unshare = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount"]
    penstock = [sys.executable, "-m", *SHORTENED, *map(str, words)]
    return subprocess.run(
        [*unshare, "sh", "-c", SHELL, "sh", str(folder), size, *penstock],
        cwd=ROOT,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.parametrize(
    ("size", "place", "spec"),
    [
        ("200k", "the store", FP32_ALONE),  # not even the exported graph
        # The exported graph, not the fp32 artefact.
        pytest.param("2500k", "the store", FP32_ALONE, marks=pytest.mark.extended),
        ("4500k", "the ", SEARCHED),  # some candidate: in the work folder or, when it is put down, in the store
    ],
    ids=["graph", "artefact", "candidate"],
)
def test_the_error_names_the_full_disk_and_with_more_space_it_resumes(
    size: str, place: str, spec: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    file = write_endpoint(tmp_path / "tiny.yaml", tiny, **spec)
    store = tmp_path / "store"

    done = run_twice(store, size, "optimize", file, "--store", store)

    assert [line for line in done.stdout.splitlines() if line.startswith("status")] == ["status 1", "status 0"], (
        done.stdout + done.stderr
    )
    assert_one_sentence(done.stderr, place, "Free space there or choose another folder")
    assert f"{store}" in done.stderr
    assert "No space left on device" in done.stderr


def test_a_limit_on_file_size_is_reported_as_a_full_disk(tiny: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    file = write_endpoint(tmp_path / "tiny.yaml", tiny)
    words = ("serve", file, "--store", store, "--port", "0", "--no-optimize")

    done = subprocess.run(
        ["prlimit", "--fsize=500000", sys.executable, "-m", "penstock_cli.main", *words],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert done.returncode == 1
    assert_one_sentence(done.stderr, f"the store {store} cannot take more: File too large", "Free space there")


def test_bulk_work_on_a_full_disk_goes_on_with_more_space(tiny: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(3000)), encoding="utf-8")
    folders = ("--store", tmp_path / "store", "--models", tmp_path / "models")
    model = ("--model", f"file://{tiny}", "--plan", "fp32", "--shard-rows", 1000)

    done = run_twice(output, "1m", "embed", source, output, *model, *folders)

    assert [line for line in done.stdout.splitlines() if line.startswith("status")] == ["status 1", "status 0"], (
        done.stdout + done.stderr
    )
    assert_one_sentence(done.stderr, f"the output {output}", "Free space there")
    assert "No space left on device" in done.stderr
    assert "rows       3,000 of 3,000" in done.stdout
