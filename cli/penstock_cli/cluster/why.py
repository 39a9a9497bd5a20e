"""`penstock why`: explains why an endpoint is not ready, from its conditions and the objects that they are about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from penstock.resources.conditions import ConditionType
from penstock_cli.cluster.kubectl import ClusterReader, Json, condition
from penstock_cli.terminal import facts

CHAIN = tuple(kind for kind in ConditionType if kind is not ConditionType.READY)
"""In the order of an endpoint's life."""
NOT_A_PROBLEM = {(ConditionType.PROGRESSING, "Settled"), (ConditionType.CURVE_CURRENT, "NoCurve")}
"""Conditions that are false in a healthy endpoint."""
MOST_EVENTS = 5


@dataclass(frozen=True)
class EndpointFacts:
    """An endpoint and what belongs to it."""

    endpoint: Json
    model: Json | None = None
    """Its OptimizedModel."""
    pods: Sequence[Json] = ()
    """Its serving pods and the pods of its optimisation."""
    events: Sequence[Json] = ()
    """The Events about it."""


def explain(found: EndpointFacts) -> Iterator[tuple[str, str]]:
    """Names and values to show, the most important first."""
    metadata, status = found.endpoint["metadata"], found.endpoint.get("status") or {}
    ready = condition(found.endpoint, "Ready")
    yield "endpoint", f"{metadata.get('namespace', '')}/{metadata['name']}"
    if not ready:
        yield "ready", "Unknown: the operator has not looked at it. Does it run, and does it watch this namespace?"
        return
    yield "ready", f"{ready.get('status')}: {ready.get('reason')}. {ready.get('message', '')}"
    if status.get("observedGeneration") != metadata.get("generation"):
        yield "outdated", "The status is of an older spec: the operator has not looked at the present one."
    for kind in CHAIN:
        one = condition(found.endpoint, kind)
        repeated = one.get("message") == ready.get("message")
        if one.get("status") == "False" and (kind, one.get("reason")) not in NOT_A_PROBLEM and not repeated:
            yield str(kind), f"{one.get('reason')}. {one.get('message', '')}"
    if ready.get("status") != "True":
        yield from _model(found.model)
        for pod in found.pods:
            yield from _pod(pod)
        yield from _events(found.events)
    yield "reference", f"docs/reference/conditions.md explains the reason {ready.get('reason')}"


def _model(model: Json | None) -> Iterator[tuple[str, str]]:
    if model is None:
        return
    status, ready = model.get("status") or {}, condition(model, "Ready")
    if ready.get("status") != "True":
        job = f" Its log: kubectl logs job/{status['job']}" if status.get("job") else ""
        yield "optimised", f"{model['metadata']['name']}: {ready.get('reason', 'New')}. {ready.get('message', '')}{job}"


def _pod(pod: Json) -> Iterator[tuple[str, str]]:
    """What keeps a pod from being ready; nothing for one that is."""
    status = pod.get("status") or {}
    conditions = {one.get("type"): one for one in status.get("conditions") or []}
    if (conditions.get("Ready") or {}).get("status") == "True" or status.get("phase") == "Succeeded":
        return
    scheduled = conditions.get("PodScheduled") or {}
    parts = [str(status.get("phase", "Unknown")), str(status.get("message") or scheduled.get("message") or "")]
    for container in status.get("containerStatuses") or []:
        waits = (container.get("state") or {}).get("waiting") or {}
        ended = (container.get("lastState") or {}).get("terminated") or {}
        parts += [str(waits.get("reason") or ""), str(waits.get("message") or "")]
        if ended:
            parts.append(f"it ended with code {ended.get('exitCode')} ({ended.get('reason')})")
        if container.get("restartCount"):
            parts.append(f"{container['restartCount']} restarts")
    yield "pod", f"{pod['metadata']['name']}: {', '.join(filter(None, parts))}"


def _events(events: Sequence[Json]) -> Iterator[tuple[str, str]]:
    """The last warnings, oldest first."""
    warnings = [one for one in events if one.get("type") == "Warning"]
    when = ("eventTime", "lastTimestamp")
    warnings.sort(key=lambda one: str(next((one[name] for name in when if one.get(name)), "")))
    for one in warnings[-MOST_EVENTS:]:
        yield "event", f"{one.get('reason')}. {one.get('message') or one.get('note') or ''}"


@click.command
@click.argument("name")
@click.option("--namespace", "-n", default="", help="Default: that of the current context.")
@click.option("--context", default="", help="The context of the kubeconfig. Default: the current one.")
def command(name: str, namespace: str, context: str) -> None:
    """Explain why the endpoint NAME is not ready.

    It shows the conditions that are false, the optimisation, and the pods that do not serve. It runs kubectl, with
    your rights.
    """
    kubectl = ClusterReader(namespace, context)
    endpoint = kubectl.require_endpoint(name)
    wanted = (endpoint.get("status") or {}).get("optimizedModel")
    selectors = [f"penstock.dev/endpoint={name}", *([f"penstock.dev/optimized-model={wanted}"] if wanted else [])]
    pods = {
        pod["metadata"]["name"]: pod
        for selector in selectors
        for pod in kubectl.items("pods", f"--selector={selector}")
    }
    about = f"involvedObject.kind=ModelEndpoint,involvedObject.name={name}"
    found = EndpointFacts(
        endpoint,
        model=kubectl.get("optimizedmodels.penstock.dev", wanted) if wanted else None,
        pods=[pods[key] for key in sorted(pods)],
        events=kubectl.items("events", f"--field-selector={about}"),
    )
    facts(explain(found))
