"""Requests of real clients: recorded from their packages, or written by hand from an application's source."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from penstock.tasks import TaskName
from penstock_runtime.http.transport.message import Request, Response
from tests.runtime.generation.small_model import TOOL_TEMPLATE, serving_generation, small_generation_model
from tests.runtime.http.api.guard.keywords import BLOCKING, MASKING, TEXTS, TOKENS, guarding, words
from tests.runtime.http.serving import (
    Endpoint,
    make_model,
    model_of,
    serving,
    write_sparse_folder,
    write_three_outputs_folder,
    write_token_vectors_folder,
)
from tests.tasks import COMMON_TASKS

FOLDER = Path(__file__).parent
FROM_SOURCE = FOLDER / "from_source.json"
KEPT_HEADERS = ("content-type", "accept", "authorization", "user-agent", "inference-header-content-length")
VOLATILE = (
    "id", "item_id", "call_id", "created", "created_at", "model_version", "modified_at", "total_duration",
    "prompt_eval_duration", "eval_duration",
)  # fmt: skip
"""Fields of answers that differ between two runs."""


@dataclass(frozen=True)
class Group:
    """Clients whose packages can be installed together."""

    name: str
    requirements: str
    """In the form of the installer: requirements of pip, or a package.json."""
    command: tuple[str, ...]
    """What makes the calls, after the interpreter. The addresses of the endpoints follow as JSON."""

    @property
    def recorded(self) -> Path:
        """Written by `test_packages.py` with PENSTOCK_RECORD_CLIENTS=1."""
        return FOLDER / f"recorded_{self.name}.json"


GROUPS = (
    Group("python", "requirements.txt", ("calls.py",)),
    Group("generation", "requirements.txt", ("calls.py", "calls_generation", "CLIENTS")),
    Group("openai_2", "requirements_openai_2.txt", ("calls.py", "calls_generation", "WITH_OPENAI_2")),
    Group("search", "requirements_search.txt", ("calls.py", "calls_search", "CLIENTS")),
    Group("opensearch", "requirements_search.txt", ("calls.py", "calls_search", "OPENSEARCH")),
    Group("sagemaker", "requirements_sagemaker.txt", ("calls.py", "calls_applications", "SAGEMAKER")),
    Group("guards", "requirements_guards.txt", ("calls.py", "calls_guards", "CLIENTS")),
    Group("local", "requirements_local.txt", ("calls.py", "calls_local", "CLIENTS")),
    Group("javascript", "package.json", ("calls.mjs",)),
)


@dataclass
class Sent:
    """One request as a client sent it, and the answer."""

    client: str
    version: str
    call: str
    task: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    answer: Any = None
    """Parsed JSON without volatile fields; None for a binary answer."""
    where: str = ""
    """The file that the request was written from; empty: it was recorded."""

    @property
    def name(self) -> str:
        """For a test's id."""
        return f"{self.client} {self.call}"

    def as_json(self) -> dict[str, Any]:
        """As in the file: the body as text, or base64 of one that is none."""
        value = {name: one for name, one in vars(self).items() if name != "body" and (one != "" or name != "where")}
        try:
            return {**value, "body": self.body.decode("ascii")}
        except UnicodeDecodeError:
            return {**value, "body_base64": base64.b64encode(self.body).decode()}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Sent:
        """From the file."""
        rest = {name: one for name, one in value.items() if name not in {"body", "body_base64"}}
        text = value.get("body")
        return cls(**rest, body=base64.b64decode(value["body_base64"]) if text is None else text.encode())


def load(file: Path) -> list[Sent]:
    """The requests of a file."""
    return [Sent.of(value) for value in json.loads(file.read_bytes())]


def save(file: Path, sent: list[Sent]) -> None:
    """Write them."""
    file.write_text(json.dumps([one.as_json() for one in sent], indent=1, ensure_ascii=False) + "\n")


def replay(sent: Sent, url: str) -> httpx.Response:
    """Send a request again."""
    return httpx.request(sent.method, url + sent.path, headers=sent.headers, content=sent.body, timeout=60)


def without_volatile(answer: Any) -> Any:
    """An answer without what differs between two runs; numbers as float32."""
    if isinstance(answer, dict):
        return {name: without_volatile(one) for name, one in answer.items() if name not in VOLATILE}
    if isinstance(answer, list):
        return [without_volatile(one) for one in answer]
    return float(np.float32(answer)) if isinstance(answer, float) else answer


def parsed(content_type: str, body: bytes) -> Any:
    """The answer as it is kept; None for a binary one."""
    if content_type.startswith("text/event-stream"):
        return {"stream": streamed_text(body)}
    if content_type.startswith("application/x-ndjson"):
        lines = [json.loads(line) for line in body.splitlines()]
        return {"stream": "".join(one.get("response") or one.get("message", {}).get("content", "") for one in lines)}
    return without_volatile(json.loads(body)) if content_type.startswith("application/json") else None


