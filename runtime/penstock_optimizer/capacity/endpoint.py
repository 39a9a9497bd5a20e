"""The capacity of an endpoint's artefact: the real server, with the endpoint's own workload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.capacity import CapacityPoint
from penstock_optimizer.capacity.curve import Measured, measure_capacity, replica
from penstock_optimizer.job.job import Job
from penstock_optimizer.load.bodies import workload_bodies
from penstock_optimizer.load.spec import RequestBody

BODIES = 400
"""Different requests: none comes often enough for a cache to matter."""


def endpoint_capacity(
    job: Job, artefact: Path, *, seconds_left: Callable[[], float], on_point: Callable[[CapacityPoint], None]
) -> Measured:
    """Serve `artefact` and measure its curve. CapacityFailed and ReplicaBroken as `capacity` has them."""
    spec = job.spec
    bodies = _bodies(job)
    with replica(
        artefact,
        cores=job.grant.cores,
        cpus=job.cpus,
        log=job.work.log("capacity"),
        max_tokens=spec.serving.max_input_tokens,
        start_seconds=seconds_left(),
    ) as server:
        return measure_capacity(
            server,
            bodies,
            p95_objective=spec.objective.latency.p95_milliseconds if spec.objective.latency else None,
            load_cpus=job.load_cpus or job.host.allowed,
            seconds_left=seconds_left,
            on_point=on_point,
        )


def _bodies(job: Job) -> tuple[RequestBody, ...]:
    tokenizer = job.tokenizer
    return workload_bodies(
        job.spec.task,
        tokenizer.backend,
        job.spec.workload,
        job.mix,
        count=BODIES,
        mask_token=tokenizer.mask_token,
        side=tokenizer.side,
    )
