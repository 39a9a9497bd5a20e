"""Configures the log of a process of the runtime: lines on standard error, or other handlers."""

from __future__ import annotations

import logging
import sys

from penstock.logs import TextFormatter


def configure_logs(level: str, *handlers: logging.Handler) -> None:
    """Log events of Penstock from `level` on, of libraries from warnings on. `handlers`: replace standard error."""
    if handlers:
        logging.basicConfig(level=logging.WARNING, handlers=handlers, format="%(message)s")
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("penstock").setLevel(level.upper())
