"""The parent's end of the process that runs and compiles a model for Inferentia (`child`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from penstock.errors import HostError
from penstock.hardware import NeuronGeneration
from penstock.manifest import Axes, GraphIO
from penstock.neuron_artefact import NeuronBucket
from penstock.tasks import Head
from penstock_optimizer.candidate.isolation import Worker, WorkerFailed
from penstock_optimizer.guard.gate import Forward
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.sentence import SparsePooling
from penstock_runtime.rows import Batch, Outputs, run_rows

PROGRAM = Path(__file__).with_name("child.py")
START_SECONDS = 300.0
"""For starting Python on a busy machine; it only ends what hangs."""
LOAD_SECONDS = 600.0
"""For importing transformers and loading a model."""
RUN_SECONDS = 300.0


@dataclass(frozen=True)
class NeuronToolchain:
    """What compiles: the device to compile for, and an interpreter with the SDK."""

    target: NeuronGeneration
    python: Path
    packages: Mapping[str, str]
    """Versions of torch, transformers, the SDK's package for torch and its compiler, by name."""

    @classmethod
    def read(cls, target: NeuronGeneration, python: Path) -> NeuronToolchain:
        """Read the versions from the interpreter. HostError when a package is missing, or is for other devices."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                with cls(target, python, {}).start(Path(folder) / "log") as worker:
                    packages = worker.call("versions", timeout_seconds=START_SECONDS, target=target.value)
            except OSError as error:
                raise HostError(
                    f"{python} does not start: {error.strerror}",
                    remedy="Set PENSTOCK_NEURON_PYTHON to an interpreter that has the Neuron SDK",
                ) from error
            except WorkerFailed as failure:
                raise failure.as_error(f"{python} cannot compile for {target.value}") from failure
        return cls(target, python, packages)

    def start(self, log: Path) -> Worker:
        """A process that compiles."""
        # The interpreter's own programs are found, the compiler among them.
        environment = {**os.environ, "PATH": f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        if self.target is NeuronGeneration.INF2:
            # Read when torch_neuronx is imported: without a device it does not know what to compile for.
            environment["NEURON_PLATFORM_TARGET_OVERRIDE"] = self.target.value
        return Worker([str(self.python), str(PROGRAM)], log=log, environment=environment)


@dataclass(frozen=True)
class SourceModel:
    """The model as the child loads it."""

    folder: ModelFolder
    head: Head
    io: GraphIO
    """Of the fp32 graph: inputs and outputs of the compiled model are the same."""
    mask_token: int | None = None
    """Its id, where outputs are `Axes.MASKS`."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `Child.open`."""
        # Imported on use: that takes a second.
        from penstock_optimizer.export.torch_export import AUTO_CLASS, ENCODER_CLASS

        name = AUTO_CLASS[Head.MASKED_LM if self.head is Head.SPARSE else self.head]
        if self.head is Head.ENCODER:
            name = ENCODER_CLASS.get(self.folder.model_type, name)
        pooling = self.folder.sparse or SparsePooling()
        return {
            "folder": str(self.folder.path),
            "model_class": name,
            "inputs": list(self.io.inputs),
            "outputs": list(self.io.outputs),
            "sparse": {"sums": pooling.sums, "twice": pooling.twice} if self.head is Head.SPARSE else None,
        }


class Session:
    """A child process with the model loaded. WorkerFailed from all calls."""

    def __init__(self, tools: NeuronToolchain, model: SourceModel, log: Path) -> None:
        self._tools = tools
        self.model = model
        self._worker = tools.start(log)
        self._scratch = tempfile.TemporaryDirectory(prefix="penstock-neuron-")
        try:
            counted = self._worker.call("open", timeout_seconds=LOAD_SECONDS, **model.arguments)
        except BaseException:
            self.close()
            raise
        self.weights: int = counted["weights"]
        self.embedding_weights: int = counted["embedding_weights"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._worker.close()
        self._scratch.cleanup()

    def compile(
        self, flags: Sequence[str], bucket: NeuronBucket, folder: Path, *, timeout_seconds: float
    ) -> dict[str, Any]:
        """Compile for one shape into `folder`. Returns `seconds` and `share`, of operations that are compiled."""
        found: dict[str, Any] = self._worker.call(
            "trace",
            timeout_seconds=timeout_seconds,
            target=self._tools.target.value,
            flags=list(flags),
            batch=bucket.batch,
            tokens=bucket.tokens,
            file=str(folder / bucket.file),
        )
        return found

    def run(self, arithmetic: str, batch: Batch) -> Outputs:
        """Run a batch as it is on the CPU."""
        given, found = (Path(self._scratch.name) / name for name in ("inputs.npz", "outputs.npz"))
        arrays = [getattr(batch, name).astype(np.int32) for name in self.model.io.inputs]
        np.savez(given, **{str(index): array for index, array in enumerate(arrays)})
        self._worker.call(
            "answers", timeout_seconds=RUN_SECONDS, inputs=str(given), outputs=str(found), arithmetic=arithmetic
        )
        with np.load(found) as file:
            outputs = {name: file[str(index)] for index, name in enumerate(self.model.io.outputs)}
        return at_masks(outputs, self.model.io, batch, self.model.mask_token)

    def forward(self, arithmetic: str, shapes: Sequence[NeuronBucket]) -> Forward:
        """Rows through compiled shapes: padded to one, and back, on the CPU with the arithmetic of the device."""

        def run(batch: Batch) -> Outputs:
            parts = list(padded(batch, shapes))
            found = [(part, self.run(arithmetic, padded)) for part, padded in parts]
            return {
                name: np.concatenate([trimmed(values[name], axes, part) for part, values in found])
                for name, axes in self.model.io.outputs.items()
            }

        return partial(run_rows, run, self.model.io)


def at_masks(outputs: Mapping[str, Any], io: GraphIO, batch: Batch, mask_token: int | None) -> Outputs:
    """Compiled models answer for every token: of `Axes.MASKS` the answers for mask tokens are kept, as the engine
    does."""
    is_mask = batch.input_ids == mask_token
    return {name: values[is_mask] if io.outputs[name] is Axes.MASKS else values for name, values in outputs.items()}


def padded(batch: Batch, shapes: Sequence[NeuronBucket]) -> Iterator[tuple[Batch, Batch]]:
    """The batch in parts that fit, each with its padded form."""
    rows, tokens = batch.input_ids.shape
    holding = [one for one in shapes if one.tokens >= tokens]
    most = max(one.batch for one in holding)
    for start in range(0, rows, most):
        part = Batch(*(getattr(batch, name)[start : start + most] for name in _INPUTS))
        size = len(part.input_ids)
        shape = min((one for one in holding if one.batch >= size), key=lambda one: (one.size, one.tokens))
        wide = [(0, shape.batch - size), (0, shape.tokens - tokens)]
        yield part, Batch(*(np.pad(getattr(part, name), wide) for name in _INPUTS))


_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def trimmed(values: Any, axes: Axes, part: Batch) -> Any:
    """Without the padding that `padded` added."""
    rows, tokens = part.input_ids.shape
    if axes is Axes.MASKS:
        return values
    return values[:rows, :tokens] if axes is Axes.TOKENS else values[:rows]
