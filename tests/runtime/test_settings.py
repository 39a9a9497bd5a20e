"""Settings: documented defaults, three sources, and errors that name the key, the value and the remedy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.errors import SettingError
from penstock_runtime.app.server import request_limits
from penstock_runtime.settings import SETTINGS, Settings
from penstock_runtime.tasks.base import DEFAULT_LIMITS

DEFAULTS = {
    "host": "127.0.0.1",
    "port": 8080,
    "internal_port": None,
    "backlog": 1024,
    "max_connections": 4096,
    "per_client_share": 0.9,
    "max_header_bytes": 32768,
    "max_held_bytes": 134_217_728,
    "header_timeout_seconds": 10.0,
    "body_timeout_seconds": 30.0,
    "min_upload_bytes_per_second": 1000.0,
    "write_timeout_seconds": 30.0,
    "connection_age_seconds": 60.0,
    "idle_timeout_seconds": 75.0,
    "max_body_bytes": 2_000_000,
    "max_inputs": 1024,
    "max_rows": 1024,
    "max_answer_bytes": 67_108_864,
    "max_queue_rows": 1024,
    "max_queue_tokens": 131_072,
    "deadline_seconds": 30.0,
    "answer_cache_bytes": 0,
    "token_cache_bytes": 0,
    "max_sequences": 64,
    "target_gap_milliseconds": 50.0,
    "generation_cache_bytes": None,
    "prefix_reuse": True,
    "drain_delay_seconds": 0.0,
    "drain_idle_seconds": 0.5,
    "drain_limit_seconds": 25.0,
    "auth_token": None,
    "auth_token_file": None,
    "auth_token_folder": None,
    "grpc_port": None,
    "tls_certificate": None,
    "tls_key": None,
    "bulk_tokens": (),
    "cors_origins": (),
    "log_level": "info",
    "access_log": False,
    "trace_endpoint": None,
    "trace_share": 0.01,
    "live_guard_share": 0.0,
    "objective_p95_milliseconds": None,
}


def value_of(settings: Settings, name: str) -> Any:
    group = next(setting.group for setting in SETTINGS if setting.name == name)
    return getattr(getattr(settings, group), name)


def test_the_defaults_are_the_documented_ones() -> None:
    settings = Settings.load({})

    assert {setting.name: value_of(settings, setting.name) for setting in SETTINGS} == DEFAULTS


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_has_a_description(setting: Any) -> None:
    assert setting.description.endswith(".")
    assert len(setting.description) > 30
    numeric = isinstance(setting.default, int | float) and not isinstance(setting.default, bool)
    assert setting.unit or not numeric or setting.name == "port"


def test_names_are_unique_over_all_groups() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)


def test_a_flag_wins_over_the_variable_over_the_default() -> None:
    environment = {"PENSTOCK_PORT": "9000", "PENSTOCK_MAX_INPUTS": "7", "OTHER": "x", "PENSTOCK_NODE_NAME": "n1"}

    settings = Settings.load(environment, {"port": "9001", "host": None})

    assert settings.http.port == 9001
    assert settings.http.host == "127.0.0.1"
    assert settings.limits.max_inputs == 7


def test_lists_are_split_at_commas_and_empty_means_not_set() -> None:
    settings = Settings.load(
        {
            "PENSTOCK_CORS_ORIGINS": "https://a.example.com, https://b.example.com:8443",
            "PENSTOCK_OBJECTIVE_P95_MILLISECONDS": "",
            "PENSTOCK_ACCESS_LOG": "true",
        }
    )

    assert settings.access.cors_origins == ("https://a.example.com", "https://b.example.com:8443")
    assert settings.observation.objective_p95_milliseconds is None
    assert settings.log.access_log is True


def test_the_largest_request_fits_into_the_queue() -> None:
    settings = Settings.load({"PENSTOCK_MAX_ROWS": "100", "PENSTOCK_MAX_QUEUE_ROWS": "100"})

    assert settings.limits.max_rows == settings.queue.max_queue_rows == 100
    assert Settings().limits.max_inputs <= Settings().limits.max_rows <= Settings().queue.max_queue_rows
    assert request_limits(Settings()) == DEFAULT_LIMITS


def test_the_error_for_a_variable_with_the_command_in_its_name_has_the_right_name() -> None:
    with pytest.raises(SettingError) as caught:
        Settings.load({"PENSTOCK_SERVE_DRAIN_LIMIT_SECONDS": "3"})

    assert caught.value.remedy == "Set PENSTOCK_DRAIN_LIMIT_SECONDS instead"


def test_variables_for_flags_that_are_not_settings_are_ignored() -> None:
    assert Settings.load({"PENSTOCK_SERVE_CORES": "2", "PENSTOCK_STORE": "s", "SERVE_PORT": "1"}) == Settings()


def test_reading_the_tokens_of_the_defaults_changes_no_other_settings() -> None:
    assert Settings().access.file_tokens == []

    assert Settings() == Settings.load({})


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings.load({}).http.port = 1  # type: ignore[misc]  # mypy knows, too


@pytest.mark.parametrize(
    ("environment", "flags", "field", "message"),
    [
        ({"PENSTOCK_PORT": "http"}, {}, "PENSTOCK_PORT", "PENSTOCK_PORT is 'http': input should be a valid integer"),
        ({}, {"port": "70000"}, "--port", "--port is '70000': input should be less than or equal to 65535"),
        ({"PENSTOCK_INTERNAL_PORT": "8080"}, {}, "", "internal_port 8080 is the port of requests too"),
        ({"PENSTOCK_HOST": ""}, {}, "PENSTOCK_HOST", "PENSTOCK_HOST is ''"),
        ({"PENSTOCK_DEADLINE_SECONDS": "0"}, {}, "PENSTOCK_DEADLINE_SECONDS", "should be greater than 0"),
        ({"PENSTOCK_DRAIN_IDLE_SECONDS": "inf"}, {}, "PENSTOCK_DRAIN_IDLE_SECONDS", "should be a finite number"),
        ({}, {"header_timeout_seconds": "nan"}, "--header-timeout-seconds", "is 'nan': input should be a finite"),
        ({"PENSTOCK_LOG_LEVEL": "loud"}, {}, "PENSTOCK_LOG_LEVEL", "'debug', 'info', 'warning' or 'error'"),
        ({"PENSTOCK_CORS_ORIGINS": "example.com"}, {}, "PENSTOCK_CORS_ORIGINS", "'example.com' is not an origin"),
        ({"PENSTOCK_AUTH_TOKEN": "  "}, {}, "PENSTOCK_AUTH_TOKEN", "PENSTOCK_AUTH_TOKEN is (hidden): is empty"),
        ({"PENSTOCK_DRAIN_DELAY_SECONDS": "30"}, {}, "", "drain_limit_seconds 25: raise the limit"),
        ({"PENSTOCK_MAX_INPUT": "3"}, {}, "PENSTOCK_MAX_INPUT", "PENSTOCK_MAX_INPUT is not a setting"),
        ({"PENSTOCK_SERVE_PORT": "abc"}, {}, "PENSTOCK_SERVE_PORT", "PENSTOCK_SERVE_PORT is not a setting"),
        ({"PENSTOCK_MAX_ROWS": "1025"}, {}, "", "max_rows 1025 is over max_queue_rows 1024"),
        ({}, {"max_queue_rows": "100"}, "", "Set --max-rows to 100 or less, or --max-queue-rows to 1024"),
        (
            {"PENSTOCK_MAX_ROWS": "200"},
            {"max_queue_rows": "100"},
            "",
            "Set PENSTOCK_MAX_ROWS to 100 or less, or --max-",
        ),
        ({"PENSTOCK_MAX_ROWS": "1025"}, {}, "", "Set PENSTOCK_MAX_ROWS to 1024 or less, or PENSTOCK_MAX_QUEUE_ROWS"),
        ({}, {"auth_token_file": "/nope"}, "--auth-token-file", "--auth-token-file: /nope cannot be read"),
        ({}, {"auth_token_file": "/dev/null"}, "--auth-token-file", "--auth-token-file: /dev/null holds no token"),
    ],
)
def test_a_wrong_value_is_refused_at_start(
    environment: dict[str, str], flags: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(SettingError) as caught:
        Settings.load(environment, flags)

    assert message in caught.value.message
    assert caught.value.field == field
    assert caught.value.remedy


def test_tokens_come_from_both_places(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("one\n  two \n\n")

    settings = Settings.load({"PENSTOCK_AUTH_TOKEN": "zero", "PENSTOCK_AUTH_TOKEN_FILE": str(file)})

    assert (settings.access.given_tokens, settings.access.file_tokens) == ([b"zero"], [b"one", b"two"])
    assert "zero" not in repr(settings)


@pytest.mark.parametrize("flag", [False, True])
def test_a_token_file_may_be_a_pipe_that_is_read_once(flag: bool) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one\n")
    os.close(writing)
    file = f"/dev/fd/{reading}"
    try:
        settings = Settings.load(
            {} if flag else {"PENSTOCK_AUTH_TOKEN_FILE": file}, {"auth_token_file": file} if flag else {}
        )
        assert settings.access.file_tokens == [b"one"]
        assert settings.access.file_tokens == [b"one"]
    finally:
        os.close(reading)


@pytest.mark.parametrize("content", [None, "\n \n"], ids=["missing", "empty"])
def test_a_token_file_without_tokens_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "tokens"
    if content is not None:
        file.write_text(content)

    with pytest.raises(SettingError, match="PENSTOCK_AUTH_TOKEN_FILE") as caught:
        _ = Settings.load({"PENSTOCK_AUTH_TOKEN_FILE": str(file)}).access.file_tokens

    assert "leave the setting out" in caught.value.remedy
