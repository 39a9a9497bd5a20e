"""How long a sequence may be, from the position table and from the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import CorruptModel
from penstock_runtime.models.json_files import positive_number, read_optional

OFFSET_FROM_PADDING = frozenset({
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Types whose first token has position padding id + 1, so that many rows of the table are never used."""

NO_LIMIT = 10**9
"""transformers writes 1e30 for a tokenizer without a limit, some models 1e9."""


def position_limit(path: Path, config: Mapping[str, Any]) -> int | None:
    """Tokens that have a position of their own; None for models without a table (relative positions)."""
    origin = path / "config.json"
    keys = ("max_position_embeddings", "n_positions")
    rows = next((n for key in keys if (n := positive_number(origin, dict(config), key)) is not None), None)
    model_type = str(config.get("model_type"))
    if rows is None or model_type not in OFFSET_FROM_PADDING:
        return rows
    # MPNet ignores pad_token_id here: its padding index is 1 in the code.
    padding = 1 if model_type == "mpnet" else config.get("pad_token_id", 1)
    usable = rows - (padding + 1) if isinstance(padding, int) else 0
    if usable < 1:
        raise CorruptModel(
            f"{origin}: {rows} positions and pad_token_id {padding!r} leave no position for a token",
            remedy="Fetch the model again",
        )
    return usable


def tokenizer_limit(path: Path) -> int | None:
    """`model_max_length` of the tokenizer, or else `max_len`, its older name; None when it has no limit."""
    settings = read_optional(path, "tokenizer_config.json")
    key = "model_max_length" if "model_max_length" in settings else "max_len"
    limit = positive_number(path / "tokenizer_config.json", settings, key)
    return None if limit is None or limit >= NO_LIMIT else limit
