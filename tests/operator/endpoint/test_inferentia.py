"""Endpoints on Inferentia: jobs that compile on nodes without devices, pods with devices, and what is refused."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from penstock.hardware import INF1_UNSUPPORTED, NOT_RUN, NeuronGeneration
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.job_summary import Failure
from penstock.resources.optimized_model import RESULT_FORMAT, SEARCH_REVISION
from penstock.resources.shipped_classes import HARDWARE_CLASSES
from penstock_operator.endpoint.objects.deployment import Drain
from penstock_operator.endpoint.snapshot import ReconcilePlan
from penstock_operator.facts.findings import no
from penstock_operator.facts.names import ARTEFACT
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.scaling import HPA, METRIC, SCALED_OBJECT, DesiredScale
from penstock_operator.inferentia_settings import InferentiaSettings
from penstock_optimizer.pod.pod_job import JobVariables
from penstock_runtime.engines.neuron.device_errors import DeviceFailure, start_error
from penstock_runtime.engines.neuron.variables import NeuronVariables
from penstock_runtime.pod.variables import PodVariables
from penstock_runtime.settings import SETTINGS as RUNTIME_SETTINGS
from tests.operator.endpoint.kube import RESULT, Json, Kube, container, guaranteed, hardware_class, result, unscheduled
from tests.operator.endpoint.objects.test_deployment import container_of, env_of, job_of
from tests.operator.endpoint.objects.test_scalers import KEDA

GIB = 1024


def on(name: str, cores: int, **spec: Any) -> Kube:
    kube = Kube(hardwareClass=name, cores=cores, **spec)
    kube.classes |= {known: hardware_class(known, **HARDWARE_CLASSES[known].to_object()) for known in ("inf1", "inf2")}
    return kube


def condition(made: ReconcilePlan, kind: str) -> tuple[str, str, str]:
    (found,) = [one for one in made.status["conditions"] if one["type"] == kind]
    return found["status"], found["reason"], found["message"]


def pod_of(value: Json) -> Json:
    pod: Json = value["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize(
    ("name", "cores", "image", "devices"), [("inf1", 4, "-legacy", "1"), ("inf2", 2, "", "1"), ("inf2", 24, "", "12")]
)
def test_serving_pods_have_devices_and_know_their_cores(name: str, cores: int, image: str, devices: str) -> None:
    kube = on(name, cores).optimised()
    made = container_of(kube.deployment)
    assert made["image"] == f"localhost/penstock-runtime-neuron{image}"
    assert guaranteed(made)["aws.amazon.com/neuron"] == devices
    environment = env_of(kube.deployment)
    assert (environment["PENSTOCK_NEURON_TARGET"], environment["PENSTOCK_NEURON_CORES"]) == (name, str(cores))
    assert not {"PENSTOCK_CORES", "PENSTOCK_THREADS_PER_CORE", "NEURON_RT_VISIBLE_CORES"} & environment.keys()
    assert condition(kube.reconcile(), "Ready")[0] == "True"


@pytest.mark.parametrize(("name", "cores", "image"), [("inf1", 4, "-legacy"), ("inf2", 2, "")])
def test_a_compile_job_runs_on_a_node_without_devices(name: str, cores: int, image: str) -> None:
    kube = on(name, cores, pod={"nodeSelector": {"zone": "a"}, "tolerations": [{"key": "spot"}]})
    kube.reconcile()
    job = job_of(kube)
    made, pod = container_of(job), pod_of(job)

    assert made["image"] == f"localhost/penstock-optimizer-neuron{image}"
    assert guaranteed(made) == {"cpu": "8", "memory": f"{24 * GIB}Mi"}
    assert env_of(job)["PENSTOCK_NEURON_TARGET"] == name
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [{"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}]}
    assert [one["key"] for one in pod["tolerations"]] == ["penstock.dev/dedicated", "spot"]
    assert "schedulerName" not in pod
    # The time budget, and what jobs that compile may take beyond it.
    assert pod["activeDeadlineSeconds"] == 7200 + 7200


def test_a_compile_job_that_ran_out_of_memory_gets_more() -> None:
    kube = on("inf2", 2)
    kube.reconcile()
    kube.job_ends("", code=137, reason="OOMKilled")
    kube.reconcile()
    kube.pass_by(3600)
    kube.reconcile()
    assert container_of(job_of(kube))["resources"]["limits"]["memory"] == f"{48 * GIB}Mi"


def test_a_compile_job_without_a_node_names_its_own_settings() -> None:
    kube = on("inf2", 2)
    kube.nodes = [
        {
            "metadata": {"name": "small", "labels": {"kubernetes.io/arch": "amd64"}},
            "status": {"allocatable": {"cpu": "4", "memory": "64Gi", "ephemeral-storage": "40Gi", "pods": "10"}},
        }
    ]
    kube.reconcile()
    kube.job_pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"}])
    message = condition(kube.reconcile(), "Optimized")[2]
    assert "no node of compile jobs of hardwareClass inf2 is large enough: 8 CPUs are wanted" in message
    assert "Lower inferentia.compileCpus of the chart, or add larger nodes" in message


def test_the_devices_are_part_of_the_key_of_an_optimisation() -> None:
    names = set()
    for target, cores_per_device in (("inf1", 4), ("inf2", 2)):
        kube = on("mine", 4)
        kube.classes["mine"] = hardware_class(
            "mine",
            neuron={"target": target, "coresPerDevice": cores_per_device, "mostDevices": 2},
            schedulerName="neuron-scheduler",
        )
        kube.reconcile()
        names.add(kube.endpoint["status"]["optimizedModel"])
        assert kube.objects["OptimizedModel", kube.endpoint["status"]["optimizedModel"]]["spec"]["toolchain"] == {
            "image": f"localhost/penstock-optimizer-neuron{'-legacy' if target == 'inf1' else ''}",
            "version": "0.2.0",
            "target": target,
            "format": RESULT_FORMAT,
            "revision": SEARCH_REVISION,
        }
    assert len(names) == 2


def test_the_fp32_graph_of_a_running_compile_job_is_not_served() -> None:
    kube = on("inf2", 2)
    kube.reconcile()
    kube.job_runs(baseline=True)
    made = kube.reconcile()
    assert ("Deployment", "emotion") not in kube.objects
    assert condition(made, "Available")[:2] == ("False", Reason.NOTHING_TO_SERVE)


@pytest.mark.parametrize(
    ("name", "cores", "words"),
    [
        ("inf2", 3, "3 NeuronCores are not whole devices, which have 2 each. Write 2 or 4."),
        ("inf2", 4, "4 NeuronCores have to be those of 2 neighbouring devices, of the up to 12 of a node, and the "),
        ("inf1", 16, "install the Neuron scheduler extension and write its name in schedulerName of the HardwareClass"),
        ("inf2", 26, "26 NeuronCores are more than the 24 of the class's largest node (neuron.mostDevices)"),
    ],
)
def test_cores_that_no_pod_of_the_class_can_get_are_refused(name: str, cores: int, words: str) -> None:
    kube = on(name, cores)
    status, reason, message = condition(kube.reconcile(), "Accepted")
    assert (status, reason) == ("False", Reason.INVALID_CORES)
    assert words in message
    assert kube.objects == {}


def test_models_that_generate_text_are_refused_on_devices() -> None:
    kube = on("inf2", 2, task="text-generation")
    status, reason, message = condition(kube.reconcile(), "Accepted")
    assert (status, reason) == ("False", Reason.TASK_NOT_SUPPORTED)
    assert "compiles encoders for them, no models that generate text. Write a class of CPUs" in message


def test_an_artefact_of_other_hardware_cannot_be_pinned() -> None:
    kube = on("inf2", 2, optimization={"mode": "Pinned", "artefact": RESULT})
    kube.publish("earlier", RESULT)
    status, reason, message = condition(kube.reconcile(), "Accepted")
    assert (status, reason) == ("False", Reason.ARTEFACT_NOT_FOR_CLASS)
    assert "is for CPUs, and the HardwareClass inf2 has devices of inf2" in message

    kube.objects["OptimizedModel", "earlier"]["spec"]["toolchain"]["target"] = "inf1"
    assert "is for devices of inf1" in condition(kube.reconcile(), "Accepted")[2]

    kube.objects["OptimizedModel", "earlier"]["spec"]["toolchain"]["target"] = "inf2"
    kube.reconcile()
    assert env_of(kube.deployment)["PENSTOCK_NEURON_TARGET"] == "inf2"


def test_pods_of_a_class_that_changes_to_devices_keep_what_they_serve_until_it_is_compiled() -> None:
    kube = Kube(cores=2).optimised()
    before = container_of(kube.deployment)
    kube.classes["icelake"]["spec"] = HARDWARE_CLASSES["inf2"].to_object()
    made = kube.reconcile()
    assert container_of(kube.deployment) == before
    assert condition(made, "Available")[0] == "True"
    assert env_of(job_of(kube))["PENSTOCK_NEURON_TARGET"] == "inf2"

    kube.job_succeeds()
    kube.reconcile()
    assert env_of(kube.deployment)["PENSTOCK_NEURON_TARGET"] == "inf2"


def test_a_class_may_request_cores_instead_of_devices() -> None:
    kube = on("shared", 2)
    kube.classes["shared"] = hardware_class(
        "shared", neuron={"coresPerDevice": 2, "resource": "core"}, schedulerName="neuron-scheduler"
    )
    kube.optimised()
    limits = container_of(kube.deployment)["resources"]["limits"]
    assert limits["aws.amazon.com/neuroncore"] == "2"
    assert "aws.amazon.com/neuron" not in limits
    assert pod_of(kube.deployment)["schedulerName"] == "neuron-scheduler"


def test_host_cpus_that_are_shared_do_not_matter_on_devices() -> None:
    kube = on("inf2", 2).optimised()
    (name,) = kube.infos
    kube.infos[name]["host"] |= {"cpus_allowed": list(range(16)), "cores": {"granted": 8, "pinned": False}}
    made = kube.reconcile()
    assert condition(made, "CoresPinned") == (
        "True",
        "NotNeeded",
        "Each pod has 1 aws.amazon.com/neuron, which no other pod gets. The CPUs of its host need not be its own.",
    )
    assert condition(made, "Ready")[0] == "True"


@pytest.mark.parametrize("seconds", [0, 20, 600])
def test_the_process_that_owns_the_cores_has_time_to_end(seconds: int) -> None:
    kube = on("inf2", 2, rollout={"drainSeconds": seconds}).optimised()
    limit = int(env_of(kube.deployment)["PENSTOCK_DRAIN_LIMIT_SECONDS"])
    grace = pod_of(kube.deployment)["terminationGracePeriodSeconds"]
    assert grace == Drain.of(ModelEndpoint.from_object(kube.endpoint).spec, devices=True).grace
    assert grace >= limit + 30


def test_memory_holds_the_compiled_files_and_the_process_that_loads_them() -> None:
    kube = on("inf2", 2).optimised()
    (megabytes,) = [int(container_of(kube.deployment)["resources"]["limits"]["memory"].removesuffix("Mi"))]
    size = kube.objects["OptimizedModel", kube.endpoint["status"]["optimizedModel"]]["status"]["artefact"]["bytes"]
    assert megabytes * 2**20 >= size + 3 * 2**30
    kube.edit(pod={"memory": "6Gi"})
    kube.reconcile()
    assert container_of(kube.deployment)["resources"]["limits"]["memory"] == f"{6 * GIB}Mi"


@pytest.mark.parametrize(
    ("failure", "reason", "words", "remedy"),
    [
        (DeviceFailure.CORES_TAKEN, "DeviceUnavailable", "the NeuronCores are taken by another process", "neuron-ls"),
        (DeviceFailure.NO_DEVICE, "HostUnsuitable", "no Neuron device can be used here", "aws.amazon.com/neuron: 1"),
        (DeviceFailure.NO_DRIVER, "HostUnsuitable", "no Neuron driver is loaded", "Install aws-neuronx-dkms"),
        (DeviceFailure.HARDWARE, "DeviceUnavailable", "the Neuron runtime failed at start", "troubleshooting guide"),
    ],
)
def test_a_pod_without_working_cores_brings_its_reason_and_remedy_into_the_condition(
    failure: DeviceFailure, reason: str, words: str, remedy: str
) -> None:
    kube = on("inf2", 2).optimised()
    (name,) = [name for name in kube.pods if "-pod" not in name]
    report = Failure.of(start_error(failure, "a line of the runtime", visible="0-1")).model_dump_json(by_alias=True)
    ended = {"exitCode": 75, "reason": "Error", "message": report}
    kube.pods[name]["status"] |= {
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [container(restarts=4, waiting=("CrashLoopBackOff", ""), last=ended)],
    }
    kube.objects["Deployment", "emotion"]["status"] |= {"availableReplicas": 0}
    made = kube.reconcile()
    status, found, message = condition(made, "Available")
    assert (status, found) == ("False", reason)
    assert words in message
    assert remedy in message


def test_a_surge_pod_that_waits_for_devices_is_explained_with_them() -> None:
    kube = on("inf2", 2).optimised()
    kube.edit(rollout={"drainSeconds": 7})
    kube.reconcile()
    kube.objects["Deployment", "emotion"]["status"] |= {"updatedReplicas": 0}
    waits = unscheduled("0/1 nodes are available: 1 Insufficient aws.amazon.com/neuron.")
    kube.pod_of("emotion-new", **waits)
    message = condition(kube.reconcile(), "Progressing")[2]
    assert "waits for 1 aws.amazon.com/neuron of hardware class inf2" in message


def test_the_descriptions_of_the_classes_state_that_no_device_was_used() -> None:
    for name in ("inf1", "inf2"):
        assert NOT_RUN.lower() in HARDWARE_CLASSES[name].description.lower()
    assert INF1_UNSUPPORTED in HARDWARE_CLASSES["inf1"].description


def test_runtime_and_job_parse_the_variables_of_their_pods() -> None:
    kube = on("inf2", 2).optimised()
    environment = env_of(kube.deployment)
    variables = NeuronVariables.read(environment)
    assert (variables.neuron_target, variables.neuron_cores) == (NeuronGeneration.INF2, 2)
    read = PodVariables.read(environment, others=[setting.variable for setting in RUNTIME_SETTINGS])
    assert read.name == "emotion"
    assert JobVariables.read(env_of(job_of(kube))).neuron_target is NeuronGeneration.INF2


def test_settings_name_the_images_and_the_size_of_compile_jobs() -> None:
    made = InferentiaSettings().plan_settings()
    assert made.runtime_image.startswith("localhost/penstock-runtime-neuron:")
    assert made.legacy_optimizer_image.startswith("localhost/penstock-optimizer-neuron-legacy:")
    assert made.compile_cpus >= 4
    assert Fraction(made.compile_seconds) >= 3600


PROVISIONAL: Json = {
    "requestsPerSecond": 200.0,
    "p95ObjectiveMilliseconds": 20.0,
    "provisional": True,
    "points": [
        {"requestsPerSecond": 100.0, "completedPerSecond": 100.0, "p95Milliseconds": 9.0},
        {"requestsPerSecond": 200.0, "completedPerSecond": 200.0, "p95Milliseconds": 19.0},
    ],
}
MEASURED: Json = {
    "requestsPerSecond": 90.0,
    "p95ObjectiveMilliseconds": 20.0,
    "points": [
        {"requestsPerSecond": 50.0, "completedPerSecond": 50.0, "p95Milliseconds": 9.0},
        {"requestsPerSecond": 90.0, "completedPerSecond": 90.0, "p95Milliseconds": 18.0},
    ],
}


def serving_provisionally(**spec: Any) -> Kube:
    """An endpoint whose pods serve a compiled model that no device has measured."""
    kube = on("inf2", 2, **spec)
    kube.reconcile()
    kube.job_succeeds(result(capacity=PROVISIONAL, pinned=None))
    kube.reconcile()
    kube.pods_serve()
    return kube


def report_capacity(kube: Kube, **capacity: Any) -> None:
    for body in kube.infos.values():
        body["capacity"] = {"state": "measured", "message": "", "facts": None, **capacity}


def decided(kube: Kube, reason: str) -> None:
    """The autoscaler has decided, with this reason of the condition CurveCurrent."""
    kube.scale = DesiredScale(1, curve=no(reason, "x"))


def capacity_in_status(kube: Kube) -> Json:
    name = kube.endpoint["status"]["optimizedModel"]
    found: Json = kube.objects["OptimizedModel", name]["status"]["result"]["capacity"]
    return found


def test_pods_of_a_compiled_model_measure_their_capacity_before_they_are_ready() -> None:
    assert container_of(on("inf2", 2).optimised().deployment)["command"][-1] == "penstock_optimizer.capacity"
    assert container_of(Kube().optimised().deployment)["command"][-1] == "penstock_runtime.pod"


@pytest.mark.parametrize("stated", [True, False])
def test_what_a_pod_measures_replaces_the_provisional_capacity_without_a_rollout(*, stated: bool) -> None:
    kube = serving_provisionally(**({"objective": {"latency": {"p95Milliseconds": 20.0}}} if stated else {}))
    decided(kube, "AsMeasured")
    before = kube.reconcile()
    template = kube.template_hash
    assert capacity_in_status(kube)["provisional"] is True
    status, reason, message = condition(before, "CurveCurrent")
    assert (status, reason) == ("False", Reason.PROVISIONAL)
    assert "the slow end of published figures for models of this size (200 requests/s for one replica)" in message
    assert before.status["p95"] == ""
    if stated:
        assert condition(before, "ObjectiveMet")[:2] == ("Unknown", Reason.NOT_MEASURED)

    report_capacity(kube, facts={**MEASURED, "p95ObjectiveMilliseconds": 21.5})
    after = kube.reconcile()
    found = capacity_in_status(kube)
    assert (found["requestsPerSecond"], found["p95ObjectiveMilliseconds"]) == (90.0, 21.5)
    assert not found.get("provisional")
    assert condition(kube.reconcile(), "CurveCurrent")[1] == "AsMeasured"
    assert kube.template_hash == template
    assert after.status["p95"] == "9.0 ms"
    # A later pod does not replace it.
    report_capacity(kube, facts={**MEASURED, "requestsPerSecond": 1.0})
    kube.reconcile()
    assert capacity_in_status(kube)["requestsPerSecond"] == 90.0


@pytest.mark.parametrize(("mode", "kind"), [("HPA", HPA), ("KEDA", SCALED_OBJECT)])
@pytest.mark.parametrize("capacity", [PROVISIONAL, MEASURED], ids=["provisional", "measured"])
def test_other_scalers_follow_the_decision_as_on_cpus(mode: str, kind: str, capacity: Json) -> None:
    scaling = {"mode": mode, "maxReplicas": 40}
    specs = []
    for kube in (on("inf2", 2, scaling=scaling), Kube(scaling=scaling)):
        kube.settings = KEDA
        kube.reconcile()
        kube.job_succeeds(result(capacity=capacity, pinned=None))
        kube.reconcile()
        kube.pods_serve()
        kube.scale = DesiredScale(11, "11 replicas: 1,100 requests/s.")
        kube.reconcile()
        specs.append(kube.objects[kind, "emotion"]["spec"])

    assert specs[0] == specs[1]
    assert METRIC in json.dumps(specs[0])


@pytest.mark.parametrize(
    ("artefact", "facts"),
    [("sha256:" + "0" * 64, MEASURED), (None, PROVISIONAL), (None, {**MEASURED, "points": []})],
)
def test_other_reports_leave_the_provisional_capacity(artefact: str | None, facts: Json) -> None:
    kube = serving_provisionally()
    report_capacity(kube, facts=facts)
    if artefact is not None:
        for name in kube.infos:
            kube.pods[name]["metadata"]["annotations"][ARTEFACT] = artefact
    kube.reconcile()
    assert capacity_in_status(kube)["requestsPerSecond"] == 200.0


def test_a_pod_on_cpus_does_not_replace_what_its_job_measured() -> None:
    kube = Kube().optimised()
    report_capacity(kube, facts=MEASURED)
    kube.reconcile()
    assert capacity_in_status(kube)["requestsPerSecond"] == 88.0


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({"state": "measuring"}, "A pod measures it now, before it is ready."),
        ({"state": "failed", "message": "no\x1b time"}, "could not measure it: no  time. Its next start tries again"),
        ({"state": "known"}, "The next pod that starts measures it before it is ready."),
    ],
)
def test_a_capacity_that_is_not_known_comes_with_what_makes_it_known(report: Json, words: str) -> None:
    kube = on("inf2", 2)
    kube.reconcile()
    kube.job_succeeds(result(capacity={}))
    kube.reconcile()
    kube.pods_serve()
    report_capacity(kube, **report)
    decided(kube, "NoCurve")
    status, reason, message = condition(kube.reconcile(), "CurveCurrent")
    assert (status, reason) == ("False", Reason.NO_CURVE)
    assert message.startswith("No pod has measured the capacity of a replica yet.")
    assert words in message
    assert message.endswith("Until then the number of replicas stays as it is.")


@pytest.mark.parametrize(
    ("capacity", "words"),
    [
        ({}, "Raise spec.optimization.budgetSeconds, which starts another run; to try again with the same: kubectl"),
        ({"points": [{"requestsPerSecond": 9, "completedPerSecond": 1, "p95Milliseconds": 9}]}, "kept up with none"),
    ],
)
def test_on_cpus_it_does_as_well(capacity: Json, words: str) -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_runs(baseline=True)
    decided(kube, "NoCurve")
    assert "The fp32 model serves, which is not measured." in condition(kube.reconcile(), "CurveCurrent")[2]
    kube.job_succeeds(result(capacity=capacity))
    kube.reconcile()
    kube.pods_serve()
    assert words in condition(kube.reconcile(), "CurveCurrent")[2]
