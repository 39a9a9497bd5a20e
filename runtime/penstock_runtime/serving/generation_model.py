"""A text-generation model as the server uses it: engine, tokenizer, chat template, and the defaults of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ArtefactError, CorruptModel
from penstock.manifest import BatchInvariance, Manifest
from penstock.recipe import EngineName, Plan
from penstock.tasks import TaskName
from penstock_runtime.engines.base import BLOCK_SIZE, StepEngine
from penstock_runtime.engines.load import block_bytes, load_step_engine, pool_blocks
from penstock_runtime.generation.grammar import Grammars
from penstock_runtime.host import Host
from penstock_runtime.models.files import read_optional
from penstock_runtime.rows import StepRow
from penstock_runtime.serving.loaded_model import Which, check_isa, fit_plan, is_on_device
from penstock_runtime.serving.model_settings import ignored_settings
from penstock_runtime.store.verification import verify_files
from penstock_runtime.tokens import Tokenizer
from penstock_runtime.tokens.backend import component

if TYPE_CHECKING:
    from penstock_runtime.generation.templates import ChatTemplate

CHARACTERS_PER_TOKEN = 16
"""Of a long prompt, this much is tokenised first, for each token that it may have: most texts have some 4.5."""
GENERATION_CONFIG = "generation_config.json"
WARM_UP_TOKENS = 32
WARM_UP_ROWS = 8
SAMPLING_DEFAULTS = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "stop_strings",
    "min_new_tokens",
)  # fmt: skip
"""Fields of the model's files that are defaults of requests."""


