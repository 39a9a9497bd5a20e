"""The device side: a compiled model as a ScriptModule, its load onto cores, and its runs.

As with the real packages, an archive holds a module; its `forward` calls an operator of the namespace `neuron`, which
only exists in a process that imported the package. `torch.jit.load` puts the model on a core: `__setstate__` does it.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from neuron_standin import LABEL, clock
from neuron_standin.cores import NOT_INITIALIZED, claim
from neuron_standin.machine import Machine, read_machine, runtime_log

CODE_BYTES = 4_300_000
"""Device memory of a model besides its weights, as published for a model like BERT-base."""
SDK = {"inf1": "2.20.0", "inf2": "2.31.1"}
NEFF_VERSION = {"inf1": "1.1", "inf2": "2.0"}
LOAD = -1
"""As a handle: load, rather than run."""


class Compiled(torch.nn.Module):
    """The part of a traced model that is on the device, before it is scripted."""

    def __init__(self, neff: torch.Tensor, metadata: str) -> None:
        super().__init__()
        self.neff = neff
        self.metadata = metadata
        self.lazy = False
        self.handle = -1

    # Loading calls the operator that also runs: a process without it then fails with that operator's name, as it does
    # with the real packages.
    @torch.jit.export
    def __getstate__(self):  # noqa: ANN204 # TorchScript infers the type
        return (self.neff, self.metadata, self.lazy, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, str, bool, bool]) -> None:
        self.neff = state[0]
        self.metadata = state[1]
        self.lazy = state[2]
        self.training = state[3]
        self.handle = -1
        if not self.lazy:
            self.handle = int(torch.ops.neuron.forward_v2_1([self.neff], self.metadata, -1)[0])

    def forward(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run; a model that is not loaded yet is loaded first."""
        if self.handle < 0:
            self.handle = int(torch.ops.neuron.forward_v2_1([self.neff], self.metadata, -1)[0])
        return torch.ops.neuron.forward_v2_1(inputs, self.metadata, self.handle)


def compiled_module(
    program: Any, metadata: dict[str, Any], outputs: Sequence[str] | int, host: Any = None, embedded: int = 0
) -> Any:
    """The ScriptModule for a compiled program.

    `program`: the traced CPU module that gives the device's answers; `outputs`: names (answers are a dict), a number
    (a tuple) or 0 (one tensor); `host`: a traced module, the `embedded` outputs of which are further inputs of the
    program.
    """

    class OnHost(torch.nn.Module):
        """The whole: what stays on the host, if anything, then the device. TorchScript gives instances of one class
        the same methods: each module has its own class."""

        def __init__(self, device: Any) -> None:
            super().__init__()
            self.device = device
            if host is not None:
                self.host = host

    buffer = io.BytesIO()
    torch.jit.save(program, buffer)
    neff = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    module = torch.jit.script(OnHost(torch.jit.script(Compiled(neff, json.dumps(metadata)))))
    names = [f"a{index}" for index in range(len(metadata["inputs"]))]
    given = list(names)
    lines = [f"def forward(self, {', '.join(f'{name}: Tensor' for name in names)}):"]
    if host is not None:
        lines.append(f"    e = self.host({', '.join(names)})")
        given += [f"e[{index}]" for index in range(embedded)]
    lines.append(f"    out = self.device([{', '.join(given)}])")
    if isinstance(outputs, int):
        answers = "".join(f"out[{index}], " for index in range(outputs))
        lines.append(f"    return ({answers})" if outputs else "    return out[0]")
    else:
        lines.append(f"    return {{{', '.join(f'{name!r}: out[{index}]' for index, name in enumerate(outputs))}}}")
    module.define("\n".join(lines) + "\n")
    return module.eval()


@dataclass
class Core:
    """A NeuronCore of this process."""

    number: int
    """In the host."""
    used_bytes: int = 0
    models: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)
    """One run at a time."""


@dataclass
class Loaded:
    """A model in device memory, with its copies."""

    metadata: dict[str, Any]
    program: Any
    copies: list[list[Core]]
    turns: Iterator[int] = field(default_factory=itertools.count)
    runs: int = 0


