"""The guardrail webhook of agentgateway and kgateway: `POST /request` and `POST /response`.

The gateway takes the first of these actions that the answer fits: mask (`body` with messages or choices), reject
(`body` and `status_code`), pass. Nothing is required of a pass: a reject without its two fields would be one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock_runtime.http.api.core.bodies import checked, read_json
from penstock_runtime.http.api.guard.reading import RequestGuard
from penstock_runtime.http.api.guard.verdicts import RequestVerdict, VerdictOutcome, is_skipped, worst
from penstock_runtime.http.transport.message import Request, Response
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.fields import JsonSchema, ListOf, Object, Others
from penstock_runtime.tasks.text_generation import AnyText

REJECTED = 403

_MESSAGE = Object(required={"role": AnyText(), "content": AnyText()}, others=Others.KEPT)
_CHOICE = Object(required={"message": _MESSAGE}, others=Others.KEPT)


def webhook_body(limits: RequestLimits, name: str) -> Object:
    """The body with a list of `messages` or `choices`."""
    item = _MESSAGE if name == "messages" else _CHOICE
    entries = ListOf(item, limits.items, at_least=0, words=f"a list of {name}")
    return Object(required={"body": Object(required={name: entries}, others=Others.IGNORED)}, others=Others.IGNORED)


class Webhook:
    """The handlers."""

    def __init__(self, guard: RequestGuard, limits: RequestLimits) -> None:
        self._guard = guard
        self.request_body = webhook_body(limits, "messages")
        self.response_body = webhook_body(limits, "choices")

    async def prompt(self, request: Request) -> Response:
        """About the messages of a request, those of the policy's roles."""
        messages = checked(self.request_body, read_json(request))["body"]["messages"]
        policy = self._guard.policy
        read = [index for index, one in enumerate(messages) if not is_skipped(policy, one["role"])]
        verdicts = await self._guard.verdicts(request, [messages[index]["content"] for index in read])
        masked = list(messages)
        for index, one in zip(read, verdicts.texts, strict=True):
            masked[index] = _with_text(messages[index], one)
        return verdicts.response(answer(verdicts.texts, {"messages": masked}))

    async def completion(self, request: Request) -> Response:
        """About the choices of a response."""
        choices = checked(self.response_body, read_json(request))["body"]["choices"]
        verdicts = await self._guard.verdicts(request, [one["message"]["content"] for one in choices])
        pairs = zip(choices, verdicts.texts, strict=True)
        masked = [{**choice, "message": _with_text(choice["message"], one)} for choice, one in pairs]
        return verdicts.response(answer(verdicts.texts, {"choices": masked}))


def _with_text(message: dict[str, Any], verdict: RequestVerdict) -> dict[str, Any]:
    return message if verdict.text is None else {**message, "content": verdict.text}


def answer(verdicts: Sequence[RequestVerdict], masked: dict[str, Any]) -> dict[str, Any]:
    """The body of the answer; `masked`: that of the request, with masked texts."""
    verdict = worst(verdicts)
    match verdict.outcome:
        case VerdictOutcome.BLOCK:
            return {"action": {"body": verdict.reason, "status_code": REJECTED, "reason": verdict.reason}}
        case VerdictOutcome.MASK:
            return {"action": {"body": masked, "reason": "masked"}}
        case VerdictOutcome.PASS | VerdictOutcome.ABSTAIN:
            return {"action": {"reason": str(verdict.outcome)}}
    raise ValueError(f"{verdict.outcome} is answered with an error")


ANSWER: JsonSchema = {
    "type": "object",
    "properties": {
        "action": {
            "type": "object",
            "properties": {
                "body": {"type": ["string", "object"]},
                "status_code": {"type": "integer"},
                "reason": {"type": "string"},
            },
        }
    },
    "required": ["action"],
}
