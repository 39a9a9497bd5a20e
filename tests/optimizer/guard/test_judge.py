"""Verdicts, task by task, on answers in the HF shape."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.manifest import Metric, Verdict
from penstock.resources.endpoint import AccuracyBudget
from penstock.tasks import ENCODER_TASKS, TaskName
from penstock_optimizer.guard.judge import ObservedAnswer, explain, finite, judge, unused_budgets
from penstock_runtime.tasks.embeddings.sparse_vectors import SparseVector

COUNT = 100
Answer = Any
Change = Callable[[int, Answer], Answer]


def vector(index: int) -> Any:
    return np.random.default_rng(index).standard_normal((1, 16)).astype(np.float32)


ANSWERS: dict[TaskName, Callable[[int], Answer]] = {
    TaskName.FEATURE_EXTRACTION: vector,
    TaskName.SENTENCE_SIMILARITY: lambda index: [0.1, 0.5, 0.9 - index / 1000],
    TaskName.TEXT_RANKING: lambda _: [
        {"index": 1, "score": 2.0},
        {"index": 0, "score": 0.5},
        {"index": 2, "score": -3.0},
    ],
    TaskName.TEXT_CLASSIFICATION: lambda _: [[{"label": "joy", "score": 0.8}, {"label": "fear", "score": 0.2}]],
    TaskName.TOKEN_CLASSIFICATION: lambda _: [
        {"entity": label, "score": 0.9, "index": place, "word": "x", "start": place, "end": place + 1}
        for place, label in enumerate(["O", "B-PER", "I-PER", "O", "B-LOC", "O", "O", "O"])
    ],
    TaskName.QUESTION_ANSWERING: lambda _: {"score": 0.7, "start": 10, "end": 20, "answer": "something "},
    TaskName.FILL_MASK: lambda _: [
        {"score": 0.5 / (rank + 1), "token": rank, "token_str": "x", "sequence": "x"} for rank in range(10)
    ],
    TaskName.ZERO_SHOT_CLASSIFICATION: lambda _: {"sequence": "x", "labels": ["a", "b"], "scores": [0.9, 0.1]},
    TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION: lambda _: [
        {"entity_group": "PER", "score": 0.9, "word": "x", "start": place, "end": place + 1} for place in (1, 4)
    ],
}


def observed(task: TaskName, answer: Answer) -> ObservedAnswer:
    if task is TaskName.FEATURE_EXTRACTION:
        return ObservedAnswer(answer, tuple(answer))
    if task is TaskName.SENTENCE_SIMILARITY:
        return ObservedAnswer(answer, (np.ones(4, np.float32), *(np.ones(4, np.float32) for _ in answer)))
    if task is TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION:
        scores = np.full(8, 0.2, np.float32)
        scores[[entity["start"] for entity in answer]] = 0.9
        return ObservedAnswer(answer, (scores,))
    return ObservedAnswer(answer)


def verdict(task: TaskName, change: Change, share: float = 1.0, budget: AccuracyBudget | None = None) -> Verdict:
    """Judge a candidate that changes this share of the answers."""
    before = [ANSWERS[task](index) for index in range(COUNT)]
    after = [change(index, copy.deepcopy(one)) if index < share * COUNT else one for index, one in enumerate(before)]
    reference, candidate = ([observed(task, one) for one in some] for some in (before, after))
    return judge(task, reference, candidate, budget or AccuracyBudget())


def metric(found: Verdict, name: str) -> Metric:
    return next(one for one in found.metrics if one.name == name)


def flip_labels(_: int, answer: Answer) -> Answer:
    entries = answer[0]
    entries[0]["score"], entries[1]["score"] = entries[1]["score"], entries[0]["score"]
    return [sorted(entries, key=lambda entry: -entry["score"])]


def swap_ranks(_: int, answer: Answer) -> Answer:
    answer[0]["score"], answer[1]["score"] = answer[1]["score"], answer[0]["score"]
    return sorted(answer, key=lambda entry: -entry["score"])


def relabel(_: int, answer: Answer) -> Answer:
    answer[1]["entity"] = "O"
    return answer


def shift_span(_: int, answer: Answer) -> Answer:
    return {**answer, "start": 40, "end": 50}


def other_tokens(_: int, answer: Answer) -> Answer:
    return [{**entry, "token": entry["token"] + 100} for entry in answer]


def other_label(_: int, answer: Answer) -> Answer:
    return {**answer, "labels": ["b", "a"]}


def other_best(_: int, answer: Answer) -> Answer:
    return [answer[2], answer[1], answer[0]]


def turn_vector(index: int, answer: Answer) -> Answer:
    return answer + vector(index + 1000)


def move_entity(_: int, answer: Answer) -> Answer:
    first, *others = answer
    return [{**first, "start": first["start"] + 1, "end": first["end"] + 1}, *others]


WORSE: dict[TaskName, tuple[Change, str]] = {
    TaskName.FEATURE_EXTRACTION: (turn_vector, "min_cosine"),
    TaskName.SENTENCE_SIMILARITY: (other_best, "top1_agreement"),
    TaskName.TEXT_RANKING: (swap_ranks, "top1_agreement"),
    TaskName.TEXT_CLASSIFICATION: (flip_labels, "argmax_agreement"),
    TaskName.TOKEN_CLASSIFICATION: (relabel, "token_agreement"),
    TaskName.QUESTION_ANSWERING: (shift_span, "span_match"),
    TaskName.FILL_MASK: (other_tokens, "top1_agreement"),
    TaskName.ZERO_SHOT_CLASSIFICATION: (other_label, "argmax_agreement"),
    TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION: (move_entity, "span_agreement"),
}


@pytest.mark.parametrize("task", ENCODER_TASKS)
def test_the_same_answers_are_accepted_with_the_best_of_all_values(task: TaskName) -> None:
    found = verdict(task, lambda _, answer: answer)

    assert found.passed
    assert found.texts == COUNT
    assert found.metrics
    for one in found.metrics:
        assert one.value == pytest.approx(1.0 if one.higher_is_better else 0.0, abs=1e-6)


@pytest.mark.parametrize("task", ENCODER_TASKS)
def test_changed_answers_are_rejected_with_the_metric_that_saw_them(task: TaskName) -> None:
    change, name = WORSE[task]

    found = verdict(task, change)

    assert not found.passed
    assert not metric(found, name).passed
    assert name in found.reason
    assert "under the budget" in found.reason or "over the budget" in found.reason


@pytest.mark.parametrize("task", [task for task in ENCODER_TASKS if task is not TaskName.FEATURE_EXTRACTION])
def test_agreement_falls_with_the_share_of_changed_answers(task: TaskName) -> None:
    change, name = WORSE[task]

    values = [metric(verdict(task, change, share), name).value for share in (0.0, 0.1, 0.5, 1.0)]

    assert values == sorted(values, reverse=True)
    assert values[0] == 1
    assert values[-1] < values[1] < 1


@pytest.mark.parametrize("task", [task for task in ENCODER_TASKS if task is not TaskName.FEATURE_EXTRACTION])
def test_the_endpoints_own_budget_decides_where_it_is_stated(task: TaskName) -> None:
    change, name = WORSE[task]

    strict = verdict(task, change, 0.04, AccuracyBudget(min_agreement=0.999))
    loose = verdict(task, change, 0.30, AccuracyBudget(min_agreement=0.2))

    assert not metric(strict, name).passed
    assert metric(loose, name).passed
    assert metric(loose, name).budget == 0.2


def rotated(cosine: float) -> Change:
    """Change every vector to one with this cosine to it."""

    def change(index: int, answer: Answer) -> Answer:
        one = answer[0] / np.linalg.norm(answer[0])
        aside = vector(index + 5000)[0]
        aside -= (aside @ one) * one
        return ((cosine * one + math.sqrt(1 - cosine**2) * aside / np.linalg.norm(aside))[np.newaxis]).astype(
            np.float32
        )

    return change


@pytest.mark.parametrize(
    ("cosine", "share", "passed", "names"),
    [
        (0.990, 1.0, True, ()),
        (0.980, 1.0, False, ("mean_cosine",)),
        (0.944, 1.0, False, ("mean_cosine", "p1_cosine")),
        (0.844, 1.0, False, ("mean_cosine", "p1_cosine", "min_cosine")),
        (0.930, 0.01, True, ()),
        (0.930, 0.05, False, ("p1_cosine",)),
        (0.880, 0.01, False, ("min_cosine",)),
    ],
)
def test_embeddings_are_judged_by_the_mean_the_first_percentile_and_the_minimum(
    cosine: float, share: float, passed: bool, names: tuple[str, ...]
) -> None:
    found = verdict(TaskName.FEATURE_EXTRACTION, rotated(cosine), share)

    failed = {one.name for one in found.metrics if not one.passed} - {"neighbour_overlap"}
    assert failed == set(names)
    assert metric(found, "min_cosine").value == pytest.approx(cosine, abs=1e-5)
    if passed:
        assert found.passed


def test_a_mean_that_is_within_the_budget_by_chance_is_not_enough() -> None:
    found = verdict(TaskName.FEATURE_EXTRACTION, rotated(0.972), 0.5)

    mean = metric(found, "mean_cosine")
    assert mean.lower is not None
    assert mean.lower < mean.budget < mean.value
    assert not found.passed
    assert found.reason == f"mean_cosine 0.986 may be as low as {mean.lower:.4f}, under the budget of 0.985"


@pytest.mark.parametrize("stated", [0.985, 0.9, 0.5])
def test_a_stated_cosine_holds_for_every_text_and_instead_of_all_other_budgets(stated: float) -> None:
    budget = AccuracyBudget(min_cosine=stated)

    under = verdict(TaskName.FEATURE_EXTRACTION, rotated(stated - 0.01), 0.01, budget)
    over = verdict(TaskName.FEATURE_EXTRACTION, rotated(stated + 0.01), 0.01, budget)

    assert [one.name for one in under.metrics if not one.passed] == ["min_cosine"]
    assert under.metrics[0].name == "min_cosine"
    assert [one.budget for one in over.metrics[:3]] == [stated] * 3
    assert over.passed


def test_token_vectors_have_no_neighbours() -> None:
    matrices = [np.random.default_rng(size).standard_normal((1, size, 8)).astype(np.float32) for size in range(2, 30)]
    some = [ObservedAnswer(matrix, (matrix[0],)) for matrix in matrices]

    found = judge(TaskName.FEATURE_EXTRACTION, some, some, AccuracyBudget())

    assert [one.name for one in found.metrics] == ["mean_cosine", "p1_cosine", "min_cosine"]


def classified(*scores: float) -> Answer:
    return [[{"label": f"L{index}", "score": score} for index, score in enumerate(scores)]]


@pytest.mark.parametrize(
    ("before", "after", "hit"),
    [
        ((0.505, 0.495), (0.495, 0.505), True),
        ((0.52, 0.48), (0.48, 0.52), False),
        ((0.34, 0.335, 0.325), (0.33, 0.32, 0.35), True),
    ],
)
def test_a_flip_between_tied_labels_is_no_change(before: Any, after: Any, hit: bool) -> None:
    found = judge(
        TaskName.TEXT_CLASSIFICATION,
        [ObservedAnswer(classified(*before))],
        [ObservedAnswer(classified(*after))],
        AccuracyBudget(),
    )

    assert metric(found, "argmax_agreement").value == float(hit)


def test_a_flip_of_a_confident_answer_weighs_more_than_one_of_an_uncertain_answer() -> None:
    def lost(lead: float) -> float:
        first, second = 0.5 + lead / 2, 0.5 - lead / 2
        found = judge(
            TaskName.TEXT_CLASSIFICATION,
            [ObservedAnswer(classified(first, second))],
            [ObservedAnswer(classified(second, first))],
            AccuracyBudget(),
        )
        return metric(found, "flipped_margin").value

    assert lost(0.1) == pytest.approx(0.1)
    assert lost(0.9) == pytest.approx(0.9)


def test_a_single_score_is_judged_by_its_change_and_its_order() -> None:
    before = [ObservedAnswer([[{"label": "x", "score": index / 10}]]) for index in range(50)]
    near = [ObservedAnswer([[{"label": "x", "score": index / 10 + 0.01}]]) for index in range(50)]
    far = [ObservedAnswer([[{"label": "x", "score": -index / 10}]]) for index in range(50)]

    assert judge(TaskName.TEXT_CLASSIFICATION, before, near, AccuracyBudget()).passed
    found = judge(TaskName.TEXT_CLASSIFICATION, before, far, AccuracyBudget())
    assert metric(found, "kendall_tau").value == pytest.approx(-1)


def independent(*scores: float) -> ObservedAnswer:
    return ObservedAnswer([[{"label": f"L{index}", "score": score} for index, score in enumerate(scores)]])


def test_labels_of_a_multi_label_model_are_judged_one_by_one() -> None:
    before = [independent(0.9, 0.8, 0.1)] * 50

    def judged(*scores: float) -> Verdict:
        return judge(TaskName.TEXT_CLASSIFICATION, before, [independent(*scores)] * 50, AccuracyBudget())

    assert judged(0.88, 0.81, 0.12).passed
    found = judged(0.9, 0.4, 0.1)
    assert not found.passed
    assert metric(found, "label_agreement").value == pytest.approx(2 / 3)


def test_a_label_near_one_half_may_change() -> None:
    found = judge(TaskName.TEXT_CLASSIFICATION, [independent(0.9, 0.505)], [independent(0.9, 0.495)], AccuracyBudget())

    assert metric(found, "label_agreement").value == 1


def test_several_regressions_are_each_judged_by_their_own_spread() -> None:
    before = [independent(index / 10, 100.0 * index) for index in range(50)]
    near = [independent(index / 10, 100.0 * index + 5) for index in range(50)]
    far = [independent(index / 10 + 5, 100.0 * index) for index in range(50)]

    assert judge(TaskName.TEXT_CLASSIFICATION, before, near, AccuracyBudget()).passed
    assert metric(judge(TaskName.TEXT_CLASSIFICATION, before, far, AccuracyBudget()), "score_agreement").value == 0.5


@pytest.mark.parametrize(("change", "agreement"), [(0.019, 1.0), (0.021, 0.0), (0.19, 0.0)])
def test_scores_with_a_small_spread_may_change_by_a_tie_and_no_more(change: float, agreement: float) -> None:
    before = [independent(0.5 + index / 1e4) for index in range(50)]
    after = [independent(0.5 + index / 1e4 + change) for index in range(50)]

    found = judge(TaskName.TEXT_CLASSIFICATION, before, after, AccuracyBudget())
    assert metric(found, "score_agreement").value == agreement


def test_texts_without_entities_are_judged_by_their_tokens_alone() -> None:
    answer = [{"entity": "O", "score": 1.0, "index": 0, "word": "x", "start": 0, "end": 1}]
    some = [ObservedAnswer(answer)] * 80

    found = judge(TaskName.TOKEN_CLASSIFICATION, some, some, AccuracyBudget())

    assert [one.name for one in found.metrics] == ["token_agreement"]


@pytest.mark.parametrize("task", ENCODER_TASKS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nan_is_rejected_anywhere_in_an_answer(task: TaskName, value: float) -> None:
    before = [observed(task, ANSWERS[task](index)) for index in range(3)]
    broken: dict[TaskName, Answer] = {
        TaskName.FEATURE_EXTRACTION: np.full((1, 16), value, np.float32),
        TaskName.SENTENCE_SIMILARITY: [0.1, value, 0.9],
        TaskName.QUESTION_ANSWERING: {"score": value, "start": 1, "end": 2, "answer": "x"},
        TaskName.ZERO_SHOT_CLASSIFICATION: {"sequence": "x", "labels": ["a", "b"], "scores": [0.5, value]},
        TaskName.TEXT_CLASSIFICATION: [[{"label": "joy", "score": np.float32(value)}]],
    }
    answer = broken[task] if task in broken else [{**ANSWERS[task](0)[0], "score": value}]

    found = judge(task, before, [*before[:2], ObservedAnswer(answer)], AccuracyBudget())

    assert not found.passed
    assert found.reason == "1 answers hold NaN or infinity"


def test_a_candidate_without_answers_to_compare_is_rejected() -> None:
    assert not judge(TaskName.FILL_MASK, [], [], AccuracyBudget()).passed


def test_a_candidate_with_a_missing_answer_is_rejected() -> None:
    some = [observed(TaskName.FILL_MASK, ANSWERS[TaskName.FILL_MASK](0))] * 3

    found = judge(TaskName.FILL_MASK, some, some[:2], AccuracyBudget())

    assert (found.passed, found.reason) == (False, "2 answers for 3 samples")


def test_the_reason_mentions_few_texts() -> None:
    some = [observed(TaskName.QUESTION_ANSWERING, ANSWERS[TaskName.QUESTION_ANSWERING](0))] * 9

    found = judge(TaskName.QUESTION_ANSWERING, some, some, AccuracyBudget())

    assert found.passed
    assert "on 9 texts only: span_match may be as low as 0.70" in found.reason


def test_the_reason_never_shows_a_value_as_equal_to_the_budget_that_it_misses() -> None:
    close = Metric(name="min_cosine", value=0.98496, budget=0.985, passed=False)

    assert explain([close], 100) == "min_cosine 0.98496 is under the budget of 0.985"


def test_all_failed_metrics_are_named() -> None:
    metrics = [
        Metric(name="a", value=0.5, budget=0.9, passed=False),
        Metric(name="b", value=1.0, budget=0.9, passed=True),
        Metric(name="c", value=0.3, budget=0.1, higher_is_better=False, passed=False),
    ]

    assert explain(metrics, 100) == "a 0.500 is under the budget of 0.9 and c 0.300 is over the budget of 0.1"


@pytest.mark.parametrize("answer", [1, "NaN", None, True, [1.0, {"a": (2.0, "x")}], np.ones(2, np.float32)])
def test_answers_without_nan_or_infinity_are_finite(answer: Any) -> None:
    assert finite(answer)


@pytest.mark.parametrize("task", ENCODER_TASKS)
@pytest.mark.parametrize("budget", [AccuracyBudget(min_cosine=0.123), AccuracyBudget(min_agreement=0.123)])
def test_a_stated_budget_that_does_not_apply_is_reported(task: TaskName, budget: AccuracyBudget) -> None:
    held = any(one.budget == 0.123 for one in verdict(task, lambda _, answer: answer, budget=budget).metrics)

    assert len(unused_budgets(task, budget)) == (0 if held else 1)
    assert unused_budgets(task, AccuracyBudget()) == ()


# Labels of the same name

Scores = list[tuple[str, float]]


def judged(before: Scores, after: Scores) -> Verdict:
    """Answers for many texts, all with these scores."""
    answers = (
        [[{"label": label, "score": score} for label, score in sorted(one, key=lambda entry: -entry[1])]]
        for one in (before, after)
    )
    reference, candidate = ([ObservedAnswer(answer)] * COUNT for answer in answers)
    return judge(TaskName.TEXT_CLASSIFICATION, reference, candidate, AccuracyBudget())


@pytest.mark.parametrize(
    "before",
    [
        [("neg", 0.45), ("pos", 0.35), ("neg", 0.2)],
        [("neg", 0.34), ("neg", 0.33), ("neg", 0.33)],
        [("a", 0.9), ("a", 0.2), ("b", 0.7)],
        [("a", 3.0), ("a", -1.0), ("b", 0.7)],
    ],
)
def test_equal_answers_pass_also_if_labels_share_a_name(before: Scores) -> None:
    assert judged(before, list(reversed(before))).passed


def test_another_best_label_is_detected_if_labels_share_a_name() -> None:
    # By the sum of both nothing would have changed.
    found = judged([("neg", 0.45), ("pos", 0.35), ("neg", 0.2)], [("neg", 0.35), ("pos", 0.45), ("neg", 0.2)])

    assert not found.passed
    assert metric(found, "argmax_agreement").value == 0


def test_the_order_of_two_labels_with_one_name_does_not_matter() -> None:
    found = judged([("neg", 0.6), ("neg", 0.3), ("pos", 0.1)], [("neg", 0.3), ("neg", 0.6), ("pos", 0.1)])

    assert metric(found, "argmax_agreement").value == 1


def test_multi_label_answers_are_compared_also_if_labels_share_a_name() -> None:
    before = [("a", 0.9), ("a", 0.2), ("b", 0.7)]

    # The label that is true becomes false; then the other one becomes true as well.
    for after in ([("a", 0.4), ("a", 0.2), ("b", 0.7)], [("a", 0.9), ("a", 0.8), ("b", 0.7)]):
        assert metric(judged(before, after), "label_agreement").value == pytest.approx(2 / 3)


def sparse(index: int) -> SparseVector:
    draw = np.random.default_rng(index)
    indices = np.sort(draw.choice(1000, 20, replace=False))
    return SparseVector(indices, draw.random(20, dtype=np.float32) + np.float32(0.1), 1000)


@pytest.mark.parametrize("kept", [20, 15, 0])
def test_sparse_vectors_are_judged_as_their_dense_forms(kept: int) -> None:
    whole = [sparse(index) for index in range(COUNT)]
    cut = [SparseVector(one.indices[:kept], one.values[:kept], one.width) for one in whole]

    def judged(form: Callable[[SparseVector], Any]) -> Verdict:
        before, after = ([ObservedAnswer([], (form(one),)) for one in some] for some in (whole, cut))
        return judge(TaskName.FEATURE_EXTRACTION, before, after, AccuracyBudget())

    by_pairs, by_vectors = judged(SparseVector.pairs), judged(SparseVector.dense)

    assert by_pairs.passed == (kept == 20)
    for one, other in zip(by_pairs.metrics, by_vectors.metrics, strict=True):
        assert one.name == other.name
        assert one.value == pytest.approx(other.value, abs=1e-6)


def test_text_generation_takes_the_budget_of_agreement() -> None:
    """Its share of positions with the same best token: `generation.agreement_of_logits`."""
    assert unused_budgets(TaskName.TEXT_GENERATION, AccuracyBudget(min_agreement=0.9)) == ()
    assert len(unused_budgets(TaskName.TEXT_GENERATION, AccuracyBudget(min_cosine=0.9))) == 1
