"""Loads a model for serving: from an artefact, or from a single graph."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from penstock.errors import ArtefactError, OtherInstructionSet
from penstock.hardware import INF1_UNSUPPORTED, NOT_RUN, Isa, NeuronGeneration
from penstock.manifest import MANIFEST_NAME, PROBES_FILE, GraphIO, LiveLimits, Manifest
from penstock.neuron_artefact import CompiledModel
from penstock.recipe import EngineName, Plan
from penstock.resources.endpoint_parts.serving import Prompts
from penstock.tasks import HEAD_OF_TASK, Head
from penstock.vector_space import ARTEFACT_DIGITS, VectorSpace
from penstock_runtime.engines.base import Engine, Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.engines.routed import RoutedEngine
from penstock_runtime.host import Host, require_memory
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float, Pooling
from penstock_runtime.serving.model_settings import ignored_settings
from penstock_runtime.store.verification import verify_files
from penstock_runtime.tasks.base import DEFAULT_LIMITS, RequestLimits, Task
from penstock_runtime.tasks.factory import make_task
from penstock_runtime.tasks.texts import PromptTexts

Which = Literal["chosen", "baseline"]

_LOADING_FACTOR = {
    EngineName.ONNXRUNTIME: 2.5,
    EngineName.OPENVINO: 2.5,
    EngineName.NATIVE: 2.0,
    EngineName.NEURON: 1.0,
}
"""Peak memory of loading per byte of the graph's files, measured with MiniLM: file, weights, packed weights. Neuron: a
file at a time is in memory on its way to the device."""
_WORKING_BYTES = 128 * 2**20
"""Libraries, arenas and Python besides the weights."""
_DEVICE_PROCESS_BYTES = 512 * 2**20
"""The process that owns a Neuron device: torch, and AWS's package without a model."""


