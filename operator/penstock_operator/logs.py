"""Configures the operator's log."""

from __future__ import annotations

import logging
import sys

from penstock.logs import JsonFormatter, TextFormatter


def configure(level: str, form: str) -> None:
    """Log to standard error: the operator at `level`, libraries at warning. `form`: `json` or `text`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if form == "text" else JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("penstock_operator").setLevel(level.upper())
