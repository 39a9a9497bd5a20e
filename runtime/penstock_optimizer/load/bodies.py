"""Request bodies for `POST /predict` of every task, of given lengths in tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from penstock.resources.endpoint import Workload
from penstock.tasks import TaskName
from penstock_optimizer.load.lengths import LengthMix
from penstock_optimizer.load.spec import RequestBody
from penstock_optimizer.load.texts import TextMaker
from penstock_runtime.tokens.pieces import Side

QUESTION_TOKENS = 10
"""A short question or query before the text that a pair is mostly about."""
CANDIDATE_LABELS = ("news", "weather", "sport")
WITHOUT_MASK = "fill-mask needs the tokenizer's mask token"
_SINGLE_TEXT = frozenset(
    {TaskName.FEATURE_EXTRACTION, TaskName.TEXT_CLASSIFICATION, TaskName.TOKEN_CLASSIFICATION, TaskName.FILL_MASK}
)
"""Their requests are single texts, so that those which an endpoint states can be sent."""


def predict_bodies(
    task: TaskName,
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    *,
    mask_token: str | None = None,
    seed: int = 0,
) -> tuple[RequestBody, ...]:
    """One body for each length, grouped by it. For pairs the length is that of the pair.

    A request of sentence-similarity and of zero-shot-classification is several rows: each has about that length.
    """
    maker = TextMaker(tokenizer, seed=seed)
    return tuple(
        RequestBody(
            body=json.dumps(_payload(task, maker, tokens, mask_token), ensure_ascii=False, separators=(",", ":")),
            group=tokens,
        )
        for tokens in lengths
    )


def sends_texts(task: TaskName, workload: Workload) -> bool:
    """True where the requests are the endpoint's own texts: it states some, and the task takes single texts."""
    return bool(workload.texts) and task in _SINGLE_TEXT


def mix_of_texts(
    task: TaskName,
    tokenizer: Tokenizer,
    workload: Workload,
    *,
    maximum: int,
    mask_token: str | None = None,
    side: Side = Side.RIGHT,
) -> LengthMix:
    """The lengths of the endpoint's own texts as `workload_bodies` sends them, each as likely as it is listed."""
    listed = _listed(task, tokenizer, workload, maximum, mask_token=mask_token, side=side)
    return LengthMix(maximum=maximum, lengths=tuple(body.group for body in listed), minimum=1)


def workload_bodies(
    task: TaskName,
    tokenizer: Tokenizer,
    workload: Workload,
    mix: LengthMix,
    *,
    count: int,
    mask_token: str | None = None,
    side: Side = Side.RIGHT,
    seed: int = 0,
) -> tuple[RequestBody, ...]:
    """Bodies as the endpoint's workload has them: its own texts where it states some and the task takes single texts
    (fill-mask with the mask token added to those that show none); else texts of its lengths. `side`: which end of a
    long text is cut off."""
    if sends_texts(task, workload):
        listed = _listed(task, tokenizer, workload, mix.maximum, mask_token=mask_token, side=side)
        return tuple(listed[index % len(listed)] for index in range(max(count, len(listed))))
    return predict_bodies(task, tokenizer, mix.sample(count, seed=seed), mask_token=mask_token, seed=seed)


def _listed(
    task: TaskName, tokenizer: Tokenizer, workload: Workload, maximum: int, *, mask_token: str | None, side: Side
) -> list[RequestBody]:
    """One body for each stated text, grouped by its tokens, `maximum` where it is cut to that."""
    maker, texts = TextMaker(tokenizer), workload.texts
    if task is TaskName.FILL_MASK:
        if mask_token is None:
            raise ValueError(WITHOUT_MASK)
        mask = tokenizer.token_to_id(mask_token)
        # Of a text that is cut the token at that end is a special one. What is added stands at the other end.
        kept = slice(maximum - 1) if side is Side.RIGHT else slice(1 - maximum, None)
        before, behind = (f"{mask_token} ", "") if side is Side.RIGHT else ("", f" {mask_token}")
        texts = tuple(text if mask in maker.ids(text)[kept] else f"{before}{text}{behind}" for text in texts)
    return [
        RequestBody(body=json.dumps({"inputs": text}, ensure_ascii=False), group=min(maker.count(text), maximum))
        for text in texts
    ]


def _payload(task: TaskName, maker: TextMaker, tokens: int, mask_token: str | None) -> Mapping[str, Any]:
    """The body of one request in the HF shape."""
    match task:
        case TaskName.QUESTION_ANSWERING:
            question, context = _pair(maker, tokens)
            return {"inputs": {"question": question, "context": context}}
        case TaskName.TEXT_RANKING:
            query, text = _pair(maker, tokens)
            return {"inputs": {"query": query, "texts": [text]}}
        case TaskName.SENTENCE_SIMILARITY:
            return {"inputs": {"source_sentence": maker.text(tokens), "sentences": [maker.text(tokens)]}}
        case TaskName.ZERO_SHOT_CLASSIFICATION:
            return {"inputs": maker.text(tokens), "parameters": {"candidate_labels": list(CANDIDATE_LABELS)}}
        case TaskName.FILL_MASK:
            if mask_token is None:
                raise ValueError(WITHOUT_MASK)
            return {"inputs": f"{maker.text(tokens - 1)} {mask_token}"}
        case _:
            return {"inputs": maker.text(tokens)}


def _pair(maker: TextMaker, tokens: int) -> tuple[str, str]:
    first = maker.text(min(QUESTION_TOKENS, max(tokens // 2, 1)))
    return first, maker.pair(first, tokens)
