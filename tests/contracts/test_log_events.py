"""Each logging call from level info on passes an event of a registry, and each event of a registry is logged."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from penstock.logs import LogEvent, log_event
from penstock_gateway.log_events import LOG_EVENTS as GATEWAY_EVENTS
from penstock_gateway.log_events import LineFormatter
from penstock_gateway.log_events import log_event as gateway_log_event
from penstock_operator.log_events import LOG_EVENTS as OPERATOR_EVENTS
from penstock_runtime.log_events import JOB_EVENTS, POD_EVENTS, SERVER_EVENTS
from tests.contracts.tracked import ROOT, sources

OPERATOR = {event.name: event for event in OPERATOR_EVENTS}
RUNTIME = {event.name: event for event in (*SERVER_EVENTS, *POD_EVENTS)}
JOB = {event.name: event for event in JOB_EVENTS}
GATEWAY = {name: LogEvent(name, *rest) for name, rest in GATEWAY_EVENTS.items()}  # type: ignore[arg-type]
EVENTS = [*OPERATOR_EVENTS, *SERVER_EVENTS, *POD_EVENTS, *JOB_EVENTS, *GATEWAY.values()]
PACKAGES = {
    "operator/penstock_operator": OPERATOR,
    "runtime/penstock_runtime": RUNTIME,
    "optimizer/penstock_optimizer": JOB,
    "gateway/penstock_gateway": GATEWAY,
    # `penstock serve` runs the server, and an optimisation.
    "cli/penstock_cli": {**RUNTIME, **JOB},
}
LEVELS = {
    "info": "info", "warning": "warning", "error": "error", "exception": "error", "critical": "error",
    "log": "a level that is not known before the call", "warn": "a level of a deprecated name",
}  # fmt: skip
"""Method of a logger: level of the event."""


class Call(NamedTuple):
    """A logging call: where, the level, and the name of its event; empty if it passes none."""

    place: str
    level: str
    event: str


def calls(source: str, name: str) -> Iterator[Call]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in LEVELS:
            continue
        owner = node.func.value
        if not isinstance(owner, ast.Name) or owner.id not in {"logger", "logging"}:
            continue
        extra = next((keyword.value for keyword in node.keywords if keyword.arg == "extra"), None)
        event = ""
        if isinstance(extra, ast.Call) and isinstance(extra.func, ast.Name) and extra.func.id == "log_event":
            first = extra.args[0] if extra.args else None
            event = str(first.value) if isinstance(first, ast.Constant) else ""
        yield Call(f"{name}:{node.lineno}", LEVELS[node.func.attr], event)


def logged(package: str) -> list[Call]:
    return [
        call
        for path in sources(package)
        for call in calls(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    ]


def test_the_check_finds_calls_with_and_without_an_event() -> None:
    source = """
logger.debug("none is needed")
logger.info("x", extra=log_event("A", object="b"))
logger.exception("x")
logging.warning("x", extra={"event": "A"})
logger.log(level, "x", extra=log_event("A"))
"""

    assert list(calls(source, "f")) == [
        Call("f:3", "info", "A"),
        Call("f:4", "error", ""),
        Call("f:5", "warning", ""),
        Call("f:6", LEVELS["log"], "A"),
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_logging_call_passes_an_event_of_its_registry_and_its_level(package: str) -> None:
    registry = PACKAGES[package]

    wrong = [call for call in logged(package) if call.event not in registry or registry[call.event].level != call.level]

    assert logged(package)
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_each_logger_has_the_name_that_is_checked(package: str) -> None:
    own = r"""(?:__name__|["']penstock[._][\w.]+["'])"""
    assigned = re.compile(rf"^(?!logger = ).*logging\.getLogger\({own}\)$", re.MULTILINE)

    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sources(package)
        for match in assigned.finditer(path.read_text(encoding="utf-8"))
    ]

    assert found == []


def test_each_event_is_logged() -> None:
    used = {call.event for package in PACKAGES for call in logged(package)}

    assert sorted(event.name for event in EVENTS if event.name not in used) == []


def test_names_are_unique_over_all_processes() -> None:
    names = [event.name for event in EVENTS]

    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_every_event_has_a_valid_name_level_meaning_and_action(event: LogEvent) -> None:
    assert re.fullmatch(r"[A-Z][A-Za-z]+", event.name)
    assert event.level in {"info", "warning", "error"}
    for text in (event.meaning, event.action):
        assert text.endswith(".")
        assert "\n" not in text
        assert "|" not in text


def test_an_error_has_an_action() -> None:
    assert [event.name for event in EVENTS if event.level == "error" and event.action == "Nothing."] == []


def test_the_gateway_writes_the_same_fields_as_the_other_processes() -> None:
    for reason in ("Ready", OSError("no answer")):
        expected = log_event("ReplicaChanged", object="10.0.0.1", reason=reason)
        assert gateway_log_event("ReplicaChanged", object="10.0.0.1", reason=reason) == expected


def test_a_line_of_the_gateway_ends_with_its_fields() -> None:
    record = logging.LogRecord("penstock.gateway", logging.INFO, __file__, 1, "replica %s", ("r1",), None)
    record.__dict__.update(gateway_log_event("ReplicaChanged", object="r 1", reason=""))

    line = LineFormatter("%(levelname)s %(name)s: %(message)s").format(record)

    assert line == 'INFO penstock.gateway: replica r1 event=ReplicaChanged object="r 1"'
