"""`penstock serve` of eight models on one set of cores, as a separate process: routes, answers, a flood, the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.reading import from_file
from penstock.tasks import TaskName
from penstock_optimizer.optimise import prepare
from penstock_runtime.app.lifecycle import start_model
from penstock_runtime.app.server import Server
from penstock_runtime.host import read_host
from penstock_runtime.serving.generation_model import load_generation_artefact
from penstock_runtime.serving.loaded_model import load_artefact
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from tests.cli.endpoints import TINY, run, write_endpoint
from tests.endtoend.process import Served
from tests.golden.models import BERT, write_model
from tests.runtime.http.serving import Endpoint, running
from tests.runtime.models.gguf_files import write_gguf

pytestmark = pytest.mark.slow

TEXT = "my name is clara and i live in berkeley with a happy dog"
CHAT = {"messages": [{"role": "user", "content": "ab c"}], "max_tokens": 12, "temperature": 0}
MEMBERS: dict[str, tuple[TaskName, str, dict[str, Any]]] = {
    "embed-a": (TaskName.FEATURE_EXTRACTION, "/v1/embeddings", {"input": [TEXT, "a dog"]}),
    "embed-b": (TaskName.FEATURE_EXTRACTION, "/v1/embeddings", {"input": [TEXT, "a dog"]}),
    "mood": (TaskName.TEXT_CLASSIFICATION, "/predict", {"inputs": TEXT}),
    "topic": (TaskName.TEXT_CLASSIFICATION, "/predict", {"inputs": [TEXT, "a dog"]}),
    "names": (TaskName.TOKEN_CLASSIFICATION, "/predict", {"inputs": TEXT}),
    "ranks": (TaskName.TEXT_RANKING, "/v2/rerank", {"query": "a dog", "documents": [TEXT, "paris"]}),
    "any": (
        TaskName.ZERO_SHOT_CLASSIFICATION,
        "/predict",
        {"inputs": TEXT, "parameters": {"candidate_labels": ["dogs", "cities"]}},
    ),
    "chat": (TaskName.TEXT_GENERATION, "/v1/chat/completions", CHAT),
}
"""Name, task, and a request of its own dialect."""
FLOOD = 300


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("several")
    found = {}
    for seed, (name, (task, _, _)) in enumerate(MEMBERS.items()):
        if task is TaskName.TEXT_GENERATION:
            write_gguf(root / "chat.gguf")
            model = root / "chat.gguf"
        else:
            is_pooled = task is TaskName.FEATURE_EXTRACTION
            model = write_model(root / f"model-{name}", task, BERT, TINY, pooled=is_pooled, seed=seed)
        found[name] = write_endpoint(root / f"{name}.yaml", model, name=None, task=task.value, cores=2)
        found[name].write_text(found[name].read_text().replace("name: tiny", f"name: {name}"))
    return found


@pytest.fixture(scope="module")
def server(files: dict[str, Path]) -> Iterator[Served]:
    first, *others = files.values()
    root = first.parent
    words = ["--no-optimize", "--store", root / "store", "--models", root / "models", "--priority", "mood=1"]
    with Served(first, *others, *words) as served:
        served.wait_for("models on")
        yield served
        assert served.end() == 0
        assert "Traceback" not in served.output


def own_server(file: Path) -> AbstractContextManager[Endpoint]:
    """A server for one of the models alone, with the artefact that the other has made."""
    endpoint = from_file(ModelEndpoint, file)
    store = file.parent / "store"
    artefact = prepare(endpoint, store=store, models=file.parent / "models", cores=2).artefact

    async def make(settings: Settings) -> tuple[Server, None]:
        server = Server(ServerStatus(endpoint.metadata.name, endpoint.spec.task), settings)
        load = load_generation_artefact if endpoint.spec.task is TaskName.TEXT_GENERATION else load_artefact
        await start_model(server, load(artefact, "baseline", read_host(), cores=2))
        return server, None

    return running(make)


def ask(port: int, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{port}{path}", json=body, headers=headers, timeout=120, verify=False)


def get(port: int, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=120, verify=False)


def content(answer: httpx.Response) -> Any:
    """Without what differs between two answers: identifiers and times."""
    assert answer.status_code == 200, answer.text
    value = answer.json()
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if name not in {"id", "created"}}
    return value


def test_each_model_gives_the_answers_of_its_own_server_while_one_is_flooded(
    server: Served, files: dict[str, Path]
) -> None:
    port = server.port
    flooding = threading.Event()
    text = " ".join([TEXT] * 8)

    def flood(number: int) -> int:
        flooding.set()
        return ask(port, "/v1/embeddings", {"model": "embed-a", "input": f"{text} {number}"}).status_code

    found: dict[str, list[Any]] = {name: [] for name in MEMBERS}
    with ThreadPoolExecutor(16) as pool:
        sent = [pool.submit(flood, number) for number in range(FLOOD)]
        assert flooding.wait(60)
        with ThreadPoolExecutor(len(MEMBERS)) as others:

            def several(name: str) -> None:
                for _ in range(5):
                    found[name].append(content(ask(port, f"/models/{name}{MEMBERS[name][1]}", MEMBERS[name][2])))

            list(others.map(several, MEMBERS))
        statuses = {one.result() for one in sent}

    assert statuses <= {200, 429}
    for name, (_, path, body) in MEMBERS.items():
        with own_server(files[name]) as own:
            expected = content(ask(own.server.port, path, body))
        assert found[name] == [expected] * 5, name


def test_the_model_is_named_by_the_body_or_the_path(server: Served) -> None:
    port = server.port
    named = {
        name: ask(port, path, body | {"model": name}) for name, (_, path, body) in MEMBERS.items() if path != "/predict"
    }
    for name, answer in named.items():
        assert content(answer) == content(ask(port, f"/models/{name}{MEMBERS[name][1]}", MEMBERS[name][2])), name

    assert ask(port, "/v1/chat/completions", CHAT).status_code == 200, "the only one with this route"
    assert ask(port, "/v1/chat/completions", CHAT | {"model": "tgi"}).status_code == 200, "a placeholder"
    unnamed = ask(port, "/v1/embeddings", {"input": TEXT})
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
    assert "'embed-a', 'embed-b'" in unnamed.json()["error"]["message"]
    for path, body in (
        ("/v1/embeddings", {"input": TEXT, "model": "other"}),
        ("/v1/chat/completions", CHAT | {"model": "other"}),
        ("/models/other/v1/embeddings", {"input": TEXT}),
    ):
        unknown = ask(port, path, body)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found"), path
        assert all(name in unknown.json()["error"]["message"] for name in MEMBERS), path
    elsewhere = ask(port, "/v1/chat/completions", CHAT | {"model": "mood"})
    assert elsewhere.status_code == 404
    assert "does text-classification" in elsewhere.json()["error"]["message"]
    tensor = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [TEXT]}]}
    assert ask(port, "/v2/models/mood/infer", tensor).json()["model_name"] == "mood"
    assert ask(port, "/v2/models/other/infer", tensor).status_code == 404
    assert (
        ask(port, "/embed", {"inputs": TEXT, "model": "embed-b"}).json()
        == ask(port, "/models/embed-b/embed", {"inputs": TEXT}).json()
    )
    stream = ask(port, "/models/chat/v1/chat/completions", CHAT | {"stream": True})
    assert stream.text.rstrip().endswith("data: [DONE]")


def test_what_the_models_answer_together(server: Served) -> None:
    port = server.port
    listed = get(port, "/v1/models").json()
    assert [one["id"] for one in listed["data"]] == list(MEMBERS)
    assert get(port, "/v1/models/mood").json()["id"] == "mood"
    assert get(port, "/v1/models/other").status_code == 404
    assert get(port, "/readyz").status_code == get(port, "/models/mood/readyz").status_code == 200
    assert get(port, "/healthz").status_code == get(port, "/v2/health/ready").status_code == 200
    information = get(port, "/info").json()["models"]
    assert {name: one["task"] for name, one in information.items()} == {
        name: task.value for name, (task, _, _) in MEMBERS.items()
    }
    assert get(port, "/models/chat/openapi.json").json()["paths"]
    assert content(ask(port, "/models/mood/predict", {"inputs": TEXT}))
    lines = get(port, "/metrics").text.splitlines()
    assert len(set(lines)) == len(lines), "no series twice"
    for start in (
        'penstock_requests_total{code="200",model="mood",route="/predict"}',
        'penstock_ready{model="chat"} 1',
        'penstock_connections{model=""}',
        'penstock_queue_rows{model="embed-a"} 0',
    ):
        assert any(line.startswith(start) for line in lines), start
    assert get(port, "/nothing").status_code == 404
    options = httpx.options(f"http://127.0.0.1:{port}/models/mood/predict", verify=False)
    assert options.headers["allow"] == "OPTIONS, POST"
    assert httpx.delete(f"http://127.0.0.1:{port}/v1/models", verify=False).status_code == 405


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["embed-a", "embed-a"], "two of the models have the name embed-a"),
        (["embed-a", "mood", "--priority", "moo=1"], "Did you mean mood?"),
        (["embed-a", "mood", "--priority", "mood=high"], "a whole number from 0 to 1000"),
        (["embed-a", "--priority", "embed-a=1"], "several models"),
        (["embed-a", "mood", "--internal-port", "0"], "internal_port is set"),
    ],
)
def test_what_cannot_be_served_is_an_error_that_names_it(
    words: list[str], message: str, files: dict[str, Path]
) -> None:
    ended = run("serve", "--port", "0", *(files.get(word, word) for word in words))

    assert ended.returncode in {1, 2}
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
