"""The same key means the same result: whatever changes the result changes the key, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.hardware import Isa
from penstock.resources.endpoint import ModelEndpointSpec
from penstock_optimizer.job.job import optimization_key, toolchain
from penstock_runtime.engines.native.library import VARIABLE

SPEC: dict[str, Any] = {"model": "file:///m", "task": "feature-extraction", "cores": 2}


def key(
    spec: dict[str, Any] | None = None,
    *,
    digest: str = "d",
    isa: Isa = Isa.AVX2,
    cores: int = 2,
    tools: dict[str, str] | None = None,
) -> str:
    read = ModelEndpointSpec.model_validate({**SPEC, **(spec or {})})
    return optimization_key(
        read, model_digest=digest, isa=isa, cores=cores, tools=tools if tools is not None else {"onnxruntime": "1"}
    )


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"task": "sentence-similarity"}},
        {"spec": {"objective": {"latency": {"p95Milliseconds": 20}}}},
        {"spec": {"objective": {"throughput": {"requestsPerSecond": 20}}}},
        {"spec": {"workload": {"sequenceLengths": [8]}}},
        {"spec": {"workload": {"texts": ["a"]}}},
        {"spec": {"optimization": {"mode": "Disabled"}}},
        {"spec": {"optimization": {"engines": ["openvino"]}}},
        {"spec": {"optimization": {"precisions": ["fp32"]}}},
        {"spec": {"optimization": {"accuracy": {"minCosine": 0.9}}}},
        {"spec": {"optimization": {"whenNoCandidate": "Fail"}}},
        {"spec": {"serving": {"maxInputTokens": 64}}},
        {"digest": "e"},
        {"isa": Isa.AMX},
        {"cores": 4},
        {"tools": {"onnxruntime": "2"}},
        {"tools": {}},
    ],
)
def test_settings_that_change_the_result_change_the_key(change: dict[str, Any]) -> None:
    assert key(**change) != key()


@pytest.mark.parametrize(
    "change",
    [
        {"scaling": {"minReplicas": 2, "maxReplicas": 3}},
        {"hardwareClass": "icelake"},
        {"optimization": {"budgetSeconds": 5}},
        {"serving": {"truncate": False}},
        {"model": "file:///other/place"},
        {"optimization": {"engines": ["openvino", "native", "onnxruntime"]}},
    ],
)
def test_settings_that_do_not_change_the_result_keep_the_key(change: dict[str, Any]) -> None:
    assert key(change) == key()


def test_the_toolchain_has_the_versions_of_penstock_and_the_engines() -> None:
    assert {"penstock", "onnxruntime", "openvino", "tokenizers"} <= set(toolchain())


def test_a_native_engine_compiled_later_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libpenstock_native.so"
    monkeypatch.setenv(VARIABLE, str(library))
    without = toolchain()

    library.touch()

    assert {name for name in toolchain() if name not in without} == {"native"}
    assert key(tools=toolchain()) != key(tools=without)
