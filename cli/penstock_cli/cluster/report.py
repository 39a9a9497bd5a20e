"""`penstock report`: fetches the report of an endpoint's optimisation from the store, and opens it in a browser."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path

import click

from penstock.errors import PenstockError
from penstock_cli.cluster.kubectl import ClusterReader, Json
from penstock_cli.terminal import fact

CONTAINER = "penstock"
RUNTIME = "penstock-runtime"


def digest_of(endpoint: Json, model: Json | None) -> str:
    """The artefact with the report: of the optimisation, else of the plan that serves.

    PenstockError if there is none yet.
    """
    status = endpoint.get("status") or {}
    artefact = ((model or {}).get("status") or {}).get("artefact") or {}
    plan = status.get("plan") or {}
    digest = artefact.get("digest") or ("" if plan.get("baseline") else plan.get("digest"))
    if not digest:
        name = endpoint["metadata"]["name"]
        raise PenstockError(
            f"{name} has no report yet: its optimisation has no result ({status.get('reason') or 'New'})",
            remedy=f"penstock why {name} shows its progress",
        )
    return str(digest)


def pod_with_the_store(pods: list[Json], name: str) -> str:
    """A running pod of the endpoint: it has the address and the credentials of the store. PenstockError without one."""
    running = sorted(pod["metadata"]["name"] for pod in pods if (pod.get("status") or {}).get("phase") == "Running")
    if not running:
        raise PenstockError(
            f"no pod of {name} runs, and the report is read through one",
            remedy="Send it a request, or read report.html in the store (docs/how-to/read-a-report.md)",
        )
    return str(running[0])


@click.command
@click.argument("name")
@click.option("--namespace", "-n", default="", help="Default: that of the current context.")
@click.option("--context", default="", help="The context of the kubeconfig. Default: the current one.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write. Default: a temporary one."
)
@click.option("--open/--no-open", "opens", default=True, help="Open it in the browser.")
def command(name: str, namespace: str, context: str, output: Path | None, *, opens: bool) -> None:
    """Open the report of the endpoint NAME: candidates, accuracy, capacity.

    It runs kubectl exec in a serving pod, with your rights.
    """
    kubectl = ClusterReader(namespace, context)
    endpoint = kubectl.require_endpoint(name)
    wanted = (endpoint.get("status") or {}).get("optimizedModel")
    model = kubectl.get("optimizedmodels.penstock.dev", wanted) if wanted else None
    digest = digest_of(endpoint, model)
    selector = f"--selector=penstock.dev/endpoint={name},app.kubernetes.io/name={RUNTIME}"
    pod = pod_with_the_store(kubectl.items("pods", selector), name)
    text = kubectl.run(
        *("exec", pod, f"--container={CONTAINER}", "--"),
        *("python", "-I", "-m", "penstock_runtime.store", "report", digest),
    )
    path = output or Path(tempfile.mkdtemp(prefix="penstock-")) / f"{name}-report.html"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PenstockError(f"{path} cannot be written ({error.strerror})", remedy="Give another --output") from None
    fact("report", str(path))
    if opens:
        webbrowser.open(path.resolve().as_uri())
