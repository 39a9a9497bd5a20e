"""The pages on accuracy name every metric with the budget that the code applies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.tasks import ENCODER_TASKS, TaskName
from penstock_optimizer.guard.gate import BF16_TOLERANCE, JUDGING_SAMPLES, STRATA, TOLERANCE
from penstock_optimizer.guard.judge import FEW_SAMPLES, TIE
from tests.optimizer.guard.test_judge import verdict

DOCS = Path(__file__).parents[3] / "docs"
PAGE = "\n".join(
    (DOCS / name).read_text(encoding="utf-8") for name in ("reference/accuracy-budgets.md", "explanation/guard.md")
)
PROSE = " ".join(PAGE.split())


@pytest.mark.parametrize("task", ENCODER_TASKS)
def test_every_metric_is_documented_with_its_budget(task: TaskName) -> None:
    assert task.value in PAGE
    for metric in verdict(task, lambda _, answer: answer).metrics:
        side = "at least" if metric.higher_is_better else "at most"
        budget = re.escape(f"{metric.budget:g}") + "0?"
        assert re.search(rf"`{metric.name}`[^\n]*{side} {budget}\b", PAGE), f"{task.value}: {metric}"


@pytest.mark.parametrize("name", ["label_agreement", "score_agreement", "kendall_tau", "entity_f1"])
def test_metrics_of_special_cases_are_documented(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_the_numbers_of_the_document_match_the_code() -> None:
    assert f"At most {JUDGING_SAMPLES} requests judge" in PROSE
    assert [f"{share:.0%}".replace("%", " %") in PROSE for _, share in STRATA] == [True] * len(STRATA)
    assert f"stay within {TOLERANCE:.2%}".replace("%", " %") in PROSE
    assert f"Where activations are rounded to bf16 it is {BF16_TOLERANCE:.2%}".replace("%", " %") in PROSE
    assert f"with fewer than {FEW_SAMPLES} requests" in PROSE
    assert f"within {TIE} of each other" in PROSE
