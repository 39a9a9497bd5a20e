"""Reads the settings of sentence-transformers: modules, pooling, normalisation, prompts, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.errors import CorruptModel, UnsafeModel, UnsupportedModel
from penstock_runtime.models.files import is_inner, positive_number, read_list, read_object, read_optional
from penstock_runtime.models.limits import text_limit
from penstock_runtime.models.multi_vector import PYLATE, ModuleEntry, MultiVector, read_multi_vector
from penstock_runtime.models.safetensors import SINGLE, TensorInfo
from penstock_runtime.models.vector_modules import NormalizeModule, VectorModule, read_module
from penstock_runtime.rows import AnyPooling, Pooling, Poolings

_POOLINGS = {
    "cls": Pooling.CLS,
    "mean": Pooling.MEAN,
    "max": Pooling.MAX,
    "lasttoken": Pooling.LAST,
    "mean_sqrt_len_tokens": Pooling.MEAN_SQRT_LEN,
    "weightedmean": Pooling.WEIGHTED_MEAN,
}
_SPLADE = "SpladePooling"
_SPARSE = frozenset({_SPLADE, "SparseAutoEncoder", "CSRSparsity", "SparseStaticEmbedding", "MLMTransformer"})
"""Modules of sentence-transformers' SparseEncoder."""
_MASKED_LM_TASK = "fill-mask"
"""`transformer_task` of a Transformer module with a masked language model."""
_AFTER_POOLING = ("Dense", "LayerNorm", "Normalize")
_LEGACY_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""One flag for each pooling, as written by sentence-transformers up to 5.4; in the order of several poolings."""

ADAPTERS = "lora_adaptations"
"""The field of config.json that lists the adapters of jina-embeddings-v3."""
_OF_ADAPTERS = "custom_st.Transformer"
"""Its Transformer module. Its code is not read or run: it chooses the adapter and is otherwise as the common one."""

_IDLE_WHEN_SERVING = "Dropout"
SETTINGS = "config_sentence_transformers.json"
LIMIT_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
"""The file names that sentence-transformers tries, in its order."""


@dataclass(frozen=True)
class Module(ModuleEntry):
    """One entry of `modules.json`: the class name, such as `Pooling`, and a folder; empty for the model folder."""

    @property
    def has_weights(self) -> bool:
        """True if it has a file with weights besides the model's."""
        return bool(self.folder) and self.kind in {"Dense", "LayerNorm"}


@dataclass(frozen=True)
class SparsePooling:
    """How the logits of a masked language model become a weight for each token of the vocabulary (SPLADE).

    log(1 + max(0, logit)), then the largest over the text's tokens: Formal et al., "SPLADE v2", arXiv 2109.10086.
    """

    sums: bool = False
    """The sum over the text's tokens instead of the largest ("SPLADE", arXiv 2107.05720)."""
    twice: bool = False
    """The logarithm is applied twice (`log1p_relu`; OpenSearch's models, arXiv 2504.14839)."""


