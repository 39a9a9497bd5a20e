"""The autoscaler's state between two decisions, and the handover snapshot of it that a new leader starts from. Pure.

`State` lives in the memory of the leading operator: small and frozen, each decision returns a new one. A new leader
scales nothing down for a whole shrink window, so most of the old leader's state is of no use to it. `dump_handover`
keeps the rest: the learnt window length, the last scale-down that may still turn out to be too early, and start-up
times. These change only when the number of replicas does, or once an hour, so writing them costs no extra API call.

The snapshot is versioned JSON. `restore_handover` treats any other text (empty, of another version, edited by hand) as
no snapshot: the new leader is then slower to scale down, and otherwise the same.
"""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from penstock_operator.decide.settings import ScalingSettings

HANDOVER_VERSION = 1
MOST_HANDOVER_CHARACTERS = 1024
"""A longer text was not written by `dump_handover`."""
KEPT_START_UPS = 7
"""The newest start-up times that count: a new node image or a larger model is believed after four of them."""


class _Record(BaseModel):
    """Unknown fields, of another version, are ignored."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False
    )


class Peak(_Record):
    """The most replicas that were needed during one slice of the shrink window."""

    since: float
    """Start of the slice, seconds since the epoch."""
    replicas: int


class Surge(_Record):
    """A rise that started with more demand than the replicas take, and has not levelled off yet. Rates: requests/s."""

    since: float
    """Time of the last decision before it, seconds since the epoch."""
    from_rate: float
    """Demand at that time."""
    highest: float
    """The highest demand since then."""
    highest_at: float


class Started(_Record):
    """A replica that became ready."""

    at: float
    """Time at which it became ready, seconds since the epoch."""
    seconds: float = Field(ge=0)
    """From its creation until then."""


class State(_Record):
    """Times are seconds since the epoch; None means never."""

    at: float | None = None
    """Time of the last decision. None: there was none, and nothing is known about the time before."""
    replicas: int | None = None
    """The number of replicas it asked for."""
    began_at: float | None = None
    """Start of uninterrupted observation. `peaks` has nothing from before this time."""
    level: float | None = None
    """Demand averaged over `demand.LEVEL_SECONDS`, requests/s."""
    base: float | None = None
    """Demand averaged over `demand.BASE_SECONDS`, requests/s: a level above it is a rise."""
    surge: Surge | None = None
    peaks: tuple[Peak, ...] = ()
    """One for each slice of the shrink window, oldest first."""
    hold_until: float = 0.0
    """No scale-down before this time..."""
    hold_reason: str = ""
    """... and the reason, a clause for the decision's sentence."""
    grown_at: float | None = None
    shrunk_at: float | None = None
    shrunk_from: int | None = None
    """The number of replicas before the last series of steps down..."""
    shrinking_since: float | None = None
    """... and the time of its first step. None: no step down since the last step up."""
    window_factor: float = Field(default=1.0, ge=1)
    """Factor by which the shrink window is longer than its setting, learnt from scale-downs that were too early."""
    factor_at: float | None = None
    """Time at which `window_factor` last changed."""
    calm_since: float | None = None
    """Since then: no backlog, no surge, and demand under the capacity of the ready replicas."""
    unsettled_at: float | None = None
    """Last time at which the number of replicas changed or demand was over capacity."""
    late_since: float | None = None
    """Since then too many answers have been late, in steady state."""
    slowdown: float = Field(default=1.0, gt=0)
    """Factor by which a replica is slower than its measured curve."""
    texts: float = Field(default=1.0, gt=0)
    """Factor by which requests take longer than those of the measured workload, by the length of their texts, as
    last seen."""
    unknown_since: float | None = None
    """Since then the demand has been unknown."""
    started: tuple[Started, ...] = ()
    """Start-up times, oldest first; at most `KEPT_START_UPS`."""


class _Handover(_Record):
    """The JSON of the snapshot, in the status field `scaling.memory`. Times are whole seconds since the epoch."""

    version: int = Field(alias="v")
    window_factor: float = Field(default=1.0, ge=1)
    factor_at: float | None = None
    shrunk_from: int | None = Field(default=None, ge=0)
    shrinking_since: float | None = None
    started: tuple[Started, ...] = Field(default=(), max_length=KEPT_START_UPS)


def dump_handover(state: State) -> str:
    """The snapshot for a new leader: at most some 400 characters of JSON."""
    snapshot = _Handover(
        version=HANDOVER_VERSION,
        # Rounded up: a window that is a little too long is on the safe side.
        window_factor=math.ceil(state.window_factor * 100) / 100,
        factor_at=None if state.factor_at is None else round(state.factor_at),
        shrunk_from=state.shrunk_from,
        shrinking_since=None if state.shrinking_since is None else round(state.shrinking_since),
        started=tuple(Started(at=round(one.at), seconds=round(one.seconds, 1)) for one in state.started),
    )
    return snapshot.model_dump_json(by_alias=True, exclude_defaults=True)


def restore_handover(text: str, settings: ScalingSettings, now: float, *, slowdown: float | None = None) -> State:
    """The state of a new leader at `now` (seconds since the epoch); `slowdown` is the value in the endpoint's status.

    `State.at` is None: this leader has not observed anything yet, and scales nothing down for a window. Times in the
    future come from another clock and are ignored.
    """
    state = State(slowdown=min(max(slowdown or 1.0, 1 / settings.slowdown_most), settings.slowdown_most))
    if len(text) > MOST_HANDOVER_CHARACTERS:
        return state
    try:
        snapshot = _Handover.model_validate_json(text)
    except ValidationError:
        return state
    if snapshot.version != HANDOVER_VERSION:
        return state
    shrinking = snapshot.shrinking_since
    shrunk = shrinking is not None and shrinking <= now and snapshot.shrunk_from is not None
    return state.model_copy(
        update={
            "window_factor": min(snapshot.window_factor, settings.longest_window_factor),
            "factor_at": now if snapshot.factor_at is None else min(snapshot.factor_at, now),
            "shrunk_from": snapshot.shrunk_from if shrunk else None,
            "shrinking_since": shrinking if shrunk else None,
            "started": tuple(one for one in snapshot.started if one.at <= now),
        }
    )
