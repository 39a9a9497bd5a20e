"""Log formats with fields: each line of Penstock's processes names its event, the object and the reason.

    logger.warning("the watch of %s failed: %s", name, error, extra=log_event("WatchFailed", object=name, reason=error))

A process has its events in one registry, from which docs/reference/log-events.md is generated.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from penstock.errors import printable

FIELDS = ("event", "object", "reason")
OBJECT: ContextVar[str] = ContextVar("object", default="")
"""`namespace/name` of the object that is being worked on: the field `object` of lines that give none."""


@dataclass(frozen=True)
class LogEvent:
    """One kind of log line."""

    name: str
    """CamelCase; it stays the same when the message changes, so that searches and alerts can use it."""
    level: Literal["info", "warning", "error"]
    meaning: str
    """One sentence."""
    action: str = "Nothing."
    """The remedy for the operator on call."""


def log_event(name: str, *, object: str = "", reason: str | BaseException = "") -> dict[str, str]:  # noqa: A002
    """The fields of a line, for `extra=` of a logging call.

    `name`: of an event in the registry of the process. `object`: the object of the line, such as `namespace/name` or a
    request id. `reason`: one CamelCase word; of an error, the name of its class.
    """
    why = type(reason).__name__ if isinstance(reason, BaseException) else reason
    return {"event": name, "object": object, "reason": why}


def fields(record: logging.LogRecord) -> dict[str, str]:
    """The fields of a record that are not empty. Lines of libraries have no event."""
    values = {name: str(record.__dict__.get(name) or "") for name in FIELDS}
    values["object"] = values["object"] or OBJECT.get()
    return {name: value for name, value in values.items() if value}


_IN_JSON = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that `printable` escapes and JSON does not have to."""


def json_line(value: object) -> str:
    """The value as JSON on one line, without control characters."""
    text = json.dumps(value, ensure_ascii=False)
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, the fields, message, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **fields(record),
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json_line(line)


class TextFormatter(logging.Formatter):
    """Lines for a terminal: `layout` as in the standard library, the fields, and then the lines of a traceback.

    Without a layout: time with time zone, level in small letters, message. Control characters are escaped, and lines of
    a traceback begin with `| `: no text in a message can make a separate line.
    """

    def __init__(self, layout: str | None = None) -> None:
        super().__init__(layout)
        self._layout = layout

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the standard library's name
        """The line without the traceback."""
        if self._layout is None:
            time = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
            text = f"{time} {record.levelname.lower():7} {record.getMessage()}"
        else:
            text = super().formatMessage(record)
        return " ".join([printable(text), *(f"{name}={_quoted(value)}" for name, value in fields(record).items())])

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the standard library's name
        """The lines of the traceback."""
        return "\n".join(f"| {printable(line)}" for line in super().formatException(ei).split("\n"))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - the standard library's name
        """The lines of a stack."""
        return "\n".join(f"| {printable(line)}" for line in stack_info.split("\n"))


def _quoted(value: str) -> str:
    """As it is, or as a JSON string if a program that splits the line at spaces would misread it."""
    plain = value.isprintable() and not set(value) & set(' "=')
    return value if plain else json_line(value)
