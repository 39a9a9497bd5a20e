"""The program that renders chat templates, in processes with limits of time and memory.

A template comes with a model, and its work may grow with the square of the messages: neither may stop the server.

    python -m penstock_runtime.generation.template_process CONTROL

A fork gets messages of JSON: first the template, `[source, special tokens, source for tools]`, then conversations,
`Conversation` as an object. It answers each conversation with `{"text": …}`, or `{"error": …, "remedy": …}` for one
that the template refuses.
"""

from __future__ import annotations

import json
from typing import Any

from penstock_runtime.errors import InvalidInput
from penstock_runtime.generation.templates import ChatTemplate
from penstock_runtime.host.forks import Link, serve_forks

CPU_SECONDS = 1.0
"""For one conversation. Templates of published models take milliseconds for hundreds of messages."""
MEMORY_BYTES = 256 * 2**20


def main() -> None:
    """Render in forks."""
    serve_forks(_render, memory_bytes=MEMORY_BYTES)


def _render(link: Link) -> None:
    template = ChatTemplate(*json.loads(link.message()))
    while True:
        conversation = json.loads(link.message())
        answer: dict[str, Any]
        with link.limited(CPU_SECONDS):
            try:
                answer = {"text": template.render(**conversation)}
            except InvalidInput as error:
                answer = {"error": error.message, "remedy": error.remedy}
            except (MemoryError, RecursionError):
                answer = {"error": "the messages take too much memory", "remedy": "Send fewer or shorter messages"}
        link.answer(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
