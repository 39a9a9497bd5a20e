"""GLiNER: reads the settings and the head of a model that finds entities of labels that come with the request.

The encoder reads the labels and the text in one row. The head, which is small next to it, is computed here in numpy: a
bidirectional LSTM over the words, vectors of their spans, and the products of these with the vectors of the labels.
Zaratiana et al., "GLiNER", arXiv 2311.08526; span modes `markerV0` and `marker` of the package `gliner`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import CorruptModel, UnsupportedModel
from penstock_runtime.models.files import positive_number, read_object
from penstock_runtime.models.safetensors import TensorInfo, read_float32, read_header
from penstock_runtime.models.vector_modules import DenseModule
from penstock_runtime.rows import Float

SETTINGS_FILE = "gliner_config.json"
HEAD_FILE = "gliner_head.safetensors"
"""In artefacts: the weights that are not the encoder's."""
ARCHITECTURE = "GLiNER"
SETTINGS_KEY = "gliner"
"""Where the folder's configuration, which is the encoder's, has the settings."""
_SPANS = "span_rep_layer.span_rep_layer"
_ANCHOR = f"{_SPANS}.project_start.0.weight"
_ENCODER = "token_rep_layer.bert_layer."
SERVED: Mapping[str, tuple[Any, ...]] = {
    "span_mode": ("markerV0", "marker"),
    "subtoken_pooling": ("first", "last", None),
    "words_splitter_type": ("whitespace", None),
    "post_fusion_schema": ("", None),
    "fuse_layers": (False, None),
    "span_encoder_config": (None,),
    "labels_encoder": (None,),
    "labels_decoder": (None,),
    "relations_layer": (None,),
    "precomputed_prompts_mode": (False, None),
}
"""Settings that change the architecture, with the values that are served."""


def configuration(path: Path) -> dict[str, Any]:
    """The configuration of the encoder, with the settings of GLiNER as `SETTINGS_KEY`.

    UnsupportedModel for another architecture of GLiNER, or for settings without the encoder's configuration.
    """
    settings = read_object(path, SETTINGS_FILE)
    origin = path / SETTINGS_FILE
    for key, served in SERVED.items():
        if settings.get(key) not in served and not (key == "span_mode" and key not in settings):
            raise UnsupportedModel(
                f"{origin}: {key} is {settings[key]!r}",
                remedy=f"Use a GLiNER model with {key}: {' or '.join(map(str, served))}",
            )
    encoder = settings.get("encoder_config")
    if not isinstance(encoder, dict):
        raise UnsupportedModel(
            f"{origin} has no encoder_config, the configuration of its encoder ({settings.get('model_name')})",
            remedy="Load and save the model once with a current gliner, which writes it "
            "(docs/how-to/convert-a-model.md#gliner)",
        )
    vocabulary = settings.get("vocab_size")
    sized = {"vocab_size": vocabulary} if isinstance(vocabulary, int) and vocabulary > 0 else {}
    kept = {key: value for key, value in settings.items() if key != "encoder_config"}
    known = {key: value for key, value in encoder.items() if key not in {"auto_map", "id2label", "label2id"}}
    return {**known, **sized, "architectures": [ARCHITECTURE], SETTINGS_KEY: kept}


@dataclass(frozen=True, eq=False)
class _Lstm:
    """A layer of a bidirectional LSTM, the forward direction first; gates in torch's order i, f, g, o."""

    inner: Float
    """[2, 4 width, in]"""
    recurrent: Float
    """[2, width, 4 width]: transposed."""
    bias: Float
    """[2, 4 width]"""

    def __call__(self, words: Float) -> Float:
        """[words, in] to [words, 2 width]."""
        count, width = len(words), self.recurrent.shape[1]
        both = np.stack([words, words[::-1]])
        steps = np.matmul(both, self.inner.transpose(0, 2, 1)) + self.bias[:, None]
        hidden, cell = np.zeros((2, 1, width), np.float32), np.zeros((2, 1, width), np.float32)
        states = np.empty((2, count, width), np.float32)
        for index in range(count):
            gates = steps[:, index : index + 1] + np.matmul(hidden, self.recurrent)
            i, f, g, o = np.split(gates, 4, axis=2)
            cell = _sigmoid(f) * cell + _sigmoid(i) * np.tanh(g)
            hidden = _sigmoid(o) * np.tanh(cell)
            states[:, index] = hidden[:, 0]
        return np.concatenate([states[0], states[1, ::-1]], axis=1)


def _sigmoid(x: Float) -> Float:
    # This form cannot overflow.
    result: Float = np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * x))
    return result


@dataclass(frozen=True, eq=False)
class GlinerHead:
    """Settings and weights."""

    widest: int
    """Words of the longest span."""
    longest: int
    """Words of a text that are read."""
    class_token: int
    """The token before each label; its vector represents the label."""
    separator: str
    """The token between labels and text."""
    last: bool
    """A word has the vector of its last token, not of its first."""
    label_follows: bool
    """A label has the vector of the token after `class_token`."""
    projection: DenseModule | None
    layers: tuple[_Lstm, ...]
    start: tuple[DenseModule, DenseModule]
    end: tuple[DenseModule, DenseModule]
    out: tuple[DenseModule, ...]
    """One layer (`marker`), or two with a ReLU between them."""
    prompt: tuple[DenseModule, DenseModule]

    def projected(self, states: Float) -> Float:
        """[n, width] of the encoder's [n, its width]."""
        return states if self.projection is None else self.projection.of_tokens(states)

    def logits(self, words: Float, labels: Float) -> Float:
        """[words, widest (at most words), labels] for the spans that begin at each word, by their words less one.

        `words` [words, width] and `labels` [labels, width] are projected. Spans over the end have -inf.
        """
        for layer in self.layers:
            words = layer(words)
        width = self.prompt[1].width
        first = self.out[0]
        # The first layer of a span is a sum over its two ends: it is computed for each word, not for each span.
        begins = _relu(_network(self.start, words)) @ first.weight[:, :width].T
        ends = _relu(_network(self.end, words)) @ first.weight[:, width:].T
        if first.bias is not None:
            ends = ends + first.bias
        # The last layer and the product with the labels are one.
        prompts = _network(self.prompt, labels)
        weights, shift = prompts, np.zeros(len(labels), np.float32)
        if len(self.out) == 2:
            weights = prompts @ self.out[1].weight
            shift = shift if self.out[1].bias is None else prompts @ self.out[1].bias
        widest = min(self.widest, len(words))
        result = np.full((len(words), widest, len(labels)), -np.inf, np.float32)
        for more in range(widest):
            spans = begins[: len(words) - more] + ends[more:]
            if len(self.out) == 2:
                spans = _relu(spans)
            result[: len(words) - more, more] = spans @ weights.T + shift
        return result


