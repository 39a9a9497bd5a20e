"""A model's own ONNX file: taken as it is, once it is seen to run and to answer in a known form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from penstock.errors import CorruptModel, UnsupportedModel
from penstock.manifest import GRAPH_OUTPUTS, Axes, GraphIO
from penstock.tasks import Head
from penstock_optimizer.export.build.graph import fused_nodes
from penstock_optimizer.export.own_outputs import Source, are_probabilities, set_outputs, source_of
from penstock_optimizer.export.reader import Exported, open_session
from penstock_runtime.engines.grid import feed
from penstock_runtime.models.files import copy_within
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.graph import check_data, graph_data
from penstock_runtime.models.vector_modules import NormalizeModule
from penstock_runtime.rows import POOLED, Row, collate
from penstock_runtime.tasks.classification.text_classification import Function
from penstock_runtime.tasks.embeddings.embedding import width
from penstock_runtime.tasks.embeddings.space import files_digest
from penstock_runtime.tokens.tokenizer import Tokenizer

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OUTPUTS: dict[Head, dict[str, Axes]] = {**GRAPH_OUTPUTS, Head.MASKED_LM: {"logits": Axes.TOKENS}}
"""The outputs of such graphs: as ours, but with every token of a masked language model."""
RANKS = {Head.ENCODER: 3, Head.SEQUENCE: 2, Head.TOKEN: 3, Head.SPAN: 2, Head.MASKED_LM: 3}
POOLED_NAMES = ("sentence_embedding", "text_embeds", "pooler_output")
"""Names of pooled outputs in sentence-transformers, CLIP and transformers: the first of several is taken."""
PROBE = (2, 7)
"""Rows and tokens of the run that shows the outputs' real shapes."""
CLOSE = 0.02
"""Largest difference between a row's answer in a batch and alone, as a share of its largest value: over the rounding
of half precision."""
CLOSE_QUANTISED = 0.3
"""The same where activations are quantised in ranges that all rows of a batch share."""


def take_own_graph(folder: ModelFolder, head: Head, path: Path) -> Exported:
    """Copy the graph to `path`; its external weights, under any names, to `<path>.data`.

    Outputs under other names than ours are renamed, by rank and order; other float types become float32;
    a function from logits to scores at the end is left out (`own_outputs`). A graph without vectors of tokens may have
    pooled ones: its output is then `POOLED`.
    CorruptModel when it does not load, or lacks a file with weights; UnsupportedModel when it wants inputs or gives
    outputs that no task here knows, naming them, or gives other answers in a batch than alone.
    """
    source = folder.onnx
    if source is None:
        raise CorruptModel(f"{folder.path} has no ONNX file", remedy="Fetch the model again")
    check_data(folder.path, source)
    data = graph_data(folder.path, source)
    with TemporaryDirectory(prefix="own-", dir=path.parent) as place:
        # A copy: the libraries open files by name, and a link of the folder may be replaced after it was checked.
        copy = Path(place, source.name)
        for file in (source, *data):
            copy_within(folder.path, file, Path(place, file.relative_to(source.parent)))
        inner = [file.relative_to(source.parent) for file in data]
        weights = files_digest({"graph": copy, **{str(name): Path(place, name) for name in inner}})
        model = _load(source, copy)
        inputs = _inputs(source, model)
        probe = _Probe(source, copy, inputs, Tokenizer.load(folder))
        named, axes = _outputs(folder, head, probe.answers)
        chosen = {ours: _logits(folder, head, model, probe, theirs) for ours, theirs in named.items()}
        if problem := probe.problem_in_batches(list(named.values()), exact=not _is_quantised(model)):
            raise _rows_depend(folder, problem, pooled=POOLED in named, answers=probe.answers)
        as_ours = all(taken == Source(ours, is_float32=True) for ours, taken in chosen.items())
        if as_ours and not data:
            copy.replace(path)
        else:
            if not as_ours:
                set_outputs(model, chosen)
            _save(model, copy, path, external=bool(data))
    return Exported(
        path=path,
        io=GraphIO(inputs=inputs, outputs=axes),
        fused_nodes=fused_nodes(model.graph.node),
        how="own-onnx",
        parameters=sum(math.prod(tensor.dims) for tensor in model.graph.initializer),
        weights=weights,
        notes=_notes(chosen, named, probe.answers),
    )


def _load(source: Path, copy: Path) -> Any:
    try:
        return onnx.load(str(copy), load_external_data=False)
    except Exception as error:  # protobuf's errors have no common class that is public
        raise CorruptModel(f"{source} is not an ONNX model: {error}", remedy="Fetch the model again") from error


