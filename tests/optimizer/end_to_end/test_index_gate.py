"""The index of an endpoint in an optimisation, and `penstock certify` and `penstock index check`, with real servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import IndexSampleUnusable
from penstock.manifest import Outcome
from penstock.resources.endpoint_parts.vector_space import IndexVerdict
from penstock_cli.certify import embedder_of
from penstock_optimizer.load.workload import EVERYDAY_WORDS
from penstock_optimizer.optimise import prepare
from tests.cli.endpoints import invoke
from tests.optimizer.end_to_end.optimising import ENOUGH_SECONDS, QUICK, Made, endpoint
from tests.optimizer.end_to_end.small_model import write_small_bert

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_points")]
ROWS = 1_200


def write_sample(path: Path, texts: list[str], vectors: Any) -> Path:
    rows = zip(texts, np.asarray(vectors).tolist(), strict=True)
    path.write_text("".join(json.dumps({"text": text, "vector": vector}) + "\n" for text, vector in rows))
    return path


@pytest.fixture(scope="module")
def texts() -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(EVERYDAY_WORDS, random.integers(3, 12))) for _ in range(ROWS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("index")


@pytest.fixture(scope="module")
def fp32(model: Path, folder: Path) -> Path:
    """An fp32 artefact of the model."""
    return prepare(endpoint(model, QUICK), store=folder / "fp32", models=folder / "fp32").artefact


@pytest.fixture(scope="module")
def other(folder: Path) -> Path:
    """An fp32 artefact of another model of the same width."""
    changed = write_small_bert(folder / "model", seed=7)
    return prepare(endpoint(changed, QUICK), store=folder / "other", models=folder / "other").artefact


@pytest.fixture(scope="module")
def own(fp32: Path, folder: Path, texts: list[str]) -> Path:
    """A sample that the fp32 artefact has written."""
    with embedder_of(str(fp32), "") as embedder:
        return write_sample(folder / "own.jsonl", texts, embedder.vectors(texts))


@pytest.fixture(scope="module")
def foreign(other: Path, folder: Path, texts: list[str]) -> Path:
    """A sample by the other model."""
    with embedder_of(str(other), "") as embedder:
        return write_sample(folder / "foreign.jsonl", texts, embedder.vectors(texts))


def gate(sample: Path, **criteria: Any) -> Any:
    return {"vectorSpace": {"index": {"sample": f"file://{sample}", **criteria}}}


def test_an_artefact_that_fits_has_a_certificate(model: Path, own: Path, tmp_path: Path) -> None:
    made = Made(endpoint(model, {**QUICK, "mode": "Disabled"}, **gate(own)), tmp_path)
    found = made.manifest.index

    assert found is not None
    assert found.verdict is IndexVerdict.COMPATIBLE
    assert found.of_documents
    assert (found.queries, found.documents + found.queries <= ROWS) == (ROWS // 3, True)
    assert found.lowest_cosine == pytest.approx(1, abs=1e-5)
    assert any("The vectors fit the index" in finding for finding in made.manifest.findings)
    assert any("comparing with the index" in event.message for event in made.events)


def test_a_precision_that_does_not_fit_gives_way_to_fp32(model: Path, own: Path, tmp_path: Path) -> None:
    """With no tolerance: int8 changes some of the results."""
    int8 = {"engines": ["openvino"], "precisions": ["int8-static"], "accuracy": {"minCosine": 0.5}}
    made = Made(
        endpoint(model, int8, **gate(own, tolerance=0, minRecall=0.99, k=20)), tmp_path, seconds=3 * ENOUGH_SECONDS
    )

    assert made.manifest.serves_fp32
    assert made.manifest.index is not None
    assert made.manifest.index.verdict is IndexVerdict.COMPATIBLE
    failed = [one for one in made.manifest.candidates if one.outcome is Outcome.FAILED]
    assert [one for one in failed if "its vectors do not fit the index" in one.reason]


def test_a_foreign_index_is_refused_without_a_second_choice(model: Path, foreign: Path, tmp_path: Path) -> None:
    made = Made(endpoint(model, {**QUICK, "mode": "Disabled"}, **gate(foreign)), tmp_path)

    assert made.manifest.index is not None
    assert made.manifest.index.verdict is IndexVerdict.RE_EMBED
    assert any("do not fit the index" in finding for finding in made.manifest.findings)


def test_an_unreadable_sample_ends_the_job_before_the_search(model: Path, tmp_path: Path) -> None:
    with pytest.raises(IndexSampleUnusable, match="cannot be read"):
        Made(endpoint(model, QUICK, **gate(tmp_path / "none.jsonl")), tmp_path)


def test_certify_has_a_verdict_and_an_exit_status(
    fp32: Path, other: Path, own: Path, foreign: Path, tmp_path: Path
) -> None:
    queries = tmp_path / "queries.txt"
    texts = [json.loads(line)["text"] for line in own.read_text().splitlines()[:400]]
    queries.write_text("\n".join(" ".join(reversed(text.split())) for text in texts))

    same = invoke("certify", fp32, fp32, "--index", own, "--queries", queries)
    assert (same.exit_code, same.output.splitlines()[-1].split()[1]) == (0, "same:"), same.output
    refused = invoke("certify", fp32, other, "--index", own, "--documents", "1000000", "--price-per-hour", "0.5")
    assert refused.exit_code == 4, refused.output
    assert "re-embed: queries of the new model do not fit the index" in refused.output
    assert "1,000,000 documents take" in refused.output
    assert "at this price" in refused.output
    swapped = invoke("certify", fp32, other, "--index", foreign)
    assert swapped.exit_code == 1
    assert "has not written this index" in swapped.output


def test_certify_writes_an_adapter_only_if_there_are_enough_pairs(
    fp32: Path, other: Path, own: Path, tmp_path: Path
) -> None:
    few = invoke("certify", fp32, other, "--index", own, "--adapter", tmp_path / "a.npz", "--json")
    found = json.loads(few.output)
    assert few.exit_code in {3, 4}, few.output
    assert (tmp_path / "a.npz").exists() == (found["verdict"] == "NeedsAdapter")
    small = tmp_path / "small.jsonl"
    small.write_text("".join(line + "\n" for line in own.read_text().splitlines()[:600]))
    refused = invoke("certify", fp32, other, "--index", small, "--adapter", tmp_path / "b.npz")
    assert refused.exit_code == 4, refused.output
    assert "needs 640 documents with vectors of both" in refused.output


def test_index_check_names_the_writers(fp32: Path, own: Path, foreign: Path, tmp_path: Path) -> None:
    mine, theirs = own.read_text().splitlines()[:300], foreign.read_text().splitlines()[:300]
    for count, status, words in (
        (0, 0, "this model wrote it"),
        (300, 1, "another model wrote this index"),
        (90, 2, "two models wrote this index: 30.0%"),
    ):
        pairs = tmp_path / f"{count}.jsonl"
        pairs.write_text("\n".join(theirs[:count] + mine[count:]) + "\n")
        result = invoke("index", "check", fp32, "--pairs", pairs)

        assert result.exit_code == status, result.output
        assert words in result.output
    assert json.loads(invoke("index", "check", fp32, "--pairs", own, "--json").output)["other"] == 0
