"""Clients that read streams of text generation one after another, and record every broken one."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from tests.gateway.load import Clients

END = "data: [DONE]"


@dataclass
class Stream:
    """The events of one answer."""

    events: list[dict[str, Any]]
    is_complete: bool = False
    """It ended as a stream does."""
    problem: str = ""

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended."""
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return next((one["finish_reason"] for one in reversed(choices) if one.get("finish_reason")), None)

    @property
    def error(self) -> dict[str, Any] | None:
        """The error that ended it."""
        return next((event["error"] for event in self.events if "error" in event), None)

    @property
    def generated(self) -> int:
        """Its tokens, by the last event."""
        usage: dict[str, Any] = next((event["usage"] for event in reversed(self.events) if event.get("usage")), {})
        return int(usage.get("completion_tokens", 0))


def chat(tokens: int, *, text: str = "Who are you?") -> dict[str, Any]:
    """The body of a request whose answer has this number of tokens."""
    return {
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": tokens,
        # The small model's token that ends an answer.
        "logit_bias": {"257": -100},
        "temperature": 0,
    }


def read_stream(client: httpx.Client, url: str, body: dict[str, Any]) -> Stream:
    """Send one request and read its stream to the end; a broken one has a problem."""
    found = Stream([])
    try:
        with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                found.problem = f"{response.status_code}: {response.read()[:300]!r}"
                return found
            for line in response.iter_lines():
                if line == END:
                    found.is_complete = True
                elif line.startswith("data: "):
                    found.events.append(json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        found.problem = repr(error)
    else:
        if found.error is not None:
            found.problem = str(found.error)
        elif not found.is_complete:
            found.problem = "it ended without an end"
    return found


class StreamLoad(Clients):
    """Streams of `max_tokens` tokens."""

    def __init__(self, url: str, *, clients: int, body: dict[str, Any], new_connections: bool) -> None:
        super().__init__(url, clients)
        self._body, self._new_connections = body, new_connections

    def _ask(self) -> None:
        while not self._over.is_set():
            with httpx.Client(trust_env=False, verify=False, timeout=120) as client:
                self._read(client)
                while not self._new_connections and not self._over.is_set():
                    self._read(client)

    def _read(self, client: httpx.Client) -> None:
        found = read_stream(client, self._url, self._body)
        problem = found.problem
        if not problem and found.generated != self._body["max_tokens"]:
            problem = f"{found.generated} tokens, {found.finish_reason}"
        self._note(problem)
        if problem:
            # A server that refuses everything must not be asked without a pause.
            time.sleep(0.1)


def streams(url: str, *, tokens: int, clients: int = 4, new_connections: bool = False, **changes: Any) -> StreamLoad:
    """Runs during the `with` block. `new_connections`: each stream on a connection of its own. `changes`: of the
    body."""
    return StreamLoad(url, clients=clients, body={**chat(tokens), **changes}, new_connections=new_connections)