def _relu(x: Float) -> Float:
    result: Float = np.maximum(x, 0)
    return result


def _network(layers: tuple[DenseModule, DenseModule], x: Float) -> Float:
    return layers[1].of_tokens(_relu(layers[0].of_tokens(x)))


@dataclass(frozen=True)
class _Weights:
    path: Path
    tensors: Mapping[str, TensorInfo]

    @cached_property
    def prefix(self) -> str:
        """Before the names of all tensors; mostly empty."""
        found = next((name for name in self.tensors if name.endswith(_ANCHOR)), None)
        if found is None:
            raise CorruptModel(f"{self.path} has no tensor {_ANCHOR!r}", remedy="Fetch the model again")
        return found.removesuffix(_ANCHOR)

    def take(self, name: str, *shape: int) -> Float:
        whole = self.prefix + name
        info = self.tensors.get(whole)
        if info is None or (shape and info.shape != shape):
            found = "is missing" if info is None else f"has shape {list(info.shape)}, not {list(shape)}"
            raise CorruptModel(
                f"{self.path}: tensor {whole!r} {found}", remedy="Take all files from the same revision of the model"
            )
        # A copy: arrays in a file are not aligned, and would be copied for each product.
        return read_float32(self.path, info, whole).copy()

    def dense(self, name: str, width_in: int, width_out: int) -> DenseModule:
        return DenseModule(self.take(f"{name}.weight", width_out, width_in), self.take(f"{name}.bias", width_out))

    def network(self, name: str, width: int, inner: int) -> tuple[DenseModule, DenseModule]:
        return self.dense(f"{name}.0", width, inner), self.dense(f"{name}.3", inner, width)


def read_gliner(path: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> GlinerHead | None:
    """The head of a GLiNER model; None for other models. `tensors`: of the weights, empty in an artefact.

    CorruptModel names the tensor that is missing or does not fit.
    """
    settings = config.get(SETTINGS_KEY)
    if not isinstance(settings, Mapping):
        return None
    origin, values = path / SETTINGS_FILE, dict(settings)
    weights = _Weights(path, tensors or read_header(path, path / HEAD_FILE))
    width = positive_number(origin, values, "hidden_size") or 512
    own = positive_number(path / SETTINGS_FILE, dict(config), "hidden_size") or width
    class_token = values.get("class_token_index")
    if not isinstance(class_token, int) or class_token < 0:
        raise CorruptModel(f"{origin}: class_token_index is {class_token!r}", remedy="Fetch the model again")
    first = values.get("span_mode", "markerV0") == "marker"
    inner = width * (2 if first else 4)
    out = f"{_SPANS}.out_project"
    return GlinerHead(
        widest=positive_number(origin, values, "max_width") or 12,
        longest=positive_number(origin, values, "max_len") or 384,
        class_token=class_token,
        separator=str(values.get("sep_token", "<<SEP>>")),
        last=values.get("subtoken_pooling") == "last",
        label_follows=values.get("embed_ent_token") is False,
        projection=None if own == width else weights.dense("token_rep_layer.projection", own, width),
        layers=tuple(_lstm(weights, index, width) for index in range(_count(values, "num_rnn_layers", 1))),
        start=weights.network(f"{_SPANS}.project_start", width, inner),
        end=weights.network(f"{_SPANS}.project_end", width, inner),
        out=(weights.dense(out, 2 * width, width),)
        if first
        else (weights.dense(f"{out}.0", 2 * width, 4 * width), weights.dense(f"{out}.3", 4 * width, width)),
        prompt=weights.network("prompt_rep_layer", width, 4 * width),
    )


def _count(values: Mapping[str, Any], key: str, default: int) -> int:
    count = values.get(key, default)
    return count if isinstance(count, int) and count > 0 else 0


def _lstm(weights: _Weights, index: int, width: int) -> _Lstm:
    half = width // 2

    def both(name: str, *shape: int) -> Float:
        names = (f"rnn.lstm.{name}_l{index}", f"rnn.lstm.{name}_l{index}_reverse")
        return np.stack([weights.take(one, *shape) for one in names])

    bias = both("bias_ih", 4 * half) + both("bias_hh", 4 * half)
    recurrent = np.ascontiguousarray(both("weight_hh", 4 * half, half).transpose(0, 2, 1))
    return _Lstm(both("weight_ih", 4 * half, width), recurrent, bias)


def head_tensors(path: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, Float]:
    """The tensors that are not the encoder's, for `HEAD_FILE`."""
    own = {name: info for name, info in tensors.items() if _ENCODER not in name}
    return {name: read_float32(path, info, name) for name, info in own.items()}