class Runtime:
    """The Neuron runtime of this process: cores that it owns, and models that are loaded."""

    def __init__(self, machine: Machine, owned: list[int]) -> None:
        self.cores = [Core(number) for number in owned]
        self.models: dict[int, Loaded] = {}
        self.loads = 0
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.bytes_per_core = machine.bytes_per_core

    def place(self, metadata: dict[str, Any], start: int, count: int) -> list[list[Core]]:
        """Cores for the copies of a model: `count` from `start`; -1: one copy on the least used cores."""
        each = int(metadata["cores"])
        if start < 0:
            firsts = range(len(self.cores) - each + 1)
            if not firsts:
                _too_few(each, metadata)
            start = min(firsts, key=lambda first: sum(core.models for core in self.cores[first : first + each]))
            count = each
        chosen = self.cores[start : start + max(count, each)]
        if len(chosen) < each:
            _too_few(start + each - 1, metadata)
        return [chosen[first : first + each] for first in range(0, len(chosen) - each + 1, each)]

    def load(self, neff: torch.Tensor, metadata: dict[str, Any]) -> int:
        """Check the model and put it into device memory. RuntimeError as documented for the reason."""
        machine = self.machine()
        check_version(metadata, machine)
        start, count = PLACEMENT.asked()
        with self.lock:
            self.loads += 1
            self._take_memory(copies := self.place(metadata, start, count), metadata, machine)
        time.sleep(machine.faults.load_seconds)
        try:
            program = torch.jit.load(io.BytesIO(neff.numpy().tobytes()))
        except Exception as error:
            raise RuntimeError("Failed to load NEFF: the file is corrupt (NRT_FAILURE 1)") from error
        handle = len(self.models) + 1
        self.models[handle] = Loaded(metadata, program, copies)
        return handle

    def _take_memory(self, copies: list[list[Core]], metadata: dict[str, Any], machine: Machine) -> None:
        limit = machine.faults.memory_full_from_load
        full = limit is not None and self.loads >= limit
        for copy in copies:
            needed = metadata["weights_bytes"] // len(copy) + CODE_BYTES
            for core in copy:
                if full or core.used_bytes + needed > self.bytes_per_core:
                    free = 0 if full else self.bytes_per_core - core.used_bytes
                    runtime_log(
                        f"ERROR TDRV:dmem_alloc device mempool [0:{core.number}] total {self.bytes_per_core} "
                        f"needed {needed} available {free}"
                    )
                    raise RuntimeError(f"Failed to load model: status=4 (NRT_RESOURCE), needed {needed} bytes")
                core.used_bytes += needed
                core.models += 1

    def move(self, handle: int, start: int, count: int) -> None:
        """Move a loaded model to other cores."""
        loaded, machine = self.models[handle], self.machine()
        with self.lock:
            for copy in loaded.copies:
                for core in copy:
                    core.used_bytes -= loaded.metadata["weights_bytes"] // len(copy) + CODE_BYTES
                    core.models -= 1
            loaded.copies = self.place(loaded.metadata, start, count)
            self._take_memory(loaded.copies, loaded.metadata, machine)

    @staticmethod
    def machine() -> Machine:
        """The machine, with the faults that apply now."""
        machine = read_machine()
        if machine is None:
            no_device()
        return machine

    def run(self, inputs: Sequence[torch.Tensor], handle: int) -> list[torch.Tensor]:
        """One execution, after the checks of shapes and types. RuntimeError as documented."""
        if os.getpid() != self.owner:
            raise RuntimeError("Neuron runtime was initialized in another process; a forked process cannot use it")
        loaded = self.models[handle]
        check_inputs(inputs, loaded.metadata)
        copy = loaded.copies[next(loaded.turns) % len(loaded.copies)]
        with ExitStack() as turns:
            for core in copy:
                turns.enter_context(core.turn)
            faults = self.machine().faults
            numbers = {core.number for core in copy}
            if faults.kill_on_core in numbers:
                os.kill(os.getpid(), signal.SIGKILL)
            if numbers.intersection(faults.execution_timeout_cores):
                _failed(5, "NRT_TIMEOUT", copy[0].number)
            if numbers.intersection(faults.hardware_error_cores):
                _failed(1202, "NRT_EXEC_HW_ERR_NC_UE", copy[0].number)
            time.sleep(faults.run_seconds + (0 if loaded.runs else faults.first_run_seconds))
            loaded.runs += 1
            _sleep_as_a_device(loaded, inputs, sum(core.turn.locked() for core in self.cores))
            with torch.no_grad():
                answer = loaded.program(*inputs)
        outputs = [answer] if isinstance(answer, torch.Tensor) else list(answer)
        if any(bool(output.isnan().any()) for output in outputs if output.is_floating_point()):
            _failed(1003, "NRT_EXEC_COMPLETED_WITH_NUM_ERR", copy[0].number)
        outputs = [output + faults.wrong_answers if output.is_floating_point() else output for output in outputs]
        return [_with_noise(output, inputs) for output in outputs] if faults.noise_in_padding else outputs


def _sleep_as_a_device(loaded: Loaded, inputs: Sequence[torch.Tensor], busy: int) -> None:
    if os.environ.get("STANDIN_CLOCK") != "real":
        return
    metadata = loaded.metadata
    weights = metadata["weights_bytes"] // 2
    operations = 2.0 * weights * inputs[0].shape[-1]
    work = clock.Work(batch=int(inputs[0].shape[0]), weights=weights, operations=operations)
    cores = int(metadata["cores"])
    if cores == 1:
        time.sleep(clock.core_milliseconds(metadata["generation"], work, max(1, busy)) / 1000)
    else:
        time.sleep(clock.stage_milliseconds(cores, work) / 1000)


