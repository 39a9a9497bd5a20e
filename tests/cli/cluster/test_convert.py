"""`penstock convert`: InferenceServices of KServe become ModelEndpoints, and nothing is left out without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.resources.endpoint import ModelEndpoint
from penstock_cli.cluster.convert import convert
from tests.cli.endpoints import invoke
from tests.examples import examples

HUGGING_FACE = """
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: emotion
  namespace: team-a
  labels: {team: ml}
  annotations: {serving.kserve.io/deploymentMode: Standard}
spec:
  predictor:
    minReplicas: 0
    maxReplicas: 6
    scaleTarget: 10
    scaleMetric: concurrency
    canaryTrafficPercent: 10
    serviceAccountName: reader
    tolerations:
      - {key: spot, operator: Exists}
    model:
      modelFormat: {name: huggingface}
      protocolVersion: v2
      runtime: kserve-huggingfaceserver
      args:
        - --model_name=emotion
        - --model_id=org/emotion
        - --model_revision=abc123
        - --task=sequence_classification
        - --max_length=256
        - --disable_lower_case
      env:
        - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf, key: token}}}
      resources:
        requests: {cpu: "1", memory: 2Gi}
        limits: {cpu: 1500m, memory: 4Gi}
  transformer:
    containers:
      - {name: steps, image: registry.example/steps}
"""


def service(**model: Any) -> dict[str, Any]:
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": "emotion"},
        "spec": {"predictor": {"model": {"modelFormat": {"name": "huggingface"}, **model}}},
    }


def test_a_service_of_the_hugging_face_server_is_converted_and_the_rest_is_listed() -> None:
    made, left = convert(yaml.safe_load(HUGGING_FACE))

    assert made["metadata"] == {"name": "emotion", "namespace": "team-a", "labels": {"team": "ml"}}
    assert made["spec"] == {
        "model": "hf://org/emotion@abc123",
        "task": "text-classification",
        "cores": 2,
        "serving": {"maxInputTokens": 256},
        "scaling": {"minReplicas": 0, "maxReplicas": 6},
        "pod": {"tolerations": [{"key": "spot", "operator": "Exists"}], "serviceAccountName": "reader"},
    }
    assert [line.partition(":")[0] for line in left] == [
        "the argument --disable_lower_case",
        "metadata.annotations.serving.kserve.io/deploymentMode",
        "spec.predictor.scaleTarget",
        "spec.predictor.scaleMetric",
        "spec.predictor.canaryTrafficPercent",
        "spec.predictor.model.runtime",
        "spec.predictor.model.env",
        "spec.predictor.model.resources",
        "spec.transformer",
    ]


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("hf://org/name", "hf://org/name"),
        ("hf://org/name:abc", "hf://org/name@abc"),
        ("s3://bucket/path", "s3://bucket/path"),
        ("gs://bucket/path", "gs://bucket/path"),
        ("pvc://claim/path", "pvc://claim/path"),
        ("https://account.blob.core.windows.net/container/path", "az://container/path"),
    ],
)
def test_places_of_models_are_translated(uri: str, expected: str) -> None:
    made, left = convert(service(storageUri=uri), task="fill-mask")

    assert made["spec"]["model"] == expected
    assert left == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (service(), "there is no model"),
        (service(storageUri="https://example.com/model.tar.gz"), "which Penstock does not load"),
        (service(args=["--model_id=org/llm", "--task=text_generation"]), "text_generation is not one of Penstock"),
        (service(storageUri="s3://bucket/model"), "does not state the task"),
        ({**service(), "kind": "ServingRuntime"}, "no InferenceService"),
        (service(args=["--model_id=../../etc", "--task=fill_mask"]), "model"),
    ],
)
def test_what_penstock_cannot_serve_is_an_error_with_the_field(value: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        convert(value)

    assert raised.value.field


def test_without_cpus_one_core_is_asked_for() -> None:
    made, _ = convert(service(args=["--model_id", "org/name", "--task", "text_embedding"]))

    assert made["spec"] == {"model": "hf://org/name", "task": "feature-extraction", "cores": 1}


def test_the_command_writes_valid_endpoints_below_a_comment_with_what_was_left_out(tmp_path: Path) -> None:
    file = tmp_path / "services.yaml"
    simple = yaml.safe_dump(service(storageUri="hf://org/name"))
    file.write_text(f"{HUGGING_FACE}\n---\nkind: ConfigMap\n---\n{simple}")
    output = invoke("convert", file, "--task", "text-classification").output
    first, second = output.split("---\n")

    assert first.startswith("# Left out:\n# - the argument --disable_lower_case\n")
    assert "# - spec.predictor.model.env: variables of all pods are extraEnv of the chart\n" in first
    assert second.startswith("# Nothing was left out.\n")
    assert [ModelEndpoint.from_yaml(part).metadata.name for part in (first, second)] == ["emotion", "emotion"]


@pytest.mark.parametrize(("text", "message"), [("a: [", "is not YAML"), ("kind: Pod", "has no InferenceService")])
def test_other_files_are_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "services.yaml"
    file.write_text(text)
    run = invoke("convert", file)

    assert run.exit_code == 1
    assert message in run.output


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2000) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["predictor", "model", "args", "storageUri", "resources", "limits", "cpu", "x"]), inner
        )
    ),
    max_leaves=12,
)


@settings(max_examples=examples(200), deadline=None)
@given(spec=VALUES, metadata=VALUES)
def test_any_object_is_converted_or_refused_with_an_error_of_penstock(spec: Any, metadata: Any) -> None:
    value = {"kind": "InferenceService", "metadata": metadata, "spec": spec}
    try:
        made, _ = convert(value, task="fill-mask")
    except SpecError:
        return
    ModelEndpoint.from_object(made)
