"""Logging of a process: one line an event on standard error."""

from __future__ import annotations

import logging


def configure_logs(level: str) -> None:
    """Log Penstock's own events at this level, those of libraries from warnings on."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("penstock").setLevel(level.upper())
