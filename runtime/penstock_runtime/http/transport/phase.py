"""What a connection waits for."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Decides what the connection's deadline means."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"
    LINGER = "linger"
    """Refused and answered; whatever still comes is dropped."""