def streamed_text(body: bytes) -> str:
    """The text of a stream of events. Which tokens come in one event differs between two runs."""
    lines = (line.removeprefix(b"data:").strip() for line in body.splitlines() if line.startswith(b"data:"))
    events = [json.loads(line) for line in lines if line != b"[DONE]"]
    return "".join(map(_event_text, events))


def _event_text(event: Mapping[str, Any]) -> str:
    if "token" in event:  # text-generation-inference
        return str(event["token"]["text"])
    if event.get("type", "").endswith("output_text.delta"):  # responses
        return str(event["delta"])
    if event.get("type") == "content_block_delta":  # Anthropic
        return str(event["delta"].get("text") or event["delta"].get("partial_json", ""))
    return "".join(
        text
        for one in event.get("choices", ())
        for text in (
            one["delta"].get("content") or "",
            *(call["function"].get("arguments", "") for call in one["delta"].get("tool_calls") or ()),
        )
    )


@dataclass
class Recorder:
    """Endpoints of all tasks, by task or by what else they serve, and the requests that arrived."""

    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    arrived: list[tuple[Request, str]] = field(default_factory=list)

    @property
    def urls(self) -> dict[str, str]:
        """The address of each endpoint."""
        return {task: endpoint.url for task, endpoint in self.endpoints.items()}

    def watch(self, task: str, endpoint: Endpoint) -> None:
        """Keep what arrives at an endpoint, under its task or another name."""
        self.endpoints[task] = endpoint
        application = endpoint.server.application
        answer = application.answer

        def keep(request: Request) -> Any:
            self.arrived.append((request, task))
            return answer(request)

        application.answer = keep  # type: ignore[method-assign]

    def run(self, group: Group, interpreter: Path, **environment: str) -> tuple[list[Sent], list[dict[str, Any]]]:
        """Make all calls of a group with an interpreter: the requests, and what each call returned."""
        script, *more = group.command
        process = subprocess.Popen(
            [interpreter, FOLDER / script, *more, json.dumps(self.urls)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            cwd=interpreter.parent,  # where the packages of JavaScript are
        )
        assert process.stdin is not None
        assert process.stdout is not None
        sent: list[Sent] = []
        results: list[dict[str, Any]] = []
        with process:
            for line in process.stdout:
                if not line.startswith('{"client"'):
                    continue
                entry = json.loads(line)
                if "result" not in entry and "error" not in entry:
                    self.arrived.clear()
                    process.stdin.write("\n")
                    process.stdin.flush()
                    continue
                results.append(entry)
                sent += [self._sent(entry, request) for request, _ in self.arrived]
                self.arrived.clear()
        assert process.returncode == 0
        return sent, results

    def _sent(self, entry: Mapping[str, Any], request: Request) -> Sent:
        given = {name.decode(): value.decode("latin-1") for name, value in request.headers.items()}
        sent = Sent(
            **{name: entry[name] for name in ("client", "version", "call", "task")},
            method=request.method,
            path=request.path,
            headers={name: given[name] for name in KEPT_HEADERS if name in given},
            body=request.body,
        )
        answer = replay(sent, self.urls[sent.task])
        assert answer.status_code == 200, f"{sent.name}: {answer.text}"
        sent.answer = parsed(answer.headers["content-type"], answer.content)
        self.arrived.pop()
        return sent


@contextmanager
def recorder(folder: Path) -> Iterator[Recorder]:
    """An endpoint for each task, of models made of arithmetic."""
    with ExitStack() as stack:
        made = Recorder()
        # Without reuse: the number of cached tokens in answers depends on the requests before.
        generation = small_generation_model(folder / "generation", template=TOOL_TEMPLATE)
        running = serving_generation(generation, name="emotion", prefix_reuse=False)
        made.watch(TaskName.TEXT_GENERATION.value, stack.enter_context(running))
        for task in COMMON_TASKS:
            model = make_model(folder / task.value, task)
            made.watch(task.value, stack.enter_context(serving(model, task)))
        writers: dict[str, Callable[[Path], Path]] = {
            "sparse": write_sparse_folder,
            "token-vectors": write_token_vectors_folder,
            "all-outputs": write_three_outputs_folder,
        }
        for name, write in writers.items():
            model = model_of(write(folder / name), TaskName.FEATURE_EXTRACTION)
            made.watch(name, stack.enter_context(serving(model)))
        for name, kind, policy in (("guard", TEXTS, BLOCKING), ("guard-spans", TOKENS, MASKING)):
            made.watch(name, stack.enter_context(guarding(words(folder / name, kind), kind, policy)))
        yield made


__all__ = ["FROM_SOURCE", "GROUPS", "Group", "Recorder", "Response", "Sent", "load", "recorder", "replay", "save"]
