"""ModelEndpoint files: accepted ones, and the errors about others."""

from __future__ import annotations

import copy
import json
import typing
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from penstock.errors import SpecError
from penstock.manifest import objective_text
from penstock.recipe import EngineName, Precision
from penstock.resources.core import ModelSource, Scheme
from penstock.resources.endpoint import (
    Latency,
    ModelEndpoint,
    ModelEndpointSpec,
    NoCandidate,
    Objective,
    OptimizationMode,
    Throughput,
    TokenTime,
    Workload,
)
from penstock.resources.files.reading import from_file, from_yaml
from penstock.resources.files.yaml_documents import Loader
from penstock.tasks import TaskName

SMALLEST: dict[str, Any] = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "ModelEndpoint",
    "metadata": {"name": "emotion"},
    "spec": {"model": "hf://org/name", "task": "text-classification"},
}


def changed(path: str, value: object) -> dict[str, Any]:
    """The smallest endpoint with one dotted field set."""
    resource = copy.deepcopy(SMALLEST)
    *above, last = path.split(".")
    place = resource
    for part in above:
        place = place.setdefault(part, {})
    place[last] = value
    return resource


def problem(resource: object) -> SpecError:
    with pytest.raises(SpecError) as caught:
        from_yaml(ModelEndpoint, yaml.safe_dump(resource), origin="a.yaml")
    return caught.value


def test_the_smallest_endpoint_has_the_promised_defaults() -> None:
    endpoint = ModelEndpoint.from_object(SMALLEST)
    spec = endpoint.spec
    assert (endpoint.metadata.name, spec.task, spec.hardware_class, spec.cores) == (
        "emotion", TaskName.TEXT_CLASSIFICATION, "any", 1,
    )  # fmt: skip
    assert spec.source == ModelSource(Scheme.HF, "org/name", "main")
    assert spec.objective == Objective()
    assert (spec.workload.sequence_lengths, spec.workload.texts) == ((), ())
    optimization = spec.optimization
    assert (optimization.mode, optimization.when_no_candidate) == (OptimizationMode.AUTO, NoCandidate.SERVE_FP32)
    assert (optimization.engines, optimization.precisions) == (tuple(EngineName), tuple(Precision))
    assert (optimization.accuracy.min_cosine, optimization.accuracy.min_agreement) == (None, None)
    assert (optimization.seconds(compiles=False), optimization.seconds(compiles=True)) == (600, 7200)
    assert optimization.model_copy(update={"budget_seconds": 90.0}).seconds(compiles=True) == 90
    assert (spec.serving.max_input_tokens, spec.serving.truncate) == (None, True)
    assert (spec.scaling.min_replicas, spec.scaling.max_replicas) == (1, 4)


def test_the_example_is_an_endpoint() -> None:
    endpoint = from_file(ModelEndpoint, Path(__file__).parents[3] / "examples" / "sentence-embedding.yaml")
    assert endpoint.spec.source.scheme is Scheme.PKG
    assert endpoint.spec.objective.latency == Latency(p95_milliseconds=50)


FULL = """
# Other resources may be in the same file, as for kubectl.
apiVersion: v1
kind: ConfigMap
metadata: {name: texts}
---
apiVersion: penstock.dev/v1alpha1
kind: ModelEndpoint
metadata:
  name: full
  namespace: search
  labels: {team: search}
  annotations:
  uid: 0123
spec:
  model: s3://models/full/
  task: feature-extraction
  hardwareClass: icelake
  cores: 4
  objective: {latency: {p95Milliseconds: 20}, throughput: {requestsPerSecond: 200.5}}
  workload: {sequenceLengths: [8, 512], texts: [hello, "2026-11-21", 'on']}
  optimization:
    mode: Disabled
    engines: [openvino]
    precisions: [fp32, int8-static]
    accuracy: {minCosine: 0.99, minAgreement: 1}
    whenNoCandidate: Fail
    budgetSeconds: 60
  serving: {maxInputTokens: 128, truncate: false}
  scaling: {minReplicas: 0, maxReplicas: 8}
---
"""


