"""A serving pod on Inferentia, which measures the capacity of a replica before it is ready: the load ladder of the
optimisation, which had no device.

`python -m penstock_optimizer.capacity` is `penstock_runtime.pod` with this measurement between loading and
readiness. The load goes to a second server of this process, on the loopback address, with the same model, so that the
pod's own metrics count no measured request. The result is in `/info`; the operator writes it into the status of the
OptimizedModel, and later pods get `POST /capacity/known` from it, with which they do not measure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from penstock.errors import PenstockError
from penstock.manifest import Manifest
from penstock.neuron_artefact import CompiledModel, NeuronWorkload
from penstock.resources.result import CapacityFacts
from penstock_optimizer.capacity.curve import LEAST_START_SECONDS, CapacityMeasurement, ReplicaServer, measure_capacity
from penstock_optimizer.load.workload import LengthMix, predict_bodies
from penstock_runtime.app.server import Server
from penstock_runtime.engines.neuron.variables import NeuronVariables
from penstock_runtime.serving.loaded_model import LoadedModel
from penstock_runtime.serving.predictor import Predictor
from penstock_runtime.serving.status import CapacityReport, CapacityState, ServerStatus
from penstock_runtime.settings import Settings
from penstock_runtime.store.daemon_thread import in_daemon_thread

LENGTHS = 200
"""Requests of an artefact that states no workload."""
SHARED = "measured by a pod on its device; the load generator shared the CPUs of the pod with the server"


async def measure_before_ready(server: Server, model: LoadedModel, folder: Path) -> None:
    """See `penstock_runtime.pod.main.MeasureCapacity`."""
    status, report = server.status, server.status.capacity
    seconds = NeuronVariables.of(os.environ).neuron_capacity_seconds
    if report is None or seconds < LEAST_START_SECONDS:
        return
    if report.known.is_set():
        report.state = CapacityState.KNOWN
        return
    begin = time.monotonic()
    status.message = f"the capacity of a replica is measured, in up to {seconds:.0f} s"
    report.state = CapacityState.MEASURING
    try:
        measured = await _measured_unless_known(model, folder, report, end=begin + seconds)
    except PenstockError as error:
        report.fail(error.message)
    except Exception as error:  # a replica that cannot be measured serves all the same
        report.fail(f"{type(error).__name__}: {error}")
    else:
        if measured is None:
            report.state = CapacityState.KNOWN
        elif measured.curve.points:
            report.facts, report.message = CapacityFacts.of(measured.curve), SHARED
            report.state = CapacityState.MEASURED
        else:
            report.fail("there was no time for a point of the curve")


async def _measured_unless_known(
    model: LoadedModel, folder: Path, report: CapacityReport, *, end: float
) -> CapacityMeasurement | None:
    """The measurement; None as soon as the capacity is known otherwise."""
    compiled = CompiledModel.load(folder / Manifest.load(folder).chosen.path)
    workload = compiled.workload or NeuronWorkload(
        lengths=tuple(LengthMix(maximum=model.max_tokens).sample(LENGTHS, seed=0))
    )
    tokenizer = model.task.tokenizer

    def ladder(url: str) -> CapacityMeasurement:
        lengths = [min(length, model.max_tokens) for length in workload.lengths]
        bodies = predict_bodies(model.task.name, tokenizer.backend, lengths, mask_token=tokenizer.mask_token)
        return measure_capacity(
            ReplicaServer(url, os.getpid()),
            bodies,
            p95_objective=workload.p95_objective_milliseconds,
            load_cpus=(),
            seconds_left=lambda: 0.0 if report.known.is_set() else end - time.monotonic(),
        )

    async with _second_server(model) as url:
        work = asyncio.create_task(in_daemon_thread(partial(ladder, url)))
        otherwise = asyncio.create_task(report.known.wait())
        try:
            await asyncio.wait({work, otherwise}, return_when=asyncio.FIRST_COMPLETED)
            return None if report.known.is_set() else await work
        finally:
            for task in (work, otherwise):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):  # the first error counts
                    await task


@asynccontextmanager
async def _second_server(model: LoadedModel) -> AsyncIterator[str]:
    """The URL of a server with this model, for this process and its children; the model is kept at the end."""
    settings = Settings.model_validate(
        {"http": {"host": "127.0.0.1", "port": 0}, "drain": {"drain_idle_seconds": 0.0, "drain_limit_seconds": 1.0}}
    )
    server = Server(ServerStatus("capacity", model.task.name), settings)
    predictor = Predictor(model, server.metrics, queue=settings.queue, owns_model=False)
    await predictor.warm_up()
    await server.start()
    server.serve_with(predictor, model.plan, model.manifest)
    serving = asyncio.create_task(server.serve(signals=False))
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()
        await serving
