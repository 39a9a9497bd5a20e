"""docs/guard.md has every metric with the budget of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.tasks import TaskName
from penstock_optimizer.guard.calibration import JUDGING_SAMPLES, STRATA
from penstock_optimizer.guard.gate import BF16_TOLERANCE, TOLERANCE
from penstock_optimizer.guard.judge import FEW_SAMPLES, TIE
from tests.optimizer.guard.test_judge import verdict

PAGE = (Path(__file__).parents[3] / "docs" / "guard.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("task", TaskName)
def test_every_metric_is_documented_with_its_budget(task: TaskName) -> None:
    assert task.value in PAGE
    for metric in verdict(task, lambda _, answer: answer).metrics:
        side = "at least" if metric.higher_is_better else "at most"
        budget = re.escape(f"{metric.budget:g}") + "0?"
        assert re.search(rf"`{metric.name}`[^\n]*{side} {budget}\b", PAGE), f"{task.value}: {metric}"


@pytest.mark.parametrize("name", ["label_agreement", "score_agreement", "kendall_tau", "entity_f1"])
def test_metrics_of_special_cases_are_documented(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_the_numbers_of_the_text_are_those_of_the_code() -> None:
    assert f"At most {JUDGING_SAMPLES} requests judge" in PAGE
    assert [f"{share:.0%}".replace("%", " %") in PAGE for _, share in STRATA] == [True] * len(STRATA)
    assert f"stay within {TOLERANCE:.2%}".replace("%", " %") in PAGE
    assert f"Where activations are rounded to bf16 it is {BF16_TOLERANCE:.2%}".replace("%", " %") in PAGE
    assert f"with fewer than {FEW_SAMPLES} requests" in PAGE
    assert f"within {TIE} of each other" in PAGE