@dataclass(frozen=True)
class SentenceModules:
    """The modules of a model folder in order; empty for a plain transformers model."""

    path: Path
    modules: tuple[Module, ...] = ()
    max_tokens: int | None = None
    """`max_seq_length`, or the length of other settings that take precedence over it."""
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    dimensions: int | None = None
    """`truncate_dim`: the number of leading values of a vector that are kept."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the Transformer module."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """`config_sentence_transformers.json`."""
    files: tuple[Path, ...] = ()
    """The files that were read, `modules.json` and `config_sentence_transformers.json` apart."""

    @classmethod
    def read(cls, path: Path) -> SentenceModules:
        """Read the files.

        CorruptModel for an invalid file, UnsafeModel for a module with its own code, UnsupportedModel for a setting
        that would produce other tokens than here.
        """
        modules = tuple(_module(path, entry) for entry in read_list(path, "modules.json"))
        limit_file = next((name for name in LIMIT_FILES if (path / name).is_file()), None)
        limits = read_object(path, limit_file) if limit_file else {}
        own = read_optional(path, SETTINGS)
        prompts, default_prompt = _prompts(path / SETTINGS, own)
        files = [path / limit_file] if limit_file else []
        for module in modules:
            if module.folder and (path / module.folder / "config.json").is_file():
                _ = read_object(path, f"{module.folder}/config.json")
                files.append(path / module.folder / "config.json")
            if module.has_weights:
                files.append(path / module.folder / SINGLE)
        return cls(
            path=path,
            modules=modules,
            max_tokens=text_limit(path / limit_file, limits) if limit_file else None,
            lower_case=limits.get("do_lower_case") is True,
            prompts=prompts,
            default_prompt=default_prompt,
            dimensions=positive_number(path / SETTINGS, own, "truncate_dim"),
            transformer=limits,
            own=own,
            files=tuple(files),
        )

    def pooling(self) -> AnyPooling | None:
        """The pooling; None for a plain model. UnsupportedModel for a pooling that is not supported."""
        steps = self._steps()
        if steps is None:
            return None
        values, origin = self._pooling_settings(steps)
        modes = _modes(origin, values)
        unknown = [mode for mode in modes if mode not in _POOLINGS]
        if unknown:
            raise UnsupportedModel(
                f"{origin} asks for {' + '.join(unknown)} pooling",
                remedy=f"Served are {', '.join(_POOLINGS)}; use a model with these",
            )
        kinds = tuple(_POOLINGS[mode] for mode in modes)
        return kinds[0] if len(kinds) == 1 else Poolings(kinds)

    def sparse(self) -> SparsePooling | None:
        """The pooling of a SPLADE model: Transformer (or MLMTransformer) and SpladePooling; None for other models.

        UnsupportedModel for other modules next to SpladePooling, and for a pooling that is not known.
        """
        if not any(module.kind == _SPLADE for module in self.modules):
            return None
        first, *steps = [module for module in self.modules if module.kind != _IDLE_WHEN_SERVING]
        masked = first.kind == "MLMTransformer" or self.transformer.get("transformer_task") == _MASKED_LM_TASK
        if first.folder or first.kind not in {"Transformer", "MLMTransformer"} or not masked or len(steps) != 1:
            kinds = ", ".join(module.kind for module in self.modules)
            raise UnsupportedModel(
                f"{self.path}/modules.json has {kinds}; a sparse model has a masked language model at the top, and "
                f"{_SPLADE} after it",
                remedy="Save the model again with the SparseEncoder of sentence-transformers 5",
            )
        name = f"{steps[0].folder}/config.json".lstrip("/")
        values = read_optional(self.path, name)
        strategy, activation = values.get("pooling_strategy", "max"), values.get("activation_function", "relu")
        if strategy not in {"max", "sum"} or activation not in {"relu", "log1p_relu"}:
            raise UnsupportedModel(
                f"{self.path}/{name}: pooling_strategy {strategy!r} with activation_function {activation!r}",
                remedy="Served are max and sum, with relu and log1p_relu; use a model with these",
            )
        return SparsePooling(sums=strategy == "sum", twice=activation == "log1p_relu")

    @property
    def activation(self) -> object:
        """`activation_fn`: the function that a CrossEncoder was saved with; not checked."""
        return self.own.get("activation_fn") if self.modules and self.own.get("model_type") == "CrossEncoder" else None

    def multi_vector(self, architecture: str, tensors: Mapping[str, TensorInfo]) -> MultiVector | None:
        """See `read_multi_vector`."""
        return read_multi_vector(
            self.path, self.modules, self.own, self.transformer, architecture=architecture, tensors=tensors
        )

    def answers(self) -> tuple[object, object] | None:
        """The tokens of which a LogitScore module compares the logits (unchecked values); None without one."""
        for module in self.modules:
            if module.kind == "LogitScore" and module.folder:
                values = read_optional(self.path, f"{module.folder}/config.json")
                return values.get("true_token_id"), values.get("false_token_id")
        return None

    def include_prompt(self) -> bool:
        """False if the tokens of a prompt do not count in the pooling."""
        steps = self._steps()
        return steps is None or self._pooling_settings(steps)[0].get("include_prompt") is not False

    def _pooling_settings(self, steps: list[Module]) -> tuple[dict[str, Any], Path]:
        pooling = [module for module in steps if module.kind == "Pooling"]
        if len(pooling) != 1 or steps[0] is not pooling[0]:
            raise UnsupportedModel(
                f"{self.path}/modules.json has {len(pooling)} Pooling modules, or another module before it",
                remedy="Serve a model with exactly one, directly after the Transformer",
            )
        name = f"{pooling[0].folder}/config.json".lstrip("/")
        origin = self.path / name
        if not origin.is_file():
            raise CorruptModel(f"{self.path} lacks {pooling[0].folder}/config.json", remedy="Fetch the model again")
        return read_object(self.path, name), origin

    def normalize(self) -> bool:
        """True if the last module is Normalize. UnsupportedModel as `pooling`."""
        steps = self._steps()
        return bool(steps) and steps is not None and steps[-1].kind == "Normalize"

    def vector_modules(self) -> tuple[VectorModule, ...]:
        """The modules between the pooling and a Normalize at the end. Errors as `read_module`, and CorruptModel if the
        widths of two do not fit."""
        steps = (self._steps() or [])[1:]
        if steps and steps[-1].kind == "Normalize":
            del steps[-1]
        modules: list[VectorModule] = []
        for step in steps:
            module = NormalizeModule() if step.kind == "Normalize" else read_module(self.path, step.kind, step.folder)
            modules.append(module)
        return tuple(modules)

    @property
    def default_task(self) -> str | None:
        """`default_task` of the settings of jina-embeddings-v3's Transformer module: the name of an adapter."""
        for key in ("model_kwargs", "model_args"):
            settings = self.transformer.get(key)
            if isinstance(settings, Mapping) and isinstance(settings.get("default_task"), str):
                return str(settings["default_task"])
        return None

    def missing_weights(self) -> str | None:
        """The first file with a module's weights that is not there, relative to the folder; None if all are."""
        files = (f"{module.folder}/{SINGLE}" for module in self.modules if module.has_weights)
        return next((file for file in files if not (self.path / file).is_file()), None)

    def final_width(self) -> int | None:
        """Values of a vector after the modules, by their configurations; None: as many as the pooling gives."""
        dense = [module for module in self._steps() or [] if module.kind == "Dense"]
        if not dense:
            return None
        name = f"{dense[-1].folder}/config.json"
        return positive_number(self.path / name, read_optional(self.path, name), "out_features")

    def _steps(self) -> list[Module] | None:
        """The modules after the transformer, without those that have no effect in inference; None for a plain model."""
        if not self.modules:
            return None
        sparse = next((module for module in self.modules if module.kind in _SPARSE), None)
        if sparse is not None:
            kinds = {module.kind for module in self.modules}
            remedy = (
                "Serve it with task: feature-extraction, which answers with sparse vectors"
                if _SPLADE in kinds
                else f"Use a model with dense vectors, or one whose sparse vectors come from {_SPLADE}"
            )
            raise UnsupportedModel(
                f"{self.path}/modules.json has a {sparse.kind} module, of sparse vectors; dense ones are needed here",
                remedy=remedy,
            )
        first, *rest = self.modules
        if first.kind != "Transformer" or first.folder:
            where = f" in the folder {first.folder}" if first.folder else ""
            raise UnsupportedModel(
                f"{self.path}/modules.json starts with a {first.kind}{where}, not with a Transformer at the top",
                remedy="Serve a model whose first module is a Transformer; save an old one again with "
                "sentence-transformers 5 (docs/how-to/convert-a-model.md#safetensors)",
            )
        steps = [module for module in rest if module.kind != _IDLE_WHEN_SERVING]
        for module in steps:
            if module.kind not in {"Pooling", *_AFTER_POOLING}:
                raise UnsupportedModel(
                    f"{self.path}/modules.json has a {module.kind} module ({module.folder or 'at the top'})",
                    remedy=f"Use a model of Transformer, Pooling and {', '.join(_AFTER_POOLING)}",
                )
        return steps