def _inputs(source: Path, model: Any) -> tuple[str, ...]:
    weights = {tensor.name for tensor in model.graph.initializer}
    found = {value.name: value.type.tensor_type for value in model.graph.input if value.name not in weights}
    unknown = sorted(set(found) - set(INPUTS))
    remedy = f"Export it with the inputs {', '.join(INPUTS)} (int64), or put the safetensors weights next to it"
    if unknown or "input_ids" not in found:
        what = f"wants the inputs {', '.join(unknown)}" if unknown else "has no input input_ids"
        raise UnsupportedModel(f"{source} {what}", remedy=remedy)
    for name, kind in found.items():
        dims = kind.shape.dim
        if kind.elem_type != TensorProto.INT64 or len(dims) != 2 or any(dim.HasField("dim_value") for dim in dims):
            raise UnsupportedModel(f"{source}: input {name} is not int64 [batch, tokens] with free axes", remedy=remedy)
    return tuple(name for name in INPUTS if name in found)


Answers = dict[str, NDArray[Any]]
"""The outputs of a run by name."""


def _outputs(folder: ModelFolder, head: Head, answers: Answers) -> tuple[dict[str, str], dict[str, Axes]]:
    """Our names to the graph's, and the axes of our outputs."""
    wanted, labels = OUTPUTS[head], len(folder.labels)
    if head is Head.ENCODER and folder.graph_has_modules:
        return {POOLED: _with_modules(folder, answers)}, {POOLED: Axes.ROW}
    floats = [
        name for name, one in answers.items() if one.ndim == RANKS[head] and np.issubdtype(one.dtype, np.floating)
    ]
    if head is not Head.ENCODER and head is not Head.SPAN:
        floats = [name for name in floats if head is Head.MASKED_LM or answers[name].shape[-1] == labels]
    # Of half precision where there is nothing better.
    fitting = [name for name in floats if answers[name].dtype == np.float32] or floats
    if set(wanted) <= set(fitting):
        return {name: name for name in wanted}, wanted
    # Of logits and their probabilities, the logits.
    logits = [name for name in fitting if not are_probabilities(answers[name])]
    if len(logits) == len(wanted):
        fitting = logits
    if len(fitting) == len(wanted):
        return dict(zip(wanted, fitting, strict=True)), wanted
    pooled = _pooled(folder, answers) if head is Head.ENCODER and not fitting else None
    if pooled is not None:
        return {POOLED: pooled}, {POOLED: Axes.ROW}
    described = ", ".join(f"{name} {one.dtype} {list(one.shape)}" for name, one in answers.items())
    raise UnsupportedModel(
        f"{folder.onnx} answers {PROBE[0]} rows of {PROBE[1]} tokens with {described}, "
        f"of which nothing is {' and '.join(wanted)} of a {head.value} model with {labels} labels",
        remedy="Export it for this task, or put the safetensors weights next to it",
    )


def _pooled(folder: ModelFolder, answers: Answers) -> str | None:
    """The output that is one vector for each text, of a graph without vectors of tokens; None if there is none.

    UnsupportedModel if several may be meant, or the model's files need vectors of tokens.
    """
    hidden, final = width(folder.config), folder.final_width
    values = final or hidden
    fitting = [
        name
        for name, one in answers.items()
        if one.ndim == 2
        and np.issubdtype(one.dtype, np.floating)
        and (one.shape[-1] == values or (values is None and name in POOLED_NAMES))
    ]
    known = [name for name in POOLED_NAMES if name in fitting]
    if not fitting:
        return None
    if not known and len(fitting) > 1:
        raise UnsupportedModel(
            f"{folder.onnx} has no vectors of tokens and several pooled ones: {', '.join(fitting)}",
            remedy=f"Leave one of them in the graph, or call one {POOLED_NAMES[0]}",
        )
    _check_settings(folder)
    # Modules that change the width have left their mark on the vector; those that keep it may be in the graph or not.
    if final in {None, hidden} and not folder.graph_has_modules:
        _check_modules(folder)
    return known[0] if known else fitting[0]


def _with_modules(folder: ModelFolder, answers: Answers) -> str:
    """The output after the modules, which only the graph has the weights of. CorruptModel if there is none."""
    name = _pooled(folder, answers)
    if name is None:
        raise CorruptModel(
            f"{folder.path} has no {folder.missing_module_weights}, the weights of a module, and {folder.onnx} has no "
            f"output with {folder.final_width} values for each text",
            remedy="Put that file there, from the model that the graph was exported of, or export the graph with the "
            "modules (its output is then called sentence_embedding)",
        )
    return name


