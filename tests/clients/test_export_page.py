"""The programs of docs/how-to/export-an-index.md write samples that Penstock reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from penstock_optimizer.guard.certificate import unit
from penstock_optimizer.guard.index_sample import read_sample
from tests.clients.opensearch import opensearch_node
from tests.clients.recording import FOLDER

pytestmark = pytest.mark.extended

PAGE = (Path(__file__).parents[2] / "docs/how-to/export-an-index.md").read_text(encoding="utf-8")
QDRANT, OPENSEARCH, LANCEDB = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
UV = Path(sys.executable).with_name("uv")
TEXTS = [f"text {number}" for number in range(600)]
VECTORS = np.random.default_rng(0).normal(size=(len(TEXTS), 8)).astype(np.float32)
WRITE_QDRANT = """
import json, sys
from qdrant_client import QdrantClient, models
texts, vectors = json.load(sys.stdin)
client = QdrantClient(path="qdrant")
client.create_collection("texts", models.VectorParams(size=8, distance=models.Distance.COSINE))
client.upload_collection("texts", vectors=vectors, payload=[{"text": text} for text in texts])
client.close()
"""
WRITE_LANCEDB = """
import json, sys, lancedb
texts, vectors = json.load(sys.stdin)
rows = [{"text": text, "vector": vector} for text, vector in zip(texts, vectors)]
lancedb.connect("data/lancedb").create_table("texts", rows)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the databases' packages."""
    folder = tmp_path_factory.mktemp("packages")
    subprocess.run([UV, "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder], check=True)
    requirements = (FOLDER / "requirements_search.txt").read_text(encoding="utf-8").split()
    wanted = [one for one in requirements if one.partition("==")[0] in {"qdrant-client", "lancedb", "opensearch-py"}]
    install = [UV, "pip", "install", "--quiet", "--python", folder / "bin/python", *wanted, "pyarrow"]
    subprocess.run([str(word) for word in install], check=True)
    return folder / "bin/python"


def run(python: Path, program: str, folder: Path) -> None:
    done = subprocess.run(
        [python, "-c", program],
        input=json.dumps([TEXTS, VECTORS.tolist()]),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def compare(sample: Path) -> None:
    """Directions only: a server of Qdrant stores vectors of length 1, and its local mode does not."""
    found = read_sample(sample)
    stored = dict(zip(found.texts, found.vectors, strict=True))
    assert sorted(stored) == sorted(TEXTS)
    np.testing.assert_allclose(unit(np.array([stored[text] for text in TEXTS])), unit(VECTORS), rtol=1e-5, atol=1e-6)


def test_qdrant(python: Path, tmp_path: Path) -> None:
    server = '"http://localhost:6333"'
    assert server in QDRANT
    run(python, WRITE_QDRANT, tmp_path)
    run(python, QDRANT.replace(server, 'path="qdrant"') + "\nclient.close()\n", tmp_path)
    compare(tmp_path / "sample.jsonl")


def test_lancedb(python: Path, tmp_path: Path) -> None:
    run(python, WRITE_LANCEDB, tmp_path)
    run(python, LANCEDB, tmp_path)
    compare(tmp_path / "sample.parquet")


def test_opensearch(python: Path, tmp_path: Path) -> None:
    with opensearch_node(tmp_path) as address:
        lines = []
        for text, vector in zip(TEXTS, VECTORS.tolist(), strict=True):
            lines += [json.dumps({"index": {}}), json.dumps({"text": text, "vector": vector})]
        sent = "\n".join(lines) + "\n"
        headers = {"content-type": "application/x-ndjson"}
        httpx.post(f"{address}/texts/_bulk?refresh=true", content=sent, headers=headers, timeout=60).raise_for_status()
        run(python, OPENSEARCH.replace("http://localhost:9200", address), tmp_path)
    compare(tmp_path / "sample.jsonl")
