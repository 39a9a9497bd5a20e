"""What becomes of the three products of an attention before the native engine runs them."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np

from penstock_runtime.engines.native.graph_file import GraphStep
from penstock_runtime.rows import Float

Tensors = MutableMapping[str, Any]


def spread_bias(steps: list[GraphStep], tensors: Tensors, buffers: Sequence[int], bias: Float, name: str) -> None:
    """Give each of several products, the last that write to `buffers`, its part of a bias [all their outputs] that is
    called `name`."""
    begin = 0
    for index, buffer in enumerate(buffers):
        at = next(i for i in reversed(range(len(steps))) if steps[i].target == buffer)
        step, end = steps[at], begin + steps[at].outputs
        total = f"{step.tensors['bias']} + {name}/{index}"
        tensors[total] = tensors[step.tensors["bias"]] + bias[begin:end]
        steps[at] = step.model_copy(update={"tensors": {**step.tensors, "bias": total}})
        begin = end


def side_by_side(steps: Sequence[GraphStep], tensors: Tensors) -> GraphStep | None:
    """8-bit products of one source as one whose results stand side by side, its tensors added; its target is that of
    the first. None for steps that are no such products, or do more than multiply."""
    alike = {(step.operator, step.source, step.inputs, step.tensors.get("factors")) for step in steps}
    if len(alike) > 1 or any(
        (step.operator, step.activation, step.residual) != ("linear8", "none", -1) for step in steps
    ):
        return None
    names = dict(steps[0].tensors)
    for part in ("weights", "scales", "bias"):
        parts = [step.tensors[part] for step in steps]
        names[part] = f"{parts[0]}/together"
        tensors[names[part]] = np.concatenate([tensors[name] for name in parts], axis=-1)
    return steps[0].model_copy(update={"outputs": sum(step.outputs for step in steps), "tensors": names})
