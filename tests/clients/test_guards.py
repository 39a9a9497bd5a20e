"""LiteLLM's real guardrail in front of servers that cannot classify: closed stays closed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_runtime.errors import DeadlineExceeded, InferenceFailed, InvalidInput, NotReady, Overloaded
from tests.clients.calls_guards import GOOD
from tests.clients.recording import FOLDER
from tests.clients.test_packages import installed
from tests.runtime.http.api.guard.keywords import guarding
from tests.runtime.http.api.guard.test_closed import Raising

__all__ = ["installed"]

pytestmark = pytest.mark.extended

UNREACHABLE = {
    "loading": None,
    "draining": Raising(NotReady("the server is shutting down")),
    "overloaded": Raising(Overloaded("the queue is full")),
    "late": Raising(DeadlineExceeded("not run")),
    "failed": Raising(InferenceFailed("not a number")),
    "defect": Raising(RuntimeError("a defect")),
}


def outcomes(interpreter: Path, url: str) -> list[str]:
    """`error` or `passed`, of LiteLLM with fail_closed and fail_open."""
    command = [interpreter, FOLDER / "calls_guards.py", url]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert all("error" in one or one["texts"] == [GOOD] for one in found)
    return ["error" if "error" in one else "passed" for one in found]


@pytest.mark.parametrize("state", UNREACHABLE)
def test_a_server_that_cannot_classify_is_unreachable_for_litellm(state: str, installed: Callable[[str], Path]) -> None:
    with guarding(UNREACHABLE[state]) as endpoint:
        # The user's own choice counts, and both requests are in our counter.
        assert outcomes(installed("requirements_guards.txt"), endpoint.url) == ["error", "passed"]
        assert endpoint.server.metrics.guard.verdicts == {"unavailable": 2}


def test_a_server_that_has_gone_is_unreachable_for_litellm(installed: Callable[[str], Path]) -> None:
    with guarding(None) as endpoint:
        url = endpoint.url

    assert outcomes(installed("requirements_guards.txt"), url) == ["error", "passed"]


def test_a_request_that_is_refused_stays_closed_whatever_is_set(installed: Callable[[str], Path]) -> None:
    with guarding(Raising(InvalidInput("too many tokens"))) as endpoint:
        assert outcomes(installed("requirements_guards.txt"), endpoint.url) == ["error", "error"]