def _check_settings(folder: ModelFolder) -> None:
    """UnsupportedModel if the folder's files describe more than a vector that the graph has pooled."""
    needs = {
        "modules.json has modules for a vector for each token": folder.multi_vector is not None,
        "the folder has the further heads of BGE-M3": bool(folder.heads),
        "gliner_config.json asks for vectors of words": folder.gliner is not None,
        "the settings of the pooling have include_prompt: false": not folder.include_prompt,
    }
    reason = next((words for words, holds in needs.items() if holds), None)
    if reason is not None:
        raise UnsupportedModel(
            f"{folder.onnx} gives one vector for each text, and {reason}",
            remedy="Export it with the vectors of tokens (last_hidden_state) as an output, or put the safetensors "
            "weights next to it",
        )


def _check_modules(folder: ModelFolder) -> None:
    """UnsupportedModel if modules after the pooling may be in the graph or not."""
    modules = [module.kind for module in folder.vector_modules if module.kind != NormalizeModule.kind]
    if modules:
        raise UnsupportedModel(
            f"{folder.onnx} gives one vector for each text, and modules.json has {' and '.join(modules)} after the "
            "pooling: whether the graph includes that cannot be seen",
            remedy="Remove it from modules.json if the graph includes it; otherwise export the graph with the vectors "
            "of tokens (last_hidden_state) as an output, or put the safetensors weights next to it",
        )


def _notes(chosen: dict[str, Source], named: dict[str, str], answers: Answers) -> tuple[str, ...]:
    """Choices that were made, as sentences for the user."""
    found = []
    (first, *_), others = named.values(), [name for name in answers if name not in named.values()]
    if POOLED in named:
        found.append(f"The vector of a text is the output {first} of the ONNX file; vectors of tokens are not served")
    if others:
        found.append(f"Of the outputs of the ONNX file {' and '.join(named.values())} is used, not {', '.join(others)}")
    functions = {str(source.function) for source in chosen.values() if source.function is not None}
    found += [f"The {function} at the end of the ONNX file is left out: the task applies it" for function in functions]
    return tuple(found)


def _logits(folder: ModelFolder, head: Head, model: Any, probe: _Probe, name: str) -> Source:
    """The source of an output. UnsupportedModel if its scores are of another function than the task's."""
    source, answer = probe.source, probe.answers[name]
    if head is Head.ENCODER:
        return Source(name, is_float32=answer.dtype == np.float32)
    found = source_of(model, name, answer.ndim, is_float32=answer.dtype == np.float32)
    if found.function is None and are_probabilities(answer):
        raise UnsupportedModel(
            f"{source}: {name} are probabilities, and it does not end in the operator Softmax",
            remedy="Export it with logits as its output, or put the safetensors weights next to it",
        )
    wanted = Function.of(folder) if head is Head.SEQUENCE else Function.SOFTMAX
    if found.function not in {None, wanted}:
        if head is not Head.SEQUENCE or folder.num_labels == 1:
            remedy = "Export it with logits as its output, or put the safetensors weights next to it"
        else:
            kind = "multi" if found.function is Function.SIGMOID else "single"
            remedy = f"Write problem_type: {kind}_label_classification into config.json if the scores are meant so"
        raise UnsupportedModel(
            f"{source} ends in a {found.function}, and by config.json its scores are a {wanted} of logits"
            if wanted is not Function.NONE
            else f"{source} ends in a {found.function}, and by config.json its output is a regression's",
            remedy=remedy,
        )
    return found


MOST_SPECIALS = 16
"""Special tokens that are tried where a graph does not run without one."""


