"""`penstock host`."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from penstock.hardware import CpuIdentity
from penstock_cli.terminal import describe_memory
from penstock_runtime.host import HostMemory, read_host
from tests.cli.endpoints import invoke


def test_json_has_the_processor_and_the_cores() -> None:
    value = json.loads(invoke("host", "--json").output)

    assert list(value) == ["cpu", "grant"]
    assert CpuIdentity.model_validate(value["cpu"]) == read_host().cpu
    assert {name: type(item) for name, item in value["grant"].items()} == {
        "cpus": list, "siblings": list, "nodes": list, "pinned": bool, "keep": bool, "findings": list,
    }  # fmt: skip
    assert set(value["grant"]["cpus"]) <= os.sched_getaffinity(0)


@pytest.mark.parametrize(("words", "variables"), [(["--cores", 1], {}), ([], {"PENSTOCK_HOST_CORES": "1"})])
def test_cores_are_as_many_as_asked_for(words: list[object], variables: dict[str, str]) -> None:
    value = json.loads(invoke("host", "--json", *words, environment=variables).output)

    assert len(value["grant"]["cpus"]) == 1


def test_the_text_form_has_a_line_for_each_fact() -> None:
    names = [shown.split()[0] for shown in invoke("host").output.splitlines()]

    assert [names.count(name) for name in ("cpu", "cores", "pinned", "memory")] == [1, 1, 1, 1]


@pytest.mark.parametrize(("limit", "shown"), [(None, "24.0 GiB"), (512 * 2**20, "24.0 GiB, limit 512 MiB")])
def test_the_memory_of_a_container_is_its_limit_as_well(limit: int | None, shown: str) -> None:
    host = read_host()

    assert describe_memory(replace(host, memory=HostMemory(24 * 2**30, limit, 2**30))) == shown
