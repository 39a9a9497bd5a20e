"""Judges runtime pods: whether they own their cores, and why they do not serve.

A kubelet without static CPU management accepts the same pod and lets it share cores, and the API does not show it. So
each runtime pod reports where the kernel lets it run, and pinning is judged from the report: as many CPUs as requested,
whole cores, not shared with another runtime pod, and no CFS quota below them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from penstock.hardware import CpuIdentity
from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.job_summary import Failure
from penstock.resources.status import PodReport
from penstock_operator.facts.findings import clipped, sentence, stopped
from penstock_operator.facts.names import Json
from penstock_operator.facts.pod_data import MESSAGE_MAX_BYTES, read_json
from penstock_operator.facts.pods import HostReport, Neighbour, PodFacts, RuntimePod
from penstock_operator.facts.reasons import Reason

REMEDY = (
    "run the nodes of this class with cpuManagerPolicy: static and the full-pcpus-only option, then delete the pod "
    "(docs/reference/conditions.md#corespinned)"
)


@dataclass(frozen=True)
class PinVerdict:
    """The knowledge about the cores of one pod."""

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
    runtime pods of other endpoints on the same nodes; pods of other namespaces are not named.

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


CRASHING = {"CrashLoopBackOff"}
CRASH_LOOP_RESTARTS = 3
"""Restarts from which a pod counts as crash-looping, whatever its present state."""


IMAGE_PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
"""Waiting reasons of a container when its image cannot be pulled."""


def waiting(pod: PodFacts) -> str:
    """Why the container of this pod does not start, with the next action; empty when nothing is wrong."""
    reason, detail = pod.container.waiting_reason, pod.container.waiting_message
    if reason in IMAGE_PULL_REASONS:
        return (
            f"the image of the pod {pod.name} cannot be pulled ({detail or reason}): check the image's name in the "
            "operator's settings and spec.pod.imagePullSecrets"
        )
    if reason in {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}:
        return f"the container of the pod {pod.name} cannot be created: {detail or reason}"
    return ""


@dataclass(frozen=True)
class PodProblem:
    """Why a pod does not serve."""

    pod: str
    reason: str
    message: str
    """One or more sentences, with the next action."""
    crashing: bool = False


def pod_problems(pods: Sequence[RuntimePod], missing: str, *, keys: str = "") -> tuple[PodProblem, ...]:
    """Problems of the pods that do not serve, the worst first. `missing`: why no node takes them; may be empty.
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


MAX_PODS = 32


def pod_reports(
    pods: Sequence[RuntimePod], verdicts: Sequence[PinVerdict], problems: Sequence[PodProblem]
) -> tuple[PodReport, ...]:
    """The entries of `status.pods`: node, readiness, pinning and CPU of each pod, ordered by name."""
    judged = {verdict.pod: verdict for verdict in verdicts}
    messages = {problem.pod: problem.message for problem in problems}
    reports = []
    for entry in sorted(pods, key=lambda entry: entry.pod.name)[:MAX_PODS]:
        pod, report, verdict = entry.pod, entry.report, judged.get(entry.pod.name)
        message = messages.get(pod.name) or (verdict.message or verdict.wrong_cpu if verdict is not None else "")
        reports.append(
            PodReport(
                name=pod.name,
                node=pod.node,
                ready=pod.ready,
                digest=pod.artefact,
                pinned=verdict.pinned if verdict is not None else None,
                reason=clipped(message, 512),
                cpus=clipped(cpu_list(report.cpus), 256) if report is not None else "",
                cpu=_cpu(report.cpu) if report is not None else "",
            )
        )
    return tuple(reports)


def _cpu(value: Json) -> str:
    try:
        return clipped(CpuIdentity.model_validate(value).summary, 256)
    except ValidationError:
        return ""