@dataclass(eq=False)
class GenerationModel:
    """All that answers need."""

    engine: StepEngine
    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    """None: the model has none, and cannot chat."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end a continuation."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of `SAMPLING_DEFAULTS`, those that the model's files have."""
    plan: Plan | None = None
    manifest: Manifest | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine, for `/info`."""
    findings: tuple[str, ...] = ()
    """Deviations from the plan, as sentences for the user."""

    @cached_property
    def byte_level(self) -> bool:
        """Whether characters of the vocabulary are bytes, as in GPT-2, Llama 3 and Qwen."""
        return "ByteLevel" in json.dumps(component(self.tokenizer.backend.decoder))

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars over the model's tokens. Takes some tenths of a second the first time."""
        return Grammars(self.tokenizer.backend.to_str(), self.engine.vocabulary, self.end_tokens)

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """Tokens that are no text."""
        added = self.tokenizer.backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return str(self.tokenizer.backend.decode(list(tokens), skip_special_tokens=True))

    def encode_prompt(self, text: str, *, with_special_tokens: bool, most: int) -> list[int]:
        """The tokens of a prompt. Special tokens in the text count as such: chat templates write them.

        `with_special_tokens`: those that the tokenizer adds to every text, such as the token of its beginning.
        `most`: more than this number of tokens may not be used; of much longer texts one more is given.
        """
        first = most * CHARACTERS_PER_TOKEN
        if first < len(text):
            ids = self._encoded(text[:first], with_special_tokens=with_special_tokens)
            if len(ids) > 2 * most:  # the rest of the text may join the last of them
                return ids[: most + 1]
        return self._encoded(text, with_special_tokens=with_special_tokens)

    def _encoded(self, text: str, *, with_special_tokens: bool) -> list[int]:
        # Unlike `encode`, it lets other threads run meanwhile.
        (encoding,) = self.tokenizer.backend.encode_batch_fast([text], add_special_tokens=with_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def read_generation_model(path: Path, engine: StepEngine) -> GenerationModel:
    """The model in a folder with tokenizer.json, and if it has them, config.json, tokenizer_config.json, chat templates
    and generation_config.json.

    CorruptModel for files that cannot be read.
    """
    # Imports jinja2, which servers of other tasks do not need.
    from penstock_runtime.generation.templates import read_template, special_tokens

    config = read_optional(path, "config.json") or {}
    settings = read_optional(path, "tokenizer_config.json") or {}
    generation = read_optional(path, GENERATION_CONFIG) or {}
    tokenizer = Tokenizer.open(path, path / "tokenizer.json", config)
    return GenerationModel(
        engine,
        tokenizer,
        read_template(path, settings),
        _end_tokens(tokenizer, generation, config, special_tokens(settings)),
        _defaults(path, generation, config),
    )


def _defaults(path: Path, generation: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Of requests, as transformers finds them: in config.json if there is no other file, and in its settings of the
    pipeline, which come before both (GPT-2)."""
    stated = generation if (path / GENERATION_CONFIG).is_file() else config
    tasks = config.get("task_specific_params")
    own = tasks.get(TaskName.TEXT_GENERATION) if isinstance(tasks, Mapping) else None
    found = {**stated, **(own if isinstance(own, Mapping) else {})}
    return {name: found[name] for name in SAMPLING_DEFAULTS if found.get(name) is not None}


def open_generation_engine(
    folder: Path,
    cores: int | None = None,
    memory: int | None = None,
    which: Which = "chosen",
    cache_bytes: int | None = None,
    *,
    verified: bool = False,
) -> StepEngine:
    """Load the graph of an artefact's plan for `cores` cores (None: the plan's). `verified` as for `load_artefact`.

    `memory`: bytes that weights and pool may take, for example what is left of the container's limit; None: without a
    limit. The pool of cache blocks gets what remains after the weights, within bounds, and at most `cache_bytes`.

    ArtefactError: a file is missing or altered, the artefact is of another task, or the graph does not load. HostError:
    the memory does not suffice for the weights and one block.
    """
    manifest = Manifest.load(folder)
    if manifest.decoder is None:
        raise ArtefactError(
            f"{folder} is an artefact for {manifest.task.value}, not for text-generation",
            remedy="Serve it with its own task, or run penstock optimize with task: text-generation",
        )
    served = manifest.chosen if which == "chosen" else manifest.baseline
    if not verified:
        verify_files(folder, manifest, served)
    plan, _ = fit_plan(served.plan, cores)
    graph = folder / served.path
    files = sum(file.stat().st_size for file in graph.parent.iterdir() if file.is_file())
    blocks = pool_blocks(
        manifest.decoder,
        block_size=BLOCK_SIZE,
        block_bytes=block_bytes(manifest.decoder, plan.recipe),
        weights_bytes=files,
        memory=memory,
        cache_bytes=cache_bytes,
    )
    return load_step_engine(graph, manifest.decoder, plan.recipe, plan.streams * plan.threads_per_stream, blocks=blocks)


def load_generation_artefact(
    folder: Path,
    which: Which,
    host: Host,
    *,
    cores: int | None = None,
    any_isa: bool = False,
    cache_bytes: int | None = None,
    verified: bool = False,
) -> GenerationModel:
    """Load one of the two models of an artefact for text-generation, with as much cache as the memory allows.

    `verified` and errors as for `load_artefact`.
    """
    manifest = Manifest.load(folder)
    served = manifest.chosen if which == "chosen" else manifest.baseline
    if is_on_device(served.plan):
        raise ArtefactError(
            "text-generation does not run on AWS Inferentia in this version",
            remedy="Use a hardware class of CPUs for this endpoint",
        )
    if which == "chosen" and not any_isa:
        check_isa(folder, manifest.cpu.isa, host.cpu.isa)
    plan, findings = fit_plan(served.plan, cores)
    memory = host.memory
    is_known = memory.total != 0 or memory.limit is not None
    available = memory.available if is_known else None
    engine = open_generation_engine(folder, cores, available, which, cache_bytes, verified=verified)
    try:
        model = read_generation_model(folder, engine)
        warm_up(engine)
    except BaseException:
        engine.close()
        raise
    model.plan, model.manifest = plan, manifest
    model.findings = (*findings, *model.tokenizer.findings, *ignored_settings(folder, generates=True))
    recipe, company, compared = plan.recipe, _same_in_company(manifest, plan), _invariance(manifest, plan)
    # The native engine computes each row on its own, and the guard has found no difference.
    model.facts = {
        "name": recipe.engine.value,
        "precision": recipe.precision.value,
        "which": which,
        "same_in_company": company,
        "batch_invariant": recipe.engine is EngineName.NATIVE and (compared is None or not compared.differing),
        "batch_invariance": None if compared is None else compared.model_dump(mode="json"),
    }
    return model


def _same_in_company(manifest: Manifest, plan: Plan) -> float | None:
    """The measured share of tokens that were the same alone and with other requests; None if it was not measured."""
    verdicts = [one.verdict for one in manifest.candidates if one.recipe == plan.recipe and one.verdict is not None]
    metrics = [metric for verdict in verdicts for metric in verdict.metrics if metric.name == "same_in_company"]
    return metrics[0].value if metrics else None


def _invariance(manifest: Manifest, plan: Plan) -> BatchInvariance | None:
    """The result for the plan's recipe; None if it was not measured."""
    found = (one.batch_invariance for one in manifest.candidates if one.recipe == plan.recipe)
    return next((one for one in found if one is not None), None)


def warm_up(engine: StepEngine) -> None:
    """Run a prompt and steps of one and of several sequences, so that kernels are compiled and buffers allocated.

    CorruptModel if the logits are not finite numbers; InferenceFailed if the engine does not run.
    """
    size = min(WARM_UP_TOKENS, engine.context - 1)
    needed = -(-(size + 1) // engine.block_size)
    rows = max(1, min(WARM_UP_ROWS, engine.blocks // needed))
    blocks = np.arange(rows * needed, dtype=np.int32).reshape(rows, needed)
    prompt, next_token = np.ones(size, dtype=np.int32), np.ones(1, dtype=np.int32)
    used = -(-size // engine.block_size)
    for count in dict.fromkeys((1, rows)):
        for logits in (
            engine.step([StepRow(prompt, 0, blocks[row, :used], 1) for row in range(count)]),
            engine.step([StepRow(next_token, size, blocks[row], 1) for row in range(count)]),
        ):
            if not np.isfinite(logits).all():
                raise CorruptModel(
                    "the model gives NaN or infinity as logits",
                    remedy="Look for such values in the weights, and fetch the model again",
                )


def _end_tokens(
    tokenizer: Tokenizer, generation: Mapping[str, Any], config: Mapping[str, Any], specials: Mapping[str, str]
) -> frozenset[int]:
    """As transformers: those of generation_config.json, else of config.json; and the tokenizer's own."""
    found: set[int] = set()
    for source in (generation, config):
        value = source.get("eos_token_id")
        if value is not None:
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(one, int) and 0 <= one < tokenizer.vocabulary_size for one in values):
                raise CorruptModel(
                    f"eos_token_id is {json.dumps(value)}, and the vocabulary has {tokenizer.vocabulary_size} tokens",
                    remedy="Correct it in generation_config.json or config.json",
                )
            found.update(values)
            break
    own = tokenizer.id_of(specials["eos_token"]) if "eos_token" in specials else None
    return frozenset(found if own is None else {*found, own})
