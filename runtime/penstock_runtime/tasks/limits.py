"""How large one request may be, and its answer: what a task refuses before it costs anything."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_runtime.errors import InvalidInput

UNITS = ((1e6, "MB"), (1e3, "kB"))
NUMBER_BYTES = 12
"""Of a float32 in JSON, its comma included: 9 to 13."""


@dataclass(frozen=True)
class Limits:
    """Counts and sizes that no request may exceed."""

    items: int = 1024
    """Entries of any list in a request: texts, pairs, labels, targets. Clients send a page of documents at a time."""

    rows: int = 1024
    """Token sequences that one request may turn into: windows of long texts, labels times texts."""

    answer_bytes: int = 67_108_864
    """Of an answer as JSON, as far as it can be told from the request: a short one may ask for gigabytes."""

    def check_answer(self, size_bytes: int, field: str, remedy: str) -> None:
        """InvalidInput about `field` when an answer of some `size_bytes` is over the limit."""
        if size_bytes > self.answer_bytes:
            raise InvalidInput(
                f"{field} asks for an answer of some {_size(size_bytes)}; the limit is {_size(self.answer_bytes)}",
                field=field,
                remedy=remedy,
            )


def _size(count: int) -> str:
    """Bytes for people, in a unit that leaves two figures before the point."""
    return next((f"{count / unit:,.0f} {name}" for unit, name in UNITS if count >= 10 * unit), f"{count} bytes")


DEFAULT_LIMITS = Limits()
