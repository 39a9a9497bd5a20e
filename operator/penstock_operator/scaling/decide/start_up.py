"""How long a new replica takes to serve, learnt from those that were seen to start. Pure.

A pod says by itself when it was made and when it became ready, so nobody has to have watched it. The setting counts as
one observation more: it is what is believed before there is any, and one odd pod against it changes nothing much. The
median is the upper one, because an early replica costs seconds and a late one costs requests.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

KEPT = 7
"""The last so many count: a new node image or a larger model is believed after four."""
LONGEST_SECONDS = 900.0
"""A pod that took longer waited for something that nobody can plan for."""


class Started(BaseModel):
    """A replica that became ready."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False
    )

    at: float
    """When, seconds since the epoch."""
    seconds: float = Field(ge=0)
    """Since it was asked for."""


def observed(known: tuple[Started, ...], seen: Iterable[Started], now: float) -> tuple[Started, ...]:
    """The newest observations, oldest first, with those of `seen` that became ready after all that are known.

    Times in the future are of another clock, and left out.
    """
    newest = known[-1].at if known else float("-inf")
    fresh = sorted(
        (one for one in seen if newest < one.at <= now and one.seconds <= LONGEST_SECONDS),
        key=lambda one: (one.at, one.seconds),
    )
    return (*known, *fresh)[-KEPT:] if fresh else known


def expected_seconds(known: Iterable[Started], setting_seconds: float) -> float:
    """What the next replica is expected to take: the upper median, the setting among the observations."""
    times = sorted([*(one.seconds for one in known), setting_seconds])
    return times[len(times) // 2]
