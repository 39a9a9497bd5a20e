"""Starts the load process and reads what it measured."""

from __future__ import annotations

import subprocess
import sys

from penstock.errors import PenstockError
from penstock_optimizer.load.spec import LoadResult, LoadSpec

START_UP_SECONDS = 30.0
"""Importing and connecting, with much to spare on a busy machine."""


class LoadFailed(PenstockError):
    """The load process itself failed: nothing was measured."""


def run_load(spec: LoadSpec) -> LoadResult:
    """Run one load in a process of its own, and wait for it; LoadFailed with its last words when it fails."""
    limit = START_UP_SECONDS + spec.warm_up_seconds + spec.seconds + 2 * spec.timeout_seconds
    try:
        done = subprocess.run(
            [sys.executable, "-m", "penstock_optimizer.load"],
            input=spec.model_dump_json().encode(),
            capture_output=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LoadFailed(f"the load process did not end within {limit:.0f} s", remedy="Is the machine idle?") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise LoadFailed(f"the load process failed ({done.returncode}): {' | '.join(lines)}")
    return LoadResult.model_validate_json(done.stdout)
