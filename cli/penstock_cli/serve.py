"""`penstock serve`: loads a model, serves it over HTTP, and changes to the optimised plan in the running server.

    artefact given                       -> serve it
    finished artefact of the same key    -> serve it
    otherwise                            -> serve fp32, optimise in another process, then serve its result

When the optimisation fails, the server continues with the plan it has and shows the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from penstock.errors import PenstockError, SettingError
from penstock.logs import log_event
from penstock.manifest import Manifest
from penstock.process import python_module
from penstock.resources.endpoint import ModelEndpoint, OptimizationMode
from penstock.resources.files.reading import from_file
from penstock.settings import hugging_face_token
from penstock.tasks import TaskName
from penstock_cli.entry import require_optimizer
from penstock_cli.optimize import OptimizationView, event_from_json, show_result, target_of
from penstock_cli.terminal import (
    TRANSFER_SECONDS,
    artefact_of,
    console,
    describe_cpu,
    describe_memory,
    fact,
    is_remote,
    models_option,
    read_artefact,
    refuse_options,
    screen_log,
    setting_options,
    settings_from,
    store_option,
    verbose_option,
)
from penstock_runtime.app.lifecycle import AnyModel, AnyPredictor, replace_model, serve_while, start_model
from penstock_runtime.app.server import Server, request_limits
from penstock_runtime.engines.base import HasDevice
from penstock_runtime.host import CoreGrant, Host, pin_process, read_host
from penstock_runtime.logs import configure_logs
from penstock_runtime.models.sources.transfer import FetchProgress as Transfer
from penstock_runtime.serving.generation_model import load_generation_artefact
from penstock_runtime.serving.loaded_model import Which, is_on_device, load_artefact
from penstock_runtime.serving.status import OptimizationProgress, ServerStatus
from penstock_runtime.settings import Settings
from penstock_runtime.store.daemon_thread import any_daemon_running, in_daemon_thread
from penstock_runtime.tasks.texts import of_routes

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
    TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION: (
        '{"inputs": "Ada was born in London.", "parameters": {"candidate_labels": ["person", "city"]}}'
    ),
    TaskName.TEXT_GENERATION: '{"messages": [{"role": "user", "content": "Who are you?"}], "stream": true}',
}
"""A request body of each task, for the curl line."""

NO_ARTEFACT = "Give a ModelEndpoint file, or the folder of an artefact that penstock optimize has made"
PROGRAM = ("penstock_cli.main",)
"""Module and first arguments of the process that optimises while this one serves."""
OPTIMIZER_NICENESS = 10
"""Where the optimisation shares cores with requests, these have priority. Higher than `host.cores.STREAM_NICENESS`, by
which compute threads give priority to the event loop."""
_LINE_LIMIT = 8 * 2**20
"""Bytes of one progress line: the last ones hold all candidates."""


@dataclass(frozen=True)
class ServeOptions:
    """The arguments of the command."""

    target: Path
    name: str
    """Of an artefact, in metrics and logs."""
    store: Path
    models: Path
    cores: int | None = None
    optimize: bool = True
    verbose: bool = False
    token: str | None = None


@dataclass(frozen=True)
class NamedModel:
    """What is known of a file or an artefact before its model is loaded."""

    name: str
    task: TaskName
    cores: int | None
    """None: those of a device."""


class ServeSession:
    """One model of `penstock serve`: start the server, load the model, optimise, change plans, drain."""

    def __init__(self, options: ServeOptions, settings: Settings, *, is_member: bool = False) -> None:
        """`is_member`: other models are served, too."""
        self._options = options
        self._settings = settings
        self._is_member = is_member
        self._endpoint: ModelEndpoint | None = None
        self._host: Host = read_host()
        self._predictor: AnyPredictor | None = None
        """Of a model that an optimisation is to improve."""

    async def run(self) -> int:
        """Serve until a signal ends it. Returns the number of connections that were cut off."""
        named = self.read()
        grant = grant_for(self._host, named.cores, named.name)
        server = Server(self.status(named, grant), self._settings)
        await server.start()
        return await serve_while(server, self._work(server, grant), partial(self.report_failure, server))

    def read(self) -> NamedModel:
        """Read the file or the artefact."""
        if self._options.target.is_dir():
            manifest = read_artefact(self._options.target, otherwise=NO_ARTEFACT)
            on_device = is_on_device(manifest.chosen.plan)
            if on_device and self._options.cores is not None:
                raise SettingError(
                    "--cores counts CPU cores, and this artefact runs on AWS Inferentia",
                    field="--cores",
                    remedy="Leave it out, or set PENSTOCK_NEURON_CORES to the number of NeuronCores",
                )
            name, task = self._options.name, manifest.task
            cores = None if on_device else self._options.cores or manifest.cores
        else:
            self._endpoint = from_file(ModelEndpoint, self._options.target)
            spec = self._endpoint.spec
            name, task, cores = self._endpoint.metadata.name, spec.task, self._options.cores or spec.cores
            if target_of(None, self._endpoint) is not None:
                # Its `cores` are NeuronCores.
                cores = self._options.cores
                fact(
                    "note",
                    f"hardwareClass {spec.hardware_class} is AWS Inferentia, and a file is served by this machine's "
                    "CPUs: for the device, penstock optimize it and serve the artefact",
                )
            self._add_objective_bucket(self._endpoint)
        return NamedModel(name, task, cores)

    def status(self, named: NamedModel, grant: CoreGrant) -> ServerStatus:
        """The status of a server for the model."""
        prompts = self._endpoint.spec.serving.prompts if self._endpoint is not None else None
        status = ServerStatus(named.name, named.task, host=self._host, grant=grant, route_prompts=of_routes(prompts))
        status.guard_policy = self._endpoint.spec.serving.guard_policy if self._endpoint is not None else None
        return status

    @property
    def settings(self) -> Settings:
        """With what the file adds; `read` comes first."""
        return self._settings

    @property
    def objective_seconds(self) -> float:
        """The p95 of the whole answer that the file wants; infinite: none."""
        objective = None if self._endpoint is None else self._endpoint.spec.objective.latency
        return math.inf if objective is None else objective.p95_milliseconds / 1000

    def _add_objective_bucket(self, endpoint: ModelEndpoint) -> None:
        """Add a boundary at the endpoint's objective to the duration histogram, unless the settings have one."""
        objective = endpoint.spec.objective
        latency = objective.time_to_first_token or objective.latency
        if latency is not None and self._settings.observation.objective_p95_milliseconds is None:
            observation = self._settings.observation.model_copy(
                update={"objective_p95_milliseconds": latency.p95_milliseconds}
            )
            self._settings = self._settings.model_copy(update={"observation": observation})

    def report_failure(self, server: Server, error: BaseException) -> None:
        """Note that the optimisation has failed; the server continues with the fp32 plan."""
        server.status.optimization = None
        server.status.optimization_error = str(error)
        fact("note", f"the optimisation failed, and the fp32 plan goes on serving: {error}", style="yellow")
        if not isinstance(error, PenstockError):
            logger.error(
                "the optimisation failed",
                exc_info=error,
                extra=log_event("OptimizationDefect", object=server.status.name, reason=error),
            )

    async def _work(self, server: Server, grant: CoreGrant) -> None:
        await self.load(server, grant)
        await self.improve(server, grant)

    async def improve(self, server: Server, grant: CoreGrant) -> None:
        """Optimise the model that is served as fp32, and change to the result."""
        if self._predictor is not None and self._options.optimize:
            artefact = await self._optimize(server, self._options.target, grant)
            await self._take_over(server, self._predictor, artefact, grant)

    async def load(self, server: Server, grant: CoreGrant) -> None:
        """Load the model and answer with it."""
        if self._endpoint is None:
            manifest = Manifest.load(self._options.target)
            self._show_model(manifest.model.source, manifest.task)
            await start_model(server, await self._load(self._options.target, "chosen", grant))
            self._show_manifest(manifest, table=False)
            self._show_serving(server)
            return
        require_optimizer()
        # These import libraries that serving an artefact does not need.
        from penstock_optimizer.job.progress import DownloadReporter, transfer_message
        from penstock_optimizer.optimise import prepare

        self._show_model(self._endpoint.spec.model, self._endpoint.spec.task)
        loop = asyncio.get_running_loop()
        waiting = server.status.message
        with OptimizationView() as view:
            shown = DownloadReporter(view, every_seconds=TRANSFER_SECONDS)

            def show(step: Transfer) -> None:
                is_over = step.bytes_done == step.bytes_total and not step.note
                server.status.message = waiting if is_over else transfer_message(step)
                shown(step)

            def show_later(step: Transfer) -> None:
                with contextlib.suppress(RuntimeError):  # the event loop is closed
                    loop.call_soon_threadsafe(show, step)

            prepared = await in_daemon_thread(
                partial(
                    prepare,
                    self._endpoint,
                    store=self._options.store,
                    models=self._options.models,
                    cores=grant.cores,
                    token=self._options.token,
                    on_transfer=show_later,
                )
            )
        server.status.message = waiting
        if prepared.finished or self._endpoint.spec.optimization.mode is OptimizationMode.OFF:
            await start_model(server, await self._load(prepared.artefact, "chosen", grant, verified=True))
            if prepared.finished:
                fact("artefact", f"{prepared.artefact} (made before, for this model and machine)")
            self._show_manifest(Manifest.load(prepared.artefact), table=False)
            fact("report", str(prepared.artefact / "report.html"))
            self._show_serving(server)
            return
        model = await self._load(prepared.artefact, "baseline", grant, verified=True)
        self._predictor = await start_model(server, model)
        self._show_serving(server, note="  (fp32 until the optimisation is through)" if self._options.optimize else "")

    async def _load(self, artefact: Path, which: Which, grant: CoreGrant, *, verified: bool = False) -> AnyModel:
        """`verified`: `prepare` has just compared the files with their digests, or written them."""
        serving = self._endpoint.spec.serving if self._endpoint is not None else None
        host = self._host.with_present_memory()
        if Manifest.load(artefact).task is TaskName.TEXT_GENERATION:
            generation = await in_daemon_thread(
                partial(
                    load_generation_artefact,
                    artefact,
                    which,
                    host,
                    cores=grant.cores,
                    cache_bytes=self._settings.generation.generation_cache_bytes,
                    verified=verified,
                )
            )
            for finding in generation.findings:
                fact("note", finding)
            return generation
        model = await in_daemon_thread(
            partial(
                load_artefact,
                artefact,
                which,
                host=host,
                cores=grant.cores,
                max_tokens=serving.max_input_tokens if serving is not None else None,
                truncate=serving.truncate if serving is not None else True,
                prompts=serving.prompts if serving is not None else None,
                limits=request_limits(self._settings),
                shares_cores=self._is_member,
                verified=verified,
            )
        )
        device = model.engine.device() if isinstance(model.engine, HasDevice) else None
        if device is not None:
            shapes = ", ".join(f"{one['batch']}x{one['tokens']}" for one in device.facts["buckets"])
            fact("device", f"{device.copies} copies on {device.cores} NeuronCores, compiled for {shapes} tokens")
        for finding in model.findings:
            fact("note", finding)
        return model

    async def _optimize(self, server: Server, file: Path, grant: CoreGrant) -> Path:
        """Run `penstock optimize` in another process, show its progress, and return its artefact."""
        words = ["optimize", str(file), "--json", "--store", str(self._options.store)]
        # Whatever the endpoint's class: it is served on the CPUs of this machine.
        words += ["--models", str(self._options.models), "--cores", str(grant.cores), "--neuron-target", "none"]
        command = ["nice", "-n", str(OPTIMIZER_NICENESS), *python_module(PROGRAM[0]), *PROGRAM[1:], *words]
        # A child inherits the CPU affinity of the thread that starts it. This process is pinned; the search chooses its
        # own cores, and its load generator uses other ones where there are some.
        pinned = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._host.allowed)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_LINE_LIMIT
            )
        finally:
            os.sched_setaffinity(0, pinned)
        try:
            return await self._follow(server, process)
        finally:
            if process.returncode is None:
                process.terminate()
                fact("note", "the optimisation was interrupted: the next start goes on from there")
                await process.wait()

    async def _follow(self, server: Server, process: Process) -> Path:
        """Show the events of `penstock optimize` until it ends; return its artefact."""
        assert process.stdout is not None  # noqa: S101 - a pipe
        assert process.stderr is not None  # noqa: S101 - a pipe
        errors = asyncio.create_task(process.stderr.read())
        artefact: Path | None = None
        with OptimizationView() as view:
            async for line in process.stdout:
                event = event_from_json(json.loads(line))
                server.status.optimization = OptimizationProgress(
                    event.stage.value, event.step, event.steps, event.message
                )
                view(event)
                artefact = Path(event.facts["artefact"]) if "artefact" in event.facts else artefact
        status = await process.wait()
        printed = (await errors).decode(errors="replace").strip()
        if status != 0 or artefact is None:
            logger.debug("output of penstock optimize: %s", printed)
            raise _optimizer_error(status, printed)
        server.status.optimization = None
        return artefact

    async def _take_over(self, server: Server, predictor: AnyPredictor, artefact: Path, grant: CoreGrant) -> None:
        """Change to the chosen plan. The old one finishes the requests that it is processing."""
        model = await self._load(artefact, "chosen", grant)
        if await replace_model(server, predictor, model):
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
        show_result(manifest, p95_objective_milliseconds=limit, table=table, verbose=self._options.verbose)

    def _show_serving(self, server: Server, note: str = "") -> None:
        if self._is_member:
            fact("ready", f"{server.status.name}{note}", style="bold")
            return
        fact("serving", f"{server.url}{note}", style="bold")
        where = f" on port {server.internal_port}" if server.internal_port else ""
        fact("", f"a playground for the browser at {server.url}/, metrics at /metrics, what is served at /info{where}")
        task = server.status.task
        body = SAMPLE[task].replace("'", "'\\''")
        route = "N {}/v1/chat/completions" if task is TaskName.TEXT_GENERATION else "i {}/predict"
        command = f"curl -{route.format(server.url)} -H 'content-type: application/json' -d '{body}'"
        console.print(f"\n  {command}\n")


