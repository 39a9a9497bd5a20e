"""LiteLLM's generic guardrail: `POST /beta/litellm_basic_guardrail_api`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock_runtime.http.api.core.bodies import checked, read_json
from penstock_runtime.http.api.guard.reading import RequestGuard
from penstock_runtime.http.api.guard.verdicts import RequestVerdict, VerdictOutcome, worst
from penstock_runtime.http.transport.message import Request, Response
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.fields import Choice, JsonSchema, ListOf, Object, Others
from penstock_runtime.tasks.text_generation import AnyText

UNMASKABLE = "the arguments of a tool call have what would be masked, and cannot be rewritten"


def guardrail_body(limits: RequestLimits) -> Object:
    """What is read of the body; LiteLLM sends more, and more with each version."""
    call = Object(required={}, optional={"function": (Object({}, others=Others.KEPT), None)}, others=Others.IGNORED)
    anything = Object({}, others=Others.KEPT)
    return Object(
        required={},
        optional={
            "input_type": (Choice(("request", "response")), "request"),
            "texts": (ListOf(AnyText(), limits.items, at_least=0), []),
            "images": (ListOf(AnyText(), limits.items, at_least=0), []),
            "tool_calls": (ListOf(call, limits.items, at_least=0, words="a list of calls"), []),
            "structured_messages": (ListOf(anything, limits.items, at_least=0, words="a list of messages"), []),
        },
        notes={
            "texts": "What is classified, of all roles: LiteLLM does not state them.",
            "images": "Not read: a request with images is read in part (serving.guardPolicy.incomplete).",
            "tool_calls": "Their arguments are classified, too.",
            "structured_messages": "Not read: `texts` has their contents.",
        },
        others=Others.IGNORED,
    )


class Guardrail:
    """The handler."""

    def __init__(self, guard: RequestGuard, limits: RequestLimits) -> None:
        self._guard = guard
        self.body = guardrail_body(limits)

    async def decide(self, request: Request) -> Response:
        """BLOCKED, GUARDRAIL_INTERVENED with the masked texts, or NONE."""
        body = checked(self.body, read_json(request))
        texts = body["texts"]
        arguments = arguments_of(body["tool_calls"])
        unread = bool(body["images"]) or (not texts and bool(body["structured_messages"]))
        verdicts = await self._guard.verdicts(request, [*texts, *arguments], unread=unread)
        calls = verdicts.texts[len(texts) :]
        verdict = worst(verdicts.texts)
        if verdict.outcome is VerdictOutcome.MASK and any(one.outcome is VerdictOutcome.MASK for one in calls):
            verdict = RequestVerdict(VerdictOutcome.BLOCK, UNMASKABLE)
        return verdicts.response(answer(verdict, texts, verdicts.texts), verdict)


def arguments_of(calls: Sequence[Mapping[str, Any]]) -> list[str]:
    """The arguments of tool calls that have some."""
    found = (((call.get("function") or {}).get("arguments")) for call in calls)
    return [one for one in found if isinstance(one, str)]


def answer(verdict: RequestVerdict, texts: Sequence[str], verdicts: Sequence[RequestVerdict]) -> dict[str, Any]:
    """The body of the answer."""
    match verdict.outcome:
        case VerdictOutcome.BLOCK:
            return {"action": "BLOCKED", "blocked_reason": verdict.reason}
        case VerdictOutcome.MASK:
            pairs = zip(texts, verdicts, strict=False)  # after the texts come the arguments of calls
            return {
                "action": "GUARDRAIL_INTERVENED",
                "texts": [text if one.text is None else one.text for text, one in pairs],
            }
        case VerdictOutcome.PASS | VerdictOutcome.ABSTAIN:
            return {"action": "NONE"}
    raise ValueError(f"{verdict.outcome} is answered with an error")


ANSWER: JsonSchema = {
    "type": "object",
    "properties": {
        "action": {"enum": ["BLOCKED", "NONE", "GUARDRAIL_INTERVENED"]},
        "blocked_reason": {"type": "string"},
        "texts": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["action"],
}
