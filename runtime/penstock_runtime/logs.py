"""Logging of a process: one line for each event on standard error, or through other handlers."""

from __future__ import annotations

import logging


def configure_logs(level: str, *handlers: logging.Handler) -> None:
    """Log events of Penstock from `level` on, of libraries from warnings on. `handlers`: replace standard error."""
    if handlers:
        logging.basicConfig(level=logging.WARNING, handlers=handlers, format="%(message)s")
    else:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("penstock").setLevel(level.upper())
