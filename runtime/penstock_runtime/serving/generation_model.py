"""A text-generation model as the server uses it: engine, tokenizer, chat template, and the defaults of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.errors import CorruptModel
from penstock.manifest import Manifest
from penstock.recipe import Plan
from penstock_runtime.generation.engine import StepEngine
from penstock_runtime.generation.templates import ChatTemplate, special_tokens, template_source
from penstock_runtime.models.files import read_optional
from penstock_runtime.tokens import Tokenizer
from penstock_runtime.tokens.backend import component

GENERATION_CONFIG = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
SAMPLING_DEFAULTS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
"""Fields of generation_config.json that are defaults of requests."""


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

    @cached_property
    def byte_level(self) -> bool:
        """Whether characters of the vocabulary are bytes, as in GPT-2, Llama 3 and Qwen."""
        return "ByteLevel" in json.dumps(component(self.tokenizer.backend.decoder))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return str(self.tokenizer.backend.decode(list(tokens), skip_special_tokens=True))

    def encode_prompt(self, text: str, *, with_special_tokens: bool) -> list[int]:
        """The tokens of a prompt. Special tokens in the text count as such: chat templates write them.

        `with_special_tokens`: those that the tokenizer adds to every text, such as the token of its beginning.
        """
        ids: list[int] = self.tokenizer.backend.encode(text, add_special_tokens=with_special_tokens).ids
        return ids


def read_generation_model(path: Path, engine: StepEngine, config: Mapping[str, Any] | None = None) -> GenerationModel:
    """The model in a folder with tokenizer.json, and if it has them, tokenizer_config.json, chat_template.jinja and
    generation_config.json. `config`: its config.json.

    CorruptModel for files that cannot be read.
    """
    config = read_optional(path, "config.json") or {} if config is None else config
    settings = read_optional(path, "tokenizer_config.json") or {}
    generation = read_optional(path, GENERATION_CONFIG) or {}
    tokenizer = Tokenizer.open(path, path / "tokenizer.json", config)
    separate = path / TEMPLATE_FILE
    source = template_source(settings, separate.read_text(encoding="utf-8") if separate.is_file() else None)
    specials = special_tokens(settings)
    return GenerationModel(
        engine,
        tokenizer,
        None if source is None else ChatTemplate(source, specials),
        _end_tokens(tokenizer, generation, config, specials),
        {name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None},
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
