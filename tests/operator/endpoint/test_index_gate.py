"""An artefact with vectors that do not fit the endpoint's index does not serve, and what serves is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from penstock.resources.endpoint_parts.vector_space import IndexCertificate, IndexVerdict, Recalls
from penstock.resources.result import Result
from penstock_operator.facts.tenants import AllowList
from tests.operator.endpoint.kube import OTHER, RESULT, SETTINGS, Kube, condition, result

GATE = {"index": {"sample": "s3://bucket/sample.parquet"}}
VECTORS: Any = {"model": "hf://org/vectors@main", "task": "feature-extraction"}


def certified(verdict: IndexVerdict | None, **update: Any) -> Result:
    low = 0.995 if verdict is not None and verdict.fits else 0.41
    recalls = Recalls(recall=low, recall_low=low, plain=low, plain_low=low, first=low, regret=0.01)
    certificate = IndexCertificate(
        verdict=verdict or IndexVerdict.SAME, sample="a" * 64, documents=10_000, queries=1_000, of_documents=True,
        alone=recalls, mixed=recalls, mean_cosine=0.9,
    )  # fmt: skip
    return result(index=None if verdict is None else json.loads(certificate.model_dump_json(by_alias=True)), **update)


@pytest.mark.parametrize("canary", [None, {"percent": 10, "minutes": 1}])
@pytest.mark.parametrize(
    ("verdict", "reason"),
    [(IndexVerdict.RE_EMBED, "NeedsReembedding"), (IndexVerdict.NOT_CERTIFIED, "NotCertified"), (None, "NotCertified")],
)
def test_a_result_that_does_not_fit_keeps_what_serves(verdict: IndexVerdict | None, reason: str, canary: Any) -> None:
    kube = Kube(**VECTORS, rollout={"canary": canary} if canary else {}).optimised()
    before = kube.objects["Deployment", "emotion"]
    kube.edit(model="hf://org/other@main", vectorSpace=GATE)
    kube.reconcile()
    kube.job_succeeds(certified(verdict), OTHER)
    events = [(event.type, event.reason) for event in kube.plan().events]
    made = kube.reconcile()

    assert kube.artefact == RESULT
    assert kube.objects["Deployment", "emotion"] == before, "no pod of the new artefact is made, not even a canary"
    deployments = [value["metadata"]["name"] for value in made.apply if value["kind"] == "Deployment"]
    assert set(deployments) <= {"emotion", "emotion-gateway"}
    for kind in ("IndexCompatible", "Optimized", "Ready"):
        status, why, message = condition(made, kind)
        assert (status, why) == ("False", reason)
        assert "What serves is kept" in message
    assert made.status["reason"] == reason, "the column of kubectl get"
    assert events.count(("Warning", reason)) == 1
    assert condition(made, "Available")[0] == "True"
    assert kube.plan().events == ()


@pytest.mark.parametrize("verdict", [IndexVerdict.SAME, IndexVerdict.COMPATIBLE])
def test_a_result_that_fits_serves(verdict: IndexVerdict) -> None:
    kube = Kube(**VECTORS).optimised()
    kube.edit(model="hf://org/other@main", vectorSpace=GATE)
    made = kube.reconcile()
    assert condition(made, "IndexCompatible")[:2] == ("Unknown", "NotAsked")
    kube.job_runs(baseline=True)
    kube.reconcile()
    assert kube.artefact == RESULT
    kube.job_succeeds(certified(verdict), OTHER)
    made = kube.reconcile()

    assert kube.artefact == OTHER
    status, reason, message = condition(made, "IndexCompatible")
    assert (status, reason) == ("True", verdict.value)
    assert "0.9950 of the 10 results are no loss" in message


def test_a_new_endpoint_has_no_pods_before_its_certificate() -> None:
    kube = Kube(**VECTORS, vectorSpace=GATE)
    kube.reconcile()
    kube.job_runs(baseline=True)
    assert condition(kube.reconcile(), "Available")[1] == "NothingToServe"
    kube.job_succeeds(certified(IndexVerdict.RE_EMBED))
    made = kube.reconcile()
    assert ("Deployment", "emotion") not in kube.objects
    assert condition(made, "Ready")[:2] == ("False", "NeedsReembedding")


def test_a_corrected_sample_or_none_lets_the_model_serve() -> None:
    kube = Kube(**VECTORS).optimised()
    kube.edit(model="hf://org/other@main", vectorSpace=GATE)
    kube.reconcile()
    kube.job_succeeds(certified(IndexVerdict.RE_EMBED), OTHER)
    kube.reconcile()
    kube.edit(vectorSpace={"index": {"sample": "s3://bucket/of-the-new-model.parquet"}})
    kube.reconcile()
    kube.job_succeeds(certified(IndexVerdict.COMPATIBLE), OTHER)
    made = kube.reconcile()
    assert kube.artefact == OTHER
    assert condition(made, "IndexCompatible")[0] == "True"


def test_an_endpoint_without_an_index_has_no_such_condition() -> None:
    made = Kube(**VECTORS).optimised().plan()
    assert "IndexCompatible" not in {entry["type"] for entry in made.status["conditions"]}


@pytest.mark.parametrize(
    ("model", "sample", "mounted"),
    [
        ("hf://org/vectors@main", "pvc://data/a/sample.parquet", {"/var/run/penstock/claims/data"}),
        ("pvc://data/model", "pvc://data/sample.parquet", {"/var/run/penstock/claims/data"}),
        ("pvc://models/a", "pvc://data/s.jsonl", {"/var/run/penstock/claims/models", "/var/run/penstock/claims/data"}),
        ("file:///models/a", "file:///models/sample.jsonl", {"/var/run/penstock/files"}),
        ("pvc://models/a", "file:///models/s.jsonl", {"/var/run/penstock/claims/models", "/var/run/penstock/files"}),
        ("hf://org/vectors@main", "s3://bucket/sample.parquet", set()),
    ],
)
def test_the_job_has_the_volumes_of_model_and_sample(model: str, sample: str, mounted: set[str]) -> None:
    kube = Kube(model=model, task="feature-extraction", vectorSpace={"index": {"sample": sample}})
    kube.reconcile()
    pod = kube.objects["Job", kube.job]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = container["volumeMounts"]
    found = {one["mountPath"]: one for one in mounts if one["mountPath"].startswith("/var/run/penstock/")}

    assert set(found) == mounted
    assert all(one["readOnly"] for one in found.values())
    assert {one["name"] for one in found.values()} <= {one["name"] for one in pod["volumes"]}
    assert len({one["name"] for one in pod["volumes"]}) == len(pod["volumes"])


@pytest.mark.parametrize(
    ("sample", "allowed"),
    [
        ("file:///etc/sample.jsonl", AllowList(file_prefixes=("/models",))),
        ("file:///models-of-others/sample.jsonl", AllowList(file_prefixes=("/models",))),
        ("file:///var/lib/penstock/artefacts/b/sample.jsonl", AllowList(file_prefixes=("/var/lib",))),
    ],
)
def test_a_sample_may_come_only_from_where_models_may(sample: str, allowed: AllowList) -> None:
    kube = Kube(**VECTORS, settings=replace(SETTINGS, allowed=allowed), vectorSpace={"index": {"sample": sample}})
    status, reason, message = condition(kube.plan(), "Accepted")

    assert (status, reason) == ("False", "SourceNotAllowed")
    assert "spec.vectorSpace.index.sample" in message


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"task": "text-classification"}, "vectorSpace is for feature-extraction"),
        ({"serving": {"prompts": {"texts": {"a": "b"}}}}, "knows no serving.prompts"),
        ({"optimization": {"mode": "Pinned", "artefact": RESULT}}, "makes no pinned artefact"),
        ({"vectorSpace": {"index": {"sample": "hf://org/name"}}}, "is not a sample of an index"),
        ({"vectorSpace": {"index": {"sample": "s3://b/../a.parquet"}}}, "is not a sample of an index"),
        ({"vectorSpace": {"index": {"sample": "s3://b/a.csv"}}}, "is not a sample of an index"),
    ],
)  # fmt: skip
def test_a_gate_that_cannot_work_is_refused(spec: Any, words: str) -> None:
    made = Kube(**{**VECTORS, "vectorSpace": GATE, **spec}).plan()

    assert condition(made, "Accepted")[:2] == ("False", "InvalidSpec")
    assert words in condition(made, "Accepted")[2]
