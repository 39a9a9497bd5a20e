"""What both generations' `trace` share: checks of the examples, the compiler's process, and the traced program."""

from __future__ import annotations

import copy
import io
import os
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._C._lazy import _get_tensor_id as tensor_id
from torch._lazy import metrics, ts_backend

from neuron_standin.device import CODE_BYTES, SDK, compiled_module, digest
from neuron_standin.machine import read_faults

VALUE_READ = "aten::_local_scalar_dense"
"""Counted by the lazy device when a value of a tensor is read."""


def checked_examples(model: Any, examples: Any) -> tuple[torch.Tensor, ...]:
    """The example tensors. TypeError unless they are CPU tensors in a tuple or list; RuntimeError in training mode."""
    tensors = (examples,) if isinstance(examples, torch.Tensor) else tuple(examples)
    if not all(isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" for tensor in tensors):
        raise TypeError("example inputs must be CPU tensors, in a tuple or list")
    if isinstance(model, torch.nn.Module) and model.training:
        raise RuntimeError("the model is in training mode: call eval() first")
    return tensors


def constant_inputs(model: Any, tensors: Sequence[torch.Tensor]) -> list[int]:
    """The inputs that recording the model as torch-xla does makes constants of: torch's own lazy device. The graph has
    what is computed with tensors; where Python code reads a value (`mask.all()`), what follows has it as it was.

    Of functions, whose weights are elsewhere, none is known."""
    if not isinstance(model, torch.nn.Module):
        return []
    _start_lazy()
    copied = copy.deepcopy(model).to("lazy")
    inputs = [tensor.to("lazy") for tensor in tensors]
    metrics.reset()
    with torch.no_grad():
        answer = copied(*inputs)
    outputs = list(answer.values()) if isinstance(answer, dict) else [answer]
    outputs = list(answer) if isinstance(answer, list | tuple) else outputs
    used, _ = torch._C._lazy_ts_backend._get_tensors_ts_device_data_node(outputs)  # noqa: SLF001 - no public name
    if VALUE_READ not in metrics.counter_names():
        return []
    return [index for index, tensor in enumerate(inputs) if tensor_id(tensor) not in used]


@cache
def _start_lazy() -> None:
    ts_backend.init()


def traced_program(model: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, list[str] | int]:
    """The program with tuples as outputs, and the form of the outputs (names of a dict, a number, 0: one tensor).

    RuntimeError when the program depends on values of its inputs, which a compiled model cannot.
    """
    with torch.no_grad():
        sample = model(*tensors)
    baked = {index: tensors[index] for index in constant_inputs(model, tensors)}
    kinds = list(sample) if isinstance(sample, dict) else 0 if isinstance(sample, torch.Tensor) else len(sample)

    class AsTuple(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model if isinstance(model, torch.nn.Module) else None

        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            answer = model(*(baked.get(index, tensor) for index, tensor in enumerate(inputs)))
            if isinstance(answer, dict):
                return tuple(answer.values())
            return (answer,) if isinstance(answer, torch.Tensor) else tuple(answer)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        wrapper = AsTuple().eval()
        program = torch.jit.trace(wrapper, tuple(tensors), check_trace=False)
        other = tuple(torch.zeros_like(tensor) for tensor in tensors)
        for one, two in zip(program(*other), wrapper(*other), strict=True):
            if not torch.allclose(one, two, atol=1e-4, equal_nan=True):
                raise RuntimeError("the model depends on the values of its inputs: it cannot be compiled")
    return program, kinds


@dataclass(frozen=True)
class Divided:
    """A model for Inf1: embeddings are looked up on the host, the rest is on the device."""

    host: Any
    """Traced; gives the looked-up vectors, in the order of the lookups. None: there are no embeddings."""
    program: Any
    """Traced; takes the model's inputs and then those vectors."""
    embedded: tuple[torch.Tensor, ...]
    """The vectors for the example inputs."""
    weights: int
    """Numbers in the weights of the program."""


def divided_program(model: Any, tensors: Sequence[torch.Tensor]) -> Divided:
    """Divide a model at its embeddings."""
    tables = [one for one in model.modules() if isinstance(one, torch.nn.Embedding)]
    weights = sum(weight.numel() for weight in model.parameters()) - sum(table.weight.numel() for table in tables)

    class Lookups(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found: list[torch.Tensor] = []
            hooks = [table.register_forward_hook(lambda _, __, output: found.append(output)) for table in tables]
            self.model(*inputs)
            for hook in hooks:
                hook.remove()
            return tuple(found)

    class Rest(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            vectors = iter(given[len(tensors) :])
            for table in tables:
                table.forward = lambda *_: next(vectors)
            try:
                answer = self.model(*given[: len(tensors)])
            finally:
                for table in tables:
                    del table.forward
            return (answer,) if isinstance(answer, torch.Tensor) else tuple(answer)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        lookups = Lookups().eval()
        embedded = lookups(*tensors)
        host = _only_what_is_used(torch.jit.trace(lookups, tuple(tensors), check_trace=False)) if embedded else None
        program = torch.jit.trace(Rest().eval(), (*tensors, *embedded), check_trace=False)
    return Divided(host, program, embedded, weights)


def _only_what_is_used(traced: Any) -> Any:
    """The traced module without the weights that its outputs do not need."""
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.freeze(traced), buffer)
    # Loaded again, since a frozen module cannot be a part of another one.
    return torch.jit.load(io.BytesIO(buffer.getvalue()))


def run_compiler(name: str, program: Any, arguments: Sequence[str], timeout: float | None = None) -> tuple[int, str]:
    """Exit status and messages of the compiler; RuntimeError when it is not on PATH. TimeoutExpired after `timeout`."""
    executable = shutil.which(name)
    if executable is None:
        raise RuntimeError(f"{name} is not installed. Please install {name} and make sure that it is on PATH")
    if read_faults().compiler_segfault:
        os.kill(os.getpid(), signal.SIGSEGV)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "graph"
        source.write_text(str(program.inlined_graph), encoding="utf-8")
        command = [executable, "compile", str(source), "--output", str(Path(folder) / "model.neff"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    return done.returncode, done.stderr


def round_weights(program: Any, *, all_tensors: bool) -> None:
    """Round the weights of a traced program to bfloat16 and back; `all_tensors`: vectors too, not only matrices."""
    error = read_faults().bf16_error
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*program.parameters(), *program.buffers()):
            if tensor.is_floating_point() and (all_tensors or tensor.ndim > 1):
                noise = 1 + error * torch.randn(tensor.shape, generator=generator) if error else 1.0
                tensor.copy_(tensor.to(torch.bfloat16).float() * noise)


def finished(
    program: Any,
    tensors: Sequence[torch.Tensor],
    outputs: list[str] | int,
    *,
    generation: str,
    target: str,
    compiler: str,
    flags: Sequence[str],
    cores: int = 1,
    weights_apart: bool = False,
    host: Any = None,
    embedded: Sequence[torch.Tensor] = (),
    weights: int | None = None,
) -> Any:
    """The ScriptModule that `trace` returns, with its compiler's settings."""
    parameters = sum(tensor.numel() for tensor in program.parameters()) if weights is None else weights
    metadata = {
        "generation": generation,
        "target": target,
        "sdk": os.environ.get("STANDIN_SDK", SDK[generation]),
        "compiler": compiler,
        "flags": list(flags),
        "cores": cores,
        "inputs": [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors],
        "embedded": [[list(tensor.shape), str(tensor.dtype)] for tensor in embedded],
        "weights_bytes": 2 * parameters,
        "code_bytes": CODE_BYTES,
        "weights_apart": weights_apart,
        "digest": digest(str(program.inlined_graph).encode()),
    }
    return compiled_module(program, metadata, outputs, host, len(embedded))
