"""Conditions about the pods: CoresPinned, Available and Progressing, and the problems of pods that do not serve.

A kubelet without static CPU management accepts the same pod and lets it share cores, and the API does not show it. So
each runtime pod reports where the kernel lets it run, and pinning is judged from the report: as many CPUs as requested,
whole cores, not shared with another runtime pod, and no CFS quota below them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from penstock.hardware import CpuIdentity
from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.job_summary import Failure
from penstock_operator.plan.conditions import Finding, Reason, no, sentence, stopped, unknown, yes
from penstock_operator.plan.endpoint import ParsedEndpoint
from penstock_operator.plan.job_outcome import IMAGE_PULL_REASONS, waiting
from penstock_operator.plan.names import ENDPOINT
from penstock_operator.plan.observed import DeploymentFacts, Neighbour
from penstock_operator.plan.scaling import ReplicaTarget
from penstock_operator.plan.serving import ServingChoice
from penstock_operator.plan.turns import TurnDecision
from penstock_operator.plan.workloads import HostReport, PodFacts, RuntimePod
from penstock_operator.pod_data import MESSAGE_MAX_BYTES, read_json

REMEDY = (
    "run the nodes of this class with cpuManagerPolicy: static and the full-pcpus-only option, then delete the pod "
    "(docs/reference/conditions.md#corespinned)"
)


@dataclass(frozen=True)
class PinVerdict:
    """What is known about the cores of one pod."""

    pod: str
    node: str
    pinned: bool | None
    """None: it has not reported yet."""
    reason: str = ""
    """CamelCase; empty when pinned."""
    message: str = ""
    """Why it is not pinned, or why that is not known."""
    wrong_cpu: str = ""
    """Why the node's processor cannot serve this plan; empty when it can."""


def judge_pinning(
    pods: Iterable[RuntimePod],
    *,
    cpus: int,
    hardware: HardwareClassSpec | None = None,
    class_name: str = "",
    namespace: str = "",
    neighbours: Iterable[Neighbour] = (),
) -> tuple[PinVerdict, ...]:
    """A verdict on each pod, in the given order.

    `cpus`: what each pod has to own (cores x threads per core), unless the pod itself requested another number: pods of
    an older plan did. `hardware`: the class that states a processor; None: any. `namespace`: of the pods. `neighbours`:
    runtime pods of other endpoints on the same nodes; those of other namespaces are not named.

    On Inferentia, only pods that have not reported have a verdict.
    """
    judged = tuple(pods)
    if hardware is not None and hardware.neuron is not None:
        # Devices compute. The runtime compares them with the artefact before it loads it.
        return tuple(_judge(entry, cpus, "", ()) for entry in judged if entry.report is None)
    others = [
        (entry.node, entry.name if entry.namespace == namespace else "", frozenset(entry.cpus)) for entry in neighbours
    ]
    others += [
        (entry.pod.node, entry.pod.name, frozenset(entry.report.cpus)) for entry in judged if entry.report is not None
    ]
    return tuple(
        _judge(entry, entry.pod.cpus or cpus, _wrong_cpu(entry.report, hardware, class_name), others)
        for entry in judged
    )


def _judge(entry: RuntimePod, cpus: int, wrong: str, others: Iterable[tuple[str, str, frozenset[int]]]) -> PinVerdict:
    pod, report = entry.pod, entry.report
    if pod.qos and pod.qos != "Guaranteed":
        # Judged without a report: the kubelet gives exclusive cores to Guaranteed pods only.
        return PinVerdict(
            pod.name,
            pod.node,
            pinned=False,
            reason=Reason.NOT_GUARANTEED,
            message=f"its QoS class is {pod.qos}: something (a LimitRange, a sidecar injector) changed its resources; "
            "exempt pods with the label app.kubernetes.io/name=penstock-runtime from it",
        )
    if report is None:
        why = entry.report_problem or "it has not started to serve yet"
        return PinVerdict(pod.name, pod.node, pinned=None, reason=Reason.NOT_REPORTED, message=why)
    own = frozenset(report.cpus)

    def shared(reason: str, message: str) -> PinVerdict:
        return PinVerdict(pod.name, pod.node, pinned=False, reason=reason, message=message, wrong_cpu=wrong)

    if len(own) > cpus:
        return shared(
            Reason.SHARED_CORES,
            f"it may run on CPUs {cpu_list(own)}, more than its {_cpus(cpus)}: these are the shared CPUs of the node, "
            f"not its own; {REMEDY}",
        )
    if len(own) < cpus:
        return shared(
            Reason.TOO_FEW_CORES,
            f"it may run on {_cpus(len(own))} ({cpu_list(own)}) of the {_cpus(cpus)} that it asked for; delete the "
            "pod, and look at the kubelet's log if it comes back so",
        )
    for node, name, theirs in others:
        if node == pod.node and name != pod.name and own & theirs:
            with_pod = f"the pod {name}" if name else "a pod of another namespace"
            return shared(Reason.SHARED_CORES, f"it shares CPUs {cpu_list(own & theirs)} with {with_pod}; {REMEDY}")
    if report.quota is not None and report.quota + 1e-6 < cpus:
        return shared(
            Reason.THROTTLED,
            f"a quota of {report.quota:g} CPUs stops its {_cpus(cpus)} now and then; use Kubernetes 1.33 or later, or "
            "cpuCFSQuota: false on the nodes of this class",
        )
    if not report.pinned:
        return shared(
            Reason.NOT_WHOLE_CORES, f"{'; '.join(report.findings) or 'it does not own whole cores'}; {REMEDY}"
        )
    return PinVerdict(pod.name, pod.node, pinned=True, wrong_cpu=wrong)


