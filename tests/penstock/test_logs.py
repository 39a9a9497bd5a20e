"""Fields of log lines, and the two formats that print them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreUnavailable, printable
from penstock.logs import OBJECT, JsonFormatter, TextFormatter, fields, json_line, log_event

LAYOUT = "%(levelname)s %(name)s: %(message)s"


def record(message: str, *arguments: object, error: Any = False, **extra: Any) -> logging.LogRecord:
    problem = ValueError("inner")
    information = (ValueError, problem, None) if error else None
    made = logging.LogRecord("penstock_operator.x", logging.WARNING, __file__, 1, message, arguments, information)
    made.__dict__.update(extra)
    return made


@contextmanager
def working_on(key: str) -> Iterator[None]:
    token = OBJECT.set(key)
    try:
        yield
    finally:
        OBJECT.reset(token)


def test_a_line_is_one_json_object_whatever_is_in_the_message() -> None:
    text = JsonFormatter().format(record('a "quoted"\nline with %s', "é"))

    assert "\n" not in text
    value = json.loads(text)
    assert value["message"] == 'a "quoted"\nline with é'
    assert value["level"] == "warning"
    assert value["time"].endswith("+00:00")
    assert not set(value) & {"endpoint", "event", "object", "reason", "error"}


def test_the_keys_of_a_line() -> None:
    extra = log_event("LeaseLost", object="system/penstock", reason="Taken")

    value = json.loads(JsonFormatter().format(record("lost", error=True, **extra)))

    assert list(value) == ["time", "level", "logger", "event", "object", "reason", "message", "error"]
    assert (value["event"], value["object"], value["reason"]) == ("LeaseLost", "system/penstock", "Taken")
    assert "ValueError: inner" in value["error"]


def test_the_object_is_the_one_that_is_worked_on_unless_the_line_names_one() -> None:
    with working_on("ns/name"):
        without = json.loads(JsonFormatter().format(record("failed", **log_event("ReconcileFailed"))))
        named = json.loads(JsonFormatter().format(record("failed", **log_event("CollectionFailed", object="ns/job"))))

    assert without["object"] == "ns/name"
    assert named["object"] == "ns/job"


def test_the_reason_of_an_error_is_its_class() -> None:
    error = StoreUnavailable("the store does not answer")

    assert log_event("FetchRetried", reason=error)["reason"] == "StoreUnavailable"


def test_empty_fields_are_left_out() -> None:
    assert fields(record("drained", **log_event("ServerDrained"))) == {"event": "ServerDrained"}


@pytest.mark.parametrize("error", [False, True])
def test_a_terminal_gets_plain_lines(error: bool) -> None:
    text = TextFormatter().format(record("plain", error=error, **log_event("ReconcileFailed", reason="Conflict")))

    first = text.splitlines()[0]
    assert " warning plain event=ReconcileFailed reason=Conflict" in first
    assert first.endswith("reason=Conflict")
    assert ("ValueError: inner" in text) is error


def test_a_layout_is_followed_by_the_fields_and_then_the_traceback() -> None:
    text = TextFormatter(LAYOUT).format(record("no %s", "answer", error=True, **log_event("PodFailed", object="m")))

    assert text.splitlines() == [
        "WARNING penstock_operator.x: no answer event=PodFailed object=m",
        "| ValueError: inner",
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("ns/name", "ns/name"),
        ("the watch of Pod", '"the watch of Pod"'),
        ('a"b', r'"a\"b"'),
        ("a=b", '"a=b"'),
        ("a\nb", r'"a\nb"'),
    ],
)
def test_a_value_that_would_break_the_line_is_quoted(value: str, shown: str) -> None:
    text = TextFormatter(LAYOUT).format(record("x", **log_event("TaskEnded", object=value)))

    assert text == f"WARNING penstock_operator.x: x event=TaskEnded object={shown}"


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter(), TextFormatter(LAYOUT)])
def test_the_fields_arrive_through_the_standard_logging_calls(formatter: logging.Formatter) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.getLogger("penstock.test")
    logger.addHandler(handler)
    try:
        logger.warning("the lease %s is lost", "a/b", extra=log_event("LeaseLost", object="a/b", reason="NotRenewed"))
    finally:
        logger.removeHandler(handler)

    assert all(word in stream.getvalue() for word in ("the lease a/b is lost", "LeaseLost", "NotRenewed"))


FORGED = 'x\n{"event": "baseline", "digest": "sha256:0"}\r\n\x1b[2J\u2028\x85{"event": "summary"}\ud800\u202e'
"""A text of a model: lines that look like a job's, and characters that control a terminal."""


def raised(text: str) -> logging.LogRecord:
    made = record("failed: %s", text, **log_event("PodFailed", object=text))
    made.exc_info = (ValueError, ValueError(text), None)
    return made


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter(), TextFormatter(LAYOUT)])
@given(text=st.one_of(st.just(FORGED), st.text()))
def test_no_text_makes_a_line_of_its_own_or_controls_the_terminal(formatter: logging.Formatter, text: str) -> None:
    lines = formatter.format(raised(text)).split("\n")

    assert [line for line in lines if printable(line) != line] == []
    assert [line for line in lines[1:] if not line.startswith("| ")] == []
    assert "".join(lines).encode()


@given(st.dictionaries(st.text(), st.one_of(st.text(), st.lists(st.text(), max_size=3)), max_size=3))
def test_json_is_one_line_without_control_characters_and_keeps_its_value(value: Any) -> None:
    line = json_line(value)

    assert printable(line) == line
    assert json.loads(line) == value
