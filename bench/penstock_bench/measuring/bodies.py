"""Requests of the experiment: `batch` texts of an exact number of tokens each, in the HF shape of the task."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from penstock.tasks import TaskName
from penstock_optimizer.load.client import RequestBody
from penstock_optimizer.load.workload import TextMaker, predict_bodies

QUERY_TOKENS = 10


def fewest_tokens(task: TaskName, tokenizer: Tokenizer) -> int:
    """Tokens of the shortest input of the task, special ones and a mask included: a word, or a pair of them."""
    maker = TextMaker(tokenizer)
    match task:
        case TaskName.TEXT_RANKING | TaskName.QUESTION_ANSWERING:
            return maker.count(maker.one_token_words[0], maker.one_token_words[0])
        case TaskName.FILL_MASK:
            return maker.specials + 2
        case _:
            return maker.specials + 1


def batch_bodies(
    task: TaskName,
    tokenizer: Tokenizer,
    tokens: int,
    batch: int,
    *,
    count: int,
    mask_token: str | None = None,
    seed: int = 0,
) -> tuple[RequestBody, ...]:
    """`count` different requests of `batch` texts. For pairs, `tokens` is the length of the pair.

    The batch is the number of sentences for one source (sentence-similarity), or of texts for one query (text-ranking).
    """
    if task in {TaskName.TEXT_RANKING, TaskName.SENTENCE_SIMILARITY}:
        maker = TextMaker(tokenizer, seed=seed)
        payloads = [_one_to_many(task, maker, tokens, batch) for _ in range(count)]
    else:
        singles = predict_bodies(task, tokenizer, [tokens] * (count * batch), mask_token=mask_token, seed=seed)
        parsed = [json.loads(single.body) for single in singles]
        payloads = [_merge(parsed[start : start + batch]) for start in range(0, len(parsed), batch)]
    return tuple(
        RequestBody(body=json.dumps(payload, ensure_ascii=False, separators=(",", ":")), group=tokens)
        for payload in payloads
    )


def _merge(payloads: list[dict[str, Any]]) -> dict[str, Any]:
    """One request of several; one alone stays as it is."""
    if len(payloads) == 1:
        return payloads[0]
    return {**payloads[0], "inputs": [payload["inputs"] for payload in payloads]}


def _one_to_many(task: TaskName, maker: TextMaker, tokens: int, batch: int) -> dict[str, Any]:
    if task is TaskName.SENTENCE_SIMILARITY:
        sentences = [maker.text(tokens) for _ in range(batch)]
        return {"inputs": {"source_sentence": maker.text(tokens), "sentences": sentences}}
    query = maker.text(min(QUERY_TOKENS, max(tokens // 2, 1)))
    return {"inputs": {"query": query, "texts": [maker.pair(query, tokens) for _ in range(batch)]}}
