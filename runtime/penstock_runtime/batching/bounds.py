"""What may wait at most, and the answer to whoever does not fit. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_runtime.batching.rate import DrainRate
from penstock_runtime.errors import InvalidInput, Overloaded


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Rows and tokens that may wait, all requests together. What runs is not counted."""

    rows: int = 1024
    tokens: int = 131_072

    def check(self, rows: int, tokens: int, waiting_rows: int, waiting_tokens: int, rate: DrainRate) -> None:
        """Let a request of `rows` and `tokens` in, or refuse it: one row and many alike.

        Overloaded when it does not fit now. InvalidInput when it never would: were it let in whenever the queue happens
        to be empty, the same request would be answered or refused by chance, and would starve under steady load.
        """
        if rows > self.rows:
            raise self._too_big(rows, self.rows, "sequences")
        if tokens > self.tokens and rows > 1:
            raise self._too_big(tokens, self.tokens, "tokens")
        # A single row longer than the bound waits for an empty queue.
        over_tokens = waiting_tokens + tokens > self.tokens and (tokens <= self.tokens or waiting_rows > 0)
        if waiting_rows + rows > self.rows or over_tokens:
            raise Overloaded(
                f"{waiting_rows} sequences of {waiting_tokens} tokens wait already, and at most {self.rows} of "
                f"{self.tokens} may",
                retry_after_seconds=rate.retry_after_seconds(waiting_tokens),
            )

    @staticmethod
    def _too_big(found: int, limit: int, what: str) -> InvalidInput:
        return InvalidInput(
            f"this request has {found} {what}, and at most {limit} may wait at once",
            field="inputs",
            remedy="Split it into smaller requests, sent one after the other or a few at a time",
        )
