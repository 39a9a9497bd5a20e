"""The general way, for architectures that the builder does not know: transformers' model through torch's exporters.

Needs the extra `torch`. optimum is left out: it drives torch's older exporter with a table of the architectures that
it knows and binds transformers to its own versions, while four names of inputs and outputs are needed here.
Torch has two exporters and neither takes every model, so both are tried, and a graph is only believed when it answers
like the model it came from, at lengths that it was not exported with. It is then fused as far as ONNX Runtime's
transformer optimiser recognises it.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from penstock.errors import CorruptModel, UnsupportedModel
from penstock.manifest import GraphIO
from penstock.tasks import Head
from penstock_optimizer.export.build.graph import SINGLE_FILE_BYTES, fused_nodes
from penstock_optimizer.export.build.operators import Flavour
from penstock_optimizer.export.own_graph import OUTPUTS
from penstock_optimizer.export.reader import CLASS_ENDINGS, Exported, no_head, open_session
from penstock_runtime.models.files import read_optional
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.tasks.embeddings.space import tensors_digest
from penstock_runtime.tokens import Template, Tokenizer
from penstock_runtime.tokens.backend import uses_type_ids

AUTO_CLASS: Mapping[Head, str] = {
    Head.ENCODER: "AutoModel",
    **{head: f"AutoModel{endings[0]}" for head, endings in CLASS_ENDINGS.items()},
}
ENCODER_CLASS: Mapping[str, str] = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
"""Classes of the encoder alone, by `model_type`, where AutoModel gives an encoder and a decoder."""
OPSET_OF_PROGRAM, OPSET_OF_TRACE = 18, 17
"""The lowest that the newer exporter writes; the one that we write."""
CLOSE = 1e-3
"""Largest difference between graph and model, as a share of the largest value: far over rounding, far under wrong."""

Arrays = Mapping[str, NDArray[np.int64]]


def export_with_torch(folder: ModelFolder, head: Head, path: Path, flavour: Flavour, why: str) -> Exported:
    """Export to `path`; with `Flavour.FUSED`, what ONNX Runtime's fusion finds in the graph is then fused.

    `why`: the reason why the builder did not take it, for the errors: UnsupportedModel when the extra is missing, when
    transformers does not know the model, or when no exporter gives a graph that answers like it.
    """
    if quantised := folder.config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        raise UnsupportedModel(
            f"{folder.path}: its weights are quantised ({method or 'quantization_config of config.json'})",
            remedy="Use the model as it was before quantisation, with weights of type F32, F16 or BF16",
        )
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedModel(
            f"{folder.path} cannot be built without torch ({why}), and {' and '.join(missing)} is not installed",
            remedy="Install the extra: pip install 'penstock[torch]'",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters warn of themselves
        model = _load(folder, head, why)
        inputs = _inputs(model, folder)
        tokenizer = Tokenizer.load(folder)
        try:
            answers = _Answers(
                model, inputs, tuple(OUTPUTS[head]), folder.max_tokens, (tokenizer.single, tokenizer.pair)
            )
        except Exception as error:  # the model's own code, run on random tokens
            raise UnsupportedModel(
                f"{folder.path}: transformers' model does not run on batches of texts: {type(error).__name__}: {error}",
                remedy="Add an ONNX export of it to the folder (model.onnx)",
            ) from error
        if answers.see_padding():
            raise UnsupportedModel(
                f"{folder.path}: transformers' model gives a text another answer where padding follows it, so that "
                "texts cannot run together (its head reads the last place of a row, for one)",
                remedy="Use a model that passes over padding",
            )
        _export(answers, path, f"{folder.path} ({why})")
        if flavour is Flavour.FUSED:
            fuse(path, model.config, answers.check, large=answers.bytes > SINGLE_FILE_BYTES)
    return Exported(
        path=path,
        io=GraphIO(inputs=inputs, outputs=OUTPUTS[head]),
        fused_nodes=fused_nodes(onnx.load(str(path), load_external_data=False).graph.node),
        how="torch",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights=tensors_digest({name: one.detach().float().numpy() for name, one in model.named_parameters()}),
    )


def _load(folder: ModelFolder, head: Head, why: str) -> Any:
    import transformers

    name = AUTO_CLASS[head]
    if head is Head.ENCODER:
        name = ENCODER_CLASS.get(folder.model_type, name)
    auto = getattr(transformers, name)
    try:
        model, report = auto.from_pretrained(
            str(folder.path),
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported below, by name
            attn_implementation="eager",  # the form that fusion knows
            output_loading_info=True,
        )
    except Exception as error:  # whatever transformers' code makes of the fields of config.json
        raise UnsupportedModel(
            f"{folder.path} is not built from its weights ({why}), and transformers {transformers.__version__} does "
            f"not load it as {name}: {type(error).__name__}: {error}",
            remedy="Use a model that transformers loads, or add an ONNX export of it to the folder (model.onnx)",
        ) from error
    absent = sorted(name for name in report["missing_keys"] if head is not Head.ENCODER or "pooler" not in name)
    if head is not Head.ENCODER and any(not name.startswith(f"{model.base_model_prefix}.") for name in absent):
        raise no_head(folder, head)
    if absent:
        raise CorruptModel(
            f"{folder.path} has no tensor {absent[0]!r}",
            remedy="Fetch the model again; if it stays so, config.json and the weights are not of one model",
        )
    for entry in report["mismatched_keys"]:
        name = entry if isinstance(entry, str) else entry[0]  # with shapes, before transformers 4.50
        raise CorruptModel(
            f"{folder.path}: tensor {name!r} has another shape than the {list(model.state_dict()[name].shape)} "
            "that config.json asks for",
            remedy="Take config.json and the weights from the same revision of the model",
        )
    return model.float().eval()


def _inputs(model: Any, folder: ModelFolder) -> tuple[str, ...]:
    """Those that the model takes; token types only where there are several.

    Models that compare types have no table of them, nor its size (XLNet, Funnel): they take the tokenizer's,
    and even types that are all zero are something else to them than none.
    """
    known = inspect.signature(model.forward).parameters
    names = ["input_ids", "attention_mask"]
    size = getattr(model.config, "type_vocab_size", None)
    given = uses_type_ids(folder.config, read_optional(folder.path, "tokenizer_config.json"))
    if "token_type_ids" in known and (given if size is None else size > 1):
        names.append("token_type_ids")
    return tuple(names)


class _Answers:
    """The model's own answers to a few batches, and whether a graph gives the same."""

    def __init__(
        self, model: Any, inputs: tuple[str, ...], outputs: tuple[str, ...], longest: int, templates: Sequence[Template]
    ) -> None:
        """`templates`: the special tokens around the texts of the rows, one template after the other."""
        import torch

        class Named(torch.nn.Module):  # type: ignore[misc] # torch is optional and has no types here
            """Takes tensors by position and gives a tuple, as exporters want it."""

            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, *tensors: Any) -> tuple[Any, ...]:
                answer = self.model(**dict(zip(inputs, tensors, strict=True)))
                return tuple(answer[name] for name in outputs)

        self.inputs, self.outputs = inputs, outputs
        self.module = Named().eval()
        self.bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
        self._templates = templates
        self._vocabulary = model.config.get_text_config().vocab_size
        long = max(2, min(longest, 33))
        shapes = [(2, min(11, long)), (1, min(5, long)), (3, long)]
        self.batches = [self._batch(rows, tokens) for rows, tokens in shapes]
        with torch.no_grad():
            self._expected = [[value.numpy() for value in self.module(*self.tensors(batch))] for batch in self.batches]

    def _batch(self, rows: int, tokens: int) -> Arrays:
        generator = np.random.default_rng(rows)
        mask = np.ones((rows, tokens), np.int64)
        mask[-1, (tokens + 1) // 2 :] = 0
        ids = generator.integers(min(10, self._vocabulary - 1), self._vocabulary, mask.shape)
        # Heads may read special tokens. BART's takes the last </s>, and only where all rows have as many: served in
        # batches of a text and a pair, its graph would give one row's answer to the other.
        for row, length, template in zip(ids, mask.sum(1).tolist(), cycle(self._templates), strict=False):
            if length > template.specials:
                row[: len(template.before)] = template.before
                row[length - len(template.after) : length] = template.after
                middle = length - len(template.after) - len(template.between)
                row[middle : middle + len(template.between)] = template.between
        types = np.broadcast_to(np.arange(tokens) >= tokens // 2, mask.shape).astype(np.int64)
        arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        return {name: arrays[name] for name in self.inputs}

    def tensors(self, batch: Arrays) -> tuple[Any, ...]:
        """The arrays of a batch for torch, in order."""
        import torch

        return tuple(torch.from_numpy(array) for array in batch.values())

    def see_padding(self) -> bool:
        """Whether the model answers a padded row otherwise than that row alone."""
        import torch

        for batch, expected in zip(self.batches, self._expected, strict=True):
            length = int(batch["attention_mask"][-1].sum())
            row = {name: array[-1:, :length] for name, array in batch.items()}
            with torch.no_grad():
                alone = [value.numpy() for value in self.module(*self.tensors(row))]
            for one, padded in zip(alone, expected, strict=True):
                seen = padded[-1:] if one.shape[1:] == padded.shape[1:] else padded[-1:, :length]
                if not np.abs(one - seen).max() <= CLOSE * max(1e-3, float(np.abs(one).max())):
                    return True
        return False

    def check(self, path: Path) -> None:
        """ValueError if the graph's answers differ, with the difference."""
        session = open_session(path)
        for batch, expected in zip(self.batches, self._expected, strict=True):
            mask = batch["attention_mask"]
            actual = session.run(list(self.outputs), dict(batch))
            for name, mine, theirs in zip(self.outputs, actual, expected, strict=True):
                if mine.shape != theirs.shape:
                    raise ValueError(f"{name} has the shape {list(mine.shape)} instead of {list(theirs.shape)}")
                per_token = theirs.shape[:2] == mask.shape
                seen = mask.reshape(*mask.shape, *[1] * (theirs.ndim - 2)) if per_token else 1
                off = float(np.abs((mine - theirs) * seen).max())
                if not off <= CLOSE * max(1e-3, float(np.abs(theirs).max())):
                    raise ValueError(f"{name} of {list(mask.shape)} tokens is off by {off:.2g}")


def _export(answers: _Answers, path: Path, what: str) -> None:
    failures = []
    for name, write in _EXPORTERS.items():
        try:
            write(answers, path)
            answers.check(path)
        except Exception as error:  # whatever an exporter raises, the other one is still to be tried
            failures.append(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        else:
            return
    path.unlink(missing_ok=True)
    raise UnsupportedModel(
        f"{what}: torch gives no graph that answers like the model. {'; '.join(failures)}",
        remedy="Add an ONNX export of it to the folder (model.onnx)",
    )


def _write(answers: _Answers, path: Path, **options: Any) -> None:
    import torch

    with torch.no_grad():
        torch.onnx.export(
            answers.module,
            answers.tensors(answers.batches[0]),
            str(path),
            input_names=list(answers.inputs),
            output_names=list(answers.outputs),
            **options,
        )


def _export_program(answers: _Answers, path: Path) -> None:
    """The newer exporter, from the model's code."""
    import torch

    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    large = answers.bytes > SINGLE_FILE_BYTES
    shapes = (tuple(free for _ in answers.inputs),)
    _write(
        answers, path, dynamic_shapes=shapes, opset_version=OPSET_OF_PROGRAM, dynamo=True, external_data=large,
        verbose=False,
    )  # fmt: skip


def _export_trace(answers: _Answers, path: Path) -> None:
    """The older exporter, from one run."""
    axes = {name: {0: "batch", 1: "tokens"} for name in answers.inputs}
    _write(answers, path, dynamic_axes=axes, opset_version=OPSET_OF_TRACE, dynamo=False)


_EXPORTERS: Mapping[str, Callable[[_Answers, Path], None]] = {"torch.export": _export_program, "tracing": _export_trace}


def fuse(path: Path, config: Any, check: Callable[[Path], None], *, large: bool) -> None:
    """Fuse in place. The graph stays as it was if nothing is found, or if `check` refuses the answers.

    `config` is transformers' configuration; `large` weights go to a file next to the graph.
    """
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    options = FusionOptions("bert")
    # As `operators.Fused` has it, for the reasons given there.
    options.enable_skip_layer_norm = options.enable_bias_skip_layer_norm = options.enable_bias_gelu = False
    with TemporaryDirectory(dir=path.parent) as scratch:
        fused = Path(scratch) / path.name  # the weights file of a graph is found by its name
        try:
            found = optimizer.optimize_model(
                str(path),
                model_type="bert",
                num_heads=getattr(config, "num_attention_heads", 0) or 0,
                hidden_size=getattr(config, "hidden_size", 0) or 0,
                optimization_options=options,
                opt_level=0,
            )
            _keep_sums(found.model.graph)
            found.save_model_to_file(str(fused), use_external_data_format=large)
            check(fused)
        except Exception:  # an optimiser that fails or changes answers has found nothing: the graph is used without it
            return
        for file in fused.parent.iterdir():
            file.replace(path.with_name(file.name))


def _keep_sums(graph: Any) -> None:
    """Call the additions before normalisations Sum, which ONNX Runtime does not fuse into SkipLayerNormalization."""
    additions = {node.output[0]: node for node in graph.node if node.op_type == "Add"}
    for node in graph.node:
        if node.op_type == "LayerNormalization" and node.input[0] in additions:
            additions[node.input[0]].op_type = "Sum"
