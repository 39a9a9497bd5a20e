"""Decisions from the endpoint's spec, before the search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock_optimizer.job.job import Job
from tests.optimizer.end_to_end.optimising import QUICK, endpoint
from tests.optimizer.end_to_end.small_model import write_small_bert


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_bert(tmp_path_factory.mktemp("model") / "small")


TEXTS = {"texts": ["the city", "the city and the people of the world", "the people " * 100]}


@pytest.mark.parametrize(
    ("task", "workload", "summary"),
    [
        ("feature-extraction", {}, "median 44 tokens, p95 64, longest 64"),
        ("feature-extraction", {"sequenceLengths": [7, 9]}, "median 9 tokens, p95 9, longest 9"),
        ("feature-extraction", TEXTS, "median 10 tokens, p95 64, longest 64"),
        ("feature-extraction", {**TEXTS, "sequenceLengths": [7]}, "median 10 tokens, p95 64, longest 64"),
        ("fill-mask", TEXTS, "median 11 tokens, p95 64, longest 64"),
        # Its requests are generated pairs: the endpoint's texts give no lengths of pairs.
        ("sentence-similarity", {**TEXTS, "sequenceLengths": [7]}, "median 7 tokens, p95 7, longest 7"),
    ],
)
def test_the_workload_is_that_of_the_requests_which_are_sent(
    folder: Path, tmp_path: Path, task: str, workload: dict[str, Any], summary: str
) -> None:
    asked = endpoint(folder, QUICK, task=task, workload=workload)

    assert Job.of(asked, store=tmp_path, models=tmp_path).mix.summary == summary


def test_an_accuracy_budget_that_does_not_apply_to_the_task_is_a_finding(folder: Path, tmp_path: Path) -> None:
    def findings(**accuracy: float) -> list[str]:
        asked = endpoint(folder, {**QUICK, "accuracy": accuracy})
        return [one for one in Job.of(asked, store=tmp_path, models=tmp_path).findings() if "accuracy" in one]

    assert findings(minCosine=0.9) == []
    assert findings(minAgreement=0.9) == [
        "feature-extraction answers with vectors: accuracy.minAgreement decides nothing there. State minCosine"
    ]
