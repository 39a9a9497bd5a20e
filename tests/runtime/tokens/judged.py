"""Folders with unusual tokenizers, opened by us and by the reference, `AutoTokenizer`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from penstock_runtime.tokens import Tokenizer
from tests.runtime.tasks.families import Family, tokenizer_of
from tests.runtime.tasks.texts import HARD, MORE

TEXTS = (
    *HARD.values(),
    *MORE,
    "Zoë Müller, CAFÉ naïve São 東京",
    " a day",
    "a <mask> b<mask>c [MASK] d",
    "A<S>B</s>c",
    "<extra> a <extra>b<EXTRA> [NEW]  new york",
)
FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

Change = Callable[[dict[str, Any]], None]


def write(family: Family, path: Path, config: dict[str, Any], *changes: Change, **files: dict[str, Any]) -> Path:
    """The family's tokenizer.json, changed, with a tokenizer_config.json of `config` and `files` by their stems. An
    empty file is none."""
    backend = json.loads(tokenizer_of(family).backend_tokenizer.to_str())
    backend |= {"truncation": None, "padding": None}
    for change in changes:
        change(backend)
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(backend))
    (path / "config.json").write_text(json.dumps({"model_type": family.name} | family.sizes))
    for name in FILES:
        (path / name).unlink(missing_ok=True)
        if content := ({"tokenizer_config": config} | files).get(name.removesuffix(".json")):
            (path / name).write_text(json.dumps(content))
    return path


def check(path: Path, file: str = "tokenizer.json", *, roles: bool = True, decodes: bool = True) -> None:
    """Ids, offsets and decoded texts, added tokens and special ones are those of transformers."""
    judge = transformers.AutoTokenizer.from_pretrained(path)
    ours = Tokenizer.open(path, path / file, json.loads((path / "config.json").read_bytes()))
    assert {number: repr(token) for number, token in ours.backend.get_added_tokens_decoder().items()} == {
        number: repr(token) for number, token in judge.added_tokens_decoder.items()
    }
    if roles:
        assert (ours.cls_id, ours.pad_id, ours.unk_id) == (judge.cls_token_id, judge.pad_token_id, judge.unk_token_id)
    # Without a mask of its own no pipeline works; one that texts may have is taken.
    assert judge.mask_token_id in {ours.mask_id, None}
    for text in TEXTS:
        expected = judge(text, add_special_tokens=False, return_offsets_mapping=True)
        pieces = ours.split([text], offsets=True)[0]
        assert (pieces.ids, pieces.offsets) == (expected["input_ids"], expected["offset_mapping"]), text
        assert ours.split([text])[0].ids == expected["input_ids"], text
        row = ours.single.row(pieces.ids).ids
        assert row == judge(text)["input_ids"], text
        for skip in (True, False) if decodes else ():
            assert ours.decode([row], skip_special=skip) == [judge.decode(row, skip_special_tokens=skip)], text
