"""Files of tokenizers that the library does not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CorruptModel, UnsupportedModel
from penstock.tasks import TaskName
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.tokens import Tokenizer
from tests.runtime.http.serving import write_folder

LATER = {"type": "OfALaterVersion", "option": 1}


def load_with(path: Path, part: str, state: Any) -> Tokenizer:
    """The tokenizer of a folder with another part in its tokenizer.json."""
    folder = write_folder(path, TaskName.FEATURE_EXTRACTION)
    content = json.loads((folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer.json").write_text(json.dumps({**content, part: state}))
    return Tokenizer.load(ModelFolder.open(folder, weights=False))


@pytest.mark.parametrize(
    ("part", "state"),
    [
        ("normalizer", LATER),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}, LATER]}),
        ("pre_tokenizer", LATER),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, LATER]}),
        ("post_processor", LATER),
        ("decoder", LATER),
        ("model", {**LATER, "vocab": {"a": 0}}),
    ],
    ids=str,
)
def test_a_component_of_a_newer_version_is_named(part: str, state: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"has the {part} 'OfALaterVersion', which tokenizers") as caught:
        load_with(tmp_path, part, state)

    assert "newer version" in caught.value.message
    assert "Fetch the model again" not in str(caught.value)


@pytest.mark.parametrize("state", [{"type": "WordPiece", "vocab": {"a": -1}}, 3])
def test_a_damaged_model_is_corrupt(state: Any, tmp_path: Path) -> None:
    with pytest.raises(CorruptModel, match="is not a tokenizer that tokenizers reads"):
        load_with(tmp_path, "model", state)
