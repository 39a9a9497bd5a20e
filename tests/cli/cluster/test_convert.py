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
from penstock.resources.files.reading import from_yaml
from penstock.resources.files.yaml_documents import read_documents
from penstock_cli.cluster.convert import convert, document
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


def test_what_kubectl_adds_to_the_object_is_not_listed() -> None:
    value = yaml.safe_load(HUGGING_FACE)
    value["metadata"] |= {
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"},
        "creationTimestamp": "2026-03-01T10:00:00Z",
        "generation": 3,
        "resourceVersion": "12345",
        "uid": "2b9c",
    }
    value["status"] = {"url": "http://emotion.team-a", "conditions": [{"type": "Ready", "status": "True"}]}
    _, left = convert(value)

    assert [line for line in left if line.startswith(("metadata", "status"))] == []


@pytest.mark.parametrize(
    "args",
    [
        ["--model_id=HuggingFaceTB/SmolLM2-135M-Instruct", "--task=text_generation"],
        ["--model-id", "HuggingFaceTB/SmolLM2-135M-Instruct", "--task", "text_generation"],
    ],
)
def test_values_of_arguments_keep_their_hyphens(args: list[str]) -> None:
    made, _ = convert(service(args=args))

    assert made["spec"]["model"] == "hf://HuggingFaceTB/SmolLM2-135M-Instruct"
    assert made["spec"]["task"] == "text-generation"


def test_a_limit_of_tokens_that_is_no_number_is_listed() -> None:
    made, left = convert(service(args=["--model_id=a/b", "--task=fill_mask", "--max_length=auto", "--max_model_len=9"]))

    assert made["spec"]["serving"] == {"maxInputTokens": 9}
    assert left == ["the argument --max_length"]


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("hf://org/name", "hf://org/name"),
        ("hf://org/name:abc", "hf://org/name@abc"),
        ("s3://bucket/path", "s3://bucket/path"),
        ("gs://bucket/path", "gs://bucket/path"),
        ("pvc://claim/path", "pvc://claim/path"),
    ],
)
def test_places_of_models_are_translated(uri: str, expected: str) -> None:
    made, left = convert(service(storageUri=uri), task="fill-mask")

    assert made["spec"]["model"] == expected
    assert left == []


def test_a_modelcar_keeps_its_address() -> None:
    made, left = convert(service(storageUri="oci://ghcr.io/org/model:v1"), task="fill-mask")

    assert (made["spec"]["model"], left) == ("oci://ghcr.io/org/model:v1", [])


def test_the_account_of_a_blob_has_no_place_in_the_address_and_is_listed() -> None:
    made, left = convert(service(storageUri="https://account.blob.core.windows.net/container/path"), task="fill-mask")

    assert made["spec"]["model"] == "az://container/path"
    assert left == ["the storage account account: name it in the Secret of spec.modelCredentials"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (service(), "there is no model in spec.predictor.model"),
        ({**service(), "spec": {"predictor": {"containers": [{}]}}}, r"\(spec.predictor has containers\)"),
        (service(storageUri="https://example.com/model.tar.gz"), "which Penstock does not load"),
        (service(args=["--model_id=org/t5", "--task=text2text_generation"]), "not have the task text2text_generation"),
        (service(args="--model_id=org/x --task=fill_mask"), "spec.predictor.model.args is .*, and no list"),
        (
            service(args=["--model_id=a/b", "--task=fill_mask"], resources={"limits": {"cpu": "lots"}}),
            "spec.predictor.model.resources.limits.cpu is 'lots'",
        ),
        (
            {
                **service(),
                "spec": {
                    "predictor": {
                        "minReplicas": "9",
                        "model": {"args": ["--model_id=a/b", "--task=fill_mask"]},
                    }
                },
            },
            "spec.scaling.minReplicas: must be a whole number",
        ),
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
    assert [from_yaml(ModelEndpoint, part).metadata.name for part in (first, second)] == ["emotion", "emotion"]


def test_services_in_a_list_of_kubectl_are_converted(tmp_path: Path) -> None:
    file = tmp_path / "services.yaml"
    services = [service(storageUri=f"hf://org/{name}") for name in ("one", "two")]
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": services}))
    parts = invoke("convert", file, "--task", "fill-mask").output.split("---\n")

    assert [from_yaml(ModelEndpoint, part).spec.model for part in parts] == ["hf://org/one", "hf://org/two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: [\n", "line 2, column 1: not YAML"),
        (b"kind: Pod", "has no InferenceService"),
        (b'a: "\xff"', "is not UTF-8 text"),
        (b"kind: InferenceService", "InferenceService without a name: there is no model"),
        (
            b"{kind: InferenceService, metadata: {name: ner}, spec: {predictor: {model: {storageUri: 's3://b/m'}}}}",
            "services.yaml: InferenceService ner: the InferenceService does not state the task",
        ),
    ],
)
def test_other_files_are_refused_in_one_sentence_with_the_place(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "services.yaml"
    file.write_bytes(text)
    run = invoke("convert", file)

    assert run.exit_code == 1
    assert message in run.output
    assert len(run.output.splitlines()) == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2000) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "cpu", "x"]), inner),
    max_leaves=12,
)
PATHS = [
    "metadata",
    "metadata.name",
    "metadata.labels",
    "metadata.annotations",
    "spec",
    "spec.predictor",
    "spec.predictor.minReplicas",
    "spec.predictor.maxReplicas",
    "spec.predictor.tolerations",
    "spec.predictor.model",
    "spec.predictor.model.args",
    "spec.predictor.model.storageUri",
    "spec.predictor.model.resources",
    "spec.predictor.model.resources.limits",
    "spec.predictor.model.resources.limits.cpu",
    "spec.predictor.model.modelFormat",
]


def replaced(value: dict[str, Any], path: str, by: Any) -> dict[str, Any]:
    """A copy of a nested object with another value at one place."""
    first, _, rest = path.partition(".")
    return value | {first: replaced(value[first], rest, by) if rest else by}


@settings(max_examples=examples(200), deadline=None)
@given(path=st.sampled_from(PATHS), by=VALUES)
def test_any_object_is_converted_or_refused_with_an_error_of_penstock(path: str, by: Any) -> None:
    start = service(storageUri="hf://org/name", args=["--task=fill_mask"], resources={"limits": {"cpu": 1}})
    try:
        made, _ = convert(replaced(start, path, by), task="fill-mask")
    except SpecError:
        return
    ModelEndpoint.from_object(made)


@given(
    label=st.sampled_from(["12e4567", "y", "0o17", "1_0", "1:30", ".5", "~", "v1"])
    | st.text("0123456789e._", min_size=1)
)
def test_labels_that_look_like_numbers_stay_texts(label: str) -> None:
    value = service(storageUri="hf://org/name")
    value["metadata"]["labels"] = {"build": label}
    made, left = convert(value, task="fill-mask")

    assert read_documents(document(made, left), "the output") == [made]
