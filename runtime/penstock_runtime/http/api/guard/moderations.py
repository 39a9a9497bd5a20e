"""OpenAI's `/v1/moderations`: all of its categories, and the labels of the policy that have none of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.resources.endpoint_parts.guard_policy import Category, GuardPolicy, LabelAction
from penstock_runtime.errors import UnsupportedOption
from penstock_runtime.http.api.core.bodies import checked, read_json
from penstock_runtime.http.api.guard.reading import RequestGuard
from penstock_runtime.http.api.guard.verdicts import RequestVerdict, VerdictOutcome
from penstock_runtime.http.transport.message import Request, Response
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.fields import Choice, Either, JsonSchema, ListOf, Object, Others, Text
from penstock_runtime.tasks.text_generation import AnyText

OPENAI_MODELS = (
    "omni-moderation-latest",
    "omni-moderation-2024-09-26",
    "text-moderation-latest",
    "text-moderation-stable",
)
"""What clients of OpenAI send, some without a choice."""


def moderations_body(limits: RequestLimits) -> Object:
    """A text, texts, or the parts of one input."""
    part = Object(
        required={"type": Choice(("text", "image_url"))}, optional={"text": (AnyText(), None)}, others=Others.IGNORED
    )
    entry = Either((AnyText(), part))
    return Object(
        required={"input": Either((AnyText(), ListOf(entry, limits.items, words="a list of texts or of parts")))},
        optional={"model": (Text("the name of a model"), None)},
        others=Others.IGNORED,
    )


class Moderations:
    """The handler."""

    def __init__(self, guard: RequestGuard, limits: RequestLimits) -> None:
        self._guard = guard
        self.body = moderations_body(limits)

    async def moderate(self, request: Request) -> Response:
        """One result for each text; the parts of a list of parts are one input."""
        body = checked(self.body, read_json(request))
        service, policy = self._guard.service, self._guard.policy
        if body["model"] not in OPENAI_MODELS:
            service.require_model(body["model"])
        given = body["input"]
        entries = given if isinstance(given, list) else [given]
        texts = [_text(one, f"input[{index}]") for index, one in enumerate(entries)]
        verdicts = await self._guard.verdicts(request, texts)
        found = list(verdicts.texts)
        if any(isinstance(one, dict) for one in entries):
            found = [_one_input(found)]
        value = {
            "id": f"modr-{request.identifier.decode('ascii')}",
            "model": service.status.name,
            "results": [result(policy, one) for one in found],
        }
        return verdicts.response(value)


def _text(entry: str | dict[str, Any], where: str) -> str:
    if isinstance(entry, str):
        return entry
    if entry["type"] != "text" or entry["text"] is None:
        raise UnsupportedOption(
            f"{where} is no text, and this endpoint's model reads texts only",
            field=where,
            remedy='Send parts {"type": "text", "text": …}, or send images to another endpoint',
        )
    return str(entry["text"])


def _one_input(verdicts: list[RequestVerdict]) -> RequestVerdict:
    """The parts of one input: each label with its highest score."""
    scores: dict[str, float] = {}
    for one in verdicts:
        for label, score in one.reading.scores.items():
            scores[label] = max(score, scores.get(label, 0.0))
    first = verdicts[0]
    complete = all(one.reading.complete for one in verdicts)
    is_blocked = any(one.outcome is VerdictOutcome.BLOCK for one in verdicts)
    outcome = VerdictOutcome.BLOCK if is_blocked else first.outcome
    return replace(first, outcome=outcome, reading=replace(first.reading, scores=scores, complete=complete))


def result(policy: GuardPolicy, verdict: RequestVerdict) -> dict[str, Any]:
    """The result for one input.

    `flagged`: a label that blocks or masks is above its score, or the input is blocked for another reason. A category
    that no label of the policy has is false, with the score 0 and without `text` in `category_applied_input_types`.
    """
    scores = dict.fromkeys(map(str, Category), 0.0)
    categories = dict.fromkeys(scores, False)
    applied: dict[str, list[str]] = {name: [] for name in scores}
    flagged = verdict.outcome is VerdictOutcome.BLOCK
    for label, rule in policy.labels.items():
        name = label if rule.category is None else str(rule.category)
        score = verdict.reading.scores.get(label, 0.0)
        is_above = score > rule.above
        scores[name] = max(score, scores.get(name, 0.0))
        categories[name] = is_above or categories.get(name, False)
        applied[name] = ["text"]
        flagged = flagged or (is_above and rule.action is not LabelAction.REPORT)
    answer = {
        "flagged": flagged,
        "categories": categories,
        "category_scores": scores,
        "category_applied_input_types": applied,
    }
    return answer if verdict.reading.complete else {**answer, "incomplete": True}


RESULT: JsonSchema = {
    "type": "object",
    "properties": {
        "flagged": {"type": "boolean"},
        "categories": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "category_scores": {"type": "object", "additionalProperties": {"type": "number"}},
        "category_applied_input_types": {
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"const": "text"}},
        },
        "incomplete": {"type": "boolean", "description": "Present and true if not all of the input was read."},
    },
    "required": ["flagged", "categories", "category_scores", "category_applied_input_types"],
}
ANSWER: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "model": {"type": "string"},
        "results": {"type": "array", "items": RESULT},
    },
    "required": ["id", "model", "results"],
}