def test_every_field_is_read_from_yaml() -> None:
    endpoint = from_yaml(ModelEndpoint, FULL)
    spec = endpoint.spec
    assert (endpoint.metadata.namespace, endpoint.metadata.labels) == ("search", {"team": "search"})
    assert endpoint.metadata.annotations == {}
    assert spec.objective == Objective(
        latency=Latency(p95_milliseconds=20), throughput=Throughput(requests_per_second=200.5)
    )
    assert spec.workload.sequence_lengths == (8, 512)
    assert spec.workload.texts == ("hello", "2026-11-21", "on")
    assert spec.optimization.engines == (EngineName.OPENVINO,)
    assert spec.optimization.precisions == (Precision.FP32, Precision.INT8_STATIC)
    assert spec.optimization.when_no_candidate is NoCandidate.FAIL
    assert spec.serving.truncate is False
    assert str(spec.source) == "s3://models/full"


@pytest.mark.parametrize(
    ("objective", "summary"),
    [
        (Objective(), "best of latency and throughput"),
        (Objective(latency=Latency(p95_milliseconds=20)), "p95 within 20 ms"),
        (Objective(throughput=Throughput(requests_per_second=12.5)), "12.5 requests/s"),
        (
            Objective(
                time_to_first_token=TokenTime(p95_milliseconds=300),
                time_per_output_token=TokenTime(p95_milliseconds=40),
                tokens_per_second=90,
            ),
            "first token within 300 ms and 40 ms per token and 90 tokens/s",
        ),
        (
            Objective(latency=Latency(p95_milliseconds=20), throughput=Throughput(requests_per_second=100)),
            "p95 within 20 ms and 100 requests/s",
        ),
    ],
)
def test_objectives_are_described_in_one_line(objective: Objective, summary: str) -> None:
    assert objective_text(objective) == summary


@pytest.mark.parametrize("text", ["prompt,output\n128,64\n512,32\n", "128,64\n512,32"])
def test_lengths_of_requests_are_read_from_csv(text: str) -> None:
    workload = Workload(lengths=text)
    assert workload.request_lengths == ((128, 64), (512, 32))
    assert Workload().request_lengths == ()


def test_null_counts_as_left_out_as_in_kubernetes() -> None:
    assert ModelEndpoint.from_object(changed("spec.objective", None)).spec.objective == Objective()
    assert problem(changed("spec.task", None)).message == "spec.task is missing"


