"""Log lines that machines can read."""

from __future__ import annotations

import json
import logging

import pytest

from penstock_operator.logs import ENDPOINT, JsonFormatter, TextFormatter


def record(message: str, *arguments: object, error: bool = False) -> logging.LogRecord:
    problem = ValueError("inner")
    information = (ValueError, problem, None) if error else None
    return logging.LogRecord("penstock_operator.x", logging.WARNING, __file__, 1, message, arguments, information)


def test_a_line_is_one_json_object_whatever_is_in_the_message() -> None:
    text = JsonFormatter().format(record('a "quoted"\nline with %s', "é"))

    assert "\n" not in text
    value = json.loads(text)
    assert value["message"] == 'a "quoted"\nline with é'
    assert value["level"] == "warning"
    assert value["time"].endswith("+00:00")
    assert "endpoint" not in value


def test_the_endpoint_and_the_error_are_fields() -> None:
    token = ENDPOINT.set("ns/name")
    try:
        value = json.loads(JsonFormatter().format(record("failed", error=True)))
    finally:
        ENDPOINT.reset(token)

    assert value["endpoint"] == "ns/name"
    assert "ValueError: inner" in value["error"]


@pytest.mark.parametrize("error", [False, True])
def test_a_terminal_gets_plain_lines(error: bool) -> None:
    text = TextFormatter().format(record("plain", error=error))

    assert "warning" in text
    assert "plain" in text
    assert ("ValueError: inner" in text) is error
