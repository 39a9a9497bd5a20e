"""Answers of text-generation-inference: the text with its details, and an event for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_runtime.errors import RequestError
from penstock_runtime.generation.grammar import GrammarText
from penstock_runtime.generation.loop import Delta, FinishReason
from penstock_runtime.generation.sampling import SampledToken
from penstock_runtime.http.api.core.bodies import dumps, error_response
from penstock_runtime.http.api.core.generation import EventStream, TokenWriter
from penstock_runtime.http.api.tgi.requests import grammar_of
from penstock_runtime.http.transport.message import ErrorFormat
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.serving.generation_request import Continuation, Generation

FINISH = {
    FinishReason.END_TOKEN: "eos_token",
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.GRAMMAR: "eos_token",
    FinishReason.LENGTH: "length",
}


@dataclass(frozen=True)
class Asked:
    """A request in progress, with the values that its answer needs."""

    prompt: str
    parameters: Mapping[str, Any]
    seed: int | None
    tokens: TokenWriter
    model: GenerationModel

    @property
    def form(self) -> GrammarText | None:
        """The form that the text must have; None: any text."""
        given = self.parameters["grammar"]
        return None if given is None else grammar_of(given)

    def text(self, one: Continuation) -> str:
        """The field `generated_text`."""
        return self.prompt + one.text if self.parameters["return_full_text"] else one.text

    def details(self, one: Continuation) -> dict[str, Any]:
        """How the text ended."""
        reason = FINISH[one.finish] if one.finish is not None else None
        return {"finish_reason": reason, "generated_tokens": len(one.tokens), "seed": self.seed}

    def token(self, sampled: SampledToken, text: str) -> dict[str, Any]:
        """A token."""
        special = sampled.token in self.model.special_tokens
        return {"id": sampled.token, "text": text, "logprob": sampled.logprob, "special": special}

    def top(self, sampled: SampledToken) -> list[dict[str, Any]]:
        """The most probable alternatives to a token."""
        return [self.token(SampledToken(token, value), self.tokens.text(token)) for token, value in sampled.top]


class TokenEvents(EventStream):
    """An event for each token."""

    def __init__(self, generation: Generation, asked: Asked) -> None:
        super().__init__(generation)
        self._asked = asked
        self._index = 0

    def events(self, changed: Sequence[Continuation]) -> list[bytes]:
        """See `EventStream`."""
        return [self._token(one, delta) for one in changed for delta in one.new if delta.token is not None]

    def last(self) -> list[bytes]:
        """See `EventStream`."""
        return []

    def failed(self, error: RequestError) -> bytes:
        """See `EventStream`."""
        return b"data:%b\n\n" % error_response(error, ErrorFormat.PENSTOCK).body

    def _token(self, one: Continuation, delta: Delta) -> bytes:
        assert delta.token is not None  # noqa: S101 - the caller has checked
        self._index += 1
        asked, is_last = self._asked, delta.finish is not None
        value: dict[str, Any] = {
            "index": self._index,
            "token": asked.token(delta.token, delta.text),
            "generated_text": asked.text(one) if is_last else None,
            "details": {**asked.details(one), "input_length": self._generation.prompt_tokens} if is_last else None,
        }
        if asked.parameters["top_n_tokens"]:
            value["top_tokens"] = asked.top(delta.token)
        return b"data:%b\n\n" % dumps(value)
