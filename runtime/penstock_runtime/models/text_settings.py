"""What sentence-transformers' settings of its transformer say of how texts become tokens, and which output is taken."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import CorruptModel, UnsupportedModel
from penstock_runtime.models.json_files import positive_number, read_optional
from penstock_runtime.models.limits import NO_LIMIT

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
"""What changes tokens when a tokenizer is called, with the values that do not."""

_LOAD = frozenset({
    "add_prefix_space", "additional_special_tokens", "bos_token", "cls_token", "do_lower_case", "eos_token",
    "extra_special_tokens", "mask_token", "model_input_names", "sep_token", "split_special_tokens", "strip_accents",
    "tokenize_chinese_chars", "tokenizer_file", "truncation_side", "unk_token",
})  # fmt: skip
"""What changes tokens when a tokenizer is loaded: nothing where tokenizer_config.json says the same."""

_ALONE = "feature-extraction"
_OUTPUTS = ("last_hidden_state", "logits")


def text_limit(path: Path, values: Mapping[str, Any]) -> int | None:
    """The longest sequence by the settings `values` of the file `path`; None where they state none.

    In the order of sentence-transformers: what the tokenizer is called with, what it is loaded with, `max_seq_length`.

    UnsupportedModel names a setting that would make other tokens, or take another output, than here; CorruptModel for
    one of the wrong type.
    """
    called, loaded = _called(path, values), _loaded(path, values)
    # Of a text that stands alone the first is the only one.
    alone = values.get("transformer_task", _ALONE) == _ALONE
    for key, harmless in _CALL.items():
        if key in called and called[key] not in harmless and not (alone and called[key] == "only_first"):
            raise _unsupported(path, f"processing_kwargs has {key}: {called[key]!r}")
    own = read_optional(path.parent, "tokenizer_config.json") if _LOAD & loaded.keys() else {}
    for key in sorted(_LOAD & loaded.keys()):
        if key not in own or own[key] != loaded[key]:
            raise _unsupported(path, f"processor_kwargs has {key}: {loaded[key]!r}")
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
