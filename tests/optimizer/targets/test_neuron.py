"""An endpoint of an Inferentia class is compiled on a host without devices, with the stand-in for the Neuron SDK."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import NoCandidateWithinBudget, OptimizationError, OutOfMemory, SpecError
from penstock.hardware import INF1_UNSUPPORTED, NOT_RUN, NeuronGeneration
from penstock.manifest import Manifest, Outcome
from penstock.neuron_artefact import NEURON_FILE, CompiledModel
from penstock.resources.base import API_VERSION
from penstock.resources.endpoint import ModelEndpoint
from penstock_optimizer.job.job import Job
from penstock_optimizer.neuron.session import NeuronToolchain
from penstock_optimizer.optimise import optimise
from penstock_optimizer.targets.neuron import fence_rows, require_compiler_memory
from penstock_runtime.host import HostMemory
from penstock_runtime.rows import Row
from tests.cli.endpoints import run
from tests.neuron_standin_env import StandIn
from tests.optimizer.end_to_end.small_model import write_small_bert

pytestmark = [pytest.mark.parity, pytest.mark.slow]
ENOUGH = 5000.0
"""Seconds of a budget that no machine uses up."""


def _endpoint(model: Path, **spec: Any) -> ModelEndpoint:
    given = {
        "model": f"file://{model}",
        "task": "feature-extraction",
        "cores": 2,
        "workload": {"sequenceLengths": [12]},
        "serving": {"maxInputTokens": 24},
        "objective": {"latency": {"p95Milliseconds": 50}},
        **spec,
    }
    return ModelEndpoint.model_validate(
        {"apiVersion": API_VERSION, "kind": "ModelEndpoint", "metadata": {"name": "small"}, "spec": given}
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_small_bert(tmp_path / "model")


def _tools(folder: Path, generation: str, monkeypatch: pytest.MonkeyPatch, **faults: Any) -> NeuronToolchain:
    for name, value in StandIn.make(folder, generation).environment(faults=faults).items():
        monkeypatch.setenv(name, value)
    return NeuronToolchain.read(NeuronGeneration(generation), Path(sys.executable))


def test_a_precision_that_fails_the_guard_falls_back_to_fp32_which_is_compiled(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = _tools(tmp_path, "inf2", monkeypatch)
    strict = _endpoint(model, optimization={"accuracy": {"minCosine": 0.99999999}})
    messages: list[str] = []

    artefact = optimise(
        strict, store=tmp_path / "store", models=tmp_path, neuron=tools, budget_seconds=ENOUGH,
        on_progress=lambda event: messages.append(event.message),
    )  # fmt: skip

    manifest = Manifest.load(artefact)
    outcomes = {one.recipe.name: one.outcome for one in manifest.candidates}
    assert outcomes == {
        "onnxruntime-fp32": Outcome.REFERENCE, "neuron-bf16": Outcome.REJECTED, "neuron-fp32": Outcome.CHOSEN,
    }  # fmt: skip
    assert manifest.chosen == manifest.baseline
    assert not manifest.serves_fp32
    assert manifest.chosen.path == f"model/neuron-fp32/{NEURON_FILE}"
    assert (manifest.chosen.plan.streams, manifest.chosen.plan.threads_per_stream, manifest.cores) == (2, 1, 2)
    assert NOT_RUN in manifest.findings[0]
    assert NOT_RUN in messages[-1]
    assert manifest.toolchain["torch-neuronx"] == "2.9.0.2.15.32035"

    folder = artefact / "model" / "neuron-fp32"
    compiled = CompiledModel.model_validate_json((folder / NEURON_FILE).read_bytes())
    assert [(one.batch, one.tokens) for one in compiled.buckets] == [(1, 24)]
    assert (compiled.sdk, compiled.cores_per_model, compiled.requests_per_copy) == ("2.31.1", 1, 2)
    assert "none" in compiled.flags
    assert compiled.fence.max_relative_error == pytest.approx(0.01)
    with np.load(folder / compiled.fence.file) as fence:
        assert fence["input_ids"].shape == fence["attention_mask"].shape
        assert fence["input_ids"].shape[1] <= 24
    assert {f"model/neuron-fp32/{name}" for name in ("b1-t24.pt", NEURON_FILE, "fence.npz")} <= manifest.files.keys()
    assert NOT_RUN in (artefact / "report.html").read_text("utf-8")

    found = optimise(strict, store=tmp_path / "store", models=tmp_path, neuron=tools)
    assert found == artefact
    file = tmp_path / "endpoint.yaml"
    file.write_text(
        json.dumps(
            {
                "apiVersion": API_VERSION,
                "kind": "ModelEndpoint",
                "metadata": {"name": "small"},
                "spec": strict.spec.to_object(),
            }
        )
    )
    ended = run(
        "optimize", file, "--neuron-target", "inf2", "--neuron-python", sys.executable, "--store", tmp_path / "store",
        "--models", tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert f"compiles   for inf2 with torch-neuronx 2.9.0.2.15.32035, neuronx-cc 2.26.6360.0: {NOT_RUN}" in ended.stdout
    assert f"penstock serve {artefact}  (on an instance with Inferentia)" in ended.stdout
    # An artefact for CPUs has another key.
    assert Job.of(strict, store=tmp_path / "store", models=tmp_path, cores=1).key != manifest.key


def test_inf1_fails_when_the_compiler_leaves_the_model_on_the_cpu_and_names_the_unsupported_device(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = _tools(tmp_path, "inf1", monkeypatch, compiler_killed=True)
    endpoint = _endpoint(model, cores=4, optimization={"precisions": ["fp32"]})

    with pytest.raises(NoCandidateWithinBudget, match="left the whole model on the CPU") as error:
        optimise(endpoint, store=tmp_path / "store", models=tmp_path, neuron=tools, budget_seconds=ENOUGH)

    assert "nothing can be served on inf1" in error.value.message
    # The next run finds the fp32 answers, and compiles.
    monkeypatch.setenv("STANDIN_FAULTS", json.dumps({"refuse_pipeline_cores": [4]}))
    manifest = Manifest.load(
        optimise(endpoint, store=tmp_path / "store", models=tmp_path, neuron=tools, budget_seconds=ENOUGH)
    )
    compiled = CompiledModel.model_validate_json(
        (tmp_path / "store" / manifest.key[:16] / manifest.chosen.path).read_bytes()
    )
    assert compiled.cores_per_model == 1  # a pipeline over 4 was refused
    assert manifest.chosen.plan.streams == 4
    assert f"{INF1_UNSUPPORTED}." in manifest.findings


def test_what_cannot_be_compiled_is_refused_before_the_model_is_fetched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = _tools(tmp_path, "inf2", monkeypatch)
    with pytest.raises(SpecError, match="3 NeuronCores are not whole devices"):
        Job.of(_endpoint(model, cores=3), store=tmp_path, models=tmp_path, neuron=tools)
    with pytest.raises(SpecError, match="text-generation is not compiled for inf2"):
        Job.of(_endpoint(model, task="text-generation"), store=tmp_path, models=tmp_path, neuron=tools)


def test_a_budget_that_is_too_small_for_one_shape_has_to_be_raised(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = _tools(tmp_path, "inf2", monkeypatch)
    with pytest.raises(OptimizationError) as error:
        optimise(_endpoint(model), store=tmp_path / "store", models=tmp_path, neuron=tools, budget_seconds=0.001)
    assert "budgetSeconds" in error.value.remedy


def test_rows_for_the_comparison_fit_into_the_shortest_shape_or_are_cut_to_it() -> None:
    rows = [Row([1] * length, [0] * length) for length in (12, 3, 9, 7, 5, 8)]
    assert [row.length for row in fence_rows(rows, 8, None)] == [8, 7, 5, 3]
    long = [Row(list(range(20)), [0] * 20), Row(list(range(30)))]
    assert [(row.ids, row.type_ids) for row in fence_rows(long, 4, None)] == [
        ([0, 1, 2, 3], [0] * 4), ([0, 1, 2, 3], None),
    ]  # fmt: skip
    assert [row.ids for row in fence_rows(long, 4, 99)] == [[0, 1, 2, 99]] * 2


def test_compiling_needs_free_memory_for_the_weights() -> None:
    def free(available: float) -> HostMemory:
        return HostMemory(total=int(64e9), limit=None, available=int(available))

    require_compiler_memory(free(8e9), weights=335_000_000)
    with pytest.raises(OutOfMemory, match=r"compiling needs some 7.5 GB of memory, and 4.0 GB are free"):
        require_compiler_memory(free(4e9), weights=335_000_000)
