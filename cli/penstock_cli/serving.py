"""The course of `penstock serve`: which model answers first, and how a better one takes over.

    artefact given                       -> serve it
    finished artefact of the same key    -> serve it
    otherwise                            -> fp32 at once; the optimisation in a process of its own; then its result

The optimisation may fail: the endpoint goes on serving what it has, and says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.errors import PenstockError
from penstock.manifest import Manifest
from penstock.resources.endpoint import ModelEndpoint, OptimizationMode
from penstock.tasks import TaskName
from penstock_cli.folders import read_artefact
from penstock_cli.host import describe_cpu, describe_memory
from penstock_cli.packages import require_optimizer
from penstock_cli.progress import OptimizationView, event_from_json, show_result
from penstock_cli.screen import TRANSFER_SECONDS, console, fact
from penstock_runtime.errors import NotReady
from penstock_runtime.host import CoreGrant, Host, pin_process, read_host
from penstock_runtime.models.progress import Progress as Transfer
from penstock_runtime.serving.launch import launch, spare_the_collector
from penstock_runtime.serving.loaded_model import LoadedModel, Which, load_artefact
from penstock_runtime.serving.predictor import Predictor
from penstock_runtime.serving.server import Server, task_limits
from penstock_runtime.serving.status import Progress, Status
from penstock_runtime.settings import Settings
from penstock_runtime.store.daemon_thread import in_daemon_thread

logger = logging.getLogger("penstock.serve")

SAMPLE = {
    TaskName.FEATURE_EXTRACTION: '{"inputs": "I like you. I love you."}',
    TaskName.TEXT_CLASSIFICATION: '{"inputs": "I like you. I love you."}',
    TaskName.TOKEN_CLASSIFICATION: '{"inputs": "Ada Lovelace was born in London."}',
    TaskName.FILL_MASK: '{"inputs": "Paris is the [MASK] of France."}',
    TaskName.SENTENCE_SIMILARITY: '{"inputs": {"source_sentence": "I like you.", "sentences": ["I love you."]}}',
    TaskName.TEXT_RANKING: '{"inputs": {"query": "capital of France", "texts": ["Paris is.", "I like you."]}}',
    TaskName.QUESTION_ANSWERING: '{"inputs": {"question": "Where do I live?", "context": "I live in Berlin."}}',
    TaskName.ZERO_SHOT_CLASSIFICATION: (
        '{"inputs": "I like you.", "parameters": {"candidate_labels": ["love", "politics"]}}'
    ),
}
"""A body that the task answers, for the curl line."""

NO_ARTEFACT = "Give a ModelEndpoint file, or the folder of an artefact that penstock optimize has made"
PROGRAM = ("penstock_cli.main",)
"""The module, and its first words, that optimises beside us."""
OPTIMIZER_NICENESS = 10
"""The optimisation gives way to requests where they share cores: more than the threads that compute these do to the
event loop (`host.pin.STREAM_NICENESS`)."""
_LINE_LIMIT = 8 * 2**20
"""Of one progress line: the last ones carry all candidates."""


@dataclass(frozen=True)
class ServeOptions:
    """What the command line gave."""

    target: Path
    store: Path
    models: Path
    cores: int | None = None
    optimize: bool = True
    token: str | None = None


class Serving:
    """One `penstock serve`, from its first line to its last."""

    def __init__(self, options: ServeOptions, settings: Settings) -> None:
        self._options = options
        self._settings = settings
        self._endpoint: ModelEndpoint | None = None
        self._host: Host = read_host()
        self._optimizer: Process | None = None

    async def run(self) -> int:
        """Serve until told to end. Returns how many connections had to be cut off."""
        if self._options.target.is_dir():
            manifest = read_artefact(self._options.target, otherwise=NO_ARTEFACT)
            name, task, cores = (
                self._options.target.resolve().name,
                manifest.task,
                self._options.cores or manifest.cores,
            )
        else:
            self._endpoint = ModelEndpoint.from_file(self._options.target)
            spec = self._endpoint.spec
            name, task, cores = self._endpoint.metadata.name, spec.task, self._options.cores or spec.cores
            self._aim_metrics(self._endpoint)
        grant = self._host.usable_cores(cores)
        if grant.keep:
            pin_process(grant.cpus)
        fact("cpu", describe_cpu(self._host))
        fact("cores", f"{grant.cores} of {len(self._host.cores)}, memory {describe_memory(self._host)}")
        for finding in grant.findings:
            logger.info("%s", finding)
        status = Status(name, task, host=self._host, grant=grant)
        server = Server(status, self._settings)
        await server.start()
        working = asyncio.create_task(self._work(server, grant))
        working.add_done_callback(lambda task: self._settle(task, server))
        try:
            cut = await server.serve()
        finally:
            await self._end(working)
        # What the model could not do is this command's outcome; a fault of the search after that is not.
        if working.done() and not working.cancelled() and server.service.predictor is None:
            error = working.exception()
            if error is not None:
                raise error
        return cut

    def _aim_metrics(self, endpoint: ModelEndpoint) -> None:
        """Give the duration histogram a boundary at the endpoint's objective, unless the settings say otherwise."""
        latency = endpoint.spec.objective.latency
        if latency is not None and self._settings.observation.objective_p95_milliseconds is None:
            observation = self._settings.observation.model_copy(
                update={"objective_p95_milliseconds": latency.p95_milliseconds}
            )
            self._settings = self._settings.model_copy(update={"observation": observation})

    def _settle(self, task: asyncio.Task[None], server: Server) -> None:
        """Without a model there is nothing to serve: end. With one, a failed search is a note."""
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        if server.service.predictor is None:
            server.stop()
            return
        server.status.optimization = None
        server.status.optimization_error = str(error)
        fact("note", f"the optimisation failed, and the fp32 plan goes on serving: {error}", style="yellow")
        if not isinstance(error, PenstockError):
            logger.error("the optimisation failed", exc_info=error)

    async def _end(self, working: asyncio.Task[None]) -> None:
        if self._optimizer is not None and self._optimizer.returncode is None:
            self._optimizer.terminate()
            fact("note", "the optimisation was interrupted: the next start goes on from there")
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # reported by then
            await working
        if self._optimizer is not None:
            await self._optimizer.wait()

    async def _work(self, server: Server, grant: CoreGrant) -> None:
        if self._endpoint is None:
            manifest = Manifest.load(self._options.target)
            self._show_model(manifest.model.source, manifest.task)
            await self._first(server, self._options.target, "chosen", grant)
            self._show_manifest(manifest, table=False)
            self._show_serving(server)
            return
        require_optimizer()
        # Building and searching bring libraries that serving an artefact does without.
        from penstock_optimizer.job.optimise import prepare
        from penstock_optimizer.job.progress import DownloadReporter, transfer_message

        self._show_model(self._endpoint.spec.model, self._endpoint.spec.task)
        loop = asyncio.get_running_loop()
        waiting = server.status.message
        with OptimizationView() as view:
            shown = DownloadReporter(view, every_seconds=TRANSFER_SECONDS)

            def show(step: Transfer) -> None:
                is_over = step.bytes_done == step.bytes_total and not step.note
                server.status.message = waiting if is_over else transfer_message(step)
                shown(step)

            def tell(step: Transfer) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(show, step)

            prepared = await in_daemon_thread(
                partial(
                    prepare,
                    self._endpoint,
                    store=self._options.store,
                    models=self._options.models,
                    cores=grant.cores,
                    token=self._options.token,
                    on_transfer=tell,
                )
            )
        server.status.message = waiting
        if prepared.finished or self._endpoint.spec.optimization.mode is OptimizationMode.OFF:
            await self._first(server, prepared.artefact, "chosen", grant)
            if prepared.finished:
                fact("artefact", f"{prepared.artefact} (made before, for this model and machine)")
            self._show_manifest(Manifest.load(prepared.artefact), table=False)
            fact("report", str(prepared.artefact / "report.html"))
            self._show_serving(server)
            return
        predictor = await self._first(server, prepared.artefact, "baseline", grant)
        self._show_serving(server, note="  (fp32 until the optimisation is through)" if self._options.optimize else "")
        if self._options.optimize:
            artefact = await self._optimize(server, self._options.target, grant)
            await self._take_over(server, predictor, artefact, grant)

    async def _first(self, server: Server, artefact: Path, which: Which, grant: CoreGrant) -> Predictor:
        """Load a model and begin to answer with it."""
        return await launch(server, await self._load(artefact, which, grant))

    async def _load(self, artefact: Path, which: Which, grant: CoreGrant) -> LoadedModel:
        serving = self._endpoint.spec.serving if self._endpoint is not None else None
        model = await in_daemon_thread(
            partial(
                load_artefact,
                artefact,
                which,
                host=self._host.with_present_memory(),
                cores=grant.cores,
                max_tokens=serving.max_input_tokens if serving is not None else None,
                truncate=serving.truncate if serving is not None else True,
                limits=task_limits(self._settings),
            )
        )
        for finding in model.findings:
            fact("note", finding)
        return model

    async def _optimize(self, server: Server, file: Path, grant: CoreGrant) -> Path:
        """Run `penstock optimize` beside us, show what it does, and return its artefact."""
        words = ["optimize", str(file), "--json", "--store", str(self._options.store)]
        words += ["--models", str(self._options.models), "--cores", str(grant.cores)]
        command = ["nice", "-n", str(OPTIMIZER_NICENESS), sys.executable, "-m", *PROGRAM, *words]
        # A child inherits the affinity of the thread that starts it. We are kept on our cores; the search picks
        # its own, and its load generator takes others where there are some.
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._host.allowed)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_LINE_LIMIT
            )
        finally:
            os.sched_setaffinity(0, ours)
        self._optimizer = process
        assert process.stdout is not None  # noqa: S101 - a pipe
        assert process.stderr is not None  # noqa: S101 - a pipe
        errors = asyncio.create_task(process.stderr.read())
        artefact: Path | None = None
        with OptimizationView() as view:
            async for line in process.stdout:
                event = event_from_json(json.loads(line))
                server.status.optimization = Progress(event.stage.value, event.step, event.steps, event.message)
                view(event)
                artefact = Path(event.facts["artefact"]) if "artefact" in event.facts else artefact
        status = await process.wait()
        transfer_message = (await errors).decode(errors="replace").strip()
        if status != 0 or artefact is None:
            logger.debug("penstock optimize transfer_message: %s", transfer_message)
            raise _failure(status, transfer_message)
        server.status.optimization = None
        return artefact

    async def _take_over(self, server: Server, predictor: Predictor, artefact: Path, grant: CoreGrant) -> None:
        """Change to the chosen plan. Requests under way are finished by the old one."""
        model = await self._load(artefact, "chosen", grant)
        # A shutdown in this moment: nothing to take over.
        with contextlib.suppress(NotReady):
            await predictor.replace(model)
            server.serve_with(predictor, model.plan, model.manifest)
            spare_the_collector()
            self._show_manifest(Manifest.load(artefact))
            fact("report", str(artefact / "report.html"))
            self._show_serving(server, note="  (took over in the running server)")

    def _show_model(self, model: str, task: TaskName) -> None:
        fact("model", f"{model}  {task.value}")

    def _show_manifest(self, manifest: Manifest, *, table: bool = True) -> None:
        if not manifest.candidates:
            return
        limit = manifest.capacity.p95_objective_milliseconds
        if self._endpoint is not None:
            latency = self._endpoint.spec.objective.latency
            limit = latency.p95_milliseconds if latency is not None else None
        show_result(manifest, p95_objective_milliseconds=limit, table=table)

    def _show_serving(self, server: Server, note: str = "") -> None:
        fact("serving", f"{server.url}{note}", style="bold")
        fact("", f"a playground for the browser at {server.url}/, metrics at /metrics, what is served at /info")
        body = SAMPLE[server.status.task].replace("'", "'\\''")
        command = f"curl -i {server.url}/predict -H 'content-type: application/json' -d '{body}'"
        console.print(f"\n  {command}\n", markup=False)


def _failure(status: int, transfer_message: str) -> PenstockError:
    """Why `penstock optimize` has made nothing: its own last words, unless it had no time for any."""
    # With the search's libraries, which serving an artefact does without.
    from penstock_optimizer.candidate.isolation import death_reason

    if transfer_message and status >= 0:
        return PenstockError(transfer_message.splitlines()[-1].removeprefix("error: "))
    remedy = "The next start goes on from there"
    if status == -signal.SIGKILL:
        remedy = "Leave it more memory, or take a smaller model: the next start goes on from there"
    was = "was " if status < 0 else ""
    return PenstockError(f"it {was}{death_reason(status, transfer_message)}", remedy=remedy)
