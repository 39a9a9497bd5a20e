"""Refusals of docs/reference/models.md: what the error advises is done, and the folder then opens, or the next error is
about the next fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.errors import ModelError
from penstock_runtime.models.folder import ModelFolder
from tests.runtime.models.folders import (
    bare_folder,
    model_folder,
    sentence_folder,
    write_json,
    write_onnx,
    write_onnx_with_weights,
    write_pickle,
)

Change = Callable[[Path], object]
MEAN = {"pooling_mode_mean_tokens": True}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 123\n"


@dataclass(frozen=True)
class Refusal:
    """A folder that is refused, words of the error and of its advice, and what follows the advice."""

    name: str
    make: Change
    error: str
    advice: str
    follow: Change


def save_weights(path: Path) -> None:
    save_file({"a.weight": np.ones((2, 3), np.float32)}, path / "model.safetensors")


def pickled(path: Path) -> None:
    bare_folder(path)
    write_pickle(path / "pytorch_model.bin")


def own_code(path: Path) -> None:
    model_folder(path, auto_map={"AutoModel": "modeling_x.XModel"})
    (path / "modeling_x.py").write_text("raise SystemExit")


def git_lfs_pointer(path: Path) -> None:
    bare_folder(path)
    (path / "model.safetensors").write_text(POINTER)


def truncated(path: Path) -> None:
    model_folder(path)
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-7])


def invalid_json(path: Path) -> None:
    model_folder(path)
    (path / "config.json").write_text('{"model_type": ')


def several_graphs(path: Path) -> None:
    bare_folder(path)
    for name in ("first.onnx", "second.onnx"):
        write_onnx(path / name)


def graph_without_weights(path: Path) -> None:
    bare_folder(path)
    write_onnx_with_weights(path / "model.onnx", "model.onnx_data")
    (path / "model.onnx_data").rename(path.parent / "kept")


def link_that_leaves(path: Path) -> None:
    model_folder(path)
    outside = path.parent / "outside.safetensors"
    (path / "model.safetensors").rename(outside)
    (path / "model.safetensors").symlink_to(outside)


def copied(path: Path) -> None:
    (path / "model.safetensors").unlink()
    shutil.copy(path.parent / "outside.safetensors", path / "model.safetensors")


def adapter(path: Path) -> None:
    bare_folder(path)
    write_json(path / "adapter_config.json", {"base_model_name_or_path": "bert", "peft_type": "LORA"})
    save_file({"lora_A.weight": np.ones((2, 3), np.float32)}, path / "adapter_model.safetensors")


def merged(path: Path) -> None:
    """As `merge_and_unload().save_pretrained()` writes it."""
    (path / "adapter_config.json").unlink()
    (path / "adapter_model.safetensors").unlink()
    save_weights(path)


def foreign_module(path: Path) -> None:
    sentence_folder(path, MEAN, "CNN")


def without_last_module(path: Path) -> None:
    modules = json.loads((path / "modules.json").read_bytes())
    write_json(path / "modules.json", modules[:-1])


def old_layout(path: Path) -> None:
    sentence_folder(path, MEAN)
    modules = json.loads((path / "modules.json").read_bytes())
    modules[0]["path"] = "0_Transformer"
    write_json(path / "modules.json", modules)


def saved_again(path: Path) -> None:
    modules = json.loads((path / "modules.json").read_bytes())
    modules[0]["path"] = ""
    write_json(path / "modules.json", modules)


REFUSALS = (
    Refusal("pickled weights", pickled, "pytorch_model.bin", "safetensors", save_weights),
    Refusal(
        "own code", own_code, "code", "ONNX",
        lambda path: write_onnx(path / "model.onnx"),
    ),
    Refusal("git-lfs pointer", git_lfs_pointer, "git-lfs", "git lfs pull", save_weights),
    Refusal("truncated file", truncated, "truncated", "Fetch the model again", save_weights),
    Refusal("invalid JSON", invalid_json, "config.json", "Fetch the model again", bare_folder),
    Refusal(
        "several ONNX files", several_graphs, "onnx", "model.onnx",
        lambda path: (path / "first.onnx").rename(path / "model.onnx"),
    ),
    Refusal(
        "weights of an ONNX file missing", graph_without_weights, "model.onnx_data", "",
        lambda path: (path.parent / "kept").rename(path / "model.onnx_data"),
    ),
    Refusal("link out of the folder", link_that_leaves, "model.safetensors", "opy", copied),
    Refusal("adapter", adapter, "adapter", "merge_and_unload", merged),
    Refusal("other module", foreign_module, "CNN", "Transformer, Pooling", without_last_module),
    Refusal("old layout", old_layout, "0_Transformer", "save an old one again", saved_again),
)  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=[one.name for one in REFUSALS])
def test_a_folder_opens_after_its_advice_was_followed(refusal: Refusal, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    refusal.make(path)

    with pytest.raises(ModelError) as caught:
        _ = open_all(path)
    refusal.follow(path)

    assert refusal.error in caught.value.message
    assert refusal.advice in caught.value.remedy
    assert open_all(path).labels


def open_all(path: Path) -> ModelFolder:
    """Open a folder, with what is read of it only when a task asks for it."""
    folder = ModelFolder.open(path)
    _ = folder.pooling, folder.normalize, folder.vector_modules
    return folder


def test_a_second_fault_is_named_once_the_first_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "model"
    foreign_module(path)
    (path / "model.safetensors").unlink()
    write_pickle(path / "pytorch_model.bin")

    for words, follow in (("pytorch_model.bin", save_weights), ("CNN", without_last_module)):
        with pytest.raises(ModelError) as caught:
            _ = open_all(path)
        assert words in caught.value.message
        follow(path)

    assert open_all(path).labels
