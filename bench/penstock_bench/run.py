"""Runs the experiment: starts the servers for each number of cores, measures every setting, writes the results."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from penstock import __version__
from penstock.artefact_store import DEFAULT_MODELS, DEFAULT_STORE
from penstock.errors import SpecError
from penstock.manifest import Manifest
from penstock.process import sigterm_interrupts
from penstock.resources.endpoint import ModelEndpoint
from penstock_bench import baseline
from penstock_bench.cell import CellSpec, Client, Turn, measure_in_turn
from penstock_bench.floor import Floor, fastest_ratio, measured_by
from penstock_bench.folder import ResultsFolder
from penstock_bench.grid import BenchGrid, BenchOptions, BenchSetting, Placement, place, plan_grid, remaining_seconds
from penstock_bench.results import BASELINE, OURS, BenchResults, Figures, Served, SettingResult
from penstock_bench.server import READY_PATH, TRANSFER_SECONDS, MeasuredServer, find_or_make, free_port, serve
from penstock_bench.subject import Subject, authorization, batch_bodies, fewest_tokens, read_subject
from penstock_optimizer.job.progress import DownloadReporter, ProgressEvent
from penstock_runtime.host import Host, read_host

BASELINE_READY_SECONDS = 300.0
"""PyTorch and transformers take half a minute to import on a busy machine."""
LONGEST_CELL = 10
"""A cell with slow requests may take this many times its seconds, and at least `SLOW_SECONDS`."""
SLOW_SECONDS = 20.0
MOST_BODIES = 16
LIBRARIES = ("onnxruntime", "openvino", "torch", "transformers", "fastapi", "uvicorn", "tokenizers", "numpy")


LONGEST_REASON = 100
"""Characters of a bad answer in a line of progress."""
BESIDES = {"output", "fresh", "store", "models", "patience_seconds", "auth_token"}
"""Options that change no figure."""


@dataclass(frozen=True)
class BenchProgress:
    """Something happened."""

    done: int
    """Settings measured."""
    total: int
    message: str
    """One line for people."""
    result: SettingResult | None = None
    """The setting that was just measured."""
    remaining_seconds: float | None = None
    """Estimated seconds for the rest; None while there is no estimate."""
    is_note: bool = False
    """Something to know about the results or the model, rather than a step."""


OnProgress = Callable[[BenchProgress], None]


def run_bench(options: BenchOptions, on_progress: OnProgress = lambda _: None) -> BenchResults:
    """Measure all settings of the options that this machine can run.

    `results.csv`, `results.json` and `report.html` in `options.output` are written anew after every setting; a run that
    was interrupted goes on where it was. What another experiment has left there is set aside.
    Raises PenstockErrors: a wrong file or URL, nothing that can be measured, a model that cannot be used, the
    baseline's libraries missing, a server that does not start or dies.
    """

    def fetching(event: ProgressEvent) -> None:
        on_progress(BenchProgress(0, 0, event.message, is_note="note" in event.facts))

    if options.baseline:
        baseline.require_baseline()
    folder = ResultsFolder(options.output)
    folder.prepare()
    host = read_host()
    models = (options.models or DEFAULT_MODELS).expanduser()
    subject = read_subject(
        options, models=models, on_transfer=DownloadReporter(fetching, every_seconds=TRANSFER_SECONDS)
    )
    grid = plan_grid(
        options.cores,
        options.lengths,
        options.batches,
        machine_cores=None if subject.url else host.usable,
        max_tokens=subject.max_tokens,
        shortest=fewest_tokens(subject.task, subject.tokenizer),
    )
    if not grid.settings:
        raise SpecError(
            f"nothing of this can be measured ({'; '.join(grid.left_out)})",
            remedy="Give --cores and --lengths that this machine and this model have",
        )
    store = options.store or DEFAULT_STORE
    run = _Run(options, host, subject, grid, folder, on_progress=on_progress, store=store, models=models)
    with sigterm_interrupts():
        return run.everything()


class _Run:
    """One experiment under way."""

    def __init__(
        self,
        options: BenchOptions,
        host: Host,
        subject: Subject,
        grid: BenchGrid,
        folder: ResultsFolder,
        *,
        on_progress: OnProgress,
        store: Path,
        models: Path,
    ) -> None:
        self._options = options
        self._host = host
        self._subject = subject
        self._grid = grid
        self._folder = folder
        self._on_progress = on_progress
        self._store = store
        self._models = models
        self._notes: list[str] = []
        self._served: dict[int, Served] = {}
        """By cores."""
        self._settings: dict[BenchSetting, SettingResult] = {}
        self._taken: list[tuple[BenchSetting, float]] = []
        """Seconds that this run has measured for."""
        self._experiment = _fingerprint(options, host, subject, grid)

    def everything(self) -> BenchResults:
        """All numbers of cores."""
        self._take_up()
        for sentence in self._subject.notes:
            self._note(sentence)
        for sentence in self._grid.left_out:
            self._tell(f"left out: {sentence}")
        for cores in self._grid.cores:
            self._series(cores)
        return self._write()

    def _take_up(self) -> None:
        """Go on from an interrupted run, or set aside what lies there."""
        earlier = None if self._options.fresh else self._folder.unfinished(self._experiment)
        if earlier is None:
            aside = self._folder.set_aside()
            if aside is not None:
                self._tell(f"earlier results are in {aside} now")
            return
        self._served = {one.cores: one for one in earlier.served}
        self._settings = {one.setting: one for one in earlier.settings}
        self._notes = [*earlier.notes, *(one for one in self._notes if one not in earlier.notes)]
        self._note(f"interrupted after {len(self._settings)} of {len(self._grid.settings)} settings, and gone on with")

    def _missing(self, cores: int) -> list[BenchSetting]:
        return [setting for setting in self._grid.of(cores) if setting not in self._settings]

    def _serves(self, served: Served) -> None:
        """Record the server for this number of cores. Results of another server are measured again."""
        if self._served.get(served.cores, served) != served:
            self._settings = {one: result for one, result in self._settings.items() if one.cores != served.cores}
        self._served[served.cores] = served

    def _series(self, cores: int) -> None:
        """Measure the missing settings of this number of cores; the servers stay up."""
        if not self._missing(cores):
            return
        with ExitStack() as stack:
            placement = place(self._host, cores) if cores else Placement(server=(), client=())
            if cores and placement.note:
                self._note(placement.note)
            floor: Floor | None = None
            ratios: Mapping[int, float] = {}
            if self._subject.endpoint is None:
                servers: list[MeasuredServer] = [self._given()]
            else:
                artefact = self._artefact(self._subject.endpoint, cores, placement)
                servers = [self._serve(cores, placement, stack)]
                floor = Floor(artefact, self._subject.tokenizer, placement.server)
                stack.callback(floor.stop)
                ratios = fastest_ratio(Manifest.load(artefact))
            if self._options.baseline:
                servers += self._start_baseline(cores, placement, stack)
            client = stack.enter_context(Client(placement.client))
            for setting in self._missing(cores):
                begun = time.monotonic()
                result = self._measure(setting, servers, floor if setting.batch == 1 else None, ratios, client)
                # A server that has ended answers nothing: neither this setting nor the next ones have figures then.
                for server in servers:
                    server.require_alive()
                self._settings[setting] = result
                self._write()
                self._taken.append((setting, time.monotonic() - begun))
                self._tell(_sentence(result), result)

    def _given(self) -> MeasuredServer:
        """The server given by URL."""
        server = MeasuredServer(OURS, self._subject.url)
        info = self._subject.info
        # Other kinds of servers have no known readiness path; that it answers is all that can be checked.
        if info is not None:
            server.wait_until_ready(READY_PATH, seconds=10)
        plan = info.plan.summary if info and info.plan else ""
        verdict = info.verdict.reason if info and info.verdict else ""
        self._serves(Served(cores=0, plan=plan, verdict=verdict))
        return server

    def _artefact(self, endpoint: ModelEndpoint, cores: int, placement: Placement) -> Path:
        """The artefact for this number of cores, found or made."""
        self._tell(f"optimising {self._subject.name} for {cores} core{'s' if cores > 1 else ''}")
        artefact = find_or_make(endpoint, cores, store=self._store, models=self._models, on_line=self._tell)
        manifest = Manifest.load(artefact)
        plan = manifest.chosen.plan
        chosen = next((one for one in manifest.candidates if one.recipe == plan.recipe), None)
        self._serves(
            Served(
                cores=cores,
                plan=plan.summary,
                made=manifest.created,
                verdict="" if chosen is None or chosen.verdict is None else chosen.verdict.reason,
                cpus=placement.server,
                client_cpus=placement.client,
            )
        )
        self._tell(f"serving {plan.summary}")
        return artefact

    def _serve(self, cores: int, placement: Placement, stack: ExitStack) -> MeasuredServer:
        server = serve(Path(self._options.target), cores, cpus=placement.server, store=self._store, models=self._models)
        stack.callback(server.stop)
        return server

    def _start_baseline(self, cores: int, placement: Placement, stack: ExitStack) -> list[MeasuredServer]:
        """The baseline, or nothing and a note."""
        subject = self._subject
        if subject.folder is None or subject.endpoint is None:
            self._note("no baseline: a server given by URL has cores and a model that we cannot give to another")
            return []
        self._tell("starting plain transformers behind FastAPI")
        port = free_port()
        server = MeasuredServer.start(
            BASELINE,
            baseline.command(sys.executable, subject.folder.path, subject.task, port),
            port=port,
            cpus=placement.server,
            environment=baseline.environment(cores),
        )
        stack.callback(server.stop)
        server.wait_until_ready(baseline.READY_PATH, seconds=BASELINE_READY_SECONDS)
        return [server]

    def _measure(
        self,
        setting: BenchSetting,
        servers: Sequence[MeasuredServer],
        floor: Floor | None,
        ratios: Mapping[int, float],
        client: Client,
    ) -> SettingResult:
        options, subject = self._options, self._subject
        bodies = batch_bodies(
            subject.task,
            subject.tokenizer,
            setting.tokens,
            setting.batch,
            count=max(2, MOST_BODIES // setting.batch),
            mask_token=subject.mask_token,
            seed=options.seed,
        )
        seconds = options.seconds / options.rounds

        def spec(url: str) -> CellSpec:
            return CellSpec(
                url=f"{url}/predict",
                bodies=bodies,
                seconds=seconds,
                warm_up_seconds=min(0.2, seconds / 4),
                maximum_seconds=max(SLOW_SECONDS, LONGEST_CELL * seconds),
                timeout_seconds=120,
                headers={"content-type": "application/json", **authorization(options.auth_token)},
            )

        turns = [Turn(server, spec(server.url)) for server in servers]
        if floor is not None:
            turns.append(Turn(floor, spec("http://floor").model_copy(update={"seconds": seconds / 2})))

        cells = measure_in_turn(
            turns,
            measured_by(client, floor),
            rounds=options.rounds,
            patience_seconds=options.patience_seconds,
        )
        alone = Figures.of(cells[Floor.name]) if floor is not None else None
        milliseconds = None if alone is None or alone.latency is None else alone.latency.p50
        return SettingResult(
            cores=setting.cores,
            tokens=setting.tokens,
            batch=setting.batch,
            figures={name: Figures.of(found) for name, found in cells.items() if name != Floor.name},
            floor_milliseconds=None if milliseconds is None else milliseconds * ratios.get(setting.tokens, 1.0),
        )

    def _results(self) -> BenchResults:
        options, subject = self._options, self._subject
        return BenchResults(
            created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            experiment=self._experiment,
            planned=len(self._grid.settings),
            version=__version__,
            target=subject.name,
            model=subject.model,
            task=subject.task,
            cpu=subject.cpu or self._host.cpu,
            machine_cores=self._host.usable,
            seconds_per_setting=options.seconds,
            rounds=options.rounds,
            libraries=_versions(),
            served=tuple(self._served[cores] for cores in sorted(self._served)),
            settings=tuple(self._settings[setting] for setting in sorted(self._settings)),
            left_out=self._grid.left_out,
            notes=tuple(self._notes),
        )

    def _write(self) -> BenchResults:
        results = self._results()
        self._folder.write(results)
        return results

    def _note(self, sentence: str) -> None:
        if sentence not in self._notes:
            self._notes.append(sentence)
            self._tell(sentence)

    def _tell(self, message: str, result: SettingResult | None = None) -> None:
        missing = [setting for setting in self._grid.settings if setting not in self._settings]
        remaining = remaining_seconds(self._taken, missing)
        self._on_progress(BenchProgress(len(self._settings), len(self._grid.settings), message, result, remaining))


def _fingerprint(options: BenchOptions, host: Host, subject: Subject, grid: BenchGrid) -> str:
    """The facts that two runs of one experiment have in common: subject, method, machine, versions."""
    how = options.model_dump(mode="json", exclude=BESIDES)
    what = subject.endpoint.spec.model_dump(mode="json") if subject.endpoint is not None else subject.url
    where = (subject.cpu or host.cpu).model_dump(mode="json")
    settings = [(one.cores, one.tokens, one.batch) for one in grid.settings]
    value = [__version__, _versions(), how, what, where, settings]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sentence(result: SettingResult) -> str:
    ours, theirs = result.ours, result.baseline
    if ours.latency is None:
        return f"{result.setting.label}: no answers ({_in_short(ours) or 'none came'})"
    text = f"{result.setting.label}: {ours.per_second:.1f} requests/s, p50 {ours.latency.p50:.2f} ms"
    if result.ratio is not None:
        text += f", {result.ratio:.2f}x transformers"
    text += _failures(ours)
    return text if theirs is None else text + _failures(theirs, of=" of transformers")


def _failures(figures: Figures, of: str = "") -> str:
    if not figures.failed:
        return ""
    sent = figures.failed + (figures.latency.count if figures.latency else 0)
    return f", {figures.failed:,} of {sent:,} requests{of} failed ({_in_short(figures)})"


def _in_short(figures: Figures) -> str:
    """Why requests failed, shortened: a server may answer with a page."""
    words = " ".join(figures.why_failed.split())
    return words if len(words) <= LONGEST_REASON else f"{words[:LONGEST_REASON]}…"


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
