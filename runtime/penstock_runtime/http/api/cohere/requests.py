"""The body of Cohere's reranking API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock_runtime.errors import InvalidInput
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.fields import Boolean, Either, Integer, JsonSchema, ListOf, Object, Others, Text, json_words

LARGEST = 2**31 - 1
UNUSED_LIMIT = "Not used: a text is cut at the model's own limit."


@dataclass(frozen=True)
class RankFields:
    """The fields of a document to rank by: only `text` is supported."""

    words: str = '["text"]'
    python: type = list

    def parse(self, value: Any, where: str) -> list[str]:
        """The list; InvalidInput for any other."""
        if value == ["text"]:
            return ["text"]
        given = "other fields" if isinstance(value, list) else json_words(value)
        raise InvalidInput(
            f"{where} must be {self.words}, not {given}",
            field=where,
            remedy="Write all that is to be ranked into each document's text, and leave rank_fields out",
        )

    def schema(self) -> JsonSchema:
        """That list alone."""
        return {"type": "array", "items": {"const": "text"}, "minItems": 1, "maxItems": 1}


def rerank_body(limits: RequestLimits) -> Object:
    """The body of all routes."""
    document = Object(required={"text": Text()}, words="an object with text", others=Others.KEPT)
    return Object(
        required={
            "query": Text(),
            "documents": ListOf(Either((Text(), document)), limits.items, words="a list of documents"),
        },
        optional={
            "model": (Text("the name of a model"), None),
            "top_n": (Integer(1, 1_000_000), None),
            "return_documents": (Boolean(), False),
            "max_tokens_per_doc": (Integer(1, LARGEST), None),
            "max_chunks_per_doc": (Integer(1, LARGEST), None),
            "priority": (Integer(-LARGEST, LARGEST), None),
            "rank_fields": (RankFields(), None),
        },
        notes={
            "model": "Not used: an endpoint has one model.",
            "top_n": "Only this many documents, the best first. Default: all.",
            "return_documents": "Repeat each document with its score and all its fields.",
            "max_tokens_per_doc": UNUSED_LIMIT,
            "max_chunks_per_doc": UNUSED_LIMIT,
            "priority": "Above 0: the request runs in the bulk lane.",
            "rank_fields": "The text of a document is what is ranked.",
        },
        others=Others.IGNORED,
    )