class LiveReference(NamedTuple):
    """The fp32 graph of a served model, for the guard of live traffic."""

    limits: LiveLimits
    """What answers of the served plan differ from fp32's at most."""
    load: Callable[[], tuple[Engine, GraphIO]]
    """Loads it for one thread."""


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A task, and the engine that runs its rows. To be closed when no row runs (the predictor does)."""

    task: Task
    engine: Engine
    plan: Plan
    io: GraphIO
    manifest: Manifest | None = None
    """None: not from an artefact."""
    which: Which = "chosen"
    max_tokens: int = 512
    """Length of the longest row; the warm-up covers lengths up to this."""
    labels: tuple[str, ...] = ()
    """Labels of a classification head, in the order of its outputs."""
    pooling: str = ""
    """The model's own pooling, by its files; empty: none."""
    truncate: bool = True
    """Texts that are too long are cut, unless a request has another rule."""
    space: VectorSpace | None = None
    """The space of its vectors; None: it has none, or its artefact does not state it."""
    probes: Float | None = None
    """The recorded vectors of the probe texts, see `probes.py`."""
    digest: str = ""
    """sha256 of the manifest, hexadecimal, which names the artefact in a store."""
    live: LiveReference | None = None
    """What live answers can be compared with; None: fp32 is served itself, or the artefact has no limits."""
    findings: tuple[str, ...] = ()
    """Deviations from the plan, as sentences for the user."""
    closed: bool = False

    @property
    def fingerprint(self) -> str:
        """Space and artefact of its vectors, such as `vs1-7f3a9c0d12ab5e44/3b1fd20c9a71`; empty without a space."""
        return "" if self.space is None else f"{self.space.id}/{self.digest[:ARTEFACT_DIGITS]}"

    _lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Free the graph. No row may be running. Further calls do nothing."""
        with self._lock:
            if not self.closed:
                self.closed = True
                self.engine.close()


def load_graph(
    task: Task,
    path: Path,
    io: GraphIO,
    plan: Plan,
    *,
    short: tuple[Path, GraphIO] | None = None,
    manifest: Manifest | None = None,
    max_tokens: int = 512,
    shares_cores: bool = False,
) -> LoadedModel:
    """Load a graph with a plan, and the graph of short rows where the plan has one. `shares_cores`: with other models.

    ArtefactError when one does not load, or when the two do not give the same.
    """
    engine = _engine(path, io, plan, max_tokens, placed=not shares_cores)
    short_plan = plan.of_short_rows
    if plan.short is None or short_plan is None or short is None:
        return LoadedModel(task, engine, plan.unrouted, io, manifest, max_tokens=max_tokens)
    try:
        check_same_outputs(io, short[1])
        second = _engine(*short, short_plan, max_tokens, placed=not shares_cores)
    except BaseException:
        engine.close()
        raise
    routed = RoutedEngine(engine, second, plan.short.longest_tokens)
    return LoadedModel(task, routed, plan, io, manifest, max_tokens=max_tokens)


def check_same_outputs(io: GraphIO, short: GraphIO) -> None:
    """ArtefactError unless both graphs have the same outputs."""
    if short.outputs != io.outputs:
        raise ArtefactError(
            f"the graph of the short rows gives {sorted(short.outputs)}, and that of the others {sorted(io.outputs)}",
            remedy="Run penstock optimize again",
        )


def _engine(path: Path, io: GraphIO, plan: Plan, max_tokens: int, *, placed: bool = True) -> Engine:
    threads = Threads(plan.streams, plan.threads_per_stream, placed)
    return load_engine(path, io, plan.recipe, threads, wide=plan.may_run_wide, max_tokens=max_tokens)


def load_artefact(
    folder: Path,
    which: Which,
    host: Host,
    *,
    cores: int | None = None,
    max_tokens: int | None = None,
    truncate: bool = True,
    limits: RequestLimits = DEFAULT_LIMITS,
    any_isa: bool = False,
    prompts: Prompts | None = None,
    shares_cores: bool = False,
    verified: bool = False,
) -> LoadedModel:
    """Load one of an artefact's two models for this machine.

    `cores` to use (None: the plan's), with other models if `shares_cores`; `max_tokens`, `truncate`, `limits` and
    `prompts` as for `make_task`; `verified`: the caller has just compared the files with their digests.
    ArtefactError: a file is missing or altered, or the graph does not load. OtherInstructionSet: the chosen plan was
    made for another one, and `any_isa` is not given (the fp32 baseline runs on any). HostError when there is not enough
    memory. Errors of the model's own files as `ModelFolder.open` and `make_task`.
    """
    manifest = Manifest.load(folder)
    served = manifest.chosen if which == "chosen" else manifest.baseline
    on_device = is_on_device(served.plan)
    if which == "chosen" and not any_isa and not on_device:
        check_isa(folder, manifest.cpu.isa, host.cpu.isa)
    if not verified:
        verify_files(folder, manifest, served)
    # The cores of a plan for a device belong to the device, and the engine finds them.
    plan, findings = fit_plan(served.plan, None if on_device else cores)
    short = (folder / served.short.path, served.short.io) if served.short is not None else None
    needed = _needed_bytes(folder / served.path, plan)
    if short is not None and (short_plan := plan.of_short_rows) is not None:
        needed += _needed_bytes(short[0], short_plan) - _WORKING_BYTES
    require_memory(host.memory, needed, f"serving {plan.recipe.name}")
    model_folder = ModelFolder.open(folder, weights=False)
    longest = min(max_tokens or manifest.model.max_tokens, model_folder.max_tokens)
    if on_device:
        longest = max_tokens = min(longest, CompiledModel.load(folder / served.path).longest)
    task = make_task(
        manifest.task,
        model_folder,
        io=served.io,
        max_tokens=max_tokens,
        truncate=truncate,
        limits=limits,
        prompts=prompts,
    )
    model = load_graph(
        task,
        folder / served.path,
        served.io,
        plan,
        short=short,
        manifest=manifest,
        max_tokens=longest,
        shares_cores=shares_cores,
    )
    if on_device:
        model.plan, changes = fit_plan_to_device(plan, model.engine.facts.threads)
        findings = (*findings, *changes, *device_notes(folder / served.path))
    model.which = which
    if HEAD_OF_TASK[manifest.task] in {Head.SEQUENCE, Head.TOKEN}:
        model.labels = model_folder.labels
    if manifest.model.head is Head.ENCODER and isinstance(pooling := model_folder.pooling, Pooling):
        model.pooling = str(pooling)
    model.truncate = truncate
    if which == "chosen" and manifest.live is not None:
        model.live = LiveReference(manifest.live, partial(load_reference, folder, manifest, longest))
    model.digest = hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()
    if manifest.probes is not None:
        model.probes = np.load(folder / PROBES_FILE, allow_pickle=False)
    if manifest.vector_space is not None:
        texts = PromptTexts.of(model_folder, prompts)
        model.space = manifest.vector_space.served_with(texts.texts, texts.default, longest)
    model.findings = (*findings, *task.tokenizer.findings, *ignored_settings(folder))
    return model


def load_reference(folder: Path, manifest: Manifest, max_tokens: int) -> tuple[Engine, GraphIO]:
    """The fp32 graph of an artefact, for one thread. Errors as `load_artefact`."""
    baseline = manifest.baseline
    verify_files(folder, manifest, baseline)
    plan = baseline.plan.unrouted.model_copy(update={"streams": 1, "threads_per_stream": 1})
    return _engine(folder / baseline.path, baseline.io, plan, max_tokens), baseline.io


def fit_plan(plan: Plan, cores: int | None) -> tuple[Plan, tuple[str, ...]]:
    """The plan on `cores` cores, and what had to be changed. Pure.

    With fewer cores than it was made for: fewer streams, then fewer threads for each. More cores stay unused: the plan
    was measured without them.
    """
    made_for = plan.streams * plan.threads_per_stream
    if cores is None or cores >= made_for:
        return plan, ()
    threads = min(plan.threads_per_stream, cores)
    streams = max(1, cores // threads)
    changes: dict[str, object] = {"streams": streams, "threads_per_stream": threads}
    if streams == 1:
        never = {"wide_from_tokens": None, "wide_alone_from_tokens": None}
        changes.update(never)
        if plan.short is not None:
            changes["short"] = plan.short.model_copy(update=never)
    fitted = plan.model_copy(update=changes)
    finding = (
        f"The plan was made for {made_for} cores ({plan.streams}x{plan.threads_per_stream} threads) and runs on "
        f"{cores} as {streams}x{threads}: optimise again with cores: {cores}"
    )
    return fitted, (finding,)


def is_on_device(plan: Plan) -> bool:
    """True for a plan that computes on a device other than the CPU: any processor of the host will do."""
    return plan.recipe.engine is EngineName.NEURON


def fit_plan_to_device(plan: Plan, threads: Threads) -> tuple[Plan, tuple[str, ...]]:
    """The plan with the copies that the engine has loaded on the granted cores, and what had to be changed. Pure."""
    made_for = plan.streams * plan.threads_per_stream
    fitted = plan.model_copy(update={"streams": threads.streams, "threads_per_stream": threads.per_stream})
    if fitted == plan:
        return plan, ()
    finding = (
        f"The plan was made for {made_for} NeuronCores ({plan.streams} copies of the model) and runs on "
        f"{threads.streams * threads.per_stream} ({threads.streams} copies)"
    )
    return fitted, (finding,)


def device_notes(path: Path) -> tuple[str, ...]:
    """Notes for the user of a model that was compiled for Neuron. `path`: `neuron.json`."""
    target = CompiledModel.load(path).target
    notes = [f"AWS Inferentia ({target.value}): {NOT_RUN}"]
    if target is NeuronGeneration.INF1:
        notes.append(INF1_UNSUPPORTED)
    return tuple(notes)


def check_isa(folder: Path, made_on: Isa, here: Isa) -> None:
    """OtherInstructionSet if an artefact was made on a processor of another class than this one."""
    if made_on is not here:
        raise OtherInstructionSet(
            f"the plan of {folder} was measured and judged on {made_on.value}, and this processor is {here.value}",
            remedy="Run penstock optimize on this machine",
        )


def _needed_bytes(path: Path, plan: Plan) -> int:
    try:
        size = sum(file.stat().st_size for file in path.parent.iterdir() if file.is_file())
    except OSError:
        size = 0  # loading will raise the error
    copies = 2 if plan.may_run_wide and plan.recipe.engine is EngineName.OPENVINO else 1
    working = _WORKING_BYTES + (_DEVICE_PROCESS_BYTES if is_on_device(plan) else 0)
    return int(size * (_LOADING_FACTOR[plan.recipe.engine] + copies - 1)) + working