def _wrong_cpu(report: HostReport | None, hardware: HardwareClassSpec | None, name: str) -> str:
    """Why the processor is not the measured or the stated one; empty when it is, or when that is not known."""
    if report is None or not report.cpu:
        return ""
    try:
        found = CpuIdentity.model_validate(report.cpu)
        measured = CpuIdentity.model_validate(report.measured_on) if report.measured_on else None
    except ValidationError:  # a runtime of another version
        return ""
    against_plan = found.objection(measured) if measured is not None else ""
    return against_plan or ("" if hardware is None else hardware.objection(found, name=name))


def cpu_list(cpus: Iterable[int]) -> str:
    """CPU numbers in the kernel's list format, such as `0-3,8`."""
    parts: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in parts) or "none"


def _cpus(count: int) -> str:
    return "1 CPU" if count == 1 else f"{count} CPUs"


def cores_pinned(verdicts: Sequence[PinVerdict], serving: Collection[str], *, devices: str = "") -> Finding:
    """The condition CoresPinned; `serving` are the names of the ready pods. `devices`: what a pod requests, such as
    `1 aws.amazon.com/neuron`; empty: CPUs compute.

    One pod that shares its cores makes it false. A pod without a report makes it unknown only when it is ready:
    starting pods report soon.
    """
    if devices:
        return yes(
            Reason.NOT_NEEDED,
            f"Each pod has {devices}, which no other pod gets. The CPUs of its host need not be its own.",
        )
    if not verdicts:
        return unknown(Reason.NO_PODS, "No pod runs that could say where.")
    shared = [verdict for verdict in verdicts if verdict.pinned is False]
    if shared:
        first = shared[0]
        more = f" (and {len(shared) - 1} more pods)" if len(shared) > 1 else ""
        where = f" on the node {first.node}" if first.node else ""
        return no(first.reason, sentence(f"the pod {first.pod}{where}{more}: {first.message}"))
    silent = [verdict for verdict in verdicts if verdict.pinned is None and verdict.pod in serving]
    if silent:
        return unknown(
            Reason.NOT_REPORTED,
            sentence(f"the pod {silent[0].pod} has not reported where it runs: {silent[0].message}"),
        )
    own = sum(1 for verdict in verdicts if verdict.pinned)
    if not own:
        return unknown(Reason.NOT_REPORTED, "The pods are starting and have not reported where they run.")
    return yes(Reason.PINNED, "The pod owns its cores." if own == 1 else f"All {own} pods own their cores.")


CRASHING = {"CrashLoopBackOff"}
CRASH_LOOP_RESTARTS = 3
"""Restarts from which a pod counts as crash-looping, whatever its present state."""


@dataclass(frozen=True)
class PodProblem:
    """Why a pod does not serve."""

    pod: str
    reason: str
    message: str
    """One or more sentences, with the next action."""
    crashing: bool = False


def pod_problems(pods: Sequence[RuntimePod], missing: str, *, keys: str = "") -> tuple[PodProblem, ...]:
    """Problems of the pods that do not serve, the worst first. `missing`: what the nodes lack for them; may be empty.
    `keys`: the Secret of `spec.auth`; empty: none."""
    found = [
        problem for entry in pods if (problem := _problem(entry.pod, missing) or _without_keys(entry, keys)) is not None
    ]
    return tuple(sorted(found, key=lambda problem: (not problem.crashing, problem.reason, problem.pod)))