def _with_noise(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Random values in rows with an empty mask."""
    if len(inputs) < 2 or inputs[1].ndim != 2 or not output.is_floating_point() or output.ndim == 0:
        return output
    empty = (inputs[1] == 0).all(dim=1)
    if len(empty) != len(output) or not bool(empty.any()):
        return output
    noisy = output.clone()
    noisy[empty] = random.uniform(100.0, 200.0)  # noqa: S311 - not secret
    return noisy


def _failed(code: int, name: str, core: int) -> None:
    runtime_log(f"ERROR NRT:nrt_infodump nrt_execute failed on nc{core}: status={code} ({name})")
    raise RuntimeError(f"nrt_execute status={code} message={name}")


def _too_few(core: int, metadata: dict[str, Any]) -> None:
    name = metadata["digest"][:8]
    runtime_log(f"ERROR NRT:nrt_load Could not find VNC id {core}")
    runtime_log(f"ERROR NMGR:dlr_kelf_stage Failed to load NN: {name}, err: 2")
    raise RuntimeError("Failed to load model: status=9 (LOAD_NOT_ENOUGH_NC)")


def no_device() -> NoReturn:
    """Raise RuntimeError, as on a host without devices."""
    runtime_log("ERROR TDRV:tdrv_get_dev_info No neuron device available")
    raise RuntimeError(NOT_INITIALIZED)


def check_version(metadata: dict[str, Any], machine: Machine) -> None:
    """RuntimeError when the model was compiled for another device or by another SDK than this one."""
    generation = metadata["generation"]
    if generation != machine.generation or metadata["target"] != machine.generation:
        runtime_log(
            f"ERROR NRT:nrt_load NEFF version mismatch supported: {NEFF_VERSION[machine.generation]} "
            f"received: {NEFF_VERSION[generation]}"
        )
        raise RuntimeError("Failed to load model: status=10 (NRT_UNSUPPORTED_NEFF_VERSION)")
    if metadata["sdk"] != SDK[generation] and os.environ.get("STANDIN_STRICT", "1") == "1":
        raise RuntimeError(f"Failed to load model: compiled by SDK {metadata['sdk']}, this is {SDK[generation]}")


def check_inputs(inputs: Sequence[torch.Tensor], metadata: dict[str, Any]) -> None:
    """RuntimeError unless number, shapes and types are those that were compiled."""
    expected = metadata["inputs"] + metadata["embedded"]
    if len(inputs) != len(expected):
        raise RuntimeError(f"Incorrect number of inputs: received {len(inputs)}, expected {len(expected)}")
    for index, (tensor, (shape, dtype)) in enumerate(zip(inputs, expected, strict=True)):
        if list(tensor.shape) != shape:
            raise RuntimeError(
                f"Incorrect tensor shape at input #{index}: received {list(tensor.shape)}, expected {shape}"
            )
        if str(tensor.dtype) != dtype:
            raise RuntimeError(f"Incorrect tensor type at input #{index}: received {tensor.dtype}, expected {dtype}")
        if tensor.device.type != "cpu":
            raise RuntimeError(f"Input tensor #{index} is not on the CPU: {tensor.device}")


class _Placement:
    """`neuron_cores_context`: loads within it go to these cores. Contexts are not thread-safe, as documented: two
    threads in one at the same time are an error here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stack: list[tuple[int, int, int]] = []

    def asked(self) -> tuple[int, int]:
        """First core and number of the innermost context; -1, -1: none."""
        return self._stack[-1][1:] if self._stack else (-1, -1)

    @contextmanager
    def context(self, start: int, count: int) -> Iterator[None]:
        """Loads go to `count` cores from `start`."""
        thread = threading.get_ident()
        with self._lock:
            if any(owner != thread for owner, _, _ in self._stack):
                raise RuntimeError("neuron_cores_context is used by two threads at once (it is not thread-safe)")
            self._stack.append((thread, start, count))
        try:
            yield
        finally:
            with self._lock:
                self._stack.pop()


PLACEMENT = _Placement()
_runtime: Runtime | None = None
_starting = threading.Lock()


def runtime() -> Runtime:
    """The runtime of this process; the first use claims cores, until the process ends."""
    global _runtime  # noqa: PLW0603 # one in each process, as in life
    with _starting:
        if _runtime is None:
            machine = Runtime.machine()
            minimum = {"inf1": (2, 0), "inf2": (2, 27)}[machine.generation]
            if tuple(int(part) for part in machine.driver.split(".")[:2]) < minimum:
                runtime_log(
                    f"ERROR NRT:nrt_init Unable to determine Neuron Driver version. Please check aws-neuron-dkms "
                    f"package is installed. ({LABEL}: driver {machine.driver} is too old)"
                )
                raise RuntimeError(NOT_INITIALIZED)
            _runtime = Runtime(machine, claim(machine))
    return _runtime


def _forward(inputs: list[torch.Tensor], metadata: str, handle: int) -> list[torch.Tensor]:
    if handle == LOAD:
        return [torch.tensor(runtime().load(inputs[0], json.loads(metadata)))]
    return runtime().run(inputs, handle)


def digest(data: bytes) -> str:
    """Names a program in logs."""
    return hashlib.sha256(data).hexdigest()


LIBRARY = torch.library.Library("neuron", "DEF")
LIBRARY.define("forward_v2_1(Tensor[] inputs, str metadata, int handle) -> Tensor[]")
LIBRARY.impl("forward_v2_1", _forward, "CompositeExplicitAutograd")
