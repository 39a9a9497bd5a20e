"""The longest input of a model, from the position table, the tokenizer and the settings of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import CorruptModel, UnsupportedModel
from penstock_runtime.models.files import positive_number, read_optional

OFFSET_FROM_PADDING = frozenset({
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Model types in which the first token has position padding id + 1: that number of rows of the table is never used."""

NO_LIMIT = 10**9
"""transformers writes 1e30 for a tokenizer without a limit, some models 1e9."""

LONGEST_ROW = 8192
"""Tokens of a row, whatever the model's files say. The scores of one attention take heads * tokens^2 * 4 bytes: 4 GB
with 16 heads, and 16 times as much for the 32768 tokens that decoders have positions for."""


def position_limit(path: Path, config: Mapping[str, Any]) -> int | None:
    """Tokens that have a separate position; None for models without a position table (relative positions)."""
    origin = path / "config.json"
    keys = ("max_position_embeddings", "n_positions")
    rows = next((n for key in keys if (n := positive_number(origin, dict(config), key)) is not None), None)
    if rows is None:
        return None
    usable = rows - first_position(config)
    if usable < 1:
        raise CorruptModel(
            f"{origin}: {rows} positions and pad_token_id {config.get('pad_token_id')!r} leave no position for a token",
            remedy="Fetch the model again",
        )
    return usable


def first_position(config: Mapping[str, Any]) -> int:
    """The position of the first token."""
    model_type = str(config.get("model_type"))
    if model_type not in OFFSET_FROM_PADDING:
        return 0
    # MPNet ignores pad_token_id here: its code uses the constant 1.
    padding = 1 if model_type == "mpnet" else config.get("pad_token_id", 1)
    return padding + 1 if isinstance(padding, int) else NO_LIMIT


def tokenizer_limit(path: Path) -> int | None:
    """`model_max_length` of the tokenizer, or else `max_len`, its older name; None if it has no limit."""
    settings = read_optional(path, "tokenizer_config.json")
    key = "model_max_length" if "model_max_length" in settings else "max_len"
    limit = positive_number(path / "tokenizer_config.json", settings, key)
    return None if limit is None or limit >= NO_LIMIT else limit


_CALL: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    # Without any truncation sentence-transformers fails on long texts.
    "truncation": (True, "longest_first", False, "do_not_truncate", None),
    "stride": (0,),
    "is_split_into_words": (False,),
    "split_special_tokens": (False, None),
    "return_overflowing_tokens": (False,),
    "return_token_type_ids": (True, None),
}
"""Call options of a tokenizer that may change the tokens, with the values that do not."""

_LOAD = frozenset({
    "add_prefix_space", "additional_special_tokens", "bos_token", "cls_token", "do_lower_case", "eos_token",
    "extra_special_tokens", "mask_token", "model_input_names", "sep_token", "split_special_tokens", "strip_accents",
    "tokenize_chinese_chars", "tokenizer_file", "truncation_side", "unk_token",
})  # fmt: skip
"""Load options of a tokenizer that may change the tokens; harmless if tokenizer_config.json has the same value."""

_FETCHING = frozenset({"cache_dir", "local_files_only", "revision", "subfolder", "token", "trust_remote_code"})
"""Options that change where files are read, not what is computed."""

_SINGLE_TEXT_TASK = "feature-extraction"
_SINGLE_TEXT_TASKS = (_SINGLE_TEXT_TASK, "fill-mask")
_OUTPUTS = ("last_hidden_state", "logits")


def text_limit(path: Path, values: Mapping[str, Any]) -> int | None:
    """The longest sequence by sentence-transformers' settings `values` of the file `path`; None if they have none.

    In the order of sentence-transformers: the tokenizer's call options, its load options, `max_seq_length`.

    UnsupportedModel for a setting that would produce other tokens or another output than here; CorruptModel for a
    setting of the wrong type.
    """
    called, loaded = _called(path, values), _loaded(path, values)
    # For single texts, `only_first` truncates as the default does.
    single = values.get("transformer_task", _SINGLE_TEXT_TASK) in _SINGLE_TEXT_TASKS
    for key, harmless in _CALL.items():
        if key in called and called[key] not in harmless and not (single and called[key] == "only_first"):
            raise _unsupported(path, f"processing_kwargs has {key}: {called[key]!r}")
    own = read_optional(path.parent, "tokenizer_config.json") if _LOAD & loaded.keys() else {}
    for key in sorted(_LOAD & loaded.keys()):
        if key not in own or own[key] != loaded[key]:
            raise _unsupported(path, f"processor_kwargs has {key}: {loaded[key]!r}")
    for key in ("config_kwargs", "config_args"):
        if unknown := sorted(_table(path, values, key).keys() - _FETCHING):
            raise _unsupported(path, f"{key} has {unknown[0]}: {values[key][unknown[0]]!r}")
    text = _table(path, _table(path, values, "modality_config"), "text")
    name = text.get("method_output_name", _OUTPUTS[0])
    if name not in _OUTPUTS and name not in [[output] for output in _OUTPUTS]:
        raise _unsupported(path, f"modality_config takes the output {name!r} for texts")
    limit = (
        positive_number(path, called, "max_length")
        or positive_number(path, loaded, "model_max_length")
        or positive_number(path, dict(values), "max_seq_length")
    )
    return None if limit is None or limit >= NO_LIMIT else limit


def _called(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    settings = _table(path, values, "processing_kwargs")
    return _table(path, settings, "text") | _table(path, settings, "common")


def _loaded(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    return _table(path, values, "tokenizer_args" if "tokenizer_args" in values else "processor_kwargs")


def _table(path: Path, values: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = values.get(key) or {}
    if not isinstance(table, dict):
        raise CorruptModel(f"{path}: {key} is {table!r}, not an object", remedy="Fetch the model again")
    return table


def _unsupported(path: Path, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{path}: {what}, which is not served",
        remedy="Serve a model without it; of these settings the lengths are obeyed (max_length, model_max_length)",
    )