def _problem(pod: PodFacts, missing: str) -> PodProblem | None:
    if pod.deleting or pod.phase == "Succeeded":
        return None
    if pod.unschedulable:
        reason = Reason.NO_NODE_FOR_CLASS if missing else Reason.UNSCHEDULABLE
        return PodProblem(
            pod.name, reason, f"No node takes the pod {pod.name}: {stopped(missing or pod.unschedulable)}"
        )
    stuck = waiting(pod)
    if stuck:
        reason = (
            Reason.IMAGE_PULL_FAILED if pod.container.waiting_reason in IMAGE_PULL_REASONS else Reason.POD_CANNOT_START
        )
        return PodProblem(pod.name, reason, sentence(stuck))
    if pod.phase == "Failed":
        why = f"{pod.reason}: {pod.message}" if pod.message else pod.reason or "no reason given"
        if pod.reason == "SMTAlignmentError":
            why += "; set threadsPerCore of the HardwareClass to what its nodes have"
        return PodProblem(
            pod.name, Reason.POD_FAILED, sentence(f"the node {pod.node} ended the pod {pod.name} ({why})")
        )
    container = pod.container
    crashing = container.waiting_reason in CRASHING or (not pod.ready and container.restarts >= CRASH_LOOP_RESTARTS)
    if not crashing and (pod.ready or not container.restarts):
        return None
    return _crash(pod, crashing=crashing)


def _without_keys(entry: RuntimePod, secret: str) -> PodProblem | None:
    """A pod that waits for the Secret: it is mounted as optional, so that the pod can report that it is missing."""
    if not secret or entry.pod.ready or entry.report is None or entry.report.tokens != 0:
        return None
    return PodProblem(
        entry.pod.name,
        Reason.NO_KEYS,
        f"The pod {entry.pod.name} has no key to accept: the Secret {secret}, which spec.auth names, is not in this "
        f"namespace or is empty. Create it: kubectl create secret generic {secret} --from-literal=NAME=KEY. The pod "
        "becomes ready within about a minute.",
    )


def _crash(pod: PodFacts, *, crashing: bool) -> PodProblem:
    container = pod.container
    times = f"{container.restarts} times" if container.restarts != 1 else "once"
    if container.ended_reason == "OOMKilled":
        return PodProblem(
            pod.name,
            Reason.OUT_OF_MEMORY,
            f"The pod {pod.name} was killed {times} because it needs more memory than it has. Raise spec.pod.memory.",
            crashing,
        )
    failure = _failure(container.termination_message)
    if failure is not None:
        remedy = f" {sentence(failure.remedy)}" if failure.remedy else ""
        return PodProblem(
            pod.name,
            failure.reason,
            f"The pod {pod.name} cannot serve (restarted {times}): {stopped(failure.message)}{remedy}",
            crashing,
        )
    code = "" if container.exit_code is None else f" with code {container.exit_code}"
    return PodProblem(
        pod.name,
        Reason.CRASH_LOOPING if crashing else Reason.RESTARTING,
        f"The process of the pod {pod.name} ended{code} and was restarted {times}. Look into its log: "
        f"kubectl logs {pod.name} --previous.",
        crashing,
    )


def _failure(message: str) -> Failure | None:
    """The failure in a runtime's termination message; None if it has none."""
    try:
        return Failure.model_validate(read_json(message, max_bytes=MESSAGE_MAX_BYTES)) if message else None
    except ValueError:
        return None


