"""What a decision leaves to whoever leads next: the little that a window of watching does not bring back. Pure.

A new leader shrinks nothing for a whole window, so the peaks of the old one's window are of no use to it; what it has
to be told is how long that window has become, which shrink may still turn out to be regretted, and how long replicas
take to start. These change only when replicas do, or once an hour: written with the decision they cost no write.

The text is versioned, and whatever else stands in its place (nothing, another version's, somebody's edit) is read as
nothing: a leader without a legacy is slower to shrink and otherwise the same.
"""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from penstock_operator.scaling.decide.settings import ScalingSettings
from penstock_operator.scaling.decide.start_up import KEPT, Started
from penstock_operator.scaling.decide.state import State

VERSION = 1
MOST_CHARACTERS = 1024
"""Longer texts are none of ours."""


class _Legacy(BaseModel):
    """Times are whole seconds since the epoch."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False
    )

    version: int = Field(alias="v")
    window_factor: float = Field(default=1.0, ge=1)
    factor_at: float | None = None
    shrunk_from: int | None = Field(default=None, ge=0)
    shrinking_since: float | None = None
    started: tuple[Started, ...] = Field(default=(), max_length=KEPT)


def bequeathed(state: State) -> str:
    """The text that a new leader goes on from; at most some 400 characters of JSON."""
    legacy = _Legacy(
        version=VERSION,
        # Rounded up: a window that is a little too long is on the safe side.
        window_factor=math.ceil(state.window_factor * 100) / 100,
        factor_at=None if state.factor_at is None else round(state.factor_at),
        shrunk_from=state.shrunk_from,
        shrinking_since=None if state.shrinking_since is None else round(state.shrinking_since),
        started=tuple(Started(at=round(one.at), seconds=round(one.seconds, 1)) for one in state.started),
    )
    return legacy.model_dump_json(by_alias=True, exclude_defaults=True)


def inherited(text: str, settings: ScalingSettings, now: float, *, slowdown: float | None = None) -> State:
    """The state that a new leader begins with at `now`; `slowdown` as the status has it.

    `State.at` is None: it has not watched yet, and shrinks nothing for a window. What lies in the future is of another
    clock, and left out.
    """
    state = State(slowdown=min(max(slowdown or 1.0, 1 / settings.slowdown_most), settings.slowdown_most))
    if len(text) > MOST_CHARACTERS:
        return state
    try:
        legacy = _Legacy.model_validate_json(text)
    except ValidationError:
        return state
    if legacy.version != VERSION:
        return state
    shrinking = legacy.shrinking_since
    regrettable = shrinking is not None and shrinking <= now and legacy.shrunk_from is not None
    return state.model_copy(
        update={
            "window_factor": min(legacy.window_factor, settings.longest_window_factor),
            "factor_at": now if legacy.factor_at is None else min(legacy.factor_at, now),
            "shrunk_from": legacy.shrunk_from if regrettable else None,
            "shrinking_since": shrinking if regrettable else None,
            "started": tuple(one for one in legacy.started if one.at <= now),
        }
    )
