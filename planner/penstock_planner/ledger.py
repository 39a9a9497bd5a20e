"""The ledger: predictions of plans, and later measurements. One JSON object on each line of a file.

Past errors show how far a plan can be trusted: `error_text` states them below each new plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import SettingError

DEFAULT_LEDGER = Path("~/.local/share/penstock/plans.jsonl")
MOST_BYTES = 16 * 2**20
"""A larger file is not read: it is not a ledger."""


class LedgerEntry(BaseModel):
    """One prediction that was measured."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    at: str
    """ISO 8601, UTC."""
    model: str
    hardware_class: str
    cores: int = Field(ge=1)
    plan: str
    origin: str
    """Where the prediction came from (`penstock_planner.evidence.Origin`)."""
    url: str
    requests_per_second: float = Field(gt=0)
    """The offered rate."""
    predicted_p95_milliseconds: float = Field(gt=0)
    measured_p95_milliseconds: float = Field(gt=0)
    measured_p95_low: float | None = None
    measured_p95_high: float | None = None
    completed_per_second: float = Field(ge=0)
    refused_share: float = Field(default=0.0, ge=0, le=1)

    @property
    def error(self) -> float:
        """Measured over predicted p95, minus 1: positive if it was slower than predicted."""
        return self.measured_p95_milliseconds / self.predicted_p95_milliseconds - 1


def parse_ledger(lines: Iterable[str]) -> tuple[LedgerEntry, ...]:
    """The entries; lines that are none are left out: a run may have been killed while it wrote."""
    found = []
    for line in lines:
        try:
            found.append(LedgerEntry.model_validate_json(line))
        except ValidationError:
            continue
    return tuple(found)


def read_ledger(path: Path) -> tuple[LedgerEntry, ...]:
    """The entries of a file; none if it does not exist. SettingError when it cannot be read."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SettingError(f"{path} is too large for a ledger", field="--ledger", remedy="Name another file")
        return parse_ledger(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise SettingError(f"{path} cannot be read ({error.strerror})", field="--ledger") from error


def append_entry(path: Path, entry: LedgerEntry) -> None:
    """Add an entry to the end of the file, which is created with its folder. SettingError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry.model_dump(), ensure_ascii=False) + "\n")
    except OSError as error:
        raise SettingError(
            f"{path} cannot be written ({error.strerror})", field="--ledger", remedy="Name another file"
        ) from error


def error_text(entries: Sequence[LedgerEntry]) -> str:
    """Past errors in a sentence; empty without entries."""
    if not entries:
        return ""
    errors = [entry.error for entry in entries]
    off = [abs(error) for error in errors]
    count = f"{len(entries)} prediction{'' if len(entries) == 1 else 's'} measured so far"
    return (
        f"{count}: the p95 differed by {median(off):.0%} in the median and {max(off):.0%} at most "
        f"(measured over predicted: {1 + min(errors):.2f} to {1 + max(errors):.2f})"
    )
