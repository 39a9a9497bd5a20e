"""What was measured so far, one JSON line each: an interrupted search reads it and goes on. A torn last line is
dropped; everything else that does not fit is an error, since a wrong memory is worse than none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import ArtefactError
from penstock.recipe import Plan
from penstock_optimizer.search.goal import Pair, Sample


class Match(BaseModel):
    """One pair of measurements of two plans."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    challenger: Plan
    incumbent: Plan
    challenger_sample: Sample
    incumbent_sample: Sample

    @property
    def pair(self) -> Pair:
        """The samples alone."""
        return Pair(self.challenger_sample, self.incumbent_sample)


class Trials:
    """Matches in memory, and in a file when one is given."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._matches: list[Match] = []
        if path is not None and path.exists():
            self._matches = _read(path)

    def __len__(self) -> int:
        return len(self._matches)

    def all(self) -> Sequence[Match]:
        """All matches, oldest first."""
        return tuple(self._matches)

    def between(self, challenger: Plan, incumbent: Plan) -> Sequence[Match]:
        """The matches of these two, oldest first."""
        return [m for m in self._matches if m.challenger == challenger and m.incumbent == incumbent]

    def samples(self, plan: Plan) -> Sequence[Sample]:
        """All samples of a plan, on either side."""
        found = []
        for match in self._matches:
            if match.challenger == plan:
                found.append(match.challenger_sample)
            if match.incumbent == plan:
                found.append(match.incumbent_sample)
        return found

    def add(self, match: Match) -> None:
        """Remember, on disk before in memory."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(match.model_dump_json() + "\n")
        self._matches.append(match)


def _read(path: Path) -> list[Match]:
    # Bytes: what was torn or is no trial need not be text either.
    complete, _, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        path.write_bytes(complete + b"\n" if complete else b"")
    matches = []
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            matches.append(Match.model_validate_json(line))
        except ValidationError as error:
            raise ArtefactError(
                f"{path}, line {number} is not a trial of this version", remedy=f"Delete {path.parent} and start again"
            ) from error
    return matches
