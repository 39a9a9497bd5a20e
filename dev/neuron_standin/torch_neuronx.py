"""`torch_neuronx` of the stand-in (Inf2): the documented functions of release 2.9. For tests only."""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from neuron_standin import LABEL
from neuron_standin.compiler import NEURONX_CC, parse
from neuron_standin.device import PLACEMENT, runtime
from neuron_standin.machine import read_machine
from neuron_standin.tracing import checked_examples, finished, round_weights, run_compiler, traced_program

__version__ = "2.9.0.2.15.32035+standin"
STANDIN = LABEL
COMPILER = "2.26.6360.0"
_PLATFORM = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")
"""Read at import, as in life."""
_NO_TARGET = (
    "If you want to compile on CPU, please supply compiler argument target, with one of options trn1, inf2, trn1n, or "
    'trn2. Ex: "--target trn1"'
)
_UNKNOWN_CORES = "Neuron runtime cannot be initialized; cannot determine the number of available NeuronCores"


def trace(
    func: Any,
    example_inputs: Any,
    *_: Any,
    input_output_aliases: dict[Any, int] = {},  # noqa: B006, ARG001 # the documented signature
    compiler_workdir: str | None = None,  # noqa: ARG001
    compiler_args: str | list[str] | None = None,
    partitioner_config: Any = None,  # noqa: ARG001
    inline_weights_to_neff: bool = True,
    cpu_backend: bool = False,
    **unknown: Any,
) -> Any:
    """Compile for fixed shapes -> ScriptModule. RuntimeError as documented."""
    if len(_) + 2 > 5:
        raise RuntimeError(f"trace takes at most 5 positional arguments, got {len(_) + 2}")
    if _:
        warnings.warn("positional arguments of trace are deprecated: use keywords", DeprecationWarning, stacklevel=2)
    for name in unknown:
        warnings.warn(f"trace: unknown keyword {name!r} is ignored", UserWarning, stacklevel=2)
    arguments = compiler_args.split() if isinstance(compiler_args, str) else list(compiler_args or [])
    target = parse(arguments, NEURONX_CC).values.get("--target")
    if cpu_backend:
        if "--target" not in " ".join(arguments):
            raise RuntimeError(_NO_TARGET)
        if read_machine() is None and target and target != _PLATFORM:
            raise RuntimeError(f"NEURON_PLATFORM_TARGET_OVERRIDE was {_PLATFORM!r} at import, the target is {target!r}")
    else:
        runtime()
    tensors = checked_examples(func, example_inputs)
    program, outputs = traced_program(func, tensors)
    status, messages = run_compiler("neuronx-cc", program, arguments)
    if status == -9:
        warnings.warn("neuronx-cc was killed: the host's memory may be exhausted", UserWarning, stacklevel=2)
    if status:
        raise RuntimeError(f"neuronx-cc failed with {status}" + (f"\n{messages}" if messages else ""))
    flags = parse(arguments, NEURONX_CC).values
    cast = flags.get("--auto-cast", "none")
    if cast != "none":
        round_weights(program, all_tensors=cast == "all")
    return finished(
        program, tensors, outputs, generation="inf2", target=target or "trn1", compiler=COMPILER, flags=arguments,
        weights_apart=not inline_weights_to_neff,
    )  # fmt: skip


def lazy_load(trace: Any, enable_lazy_load: bool = True) -> None:
    """Load at the first call, rather than in `torch.jit.load`."""
    trace.device.lazy = enable_lazy_load


def async_load(trace: Any, enable_async_load: bool = True) -> None:
    """Accepted: loads are always complete before the first run here."""


def _checked_cores(start_nc: int, nc_count: int) -> tuple[int, int]:
    try:
        available = len(runtime().cores)
    except RuntimeError as error:
        raise RuntimeError(_UNKNOWN_CORES) from error
    if nc_count == 0:
        raise ValueError("Invalid NeuronCore count nc_count=0. Cannot be set to 0")
    if nc_count < -1 or start_nc < -1:
        raise ValueError(f"Invalid NeuronCores: {start_nc=} {nc_count=}. Values less than -1 are invalid")
    start = max(start_nc, 0)
    count = available - start if nc_count == -1 else nc_count
    if start + count > available or start >= available:
        raise ValueError(f"Invalid NeuronCores: {start_nc=} {nc_count=}. NeuronCores available: {available}")
    return start, count


def neuron_cores_context(start_nc: int = -1, nc_count: int = -1) -> AbstractContextManager[None]:
    """Loads within it go to `nc_count` cores from `start_nc`. Not thread-safe."""
    return PLACEMENT.context(*_checked_cores(start_nc, nc_count))


def multicore_context() -> AbstractContextManager[None]:
    """Loads within it go to all cores."""
    return neuron_cores_context(0, -1)


def set_neuron_cores(trace: Any, start_nc: int = -1, nc_count: int = -1) -> None:
    """Load a model onto `nc_count` cores from `start_nc`."""
    start, count = _checked_cores(start_nc, nc_count)
    if trace.device.handle < 0:
        import torch

        with PLACEMENT.context(start, count):
            trace.device.handle = int(torch.ops.neuron.forward_v2_1([trace.device.neff], trace.device.metadata, -1)[0])
    else:
        runtime().move(trace.device.handle, start, count)


def set_multicore(trace: Any) -> None:
    """Load a model onto all cores."""
    set_neuron_cores(trace, 0, -1)


experimental = SimpleNamespace(
    neuron_cores_context=neuron_cores_context,
    multicore_context=multicore_context,
    set_neuron_cores=set_neuron_cores,
    set_multicore=set_multicore,
)
