"""Shared by all exports: the result, the check of a head, and a session that runs a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.errors import UnsupportedModel
from penstock.manifest import GraphIO
from penstock.tasks import HEAD_OF_TASK, Head
from penstock_runtime.models.folder import ModelFolder


@dataclass(frozen=True)
class Exported:
    """The fp32 graph on disk."""

    path: Path
    """`model.onnx`; large weights are next to it in `model.onnx.data`."""
    io: GraphIO
    fused_nodes: dict[str, int]
    """How many nodes the graph has of each operator that does in one what several do: `Attention`,
    `MultiHeadAttention`, `Gelu`, `LayerNormalization`, ... No attention in the fused flavour is a finding."""
    how: Literal["builder", "own-onnx", "torch"]
    """Built from the weights, the model's own file, or exported by torch."""
    parameters: int
    """Numbers in the weights that the graph uses, each shared one once."""
    weights: str
    """Digest of these weights, see `VectorSpace.weights`."""
    notes: tuple[str, ...] = ()
    """Choices that the model leaves open, as sentences for the user."""


CLASS_ENDINGS: Mapping[Head, tuple[str, ...]] = {
    Head.SEQUENCE: ("ForSequenceClassification",),
    Head.TOKEN: ("ForTokenClassification",),
    Head.SPAN: ("ForQuestionAnswering",),
    Head.MASKED_LM: ("ForMaskedLM", "ForPreTraining", "WithLMHead"),
    Head.SPARSE: ("ForMaskedLM", "ForPreTraining", "WithLMHead"),
}
"""How transformers' classes with a head are called; `architectures` of config.json names one of them."""


def check_head(folder: ModelFolder, head: Head) -> None:
    """UnsupportedModel when the class is known to have another head, or none. Every model is an encoder.

    transformers would load such a model all the same, with a head of random numbers.
    """
    name = folder.architecture
    if head is Head.ENCODER or name.endswith(CLASS_ENDINGS[head]):
        return
    others = [other for other, endings in CLASS_ENDINGS.items() if name.endswith(endings)]
    if others or name.endswith("Model"):
        raise no_head(folder, head, others[0] if others else Head.ENCODER)


def no_head(folder: ModelFolder, head: Head, own: Head | None = None) -> UnsupportedModel:
    """The error for a missing head, with the tasks that the model fits."""
    tasks = ", ".join(task.value for task, needed in HEAD_OF_TASK.items() if needed is own)
    fits = f"; this one fits {tasks}" if tasks else ""
    return UnsupportedModel(
        f"{folder.path} is a {folder.architecture or 'model'} without a {head.value} head",
        remedy=f"Use a model that was trained with one{fits}",
    )


ERRORS_ONLY = 3


def open_session(path: Path, threads: int = 1) -> Any:
    """An ONNX Runtime session, quiet but for errors; raises whatever the library does when the graph does not load."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
