"""The course of a serving pod.

    listen               /healthz says yes, /readyz says what it waits for
    fetch and verify     by digest, from the store into the cache; or a folder that is there
    check                instruction set, cores
    load, warm up        then /readyz says yes
    SIGTERM              drain, as every server here

Whatever prevents it is told in three places: the log, the termination message, the exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.artefact_store import Digest, StoreUri
from penstock.errors import ArtefactError, PenstockError, SettingError
from penstock.manifest import Manifest
from penstock.tasks import TaskName
from penstock_runtime.host import CoreGrant, Host, pin_process, read_host
from penstock_runtime.models.progress import OnProgress, Progress
from penstock_runtime.pod.checks import isa_finding, with_count
from penstock_runtime.pod.variables import PodVariables
from penstock_runtime.serving.launch import launch
from penstock_runtime.serving.loaded_model import LoadedModel, load_artefact
from penstock_runtime.serving.server import Server, task_limits
from penstock_runtime.serving.status import Status
from penstock_runtime.settings import Settings
from penstock_runtime.store import open_store
from penstock_runtime.store.daemon_thread import in_daemon_thread
from penstock_runtime.store.retries import Retries
from penstock_runtime.store.verify import digest_of

logger = logging.getLogger("penstock.pod")

ATTEMPTS = 7
"""A minute of waiting in all, and the time-outs: then the pod ends and is started again, ever more slowly."""


class _Ended(Exception):
    """The server has ended while the artefact was still being fetched: nobody needs it any more."""


class PodServing:
    """One pod, from its first line to its last."""

    def __init__(self, variables: PodVariables, settings: Settings, *, host: Host | None = None) -> None:
        self._variables = variables
        self._settings = settings
        self._host = host or read_host()
        self._ended = threading.Event()
        self._begun = time.monotonic()
        self.server: Server | None = None

    async def run(self) -> int:
        """Serve until told to end; returns how many connections had to be cut off. PenstockError: it cannot serve."""
        variables = self._variables
        require_artefact(variables)
        folder: Path | None = None
        task, cores = variables.task, variables.cores
        if variables.is_local or task is None:
            folder = await in_daemon_thread(self._folder)
            manifest = Manifest.load(folder)
            task, cores = manifest.task, cores or manifest.cores
        status = Status(variables.name, task, host=self._host)
        status.message = "the artefact is being fetched" if folder is None else "the model is loading"
        if cores is not None:
            # A machine that has too few cores is told before anything else.
            status.grant = self._grant(cores)
        self.server = Server(status, self._settings)
        await self.server.start()
        return await self._serve(self.server, folder)

    async def _serve(self, server: Server, folder: Path | None) -> int:
        working = asyncio.create_task(self._work(server, folder))
        serving = asyncio.create_task(server.serve())
        try:
            await asyncio.wait({working, serving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and (error := working.exception()) is not None:
                server.status.message = str(error)
                raise error
            return await serving
        finally:
            self._ended.set()
            for task in (working, serving):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):  # told above
                    await task

    async def _work(self, server: Server, folder: Path | None) -> None:
        status = server.status
        if folder is None:
            loop = asyncio.get_running_loop()

            def tell(message: str) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(setattr, status, "message", message)

            folder = await in_daemon_thread(partial(self._folder, tell=tell))
        manifest = Manifest.load(folder)
        status.message = "the model is loading"
        self._check_task(manifest, status.task)
        grant = status.grant or self._grant(manifest.cores)
        found = isa_finding(manifest, self._host, allowed=self._variables.allow_other_isa)
        if found:
            logger.warning("%s", found)
            grant = replace(grant, findings=(*grant.findings, found))
        status.grant, status.manifest = grant, manifest
        status.digest = str(digest_of(folder))
        for finding in grant.findings:
            logger.info("%s", finding)
        logger.info("%s: %s", "pinned" if grant.pinned else "not pinned", f"CPUs {', '.join(map(str, grant.cpus))}")
        if grant.keep:
            pin_process(grant.cpus)
        model = await in_daemon_thread(partial(self._load, folder, grant))
        for finding in model.findings:
            logger.warning("%s", finding)
        await launch(server, model)
        logger.info("serving %s after %.1f s", model.plan.summary, time.monotonic() - self._begun)

    # the parts, each in a thread

    def _folder(self, tell: Callable[[str], None] = lambda _: None) -> Path:
        variables = self._variables
        if variables.is_local:
            return Path(variables.artefact)
        digest, uri = Digest.parse(variables.artefact), StoreUri.parse(variables.store_uri)

        def told(error: PenstockError, seconds: float) -> None:
            tell(f"{error.message}; trying again")
            logger.warning("%s (again in %.0f s)", error.message, seconds)
            self._check_ended()

        retries = Retries(ATTEMPTS, told=told, sleep=self._sleep)
        return open_store(uri, retries=retries).fetch(digest, variables.cache, self._progress(tell))

    def _progress(self, tell: Callable[[str], None]) -> OnProgress:
        last = 0.0

        def progress(event: Progress) -> None:
            nonlocal last
            self._check_ended()
            done, total = event.bytes_done / 1e6, event.bytes_total / 1e6
            text = event.note or f"fetching the artefact: {done:.0f} of {total:.0f} MB"
            tell(text)
            now = time.monotonic()
            if event.note or now - last > 5 or event.bytes_done == event.bytes_total:
                last = now
                logger.info("%s", text)

        return progress

    def _load(self, folder: Path, grant: CoreGrant) -> LoadedModel:
        variables = self._variables
        return load_artefact(
            folder,
            "chosen",
            self._host,
            cores=grant.cores,
            max_tokens=variables.max_input_tokens,
            truncate=variables.truncate,
            limits=task_limits(self._settings),
            any_isa=True,  # judged already
        )

    def _grant(self, cores: int) -> CoreGrant:
        return with_count(self._host.usable_cores(cores), self._host, self._variables.threads_per_core)

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
    """SettingError that says what to do when nothing is given to be served, or a model that was never optimised."""
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
