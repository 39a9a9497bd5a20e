"""Answers of text-embeddings-inference: tokens, and what `/info` shows."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from penstock import __version__
from penstock.resources.core import ModelSource
from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tokens import Tokenizer

MOST_CHARACTERS = 100_000
"""Of all texts of a request for tokens. The library takes up to 800 bytes of memory for a token with its position."""
TOKEN_BYTES = 80
"""JSON bytes of a token, without its text."""


def tokens_of(texts: list[str], with_special: bool, limits: RequestLimits, tokenizer: Tokenizer) -> list[list[Any]]:
    """The tokens of each text, as `/tokenize` answers: positions in bytes, none for special tokens around the text.

    InvalidInput for texts or an answer over the limit, and for a text that cannot be split into tokens.
    """
    size = sum(map(len, texts))
    if size > MOST_CHARACTERS:
        raise InvalidInput(
            f"inputs has {size} characters; at most {MOST_CHARACTERS} are split into tokens at a time",
            field="inputs",
            remedy="Send fewer or shorter texts at a time",
        )
    found = []
    template = tokenizer.single
    before, after = (template.before, template.after) if with_special else ((), ())
    count = 0
    for index, text in enumerate(texts):
        (pieces,) = tokenizer.split([text], offsets=True)
        if max(pieces.ids, default=0) >= tokenizer.vocabulary_size:
            tokenizer.require_embedded(pieces.ids, f"inputs[{index}]")
        count += len(pieces) + template.specials
        limits.check_answer(count * TOKEN_BYTES, "inputs", "Send fewer or shorter texts at a time")
        places = [0, *accumulate(len(character.encode()) for character in text)]
        found.append(
            [
                *(_special(tokenizer, one) for one in before),
                *(
                    {"id": one, "text": text[start:end], "special": False, "start": places[start], "stop": places[end]}
                    for one, (start, end) in zip(pieces.ids, pieces.offsets or (), strict=True)
                ),
                *(_special(tokenizer, one) for one in after),
            ]
        )
    return found


def _special(tokenizer: Tokenizer, number: int) -> dict[str, Any]:
    return {"id": number, "text": tokenizer.token(number), "special": True, "start": None, "stop": None}


_TEI_POOLINGS = {"last": "last-token"}
"""Names of text-embeddings-inference for poolings that have another name here."""


def tei_info(service: ModelService) -> dict[str, Any]:
    """The fields of `/info` of text-embeddings-inference, and the vector space; those that do not apply are null."""
    status, settings = service.status, service.settings
    model_id, revision = status.name, None
    if status.manifest is not None and status.manifest.model.source.startswith("hf://"):
        source = ModelSource.parse(status.manifest.model.source)
        model_id, revision = source.repository, source.revision
    labels = {
        "id2label": {str(index): label for index, label in enumerate(status.labels)},
        "label2id": {label: index for index, label in enumerate(status.labels)},
    }
    kinds: dict[TaskName, dict[str, Any]] = {
        TaskName.FEATURE_EXTRACTION: {"embedding": {"pooling": _TEI_POOLINGS.get(status.pooling, status.pooling)}},
        TaskName.SENTENCE_SIMILARITY: {"embedding": {"pooling": _TEI_POOLINGS.get(status.pooling, status.pooling)}},
        TaskName.TEXT_RANKING: {"reranker": labels},
        TaskName.TEXT_CLASSIFICATION: {"classifier": labels},
    }
    return {
        "model_id": model_id,
        "model_sha": revision,
        "model_dtype": None if status.plan is None else status.plan.recipe.precision.value,
        "model_type": kinds.get(status.task, {}),
        "max_concurrent_requests": settings.queue.max_queue_rows,
        "max_input_length": status.limits.get("max_input_tokens"),
        "max_batch_tokens": settings.queue.max_queue_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": settings.limits.max_inputs,
        "auto_truncate": status.truncate,
        "tokenization_workers": 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "vector_space": None
        if status.space is None
        else {"id": status.space.id, "fields": status.space.model_dump(mode="json")},
    }