def _module(path: Path, entry: dict[str, Any]) -> Module:
    kind, folder = entry.get("type"), entry.get("path", "")
    if not isinstance(kind, str) or not isinstance(folder, str):
        raise CorruptModel(f"{path}/modules.json: an entry has no type or path", remedy="Fetch the model again")
    pure = PurePosixPath(folder)
    if not is_inner(folder):
        raise UnsafeModel(
            f"{path}/modules.json points to {folder}, outside the folder or in a hidden one",
            remedy="Use a model from a source you trust",
        )
    if kind == _OF_ADAPTERS and ADAPTERS in read_optional(path, "config.json"):
        kind = "sentence_transformers.models.Transformer"
    package, _, name = kind.rpartition(".")
    owner = package.partition(".")[0]
    if owner not in {"sentence_transformers", PYLATE}:
        raise UnsafeModel(
            f"{path}/modules.json wants the class {kind}, which is code of the model's own",
            remedy="Code that comes with a model is never run here: use a model built of sentence-transformers' own "
            "modules",
        )
    return Module(kind=name, folder="" if folder in {"", "."} else pure.as_posix(), package=owner)


def _modes(origin: Path, values: dict[str, Any]) -> list[str]:
    """The names of the configured poolings, as sentence-transformers 5 reads old and new files."""
    new = values.get("pooling_mode")
    if new is None:
        # Without any flag the pooling is the mean, as in sentence-transformers.
        return [mode for key, mode in _LEGACY_KEYS.items() if values.get(key) is True] or ["mean"]
    modes = [new] if isinstance(new, str) else new
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) for mode in modes):
        raise CorruptModel(f"{origin}: pooling_mode is {new!r}", remedy="Fetch the model again")
    return modes


def _prompts(origin: Path, values: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise CorruptModel(f"{origin}: prompts is not a table of texts", remedy="Fetch the model again")
    prompts = {name: text or "" for name, text in prompts.items()}
    default = values.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CorruptModel(f"{origin}: default_prompt_name {default!r} is not among its prompts", remedy="Add it")
    return prompts, prompts[default] if default is not None else ""
