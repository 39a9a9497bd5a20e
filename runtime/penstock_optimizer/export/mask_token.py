"""Which token id stands for a mask, as the model's tokenizer files say."""

from __future__ import annotations

from typing import Any

from penstock.errors import CorruptModel, UnsupportedModel
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.json_files import read_object, read_optional


def mask_token_id(folder: ModelFolder) -> int:
    """UnsupportedModel when the tokenizer has no mask token, CorruptModel when its vocabulary lacks it."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        mask = _text((read_optional(folder.path, name) or {}).get("mask_token"))
        if mask:
            break
    else:
        raise UnsupportedModel(
            f"{folder.path} names no mask_token in tokenizer_config.json or special_tokens_map.json",
            remedy="Fill-mask needs a masked language model; use another task for this one",
        )
    tokenizer = read_object(folder.tokenizer.parent, folder.tokenizer.name)
    for token in tokenizer.get("added_tokens") or []:
        if isinstance(token, dict) and token.get("content") == mask and isinstance(token.get("id"), int):
            return int(token["id"])
    raise CorruptModel(
        f"{folder.tokenizer} has no token {mask!r}, which tokenizer_config.json calls the mask token",
        remedy="Take tokenizer.json and tokenizer_config.json from the same revision of the model",
    )


def _text(value: Any) -> str:
    """Tokens stand in those files as strings, or as objects with a `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
