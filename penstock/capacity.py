"""The measured capacity of one replica: p95 latency by arrival rate, and the highest rate within an objective; for text
generation tokens per second and their times by number of clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, Field

KEEPS_UP = 0.9
"""A rate is over the capacity when a smaller share of it is completed per second, even if the latency is still low."""


class CapacityPoint(BaseModel):
    """One measurement with Poisson arrivals at a fixed mean rate, through the real HTTP server."""

    model_config = ConfigDict(frozen=True)

    arrivals_per_second: float = Field(gt=0)
    completed_per_second: float = Field(ge=0)
    p50_milliseconds: float = Field(ge=0)
    p95_milliseconds: float = Field(ge=0)
    p99_milliseconds: float = Field(ge=0)
    refused_share: float = Field(default=0.0, ge=0, le=1)
    """The share of requests answered with 429 or not at all."""
    samples: int = Field(ge=0)

    def meets(self, p95_milliseconds: float) -> bool:
        """True when this rate is within the objective, without refusals and without a growing queue."""
        within = self.p95_milliseconds <= p95_milliseconds and self.refused_share == 0
        return within and self.completed_per_second >= KEEPS_UP * self.arrivals_per_second


class CapacityCurve(BaseModel):
    """Points of one replica by rising arrival rate, for the workload of the endpoint."""

    model_config = ConfigDict(frozen=True)

    points: tuple[CapacityPoint, ...] = ()
    p95_objective_milliseconds: float | None = Field(default=None, gt=0)
    """The p95 for `requests_per_second`: the endpoint's objective, or three times the p95 of a nearly idle replica if
    the endpoint has none. None: nothing was measured."""
    tokens_per_request: float | None = Field(default=None, gt=0)
    """Mean of the tokens that the server computed for a request, special ones included; None: not known."""

    def faster(self, factor: float) -> CapacityCurve:
        """The curve of a replica that does everything this many times as fast: at a rate factor * r it behaves as the
        measured one does at r, with durations divided by the factor. Exact for any queue, by a change of the unit of
        time."""
        points = tuple(
            point.model_copy(
                update={
                    "arrivals_per_second": point.arrivals_per_second * factor,
                    "completed_per_second": point.completed_per_second * factor,
                    "p50_milliseconds": point.p50_milliseconds / factor,
                    "p95_milliseconds": point.p95_milliseconds / factor,
                    "p99_milliseconds": point.p99_milliseconds / factor,
                }
            )
            for point in self.points
        )
        return self.model_copy(update={"points": points})

    @property
    def requests_per_second(self) -> float | None:
        """The highest arrival rate within the objective; None when even a nearly idle replica is over it."""
        limit = self.p95_objective_milliseconds
        return None if limit is None else self.rate_within(limit)

    def rate_within(self, p95_milliseconds: float) -> float | None:
        """The highest arrival rate (requests/s) with a p95 within the objective; None without such a point.

        Walks up from the lowest rate and stops at the first point that misses, interpolating linearly between the last
        good and the first bad point. A later good point does not count: it is noise.
        """
        best: float | None = None
        last: CapacityPoint | None = None
        for point in sorted(self.points, key=lambda point: point.arrivals_per_second):
            if not point.meets(p95_milliseconds):
                rise = point.p95_milliseconds - last.p95_milliseconds if last is not None else 0.0
                # Interpolate the latency only where latency is the only reason that the point misses.
                only_late = point.meets(point.p95_milliseconds) and point.p95_milliseconds > p95_milliseconds
                if last is not None and only_late:
                    share = (p95_milliseconds - last.p95_milliseconds) / rise
                    best = last.arrivals_per_second + share * (point.arrivals_per_second - last.arrivals_per_second)
                break
            best, last = point.arrivals_per_second, point
        return best


TIMES_OF_ONE = 3.0
"""Without an objective, a time may be this many times the time of one client alone..."""
LEAST_FIRST_TOKEN, LEAST_NEXT_TOKEN = 1000.0, 100.0
"""... or these milliseconds, if that is more: a second until an answer begins, and faster than people read."""


class TokenPoint(BaseModel):
    """One measurement of text generation with a fixed number of clients, through the real HTTP server. Each client
    sends its next request when its answer is complete."""

    model_config = ConfigDict(frozen=True)

    clients: int = Field(ge=1)
    requests_per_second: float = Field(gt=0)
    """Answers that were completed."""
    tokens_per_second: float = Field(gt=0)
    """Output tokens of all answers together."""
    first_token_p95_milliseconds: float = Field(gt=0)
    """From sending a request to its first token."""
    next_token_p95_milliseconds: float = Field(gt=0)
    """Between two tokens of an answer."""
    samples: int = Field(ge=1)
    """Answers."""


class TokenCurve(BaseModel):
    """Points of one replica by rising number of clients, for the prompts and answers of the endpoint's workload."""

    model_config = ConfigDict(frozen=True)

    points: tuple[TokenPoint, ...] = ()
    first_token_objective_milliseconds: float | None = Field(default=None, gt=0)
    """p95 of the time to the first token that `within` keeps: the endpoint's objective, or `first_token_limit`."""
    next_token_objective_milliseconds: float | None = Field(default=None, gt=0)
    """The same of the time between two tokens."""
    lengths: tuple[tuple[int, int], ...] = ()
    """Tokens of the prompt and of the answer of the workload's requests, each as likely as it is listed."""

    @classmethod
    def of(
        cls,
        points: Iterable[TokenPoint],
        *,
        first_token: float | None,
        next_token: float | None,
        lengths: Sequence[tuple[int, int]] = (),
    ) -> TokenCurve:
        """A curve with these objectives in milliseconds; None: as one client alone has it, with a margin."""
        ordered = tuple(sorted(points, key=lambda point: point.clients))
        if not ordered:
            return cls()
        alone = ordered[0]
        first = first_token or max(LEAST_FIRST_TOKEN, TIMES_OF_ONE * alone.first_token_p95_milliseconds)
        following = next_token or max(LEAST_NEXT_TOKEN, TIMES_OF_ONE * alone.next_token_p95_milliseconds)
        return cls(
            points=ordered,
            first_token_objective_milliseconds=first,
            next_token_objective_milliseconds=following,
            lengths=tuple(lengths),
        )

    def meets(self, point: TokenPoint) -> bool:
        """Whether both times are within their objectives."""
        first, following = self.first_token_objective_milliseconds, self.next_token_objective_milliseconds
        return (first is None or point.first_token_p95_milliseconds <= first) and (
            following is None or point.next_token_p95_milliseconds <= following
        )

    @property
    def within(self) -> TokenPoint | None:
        """The point with the most tokens per second within the objectives; None when one client is over them.

        A point after the first one that misses does not count: it is noise.
        """
        best: TokenPoint | None = None
        for point in self.points:
            if not self.meets(point):
                break
            if best is None or point.tokens_per_second > best.tokens_per_second:
                best = point
        return best

    @property
    def saturated(self) -> TokenPoint | None:
        """The point with the most tokens per second, whatever the times."""
        return max(self.points, key=lambda point: point.tokens_per_second, default=None)

    @property
    def summary(self) -> str:
        """What one replica takes, as a clause; empty without points."""
        first, following = self.first_token_objective_milliseconds, self.next_token_objective_milliseconds
        if first is None or following is None:
            return ""
        limits = f"the first token within {first:.4g} ms and each further one within {following:.4g} ms (p95)"
        best = self.within
        if best is None:
            return f"one client alone does not get {limits}"
        clients = "client" if best.clients == 1 else "clients"
        return f"{best.tokens_per_second:.4g} tokens/s for {best.clients} {clients} with {limits}"
