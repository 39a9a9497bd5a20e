"""Which copy of the model takes the next run: a state machine. Pure: no threads, no clock.

Each copy has `capacity` slots for runs in progress. A copy on a failed device is taken out of service: its slots
are not given again, and runs on it end by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Place:
    """One of a copy's slots."""

    copy: int
    number: int
    """From 0, within the copy."""


@dataclass(slots=True)
class Copies:
    """The copies and their free slots."""

    count: int
    capacity: int
    failed: dict[int, str] = field(default_factory=dict)
    """Copies that are out of service, with the reason."""
    _free: list[list[int]] = field(init=False)
    """Free slots of each copy, the next one last."""

    def __post_init__(self) -> None:
        self._free = [list(reversed(range(self.capacity))) for _ in range(self.count)]

    @property
    def in_service(self) -> int:
        """Copies that take runs."""
        return self.count - len(self.failed)

    def in_progress(self, copy: int) -> int:
        """Runs of a copy."""
        return self.capacity - len(self._free[copy])

    def take(self) -> Place | None:
        """A free slot on the copy in service with the fewest runs, the first of several; None: all are busy."""
        usable = [copy for copy in range(self.count) if copy not in self.failed and self._free[copy]]
        if not usable:
            return None
        copy = min(usable, key=self.in_progress)
        return Place(copy, self._free[copy].pop())

    def give_back(self, place: Place) -> None:
        """The run has ended. ValueError if the slot is free already."""
        if place.number in self._free[place.copy]:
            raise ValueError(f"{place} is free already")
        self._free[place.copy].append(place.number)

    def fail(self, copy: int, reason: str) -> bool:
        """Take a copy out of service; false if it is already."""
        if copy in self.failed:
            return False
        self.failed[copy] = reason
        return True
