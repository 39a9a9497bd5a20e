"""What a plan finds, on its way to becoming conditions: a stable CamelCase reason, and a message with the next action.

`penstock.resources.status` has the types of the conditions and keeps their transition times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from penstock.resources.status import Condition, ConditionStatus, timestamp, updated_conditions

MESSAGE_LIMIT = 2048
"""Characters; the API allows 32,768, but people read these."""
_REASON = re.compile(r"[A-Z][A-Za-z0-9]*")

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


@dataclass(frozen=True)
class Finding:
    """Whether something holds, and why. Three-valued: what is not known is not false."""

    status: ConditionStatus
    reason: str
    message: str

    def __post_init__(self) -> None:
        """A reason that is none, or no message, is a mistake of ours: found by the tests, not by users."""
        if _REASON.fullmatch(self.reason) is None:
            raise ValueError(f"{self.reason!r} is no CamelCase reason")
        if not self.message.strip():
            raise ValueError(f"{self.reason}: a finding without a message")

    @property
    def true(self) -> bool:
        """Known to hold."""
        return self.status is TRUE

    @property
    def false(self) -> bool:
        """Known not to hold."""
        return self.status is FALSE


def yes(reason: str, message: str) -> Finding:
    """It holds."""
    return Finding(TRUE, reason, message)


def no(reason: str, message: str) -> Finding:
    """It does not hold."""
    return Finding(FALSE, reason, message)


def unknown(reason: str, message: str) -> Finding:
    """Nobody can tell yet."""
    return Finding(UNKNOWN, reason, message)


def conditions(
    findings: Mapping[str, Finding], *, before: Iterable[Mapping[str, Any]], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The conditions to write: of each finding, with the time when its status changed last."""
    fresh = [
        Condition(
            type=kind,
            status=finding.status,
            reason=finding.reason,
            message=clipped(finding.message),
            observed_generation=generation,
            last_transition_time=timestamp(now),
        )
        for kind, finding in findings.items()
    ]
    kept = [condition for condition in map(_read, before) if condition is not None and condition.type in findings]
    return updated_conditions(kept, fresh)


def _read(entry: Mapping[str, Any]) -> Condition | None:
    """One of the status as it stands; None for what no version of ours wrote."""
    try:
        return Condition.model_validate(entry)
    except ValidationError:
        return None


def clipped(message: str, limit: int = MESSAGE_LIMIT) -> str:
    """At most so many characters."""
    return message if len(message) <= limit else f"{message[: limit - 4].rstrip()} ..."


def stopped(text: str) -> str:
    """Ends with a full stop."""
    text = text.strip()
    return f"{text}{'' if text.endswith(('.', '!', '?', '…')) else '.'}" if text else ""


def sentence(text: str) -> str:
    """Begins with a capital as well: for messages that are put together."""
    text = stopped(text)
    return f"{text[:1].upper()}{text[1:]}"
