"""A fake cluster with one endpoint, for tests of plans: objects as JSON, and the work of controllers and kubelets.

`act` carries out a plan. Tests make things happen with `job_runs`, `pods_serve`, ... Objects are parsed with the same
`from_object` as in the operator.
"""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.artefact_store import Digest, StoreUri
from penstock.resources.hardware_class import NamespaceSelector
from penstock.resources.job_summary import Failure, Summary
from penstock.resources.result import ArtefactReference, Result
from penstock_operator.endpoint.objects.rollout import with_template_of
from penstock_operator.endpoint.plan import plan
from penstock_operator.endpoint.snapshot import EndpointSnapshot, ReconcilePlan
from penstock_operator.facts import names
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import Ref
from penstock_operator.facts.pods import JobFacts, JobReport, Neighbour, RuntimePod
from penstock_operator.facts.routes import HostClaim, RouteFacts
from penstock_operator.facts.scaling import CanaryReport, DesiredScale, ScalerFacts
from penstock_operator.facts.tenants import AllowList, HostRule
from penstock_operator.facts.workloads import DeploymentFacts, ModelUser, OptimizedModelFacts, ReplicaSetFacts
from penstock_operator.limits.quotas import Amount, Claim, Limit, NamespaceUse, claim_of

Json = dict[str, Any]
BEGIN = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
SCALERS = {"HorizontalPodAutoscaler", "ScaledObject"}
ROUTES = {"Ingress", "HTTPRoute"}
SETTINGS = PlanSettings(
    runtime_image="localhost/penstock-runtime:0.2.0",
    optimizer_image="localhost/penstock-optimizer:0.2.0",
    toolchain="0.2.0",
    allowed=AllowList(
        file_prefixes=("/models",),
        tolerations=("spot",),
        node_selectors=("zone",),
        labels=("team", "changed", "a"),
        annotations=("note",),
        priority_classes=("high",),
        service_accounts=("reader",),
        hosts=(HostRule(hosts=("*.example.com",), namespace_selector=NamespaceSelector()),),
    ),
    gateway_api=True,
)
ICE_LAKE = {
    "vendor": "GenuineIntel",
    "family": 6,
    "model": 106,
    "stepping": 6,
    "model_name": "Intel(R) Xeon(R) Platinum 8375C",
    "isa": "avx512-vnni",
}
ZEN3 = {
    "vendor": "AuthenticAMD",
    "family": 25,
    "model": 1,
    "stepping": 1,
    "model_name": "AMD EPYC 7763",
    "isa": "avx2",
}


def digest(letter: str) -> str:
    return f"sha256:{letter * 64}"


BASELINE, RESULT, OTHER = digest("b"), digest("a"), digest("c")


def hardware_class(name: str = "any", **spec: Any) -> Json:
    return {
        "apiVersion": names.API_VERSION,
        "kind": "HardwareClass",
        "metadata": {"name": name, "uid": f"class-{name}"},
        "spec": spec,
    }


def reference(artefact: str, size: int | None = 250_000_000, *, store: StoreUri | None = None) -> ArtefactReference:
    """As a job of the namespace `a` reports an artefact that it published."""
    store = store or SETTINGS.store_of("a")
    return ArtefactReference(digest=artefact, uri=store.of(Digest.parse(artefact)), bytes=size)


def result(**update: Any) -> Result:
    value: Json = {
        "plan": {
            "summary": "openvino-int8, 2x1 threads",
            "engine": "openvino",
            "precision": "int8-static",
            "streams": 2,
            "threadsPerStream": 1,
            "batching": "padded",
        },
        "accuracy": {
            "withinBudget": True,
            "reason": "argmax_agreement 0.998 is within the budget of 0.99",
            "texts": 512,
        },
        "speedUp": 4.71,
        "capacity": {
            "requestsPerSecond": 88.0,
            "p95ObjectiveMilliseconds": 20.0,
            "points": [
                {"requestsPerSecond": 20.0, "completedPerSecond": 20.0, "p95Milliseconds": 9.1},
                {"requestsPerSecond": 60.0, "completedPerSecond": 60.0, "p95Milliseconds": 14.2},
                {"requestsPerSecond": 100.0, "completedPerSecond": 97.0, "p95Milliseconds": 26.0},
            ],
        },
        "cpu": {
            "vendor": "GenuineIntel",
            "family": 6,
            "model": 106,
            "stepping": 6,
            "modelName": "Intel(R) Xeon(R) Platinum 8375C",
            "isa": "avx512-vnni",
        },
        "cores": 2,
        "pinned": True,
        "modelDigest": "sha256:" + "d" * 64,
        "parameters": 66_000_000,
        "residentBytes": 600_000_000,
    }
    return Result.model_validate({**value, **update})