class _Probe:
    """Runs of the graph with the special tokens of the model, which some heads look for."""

    def __init__(self, source: Path, copy: Path, inputs: tuple[str, ...], tokenizer: Tokenizer) -> None:
        """CorruptModel if the graph does not run; UnsupportedModel if it lacks a special token for it."""
        self.source, self._inputs = source, inputs
        self._single, self._pair = tokenizer.single, tokenizer.pair
        self._size = tokenizer.embedded_size
        try:
            self._session = open_session(copy)
        except Exception as error:  # its errors derive from Exception only
            raise _does_not_run(source, error) from error
        self._names = [node.name for node in self._session.get_outputs()]
        try:
            self.answers = self._run([self._row(shift) for shift in range(PROBE[0])])
        except Exception as error:  # as above
            missing = self._missing_special(tokenizer)
            if not missing:
                raise _does_not_run(source, error) from error
            raise UnsupportedModel(
                f"{source} runs only on texts with the special token {missing}, which tokenizer.json does not add",
                remedy="Let tokenizer.json add it (docs/how-to/convert-a-model.md#special-tokens), or put the "
                "safetensors weights next to the graph",
            ) from error

    def _missing_special(self, tokenizer: Tokenizer) -> str:
        """The special token at the end or at the beginning of each row without which the graph does not run; else an
        empty text."""
        added = tokenizer.backend.get_added_tokens_decoder()
        specials = {number: one.content for number, one in added.items() if one.special and number < self._size}
        rows = [self._row(shift) for shift in range(PROBE[0])]
        for number, token in list(specials.items())[:MOST_SPECIALS]:
            for place in ("end", "beginning"):
                ids = [[*row.ids, number] if place == "end" else [number, *row.ids] for row in rows]
                try:
                    self._run([replace(row, ids=one, type_ids=None) for row, one in zip(rows, ids, strict=True)])
                except Exception:  # noqa: S112 - as for the run without it
                    continue
                return f"{token} at the {place}"
        return ""

    def _ids(self, count: int, shift: int) -> list[int]:
        return [(self._size // 3 + 7 * shift + 3 * place) % self._size for place in range(count)]

    def _row(self, shift: int) -> Row:
        return self._single.row(self._ids(max(PROBE[1] - self._single.specials, 1), shift))

    def _run(self, rows: Sequence[Row]) -> Answers:
        values = self._session.run(self._names, feed(collate(rows), self._inputs))
        return {name: value for name, value in zip(self._names, values, strict=True) if isinstance(value, np.ndarray)}

    def problem_in_batches(self, names: Sequence[str], *, exact: bool) -> str:
        """The problem if a text gets another answer in a batch, with a longer pair of texts, than alone; else an empty
        text."""
        rows = [self._row(1), self._pair.row(self._ids(5, 2), self._ids(4, 3))]
        try:
            alone = [self._run([row]) for row in rows]
            together = self._run(rows)
        except Exception as error:  # as above
            return f"does not run on a text and a pair of texts in one batch: {str(error).splitlines()[0]}"
        off = max(
            _distance(together[name][index : index + 1], one[name], row.length)
            for name in names
            for index, (row, one) in enumerate(zip(rows, alone, strict=True))
        )
        if off <= (CLOSE if exact else CLOSE_QUANTISED):
            return ""
        return "gives a text another answer in a batch with a longer one than alone"


def _rows_depend(folder: ModelFolder, problem: str, *, pooled: bool, answers: Answers) -> UnsupportedModel:
    """The error for a graph with rows that depend on each other. `problem`: the observation."""
    if not pooled:
        return UnsupportedModel(
            f"{folder.onnx} {problem}. Its head may count special tokens over the whole batch (BART), or it may not "
            "use attention_mask",
            remedy="Put the model's safetensors weights next to it (BART is then served from them), use an encoder "
            "model for this task, or export it so that rows do not depend on each other",
        )
    remedy = "export it so that rows do not depend on each other: with a pooling that leaves padding out"
    if folder.graph_has_modules and any(one.ndim == RANKS[Head.ENCODER] for one in answers.values()):
        remedy = (
            f"Put {folder.missing_module_weights} into the folder, from the model that the graph was exported of: the "
            f"graph's vectors of tokens are then pooled here. Or {remedy}"
        )
    else:
        remedy = f"Put the model's safetensors weights next to it, or {remedy}"
    return UnsupportedModel(f"{folder.onnx} {problem}. Its pooling may count padding", remedy=remedy)


def _does_not_run(source: Path, error: Exception) -> CorruptModel:
    return CorruptModel(
        f"{source} does not run: {error}",
        remedy="Export it again for texts of any length and number, or put the safetensors weights next to it",
    )


def _distance(padded: NDArray[Any], alone: NDArray[Any], length: int) -> float:
    """Largest difference of a row's answer in a batch, as a share of its largest value alone."""
    if padded.shape != alone.shape:
        padded = padded[:, :length]
    if padded.shape != alone.shape or not alone.size:
        return math.inf
    scale = max(1e-3, float(np.abs(alone).max()))
    return float(np.abs(padded.astype(np.float64) - alone).max()) / scale


def _is_quantised(model: Any) -> bool:
    """True if activations are quantised while it runs, in ranges that all rows of a batch share."""
    return any("Quantize" in node.op_type or "Integer" in node.op_type for node in model.graph.node)


def _save(model: Any, copy: Path, path: Path, *, external: bool) -> None:
    """Write the graph; external weights go to one file with the graph's name."""
    if not external:
        path.write_bytes(model.SerializeToString())
        return
    weights = path.with_name(f"{path.name}.data")
    weights.unlink(missing_ok=True)  # onnx appends
    onnx.load_external_data_for_model(model, str(copy.parent))
    onnx.save_model(model, str(path), save_as_external_data=True, location=weights.name)
