"""The largest allowed request of each route that tokenises takes less memory than a pod has besides its model."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.prices.pod_costs import PROCESS
from penstock.tasks import TaskName
from penstock_runtime.http.api.tei.answers import MOST_CHARACTERS
from tests.memory import growth_kilobytes
from tests.runtime.generation.small_model import serving_generation, small_generation_model
from tests.runtime.http.serving import REQUESTS, make_model, serving

BODY_BYTES = 1_900_000
"""Of the 2 MB that a body may have."""
MOST_KILOBYTES = PROCESS // 2 // 1024
"""What `measured_pod_bytes` adds to the memory of a process under load, besides a share."""
TEXTS = {"letters": "a b ", "points": ".", "one word": "x", "Japanese": "東京"}
ALIASES: dict[TaskName, list[tuple[str, dict[str, Any]]]] = {
    TaskName.FEATURE_EXTRACTION: [
        ("/embed", {"inputs": "", "truncate": True}),
        ("/embed", {"inputs": [""] * 900, "truncate": True}),
        ("/embed_all", {"inputs": "", "truncate": True}),
        ("/v1/embeddings", {"input": ""}),
        ("/v1/embeddings", {"input": [""] * 900}),
        ("/tokenize", {"inputs": ""}),
        ("/tokenize", {"inputs": [""] * 900}),
    ],
    TaskName.TEXT_RANKING: [
        ("/rerank", {"query": "", "texts": [""], "truncate": True}),
        ("/rerank", {"query": "a", "texts": [""] * 900, "truncate": True}),
        ("/v1/rerank", {"query": "", "documents": [""], "model": "emotion"}),
    ],
    TaskName.TEXT_CLASSIFICATION: [
        ("/predict", {"inputs": "", "parameters": {"stride": 8}}),
        ("/predict", {"inputs": [""] * 900, "parameters": {"stride": 8}}),
        ("/predict", {"inputs": [""] * 900, "parameters": {"stride": 8, "max_windows": 128}}),
    ],
    TaskName.TOKEN_CLASSIFICATION: [
        ("/predict", {"inputs": "", "parameters": {"stride": 8, "aggregation_strategy": "simple"}}),
        ("/predict", {"inputs": [""] * 900, "parameters": {"stride": 8, "aggregation_strategy": "simple"}}),
    ],
    TaskName.TEXT_GENERATION: [
        ("/v1/completions", {"model": "smol", "prompt": "", "max_tokens": 1}),
        ("/v1/completions", {"model": "smol", "prompt": [""] * 60, "max_tokens": 1}),
        ("/v1/chat/completions", {"model": "smol", "messages": [{"role": "user", "content": ""}], "max_tokens": 1}),
        ("/v1/messages", {"model": "smol", "messages": [{"role": "user", "content": ""}], "max_tokens": 1}),
        ("/v1/responses", {"model": "smol", "input": "", "max_output_tokens": 1}),
        ("/api/generate", {"model": "smol", "prompt": "", "stream": False}),
        ("/tokenize", {"inputs": ""}),
    ],
}
CASES = [(task, "/predict", body) for task, body in REQUESTS.items()] + [
    (task, path, body) for task, requests in ALIASES.items() for path, body in requests
]


FILLED = frozenset({
    "inputs", "input", "texts", "text", "query", "documents", "prompt", "messages", "content", "source_sentence",
    "sentences", "question", "context",
})  # fmt: skip
"""The fields with texts."""


def places(value: Any) -> int:
    """The number of texts in a body."""
    if isinstance(value, dict):
        return sum(places(one) for name, one in value.items() if name in FILLED)
    return sum(map(places, value)) if isinstance(value, list) else int(isinstance(value, str))


def filled(value: Any, text: str) -> Any:
    """The body with `text` after each of its texts."""
    if isinstance(value, dict):
        return {name: filled(one, text) if name in FILLED else one for name, one in value.items()}
    return [filled(one, text) for one in value] if isinstance(value, list) else f"{value} {text}"


def main() -> None:
    """Serve the task that is the argument, until the input ends."""
    task = TaskName(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if task is TaskName.TEXT_GENERATION:
            server = serving_generation(small_generation_model(folder, template=TEMPLATE))
        else:
            server = serving(make_model(folder, task), task)
        with server as endpoint:
            print(endpoint.url, flush=True)
            sys.stdin.read()


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@contextmanager
def served(task: TaskName) -> Iterator[tuple[str, int]]:
    """Address and number of a process that serves the task."""
    command = [sys.executable, "-m", __name__, task.value]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid


@pytest.mark.parametrize("task", sorted({task for task, _, _ in CASES}))
def test_the_largest_request_takes_no_more_memory_than_a_pod_has_for_it(task: TaskName) -> None:
    with served(task) as (url, process), httpx.Client(timeout=None) as client:
        for path, body in [(path, body) for one, path, body in CASES if one is task]:
            client.post(url + path, json=body)  # what is imported and made once
            for kind, unit in TEXTS.items():
                size = MOST_CHARACTERS - 1_000 if path == "/tokenize" else BODY_BYTES // len(unit.encode()) * len(unit)
                count = size // len(unit) // places(body)
                with growth_kilobytes(process) as growth:
                    answer = client.post(url + path, json=filled(body, unit * count))
                    took = growth()
                assert answer.status_code in {200, 400, 422}, answer.text[:200]
                assert took < MOST_KILOBYTES, (path, kind)


if __name__ == "__main__":
    main()
