"""Facts parsed from objects of the API, from logs and from reports of pods."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_operator.endpoint.pods.judging import cpu_list
from penstock_operator.facts.findings import Finding, clipped, no, sentence, yes
from penstock_operator.facts.names import moment
from penstock_operator.facts.pod_data import Unreadable
from penstock_operator.facts.pods import HostReport, JobFacts, JobReport, PodFacts
from penstock_operator.facts.workloads import DeploymentFacts, OptimizedModelFacts, ReplicaSetFacts
from tests.operator.endpoint.kube import Json, info

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def test_a_pod_without_a_status_is_pending() -> None:
    facts = PodFacts.from_object({"metadata": {"name": "p"}})
    assert (facts.phase, facts.ready, facts.deleting, facts.cpus) == ("Pending", False, False, 0)


@pytest.mark.parametrize(("asked", "cpus"), [("4", 4), ("4000m", 4), ("500m", 0), ("", 0), ("many", 0), (2, 2)])
def test_a_pods_cpus_are_whole_ones(asked: object, cpus: int) -> None:
    container = {"name": "penstock", "resources": {"requests": {"cpu": asked}}}
    sidecar = {"name": "sidecar", "resources": {"requests": {"cpu": "9"}}}
    facts = PodFacts.from_object({"metadata": {"name": "p"}, "spec": {"containers": [sidecar, container]}})
    assert facts.cpus == cpus


def test_new_objects_without_a_status_are_understood() -> None:
    metadata = {"name": "x"}
    assert JobFacts.from_object({"metadata": metadata, "spec": {}}).failed == ""
    assert ReplicaSetFacts.from_object({"metadata": metadata, "spec": {}}).wanted == 0
    assert OptimizedModelFacts.from_object({"metadata": metadata}).status == {}
    deployment = DeploymentFacts.from_object({"metadata": metadata, "spec": {"template": {}}})
    assert (deployment.wanted, deployment.available) == (1, 0)
    assert DeploymentFacts.from_object({"metadata": metadata, "spec": {"replicas": 0, "template": {}}}).wanted == 0


def test_a_report_of_a_job_has_its_progress_and_its_baseline() -> None:
    baseline = {"digest": "sha256:b", "uri": "file:///b", "bytes": 12}
    report = JobReport.from_json({"done": 7, "of": 23, "stage": "candidates", "message": "int8", "baseline": baseline})
    assert report.progress is not None
    assert (report.progress.summary, report.progress.stage) == ("7/23", "candidates")
    assert (report.baseline_digest, report.baseline_uri, report.baseline_bytes) == ("sha256:b", "file:///b", 12)
    assert JobReport.from_json({"done": 1, "of": 23, "baseline": None}).baseline_digest == ""


@given(ANYTHING | st.fixed_dictionaries({"done": ANYTHING, "of": ANYTHING}, optional={"baseline": ANYTHING}))
def test_no_report_of_a_job_can_stop_the_operator(value: object) -> None:
    with suppress(Unreadable):
        assert isinstance(JobReport.from_json(value), JobReport)


@given(st.dictionaries(st.sampled_from(["host", "plan", "artefact", "x"]), ANYTHING))
def test_no_answer_of_a_pod_can_stop_the_operator(value: Json) -> None:
    with suppress(Unreadable):
        assert isinstance(HostReport.from_info(value), HostReport | None)


def test_a_report_has_the_cpus_of_a_pod() -> None:
    report = HostReport.from_info(info((4, 5), quota=2.5))
    assert report is not None
    assert (report.cpus, report.quota, report.pinned, report.cpu["isa"]) == ((4, 5), 2.5, True, "avx512-vnni")
    assert HostReport.from_info({"host": None}) is None
    assert HostReport.from_info({"host": {}}) is None
    with pytest.raises(Unreadable, match=r"host\.cpus_allowed"):
        HostReport.from_info({"host": {"cpus_allowed": 3}})


def test_a_report_has_the_vector_space_in_its_form_only() -> None:
    space = {"id": "vs1-7f3a9c0d12ab5e44", "fields": {"weights": "0" * 64}}
    report = HostReport.from_info(info((4, 5)) | {"vector_space": space})
    assert report is not None
    assert report.space == "vs1-7f3a9c0d12ab5e44"
    with pytest.raises(Unreadable, match=r"vector_space\.id"):
        HostReport.from_info(info((4, 5)) | {"vector_space": {"id": "\x1b[2J"}})


@given(st.sets(st.integers(min_value=0, max_value=300)))
def test_cpu_numbers_are_written_as_the_kernel_does(cpus: set[int]) -> None:
    text = cpu_list(cpus)
    found: set[int] = set()
    for part in text.split(",") if cpus else []:
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == cpus
    assert text == "none" or cpus


def test_a_finding_has_a_camel_case_reason_and_a_message() -> None:
    with pytest.raises(ValueError, match="CamelCase"):
        no("not this", "message")
    with pytest.raises(ValueError, match="message"):
        yes("Fine", "  ")
    assert isinstance(yes("Fine", "All is well."), Finding)


def test_messages_are_cut_and_stopped() -> None:
    assert clipped("x" * 50, 10) == "xxxxxx ..."
    assert sentence("it is so") == "It is so."
    assert sentence("Is it?") == "Is it?"
    assert sentence("") == ""


def test_times_have_their_zone() -> None:
    found = moment("2026-11-21T19:30:00Z")
    assert found is not None
    assert found.tzinfo is not None
    assert moment(None) is None
