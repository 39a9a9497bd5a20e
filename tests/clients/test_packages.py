"""The real packages of clients make their calls, and send what is recorded.

With PENSTOCK_RECORD_CLIENTS=1 the recording is written instead of compared; then `make docs`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.tasks import TaskName
from tests.clients.calls_search import ALL_OUTPUTS, DOCUMENTS, QUERY, SPARSE, TOKEN_VECTORS
from tests.clients.opensearch import opensearch_node
from tests.clients.recording import FOLDER, GROUPS, Group, Recorder, Sent, load, recorder, save

pytestmark = pytest.mark.extended

UV = Path(sys.executable).with_name("uv")
VECTORS, GENERATION = TaskName.FEATURE_EXTRACTION.value, TaskName.TEXT_GENERATION.value


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with recorder(tmp_path_factory.mktemp("models")) as made:
        yield made


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The interpreter that has the packages of a file of requirements."""
    made: dict[str, Path] = {}

    def install(requirements: str) -> Path:
        if requirements not in made:
            folder = tmp_path_factory.mktemp("packages")
            made[requirements] = _node(folder) if requirements == "package.json" else _python(folder, requirements)
        return made[requirements]

    return install


def _python(folder: Path, requirements: str) -> Path:
    python = folder / "bin/python"
    subprocess.run([UV, "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder], check=True)
    packages = ["pip", "install", "--quiet", "--python", python, "--requirement", FOLDER / requirements]
    subprocess.run([UV, *map(str, packages)], check=True)
    return python


def _node(folder: Path) -> Path:
    """A link to node, in the folder of its packages."""
    if (node := shutil.which("node")) is None:
        pytest.skip("needs node and npm")
    shutil.copy(FOLDER / "package.json", folder)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=folder, check=True)
    (folder / "node").symlink_to(node)
    return folder / "node"


def comparable(sent: Sent) -> tuple[Any, ...]:
    """What must be as recorded: not the headers, and not the random id of a request."""
    body: Any = sent.body
    if sent.body.startswith(b"{") and sent.body.endswith(b"}"):
        body = {name: value for name, value in json.loads(sent.body).items() if name != "id"}
    return sent.client, sent.call, sent.method, sent.path, body


@pytest.mark.parametrize("group", GROUPS, ids=[one.name for one in GROUPS])
def test_every_client_is_served_and_sends_what_is_recorded(
    group: Group, endpoints: Recorder, installed: Callable[[str], Path], tmp_path: Path
) -> None:
    interpreter = installed(group.requirements)

    if group.name == "opensearch":
        with opensearch_node(tmp_path) as address:
            sent, results = endpoints.run(group, interpreter, PENSTOCK_OPENSEARCH=address)
    else:
        sent, results = endpoints.run(group, interpreter)

    assert [one for one in results if "error" in one] == []
    assert [one for one in results if not one["result"]] == []
    if group.name == "python":
        assert len([one for one in results if one["task"] == VECTORS]) >= 8
        assert len([one for one in results if one["task"] == GENERATION]) >= 15
    check_vectors(results, endpoints.urls[VECTORS])
    check_searches(results, endpoints.urls)
    if os.environ.get("PENSTOCK_RECORD_CLIENTS") == "1":
        save(group.recorded, sent)
    assert [comparable(one) for one in sent] == [comparable(one) for one in load(group.recorded)]
    assert len({(one.client, one.call) for one in sent}) == len(results)


def check_vectors(results: list[dict[str, Any]], url: str) -> None:
    """All clients read the vector that `/embed` gives."""
    (expected,) = httpx.post(f"{url}/embed", json={"inputs": "i like you"}, timeout=60).json()
    for one in results:
        if one["task"] == VECTORS and isinstance(one["result"], list) and "dimensions" not in one["call"]:
            np.testing.assert_allclose(np.asarray(one["result"]).reshape(-1, 16)[0], expected, atol=1e-6)


def check_searches(results: list[dict[str, Any]], urls: Mapping[str, str]) -> None:
    """Databases find the documents by the scores that numpy computes."""
    for one in results:
        if not isinstance(found := one["result"], dict) or "ids" not in found:
            continue
        expected = scores(one["task"], one["call"], urls[one["task"]])
        assert sorted(found["ids"]) == sorted(expected), one["call"]
        assert found["scores"] == sorted(found["scores"], reverse=True)
        # OpenSearch keeps nine bits of a weight.
        tolerance = 1e-2 if one["client"] == "opensearch-py" else 1e-4
        np.testing.assert_allclose(found["scores"], [expected[at] for at in found["ids"]], rtol=tolerance)


def scores(task: str, call: str, url: str) -> dict[int, float]:
    """The score of each document that a search must find."""

    def ask(path: str, **body: Any) -> Any:
        answer = httpx.post(url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def dense() -> dict[int, float]:
        *documents, query = np.asarray(ask("/embed", inputs=[*DOCUMENTS, QUERY]))
        return {at: float(one @ query) for at, one in enumerate(documents)}

    def sparse() -> dict[int, float]:
        *documents, query = ask("/embed_sparse", inputs=[*DOCUMENTS, QUERY], sparse_format="tokens")
        if call == "rank_features":  # such a query cannot name a token with a dot in it
            query = {token: weight for token, weight in query.items() if "." not in token}
        found = (sum(weight * document.get(token, 0) for token, weight in query.items()) for document in documents)
        return {at: score for at, score in enumerate(found) if score}

    def max_sim() -> dict[int, float]:
        # BGE-M3 has no prompts.
        prompt = {"prompt_name": "query"} if task == TOKEN_VECTORS else {}
        (query,) = ask("/embed_all", inputs=[QUERY], **prompt)
        documents = ask("/embed_all", inputs=DOCUMENTS)
        return {
            at: float((np.asarray(query) @ np.asarray(one).T).max(axis=1).sum()) for at, one in enumerate(documents)
        }

    if task == ALL_OUTPUTS:
        best = [sorted(found, key=lambda at: -found[at])[:3] for found in (dense(), sparse())]
        if "RRF" in call:
            # Reciprocal rank fusion as Qdrant computes it: the sum of 1 / (2 + rank), from 0.
            ranked = {at for one in best for at in one}
            return {at: sum(1 / (2 + one.index(at)) for one in best if at in one) for at in ranked}
        return {at: score for at, score in max_sim().items() if at in {*best[0], *best[1]}}
    return {SPARSE: sparse, TOKEN_VECTORS: max_sim}.get(task, dense)()
