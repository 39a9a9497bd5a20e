"""The API server and the reader of files accept the same objects, and refuse others with the same messages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.resources.base import Resource
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.hardware_class import HardwareClass
from penstock.resources.optimized_model import OptimizedModel, OptimizedModelSpec, Toolchain
from penstock.resources.shipped_classes import HARDWARE_CLASSES
from tests.crds.conftest import ApiServer
from tests.examples import examples
from tests.penstock.resources.test_endpoint import BAD as BAD_IN_FILES

Case = tuple[str, object]
KINDS: dict[str, type[Resource]] = {kind.KIND: kind for kind in (ModelEndpoint, OptimizedModel, HardwareClass)}
SMALLEST: dict[str, dict[str, Any]] = {
    "ModelEndpoint": {"model": "hf://org/name", "task": "text-classification"},
    "OptimizedModel": {"model": "hf://a/b", "task": "fill-mask", "toolchain": {"image": "x:1", "version": "0.1"}},
    "HardwareClass": {},
}


def resource(kind: str, path: str = "", value: object = None) -> dict[str, Any]:
    """The smallest object of a kind, with one dotted field set."""
    made: dict[str, Any] = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": "case"},
        "spec": copy.deepcopy(SMALLEST[kind]),
    }
    if path:
        *above, last = path.split(".")
        place = made
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return made


def read(kind: str, value: dict[str, Any]) -> tuple[Any, str]:
    """The object as the reader of files parses it, or its error."""
    try:
        return KINDS[kind].from_object(value), ""
    except SpecError as error:
        return None, str(error)


DIGEST = f"sha256:{'0' * 64}"
GOOD: list[tuple[str, Case]] = [
    *(
        ("ModelEndpoint", case)
        for case in [
            ("", None),
            ("metadata.name", "a" * 63),
            ("spec.model", "hf://name"),
            ("spec.model", "hf://org/na.me_1@refs/pr/1"),
            ("spec.model", "hf://a..b/c"),
            ("spec.model", "s3://bucket/a b/ü/@x"),
            ("spec.model", "gs://bucket"),
            ("spec.model", "pvc://claim/path"),
            ("spec.model", "file:///Ü/x"),
            ("spec.model", "pkg://a.b/c/d"),
            ("spec.cores", 256),
            ("spec.cores", 2.0),
            ("spec.objective.latency", {"p95Milliseconds": 20.0}),
            ("spec.objective", {"latency": {"p95Milliseconds": 0.5}, "throughput": {"requestsPerSecond": 1}}),
            ("spec.workload", {"sequenceLengths": [8, 8, 1_000_000], "texts": ["ü" * 8192, "x"]}),
            ("spec", {"model": "hf://a/b", "task": "text-generation", "objective": {"tokensPerSecond": 90}}),
            ("spec", {"model": "hf://a/b", "task": "text-generation", "workload": {"lengths": "prompt,output\n8,9\n"}}),
            ("spec.workload", {"textsFrom": {"configMapName": "texts"}}),
            ("spec.workload", {"texts": [], "textsFrom": {"configMapName": "texts", "key": "a_b.txt"}}),
            ("spec.optimization", {"mode": "Pinned", "artefact": DIGEST}),
            ("spec.optimization", {"engines": ["openvino", "openvino"], "accuracy": {"minCosine": 1}}),
            ("spec.optimization", {"serveWhileOptimizing": False, "whenNoCandidate": "Fail", "budgetSeconds": 1.5}),
            ("spec.modelCredentials", {"secretName": "hf.token"}),
            ("spec.scaling", {"minReplicas": 0, "maxReplicas": 1000, "mode": "None", "headroom": 1}),
            ("spec.scaling", {"whenMetricsMissing": "Fallback", "fallbackReplicas": 4}),
            ("spec.scaling.metrics", {"prometheus": {"url": "http://p:9090", "queries": {"inFlight": "sum(x)"}}}),
            ("spec.rollout", {"maxSurge": 2, "drainSeconds": 0}),
            ("spec.pod.memory", "2Gi"),
            ("spec.pod.memory", 1073741824),
            ("spec.pod.memory", "1.5e9"),
            ("spec.pod", {"labels": {"team": "", "a.b/c": "x.Y_z"}, "annotations": {"any": "ü\nx"}}),
            ("spec.pod.tolerations", [{"operator": "Exists"}, {"key": "gpu", "value": "a", "effect": "NoSchedule"}]),
            ("spec.pod.tolerations", [{"key": "x", "effect": "NoExecute", "tolerationSeconds": 0}]),
            ("spec.pod.topologySpreadConstraints", [{"topologyKey": "topology.kubernetes.io/zone"}]),
            ("spec.pod.imagePullSecrets", [{"name": "a"}]),
            ("spec.exposure", {"host": "a.example.com", "ingress": {}}),
            ("spec.exposure", {"host": "a.b-c.d1", "ingress": {"tlsSecretName": "x", "annotations": {"a.b/c": "d"}}}),
            ("spec.exposure", {"host": "a.b", "path": "/v1/x.y", "httpRoute": {"parentRefs": [{"name": "g"}]}}),
            ("spec.tls", {"secretName": "emotion-tls"}),
            ("spec", {"model": "hf://a/b", "task": "text-ranking", "serving": {"prompts": {}}}),
            ("spec", {"model": "hf://a/b", "task": "feature-extraction", "serving": {"prompts": {
                "texts": {"query": "ü: ", "none": ""}, "default": "query", "routes": {"/v1/embeddings": "none"}}}}),
            ("spec.serving", {"grpc": True}),
            ("spec", {"model": "hf://a/b", "task": "fill-mask", "serving": {"grpc": True},
                "scaling": {"minReplicas": 0}, "gateway": {"mode": "Never"}}),
            ("spec.replicas", 0),
            ("spec.suspend", True),
            ("spec.objective", None),
            ("spec.scaling.minReplicas", None),
        ]
    ),
    *(("HardwareClass", ("spec", spec.to_object())) for spec in HARDWARE_CLASSES.values()),
    ("HardwareClass", ("spec.nodeSelectorTerms", [{"matchExpressions": [
        {"key": "a", "operator": "Exists"}, {"key": "b", "operator": "Gt", "values": ["3"]}]}])),
    ("HardwareClass", ("spec.resources", {"example.com/npu": 2})),
    # As the classes inf1 and inf2 of 0.1.0: `helm rollback` writes them while the definitions stay.
    ("HardwareClass", ("spec.neuron", {"coresPerDevice": 4, "hostCpusPerDevice": 2})),
    ("HardwareClass", ("spec.neuron", {"coresPerDevice": 2, "hostCpusPerDevice": 2})),
    ("HardwareClass", ("spec.price", {"perCoreHour": 0.04})),
    ("OptimizedModel", ("", None)),
    ("OptimizedModel", ("metadata.name", "0123456789abcdef")),
    ("OptimizedModel", ("spec.textsDigest", DIGEST)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "case"), GOOD)
def test_a_valid_spec_is_accepted_by_file_and_api_server_with_the_same_meaning(
    api_server: ApiServer, kind: str, case: tuple[str, object]
) -> None:
    sent = resource(kind, *case)
    ours, refusal = read(kind, sent)
    stored, message = api_server.verdict(sent, kind=kind)
    assert (refusal, message) == ("", "")
    # The defaults of the API server are those of the reader of files.
    assert stored is not None
    assert read(kind, {**stored, "metadata": sent["metadata"]})[0] == ours


SAME_WORDS: list[tuple[str, str, object, str]] = [
    ("ModelEndpoint", "metadata.name", "My_Model", "'My_Model' is not a DNS label. Use at most 63 lower-case lett"),
    ("ModelEndpoint", "spec.model", "ftp://x", "'ftp://x' is not a model source"),
    ("ModelEndpoint", "spec.hardwareClass", "Ice_Lake", "'Ice_Lake' is not a DNS label. Use at most 63 lower"),
    ("ModelEndpoint", "spec.scaling", {"minReplicas": 4, "maxReplicas": 2},
     "minReplicas 4 is over maxReplicas 2: raise maxReplicas or lower minReplicas"),
    ("ModelEndpoint", "spec.scaling", {"minReplicas": 5},
     "minReplicas 5 is over maxReplicas 4: raise maxReplicas or lower minReplicas"),
    ("ModelEndpoint", "spec.scaling", {"whenMetricsMissing": "Fallback"},
     "whenMetricsMissing: Fallback needs fallbackReplicas: add it, or write whenMetricsMissing: Hold"),
    ("ModelEndpoint", "spec.scaling", {"fallbackReplicas": 9},
     "fallbackReplicas 9 is over maxReplicas 4: raise maxReplicas or lower fallbackReplicas"),
    ("ModelEndpoint", "spec.optimization", {"mode": "Pinned"},
     "mode Pinned needs artefact: add the digest (sha256:...) that the status of a proven endpoint shows, or write "),
    ("ModelEndpoint", "spec.optimization", {"artefact": DIGEST},
     "artefact is for mode Pinned, and mode is Auto: write mode: Pinned, or remove artefact"),
    ("ModelEndpoint", "spec.optimization", {"mode": "Pinned", "artefact": "sha256:1"},
     "'sha256:1' is not a digest. Write sha256: and 64 hexadecimal digits"),
    ("ModelEndpoint", "spec", {"model": "pkg://a", "task": "fill-mask", "modelCredentials": {"secretName": "x"}},
     "modelCredentials are for hf://, s3://, gs://, az:// and oci://, and model is pkg://a: remove modelCredentials"),
    ("ModelEndpoint", "spec.workload", {"texts": ["a"], "textsFrom": {"configMapName": "b"}},
     "texts and textsFrom are both given: keep one of them"),
    ("ModelEndpoint", "spec.workload", {"texts": ["x" * 8000] * 5},
     "texts are over 32,768 characters in all: give fewer or shorter ones, or put them into a ConfigMap and write "),
    ("ModelEndpoint", "spec.workload", {"textsFrom": {"configMapName": "A"}},
     "'A' is not the name of a Kubernetes object. Use lower-case letters, digits, '-' and '.', with a letter or digit"),
    ("ModelEndpoint", "spec.workload", {"textsFrom": {"configMapName": "a", "key": "a/b"}},
     "'a/b' is not a key of a ConfigMap. Use letters, digits, '-', '_' and '.'"),
    ("ModelEndpoint", "spec.pod", {"labels": {"penstock.dev/endpoint": "x"}},
     "labels below penstock.dev/, app.kubernetes.io/name, instance and managed-by are the operator's: choose another"),
    ("ModelEndpoint", "spec.pod", {"labels": {"a": "x y"}}, "'x y' is not the value of a label. Use at most 63"),
    ("ModelEndpoint", "spec.pod", {"memory": "2 GB"}, "is not a quantity of memory. Write a number with its"),
    ("ModelEndpoint", "spec.pod", {"memory": "512m"}, "less than 64Mi"),
    ("ModelEndpoint", "spec.pod", {"memory": 512}, "less than 64Mi"),
    ("ModelEndpoint", "spec.pod", {"tolerations": [{"value": "x"}]},
     "operator Equal needs a key: add it, or write operator: Exists to tolerate every taint"),
    ("ModelEndpoint", "spec.pod", {"tolerations": [{"key": "a", "operator": "Exists", "value": "x"}]},
     "operator Exists takes no value: remove value, or write operator: Equal"),
    ("ModelEndpoint", "spec.pod", {"tolerations": [{"key": "a", "tolerationSeconds": 3}]},
     "tolerationSeconds is for effect NoExecute: write effect: NoExecute, or remove tolerationSeconds"),
    ("ModelEndpoint", "spec.pod", {"topologySpreadConstraints": [{"topologyKey": "a b"}]},
     "'a b' is not the key of a label. Write name or domain/name, the name with letters, digits, '-', '_' and '.'"),
    ("ModelEndpoint", "spec.scaling.metrics", {"prometheus": {"url": "prom:9090 "}},
     "is not the address of a Prometheus"),
    ("ModelEndpoint", "spec", {"model": "pkg://a", "task": "fill-mask", "serving": {"grpc": True},
                               "scaling": {"minReplicas": 0}},
     "serving.grpc does not go through a gateway: write gateway.mode: Never (or scaling.minReplicas: 1 with gateway"),
    ("ModelEndpoint", "spec.serving", {"prompts": {"default": "q"}},
     "serving.prompts are for feature-extraction, sentence-similarity, text-ranking, and task is text-classification"),
    ("ModelEndpoint", "spec", {"model": "pkg://a", "task": "text-generation", "serving": {"caches": {}}},
     "serving.caches are not for text-generation, which reuses prompts without them: remove serving.caches"),
    ("ModelEndpoint", "spec.serving", {"prompts": {"routes": {"/x": "q"}}},
     "routes has a route without prompts: write one of /predict, /embed, /embed_all, /embed_sparse, /similarity, "),
    ("ModelEndpoint", "spec.serving", {"prompts": {"default": "a b"}}, "'a b' is not the name of a prompt. Begin with"),
    ("ModelEndpoint", "spec.exposure", {"host": "a.b"},
     "exposure needs either ingress or httpRoute: write one of them, such as ingress: {}"),
    ("ModelEndpoint", "spec.exposure", {"host": "a.b", "path": "/v1", "ingress": {}},
     "path is /v1, and an Ingress cannot remove a prefix: write path: / or use httpRoute"),
    ("ModelEndpoint", "spec.exposure", {"host": "*.b", "ingress": {}}, "'*.b' is not a host name. Write a full DNS"),
    ("HardwareClass", "metadata.name", "ice.lake", "'ice.lake' is not a DNS label"),
    ("HardwareClass", "spec.resources", {"aws.amazon.com/neuron": 1},
     "Neuron devices are asked for by spec.neuron, in whole devices: remove them from resources and write neuron"),
    ("HardwareClass", "spec.resources", {"cpu": 1},
     "resources are extended ones, such as example.com/device: cpu and memory come from the endpoint"),
    ("HardwareClass", "spec", {"neuron": {"coresPerDevice": 2}, "isa": "amx"},
     "isa and processors promise what the CPUs compute, and with neuron the devices do it: remove them"),
    ("HardwareClass", "spec.neuron", {"coresPerDevice": 8},
     "a device of inf1 has 4 NeuronCores, one of inf2 has 2: write coresPerDevice: 4 with target: inf1, or coresPer"),
    ("HardwareClass", "spec.neuron", {"target": "inf1", "coresPerDevice": 2},
     "a device of inf1 has 4 NeuronCores, one of inf2 has 2: write coresPerDevice: 4 with target: inf1, or "),
    ("HardwareClass", "spec", {"neuron": {"coresPerDevice": 2, "resource": "core"}},
     "with neuron.resource core, a pod has to get neighbouring NeuronCores, which only the Neuron scheduler extens"),
    ("HardwareClass", "spec.nodeSelectorTerms", [{"matchExpressions": [{"key": "a", "operator": "In"}]}],
     "operators In and NotIn need values: list at least one"),
    ("HardwareClass", "spec.nodeSelectorTerms", [{"matchExpressions": [{"key": "a", "operator": "Exists",
                                                                       "values": ["b"]}]}],
     "operators Exists and DoesNotExist take no values: remove them"),
    ("HardwareClass", "spec.nodeSelectorTerms", [{"matchExpressions": [{"key": "a", "operator": "Lt",
                                                                       "values": ["x"]}]}],
     "operators Gt and Lt need one value, a whole number in quotes"),
    ("OptimizedModel", "spec.optimization", {"mode": "Pinned", "artefact": DIGEST},
     "mode is Pinned, which needs no optimisation: write mode: Auto or mode: Disabled"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "value", "words"), SAME_WORDS)
def test_file_and_api_server_report_a_mistake_with_the_same_message(
    api_server: ApiServer, kind: str, path: str, value: object, words: str
) -> None:
    sent = resource(kind, path, value)
    assert words in read(kind, sent)[1]
    assert words in api_server.verdict(sent, kind=kind)[1]


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, value, _ in BAD_IN_FILES])
def test_every_mistake_that_a_file_may_have_is_refused_by_the_api_server_too(
    api_server: ApiServer, path: str, value: object
) -> None:
    stored, message = api_server.verdict(resource("ModelEndpoint", path, value), kind="ModelEndpoint")
    assert stored is None
    assert message


TOO_MUCH: list[tuple[str, str, object]] = [
    ("ModelEndpoint", "spec.workload.texts", ["x"] * 513),
    ("ModelEndpoint", "spec.workload.texts", ["x" * 8193]),
    ("ModelEndpoint", "spec.workload.sequenceLengths", [1] * 65),
    ("ModelEndpoint", "spec.workload.sequenceLengths", [1_000_001]),
    ("ModelEndpoint", "spec.model", f"file:///{'x' * 505}"),
    ("ModelEndpoint", "spec.model", "hf://a/../b"),
    ("ModelEndpoint", "spec.model", "hf://a/.."),
    ("ModelEndpoint", "spec.model", "hf://../b@main"),
    ("ModelEndpoint", "spec.model", "hf://a/b@x/../y"),
    ("ModelEndpoint", "spec.model", "hf://a/b@"),
    ("ModelEndpoint", "spec.model", "s3://b/../c"),
    ("ModelEndpoint", "spec.model", "file:///a\n"),
    ("ModelEndpoint", "spec.hardwareClass", "a\n"),
    ("ModelEndpoint", "spec.replicas", 1001),
    ("ModelEndpoint", "spec.replicas", 1.5),
    ("ModelEndpoint", "spec.rollout.maxSurge", 0),
    ("ModelEndpoint", "spec.scaling.headroom", 0),
    ("ModelEndpoint", "spec.scaling.mode", "hpa"),
    ("ModelEndpoint", "spec.pod.labels", {f"k{n}": "x" for n in range(33)}),
    ("ModelEndpoint", "spec.pod.labels", {"a": 1}),
    ("ModelEndpoint", "spec.pod.tolerations", [{"operator": "Exists"}] * 17),
    ("ModelEndpoint", "spec.pod.tolerations", [{"key": "a", "effect": "Sometimes"}]),
    ("ModelEndpoint", "spec.pod.memory", True),
    ("ModelEndpoint", "spec.pod.memory", 1.5),
    ("ModelEndpoint", "spec.pod.memory", ""),
    ("ModelEndpoint", "spec.suspend", "true"),
    ("HardwareClass", "spec.threadsPerCore", 0),
    ("HardwareClass", "spec.nodeSelectorTerms", [{"matchExpressions": []}]),
    ("HardwareClass", "spec.neuron", {}),
    ("HardwareClass", "spec.neuron", {"coresPerDevice": 2, "target": "trn1"}),
    ("HardwareClass", "spec.neuron", {"coresPerDevice": 2, "resource": "neuron"}),
    ("HardwareClass", "spec.isa", "sse"),
    ("OptimizedModel", "spec.toolchain", None),
]


@pytest.mark.parametrize(("kind", "path", "value"), TOO_MUCH)
def test_file_and_api_server_refuse_values_beyond_the_bounds(
    api_server: ApiServer, kind: str, path: str, value: object
) -> None:
    sent = resource(kind, path, value)
    assert read(kind, sent)[1]
    assert api_server.verdict(sent, kind=kind)[1]


TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["a", "a-b", "A", "a.b", "x/y", "hf://a/b", "hf://a/b@c", "pvc://c/d", "file:///x", "2Gi", "64Mi",
                     "0.5", "1e9", "Auto", "None", "Equal", "Exists", "NoExecute", "Fallback", "Pinned", "-", ""]),
)  # fmt: skip
SCALAR = st.one_of(
    TEXT, st.booleans(), st.integers(-2, 2000), st.floats(0, 2000, allow_nan=False, width=32),
    st.sampled_from([10**9, 2**40, 10**17, -1, 0.75, 1.0, 1e18, -0.0]),
)  # fmt: skip
TOLERATION = st.fixed_dictionaries(
    {}, optional={"key": TEXT, "operator": st.sampled_from(["Exists", "Equal", "In"]), "value": TEXT,
                  "effect": st.sampled_from(["NoSchedule", "NoExecute", "x"]), "tolerationSeconds": SCALAR},
)  # fmt: skip
FIELDS: dict[str, st.SearchStrategy[object]] = {
    "metadata.name": TEXT,
    "spec.model": TEXT,
    "spec.hardwareClass": TEXT,
    "spec.cores": SCALAR,
    "spec.objective.latency.p95Milliseconds": SCALAR,
    "spec.workload.sequenceLengths": st.lists(SCALAR, max_size=3),
    "spec.workload.texts": st.lists(TEXT, max_size=3),
    "spec.workload.textsFrom.configMapName": TEXT,
    "spec.optimization.mode": SCALAR,
    "spec.optimization.artefact": TEXT,
    "spec.optimization.budgetSeconds": SCALAR,
    "spec.modelCredentials.secretName": TEXT,
    "spec.scaling.minReplicas": SCALAR,
    "spec.scaling.maxReplicas": SCALAR,
    "spec.scaling.whenMetricsMissing": TEXT,
    "spec.scaling.fallbackReplicas": SCALAR,
    "spec.scaling.metrics.prometheus.url": TEXT,
    "spec.pod.memory": SCALAR,
    "spec.pod.labels": st.dictionaries(TEXT, TEXT, max_size=2),
    "spec.pod.nodeSelector": st.dictionaries(TEXT, TEXT, max_size=2),
    "spec.pod.annotations": st.dictionaries(TEXT, TEXT, max_size=2),
    "spec.pod.tolerations": st.lists(TOLERATION, max_size=2),
    "spec.replicas": SCALAR,
    "spec.suspend": SCALAR,
    "spec.unknown": SCALAR,
}
CHANGES = st.lists(
    st.sampled_from(sorted(FIELDS)).flatmap(lambda path: st.tuples(st.just(path), FIELDS[path])), min_size=1, max_size=3
)


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHANGES)
def test_any_object_is_accepted_by_file_and_api_server_or_by_neither(
    api_server: ApiServer, changes: list[Case]
) -> None:
    sent = resource("ModelEndpoint")
    for path, value in changes:
        *above, last = path.split(".")
        place = sent
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    ours, refusal = read("ModelEndpoint", sent)
    stored, message = api_server.verdict(sent, kind="ModelEndpoint")
    assert bool(refusal) == bool(message), (refusal, message)
    if stored is not None:
        assert read("ModelEndpoint", {**stored, "metadata": sent["metadata"]})[0] == ours


def test_the_api_server_accepts_what_the_operator_writes_for_an_endpoint(api_server: ApiServer) -> None:
    endpoint = ModelEndpoint.from_object(resource("ModelEndpoint", "spec.serving.maxInputTokens", 128))
    spec = OptimizedModelSpec.of(endpoint.spec, Toolchain(image="registry/x@sha256:0", version="0.1.0"))
    made = resource("OptimizedModel", "spec", spec.to_object())
    stored, message = api_server.verdict(made, kind="OptimizedModel")
    assert message == ""
    assert stored is not None
    assert OptimizedModel.from_object({**stored, "metadata": {"name": "x"}}).spec == spec
