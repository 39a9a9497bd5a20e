"""text-ranking: how well texts answer a query, by a cross-encoder with one label, or by a language model's yes or no.

`{query, texts}` is answered in the shape of `/rerank` of text-embeddings-inference, the best first; a list of pairs
with one score for each pair, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.errors import UnsupportedModel
from penstock.resources.endpoint_parts.serving import Prompts
from penstock.tasks import TaskName
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float, Outputs, Row
from penstock_runtime.tasks.base import DEFAULT_LIMITS, Prepared, RequestLimits
from penstock_runtime.tasks.fields import (
    Boolean,
    Either,
    FieldKind,
    Integer,
    JsonSchema,
    ListOf,
    Object,
    Text,
    body_schema,
    parse_parameters,
)
from penstock_runtime.tasks.scores import descending, finite, sigmoid
from penstock_runtime.tasks.texts import (
    PROMPT,
    PROMPT_NOTES,
    TRUNCATION,
    TRUNCATION_NOTES,
    Fitter,
    PromptedTask,
    Truncation,
)
from penstock_runtime.tokens import Template

PARAMETERS = Object(
    required={},
    optional={
        "raw_scores": (Boolean(), None),
        "return_text": (Boolean(), False),
        "top_k": (Integer(1, 1_000_000), None),
        **PROMPT,
        **TRUNCATION,
    },
    notes={
        "raw_scores": "Logits instead of scores from 0 to 1 (their sigmoid). Default: false; for pairs true where the "
        "model's own files name Identity as its activation function.",
        "return_text": "Repeat each text with its score (not for pairs).",
        "top_k": "Only this many texts, the best first (not for pairs). Default: all.",
        "prompt_name": PROMPT_NOTES["prompt_name"].replace("each text", "the query", 1),
        **TRUNCATION_NOTES,
    },
)
EXAMPLES = (
    {
        "inputs": {
            "query": "What is deep learning?",
            "texts": ["Cheese is made of milk.", "A kind of machine learning."],
        },
        "parameters": {"return_text": True},
    },
    {"inputs": [["a query", "a text"], ["another query", "another text"]]},
)


def inputs(limits: RequestLimits) -> FieldKind:
    """A query with texts, or a list of pairs."""
    ranking = Object(
        required={"query": Text(), "texts": ListOf(Text(), limits.items)}, words="an object with query and texts"
    )
    pair = ListOf(Text(), at_most=2, at_least=2, words="a list of two texts")
    return Either((ranking, ListOf(pair, limits.items, words="a list of pairs")))


def request_schema(limits: RequestLimits = DEFAULT_LIMITS) -> JsonSchema:
    """The request body. Refused beyond it: too long without truncate."""
    return body_schema(inputs(limits), PARAMETERS, examples=EXAMPLES, about="How well texts answer a query")


def response_schema() -> JsonSchema:
    """The answer: the texts by score, or the scores of the pairs."""
    element = {
        "type": "object",
        "properties": {
            "index": {"type": "integer", "minimum": 0},
            "score": {"type": "number"},
            "text": {"type": "string"},
        },
        "required": ["index", "score"],
    }
    return {
        "description": "The texts, the best first; for pairs a score for each, in their order",
        "anyOf": [{"type": "array", "items": element}, {"type": "array", "items": {"type": "number"}}],
        "examples": [[{"index": 1, "score": 0.9976}, {"index": 0, "score": 0.0021}]],
    }


BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QUERY = "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: "
DOCUMENT = "\n<Document>: "
"""The prompt that Qwen3-Reranker was trained with, by its model card: the answer follows AFTER."""


@dataclass(frozen=True, slots=True)
class RankingRequest:
    """A checked request."""

    pairs: list[tuple[str, str]]
    where: list[str]
    ranked: bool
    """A query with texts; else pairs."""
    raw: bool
    return_text: bool
    top_k: int | None
    rule: Truncation


class TextRanking(PromptedTask):
    """The task."""

    name = TaskName.TEXT_RANKING

    def __init__(
        self,
        fitter: Fitter,
        folder: ModelFolder,
        limits: RequestLimits = DEFAULT_LIMITS,
        prompts: Prompts | None = None,
    ) -> None:
        super().__init__(fitter, folder, limits, prompts)
        self._prompted = _prompted(fitter, folder) if folder.ranks_by_words else None
        if self._prompted is None and folder.num_labels != 1:
            raise UnsupportedModel(
                f"{folder.path} has {folder.num_labels} labels; a ranking model has one, the score",
                remedy="Use the task text-classification, which takes pairs of texts too, or a cross-encoder model",
            )
        self._inputs = inputs(limits)
        # With any other function the sigmoid stays: scores from 0 to 1.
        self._raw_pairs = (folder.activation or "").rpartition(".")[2] == "Identity"

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> RankingRequest:
        """See `Task`."""
        values = parse_parameters(parameters, PARAMETERS)
        given = self._inputs.parse(inputs, "inputs")
        ranked = isinstance(given, dict)
        prompt = self._prompts.text(values["prompt_name"])
        if ranked:
            query = prompt + given["query"]
            pairs = [(query, text) for text in given["texts"]]
            where = [f"inputs.texts[{index}]" for index in range(len(pairs))]
        else:
            pairs = [(prompt + first, second) for first, second in given]
            where = [f"inputs[{index}]" for index in range(len(pairs))]
        raw = values["raw_scores"]
        return RankingRequest(
            pairs=pairs,
            where=where,
            ranked=ranked,
            raw=self._raw_pairs and not ranked if raw is None else raw,
            return_text=values["return_text"],
            top_k=values["top_k"],
            rule=self._fitter.rule.asked(values["truncate"], values["truncation_direction"]),
        )

    def prepare(self, request: RankingRequest) -> Prepared:
        """See `Task`."""
        fitter, rule = self._fitter, request.rule
        if self._prompted is not None:
            return self._prepare_prompted(request, self._prompted)
        # Tokenise each text once: the query of a ranking is in all pairs.
        distinct = list(dict.fromkeys(text for pair in request.pairs for text in pair))
        pieces = dict(zip(distinct, fitter.split(distinct, fitter.tokenizer.pair, rule.side), strict=True))
        rows, cut = [], 0
        for (first, second), where in zip(request.pairs, request.where, strict=True):
            row, was_cut = fitter.pair(pieces[first], pieces[second], where, rule)
            rows.append(row)
            cut += was_cut
        return Prepared(rows=rows, memo=_for_answer(request), truncated=cut)

    def _prepare_prompted(self, request: RankingRequest, template: Template) -> Prepared:
        """One text for each pair: tokens of a language model may span the boundary of two parts."""
        fitter, rule, rows, cut = self._fitter, request.rule, [], 0
        room = fitter.room(template)
        texts = [f"{QUERY}{query}{DOCUMENT}{text}" for query, text in request.pairs]
        for pieces, where in zip(fitter.split(texts, template, rule.side), request.where, strict=True):
            if len(pieces) > room:
                fitter.refuse_unless(rule, pieces, template, where)
                cut += 1
            ids = pieces.keep(room, rule.side).ids
            fitter.tokenizer.require_embedded(ids, where)
            rows.append(template.row(ids))
        return Prepared(rows=rows, memo=_for_answer(request), truncated=cut)

    def reduce(self, row: Row, outputs: Outputs) -> Float:  # noqa: ARG002 - the contract of Task
        """The logit [1]."""
        return finite(np.array(outputs["logits"]))

    def assemble(self, prepared: Prepared, reduced: Sequence[Float]) -> list[float] | list[dict[str, Any]]:
        """See `Task`."""
        wanted: RankingRequest = prepared.memo
        logits = np.concatenate(reduced)
        scores = logits if wanted.raw else sigmoid(logits)
        values: list[float] = scores.tolist()
        if not wanted.ranked:
            return values
        ranking: list[dict[str, Any]] = []
        # Ordered by logits: in float32 the sigmoids of two good texts may both be 1.
        for index in descending(logits)[: wanted.top_k]:
            text = {"text": wanted.pairs[index][1]} if wanted.return_text else {}
            ranking.append({"index": index, "score": values[index], **text})
        return ranking


def _for_answer(request: RankingRequest) -> RankingRequest:
    """What `assemble` needs of a request, which may stay in the cache."""
    return replace(request, pairs=request.pairs if request.return_text else [], where=[])


def _prompted(fitter: Fitter, folder: ModelFolder) -> Template:
    """The template around the texts of a language model that ranks. UnsupportedModel if it is of another kind."""
    tokenizer = fitter.tokenizer
    before, after = (tuple(pieces.ids) for pieces in tokenizer.split([BEFORE, AFTER]))
    answers = tokenizer.id_of("yes"), tokenizer.id_of("no")
    if None in answers or folder.ranking_answers not in {None, answers}:
        raise UnsupportedModel(
            f"{folder.path} is a {folder.architecture} that does not rank by the tokens yes and no, as Qwen3-Reranker",
            remedy="Use Qwen3-Reranker, or a cross-encoder with one label (ForSequenceClassification)",
        )
    template = Template(before, (), after, types=(tuple(0 for _ in before), 0, (), 0, tuple(0 for _ in after)))
    if fitter.max_tokens <= template.specials:
        raise UnsupportedModel(
            f"{fitter.max_tokens} tokens leave no room besides the {template.specials} of the prompt",
            remedy="Raise serving.maxInputTokens, or the model's own limit (model_max_length)",
        )
    return template