def available(
    endpoint: ParsedEndpoint,
    serving: ServingChoice | None,
    deployment: DeploymentFacts | None,
    replicas: ReplicaTarget,
    problems: Sequence[PodProblem],
    *,
    held: bool | None = None,
) -> Finding:
    """The condition Available: requests are answered. `held`: a gateway holds requests while no replica is ready;
    None: the endpoint has no gateway."""
    there = deployment.available if deployment is not None else 0
    if there:
        answering = f"{there} of {replicas.wanted} replicas answer" if replicas.wanted != there else _count(there)
        around = f" No pod of its gateway is up: requests go to the pods directly. {_gateway_hint(endpoint)}"
        return yes(Reason.ANSWERING, sentence(answering) + (around if held is False else ""))
    if endpoint.spec.suspend:
        return no(
            Reason.SUSPENDED, "The endpoint is suspended and has no pods. Set spec.suspend to false to serve again."
        )
    if serving is None:
        return no(
            Reason.NOTHING_TO_SERVE, "There is no artefact to serve yet; see the condition Optimized for its progress."
        )
    if replicas.wanted == 0 and held:
        return yes(
            Reason.SCALED_TO_ZERO,
            "No replica runs, because there are no requests. The gateway holds the next one and answers it when a "
            "replica is up.",
        )
    if replicas.wanted == 0 and held is False:
        return no(
            Reason.GATEWAY_UNAVAILABLE,
            "The endpoint is scaled to zero replicas, and no pod of its gateway is up to hold requests. "
            + _gateway_hint(endpoint),
        )
    if replicas.wanted == 0:
        return no(
            Reason.SCALED_TO_ZERO,
            "The endpoint is scaled to zero replicas, so no pod answers. Raise replicas to serve.",
        )
    if deployment is not None and deployment.failure:
        return no(
            Reason.PODS_REFUSED,
            f"No pod can be made: {stopped(deployment.failure)} Raise the quota, or allow what the policy refuses "
            "(docs/reference/conditions.md#available).",
        )
    if problems:
        return no(problems[0].reason, _summary(problems))
    return no(Reason.STARTING, "Pods are starting: they fetch the artefact, load it and warm up.")


def _gateway_hint(endpoint: ParsedEndpoint) -> str:
    return f"Look at the gateway's pods: kubectl get pods -l {ENDPOINT}={endpoint.name}."


def progressing(
    endpoint: ParsedEndpoint,
    deployment: DeploymentFacts | None,
    replicas: ReplicaTarget,
    *,
    desired_template: str,
    pods: Sequence[RuntimePod],
    problems: Sequence[PodProblem],
    room: str,
    turn: TurnDecision | None = None,
    canary: Finding | None = None,
) -> Finding:
    """The condition Progressing: a rollout or a change of the replica count is under way, and what it waits for.

    `desired_template`: the hash of the desired pod template; empty: the present one stays. `room`: what a new pod
    needs, such as `2 free CPUs`. `turn`: the place in the line of the rollout; None: there is none that needs one.
    `canary`: the state of its canary; None: it has none.
    """
    if deployment is None or endpoint.spec.suspend:
        return no(Reason.SETTLED, "No rollout is under way.")
    if turn is not None and not turn.allowed:
        waits = turn.waits_for("rollout", "maxConcurrentRollouts")
        return no(Reason.ROLLOUT_QUEUED, f"A new plan is to roll out. {waits} The present pods serve on.")
    if canary is not None:
        return canary
    if desired_template and desired_template != deployment.template:
        return yes(Reason.ROLLING_OUT, "A new plan is about to roll out: new pods come first, old ones go afterwards.")
    replacing = deployment.updated < deployment.replicas or deployment.observed_generation < deployment.generation
    waiting_pods = [entry.pod for entry in pods if entry.pod.unschedulable and not entry.pod.deleting]
    if replacing and waiting_pods and deployment.available:
        where = f"hardware class {endpoint.spec.hardware_class}"
        return no(
            Reason.NO_ROOM_FOR_SURGE,
            f"The new pod {waiting_pods[0].name} waits for {room} of {where} while the old ones serve on: "
            f"{sentence(waiting_pods[0].unschedulable)} Add a node or free them; or accept an interruption "
            "and set spec.suspend to true and back to false.",
        )
    if deployment.progressing == "ProgressDeadlineExceeded" or (replacing and any(one.crashing for one in problems)):
        message = (
            _summary(problems) if problems else "New pods do not get ready; look at them with kubectl describe pod."
        )
        serves = " The old pods serve on." if deployment.available else ""
        return no(Reason.ROLLOUT_STUCK, f"{message}{serves}")
    if replacing:
        return yes(Reason.ROLLING_OUT, f"{deployment.updated} of {deployment.replicas} pods have the new plan.")
    if deployment.available != replicas.wanted:
        return yes(Reason.SCALING, f"{deployment.available} of {replicas.wanted} replicas answer.")
    return no(Reason.SETTLED, "No rollout is under way.")


def _summary(problems: Sequence[PodProblem]) -> str:
    more = f" The same or another problem keeps {len(problems) - 1} more from serving." if len(problems) > 1 else ""
    return f"{problems[0].message}{more}"


def _count(count: int) -> str:
    return "the replica answers" if count == 1 else f"all {count} replicas answer"
