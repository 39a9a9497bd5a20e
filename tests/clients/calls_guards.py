"""Calls of clients that ask a classifier about requests to language models, run by `calls.py`."""

from __future__ import annotations

import asyncio
from typing import Any

TEXTS, TOKENS = "guard", "guard-spans"
GOOD, BAD, NAMED = "i like you", "this is a bad example", "my name is clara and i live in berkeley"
CALLS = [{"id": "1", "type": "function", "function": {"name": "write", "arguments": '{"to": "a bad one"}'}}]


def openai() -> list[Any]:
    import openai as package

    def moderate(url: str, given: Any, **more: Any) -> Any:
        client = package.OpenAI(base_url=f"{url}/v1", api_key="any")
        found = client.moderations.create(input=given, **more)
        return [[one.flagged, one.categories.illicit, one.category_scores.illicit > 0.9] for one in found.results]

    parts = [{"type": "text", "text": one} for one in (GOOD, BAD)]
    return [
        ("openai", "moderations.create", TEXTS, lambda url: moderate(url, BAD)),
        (
            "openai", "moderations.create, list", TEXTS,
            lambda url: moderate(url, [GOOD, BAD], model="omni-moderation-latest"),
        ),
        ("openai", "moderations.create, parts", TEXTS, lambda url: moderate(url, parts)),
    ]  # fmt: skip


def guardrail(url: str, unreachable_fallback: str = "fail_closed", kind: str = "request", **inputs: Any) -> Any:
    """What LiteLLM's proxy makes of texts: those that it sends on, or the reason of a refusal."""
    from litellm.proxy.guardrails.guardrail_hooks.generic_guardrail_api.generic_guardrail_api import (
        GenericGuardrailAPI,
    )

    made = GenericGuardrailAPI(
        api_base=url, api_key="any", guardrail_name="penstock", event_hook="pre_call",
        unreachable_fallback=unreachable_fallback,
    )  # fmt: skip
    try:
        return asyncio.run(made.apply_guardrail(inputs=inputs, request_data={}, input_type=kind))
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}


def litellm() -> list[Any]:
    name = "generic guardrail"
    return [
        ("litellm", f"{name}, passes", TEXTS, lambda url: guardrail(url, texts=[GOOD])),
        ("litellm", f"{name}, blocks", TEXTS, lambda url: guardrail(url, texts=[GOOD, BAD])),
        ("litellm", f"{name}, tool calls", TEXTS, lambda url: guardrail(url, texts=[GOOD], tool_calls=CALLS)),
        ("litellm", f"{name}, response", TEXTS, lambda url: guardrail(url, kind="response", texts=[BAD])),
        ("litellm", f"{name}, masks", TOKENS, lambda url: guardrail(url, texts=[GOOD, NAMED])),
    ]


CLIENTS = (openai, litellm)


def main() -> None:
    """What LiteLLM makes of the addresses in the arguments, with both settings for a guard that is not reachable."""
    import json
    import sys

    for url in sys.argv[1:]:
        for fallback in ("fail_closed", "fail_open"):
            print(json.dumps(guardrail(url, fallback, texts=[GOOD])), flush=True)


if __name__ == "__main__":
    main()
