"""The engine: compiled shapes in the front, a child process with the NeuronCores behind."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from penstock.errors import ArtefactError, DeviceUnavailable, MissingPackage, PenstockError
from penstock.hardware import INF1_UNSUPPORTED, NOT_RUN, NeuronGeneration
from penstock.logs import log_event
from penstock.manifest import Axes, GraphIO
from penstock.neuron_artefact import CompiledModel
from penstock.recipe import Recipe
from penstock_runtime.engines.base import DeviceState, EngineFacts, Streams, Threads
from penstock_runtime.engines.neuron.copies import Copies, Place
from penstock_runtime.engines.neuron.device_errors import start_error
from penstock_runtime.engines.neuron.fence import Fence, largest_error, read_fence
from penstock_runtime.engines.neuron.process import NeuronProcess, ProcessEnded, RunFailed, StartFailed, start
from penstock_runtime.engines.neuron.shapes import BatchPart, bucket_grid, divide, padded_inputs, real_tokens
from penstock_runtime.engines.neuron.variables import VISIBLE_CORES, NeuronVariables, child_environment, granted_cores
from penstock_runtime.engines.thread_streams import ThreadStreams
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import Batch, Float, Outputs

logger = logging.getLogger("penstock.neuron")

PACKAGE = {NeuronGeneration.INF1: "torch-neuron", NeuronGeneration.INF2: "torch-neuronx"}
"""The distribution that runs models of a generation."""
FIRST_OTHER_RELEASE = (2, 10)
"""From this release on the distribution torch-neuronx is another product, for Trainium only."""
IMAGES = {NeuronGeneration.INF1: "runtime-neuron-legacy", NeuronGeneration.INF2: "runtime-neuron"}


class NeuronEngine:
    """A compiled model on the granted NeuronCores. Create it with `load`."""

    def __init__(self, model: CompiledModel, io: GraphIO, facts: EngineFacts, copies: Copies, cores: int) -> None:
        self._model = model
        self._io = io
        self._facts = facts
        self._copies = copies
        self._cores = cores
        self._process: NeuronProcess | None = None
        self._changed = threading.Condition()
        """Guards everything below and the copies."""
        self._runs = 0
        self._errors: Counter[str] = Counter()
        self._tokens = [0, 0]
        """Real and padded."""
        self._on_lost: Callable[[PenstockError], None] | None = None
        self._details: dict[str, Any] = {}

    @property
    def facts(self) -> EngineFacts:
        """See `Engine`."""
        return self._facts

    def run(self, batch: Batch) -> Outputs:
        """See `Engine`: in as many runs as the compiled shapes need, one after the other."""
        rows, tokens = batch.input_ids.shape
        try:
            parts = divide(self._model, rows, tokens)
        except ValueError as error:
            raise InferenceFailed(f"neuron: {error}", remedy="Optimise it again with such lengths") from error
        found = [self._run_part(batch, part, tokens) for part in parts]
        real, padded = real_tokens(batch, parts, self._model)
        with self._changed:
            self._runs += len(parts)
            self._tokens[0] += real
            self._tokens[1] += padded
        if len(found) == 1:
            return found[0]
        return {name: np.concatenate([outputs[name] for outputs in found]) for name in self._io.outputs}

    def run_wide(self, batch: Batch) -> Outputs:
        """See `Engine`: a copy has its cores only."""
        return self.run(batch)

    def run_widening(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self.run(batch)

    def start_streams(self) -> Streams:
        """See `Engine`: a thread for each run in progress, which waits for the child."""
        return ThreadStreams(self)

    def device(self) -> DeviceState:
        """See `HasDevice`."""
        with self._changed:
            return DeviceState(
                cores=self._cores,
                copies=self._copies.count,
                out_of_service=dict(self._copies.failed),
                runs=self._runs,
                errors=dict(self._errors),
                real_tokens=self._tokens[0],
                padded_tokens=self._tokens[1],
                facts=self._details,
            )

    def when_lost(self, call: Callable[[PenstockError], None]) -> None:
        """See `HasDevice`."""
        with self._changed:
            self._on_lost = call
            lost = not self._copies.in_service
        if lost:
            call(self._lost_error())

    def close(self) -> None:
        """See `Engine`: ends the child, which releases the cores."""
        if self._process is not None:
            self._process.close()

    @property
    def pid(self) -> int:
        """Of the process that owns the device."""
        assert self._process is not None  # noqa: S101 - set by `begin`
        return self._process.pid

    def begin(self, process: NeuronProcess, details: Mapping[str, Any], fence: Fence) -> None:
        """Take runs from now on, after comparing each copy with fp32.

        ArtefactError if no copy gives the stored answers. A copy that alone does not is taken out of service.
        """
        self._process = process
        self._details = dict(details)
        self._details["largest_relative_error"] = self._compare(fence, self._model.fence.max_relative_error)

    def child_ended(self, reason: str) -> None:
        """No copy is left: the child has ended. From any thread."""
        self._take_out(range(self._copies.count), reason)

    def _run_part(self, batch: Batch, part: BatchPart, tokens: int) -> Outputs:
        inputs = padded_inputs(self._model, batch, part)
        while True:
            place = self._place()
            try:
                return self._run_on(place, part, tokens, inputs)
            except RunFailed as error:
                with self._changed:
                    self._errors[error.failure.value] += 1
                if not error.failure.takes_core_out:
                    raise InferenceFailed(
                        f"neuron: {error.details}", remedy="Report it with the model and the input"
                    ) from error
                # The run is repeated on another copy.
                self._take_out([place.copy], f"{error.failure.value}: {error.details}")
            except ProcessEnded as error:
                with self._changed:
                    self._errors["process-ended"] += 1
                self.child_ended(str(error))
            finally:
                with self._changed:
                    self._copies.give_back(place)
                    self._changed.notify()

    def _run_on(self, place: Place, part: BatchPart, tokens: int, inputs: list[Any]) -> dict[str, Float]:
        assert self._process is not None  # noqa: S101 - set by `begin`
        values = self._process.run(place, part.bucket, part.rows, tokens, inputs)
        return dict(zip(self._model.outputs, values, strict=True))

    def _place(self) -> Place:
        with self._changed:
            while True:
                if not self._copies.in_service:
                    raise InferenceFailed(f"neuron: {self._lost_error().message}", remedy="Ask another replica")
                place = self._copies.take()
                if place is not None:
                    return place
                self._changed.wait()

    def _take_out(self, copies: Iterable[int], reason: str) -> None:
        """Take copies out of service."""
        with self._changed:
            failed = [copy for copy in copies if self._copies.fail(copy, reason)]
            left, call = self._copies.in_service, self._on_lost
            self._changed.notify_all()
        if not failed:
            return
        logger.error(
            "%d of %d copies of the model are left in service: %s",
            left,
            self._copies.count,
            reason,
            extra=log_event("NeuronCoreFailed", object=", ".join(f"copy {copy}" for copy in failed)),
        )
        if not left and call is not None:
            call(self._lost_error())

    def _lost_error(self) -> PenstockError:
        reasons = dict.fromkeys(self._copies.failed.values())
        return DeviceUnavailable(
            f"no NeuronCore is left in service: {'; '.join(reasons)}",
            remedy="The pod starts again; if it fails again, replace the node (condition NeuronHealth, `neuron-ls`)",
        )

    def _compare(self, fence: Fence, limit: float) -> float:
        """The largest relative error of the copies that stay in service."""
        errors: dict[int, float] = {}
        for copy in range(self._copies.count):
            try:
                errors[copy] = self._error_of(copy, fence)
            except RunFailed as error:
                self._take_out([copy], f"{error.failure.value}: {error.details}")
            except ProcessEnded as error:
                self.child_ended(str(error))
        good = [difference for difference in errors.values() if difference <= limit]
        if not errors:
            raise self._lost_error()
        if not good:
            raise ArtefactError(
                f"the compiled model's answers differ from fp32 by {min(errors.values()):.3g} on this device, and "
                f"{limit:.3g} is allowed",
                remedy="Optimise it again; if it repeats, set optimization.precisions to fp32, and report it",
            )
        for copy, difference in errors.items():
            if difference > limit:
                self._take_out(
                    [copy], f"wrong answers: they differ from fp32 by {difference:.3g}, and {limit:.3g} is allowed"
                )
        return max(good)

    def _error_of(self, copy: int, fence: Fence) -> float:
        """The largest relative error of a copy, in all shapes."""
        rows, tokens = fence.batch.input_ids.shape
        worst = 0.0
        for index, bucket in enumerate(self._model.buckets):
            found = []
            for start_row in range(0, rows, bucket.batch):
                part = BatchPart(start_row, min(bucket.batch, rows - start_row), index)
                inputs = padded_inputs(self._model, fence.batch, part)
                found.append(self._run_on(Place(copy, 0), part, tokens, inputs))
            joined = {name: np.concatenate([one[name] for one in found]) for name in self._io.outputs}
            worst = max(worst, largest_error(fence, self._io, joined))
        return worst


def check_packages(model: CompiledModel, installed: Mapping[str, str], python: Path) -> None:
    """MissingPackage, or ArtefactError for other releases than those that the model was compiled for. Pure."""
    name = PACKAGE[model.target]
    found = installed.get(name)
    use_image = f"Use the image {IMAGES[model.target]}, or set PENSTOCK_NEURON_PYTHON to an interpreter that has it"
    if found is None:
        raise MissingPackage(f"{name} is not installed for {python}", remedy=use_image)
    if model.target is NeuronGeneration.INF2 and _release(found) >= FIRST_OTHER_RELEASE:
        raise MissingPackage(
            f"torch-neuronx {found} is installed for {python}: releases from 2.10 on are another product, for Trainium "
            "only, and cannot run models on Inf2",
            remedy="Install torch-neuronx 2.9 (docs/how-to/inferentia.md has the versions), or use the image "
            f"{IMAGES[model.target]}",
        )
    compiled = model.packages.get(name)
    if compiled is not None and compiled != found:
        raise ArtefactError(
            f"the model was compiled with {name} {compiled}, and {found} is installed for {python}: files of one "
            "release of the Neuron SDK are not made for another",
            remedy="Optimise it again with the optimizer image of this release, or serve it with that one's",
        )


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    numbers = version.split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdecimal())


def _check_io(path: Path, model: CompiledModel, io: GraphIO) -> None:
    if tuple(io.outputs) != model.outputs or set(io.inputs) != set(model.inputs):
        raise ArtefactError(
            f"{path} takes {sorted(model.inputs)} and gives {list(model.outputs)}, but is described with "
            f"{sorted(io.inputs)} and {list(io.outputs)}",
            remedy="Run penstock optimize again",
        )
    if Axes.MASKS in io.outputs.values() and model.chosen_token is None:
        raise ArtefactError(f"{path} does not name the mask token", remedy="Run penstock optimize again")


def _read_fence(folder: Path, model: CompiledModel, io: GraphIO) -> Fence:
    """The stored inputs and answers. ArtefactError unless every shape can be compared with them: a pod is not ready
    without that."""
    path = folder / model.fence.file
    fence = read_fence(path, io)
    if any(not len(values) for values in fence.outputs.values()):
        raise ArtefactError(f"{path} has no answers to compare the device with", remedy="Run penstock optimize again")
    tokens = fence.batch.input_ids.shape[1]
    if shorter := [bucket.file for bucket in model.buckets if bucket.tokens < tokens]:
        raise ArtefactError(
            f"the inputs of {path} have {tokens} tokens, too many to compare {shorter[0]} with them",
            remedy="Run penstock optimize again",
        )
    return fence


def load(path: Path, io: GraphIO, recipe: Recipe, threads: Threads) -> NeuronEngine:
    """See `load_engine`. `path`: `neuron.json`; `threads`: copies and cores of each as planned.

    As many copies are loaded as the granted cores hold. MissingPackage: no usable Neuron package. HostError: no device,
    or too few cores; DeviceUnavailable, which is temporary: the cores stay taken by another process.
    """
    model = CompiledModel.load(path)
    _check_io(path, model, io)
    variables = NeuronVariables.of(os.environ)
    if variables.neuron_target not in {None, model.target}:
        raise ArtefactError(
            f"{path} was compiled for {model.target.value}, and PENSTOCK_NEURON_TARGET is {variables.neuron_target}",
            remedy="Optimise it again with the hardware class of this node",
        )
    fence = _read_fence(path.parent, model, io)
    cores = granted_cores(variables, os.environ, threads.streams * threads.per_stream)
    count = cores // model.cores_per_model
    if not count:
        raise DeviceUnavailable(
            f"the model was compiled for {model.cores_per_model} NeuronCores, and {cores} are granted",
            remedy=f"Grant {model.cores_per_model} cores, or optimise it again for {cores}",
        )
    python = variables.neuron_python or Path(sys.executable)
    facts = EngineFacts(
        "neuron",
        model.packages.get(PACKAGE[model.target], model.sdk),
        Threads(count, model.cores_per_model),
        recipe.precision.value,
        weight_copies=count,
        grid=bucket_grid(model),
        in_flight=count * model.requests_per_copy,
    )
    engine = NeuronEngine(model, io, facts, Copies(count, model.requests_per_copy), cores)
    begun = monotonic()
    loads = count * len(model.buckets)

    def loaded(number: int) -> None:
        logger.info(
            "%d of %d shapes are loaded after %.0f s",
            number,
            loads,
            monotonic() - begun,
            extra=log_event("NeuronShapeLoaded"),
        )

    def make() -> NeuronProcess:
        environment = child_environment(os.environ, cores)
        try:
            return NeuronProcess(python, environment, copies=count, places=model.requests_per_copy)
        except OSError as error:
            raise MissingPackage(
                f"{python} cannot be started ({error.strerror})",
                remedy="Set PENSTOCK_NEURON_PYTHON to an interpreter that has the Neuron packages",
            ) from error

    def load_into(process: NeuronProcess) -> None:
        process.load(
            _first_message(path.parent, model, io, count),
            lambda installed: check_packages(model, installed, python),
            loaded,
            engine.child_ended,
        )

    try:
        process = start(make, load_into, seconds=variables.neuron_start_seconds)
    except StartFailed as error:
        if error.stage == "import":
            raise MissingPackage(
                f"{PACKAGE[model.target]} does not load in {python}: {error.details}",
                remedy=f"Use the image {IMAGES[model.target]}",
            ) from error
        raise start_error(error.failure, error.details, visible=os.environ.get(VISIBLE_CORES, "")) from error
    try:
        engine.begin(process, _details(model, cores), fence)
    except BaseException:
        engine.close()
        raise
    return engine


def _first_message(folder: Path, model: CompiledModel, io: GraphIO, copies: int) -> dict[str, Any]:
    return {
        "files": [
            {"path": str((folder / bucket.file).resolve()), "batch": bucket.batch, "tokens": bucket.tokens}
            for bucket in model.buckets
        ],
        "inputs": list(model.inputs),
        "outputs": [[name, io.outputs[name].value] for name in model.outputs],
        "copies": copies,
        "places": model.requests_per_copy,
        "cores_per_model": model.cores_per_model,
        "chosen_token": model.chosen_token,
        "package": PACKAGE[model.target],
    }


def _details(model: CompiledModel, cores: int) -> dict[str, Any]:
    notes = [NOT_RUN] + ([INF1_UNSUPPORTED] if model.target is NeuronGeneration.INF1 else [])
    return {
        "target": model.target.value,
        "sdk": model.sdk,
        "packages": dict(model.packages),
        "flags": list(model.flags),
        "cores": cores,
        "cores_per_model": model.cores_per_model,
        "requests_per_copy": model.requests_per_copy,
        "buckets": [{"batch": bucket.batch, "tokens": bucket.tokens} for bucket in model.buckets],
        "notes": notes,
    }