BAD: list[tuple[str, object, str]] = [
    ("apiVersion", "penstock.dev/v1", "apiVersion is 'penstock.dev/v1'. Write penstock.dev/v1alpha1"),
    ("metadata.name", "My_Model", "metadata.name: 'My_Model' is not a DNS label. Use at most 63 lower"),
    ("metadata.name", "My_Model", "-case letters, digits and '-', a letter first and no '-' last, such as my-model"),
    ("metadata.name", "7b-model-", "such as b-model"),
    ("metadata.name", "a" * 64, "is not a DNS label"),
    ("metadata.name", "", "is not a DNS label"),
    ("metadata.name", "---", "and no '-' last"),
    ("metadata.name", 12, "metadata.name: must be text (given: 12). Put it in quotes"),
    ("metadata.labels", {"version": 3}, "metadata.labels.version: must be text (given: 3). Put it in quotes"),
    ("metadata", [], "metadata: must hold fields of its own. Indent its fields below it"),
    ("spec.model", "org/name", "spec.model: 'org/name' is not a model source. Did you mean hf://org/name?"),
    ("spec.model", 3, "spec.model: must be text (given: 3)"),
    ("spec.task", "text-clasification", "Did you mean text-classification?"),
    ("spec.task", "embeddings", "Did you mean feature-extraction?"),
    ("spec.task", "NER", "Did you mean token-classification?"),
    ("spec.task", "rerank", "Did you mean text-ranking?"),
    ("spec.task", "dance", "text-generation. Write one of them"),
    ("spec.task", 7, "spec.task: 7 is not one of feature-extraction, "),
    ("spec.cores", "2", "spec.cores: must be a whole number (given: '2'). Write it without quotes"),
    ("spec.cores", "two", "spec.cores: must be a whole number (given: 'two'). Write the number alone"),
    ("spec.cores", 1.5, "spec.cores: must be a whole number (given: 1.5)"),
    ("spec.cores", True, "spec.cores: must be a whole number (given: true)"),
    ("spec.cores", 0, "spec.cores: must be at least 1 (given: 0)"),
    ("spec.cores", 257, "spec.cores: must be at most 256 (given: 257)"),
    ("spec.exposure", {"host": "a.example.com"}, "exposure needs either ingress or httpRoute: write one of them"),
    (
        "spec.exposure",
        {"host": "a.b", "ingress": {}, "httpRoute": {"parentRefs": [{"name": "g"}]}},
        "exposure needs either ingress or httpRoute",
    ),
    (
        "spec.exposure",
        {"host": "a.b", "path": "/v1", "ingress": {}},
        "path is /v1, and an Ingress cannot remove a prefix: write path: / or use httpRoute",
    ),
    ("spec.exposure", {"host": "*.b", "ingress": {}}, "'*.b' is not a host name. Write a full DNS name in lower case"),
    ("spec.exposure", {"host": "10.0.0.1", "ingress": {}}, "'10.0.0.1' is not a host name"),
    ("spec.exposure", {"host": "a.b", "path": "/x/../y", "ingress": {}}, "'/x/../y' is not a path. Write / or"),
    ("spec.hardwareClass", "", "spec.hardwareClass: must not be empty (given: '')"),
    ("spec.hardware_class", "any", "spec.hardware_class: there is no such field. Did you mean hardwareClass?"),
    ("spec.corse", 2, "spec.corse: there is no such field. Did you mean cores?"),
    ("spec.burst", 2, "spec.burst: there is no such field. Fields here: model, task, hardwareClass, cores, "),
    ("spec.minReplicas", 2, "spec.minReplicas: there is no such field. Did you mean spec.scaling.minReplicas?"),
    ("spec.latency", {}, "spec.latency: there is no such field. Did you mean spec.objective.latency?"),
    ("spec.objective.latency", {"p95Milliseconds": "20ms"}, "(given: '20ms'). Write the number alone: the unit is in "),
    ("spec.objective.latency", {"p95Milliseconds": 0}, "p95Milliseconds: must be over 0 (given: 0)"),
    ("spec.objective.latency", {}, "spec.objective.latency.p95Milliseconds is missing. Add it"),
    ("spec.objective.throughput", 3, "spec.objective.throughput: must hold fields of its own (given: 3)"),
    (
        "spec.objective",
        {"timeToFirstToken": {"p95Milliseconds": 300}},
        "objective.timeToFirstToken, timePerOutputToken and tokensPerSecond are for text-generation, and task is ",
    ),
    ("spec.objective", {"timePerOutputToken": {"p95Milliseconds": 40}}, "write objective.latency or objective."),
    ("spec.objective", {"tokensPerSecond": 90}, "write objective.latency or objective.throughput"),
    ("spec.objective.tokensPerSecond", 0, "spec.objective.tokensPerSecond: must be over 0 (given: 0)"),
    ("spec.objective.timeToFirstToken", {}, "spec.objective.timeToFirstToken.p95Milliseconds is missing. Add it"),
    ("spec.workload", {"lengths": "8,8"}, "workload.lengths are for text-generation, and task is "),
    ("spec.workload.lengths", "8;8", "'8;8' is not a list of request lengths. Write one request on each line: "),
    ("spec.workload.lengths", "8,8\n9,0", "is not a list of request lengths. Write one request on each line: "),
    ("spec.workload", {"lengths": "8,8", "sequenceLengths": [8]}, "lengths and sequenceLengths are both given: keep"),
    ("spec.workload.sequenceLengths", [8, 0], "spec.workload.sequenceLengths[1]: must be at least 1 (given: 0)"),
    ("spec.workload.sequenceLengths", 8, "spec.workload.sequenceLengths: must be a list (given: 8). Start each entry"),
    ("spec.workload.texts", [""], "spec.workload.texts[0]: must not be empty"),
    ("spec.workload.texts", [True], "spec.workload.texts[0]: must be text (given: true). Put it in quotes"),
    ("spec.optimization.mode", False, "mode: false is not one of Auto, Disabled, Pinned. Did you mean Disabled?"),
    ("spec.optimization.mode", "Off", "Did you mean Disabled?"),
    ("spec.optimization.mode", "auto", "Did you mean Auto?"),
    ("spec.optimization.mode", True, "Write one of them in quotes (YAML reads on, off, yes and no as booleans)"),
    ("spec.optimization.engines", [], "spec.optimization.engines: must have at least 1 entry"),
    (
        "spec.optimization.engines", ["onnx"],
        "'onnx' is not one of onnxruntime, openvino, native, neuron. Did you mean onnxr",
    ),
    ("spec.optimization.precisions", ["float32"], "Did you mean fp32?"),
    ("spec.optimization.accuracy.minCosine", 1.5, "minCosine: must be at most 1 (given: 1.5)"),
    ("spec.optimization.budgetSeconds", "10m", "must be a number (given: '10m'). Write the number alone"),
    ("spec.serving.truncate", "yes", "spec.serving.truncate: must be true or false (given: 'yes')"),
    ("spec.scaling", {"minReplicas": 4, "maxReplicas": 2},
     "spec.scaling: minReplicas 4 is over maxReplicas 2: raise maxReplicas or lower minReplicas"),
    ("extra", 1, "extra: there is no such field. Fields here: apiVersion, kind, metadata, spec, status"),
    ("spec", None, "spec is missing. Add it (docs/reference/model-endpoint.md lists the fields)"),
    ("metadata", None, "metadata is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "words"), BAD)
def test_the_error_about_a_mistake_has_its_field_and_a_remedy(path: str, value: object, words: str) -> None:
    error = problem(changed(path, value))
    assert words in str(error)
    assert len(error.problems) == 1
    assert error.field.startswith(path.rpartition(".")[0])


def test_a_long_value_is_shown_in_part() -> None:
    assert "(given: 'xxx" in str(problem(changed("spec.cores", "x" * 5000)))
    assert len(str(problem(changed("spec.cores", "x" * 5000)))) < 200


def test_one_error_lists_all_mistakes() -> None:
    resource = changed("spec.cores", 0)
    resource["spec"]["task"] = "embeddings"
    resource["metadata"]["name"] = "A B"
    error = problem(resource)
    assert [one.field for one in error.problems] == ["metadata.name", "spec.task", "spec.cores"]
    assert error.field == "metadata.name"
    lines = str(error).splitlines()
    assert lines[0] == "a.yaml has 3 problems:"
    assert lines[3] == "  spec.cores: must be at least 1 (given: 0)"


def test_rules_over_several_fields_are_all_listed() -> None:
    resource = changed("spec.gateway", {"mode": "Never"})
    resource["spec"] |= {"rollout": {"canary": {}}, "workload": {"lengths": "1,2"}}
    lines = str(problem(resource)).splitlines()

    assert lines[0] == "a.yaml has 2 problems:"
    assert lines[1].startswith("  spec: workload.lengths are for text-generation, and task is ")
    assert lines[2].startswith("  spec: rollout.canary needs a gateway")


def test_a_short_form_of_a_field_is_recognised() -> None:
    error = problem(changed("spec.objective.latency.p95", 2))
    assert [one.remedy for one in error.problems] == [
        "Add it (docs/reference/model-endpoint.md lists the fields)",
        "Did you mean p95Milliseconds?",
    ]


def test_a_list_whose_entries_are_wrong_is_not_called_too_short_as_well() -> None:
    assert len(problem(changed("spec.optimization.precisions", ["float32", 3])).problems) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a.yaml holds nothing, and no ModelEndpoint. Start it with `apiVersion: penstock.dev/v1alpha1`"),
        ("---\n---\n", "a.yaml holds nothing"),
        ("kind: Deployment", "a.yaml holds Deployment, and no ModelEndpoint"),
        ("kind: ModelEndpont", "a.yaml: kind is 'ModelEndpont'. Write kind: ModelEndpoint"),
        ("kind: modelendpoint", "a.yaml: kind is 'modelendpoint'. Write kind: ModelEndpoint"),
        ("- 1\n- 2", "a.yaml holds something without a kind"),
        ("kind: [1]", "a.yaml holds something without a kind"),
        ("kind: ModelEndpoint\n---\nkind: ModelEndpoint", "a.yaml holds 2 ModelEndpoints. Keep one in each file"),
        ("a: b: c", "a.yaml, line 1, column 5: not YAML: mapping values are not allowed here"),
        ("a:\n\t- x", "a.yaml, line 2, column 1: not YAML: found character '\\t' that cannot start any token"),
        ("kind: ModelEndpoint\nkind: ModelEndpoint", "a.yaml, line 2: kind is there twice. Remove one of the two"),
        ("a: {b: 1, b: 2}", "a.yaml, line 1: b is there twice"),
        ("yes: 1", "the key True is not text. Put it in quotes"),
        ("a:\n  1: x", "the key 1 below a is not text"),
        ("a: !!binary aGk=", "a: bytes is no value that JSON knows"),
        ("a: .nan", "a: nan is no number in JSON. Write a finite number"),
        ("a: .inf", "a: inf is no number in JSON"),
        (
            "kind: ModelEndpoint\nspec: {optimization: {budgetSeconds: .inf}}",
            "spec.optimization.budgetSeconds: inf is no",
        ),
        ("kind: ModelEndpoint\nspec: {scaling: {headroom: -.INF}}", "spec.scaling.headroom: -inf is no number"),
        ('a: "\\ud800"', "a: half of a character (a lone surrogate)"),
        ("a: !!timestamp x", "a.yaml is not YAML that can be read"),
        ("a: !!bool x", "a.yaml, line 1, column 4: not YAML: 'x' is no boolean. Check"),
        ("a: !!python/object:os.system {}", "could not determine a constructor for the tag"),
        ("&a [*a]", "a.yaml is nested or repeated beyond measure"),
        ("[" * 300, "a.yaml"),
        ("a: " + "[" * 200 + "]" * 200, "a.yaml is nested or repeated beyond measure"),
        ("\x00", "a.yaml is not YAML that can be read: unacceptable character"),
        ("#" * 1_500_001, "a.yaml is longer than 1,500,000 characters"),
    ],
)
def test_a_file_without_exactly_one_endpoint_is_an_error(text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_yaml(ModelEndpoint, text, origin="a.yaml")
    assert words in str(caught.value)


def test_nested_aliases_that_expand_to_billions_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(SpecError, match="repeated beyond measure"):
        from_yaml(ModelEndpoint, "\n".join(lines))


def test_merged_anchors_may_be_overridden_as_often_as_they_are_used() -> None:
    text = """
        x-base: {a: &base {minReplicas: 1, maxReplicas: 2}, b: &more {<<: *base, maxReplicas: 3}}
        x-used: {c: {<<: *more, maxReplicas: 4}}
    """
    with pytest.raises(SpecError, match="holds something without a kind, and no ModelEndpoint"):
        from_yaml(ModelEndpoint, text)


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file or directory"):
        from_file(ModelEndpoint, tmp_path / "missing.yaml")
    with pytest.raises(SpecError, match="Is a directory"):
        from_file(ModelEndpoint, tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    with pytest.raises(SpecError, match="is not UTF-8 text"):
        from_file(ModelEndpoint, tmp_path / "latin.yaml")


def test_an_object_of_the_api_server_with_server_side_fields_is_parsed() -> None:
    resource = copy.deepcopy(SMALLEST)
    resource["metadata"] |= {"uid": "x", "generation": 3, "managedFields": [{"fieldsV1": {"f:spec": {}}}]}
    resource["status"] = {"replicas": 2, "conditions": [{"type": "Ready"}]}
    endpoint = ModelEndpoint.from_object(resource)
    assert endpoint.status["replicas"] == 2


def test_a_number_of_thousands_of_digits_is_an_error() -> None:
    with pytest.raises(SpecError):
        ModelEndpoint.from_object(changed("spec.cores", 10**5000))


def test_python_names_of_fields_are_accepted_and_written_as_aliases() -> None:
    spec = ModelEndpointSpec(model="file:///m", task=TaskName.FILL_MASK, hardware_class="zen4", cores=2)
    written = json.loads(spec.model_dump_json(by_alias=True, exclude_defaults=True))
    assert written == {"model": "file:///m", "task": "fill-mask", "hardwareClass": "zen4", "cores": 2}
    assert ModelEndpoint.from_object({**SMALLEST, "spec": written}).spec == spec


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["hf://a/b", "fill-mask", "Auto", "20ms", "2", "\ud800", "penstock.dev/v1alpha1"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                st.text(max_size=4),
                st.sampled_from(["latency", "p95Milliseconds", "minReplicas", "mode", "name", "min_cosine"]),
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)
PATHS = st.sampled_from([
    "apiVersion", "metadata", "metadata.name", "metadata.labels", "spec", "spec.model", "spec.task", "spec.cores",
    "spec.objective", "spec.objective.latency", "spec.workload", "spec.workload.texts", "spec.optimization",
    "spec.optimization.engines", "spec.optimization.mode", "spec.serving", "spec.scaling", "spec.scaling.minReplicas",
    "spec.replicas", "status", "other",
])  # fmt: skip


@given(st.lists(st.tuples(PATHS, VALUES), min_size=1, max_size=3))
def test_any_values_anywhere_give_an_endpoint_or_a_spec_error(changes: list[tuple[str, object]]) -> None:
    resource = copy.deepcopy(SMALLEST)
    for path, value in changes:
        *above, last = path.split(".")
        place: Any = resource
        for part in above:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[last] = value
    try:
        endpoint = ModelEndpoint.from_object(resource)
    except SpecError as error:
        shown = str(error)
    else:
        written = json.loads(endpoint.model_dump_json(by_alias=True))
        shown = str(ModelEndpoint.from_object(written) == endpoint)
    assert shown
    assert "Traceback" not in shown


YAML_PIECES = st.sampled_from([
    "kind: ModelEndpoint\n", "a: &x [1]\n", "b: *x\n", "*y", "- ", "  ", "\t", "{", "}", "[", "]", ": ", "? ", "!!int ",
    "!!set {a}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!float x", "!!timestamp 2", "!!null x", "!!merge x", "<<: *x\n",
    "%YAML 1.1\n", "---\n", "...\n", "'", '"', '"\\ud800"', "| \n", ">\n", "0o7", "1:60:60", "1e400", ".inf", "0x",
    "2026-99-99", "=", "~", "\u2028", "spec:\n  cores: 1\n", "y", "\x85", "\ufeff",
])  # fmt: skip


@given(st.one_of(st.text(max_size=60), st.lists(YAML_PIECES, max_size=12).map("".join)))
def test_any_text_gives_an_endpoint_or_a_spec_error(text: str) -> None:
    with pytest.raises(SpecError):
        from_yaml(ModelEndpoint, text)


def choices(model: type[BaseModel]) -> set[str]:
    """Every value of every enumeration in the fields of a model and below it."""
    found: set[str] = set()
    pending: list[Any] = [field.annotation for field in model.model_fields.values()]
    while pending:
        annotation = pending.pop()
        pending.extend(typing.get_args(annotation))
        if isinstance(annotation, type) and issubclass(annotation, StrEnum):
            found |= {member.value for member in annotation}
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            pending.extend(field.annotation for field in annotation.model_fields.values())
    return found


def test_yaml_reads_every_enum_value_as_a_string() -> None:
    words = choices(ModelEndpointSpec)
    assert {"Auto", "fill-mask", "bf16", "openvino", "Fail"} <= words
    assert words == {yaml.load(word, Loader) for word in words}
