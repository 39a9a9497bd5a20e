"""Log formats: one JSON object per line, or plain lines for a terminal."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime

ENDPOINT: ContextVar[str] = ContextVar("endpoint", default="")
"""`namespace/name` of the object that is being reconciled; added to each line."""


class JsonFormatter(logging.Formatter):
    """`time level logger message`, and `endpoint` and `error` where they apply."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if endpoint := ENDPOINT.get():
            line["endpoint"] = endpoint
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`time level message`, with the endpoint before the message."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the lines of a traceback."""
        endpoint = ENDPOINT.get()
        where = f"{endpoint}: " if endpoint else ""
        time = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        text = f"{time} {record.levelname.lower():7} {where}{record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        return text


def configure(level: str, form: str) -> None:
    """Log to standard error: the operator at `level`, libraries at warning."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if form == "text" else JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("penstock_operator").setLevel(level.upper())
