"""What is read of a model's settings files, refused, or ignored with a line in the log.

docs/reference/models.md has this table, and the tests have one for each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from penstock_runtime.models.files import read_optional

CONFIG, GENERATION, TOKENS = "config.json", "generation_config.json", "tokenizer_config.json"
SENTENCE, LIMITS, MODULES = "config_sentence_transformers.json", "sentence_bert_config.json", "modules.json"


UNIMPORTANT = frozenset({
    "attn_implementation", "cache_dir", "default_task", "device_map", "dtype", "local_files_only", "low_cpu_mem_usage",
    "revision", "subfolder", "token", "torch_dtype", "trust_remote_code", "use_safetensors",
})  # fmt: skip
"""Of `model_kwargs`: settings that are followed, or do not change what is computed in float32."""
ONLY_ADAPTER = "but for the adapter that default_task names"


class Treatment(StrEnum):
    """What happens with a setting."""

    READ = "read"
    REFUSED = "refused"
    IGNORED = "ignored, with a line in the log"


@dataclass(frozen=True)
class ModelSetting:
    """A setting, or several of one kind."""

    file: str
    fields: tuple[str, ...]
    treatment: Treatment
    meaning: str = ""
    harmless: tuple[Any, ...] = ()
    """Of ignored ones: the values, besides null, that change nothing."""


def _ignored(field: str, *harmless: Any, file: str = GENERATION, meaning: str = "") -> ModelSetting:
    return ModelSetting(file, (field,), Treatment.IGNORED, meaning, harmless)


def _read(file: str, meaning: str, *fields: str) -> ModelSetting:
    return ModelSetting(file, fields, Treatment.READ, meaning)


def _refused(file: str, meaning: str, *fields: str) -> ModelSetting:
    return ModelSetting(file, fields, Treatment.REFUSED, meaning)


SETTINGS: tuple[ModelSetting, ...] = (
    _read(CONFIG, "labels, also as numbers and null; without them their number", "id2label", "label2id", "num_labels"),
    _read(CONFIG, "the function from logits to scores", "problem_type"),
    _read(CONFIG, "the function of a cross-encoder", "sentence_transformers", "sbert_ce_default_activation_function"),
    _read(CONFIG, "the longest text", "max_position_embeddings", "n_positions", "pad_token_id"),
    _read(CONFIG, "where a text ends, if generation_config.json does not say", "eos_token_id"),
    _refused(CONFIG, "the model's own code, unless its family is served without", "auto_map"),
    _ignored("auto_map", file=CONFIG, meaning="the model's own code, which is not needed here"),
    _read(CONFIG, "defaults of requests for the task text-generation, before all others", "task_specific_params"),
    _read(GENERATION, "where a text ends", "eos_token_id"),
    _read(
        GENERATION, "defaults of requests; of config.json if there is no such file", "do_sample",
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
        "max_new_tokens",
    ),
    _read(GENERATION, "texts that end an answer, and its least tokens", "stop_strings", "min_new_tokens"),
    _ignored("num_beams", 1),
    _ignored("num_beam_groups", 1),
    _ignored("penalty_alpha", 0),
    _ignored("no_repeat_ngram_size", 0),
    _ignored("encoder_no_repeat_ngram_size", 0),
    _ignored("bad_words_ids"),
    _ignored("force_words_ids"),
    _ignored("suppress_tokens"),
    _ignored("begin_suppress_tokens"),
    _ignored("sequence_bias"),
    _ignored("forced_bos_token_id"),
    _ignored("forced_eos_token_id"),
    _ignored("exponential_decay_length_penalty"),
    _ignored("guidance_scale", 1),
    _ignored("min_length", 0),
    _ignored("typical_p", 1),
    _ignored("top_h"),
    _ignored("epsilon_cutoff", 0),
    _ignored("eta_cutoff", 0),
    _ignored("watermarking_config"),
    _read(TOKENS, "the form of conversations, with chat_template.jinja and additional_chat_templates", "chat_template"),
    _read(
        TOKENS, "special tokens, with special_tokens_map.json and added_tokens.json", "bos_token", "eos_token",
        "cls_token", "sep_token", "mask_token", "unk_token", "added_tokens_decoder",
    ),
    _read(TOKENS, "special tokens that are added to texts", "add_bos_token", "add_eos_token"),
    _read(TOKENS, "how texts are split", "do_lower_case", "add_prefix_space", "split_special_tokens"),
    _read(TOKENS, "the longest text", "model_max_length", "max_len"),
    _read(TOKENS, "spaces before punctuation in texts of /decode and fill-mask", "clean_up_tokenization_spaces"),
    _ignored("clean_up_tokenization_spaces", False, file=TOKENS, meaning="in generated texts, which come in pieces"),
    _read(MODULES, "pooling and modules after it", "Pooling", "Dense", "LayerNorm", "Normalize", "SpladePooling"),
    _refused(MODULES, "other modules, and modules in another order", "type"),
    _read(LIMITS, "the longest text, and lower case", "max_seq_length", "do_lower_case"),
    _refused(LIMITS, "other tokens than by tokenizer_config.json", "processing_kwargs", "processor_kwargs"),
    _refused(LIMITS, "another configuration than in config.json", "config_kwargs", "config_args"),
    _ignored("model_kwargs", file=LIMITS, meaning=ONLY_ADAPTER),
    _ignored("model_args", file=LIMITS, meaning=ONLY_ADAPTER),
    _read(SENTENCE, "texts before the input", "prompts", "default_prompt_name"),
    _read(SENTENCE, "the number of values of a vector", "truncate_dim"),
    _read(SENTENCE, "the function of a cross-encoder", "activation_fn"),
)  # fmt: skip


def ignored_settings(path: Path, *, generates: bool = False) -> tuple[str, ...]:
    """A sentence for each setting of a folder that its own libraries follow and that is ignored here. `generates`: the
    task is text-generation."""
    files = {name: read_optional(path, name) for name in (CONFIG, GENERATION, LIMITS, *([TOKENS] if generates else []))}
    return tuple(
        f"{one.file} has {one.fields[0]}, which is ignored{f': {one.meaning}' if one.meaning else ''}"
        for one in SETTINGS
        if one.treatment is Treatment.IGNORED
        and one.file in files
        and _counts(files[one.file], one.fields[0], one.harmless)
    )


def _counts(values: Mapping[str, Any], field: str, harmless: Sequence[Any]) -> bool:
    value = values.get(field)
    if isinstance(value, Mapping):  # of several settings
        return bool(value.keys() - UNIMPORTANT)
    return value is not None and value != [] and value not in harmless


def settings_table() -> str:
    """For the documents: a row for each entry."""
    rows = [
        f"| `{one.file}` | {', '.join(f'`{field}`' for field in one.fields)} | {one.treatment} | {one.meaning} |"
        for one in SETTINGS
    ]
    return "\n".join(["| file | settings | | meaning |", "|---|---|---|---|", *rows])
