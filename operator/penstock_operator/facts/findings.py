"""Findings: the status, reason and message of a condition; and Events.

Each message names the next action. `penstock.resources.status` has the types of the conditions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from penstock.resources.conditions import ConditionStatus

MESSAGE_LIMIT = 2048
"""Characters; the API allows 32,768, but people read these."""
_REASON = re.compile(r"[A-Z][A-Za-z0-9]*")

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event to post on the endpoint. Only transitions post one: the same state twice posts nothing."""

    type: Literal["Normal", "Warning"]
    reason: str
    """CamelCase, stable: a `Reason`, or the reason of a job's or runtime's failure."""
    message: str


@dataclass(frozen=True)
class Finding:
    """Status, reason and message of a condition. Three-valued: an unknown status is not false."""

    status: ConditionStatus
    reason: str
    """A `Reason`, or the reason of a job's or runtime's failure."""
    message: str

    def __post_init__(self) -> None:
        """Reject an invalid reason or an empty message: a programming error, which the tests detect."""
        if _REASON.fullmatch(self.reason) is None:
            raise ValueError(f"{self.reason!r} is not a CamelCase reason")
        if not self.message.strip():
            raise ValueError(f"{self.reason}: the message is empty")

    @property
    def true(self) -> bool:
        """Whether the status is True."""
        return self.status is TRUE

    @property
    def false(self) -> bool:
        """Whether the status is False (not Unknown)."""
        return self.status is FALSE


def yes(reason: str, message: str) -> Finding:
    """A finding with the status True."""
    return Finding(TRUE, reason, message)


def no(reason: str, message: str) -> Finding:
    """A finding with the status False."""
    return Finding(FALSE, reason, message)


def unknown(reason: str, message: str) -> Finding:
    """A finding with the status Unknown."""
    return Finding(UNKNOWN, reason, message)


def clipped(message: str, limit: int = MESSAGE_LIMIT) -> str:
    """The message without control characters, shortened to `limit` characters: parts of it come from pods."""
    message = unprintable_as_spaces(message)
    return message if len(message) <= limit else f"{message[: limit - 4].rstrip()} ..."


def stopped(text: str) -> str:
    """The text with a full stop at its end."""
    text = text.strip()
    return f"{text}{'' if text.endswith(('.', '!', '?', '…')) else '.'}" if text else ""


def sentence(text: str) -> str:
    """The text with a capital letter at its start and a full stop at its end."""
    text = stopped(text)
    return f"{text[:1].upper()}{text[1:]}"


def unprintable_as_spaces(text: str) -> str:
    """The text with each character that is not printable replaced by a space: control characters and line breaks, which
    forge lines of logs and move the cursor of terminals, and characters that reverse the direction of writing."""
    return text if text.isprintable() else "".join(one if one.isprintable() else " " for one in text)
