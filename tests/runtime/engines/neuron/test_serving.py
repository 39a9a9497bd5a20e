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
from penstock_runtime.app.lifecycle import start_model
from penstock_runtime.host import read_host
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.serving.generation_model import load_generation_artefact
from penstock_runtime.serving.loaded_model import LoadedModel, load_artefact
from penstock_runtime.tasks import make_task
from tests.runtime.engines.neuron.small import (
    KIND_OF_TASK,
    KINDS,
    InNumpy,
    Standin,
    changed_copy,
    io_of,
    plan_of,
    write_artefact,
)
from tests.runtime.http.serving import Endpoint, serving, write_folder, write_sparse_folder
from tests.runtime.pod.pods import Pod

SECONDS = 120
VARYING = frozenset({"id", "created", "modified_at"})
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


def check_every_route(folder: Path, path: Path, kind: str) -> tuple[LoadedModel, dict[str, Any]]:
    """Serve a compiled model of a kind with each of its tasks. All routes answer as a server does that has the same
    model on the CPU. Returns the closed model, and `/info` of the last server."""
    tasks = [task for task, own in KIND_OF_TASK.items() if own == kind] or [TaskName.FEATURE_EXTRACTION]
    write = write_sparse_folder if kind == "sparse" else write_folder
    write_artefact(folder / "artefact", path, kind, tasks[0], write)
    loaded = load_artefact(folder / "artefact", "chosen", read_host())
    with ExitStack() as stack:
        stack.callback(loaded.close)
        for task in tasks:
            made = make_task(task, ModelFolder.open(write(folder / task.value, task), weights=False), max_tokens=64)
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
                for route, body in examples:
                    found, wanted = (client.post(f"{one.url}{route}", json=body) for one in (on_device, on_cpu))
                    assert found.status_code == wanted.status_code, (route, body, found.text, wanted.text)
                    if wanted.status_code != 200 or "json" not in wanted.headers["content-type"]:
                        continue
                    given, expected = opened(found.json()), opened(wanted.json())
                    assert without_numbers(given) == without_numbers(expected), route
                    for one, other in zip(numbers(given), numbers(expected), strict=True):
                        assert math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-4), route
                info: dict[str, Any] = client.get(f"{on_device.url}/info").json()
                metrics = client.get(f"{on_device.url}/metrics").text

            cores = info["predictor"]["device"]["cores_in_service"]
            assert info["predictor"]["engine"]["name"] == "neuron"
            assert f'penstock_device_cores{{kind="in-service"}} {cores:.1f}' in metrics
            assert 'penstock_device_tokens_total{kind="padding"}' in metrics
    return loaded, info


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_route_of_every_task_answers_as_on_the_cpu(
    kind: str, on_host: Standin, compiled: dict[str, Path], tmp_path: Path
) -> None:
    loaded, info = check_every_route(tmp_path, compiled[kind], kind)

    assert info["predictor"]["device"]["cores_in_service"] == 2
    assert "AWS Inferentia (inf2): not yet run on a device" in loaded.findings
    assert loaded.plan.streams == 2


@pytest.mark.parametrize("kind", list(dict.fromkeys(KIND_OF_TASK.values())))
def test_a_pipeline_on_inf1_answers_every_route_of_every_task_as_on_the_cpu(
    kind: str, on_inf1: Standin, compiled_inf1: dict[tuple[str, int], Path], tmp_path: Path
) -> None:
    loaded, info = check_every_route(tmp_path, compiled_inf1[kind, 4], kind)

    device = info["predictor"]["device"]
    assert (device["cores_in_service"], device["copies"]) == (8, 2)
    assert info["predictor"]["engine"]["version"] == "1.13.1.2.11.13.0"
    assert (loaded.plan.streams, loaded.plan.threads_per_stream) == (2, 4)
    assert loaded.findings[:2] == ("AWS Inferentia (inf1): not yet run on a device", "AWS no longer supports Inf1")


def test_a_text_longer_than_the_longest_compiled_shape_is_cut_or_refused(
    on_host: Standin, compiled: dict[str, Path], tmp_path: Path
) -> None:
    shorter = changed_copy(
        compiled["vectors"], tmp_path / "short", "vectors", buckets=[{"file": "b1-t32.pt", "batch": 1, "tokens": 32}]
    )
    write_artefact(tmp_path / "artefact", shorter, "vectors", TaskName.FEATURE_EXTRACTION, write_folder)
    # More than what was compiled: a setting of the endpoint does not change the shapes.
    loaded = load_artefact(tmp_path / "artefact", "chosen", read_host(), max_tokens=64)
    with ExitStack() as stack:
        stack.callback(loaded.close)
        endpoint = stack.enter_context(serving(None))
        start(endpoint, loaded)
        with httpx.Client(timeout=SECONDS) as client:

            def ask(words: int, **parameters: Any) -> httpx.Response:
                return client.post(
                    f"{endpoint.url}/predict", json={"inputs": "love " * words, "parameters": parameters}
                )

            whole, cut, refused = ask(30), ask(31), ask(31, truncate=False)

    assert loaded.manifest is not None
    assert (loaded.max_tokens, loaded.manifest.model.max_tokens) == (32, 64)
    assert (whole.status_code, cut.status_code, refused.status_code) == (200, 200, 422)
    assert cut.headers["x-truncated"] == "1"
    assert "x-truncated" not in whole.headers
    assert list(numbers(cut.json())) == pytest.approx(list(numbers(whole.json())))
    assert "32" in refused.json()["error"]


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
