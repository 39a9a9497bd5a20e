"""Penstock for the benchmarks: the plan that `penstock optimize` chooses here, served by `penstock serve`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import yaml

from benchmarks.models import cache_folder
from penstock.manifest import Manifest
from penstock.resources.endpoint import ModelEndpoint
from penstock.tasks import TaskName
from penstock_bench.grid import Placement
from penstock_bench.server import MeasuredServer, find_or_make, serve


def endpoint(
    name: str, model: Path, task: TaskName, cores: int, lengths: Sequence[int] = (), *, engines: Sequence[str] = ()
) -> ModelEndpoint:
    """The resource, as a user would write it. `lengths`: of the workload, in tokens; none: the default mix. `engines`:
    of the candidates; none: all."""
    return ModelEndpoint.from_object(
        {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "ModelEndpoint",
            "metadata": {"name": name},
            "spec": {
                "model": f"file://{model}",
                "task": task.value,
                "cores": cores,
                **({"workload": {"sequenceLengths": list(lengths)}} if lengths else {}),
                **({"optimization": {"engines": list(engines)}} if engines else {}),
            },
        }
    )


def store() -> Path:
    """Where the benchmarks' artefacts are kept, next to their models."""
    return cache_folder() / "artefacts"


@contextmanager
def serving(
    name: str, model: Path, task: TaskName, placement: Placement, engines: Sequence[str] = ()
) -> Iterator[tuple[MeasuredServer, Path]]:
    """Optimised (or found), served, ready: the server and its artefact. Ended afterwards.

    `engines` as in `endpoint`.
    """
    cores = len(placement.server)
    resource = endpoint(name, model, task, cores, engines=engines)
    click.echo(f"optimise  {name} for {cores} cores (found at once when it was done before)")
    artefact = find_or_make(
        resource, cores, store=store(), models=store(), on_line=lambda line: click.echo(f"          {line}")
    )
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        file = write(resource, Path(scratch))
        server = serve(file, cores, cpus=placement.server, store=store(), models=store())
        try:
            click.echo(f"serving   {Manifest.load(artefact).chosen.plan.summary}")
            yield server, artefact
        finally:
            server.stop()


def write(resource: ModelEndpoint, folder: Path) -> Path:
    """The resource as a file."""
    path = folder / f"{resource.metadata.name}.yaml"
    value = resource.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    path.write_text(yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
    return path
