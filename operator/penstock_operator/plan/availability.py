"""What the pods do: Available, Progressing, and what is wrong with those that do not serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from penstock.resources.job_summary import Failure
from penstock_operator.plan.conditions import Finding, no, sentence, stopped, yes
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.names import ENDPOINT
from penstock_operator.plan.observed import DeploymentFacts, PodFacts, RuntimePod
from penstock_operator.plan.outcome import waiting
from penstock_operator.plan.replicas import Replicas
from penstock_operator.plan.serving import Serving

CRASHING = {"CrashLoopBackOff"}
WORTH_A_LOOK = 3
"""Restarts after which a pod that comes and goes is called crash-looping, whatever it does just now."""


@dataclass(frozen=True)
class Trouble:
    """What keeps a pod from serving."""

    pod: str
    reason: str
    message: str
    """A whole sentence or more, with what to do."""
    crashing: bool = False


def troubles(pods: Sequence[RuntimePod], missing: str) -> tuple[Trouble, ...]:
    """What is wrong with the pods that do not serve, the worst first. `missing`: what placement misses, or nothing."""
    found = [trouble for entry in pods if (trouble := _trouble(entry.pod, missing)) is not None]
    return tuple(sorted(found, key=lambda trouble: (not trouble.crashing, trouble.reason, trouble.pod)))


def _trouble(pod: PodFacts, missing: str) -> Trouble | None:
    if pod.deleting or pod.phase == "Succeeded":
        return None
    if pod.unschedulable:
        reason = "NoNodeForClass" if missing else "Unschedulable"
        return Trouble(pod.name, reason, f"No node takes the pod {pod.name}: {stopped(missing or pod.unschedulable)}")
    stuck = waiting(pod)
    if stuck:
        reason = "ImagePullFailed" if "mage" in pod.container.waiting_reason else "PodCannotStart"
        return Trouble(pod.name, reason, sentence(stuck))
    if pod.phase == "Failed":
        why = f"{pod.reason}: {pod.message}" if pod.message else pod.reason or "no reason given"
        if pod.reason == "SMTAlignmentError":
            why += "; set threadsPerCore of the HardwareClass to what its nodes have"
        return Trouble(pod.name, "PodFailed", sentence(f"the node {pod.node} ended the pod {pod.name} ({why})"))
    container = pod.container
    crashing = container.waiting_reason in CRASHING or (not pod.ready and container.restarts >= WORTH_A_LOOK)
    if not crashing and (pod.ready or not container.restarts):
        return None
    return _crash(pod, crashing=crashing)


def _crash(pod: PodFacts, *, crashing: bool) -> Trouble:
    container = pod.container
    times = f"{container.restarts} times" if container.restarts != 1 else "once"
    if container.ended_reason == "OOMKilled":
        return Trouble(
            pod.name,
            "OutOfMemory",
            f"The pod {pod.name} was killed {times} because it needs more memory than it has. Raise spec.pod.memory.",
            crashing,
        )
    said = _failure(container.termination_message)
    if said is not None:
        remedy = f" {sentence(said.remedy)}" if said.remedy else ""
        return Trouble(
            pod.name,
            said.reason,
            f"The pod {pod.name} cannot serve (restarted {times}): {stopped(said.message)}{remedy}",
            crashing,
        )
    code = "" if container.exit_code is None else f" with code {container.exit_code}"
    return Trouble(
        pod.name,
        "CrashLooping" if crashing else "Restarting",
        f"The process of the pod {pod.name} ended{code} and was restarted {times}. Look into its log: "
        f"kubectl logs {pod.name} --previous.",
        crashing,
    )


def _failure(message: str) -> Failure | None:
    """The last words of a runtime's process, when they are such."""
    try:
        return Failure.model_validate_json(message) if message else None
    except ValidationError:
        return None


