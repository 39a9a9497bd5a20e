"""What the golden models are asked, task by task. Every parameter that changes an answer's shape is asked for once."""

from __future__ import annotations

from typing import Any

from penstock.tasks import TaskName

PERSON = "My name is Zoë Müller and I live in Berkeley, not in São Paulo."
LONG = (
    "Ada Lovelace wrote a letter from New York. Jean-Baptiste doesn't like the Netherlands. "
    "Sarah Jessica Parker works at a bank in Montréal. Nguyễn Văn An has never been to 東京. "
) * 2
ODD = "😀 I  love\tNew York!!!  [SEP] </s> naïve ꙮ"

Case = tuple[Any, dict[str, Any]]
"""Inputs and parameters."""

CASES: dict[TaskName, dict[str, Case]] = {
    TaskName.FEATURE_EXTRACTION: {
        "one text": ("I like you.", {}),
        "several texts": (["I love you.", ODD], {}),
    },
    TaskName.SENTENCE_SIMILARITY: {
        "a sentence and others": (
            {"source_sentence": PERSON, "sentences": ["I live in Berkeley.", "Prices rise by 3.5 %.", LONG, ODD]},
            {},
        ),
    },
    TaskName.TEXT_RANKING: {
        "a query and texts": (
            {"query": "Where does Ada live?", "texts": ["Ada lives in Łódź.", "I like you.", LONG]},
            {},
        ),
        "raw scores with texts": (
            {"query": "capital of France", "texts": ["Paris is the capital of France.", ODD]},
            {"raw_scores": True, "return_text": True},
        ),
    },
    TaskName.TEXT_CLASSIFICATION: {
        "the best class": ("I like you. I love you.", {}),
        "all classes of several texts": ([PERSON, ODD, LONG], {"top_k": None}),
        "independent classes": (PERSON, {"top_k": 2, "function_to_apply": "sigmoid"}),
    },
    TaskName.TOKEN_CLASSIFICATION: {
        strategy: ([PERSON, ODD, LONG], {"aggregation_strategy": strategy})
        for strategy in ("none", "simple", "first", "average", "max")
    },
    TaskName.QUESTION_ANSWERING: {
        "one window": ({"question": "Where do I live?", "context": PERSON}, {}),
        "several windows": ({"question": "Who works at a bank?", "context": LONG}, {"top_k": 3, "doc_stride": 8}),
        "no answer allowed": (
            {"question": "Who?", "context": "I like you."},
            {"handle_impossible_answer": True, "max_answer_len": 4},
        ),
    },
    TaskName.FILL_MASK: {
        "one mask": ("Paris is the {mask} of France.", {}),
        "two masks": ("{mask} lives in {mask}.", {"top_k": 2}),
        "among targets": ("I {mask} you.", {"targets": ["like", "love"]}),
    },
    TaskName.ZERO_SHOT_CLASSIFICATION: {
        "one label": ("Prices rise by 3.5 %.", {"candidate_labels": ["economy", "sports", "urgent"]}),
        "many labels": (
            [PERSON, LONG],
            {
                "candidate_labels": ["economy", "sports"],
                "multi_label": True,
                "hypothesis_template": "It is about {}.",
            },
        ),
    },
}

MASKS = {"bert": "[MASK]", "distilbert": "[MASK]", "roberta": "<mask>", "mpnet": "<mask>"}

MINILM: dict[TaskName, dict[str, Case]] = {
    TaskName.FEATURE_EXTRACTION: {
        "one text": ("I like you. I love you.", {}),
        "several texts": (["The capital of France is Paris.", "東京は日本の首都です。 😀"], {}),
        "longer than the model": ("Ada Lovelace wrote a letter from New York. " * 80, {}),
    },
    TaskName.SENTENCE_SIMILARITY: {
        "a sentence and others": (
            {
                "source_sentence": "That is a happy person",
                "sentences": ["That is a happy dog", "That is a very happy person", "Today is a sunny day"],
            },
            {},
        ),
    },
}
"""The real all-MiniLM-L6-v2."""
