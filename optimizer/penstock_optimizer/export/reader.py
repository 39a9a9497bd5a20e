"""A model's configuration and weights, by the names that transformers gives them; and what an export makes of them.

`ModelFolder.tensors` has checked the headers. Here the bytes are read, memory-mapped and without torch: a float32
tensor is not copied before it is written, and float16 and bfloat16 (which numpy does not know) are widened exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.errors import CorruptModel, UnsupportedModel
from penstock.manifest import GraphIO
from penstock.tasks import HEAD_OF_TASK, Head
from penstock_optimizer.export.transformer import BY_NAME, THROUGH_TORCH, Activation, Dense, Norm
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.safetensors import TensorInfo, read_float32
from penstock_runtime.rows import Float
from penstock_runtime.tasks.embeddings.space import tensors_digest


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


_RENEWED = {"gamma": "weight", "beta": "bias"}
"""Names of normalisation weights in the first BERT checkpoints; transformers renames them while it loads."""


class Weights(Mapping[str, TensorInfo]):
    """All tensors of a model, by name with old suffixes renewed; `take` reads the arrays.

    Two calls of `take` for one tensor give the same array object, so that shared weights stay shared.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self.folder = folder
        self._stored_names = {_renewed(name): name for name in folder.tensors}
        self._taken: dict[str, Float] = {}

    def __getitem__(self, name: str) -> TensorInfo:
        return self.folder.tensors[self._stored_names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored_names)

    def __len__(self) -> int:
        return len(self._stored_names)

    @property
    def parameters(self) -> int:
        """How many numbers were taken so far, each shared tensor once."""
        return sum(array.size for array in self._taken.values())

    @property
    def taken(self) -> Mapping[str, Float]:
        """The tensors that were taken so far, by name."""
        return self._taken

    def take(self, name: str, shape: Sequence[int]) -> Float:
        """The tensor as float32; CorruptModel when it is missing or has another shape, with its name and file."""
        info = self.get(name)
        if info is None:
            files = ", ".join(file.name for file in self.folder.safetensors)
            raise CorruptModel(
                f"{self.folder.path} has no tensor {name!r} (looked in {files})",
                remedy="Fetch the model again; if it stays so, config.json and the weights are not of one model",
            )
        if info.shape != tuple(shape):
            raise CorruptModel(
                f"{info.file}: tensor {self._stored_names[name]!r} has shape {list(info.shape)}, "
                f"but config.json asks for {list(shape)}",
                remedy="Take config.json and the weights from the same revision of the model",
            )
        if name not in self._taken:
            self._taken[name] = read_float32(self.folder.path, info, self._stored_names[name])
        return self._taken[name]


def _renewed(name: str) -> str:
    stem, dot, last = name.rpartition(".")
    return stem + dot + _RENEWED.get(last, last)


@dataclass(frozen=True)
class Tensors:
    """The tensors below one prefix of names."""

    weights: Weights
    prefix: str

    def table(self, name: str, rows: int, width: int) -> Float:
        """A matrix [rows, width]."""
        return self.weights.take(f"{self.prefix}{name}.weight", (rows, width))

    def dense(self, name: str, width_in: int, width_out: int, *, bias: bool = True) -> Dense:
        """A linear layer."""
        weight = self.table(name, width_out, width_in)
        return Dense(weight, self.vector((f"{name}.bias",), width_out) if bias else None)

    def norm(self, name: str, width: int, epsilon: float, *, bias: bool = True) -> Norm:
        """A normalisation; without a bias it adds zeros, since the operator wants one."""
        added = self.vector((f"{name}.bias",), width) if bias else np.zeros(width, np.float32)
        return Norm(self.vector((f"{name}.weight",), width), added, epsilon)

    def vector(self, names: tuple[str, ...], length: int) -> Float:
        """A vector, under the first of these names that the weights have."""
        present = [name for name in names if f"{self.prefix}{name}" in self.weights]
        return self.weights.take(f"{self.prefix}{(present or names)[0]}", (length,))


class NotBuildable(Exception):
    """The builder does not know this model: the message has the reason. The export through torch may still work."""


class Reader:
    """Reads one model; every error names the file and the field or tensor."""

    def __init__(self, folder: ModelFolder, base: str, anchor: str) -> None:
        """`base` is transformers' `base_model_prefix`, such as `bert`; `anchor` a tensor that every model has.

        Names of the encoder's tensors start with `bert.` in a model with a head, with nothing in one without,
        and with something else again where the whole was saved as a part of another.
        """
        self.folder = folder
        self.config = folder.config
        self.weights = Weights(folder)
        prefixes = sorted(name.removesuffix(anchor) for name in self.weights if f".{name}".endswith(f".{anchor}"))
        known = [prefix for prefix in (f"{base}.", "") if prefix in prefixes]
        if not known and len(prefixes) > 1:
            raise NotBuildable(f"its weights hold several encoders ({', '.join(prefixes)})")
        prefix = (known or prefixes or [""])[0]
        self.body = Tensors(self.weights, prefix)
        """The encoder's."""
        self.top = Tensors(self.weights, prefix.removesuffix(f"{base}.") if prefix.endswith(f"{base}.") else "")
        """The head's."""

    @property
    def weights_digest(self) -> str:
        """Digest of the tensors that were taken so far, by their names without the prefix of the encoder."""
        prefix = self.body.prefix
        return tensors_digest({name.removeprefix(prefix): array for name, array in self.weights.taken.items()})

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: float = math.inf) -> int:
        """A whole number of config.json. `most`: of one that decides how much is computed before the weights show that
        it is wrong."""
        value = self.config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            limit = "" if most == math.inf else f" to {most}"
            raise self.invalid(key, value, f"a whole number from {least}{limit}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number of config.json."""
        value = self.config.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.invalid(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """A truth value of config.json."""
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise self.invalid(key, value, "true or false")
        return value

    def activation(self, key: str, default: str) -> Activation:
        """An activation of config.json; NotBuildable for those that only the general way has."""
        value = self.config.get(key, default)
        if not isinstance(value, str):
            raise self.invalid(key, value, "the name of an activation")
        return self.activation_named(key, value)

    def activation_named(self, key: str, value: str) -> Activation:
        """An activation by its name, which `key` of config.json has; NotBuildable as `activation`."""
        if value in BY_NAME:
            return BY_NAME[value]
        # A graph of the model's own may hold what transformers has no name for.
        if value in THROUGH_TORCH or self.folder.onnx is not None:
            raise NotBuildable(f"its {key} is {value}")
        raise self.invalid(key, value, "the name of an activation that transformers has")

    def heads(self, key: str, default: int, width_key: str, width: int) -> int:
        """The number of attention heads, which share the width evenly."""
        heads = self.integer(key, default)
        if width % heads and self.folder.onnx is not None:
            raise NotBuildable(f"its {heads} attention heads do not divide its width of {width}")
        if width % heads:
            raise self.invalid(key, heads, f"a number that divides the {width_key} of {width}")
        return heads

    def invalid(self, key: str, value: Any, wanted: str) -> CorruptModel:
        """The error for a field of config.json that has to be `wanted`."""
        return CorruptModel(
            f"{self.folder.path / 'config.json'}: {key} is {value!r}",
            remedy=f"Make it {wanted}, as it was in the model's own config.json",
        )