def available(
    endpoint: Endpoint,
    serving: Serving | None,
    deployment: DeploymentFacts | None,
    replicas: Replicas,
    wrong: Sequence[Trouble],
    *,
    held: bool | None = None,
) -> Finding:
    """Whether requests are answered. `held`: a gateway holds them while no replica is up; None: there is none to be."""
    there = deployment.available if deployment is not None else 0
    if there:
        answering = f"{there} of {replicas.wanted} replicas answer" if replicas.wanted != there else _count(there)
        around = f" No pod of its gateway is up: requests go to the pods directly. {_look(endpoint)}"
        return yes("Answering", sentence(answering) + (around if held is False else ""))
    if endpoint.spec.suspend:
        return no("Suspended", "The endpoint is suspended and has no pods. Set spec.suspend to false to serve again.")
    if serving is None:
        return no("NothingToServe", "There is no artefact to serve yet; the condition Optimized says how far it is.")
    if replicas.wanted == 0 and held:
        return yes(
            "ScaledToZero",
            "No replica runs, because there are no requests. The gateway holds the next one and answers it when a "
            "replica is up.",
        )
    if replicas.wanted == 0 and held is False:
        return no(
            "GatewayUnavailable",
            "The endpoint is scaled to zero replicas, and no pod of its gateway is up to hold requests. "
            + _look(endpoint),
        )
    if replicas.wanted == 0:
        return no(
            "ScaledToZero", "The endpoint is scaled to zero replicas, so nobody answers. Raise replicas to serve."
        )
    if deployment is not None and deployment.failure:
        return no(
            "PodsRefused",
            f"No pod can be made: {stopped(deployment.failure)} Raise the quota, or allow what the policy refuses "
            "(docs/reference/conditions.md#available).",
        )
    if wrong:
        return no(wrong[0].reason, _together(wrong))
    return no("Starting", "Pods are starting: they fetch the artefact, load it and warm up.")


def _look(endpoint: Endpoint) -> str:
    return f"Look at the gateway's pods: kubectl get pods -l {ENDPOINT}={endpoint.name}."


def progressing(
    endpoint: Endpoint,
    deployment: DeploymentFacts | None,
    replicas: Replicas,
    *,
    desired_template: str,
    pods: Sequence[RuntimePod],
    wrong: Sequence[Trouble],
    cpus: int,
) -> Finding:
    """Whether a rollout or a change of the number of pods is under way, and what it waits for.

    `desired_template`: the hash of the pod template that is to be; empty: what there is stays. `cpus` of a new pod.
    """
    if deployment is None or endpoint.spec.suspend:
        return no("Settled", "No rollout is under way.")
    if desired_template and desired_template != deployment.template:
        return yes("RollingOut", "A new plan is about to roll out: new pods come first, old ones go afterwards.")
    replacing = deployment.updated < deployment.replicas or deployment.observed_generation < deployment.generation
    waiting_pods = [entry.pod for entry in pods if entry.pod.unschedulable and not entry.pod.deleting]
    if replacing and waiting_pods and deployment.available:
        where = f"hardware class {endpoint.spec.hardware_class}"
        return no(
            "NoRoomForSurge",
            f"The new pod {waiting_pods[0].name} waits for {cpus} free CPUs of {where} while the old ones serve on: "
            f"{sentence(waiting_pods[0].unschedulable)} Add a node or free these CPUs; or accept an interruption "
            "and set spec.suspend to true and back to false.",
        )
    if deployment.progressing == "ProgressDeadlineExceeded" or (replacing and any(one.crashing for one in wrong)):
        told = _together(wrong) if wrong else "New pods do not get ready; look at them with kubectl describe pod."
        serves = " The old pods serve on." if deployment.available else ""
        return no("RolloutStuck", f"{told}{serves}")
    if replacing:
        return yes("RollingOut", f"{deployment.updated} of {deployment.replicas} pods have the new plan.")
    if deployment.available != replicas.wanted:
        return yes("Scaling", f"{deployment.available} of {replicas.wanted} replicas answer.")
    return no("Settled", "No rollout is under way.")


def _together(wrong: Sequence[Trouble]) -> str:
    more = f" The same or another trouble keeps {len(wrong) - 1} more from serving." if len(wrong) > 1 else ""
    return f"{wrong[0].message}{more}"


def _count(count: int) -> str:
    return "the replica answers" if count == 1 else f"all {count} replicas answer"
