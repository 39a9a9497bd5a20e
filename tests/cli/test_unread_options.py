"""Options that do nothing in a use of a command are refused with what they work with."""

from __future__ import annotations

import importlib
from pathlib import Path

import click
import pytest

from penstock_cli.main import COMMANDS, FOLDERS
from penstock_runtime.settings import SETTINGS
from tests.cli.endpoints import invoke, write_endpoint

ALWAYS: dict[str, str] = {
    "serve": "cores optimize verbose",
    "optimize": "store models cores budget_seconds as_json neuron_target",
    "push": "",
    "bench": "family lengths batches seconds rounds patience_seconds output fresh seed",
    **{
        name: f"reference keep id_column column form shard_rows plan cores store models dry_run as_json {more}"
        for name, more in (
            ("embed", "text_column dtype prompt_name dimensions normalize too_long"),
            ("classify", "text_column top_k too_long"),
            ("rerank", "query_column documents_column top too_long"),
            ("generate", "text_column max_tokens"),
        )
    },
    "bulk": "",
    "plan": "rows classes cores prices measurements family output ledger",
    "simulate": "traces policies p95_milliseconds min_replicas max_replicas start_up_seconds scrape_interval dispatch "
    "seeds price workers output",
    "ledger": "ledger remove",
    "space": "against auth_token as_json",
    "status": "all_namespaces context",
    "top": "all_namespaces context",
    "why": "namespace context",
    "report": "namespace context output opens",
    "convert": "task",
    "certify": "index queries k tolerance min_recall text_column vector_column query_prompt document_prompt adapter "
    "auth_token as_json",
    "index": "",
    "host": "cores as_json",
}
"""Options that each use of the command reads."""
MODEL = "hf://sentence-transformers/all-MiniLM-L6-v2"
SERVER, CLUSTER = "http://127.0.0.1:9", "modelendpoint/a"
REFUSED: list[tuple[str, str, str, list[str], str]] = [
    *(("bench", name, flag, [target], "a FILE or --family") for name, flag in (
        ("cores", "--cores=1"), ("baseline", "--baseline"), ("store", "--store=x"), ("models", "--models=x"),
    ) for target in (SERVER, CLUSTER)),
    *(("bench", name, flag, words, "a URL or modelendpoint/NAME") for name, flag in (
        ("tokenizer", "--tokenizer=."), ("task", "--task=fill-mask"), ("info_url", "--info-url=http://x"),
        ("auth_token", "--auth-token=x"),
    ) for words in (["FILE"], ["--family=llama"])),
    *(("bench", name, flag, [target], "modelendpoint/NAME") for name, flag in (
        ("namespace", "-nx"), ("context", "--context=x"),
    ) for target in ("FILE", SERVER)),
    *(("plan", name, flag, ["FILE", "--rate=1"], "the NAME of an endpoint") for name, flag in (
        ("prometheus", "--prometheus=http://x"), ("namespace", "--namespace=x"), ("context", "--context=x"),
        ("measure", "--measure"),
    )),
    *(("plan", name, flag, ["FILE", "--rows=9"], "a load") for name, flag in (
        ("rate", "--rate=1"), ("peak", "--peak=1"), ("p95_milliseconds", "--p95=1"), ("write", "--write=x"),
        ("verify", "--verify=http://127.0.0.1:9"),
    )),
    *((name, "price_per_hour", "--price-per-hour=1", ["IN", "OUT", "--model=x"], "--dry-run")
      for name in ("embed", "classify", "rerank", "generate")),
    ("plan", "store", "--store=x", ["a-name"], "a FILE"),
    ("plan", "prometheus", "--prometheus=http://x", ["a-name", "--rate=1"], "the load of an endpoint"),
    ("plan", "trace", "--trace=x", ["FILE", "--rate=1"], "a load that --rate does not give"),
    *(("plan", name, flag, ["FILE", "--rate=1"], "--verify") for name, flag in (
        ("verify_replicas", "--verify-replicas=2"), ("verify_seconds", "--verify-seconds=2"),
        ("auth_token", "--auth-token=x"),
    )),
    *(("plan", name, flag, ["a-name", "--rate=1"], "--measure") for name, flag in (
        ("measure_seconds", "--measure-seconds=2"), ("dry_run", "--dry-run"),
    )),
    ("serve", "store", "--store=x", ["."], "a ModelEndpoint FILE"),
    ("serve", "models", "--models=x", ["."], "a ModelEndpoint FILE"),
    ("serve", "priorities", "--priority=a=1", ["FILE"], "several models"),
    ("optimize", "verbose", "--verbose", ["FILE", "--json"], "the table that is printed without --json"),
    ("optimize", "neuron_python", "--neuron-python=x", ["FILE"], "inf1 and inf2"),
    ("simulate", "headroom", "--headroom=0.5", ["--policy=kpa"], "--policy penstock or penstock-prometheus"),
    *(("certify", name, flag, ["OLD", "NEW", "--index=x", "--json"], "the lines that are printed without --json")
      for name, flag in (("documents", "--documents=9"), ("price_per_hour", "--price-per-hour=1"))),
    ("status", "namespace", "-nx", ["-A"], "one namespace"),
    ("top", "namespace", "-nx", ["-A"], "one namespace"),
]  # fmt: skip
"""Command, option, the option as it is written, the other words, and what it works with."""


def options_of(command: str) -> set[str]:
    module = importlib.import_module(f"penstock_cli.{FOLDERS.get(command, '')}{command}")
    settings = {setting.name for setting in SETTINGS} if command == "serve" else set()
    found = {one.name for one in module.command.params if isinstance(one, click.Option) and one.name is not None}
    return found - settings


@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_is_read_in_every_use_of_its_command_or_refused_in_some(command: str) -> None:
    refused = {name for of, name, *_ in REFUSED if of == command}

    assert set(ALWAYS[command].split()) | refused == options_of(command)
    assert not refused.intersection(ALWAYS[command].split())


@pytest.mark.parametrize(("command", "name", "flag", "words", "works_with"), REFUSED)
def test_an_option_that_does_nothing_is_refused(
    *, command: str, name: str, flag: str, words: list[str], works_with: str, tmp_path: Path
) -> None:
    file = write_endpoint(tmp_path / "a.yaml", MODEL)
    result = invoke(command, *(file if word == "FILE" else word for word in words), flag)

    assert result.exit_code == 2
    found = " ".join(result.output.split())
    assert f"does nothing here: it works with {works_with}" in found
    assert name.replace("_", "-") in found or flag.partition("=")[0] in found


def test_a_variable_of_the_environment_is_not_refused(tmp_path: Path) -> None:
    variables = {"PENSTOCK_AUTH_TOKEN": "x", "PENSTOCK_PLAN_PROMETHEUS": "http://x"}
    result = invoke(
        "plan",
        write_endpoint(tmp_path / "a.yaml", MODEL),
        "--rate=1",
        "--p95=50",
        environment=variables,
    )

    assert result.exit_code == 0, result.output
