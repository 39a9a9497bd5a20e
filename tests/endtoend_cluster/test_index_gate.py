"""A rollout on a cluster that the certificate of the index refuses, and one that it accepts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import array, parquet, table

from penstock_optimizer.guard.index_sample import Embedder
from penstock_optimizer.load.workload import EVERYDAY_WORDS
from tests.endtoend_cluster.installation import Endpoint, Json

pytestmark = [pytest.mark.slow, pytest.mark.extended]
ROWS = 1_200
OPTIMIZATION = {"mode": "Disabled", "budgetSeconds": 240}


def write(path: Path, texts: list[str], vectors: Any) -> str:
    """A sample in the folder of the nodes."""
    if path.suffix == ".parquet":
        parquet.write_table(table({"text": texts, "vector": array(list(vectors))}), path)
    else:
        rows = zip(texts, vectors.tolist(), strict=True)
        path.write_text("".join(json.dumps({"text": text, "vector": vector}) + "\n" for text, vector in rows))
    path.chmod(0o644)
    return path.as_uri()


def test_a_rollout_is_refused_or_accepted_by_the_certificate(
    file_sources: Path, endpoint: Callable[[str], Endpoint], capsys: pytest.CaptureFixture[str]
) -> None:
    indexed = endpoint("indexed")

    def seen(*words: str) -> str:
        """What kubectl prints, also into the log of the test."""
        printed = str(indexed.kubectl(*words))
        with capsys.disabled():
            print(f"\n$ kubectl {' '.join(words)}\n{printed}")
        return printed

    def serves(body: Json) -> str:
        return str((body.get("status", {}).get("plan") or {}).get("digest", ""))

    def decided(status: str) -> Callable[[Json], bool]:
        return lambda body: indexed.condition("IndexCompatible", body).get("status") == status

    indexed.apply(optimization=OPTIMIZATION)
    first = indexed.until(lambda body: indexed.condition("Ready", body).get("status") == "True", "ready")
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(EVERYDAY_WORDS, random.integers(3, 10))) for _ in range(ROWS)]
    vectors = Embedder(f"http://{indexed.address()}").vectors(texts)
    own = write(file_sources / "own.parquet", texts, vectors)
    turned = np.linalg.qr(random.normal(size=(vectors.shape[1],) * 2))[0].astype(np.float32)
    foreign = write(file_sources / "foreign.jsonl", texts, vectors @ turned)
    pods = {pod["metadata"]["name"] for pod in indexed.kubectl.items("pods", "app.kubernetes.io/name=penstock-runtime")}

    indexed.apply(optimization=OPTIMIZATION, vectorSpace={"index": {"sample": foreign}})
    refused = indexed.until(decided("False"), "refused")
    assert indexed.condition("IndexCompatible", refused)["reason"] == "NeedsReembedding"
    assert serves(refused) == serves(first)
    assert indexed.condition("Available", refused)["status"] == "True"
    assert "NeedsReembedding" in seen("get", "mep", "indexed")
    described = seen("describe", "mep", "indexed")
    assert "The new vectors do not fit the index" in described
    assert pods == {
        pod["metadata"]["name"] for pod in indexed.kubectl.items("pods", "app.kubernetes.io/name=penstock-runtime")
    }

    indexed.apply(optimization=OPTIMIZATION, vectorSpace={"index": {"sample": own}})
    accepted = indexed.until(
        lambda body: decided("True")(body) and indexed.condition("Ready", body).get("status") == "True", "accepted"
    )
    assert indexed.condition("IndexCompatible", accepted)["reason"] == "Compatible"
    assert serves(accepted) != serves(first)
    assert "True" in seen("get", "mep", "indexed")
    assert "Queries may search the index" in seen("describe", "mep", "indexed")