def guaranteed(container: Json) -> Json:
    """The resources of a container, whose requests are its limits but for the disk."""
    parts = [
        {name: amount for name, amount in container["resources"][part].items() if name != "ephemeral-storage"}
        for part in ("requests", "limits")
    ]
    assert parts[0] == parts[1]
    return parts[1]


def token_result(**update: Any) -> Result:
    """Of text generation: 8 clients get 300 tokens/s within the limits."""
    points = [(1, 60, 100), (2, 110, 150), (4, 190, 220), (8, 300, 400), (16, 360, 900)]
    capacity: Json = {
        "tokensPerSecond": 300.0,
        "firstTokenObjectiveMilliseconds": 500.0,
        "nextTokenObjectiveMilliseconds": 100.0,
        "points": [
            {
                "clients": clients,
                "requestsPerSecond": tokens / 60,
                "tokensPerSecond": tokens,
                "firstTokenP95Milliseconds": first,
                "nextTokenP95Milliseconds": 20,
            }
            for clients, tokens, first in points
        ],
    }
    return result(capacity={}, tokenCapacity={**capacity, **update})


class Kube:
    """The cluster."""

    def __init__(self, *, settings: PlanSettings = SETTINGS, name: str = "emotion", **spec: Any) -> None:
        self.now = BEGIN
        self.settings = settings
        self.endpoint: Json = {
            "apiVersion": names.API_VERSION,
            "kind": "ModelEndpoint",
            "metadata": {"name": name, "namespace": "a", "uid": "uid-endpoint", "generation": 1},
            "spec": {
                "model": "hf://org/emotion@main",
                "task": "text-classification",
                "hardwareClass": "icelake",
                "cores": 2,
                **spec,
            },
            "status": {},
        }
        self.classes: dict[str, Json] = {
            "any": hardware_class(),
            "icelake": hardware_class(
                "icelake",
                threadsPerCore=2,
                isa="avx512-vnni",
                nodeSelectorTerms=[
                    {"matchExpressions": [{"key": "penstock.dev/class", "operator": "In", "values": ["icelake"]}]}
                ],
                tolerations=[{"key": "dedicated", "operator": "Exists"}],
            ),
        }
        self.objects: dict[tuple[str, str], Json] = {}
        self.pods: dict[str, Json] = {}
        self.infos: dict[str, Json] = {}
        self.job_reports: dict[str, JobReport] = {}
        self.neighbours: list[Neighbour] = []
        self.conflicting: set[Ref] = set()
        self.nodes: list[Json] = []
        self.namespace_labels: dict[str, str] = {}
        self.texts: tuple[str, ...] | None = None
        self.scale: DesiredScale | None = None
        self.canary_report: CanaryReport | None = None
        self.quota: tuple[Limit, tuple[Claim, ...]] | None = None
        """Of its namespace, and the claims of the other endpoints."""
        self.kedas: list[ScalerFacts] = []
        """What KEDA has made."""
        self.unknown_kinds: set[str] = set()
        self.host_claims: list[HostClaim] = []
        self.other_users: dict[str, list[ModelUser]] = {}
        self.deleted: list[Ref] = []
        self._made = 0
        self._replicas_ours: set[tuple[str, str]] = set()

    # The observed state

    @property
    def name(self) -> str:
        return str(self.endpoint["metadata"]["name"])

    @property
    def spec(self) -> Json:
        spec: Json = self.endpoint["spec"]
        return spec

    def edit(self, **spec: Any) -> None:
        """As `kubectl apply` of a changed spec. None removes a field: the API server stores no null."""
        changed = {**self.spec, **spec}
        self.endpoint["spec"] = {name: value for name, value in changed.items() if value is not None}
        self.endpoint["metadata"]["generation"] += 1

    def observed(self) -> EndpointSnapshot:
        value = copy.deepcopy(self.endpoint)
        found = self.objects.get(("Deployment", self.name))
        gateway = self.objects.get(("Deployment", names.gateway_name(self.name)))
        canary = self.objects.get(("Deployment", names.canary_name(self.name)))
        return EndpointSnapshot(
            endpoint=value,
            now=self.now,
            settings=self.settings,
            hardware_classes=copy.deepcopy(self.classes),
            optimized_models=tuple(
                self._model(name) for kind, name in sorted(self.objects) if kind == "OptimizedModel"
            ),
            deployment=None if found is None else DeploymentFacts.from_object(found),
            gateway=None if gateway is None else DeploymentFacts.from_object(gateway),
            replica_sets=tuple(
                ReplicaSetFacts.from_object(value) for (kind, _), value in self.objects.items() if kind == "ReplicaSet"
            ),
            pods=tuple(
                RuntimePod.from_object(pod, self.infos.get(name))
                for name, pod in sorted(self.pods.items())
                if pod["metadata"]["labels"][names.NAME] == names.RUNTIME
                and names.CANARY not in pod["metadata"]["labels"]
            ),
            canary=None if canary is None else DeploymentFacts.from_object(canary),
            canary_pods=tuple(
                RuntimePod.from_object(pod, self.infos.get(name))
                for name, pod in sorted(self.pods.items())
                if names.CANARY in pod["metadata"]["labels"]
            ),
            canary_report=self.canary_report,
            neighbours=tuple(self.neighbours),
            present=frozenset(Ref(kind, name) for kind, name in self.objects),
            conflicting=frozenset(self.conflicting),
            workload_texts=self.texts,
            namespace_labels=self.namespace_labels,
            nodes=tuple(self.nodes),
            quota=self._quota(),
            scale=self.scale,
            scalers=(
                *(ScalerFacts.from_object(value) for (kind, _), value in self.objects.items() if kind in SCALERS),
                *self.kedas,
            ),
            unknown_kinds=frozenset(self.unknown_kinds),
            route=next(
                (RouteFacts.from_object(value) for (kind, _), value in self.objects.items() if kind in ROUTES), None
            ),
            host_claims=tuple(self.host_claims),
        )

    def _quota(self) -> NamespaceUse | None:
        if self.quota is None:
            return None
        limit, others = self.quota
        claim, deployment = claim_of(self.endpoint), self.objects.get(("Deployment", self.name))
        if deployment is None:
            return NamespaceUse(limit, claim, others)
        facts = DeploymentFacts.from_object(deployment)
        hpa = self.objects.get(("HorizontalPodAutoscaler", self.name))
        replicas = max(facts.wanted, hpa["spec"]["maxReplicas"] if hpa is not None else 0)
        has = Amount(replicas * facts.cores, replicas)
        return NamespaceUse(limit, claim.having(has, cores=max(claim.cores, facts.cores)), others)

    def _model(self, name: str) -> OptimizedModelFacts:
        jobs = []
        for (kind, job_name), job in sorted(self.objects.items()):
            owners = {owner["uid"] for owner in job["metadata"].get("ownerReferences", ())}
            if kind == "Job" and self.objects["OptimizedModel", name]["metadata"]["uid"] in owners:
                pod = self.pods.get(f"{job_name}-pod")
                jobs.append(JobFacts.from_object(job, pod, self.job_reports.get(job_name)))
        status = self.endpoint["status"]
        users = list(self.other_users.get(name, []))
        if name in {status.get("optimizedModel"), (status.get("plan") or {}).get("optimizedModel")}:
            users.append(ModelUser(self.name, self.endpoint["metadata"]["uid"]))
        return OptimizedModelFacts.from_object(self.objects["OptimizedModel", name], tuple(jobs), tuple(users))

    # The actions of a plan

    def plan(self) -> ReconcilePlan:
        return plan(self.observed())

    def act(self, made: ReconcilePlan) -> None:
        """Act as the operator: delete, apply, write."""
        for ref in made.delete:
            if ref.kind == "Pod":
                self.pods[ref.name]["metadata"]["deletionTimestamp"] = self.now.isoformat()
                continue
            assert (ref.kind, ref.name) in self.objects, f"{ref} does not exist and cannot be deleted"
            self.delete(ref)
        for value in made.apply:
            if made.template_of and (value["kind"], value["metadata"]["name"]) == ("Deployment", self.name):
                self.apply(with_template_of(value, self.objects["ReplicaSet", made.template_of]))
            else:
                self.apply(value)
        if made.scaled is not None:
            assert made.object("Deployment", self.name) is None
            self.deployment["spec"]["replicas"] = made.scaled
        for write in made.optimized_status:
            self.objects["OptimizedModel", write.name]["status"] = copy.deepcopy(write.status)
        self.endpoint["status"] = copy.deepcopy(made.status)

    def apply(self, value: Json) -> None:
        key = (value["kind"], value["metadata"]["name"])
        made = copy.deepcopy(value)
        present = self.objects.get(key)
        if value["kind"] == "Deployment" and "replicas" not in value["spec"]:
            # Another owner of the number keeps it; without one it falls back to the default.
            ours = present is None or key in self._replicas_ours
            made["spec"]["replicas"] = 1 if ours or present is None else present["spec"]["replicas"]
        self._replicas_ours.discard(key)
        if "replicas" in value.get("spec", {}):
            self._replicas_ours.add(key)
        if present is None:
            self._made += 1
            made["metadata"].update(
                uid=f"uid-{self._made}", generation=1, creationTimestamp=self.now.isoformat().replace("+00:00", "Z")
            )
        else:
            if value["kind"] in {"OptimizedModel", "Job"}:
                assert present["spec"] == value["spec"], f"{key} cannot be changed"
            made["metadata"] |= {k: present["metadata"][k] for k in ("uid", "generation", "creationTimestamp")}
            made["status"] = present.get("status") or {}
            if made.get("spec") != present.get("spec"):
                made["metadata"]["generation"] += 1
        self.objects[key] = made

    def delete(self, ref: Ref) -> None:
        self.deleted.append(ref)
        self.objects.pop((ref.kind, ref.name), None)
        self.pods.pop(f"{ref.name}-pod", None)

    def reconcile(self) -> ReconcilePlan:
        """Plan and act until nothing changes; returns the last plan."""
        for _ in range(8):
            before = self.picture()
            made = self.plan()
            self.act(made)
            if self.picture() == before:
                return made
        raise AssertionError("the plans do not settle: a plan is not idempotent")

    def picture(self) -> Json:
        return copy.deepcopy({"objects": self.objects, "status": self.endpoint["status"]})

    def pass_by(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    # Events of the job

    @property
    def job(self) -> str:
        """The name of the newest job of the current spec."""
        model = self.endpoint["status"]["optimizedModel"]
        jobs = [name for kind, name in self.objects if kind == "Job" and name.startswith(f"{model}-")]
        return max(jobs, key=lambda name: int(name.rpartition("-")[2]))

    def job_runs(self, done: int = 7, of: int = 23, *, baseline: bool = False) -> None:
        """Its pod runs and reports its progress."""
        job = self.objects["Job", self.job]
        (container_of_job,) = job["spec"]["template"]["spec"]["containers"]
        values = {entry["name"]: entry.get("value") for entry in container_of_job["env"]}
        uri = reference(BASELINE, store=StoreUri.parse(values["PENSTOCK_STORE_URI"])).uri
        published = {"digest": BASELINE, "uri": uri, "bytes": 260000000} if baseline else None
        self.job_reports[self.job] = JobReport.from_json(
            {"done": done, "of": of, "stage": "candidates", "message": "int8", "baseline": published}
        )
        self.job_pod(phase="Running", containerStatuses=[container(running=True)])

    def job_pod(self, **status: Any) -> None:
        job = self.objects["Job", self.job]
        name = f"{self.job}-pod"
        self.pods[name] = {
            "metadata": {
                "name": name,
                "uid": f"uid-{name}",
                "labels": dict(job["metadata"]["labels"]),
                "ownerReferences": [{"kind": "Job", "name": self.job, "uid": "x", "controller": True}],
            },
            "spec": {**job["spec"]["template"]["spec"], "nodeName": status.pop("node", "node-1")},
            "status": status,
        }

    def job_ends(self, message: str, *, code: int = 0, reason: str = "", **pod: Any) -> None:
        ended = {"exitCode": code, "reason": reason or ("Completed" if code == 0 else "Error"), "message": message}
        phase = "Succeeded" if code == 0 else "Failed"
        self.job_pod(phase=phase, containerStatuses=[container(ended=ended)], **pod)
        self._job_condition("Complete" if code == 0 else "Failed", "" if code == 0 else "BackoffLimitExceeded")

    def job_pod_fails(self, reason: str, message: str = "", **pod: Any) -> None:
        """The pod ends, and its process has left no message."""
        self.job_pod(phase="Failed", reason=reason, message=message, **pod)
        self._job_condition("Failed", "BackoffLimitExceeded")

    def _job_condition(self, kind: str, reason: str) -> None:
        self.objects["Job", self.job]["status"] = {
            "conditions": [
                {
                    "type": kind,
                    "status": "True",
                    "reason": reason,
                    "message": "Job has reached the specified backoff limit" if reason else "",
                    "lastTransitionTime": self.now.isoformat().replace("+00:00", "Z"),
                }
            ]
        }

    def job_succeeds(self, found: Result | None = None, artefact: str = RESULT) -> None:
        store = self.settings.store_of("a")
        summary = Summary(
            succeeded=True,
            artefact=reference(artefact, store=store),
            baseline=reference(BASELINE, store=store),
            result=found or result(),
        )
        self.job_ends(summary.to_message())

    def publish(self, name: str, artefact: str, *, baseline: str = "") -> None:
        """Another OptimizedModel of the namespace, made for a model of earlier, which no endpoint uses."""
        self.objects["OptimizedModel", name] = {
            "metadata": {"name": name, "uid": f"uid-{name}", "generation": 1},
            "spec": {
                "model": "hf://org/earlier@main",
                "task": "text-classification",
                "toolchain": {"image": "x", "version": "0.1.0"},
            },
            "status": {
                "phase": "Ready",
                "artefact": reference(artefact).to_object(),
                **({"baseline": reference(baseline).to_object()} if baseline else {}),
            },
        }

    def job_fails(
        self, reason: str, message: str = "it went wrong", *, retryable: bool, remedy: str = "Mend it"
    ) -> None:
        failure = Failure(reason=reason, message=message, remedy=remedy, retryable=retryable)
        self.job_ends(Summary(succeeded=False, failure=failure).to_message(), code=75 if retryable else 1)

    # Events of the pods

    @property
    def deployment(self) -> Json:
        return self.objects["Deployment", self.name]

    def pod_of(self, name: str, **status: Any) -> Json:
        """A pod of the Deployment as it is now."""
        template = self.deployment["spec"]["template"]
        pod: Json = {
            "metadata": {
                "name": name,
                "uid": f"uid-{name}",
                "labels": dict(template["metadata"]["labels"]),
                "annotations": dict(template["metadata"]["annotations"]),
                "ownerReferences": [{"kind": "ReplicaSet", "name": "rs", "uid": "x", "controller": True}],
            },
            "spec": {**copy.deepcopy(template["spec"]), "nodeName": status.pop("node", "node-1")},
            "status": {"phase": "Running", "qosClass": "Guaranteed", **status},
        }
        if not pod["spec"]["nodeName"]:
            del pod["spec"]["nodeName"]
        self.pods[name] = pod
        return pod

    def pods_serve(self, *, first_cpu: int = 4, pinned: bool = True, cpu: Json | None = None) -> None:
        """The Deployment's controller and the kubelet have finished: all replicas are new, ready, and have reported."""
        runtime = [n for n, pod in self.pods.items() if pod["metadata"]["labels"][names.NAME] == names.RUNTIME]
        for name in runtime:
            del self.pods[name]
        self.infos.clear()
        wanted = self.deployment["spec"].get("replicas", 1)
        start = first_cpu
        for index in range(wanted):
            name = f"{self.name}-{self.template_hash[:5]}-{index}"
            self.pod_of(
                name, conditions=[{"type": "Ready", "status": "True"}], containerStatuses=[container(ready=True)]
            )
            count = self.cpus
            self.infos[name] = info(range(start, start + count), pinned=pinned, cpu=cpu)
            start += count
        self.deployment_status(updated=wanted, available=wanted, replicas=wanted)

    def deployment_status(self, *, updated: int, available: int, replicas: int, reason: str = "") -> None:
        deployment = self.deployment
        deployment["status"] = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": replicas,
            "updatedReplicas": updated,
            "readyReplicas": available,
            "availableReplicas": available,
            "conditions": [
                {"type": "Progressing", "status": "True", "reason": reason or "NewReplicaSetAvailable", "message": ""}
            ],
        }

    @property
    def template_hash(self) -> str:
        return str(self.deployment["spec"]["template"]["metadata"]["annotations"][names.TEMPLATE_HASH])

    @property
    def artefact(self) -> str:
        return str(self.deployment["spec"]["template"]["metadata"]["annotations"][names.ARTEFACT])

    @property
    def cpus(self) -> int:
        spec = self.deployment["spec"]["template"]["spec"]
        return int(spec["containers"][0]["resources"]["requests"]["cpu"])

    # Shortcuts

    def optimised(self) -> Kube:
        """An endpoint whose job has ended and whose pods serve."""
        self.reconcile()
        self.job_succeeds()
        self.reconcile()
        self.pods_serve()
        self.reconcile()
        return self


