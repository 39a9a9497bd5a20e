"""Aggregation, rule by rule; the whole is judged by the pipeline in test_token_classification."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock_runtime.tasks.extraction.entities import Aggregation, Window, entities, merge_windows

LABELS = ("O", "B-PER", "I-PER", "I-LOC")


def tokens(*rows: tuple[str, bool, dict[str, float]]) -> Window:
    """Tokens of five characters each: word, whether it continues a word, scores by label."""
    return Window(
        words=[word for word, _, _ in rows],
        scores=np.array([[scores.get(label, 0) for label in LABELS] for _, _, scores in rows], dtype=np.float32),
        places=[(5 * index, 5 * index + 5) for index in range(len(rows))],
        continues=[continues for _, continues, _ in rows],
        first=1,
    )


def found(window: Window, aggregation: Aggregation, ignored: tuple[str, ...] = ()) -> list[tuple[Any, ...]]:
    return [
        (entity.get("entity_group", entity.get("entity")), round(entity["score"], 4), entity["word"])
        for entity in entities(window, aggregation, LABELS, ignored=ignored, join="".join)
    ]


SPLIT_WORD = tokens(
    ("micro", False, {"B-PER": 0.6, "I-LOC": 0.4}),
    ("soft", True, {"I-LOC": 0.9, "B-PER": 0.1}),
    ("is", False, {"O": 1.0}),
)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation.NONE, [("B-PER", 0.6, "micro"), ("I-LOC", 0.9, "soft"), ("O", 1.0, "is")]),
        (Aggregation.SIMPLE, [("PER", 0.6, "micro"), ("LOC", 0.9, "soft"), ("O", 1.0, "is")]),
        (Aggregation.FIRST, [("PER", 0.6, "microsoft"), ("O", 1.0, "is")]),
        (Aggregation.AVERAGE, [("LOC", 0.65, "microsoft"), ("O", 1.0, "is")]),
        (Aggregation.MAX, [("LOC", 0.9, "microsoft"), ("O", 1.0, "is")]),
    ],
)
def test_each_strategy_resolves_a_word_whose_tokens_disagree(
    aggregation: Aggregation, expected: list[tuple[Any, ...]]
) -> None:
    assert found(SPLIT_WORD, aggregation) == expected


def test_a_b_tag_starts_a_new_entity_of_the_same_type() -> None:
    labels = ("B-PER", "I-PER", "B-PER", "I-PER")
    rows = tokens(*((word, False, {label: 1.0}) for word, label in zip("abcd", labels, strict=True)))
    assert found(rows, Aggregation.SIMPLE) == [("PER", 1.0, "ab"), ("PER", 1.0, "cd")]


def test_the_score_of_a_group_is_the_mean() -> None:
    rows = tokens(("a", False, {"B-PER": 0.5, "O": 0.1}), ("b", False, {"I-PER": 0.8, "O": 0.2}))
    assert found(rows, Aggregation.SIMPLE) == [("PER", 0.65, "ab")]


def test_a_first_token_that_continues_a_word_is_a_separate_entity() -> None:
    """A window may begin inside a word."""
    rows = tokens(("ing", True, {"B-PER": 1.0}), ("a", False, {"I-LOC": 1.0}))
    assert found(rows, Aggregation.FIRST) == [("PER", 1.0, "ing"), ("LOC", 1.0, "a")]


@pytest.mark.parametrize("aggregation", Aggregation)
def test_no_tokens_are_no_entities(aggregation: Aggregation) -> None:
    assert found(tokens(), aggregation) == []


@pytest.mark.parametrize(
    ("aggregation", "ignored", "expected"),
    [
        (Aggregation.NONE, ("O", "PER"), ["micro", "soft"]),
        (Aggregation.NONE, ("B-PER",), ["soft", "is"]),
        (Aggregation.SIMPLE, ("O", "PER"), ["soft"]),
        (Aggregation.SIMPLE, ("B-PER",), ["micro", "soft", "is"]),
    ],
)
def test_labels_are_ignored_by_the_name_that_the_answer_has(
    aggregation: Aggregation, ignored: tuple[str, ...], expected: list[str]
) -> None:
    assert [word for _, _, word in found(SPLIT_WORD, aggregation, ignored)] == expected


def entity(start: int, end: int, score: float) -> dict[str, Any]:
    return {"start": start, "end": end, "score": score}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([entity(0, 3, 0.5), entity(3, 5, 0.5)], [entity(0, 3, 0.5), entity(3, 5, 0.5)]),
        ([entity(4, 6, 0.9), entity(0, 3, 0.5)], [entity(0, 3, 0.5), entity(4, 6, 0.9)]),
        ([entity(0, 3, 0.9), entity(0, 5, 0.1)], [entity(0, 5, 0.1)]),
        ([entity(0, 5, 0.1), entity(2, 5, 0.9)], [entity(0, 5, 0.1)]),
        ([entity(0, 3, 0.4), entity(0, 3, 0.5)], [entity(0, 3, 0.5)]),
        ([entity(0, 3, 0.5), entity(0, 3, 0.4)], [entity(0, 3, 0.5)]),
    ],
)
def test_an_entity_in_two_overlapping_windows_is_reported_once(
    given: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    assert merge_windows(given) == expected
