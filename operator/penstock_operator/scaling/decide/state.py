"""What the autoscaler remembers from one decision to the next: small and frozen.

What of it outlives the process is `Legacy`, in legacy.py.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from penstock_operator.scaling.decide.start_up import Started


class Peak(BaseModel):
    """The most replicas that were wanted during one slice of the shrink window."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    since: float
    """Begin of the slice, seconds since the epoch."""
    replicas: int


class Surge(BaseModel):
    """A rise that began with more demand than the replicas take, and has not levelled off yet. Rates are requests/s."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False
    )

    since: float
    """The last decision before it."""
    from_rate: float
    """The demand then."""
    highest: float
    """The highest demand since."""
    highest_at: float


class State(BaseModel):
    """Times are seconds since the epoch, None for never. Unknown fields of another version are left out."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False
    )

    at: float | None = None
    """The last decision. None: there was none; nothing is known about the time before."""
    replicas: int | None = None
    """What it asked for."""
    began_at: float | None = None
    """Watching began, or began again after an interruption. What was wanted before that is not in `peaks`."""
    level: float | None = None
    """Smoothed demand, requests/s."""
    base: float | None = None
    """Demand smoothed for longer, from which a rise is told, requests/s."""
    twice: float | None = None
    thrice: float | None = None
    """Demand smoothed so often, requests/s."""
    unrest: float | None = None
    """How much the demand moves about, as a share of it squared (noise.py). None: not observed yet."""
    lasting: float | None = None
    """The same, forgotten slowly. None: as that."""
    surge: Surge | None = None
    peaks: tuple[Peak, ...] = ()
    """By slice of the window, oldest first."""
    hold_until: float = 0.0
    """No shrinking before this..."""
    hold_reason: str = ""
    """... and why: a clause for the sentence."""
    grown_at: float | None = None
    shrunk_at: float | None = None
    shrunk_from: int | None = None
    """The number before the last series of steps down..."""
    shrinking_since: float | None = None
    """... and when that began. None: nothing has been taken away since the number last grew."""
    window_factor: float = Field(default=1.0, ge=1)
    """How much longer than its setting the shrink window has become by shrinks that had to be taken back."""
    factor_at: float | None = None
    """When that last changed."""
    calm_since: float | None = None
    """No backlog, no surge, and demand under the capacity of what has started, since then."""
    unsettled_at: float | None = None
    """Replicas changed, or demand was over capacity."""
    late_since: float | None = None
    """Answers have been late in steady state since."""
    slowdown: float = Field(default=1.0, gt=0)
    """How much slower than its curve a replica is."""
    unknown_since: float | None = None
    """Metrics have been unknown since."""
    started: tuple[Started, ...] = ()
    """Replicas that were seen to start, oldest first."""