def grant_for(host: Host, cores: int | None, name: str) -> CoreGrant:
    """Choose the cores, keep the process on them, and show them."""
    grant = host.usable_cores(cores)
    if grant.keep:
        pin_process(grant.cpus)
    fact("cpu", describe_cpu(host))
    fact("cores", f"{grant.cores} of {len(host.cores)}, memory {describe_memory(host)}")
    for finding in grant.findings:
        logger.info("cores: %s", finding, extra=log_event("CoreFinding", object=name))
    return grant


def _optimizer_error(status: int, printed: str) -> PenstockError:
    """Why `penstock optimize` failed: its error line, or how the process ended when it printed none."""
    # Imports the search's libraries, which serving an artefact does not need.
    from penstock_optimizer.candidate.isolation import death_reason

    if printed and status >= 0:
        return PenstockError(printed.splitlines()[-1].removeprefix("error: "))
    remedy = "The next start goes on from there"
    if status == -signal.SIGKILL:
        remedy = "Leave it more memory, or take a smaller model: the next start goes on from there"
    was = "was " if status < 0 else ""
    return PenstockError(f"it {was}{death_reason(status, printed)}", remedy=remedy)


def _variables_of(target: Path) -> dict[str, str]:
    """Settings for `serving.caches` and `guard.live` of an endpoint file; variables of the environment and flags count
    before."""
    if not target.is_file():
        return {}
    spec = from_file(ModelEndpoint, target).spec
    caches, live = spec.serving.caches, spec.guard.live
    found = caches.environment if caches is not None else {}
    return found if live is None else {**found, "PENSTOCK_LIVE_GUARD_SHARE": repr(live.cpu_share)}


