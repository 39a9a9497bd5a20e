"""Work that is killed at random points, again and again, has in the end the bytes of undisturbed work."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bulk.corpora import contents, rows, write_lines
from tests.examples import NEW_DRAWS, THOROUGH

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KILLS = 200 if THOROUGH else 24
SECONDS = 1800.0 if THOROUGH else 500.0


@pytest.mark.timeout(2000)
def test_killed_work_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    some: list[Any] = list(rows(400))
    some[7], some[100] = {"id": "r7", "text": None}, b"{broken"
    source = write_lines(tmp_path / "in/a.jsonl", some)
    seed = random.SystemRandom().randint(0, 10**6) if NEW_DRAWS else 45

    done = subprocess.run(
        [sys.executable, "-m", "tests.bulk.killed_work", *map(str, (source, tmp_path, seed, KILLS))],
        cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip

    assert done.returncode == 0, (seed, done.stderr[-3000:])
    found = json.loads(done.stdout)
    expected = contents(tmp_path / "whole-files")
    assert len(expected) == 10 + 10 + 2 + 4  # parts, states, dead letters; plan, manifest, marker, lock
    assert contents(tmp_path / "whole-calls") == expected
    for number in range(found["outputs"]):
        assert contents(tmp_path / f"out-{number}") == expected, (seed, number)
    assert len(found["killed"]) == KILLS
    # The kills were in all stages.
    assert len(set(found["killed"])) >= 8, found
