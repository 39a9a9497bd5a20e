"""OptimizedModels: the fields that the key depends on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.hardware import NeuronGeneration
from penstock.resources.endpoint import ModelEndpoint, ModelEndpointSpec
from penstock.resources.optimized_model import (
    RESULT_FORMAT,
    OptimizedModel,
    OptimizedModelSpec,
    Phase,
    Toolchain,
    optimized_model_key,
    optimized_model_name,
)

TOOLS = Toolchain(image="localhost/penstock-optimizer:0.1.0", version="0.1.0")
SMALLEST: dict[str, Any] = {"model": "hf://org/name@main", "task": "text-classification"}


def spec(**changes: Any) -> ModelEndpointSpec:
    resource = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "ModelEndpoint",
        "metadata": {"name": "x"},
        "spec": {**SMALLEST, **changes},
    }
    return ModelEndpoint.from_object(resource).spec


def key(tools: Toolchain = TOOLS, texts_digest: str | None = None, **changes: Any) -> str:
    return optimized_model_key(OptimizedModelSpec.of(spec(**changes), tools, texts_digest=texts_digest))


def test_the_key_is_stable() -> None:
    # Another key makes every cluster optimise everything again: change it knowingly.
    assert key() == "c5c00d8e484b76f3fee88e863394ea445164db59eae3dc2d16102faf54ca4873"
    assert optimized_model_name(OptimizedModelSpec.of(spec(), TOOLS)) == key()[:16]


@pytest.mark.parametrize(
    "changes",
    [
        {"cores": 1, "hardwareClass": "any"},
        {"objective": {}},
        {"workload": {"texts": []}},
        {"scaling": {"maxReplicas": 9}},
        {"rollout": {"drainSeconds": 5}},
        {"pod": {"memory": "4Gi"}},
        {"replicas": 7},
        {"suspend": True},
        {"optimization": {"serveWhileOptimizing": False}},
        {"optimization": {"engines": ["openvino", "native", "onnxruntime", "openvino"]}},
        {"optimization": {"budgetSeconds": 600}},
        {"serving": {"caches": {"answersMebibytes": 64}}},
    ],
)
def test_what_the_result_does_not_depend_on_is_not_in_the_key(changes: dict[str, Any]) -> None:
    assert key(**changes) == key()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "hf://org/name@v2"},
        {"task": "zero-shot-classification"},
        {"hardwareClass": "icelake"},
        {"cores": 2},
        {"objective": {"latency": {"p95Milliseconds": 20}}},
        {"workload": {"sequenceLengths": [8]}},
        {"workload": {"textsFrom": {"configMapName": "texts"}}},
        {"optimization": {"mode": "Disabled"}},
        {"optimization": {"engines": ["openvino"]}},
        {"optimization": {"accuracy": {"minAgreement": 0.99}}},
        {"optimization": {"budgetSeconds": 60}},
        {"serving": {"maxInputTokens": 128}},
        {"modelCredentials": {"secretName": "hf"}},
    ],
)
def test_what_the_result_depends_on_is_in_the_key(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()


def test_the_time_budget_is_in_the_spec_and_longer_for_inferentia() -> None:
    compiles = TOOLS.model_copy(update={"target": NeuronGeneration.INF2})

    def seconds(tools: Toolchain, **changes: Any) -> float | None:
        return OptimizedModelSpec.of(spec(**changes), tools).optimization.budget_seconds

    assert seconds(TOOLS) == 600
    assert seconds(compiles) == 7200
    assert seconds(compiles, optimization={"budgetSeconds": 90}) == 90


def test_the_format_of_the_result_is_in_the_spec_but_not_in_the_key() -> None:
    tools = TOOLS.model_copy(update={"format": RESULT_FORMAT})
    assert key(tools) == key()
    assert OptimizedModelSpec.of(spec(), tools).to_object()["toolchain"]["format"] == RESULT_FORMAT
    # Results up to 0.2 have no such field.
    assert Toolchain.model_validate({"image": "x", "version": "0.2.0"}).format == 1


def test_tools_and_the_content_of_a_config_map_are_in_the_key() -> None:
    texts = {"textsFrom": {"configMapName": "texts"}}
    keys = {
        key(workload=texts),
        key(workload=texts, texts_digest=f"sha256:{'0' * 64}"),
        key(workload=texts, texts_digest=f"sha256:{'1' * 64}"),
        key(TOOLS.model_copy(update={"version": "0.2.0"}), workload=texts),
        key(TOOLS.model_copy(update={"image": "other"}), workload=texts),
    }
    assert len(keys) == 5


CHANGES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "cores": st.integers(1, 256),
        "hardwareClass": st.sampled_from(["any", "icelake", "inf1"]),
        "objective": st.fixed_dictionaries(
            {}, optional={"latency": st.builds(lambda v: {"p95Milliseconds": v}, st.floats(0.1, 1000))}
        ),
        "workload": st.fixed_dictionaries(
            {},
            optional={
                "sequenceLengths": st.lists(st.integers(1, 512), max_size=4),
                "texts": st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=3),
            },
        ),
        "optimization": st.fixed_dictionaries(
            {}, optional={"budgetSeconds": st.floats(1, 1000), "engines": st.just(["openvino"])}
        ),
    },
)


@given(CHANGES)
def test_a_spec_has_the_same_key_after_the_api_server_had_it(changes: dict[str, Any]) -> None:
    made = OptimizedModelSpec.of(spec(**changes), TOOLS)
    stored = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "OptimizedModel",
        "metadata": {"name": optimized_model_name(made), "uid": "x"},
        "spec": json.loads(json.dumps(made.to_object(), sort_keys=True)),
    }
    assert OptimizedModel.from_object(stored).spec == made
    assert optimized_model_key(OptimizedModel.from_object(stored).spec) == optimized_model_key(made)


@given(CHANGES, CHANGES)
def test_two_specs_have_one_key_only_when_they_are_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    specs = [OptimizedModelSpec.of(spec(**changes), TOOLS) for changes in (one, other)]
    assert (specs[0] == specs[1]) == (optimized_model_key(specs[0]) == optimized_model_key(specs[1]))


def test_the_optimiser_parses_an_optimized_model_as_an_endpoint() -> None:
    asked = spec(cores=4, serving={"maxInputTokens": 128}, scaling={"maxReplicas": 9}, replicas=3)
    back = OptimizedModelSpec.of(asked, TOOLS).endpoint_spec()
    assert (back.model, back.cores, back.serving.max_input_tokens) == (asked.model, 4, 128)
    assert (back.scaling.max_replicas, back.replicas) == (4, 1)


def test_a_pinned_artefact_needs_no_optimized_model() -> None:
    resource = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "OptimizedModel",
        "metadata": {"name": "x"},
        "spec": {
            **SMALLEST,
            "toolchain": {"image": "x", "version": "1"},
            "optimization": {"mode": "Pinned", "artefact": f"sha256:{'0' * 64}"},
        },
    }
    with pytest.raises(SpecError, match="mode is Pinned, which needs no optimisation"):
        OptimizedModel.from_object(resource)


def test_a_status_of_a_newer_version_can_be_read() -> None:
    resource = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "OptimizedModel",
        "metadata": {"name": "x"},
        "spec": {**SMALLEST, "toolchain": {"image": "x", "version": "1"}},
        "status": {"phase": "Optimizing", "progress": "7/23", "fieldOfTomorrow": {"a": 1}},
    }
    status = OptimizedModel.from_object(resource).status
    assert (status.phase, status.progress, status.artefact) == (Phase.OPTIMIZING, "7/23", None)
