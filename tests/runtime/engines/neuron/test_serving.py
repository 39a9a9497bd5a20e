"""Artefacts for Inferentia over HTTP, on the stand-in for the Neuron SDK."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.errors import ArtefactError
from penstock.tasks import TaskName
from penstock_runtime.host import read_host
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.serving.generation_model import load_generation_artefact
from penstock_runtime.serving.lifecycle import start_model
from penstock_runtime.serving.loaded_model import LoadedModel, load_artefact
from penstock_runtime.tasks import make_task
from tests.runtime.engines.neuron.small import (
    KIND_OF_TASK,
    KINDS,
    InNumpy,
    Standin,
    io_of,
    plan_of,
    write_artefact,
)
from tests.runtime.http.serving import Endpoint, serving, write_folder, write_sparse_folder
from tests.runtime.pod.pods import Pod

SECONDS = 120
VARYING = frozenset({"id", "created"})
"""Fields of answers that differ from request to request."""


def start(endpoint: Endpoint, model: LoadedModel) -> None:
    asyncio.run_coroutine_threadsafe(start_model(endpoint.server, model), endpoint.loop).result(SECONDS)


def opened(value: Any) -> Any:
    """The same JSON value, with answers that are JSON in a text, as in tensors of texts, as values."""
    if isinstance(value, Mapping):
        return {name: opened(one) for name, one in value.items()}
    if isinstance(value, list):
        return [opened(one) for one in value]
    return json.loads(value) if isinstance(value, str) and value.startswith(("{", "[{")) else value


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a JSON value, in order."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from () if name in VARYING else numbers(one)
    elif isinstance(value, list):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def without_numbers(value: Any) -> Any:
    """The same JSON value with all numbers 0, and without what differs between any two answers."""
    if isinstance(value, Mapping):
        return {name: without_numbers(one) for name, one in value.items() if name not in VARYING}
    if isinstance(value, list):
        return [without_numbers(one) for one in value]
    return 0 if isinstance(value, int | float) and not isinstance(value, bool) else value


def requests_of(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Path and example of each route of the OpenAPI document that takes JSON."""
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        for example in body.get("examples", {}).values():
            yield path.replace("{name}", "emotion").replace("{version}", "1"), example["value"]


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_route_of_every_task_answers_as_on_the_cpu(
    kind: str, on_host: Standin, compiled: dict[str, Path], tmp_path: Path
) -> None:
    tasks = [task for task, own in KIND_OF_TASK.items() if own == kind] or [TaskName.FEATURE_EXTRACTION]
    write = write_sparse_folder if kind == "sparse" else write_folder
    write_artefact(tmp_path / "artefact", compiled[kind], kind, tasks[0], write)
    loaded = load_artefact(tmp_path / "artefact", "chosen", read_host())
    with ExitStack() as stack:
        stack.callback(loaded.close)
        for task in tasks:
            folder = tmp_path / task.value
            made = make_task(task, ModelFolder.open(write(folder, task), weights=False), max_tokens=64)
            neuron = (
                loaded
                if task is tasks[0]
                else LoadedModel(made, loaded.engine, loaded.plan, loaded.io, max_tokens=loaded.max_tokens)
            )
            here = LoadedModel(made, InNumpy(kind), plan_of(1), io_of(kind), max_tokens=loaded.max_tokens)
            on_device, on_cpu = (stack.enter_context(serving(None, task)) for _ in range(2))
            start(on_device, neuron)
            start(on_cpu, here)
            with httpx.Client(timeout=SECONDS) as client:
                examples = list(requests_of(client.get(f"{on_device.url}/openapi.json").json()))
                assert len(examples) >= 5
                for path, body in examples:
                    found, wanted = (client.post(f"{one.url}{path}", json=body) for one in (on_device, on_cpu))
                    assert found.status_code == wanted.status_code, (path, body, found.text, wanted.text)
                    if wanted.status_code != 200 or "json" not in wanted.headers["content-type"]:
                        continue
                    given, expected = opened(found.json()), opened(wanted.json())
                    assert without_numbers(given) == without_numbers(expected), path
                    for one, other in zip(numbers(given), numbers(expected), strict=True):
                        assert math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-4), path
                info = client.get(f"{on_device.url}/info").json()
                metrics = client.get(f"{on_device.url}/metrics").text

            assert info["predictor"]["engine"]["name"] == "neuron"
            assert info["predictor"]["device"]["cores_in_service"] == 2
            assert 'penstock_device_cores{kind="in-service"} 2.0' in metrics
            assert 'penstock_device_tokens_total{kind="padding"}' in metrics
    assert "AWS Inferentia (inf2): not yet run on a device" in loaded.findings
    assert loaded.plan.streams == 2


def test_a_pod_answers_and_ends_with_a_reason_when_its_last_core_fails(
    on_host: Standin, compiled: dict[str, Path], tmp_path: Path
) -> None:
    artefact = tmp_path / "artefact"
    write_artefact(artefact, compiled["classes"], "classes", TaskName.TEXT_CLASSIFICATION, write_folder)
    variables = {"NEURON_RT_VISIBLE_CORES": "0", "PENSTOCK_NEURON_CORES": "1", "PENSTOCK_NEURON_TARGET": "inf2"}
    with Pod(tmp_path / "pod", artefact=artefact, **variables) as pod:
        pod.wait_for("ServerReady")
        first = pod.ask("POST", "/predict", {"inputs": "i like you"})
        device = pod.ask("GET", "/info")[1]["predictor"]["device"]
        on_host.describe(faults={"hardware_error_cores": [0]})
        second = pod.ask("POST", "/predict", {"inputs": "i like you"})
        code = pod.ended()

    assert first[0] == 200
    assert (device["cores"], device["copies"]) == (1, 1)
    assert second[0] == 500
    assert code == 75
    assert pod.last_words["reason"] == "DeviceUnavailable"
    assert "no NeuronCore is left in service" in pod.last_words["message"]
    assert pod.last_words["retryable"]
    order = [pod.output.index(f"event={name}") for name in ("NeuronCoreFailed", "ServerFailed", "PodFailed")]
    assert order == sorted(order)


def test_a_pod_on_a_node_without_a_device_ends_with_what_to_do(
    on_host: Standin, compiled: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artefact = tmp_path / "artefact"
    write_artefact(artefact, compiled["classes"], "classes", TaskName.TEXT_CLASSIFICATION, write_folder)
    monkeypatch.delenv("STANDIN_MACHINE")

    with Pod(tmp_path / "pod", artefact=artefact) as pod:
        code = pod.ended()

    assert code == 1
    assert "no Neuron device can be used here" in pod.last_words["message"]
    assert "aws.amazon.com/neuron" in pod.last_words["remedy"]


def test_text_generation_is_refused_by_name(compiled: dict[str, Path], tmp_path: Path) -> None:
    write_artefact(
        tmp_path, compiled["classes"], "classes", TaskName.TEXT_GENERATION, lambda root, _: root.joinpath("config.json")
    )

    with pytest.raises(ArtefactError, match="text-generation does not run on AWS Inferentia"):
        load_generation_artefact(tmp_path, "chosen", read_host())
