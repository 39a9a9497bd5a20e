"""Classifiers next to other models on one server: a gateway finds the one it means, or gets an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.resources.endpoint_parts.guard_policy import GuardPolicy
from penstock.tasks import TaskName
from penstock_runtime.app.server import Server
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from tests.runtime.http.api.guard.keywords import BLOCKING, MASKING, TEXTS, TOKENS, words
from tests.runtime.http.serving import Endpoint, make_model, running

GUARDRAIL = "/beta/litellm_basic_guardrail_api"
BAD = {"texts": ["this is a bad example of clara"], "input_type": "request", "model": "gpt"}
BLOCKED = {"action": "BLOCKED", "blocked_reason": "prompt injection"}


@contextmanager
def together(path: Path, *names: str) -> Iterator[Endpoint]:
    """A server of models with these names."""
    policies: dict[str, tuple[TaskName, Any]] = {"guard": (TEXTS, BLOCKING), "mask": (TOKENS, MASKING)}

    def member(name: str, settings: Settings) -> Server:
        if name == "gpt":
            task = TaskName.FEATURE_EXTRACTION
            return Server(ServerStatus(name, task), settings, make_model(path / name, task))
        task, policy = policies[name]
        status = ServerStatus(name, task, limits={"max_input_tokens": 64})
        status.guard_policy = GuardPolicy.model_validate(policy, by_alias=True)
        return Server(status, settings, words(path / name, task))

    def make(settings: Settings) -> tuple[Server, Any]:
        members = [member(name, settings) for name in names]
        server = Server(ServerStatus(", ".join(names), TEXTS), settings, members=members)
        return server, members

    with running(make) as endpoint:
        yield endpoint


@pytest.mark.parametrize(
    ("names", "path", "answer"),
    [
        # `gpt` is the language model, also where a model of the server has this name.
        (("gpt", "guard"), GUARDRAIL, BLOCKED),
        (("gpt", "guard", "mask"), f"/models/guard{GUARDRAIL}", BLOCKED),
        (
            ("gpt", "guard", "mask"),
            f"/models/mask{GUARDRAIL}",
            {"action": "GUARDRAIL_INTERVENED", "texts": ["this is a bad example of <PER>"]},
        ),
        (("gpt", "guard", "mask"), GUARDRAIL, 422),
        (("gpt", "guard", "mask"), f"/models/gpt{GUARDRAIL}", 404),
    ],
)
def test_a_gateway_asks_one_of_the_classifiers(tmp_path: Path, names: tuple[str, ...], path: str, answer: Any) -> None:
    with together(tmp_path, *names) as endpoint:
        got = httpx.post(endpoint.url + path, json=BAD, timeout=60)

        assert got.json() == answer if got.status_code == 200 else got.status_code == answer, got.text
        metrics = httpx.get(f"{endpoint.url}/metrics", timeout=60).text
        for member in endpoint.model:
            count = int(got.status_code == 200 and member.status.name in {"guard", "mask"})
            is_asked = f"/{member.status.name}/" in path or (member.status.name == "guard" and len(names) == 2)
            line = f'penstock_classifications_total{{model="{member.status.name}",outcome="classified"}}'
            assert (f"{line} {float(count and is_asked)}" in metrics) == (member.status.name != "gpt")
