"""Bodies of text-embeddings-inference. Parameters are on the level of the inputs.

As there, fields that are not known are ignored: its clients send fields of newer versions and of similar servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from penstock.tasks import TaskName
from penstock_runtime.http.api.core.token_ids import ABOUT_IDS, ID, LONGEST, TextsOrIds
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.classification import text_ranking
from penstock_runtime.tasks.embeddings import feature_extraction, sentence_similarity
from penstock_runtime.tasks.fields import Boolean, Either, FieldKind, JsonSchema, ListOf, Object, Others, Text

T = TypeVar("T")
OF_PREDICT = ("outputs", "top_k", "return_text")
"""Parameters of `/predict` alone: each route here has one output."""


@dataclass(frozen=True)
class TokenRows:
    """Token ids of one text, or of several; decided by the first entry."""

    one: ListOf
    several: ListOf
    words: str = "a list of token ids, or a list of these"
    python: type = list

    def parse(self, value: Any, where: str) -> list[list[int]]:
        """The rows."""
        if isinstance(value, list) and value and isinstance(value[0], list):
            rows: list[list[int]] = self.several.parse(value, where)
            return rows
        return [self.one.parse(value, where)]

    def schema(self) -> JsonSchema:
        """Either form."""
        return {"anyOf": [self.one.schema(), self.several.schema()]}


def given(parameters: dict[str, Any]) -> dict[str, Any]:
    """Without parameters that are None, which the task treats as not given."""
    return {name: value for name, value in parameters.items() if value is not None}


def without(kinds: Mapping[str, T], *names: str) -> dict[str, T]:
    """The fields but these."""
    return {name: kind for name, kind in kinds.items() if name not in names}


class TeiBodies:
    """The bodies of the routes by name."""

    def __init__(self, task: TaskName, limits: RequestLimits) -> None:
        notes = {**feature_extraction.PARAMETERS.notes, "inputs": ABOUT_IDS}
        every = feature_extraction.PARAMETERS.optional
        defaults: dict[str, tuple[FieldKind, Any]] = {
            "normalize": (Boolean(), None),
            "pooling": (every["pooling"][0], feature_extraction.AUTO),
        }
        self.embed = Object(
            required={"inputs": TextsOrIds(limits)},
            optional={**without(every, *OF_PREDICT, "sparse_format"), **defaults},
            notes={
                **notes,
                "normalize": "Make vectors of length 1. Default: true; with pooling none it must be left out.",
                "pooling": "How token vectors become one: none gives them all; auto: by the model's own files, mean "
                "where they have none.",
            },
            others=Others.IGNORED,
        )
        self.embed_all = Object(
            required={"inputs": TextsOrIds(limits)},
            optional=without(every, *OF_PREDICT, "normalize", "pooling", "dimensions", "sparse_format"),
            notes=notes,
            others=Others.IGNORED,
        )
        self.embed_sparse = Object(
            required={"inputs": TextsOrIds(limits)},
            optional={
                **without(every, *OF_PREDICT, "normalize", "pooling", "dimensions"),
                "sparse_format": (every["sparse_format"][0], str(feature_extraction.SparseFormat.PAIRS)),
            },
            notes={
                **notes,
                "sparse_format": 'pairs: [{"index", "value"}] for each text, as text-embeddings-inference; tokens: '
                '{token: value}, as OpenSearch takes it; arrays: {"indices", "values"}, as Qdrant takes it; dense: '
                "all values in one list.",
            },
            others=Others.IGNORED,
        )
        self.tokenize = Object(
            required={"inputs": Either((Text(), ListOf(Text(), limits.items)))},
            optional={"add_special_tokens": (Boolean(), True), "prompt_name": (Text("the name of a prompt"), None)},
            notes={"prompt_name": "Not supported: put the prompt's text before the input."},
            others=Others.IGNORED,
        )
        ids = ListOf(ID, LONGEST, words="a list of token ids")
        self.decode = Object(
            required={"ids": TokenRows(ids, ListOf(ids, limits.items, words="a list of lists of token ids"))},
            optional={"skip_special_tokens": (Boolean(), True)},
            others=Others.IGNORED,
        )
        ranking = {name: kind for name, kind in text_ranking.PARAMETERS.optional.items() if name != "top_k"}
        self.rerank = Object(
            required={"query": Text(), "texts": ListOf(Text(), limits.items)},
            optional=ranking,
            notes=text_ranking.PARAMETERS.notes,
            others=Others.IGNORED,
        )
        if task is TaskName.FEATURE_EXTRACTION:
            # text-embeddings-inference counts the source sentence as one of the texts.
            limits = replace(limits, items=max(limits.items - 1, 1))
        self.similarity = Object(
            required={"inputs": replace(sentence_similarity.inputs(limits), others=Others.IGNORED)},
            optional={"parameters": (replace(sentence_similarity.PARAMETERS, others=Others.IGNORED), {})},
            others=Others.IGNORED,
        )