@click.command
@click.argument("addresses", metavar="FILE|ARTEFACT|oci://...", nargs=-1, required=True)
@store_option
@models_option
@click.option("--cores", type=click.IntRange(min=1), help="Physical cores, instead of the file's.")
@click.option(
    "--optimize/--no-optimize",
    default=True,
    help="Search for a better plan while the fp32 plan serves. --no-optimize serves what there is: a finished "
    "artefact, or fp32.",
)
@click.option(
    "--priority",
    "priorities",
    metavar="NAME=NUMBER",
    multiple=True,
    help="The priority class of one of several models, 0 by default: those of a higher one go first.",
)
@verbose_option
@setting_options
def command(
    addresses: tuple[str, ...],
    store: Path,
    models: Path,
    cores: int | None,
    priorities: tuple[str, ...],
    *,
    optimize: bool,
    verbose: bool,
    **flags: Any,
) -> None:
    """Serve a ModelEndpoint FILE, or an ARTEFACT folder that penstock optimize has made, or one that penstock push has
    written to oci://REGISTRY/REPOSITORY:TAG.

    Several are served on one port, with one set of cores: a request names its model in the field `model`, or in the
    path, below /models/NAME.

    A finished artefact for this file and machine is served as it is. Otherwise the fp32 model answers within seconds,
    the optimisation runs at the same time, and the server changes to the chosen plan without a failed request.

    On SIGTERM or Ctrl-C it answers the accepted requests and then exits.
    """
    if all(is_remote(address) or Path(address).is_dir() for address in addresses):
        unread = ["store"] if any(map(is_remote, addresses)) else ["store", "models"]
        refuse_options(unread, "a ModelEndpoint FILE; an ARTEFACT folder has all that is served")
    models = models.expanduser()
    has_token_in_arguments = flags.get("auth_token") is not None
    settings = [settings_from(_variables_of(Path(address)) | dict(os.environ), flags) for address in addresses]
    configure_logs(settings[0].log.log_level, *screen_log())
    if has_token_in_arguments:
        logger.warning(
            "--auth-token is deprecated, because every user of the machine can read it: set PENSTOCK_AUTH_TOKEN, "
            "--auth-token-file or --auth-token-folder instead",
            extra=log_event("TokenInArguments"),
        )
    options = [
        ServeOptions(
            target=target,
            name=name,
            store=store,
            models=models,
            cores=cores,
            optimize=optimize,
            verbose=verbose,
            token=hugging_face_token(os.environ),
        )
        for target, name in (artefact_of(address, models) for address in addresses)
    ]
    if len(options) == 1:
        refuse_options(["priorities"], "several models")
        running = ServeSession(options[0], settings[0]).run()
    else:
        from penstock_cli.serve_several import serve_several

        running = serve_several(options, settings, priorities)
    # The thread pool of the tokenizers library would compete with the engine for its cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import uvloop  # takes 20 ms

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cut = runner.run(running)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if any_daemon_running():  # such as the download of a model that is no longer needed
        os._exit(1 if cut else 0)
    if cut:
        sys.exit(1)
