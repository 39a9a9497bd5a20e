"""`penstock serve` accepts every setting as a flag and as a variable, and reports wrong values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

import penstock_cli.serve
from penstock_cli.serve import ServeOptions
from penstock_runtime.settings import SETTINGS, Settings
from tests.cli.endpoints import invoke

Started = list[tuple[ServeOptions, Settings]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Records options and settings instead of serving."""
    found: Started = []

    class Recorder:
        def __init__(self, options: ServeOptions, settings: Settings) -> None:
            found.append((options, settings))

        async def run(self) -> int:
            return 0

    monkeypatch.setattr(penstock_cli.serve, "ServeSession", Recorder)
    monkeypatch.setattr(penstock_cli.serve, "configure_logs", lambda level, *_: None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return found


def test_every_setting_is_a_flag() -> None:
    flags = {
        flag
        for parameter in penstock_cli.serve.command.params
        if isinstance(parameter, click.Option)
        for flag in parameter.opts
    }

    assert {setting.flag for setting in SETTINGS} <= flags


def test_help_names_the_variable_of_every_setting() -> None:
    shown = "".join(invoke("serve", "--help").output.split())

    assert [setting.variable for setting in SETTINGS if f"[{setting.variable}" not in shown] == []


@pytest.mark.parametrize(
    ("words", "environment", "port"),
    [
        ([], {}, 8080),
        ([], {"PENSTOCK_PORT": "81"}, 81),
        (["--port", "83"], {"PENSTOCK_PORT": "81"}, 83),
    ],
)
def test_flags_go_before_variables_before_defaults(
    words: list[str], environment: dict[str, str], port: int, started: Started
) -> None:
    assert invoke("serve", "x.yaml", *words, environment=environment).exit_code == 0
    assert started[0][1].http.port == port


def test_values_arrive_with_their_types(started: Started) -> None:
    result = invoke(
        "serve", "x.yaml", "--drain-limit-seconds", "7.5", "--cors-origins", "https://a.example,https://b.example",
        "--access-log", "true", "--auth-token", "secret", "--objective-p95-milliseconds", "20",
    )  # fmt: skip
    settings = started[0][1]

    assert result.exit_code == 0
    assert settings.drain.drain_limit_seconds == 7.5
    assert settings.access.cors_origins == ("https://a.example", "https://b.example")
    assert settings.log.access_log
    assert settings.access.given_tokens == [b"secret"]
    assert settings.observation.objective_p95_milliseconds == 20


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        ([], {}, {"store": Path("artefacts"), "cores": None, "optimize": True, "token": None}),
        (["--store", "s", "--cores", "3", "--no-optimize"], {}, {"store": Path("s"), "cores": 3, "optimize": False}),
        ([], {"PENSTOCK_STORE": "s", "PENSTOCK_SERVE_CORES": "3"}, {"store": Path("s"), "cores": 3}),
        ([], {"PENSTOCK_SERVE_OPTIMIZE": "false", "HF_TOKEN": "t"}, {"optimize": False, "token": "t"}),
        (["--models", "~/m"], {}, {"models": Path("~/m").expanduser()}),
    ],
)
def test_options_of_the_command(
    words: list[str],
    environment: dict[str, str],
    expected: dict[str, Any],
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert invoke("serve", "x.yaml", *words, environment=environment).exit_code == 0
    options = started[0][0]

    assert options.target == Path("x.yaml")
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "environment", "problem", "remedy"),
    [
        (
            [],
            {"PENSTOCK_DRIAN_LIMIT_SECONDS": "1"},
            "PENSTOCK_DRIAN_LIMIT_SECONDS is not a setting",
            "PENSTOCK_DRAIN_LIM",
        ),
        ([], {"PENSTOCK_PORT": "abc"}, "PENSTOCK_PORT is 'abc'", "the default is 8080"),
        ([], {"PENSTOCK_SERVE_PORT": "abc"}, "PENSTOCK_SERVE_PORT is not a setting", "Set PENSTOCK_PORT instead"),
        (["--port", "70000"], {}, "--port is '70000'", "the default is 8080"),
        ([], {"PENSTOCK_DRAIN_LIMIT_SECONDS": "-1"}, "PENSTOCK_DRAIN_LIMIT_SECONDS is '-1'", "in s"),
        (["--log-level", "loud"], {}, "--log-level is 'loud'", "the default is 'info'"),
        (["--cors-origins", "example.com"], {}, "'example.com' is not an origin", "https://app.example.com"),
        (["--auth-token", ""], {}, "(hidden)", "leave it out"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(
    words: list[str], environment: dict[str, str], problem: str, remedy: str, started: Started
) -> None:
    result = invoke("serve", "x.yaml", *words, environment=environment)

    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert problem in result.stderr
    assert remedy in result.stderr
    assert started == []


def test_connections_that_were_cut_off_show_in_the_exit_status(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut:
        def __init__(self, *_: Any) -> None: ...

        async def run(self) -> int:
            return 2

    monkeypatch.setattr(penstock_cli.serve, "ServeSession", Cut)

    assert invoke("serve", "x.yaml").exit_code == 1
