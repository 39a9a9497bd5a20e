"""Fields of requests that no API of this server has: each is logged once, with the known one that is spelt like it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from itertools import islice

from penstock.errors import closest
from penstock.logs import log_event
from penstock_runtime.http.api.core.bodies import LOOKED_AT
from penstock_runtime.tasks.fields import shortened_name

logger = logging.getLogger("penstock.http")

MOST_LOGGED = 100
"""Names that one server logs: a client may invent a new one for each request."""
NEAR = 0.75
"""Similarity of a misspelt name, from 0 to 1: `max_token` and `max_tokens` have 0.95."""
UNUSED = frozenset({
    "metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "priority", "service_tier", "store",
})  # fmt: skip
"""Fields of OpenAI's API for generated text, and of vLLM's, that change no answer here."""


class UnknownFields:
    """Logs the unknown fields of the requests to one route.

    They are not refused. OpenAI refuses them, but clients of open servers send fields of other servers to all of them
    (Open WebUI sends Ollama's, such as `num_ctx`). vLLM refused unknown fields until
    November 2024, when it began to log them, because such clients did not work with it (vllm-project/vllm#10463).
    """

    def __init__(self, route: str, known: Iterable[str]) -> None:
        self._route = route
        self._known = frozenset(known) | UNUSED
        self._logged: set[str] = set()

    def look(self, names: Collection[str]) -> None:
        """Log the names that are unknown and were not logged before."""
        if self._known.issuperset(names):
            return
        for name in islice(names, LOOKED_AT):
            if name in self._known or len(self._logged) >= MOST_LOGGED:
                continue
            shown = shortened_name(name)
            if shown in self._logged:
                continue
            self._logged.add(shown)
            near = closest(shown, sorted(self._known), cutoff=NEAR)
            logger.info(
                "requests to %s have a field %r, which is not used%s",
                self._route,
                shown,
                f"; did you mean {near!r}?" if near else "",
                extra=log_event("UnknownField"),
            )
