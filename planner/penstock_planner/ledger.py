"""The ledger: predictions of plans, and later measurements. One JSON object on each line of a file.

Past errors show how far a plan can be trusted: they widen the intervals of later predictions of the same class, model
and origin (`widened`), and `error_text` states them below each new plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import SettingError
from penstock_planner.evidence import Evidence, Interval

DEFAULT_LEDGER = Path("~/.local/share/penstock/plans.jsonl")
NOISE_LIMIT = 0.15
"""A measurement is not kept when other work had more of the machine: `penstock bench` does not judge such figures."""
MOST_WIDENED = 20.0
"""No entry widens an interval to more than this factor."""
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
    replicas: int = Field(default=1, ge=1)
    cpu: str = ""
    """The server's processor, or the user's statement of its class."""
    noise: float | None = Field(default=None, ge=0)
    """Share of the server's CPUs that other work and the hypervisor took; None: another machine, not known."""
    load_average: float | None = Field(default=None, ge=0)
    """Of the last minute, before the measurement."""
    shared_with: tuple[str, ...] = ()
    """Programs that used the same CPUs."""

    @property
    def key(self) -> str:
        """A short name of the entry: `penstock ledger --remove` takes it."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:8]

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


def remove_entries(path: Path, keys: Collection[str]) -> int:
    """Write the file again without the entries of these keys, and return their number. Lines that are no entry stay.

    SettingError when it cannot be written.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if not any(entry.key in keys for entry in parse_ledger([line]))]
        written = path.with_name(f"{path.name}.new")
        written.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        written.replace(path)
    except OSError as error:
        raise SettingError(f"{path} cannot be written ({error.strerror})", field="--ledger") from error
    return len(lines) - len(kept)


def widened(evidence: Evidence, entries: Iterable[LedgerEntry], model: str) -> Evidence:
    """The evidence with an interval that contains the errors of past predictions of its class, model and origin.

    If p95 was measured e times as long as predicted, the replica is 1/e times as fast, or slower: `faster` divides
    times by the factor (penstock.capacity).
    """
    of_this = (model, evidence.hardware_class, evidence.origin.value)
    times = [1 + entry.error for entry in entries if (entry.model, entry.hardware_class, entry.origin) == of_this]
    if not times:
        return evidence
    low = max(1 / max(times), 1 / MOST_WIDENED)
    high = min(1 / min(times), MOST_WIDENED)
    interval = Interval(min(evidence.interval.low, low), max(evidence.interval.high, high))
    return replace(evidence, interval=interval)


def error_text(entries: Sequence[LedgerEntry], model: str) -> str:
    """Past errors of a model's predictions by class and origin, in a sentence; empty without entries."""
    groups: dict[str, list[float]] = {}
    for entry in entries:
        if entry.model == model:
            groups.setdefault(f"{entry.hardware_class} ({entry.origin})", []).append(entry.error)
    texts = [
        f"{name}: {len(errors)} measured, p95 off by {median(map(abs, errors)):.0%} in the median "
        f"(measured over predicted: {1 + min(errors):.2f} to {1 + max(errors):.2f})"
        for name, errors in groups.items()
    ]
    return f"past predictions of this model, within the intervals above: {'; '.join(texts)}" if texts else ""
