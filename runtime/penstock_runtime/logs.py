"""Logging of a process: one line an event on standard error, or as the handlers given show it."""

from __future__ import annotations

import logging


def configure_logs(level: str, *handlers: logging.Handler) -> None:
    """Log Penstock's own events at this level, those of libraries from warnings on. `handlers`: instead of ours."""
    if handlers:
        logging.basicConfig(level=logging.WARNING, handlers=handlers, format="%(message)s")
    else:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("penstock").setLevel(level.upper())
