"""`torch_neuron` of the stand-in (Inf1): the documented functions of release 1.13.1. For tests only."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from neuron_standin import LABEL
from neuron_standin.compiler import NEURON_CC, parse
from neuron_standin.tracing import (
    checked_examples,
    divided_program,
    finished,
    round_weights,
    run_compiler,
    traced_program,
)

__version__ = "1.13.1.2.11.13.0+standin"
STANDIN = LABEL
COMPILER = "1.24.0.0"


def trace(
    model: Any,
    example_inputs: Any,
    *,
    compiler_args: list[str] | None = None,
    compiler_timeout: float | None = None,
    compiler_workdir: str | None = None,  # noqa: ARG001 # the documented signature
    subgraph_builder_function: Callable[..., bool] | None = None,  # noqa: ARG001
    minimum_segment_size: int = 2,  # noqa: ARG001
    single_fusion_ratio_threshold: float = 0.6,  # noqa: ARG001
    fallback: bool = True,
    dynamic_batch_size: bool = False,  # noqa: ARG001
    optimizations: list[Any] | None = None,  # noqa: ARG001
    separate_weights: bool = False,
    **of_jit_trace: Any,  # noqa: ARG001
) -> Any:
    """Compile for fixed shapes -> ScriptModule. Needs no device.

    With `fallback`, a failed compilation is only a warning, and the result is the model on the CPU.
    """
    arguments = list(compiler_args or [])
    tensors = checked_examples(model, example_inputs)
    whole, outputs = traced_program(model, tensors)
    status, messages = run_compiler("neuron-cc", whole, arguments, compiler_timeout)
    if status:
        if not fallback:
            raise RuntimeError(f"neuron-cc failed with {status}\n{messages}")
        warnings.warn(
            f"torch.neuron.trace failed on _NeuronGraph$1; falling back to native python function call\n{messages}",
            UserWarning,
            stacklevel=2,
        )
        return torch.jit.trace(model, tensors, check_trace=False)
    flags = parse(arguments, NEURON_CC).values
    cast = flags.get("--fast-math", "all")
    divided = divided_program(model, tensors)
    if cast != "none":
        round_weights(divided.program, all_tensors=cast == "all")
    return finished(
        divided.program, tensors, outputs, generation="inf1", target="inf1", compiler=COMPILER, flags=arguments,
        cores=int(flags.get("--neuroncore-pipeline-cores", 1)), weights_apart=separate_weights, host=divided.host,
        embedded=divided.embedded, weights=divided.weights,
    )  # fmt: skip


# As the real package does: `torch.neuron.trace`.
torch.neuron = sys.modules[__name__]