def unscheduled(message: str) -> Json:
    """The status of a pod that no node takes."""
    found = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"node": "", "phase": "Pending", "conditions": [found]}


def container(
    *,
    ready: bool = False,
    running: bool = False,
    restarts: int = 0,
    waiting: tuple[str, str] | None = None,
    ended: Json | None = None,
    last: Json | None = None,
) -> Json:
    state: Json = {}
    if waiting is not None:
        state = {"waiting": {"reason": waiting[0], "message": waiting[1]}}
    elif ended is not None:
        state = {"terminated": ended}
    elif ready or running:
        state = {"running": {}}
    return {
        "name": names.CONTAINER,
        "ready": ready,
        "restartCount": restarts,
        "state": state,
        "lastState": {} if last is None else {"terminated": last},
    }


def info(
    cpus: Any,
    *,
    pinned: bool = True,
    cpu: Json | None = None,
    quota: float | None = None,
    findings: tuple[str, ...] = (),
    tokens: int | None = None,
) -> Json:
    """The body that a runtime answers at /info."""
    numbers = list(cpus)
    return {
        "plan": {"summary": "openvino-int8, 2x1 threads"},
        "artefact": {"key": "k", "cpu": ICE_LAKE},
        "access": {"tokens": tokens},
        "host": {
            "cpu": cpu or ICE_LAKE,
            "cpus_allowed": numbers,
            "quota": quota,
            "cores": {"granted": len(numbers) // 2 or 1, "cpus": numbers, "pinned": pinned, "findings": list(findings)},
        },
    }


def condition(made: ReconcilePlan, kind: str) -> tuple[str, str, str]:
    """Status, reason and message of a condition."""
    found = next(entry for entry in made.status["conditions"] if entry["type"] == kind)
    return found["status"], found["reason"], found["message"]
