"""Whether the runtime pods own their cores: judged from what they report, never from what was asked for.

A kubelet without static CPU management accepts the same pod and lets it share; nothing in the API tells. So each pod
says where the kernel lets it run, and here that is held against what it should have: as many CPUs as it asked for,
whole cores, nobody else of ours on them, no quota that cuts into them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from penstock.hardware import CpuIdentity
from penstock.resources.hardware_class import HardwareClassSpec
from penstock_operator.plan.conditions import Finding, no, sentence, unknown, yes
from penstock_operator.plan.observed import HostReport, Neighbour, RuntimePod

REMEDY = (
    "run the nodes of this class with cpuManagerPolicy: static and the full-pcpus-only option, then delete the pod "
    "(docs/reference/conditions.md#corespinned)"
)


@dataclass(frozen=True)
class PinVerdict:
    """What is known of one pod."""

    pod: str
    node: str
    pinned: bool | None
    """None: it has not said yet."""
    reason: str = ""
    """CamelCase; empty when pinned."""
    message: str = ""
    """Why it is not, or why it is not known, in plain words."""
    wrong_cpu: str = ""
    """Why the node cannot serve this plan; empty when it can."""


def judge(
    pods: Iterable[RuntimePod],
    *,
    cpus: int,
    hardware: HardwareClassSpec | None = None,
    class_name: str = "",
    neighbours: Iterable[Neighbour] = (),
) -> tuple[PinVerdict, ...]:
    """A verdict on each pod, in their order.

    `cpus` is what each has to own, cores x threads per core, unless it asked for another number: pods of an older plan
    did. `hardware` promises a processor; None: any will do.
    `neighbours` are pods of other endpoints; those of this one are compared with each other anyway.
    """
    judged = tuple(pods)
    others = [(entry.node, entry.name, frozenset(entry.cpus)) for entry in neighbours]
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
        # Said before anything is reported: without it the kubelet never gives cores of its own.
        return PinVerdict(
            pod.name,
            pod.node,
            pinned=False,
            reason="NotGuaranteed",
            message=f"its QoS class is {pod.qos}: something (a LimitRange, a sidecar injector) changed its resources; "
            "exempt pods with the label app.kubernetes.io/name=penstock-runtime from it",
        )
    if report is None:
        why = entry.report_problem or "it has not started to serve yet"
        return PinVerdict(pod.name, pod.node, pinned=None, reason="NotReported", message=why)
    own = frozenset(report.cpus)

    def shared(reason: str, message: str) -> PinVerdict:
        return PinVerdict(pod.name, pod.node, pinned=False, reason=reason, message=message, wrong_cpu=wrong)

    if len(own) > cpus:
        return shared(
            "SharedCores",
            f"it may run on CPUs {spoken(own)}, more than its {_cpus(cpus)}: these are the shared CPUs of the node, "
            f"not its own; {REMEDY}",
        )
    if len(own) < cpus:
        return shared(
            "TooFewCores",
            f"it may run on {_cpus(len(own))} ({spoken(own)}) of the {_cpus(cpus)} that it asked for; delete the pod, "
            "and look at the kubelet's log if it comes back so",
        )
    for node, name, theirs in others:
        if node == pod.node and name != pod.name and own & theirs:
            return shared("SharedCores", f"it shares CPUs {spoken(own & theirs)} with the pod {name}; {REMEDY}")
    if report.quota is not None and report.quota + 1e-6 < cpus:
        return shared(
            "Throttled",
            f"a quota of {report.quota:g} CPUs stops its {_cpus(cpus)} now and then; use Kubernetes 1.33 or later, or "
            "cpuCFSQuota: false on the nodes of this class",
        )
    if not report.pinned:
        return shared("NotWholeCores", f"{'; '.join(report.findings) or 'it does not own whole cores'}; {REMEDY}")
    return PinVerdict(pod.name, pod.node, pinned=True, wrong_cpu=wrong)


def _wrong_cpu(report: HostReport | None, hardware: HardwareClassSpec | None, name: str) -> str:
    """Why the processor is not the one that was measured, or promised; empty when it is, or nobody knows."""
    if report is None or not report.cpu:
        return ""
    try:
        found = CpuIdentity.model_validate(report.cpu)
        measured = CpuIdentity.model_validate(report.measured_on) if report.measured_on else None
    except ValidationError:  # a runtime of another version
        return ""
    against_plan = found.objection(measured) if measured is not None else ""
    return against_plan or ("" if hardware is None else hardware.objection(found, name=name))


def spoken(cpus: Iterable[int]) -> str:
    """CPU numbers as the kernel writes them, such as `0-3,8`."""
    parts: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in parts) or "none"


def _cpus(count: int) -> str:
    return "1 CPU" if count == 1 else f"{count} CPUs"


def cores_pinned(verdicts: Sequence[PinVerdict], serving: Collection[str]) -> Finding:
    """What the condition CoresPinned says; `serving` are the names of the pods that are ready.

    One pod that shares its cores makes it false. A pod that has said nothing makes it unknown only when it serves:
    those that start up say it soon.
    """
    if not verdicts:
        return unknown("NoPods", "No pod runs that could say where.")
    shared = [verdict for verdict in verdicts if verdict.pinned is False]
    if shared:
        first = shared[0]
        more = f" (and {len(shared) - 1} more pods)" if len(shared) > 1 else ""
        where = f" on the node {first.node}" if first.node else ""
        return no(first.reason, sentence(f"the pod {first.pod}{where}{more}: {first.message}"))
    silent = [verdict for verdict in verdicts if verdict.pinned is None and verdict.pod in serving]
    if silent:
        return unknown(
            "NotReported", sentence(f"the pod {silent[0].pod} has not told where it runs: {silent[0].message}")
        )
    own = sum(1 for verdict in verdicts if verdict.pinned)
    if not own:
        return unknown("NotReported", "The pods are starting and have not told where they run.")
    return yes("Pinned", "The pod owns its cores." if own == 1 else f"All {own} pods own their cores.")
