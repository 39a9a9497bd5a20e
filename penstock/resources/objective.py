"""The objective of an optimisation: times, and rates of one replica."""

from __future__ import annotations

from pydantic import Field

from penstock.resources.base import Spec


class Latency(Spec):
    """An objective on the latency."""

    p95_milliseconds: float = Field(
        gt=0, le=600_000, description="95 % of the requests are answered within this, milliseconds."
    )


class Throughput(Spec):
    """An objective on the request rate."""

    requests_per_second: float = Field(
        gt=0, le=1_000_000, description="Requests per second that one replica should serve."
    )


class TokenTime(Spec):
    """An objective on a time of text generation."""

    p95_milliseconds: float = Field(gt=0, le=600_000, description="95 % of these times are within this, milliseconds.")


class Objective(Spec):
    """What to optimise for. Latency and throughput: the highest rate within the latency. Neither: best latency first,
    then throughput. Text generation has objectives on tokens, too."""

    latency: Latency | None = None
    throughput: Throughput | None = None
    time_to_first_token: TokenTime | None = Field(
        default=None, description="Text generation: from the arrival of a request to its first token."
    )
    time_per_output_token: TokenTime | None = Field(
        default=None, description="Text generation: between two tokens of an answer."
    )
    tokens_per_second: float | None = Field(
        default=None,
        gt=0,
        le=10_000_000,
        description="Text generation: output tokens per second that one replica should serve, all answers together.",
    )

    @property
    def first_token_milliseconds(self) -> float | None:
        """The limit of p95 of the time to the first token."""
        return None if self.time_to_first_token is None else self.time_to_first_token.p95_milliseconds

    @property
    def next_token_milliseconds(self) -> float | None:
        """The limit of p95 of the time between two tokens."""
        return None if self.time_per_output_token is None else self.time_per_output_token.p95_milliseconds

    @property
    def is_for_tokens(self) -> bool:
        """Whether it has an objective that text generation alone has."""
        stated = (self.time_to_first_token, self.time_per_output_token, self.tokens_per_second)
        return any(one is not None for one in stated)

    @property
    def summary(self) -> str:
        """One line for tables and the manifest."""
        parts = []
        if self.latency is not None:
            parts.append(f"p95 within {self.latency.p95_milliseconds:g} ms")
        if self.first_token_milliseconds is not None:
            parts.append(f"first token within {self.first_token_milliseconds:g} ms")
        if self.next_token_milliseconds is not None:
            parts.append(f"{self.next_token_milliseconds:g} ms per token")
        if self.throughput is not None:
            parts.append(f"{self.throughput.requests_per_second:g} requests/s")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:g} tokens/s")
        return " and ".join(parts) or "best of latency and throughput"
