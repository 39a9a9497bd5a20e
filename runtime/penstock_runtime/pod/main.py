"""The process of a serving pod, from its settings to its exit code.

    listen               /healthz answers, /readyz gives the reason why it is not ready
    fetch and verify     by digest, from the store into the cache; or a folder of this machine
    check                instruction set, cores
    load, warm up        then /readyz answers with 200; a model for Inferentia is measured before that, where its
                         process is `penstock_optimizer.capacity`
    SIGTERM              drain

An error that ends the process is written to the log and the termination message, and decides the exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import uvloop

from penstock.artefact_store import Digest, StoreUri
from penstock.errors import ArtefactError, OtherInstructionSet, PenstockError, SettingError
from penstock.logs import log_event
from penstock.manifest import Manifest
from penstock.recipe import Precision
from penstock.tasks import TaskName
from penstock_runtime.app.lifecycle import AnyModel, serve_while, start_model
from penstock_runtime.app.server import Server, request_limits
from penstock_runtime.engines.neuron.variables import NeuronVariables
from penstock_runtime.host import CoreGrant, Host, pin_process, read_host
from penstock_runtime.host.termination import DEFAULT_LOG, exit_code, failure_message, write_termination_message
from penstock_runtime.logs import configure_logs
from penstock_runtime.models.sources.transfer import FetchProgress, OnProgress
from penstock_runtime.pod.variables import PodVariables
from penstock_runtime.remote import Retries
from penstock_runtime.serving.generation_model import load_generation_artefact
from penstock_runtime.serving.loaded_model import LoadedModel, is_on_device, load_artefact
from penstock_runtime.serving.status import CapacityReport, CapacityState, ServerStatus
from penstock_runtime.settings import SETTINGS, Settings
from penstock_runtime.store import open_store
from penstock_runtime.store.daemon_thread import in_daemon_thread
from penstock_runtime.store.fetch import digest_of
from penstock_runtime.tasks.texts import of_routes

logger = logging.getLogger("penstock.pod")

ATTEMPTS = 7
"""A minute of waits in all, plus timeouts: then the process ends, and Kubernetes restarts it with growing delays."""


class _Ended(Exception):
    """The server has ended while the artefact was being fetched."""


MeasureCapacity = Callable[[Server, LoadedModel, Path], Awaitable[None]]
"""Measures the capacity of a replica of a loaded model, from the artefact in a folder, and writes it into the status of
the server, which is not ready yet. Raises nothing: the server is ready without it, too."""


class PodServing:
    """One serving pod. `measure`: for models on devices, which the optimisation could not measure. `crashes`: of
    earlier servers in this pod."""

    def __init__(
        self,
        variables: PodVariables,
        settings: Settings,
        measure: MeasureCapacity | None = None,
        crashes: int = 0,
    ) -> None:
        self._measure = measure
        self._crashes = crashes
        self._variables = variables
        self._settings = settings
        self._host = read_host()
        self._ended = threading.Event()
        self._begun = time.monotonic()
        self.server: Server | None = None

    async def run(self) -> int:
        """Serve until a signal; returns how many connections were cut off. PenstockError if it cannot serve."""
        variables = self._variables
        require_artefact(variables)
        folder: Path | None = None
        task, cores = variables.task, variables.cores
        if variables.is_local or task is None:
            folder = await in_daemon_thread(self._folder)
            manifest = Manifest.load(folder)
            task = task or manifest.task
            cores = None if is_on_device(manifest.chosen.plan) else cores or manifest.cores
        status = ServerStatus(variables.name, task, host=self._host, route_prompts=of_routes(variables.prompts))
        status.guard_policy = variables.guard_policy
        status.message = "the artefact is being fetched" if folder is None else "the model is loading"
        if cores is not None and NeuronVariables.of(os.environ).neuron_target is None:
            # Fail before anything else if the machine has too few cores.
            status.grant = self._grant(cores)
        status.capacity = None if self._measure is None else CapacityReport()
        status.crashes = self._crashes
        self.server = Server(status, self._settings)
        await self.server.start()
        try:
            return await serve_while(self.server, self._load_and_start(self.server, folder))
        finally:
            self._ended.set()

    async def _load_and_start(self, server: Server, folder: Path | None) -> None:
        status = server.status
        if folder is None:
            loop = asyncio.get_running_loop()

            def set_message(message: str) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(setattr, status, "message", message)

            folder = await in_daemon_thread(partial(self._folder, set_message))
        manifest = Manifest.load(folder)
        status.message = "the model is loading"
        self._check_task(manifest, status.task)
        on_device = is_on_device(manifest.chosen.plan)
        # The cores of a plan for a device are the device's; this process uses all cores of the CPU that it has.
        grant = self._host.usable_cores() if on_device else status.grant or self._grant(manifest.cores)
        found = (
            "" if on_device else check_instruction_set(manifest, self._host, allowed=self._variables.allow_other_isa)
        )
        if found:
            logger.warning(
                "this processor is not the measured one: %s",
                found,
                extra=log_event("OtherInstructionSet", object=status.name),
            )
            grant = replace(grant, findings=(*grant.findings, found))
        status.grant, status.manifest = grant, manifest
        status.digest = str(digest_of(folder))
        for finding in grant.findings:
            logger.info("cores: %s", finding, extra=log_event("CoreFinding", object=status.name))
        logger.info(
            "%s: CPUs %s",
            "pinned" if grant.pinned else "not pinned",
            ", ".join(map(str, grant.cpus)),
            extra=log_event("CoresChosen", object=status.name, reason="Pinned" if grant.pinned else "NotPinned"),
        )
        if grant.keep:
            pin_process(grant.cpus)
        model = await in_daemon_thread(partial(self._load, folder, grant))
        for finding in model.findings:
            logger.warning("model: %s", finding, extra=log_event("ModelFinding", object=status.name))
        if self._measure is not None and isinstance(model, LoadedModel) and on_device:
            await self._measure(server, model, folder)
            self._log_capacity(status)
        await start_model(server, model)
        seconds = time.monotonic() - self._begun
        logger.info(
            "serving %s after %.1f s",
            (model.plan or manifest.chosen.plan).summary,
            seconds,
            extra=log_event("ModelServed", object=status.name),
        )

    def _log_capacity(self, status: ServerStatus) -> None:
        report = status.capacity
        if report is not None and report.facts is not None:
            rate = report.facts.requests_per_second
            logger.info(
                "capacity: %s requests/s with p95 within %.4g ms, by %d points",
                "no" if rate is None else f"{rate:.4g}",
                report.facts.p95_objective_milliseconds or 0.0,
                len(report.facts.points),
                extra=log_event("CapacityMeasured", object=status.name),
            )
        elif report is not None and report.state is CapacityState.FAILED:
            logger.warning(
                "the capacity was not measured: %s",
                report.message,
                extra=log_event("CapacityUnmeasured", object=status.name, reason=report.message),
            )

    # Run in threads

    def _folder(self, set_message: Callable[[str], None] = lambda _: None) -> Path:
        variables = self._variables
        if variables.is_local:
            return Path(variables.artefact)
        digest, uri = Digest.parse(variables.artefact), StoreUri.parse(variables.store_uri)

        def on_retry(error: PenstockError, seconds: float) -> None:
            set_message(f"{error.message}; trying again")
            logger.warning(
                "%s (again in %.0f s)",
                error.message,
                seconds,
                extra=log_event("FetchRetried", object=variables.name, reason=error),
            )
            self._check_ended()

        retries = Retries(ATTEMPTS, on_failure=on_retry, sleep=self._sleep)
        return open_store(uri, retries=retries).fetch(digest, variables.cache, self._progress(set_message))

    def _progress(self, set_message: Callable[[str], None]) -> OnProgress:
        last = 0.0

        def progress(event: FetchProgress) -> None:
            nonlocal last
            self._check_ended()
            done, total = event.bytes_done / 1e6, event.bytes_total / 1e6
            text = event.note or f"fetching the artefact: {done:.0f} of {total:.0f} MB"
            set_message(text)
            now = time.monotonic()
            if event.note or now - last > 5 or event.bytes_done == event.bytes_total:
                last = now
                logger.info("download: %s", text, extra=log_event("FetchProgressed", object=self._variables.name))

        return progress

    def _load(self, folder: Path, grant: CoreGrant) -> AnyModel:
        variables = self._variables
        verified = not variables.is_local  # the fetch has compared each file with its digest
        if Manifest.load(folder).task is TaskName.TEXT_GENERATION:
            return load_generation_artefact(
                folder,
                "chosen",
                self._host,
                cores=grant.cores,
                any_isa=True,
                cache_bytes=self._settings.generation.generation_cache_bytes,
                verified=verified,
            )
        return load_artefact(
            folder,
            "baseline" if variables.fp32 else "chosen",
            self._host,
            cores=grant.cores,
            max_tokens=variables.max_input_tokens,
            truncate=variables.truncate,
            prompts=variables.prompts,
            limits=request_limits(self._settings),
            any_isa=True,  # checked before
            verified=verified,
        )

    def _grant(self, cores: int) -> CoreGrant:
        return check_cpu_count(self._host.usable_cores(cores), self._host, self._variables.threads_per_core)

    def _check_task(self, manifest: Manifest, task: TaskName) -> None:
        if manifest.task is not task:
            raise ArtefactError(
                f"the artefact is for {manifest.task.value}, and PENSTOCK_TASK is {task.value}",
                remedy="Name the artefact of this endpoint",
            )

    def _sleep(self, seconds: float) -> None:
        self._ended.wait(seconds)
        self._check_ended()

    def _check_ended(self) -> None:
        if self._ended.is_set():
            raise _Ended


def require_artefact(variables: PodVariables) -> None:
    """SettingError with a remedy if no artefact is given, or a model that is not optimised."""
    if variables.artefact:
        return
    if not variables.model:
        raise SettingError(
            "PENSTOCK_ARTEFACT is not set: there is nothing to serve",
            field="PENSTOCK_ARTEFACT",
            remedy="Set it to a digest (and PENSTOCK_STORE_URI to the store), or to the folder of an artefact",
        )
    if importlib.util.find_spec("penstock_optimizer.export") is not None and importlib.util.find_spec("onnx"):
        remedy = "Run `penstock serve FILE` with a ModelEndpoint file instead: it optimises the model, and serves it"
    else:
        remedy = (
            "Run `serve FILE` with the penstock-optimizer image, which optimises it and serves the result; "
            "this image serves what was optimised"
        )
    raise SettingError(
        f"PENSTOCK_MODEL is {variables.model!r}, and this process serves artefacts only",
        field="PENSTOCK_MODEL",
        remedy=remedy,
    )


def check_instruction_set(manifest: Manifest, host: Host, *, allowed: bool) -> str:
    """A finding about the processor; empty if it is of the kind that the plan was measured on.

    OtherInstructionSet unless `allowed`. The fp32 graph that is served before the optimisation runs on any processor.
    """
    objection = host.cpu.objection(manifest.cpu)
    if not objection:
        return ""
    unmeasured = manifest.chosen.plan.recipe.precision is Precision.FP32 and not manifest.capacity.points
    if unmeasured:
        return f"The fp32 graph was made on {manifest.cpu.isa.value} and runs on {host.cpu.isa.value}, which it may"
    if allowed:
        return f"{objection[:1].upper()}{objection[1:]}: neither its answers nor its speed were checked here"
    raise OtherInstructionSet(
        objection,
        remedy="Narrow the hardware class to nodes of one kind, so that the plan is made where it is served; "
        "PENSTOCK_ALLOW_OTHER_ISA=true serves it unchecked",
    )


def check_cpu_count(grant: CoreGrant, host: Host, threads_per_core: int | None) -> CoreGrant:
    """The grant; with a finding, and not pinned, if the process does not have the CPUs that its pod requests."""
    own = (len(core.cpus) for core in host.cores if set(core.cpus).intersection(grant.cpus))
    threads = threads_per_core or max(own, default=1)
    wanted, found = grant.cores * threads, len(host.allowed)
    if found == wanted:
        return grant
    finding = (
        f"this process may run on {found} CPUs, and {grant.cores} cores x {threads} threads are {wanted}: "
        "the CPUs are not given exclusively, or threads per core are another number here"
    )
    return replace(grant, pinned=False, findings=(*grant.findings, finding))


def main(measure: MeasureCapacity | None = None, *, crashes: int = 0) -> NoReturn:
    """Serve until a signal. Exit codes: 0; 1, an error that must be corrected; 75, an error that may pass. `measure`
    and `crashes`: as in `PodServing`."""
    configure_logs("info")
    # The tokenizers' own thread pool would compete with the engine for its cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    log, name = DEFAULT_LOG, ""
    try:
        others = [*(setting.variable for setting in SETTINGS), *NeuronVariables.names()]
        variables = PodVariables.read(os.environ, others=others)
        log, name = variables.termination_log, variables.name
        settings = Settings.load(os.environ, others=[*variables.names(), *NeuronVariables.names()])
        configure_logs(settings.log.log_level)
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        code = 1 if runner.run(PodServing(variables, settings, measure, crashes).run()) else 0
    except Exception as error:
        if isinstance(error, PenstockError):
            logger.error("the pod cannot serve: %s", error, extra=log_event("PodFailed", object=name, reason=error))  # noqa: TRY400 - complete without a traceback
        else:  # a defect: the log has the traceback, the termination message one sentence
            logger.exception("this pod cannot serve", extra=log_event("PodDefect", object=name, reason=error))
        write_termination_message(log, failure_message(error))
        code = exit_code(error)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Not sys.exit: a thread may still wait for a store that hangs, or load a model.
    os._exit(code)
