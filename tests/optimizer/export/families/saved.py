"""Small models that transformers 5 saved, with rows and its answers: tests install transformers 4.

A folder has `config.json`, `model.safetensors`, and `answers.safetensors` with the inputs of three rows, the hidden
states and the logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from penstock.tasks import Head
from penstock_optimizer.export import export
from penstock_runtime.models.folder import ModelFolder
from tests.optimizer.export.judge import CLOSE, ENGINE_OF
from tests.optimizer.export.models import MASK_ID, write_tokenizer

Tensors = dict[str, NDArray[Any]]


def saved_model(saved: Path, folder: Path, change: Callable[[Tensors], Tensors], **config: Any) -> ModelFolder:
    """A copy with changed weights and fields of its configuration; None removes a field."""
    folder.mkdir()
    stated = {**json.loads((saved / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in stated.items() if value is not None}))
    save_file(change(load_file(saved / "model.safetensors")), folder / "model.safetensors")
    write_tokenizer(folder)
    return ModelFolder.open(folder)


def assert_answers(folder: ModelFolder, saved: Path, head: Head, out: Path) -> None:
    """Both flavours, each in the engine it is for, answer as transformers 5 did."""
    answers = load_file(saved / "answers.safetensors")
    real = answers["attention_mask"][..., np.newaxis]
    for flavour, engine in ENGINE_OF.items():
        exported = export(folder, head, out / flavour, flavour=flavour)

        assert exported.how == "builder"
        found = engine(exported.path, exported.io)(answers)
        for name in exported.io.outputs:
            expected, scale = answers[name], real if head in {Head.ENCODER, Head.TOKEN} else 1
            if head is Head.MASKED_LM:
                expected = expected[answers["input_ids"] == MASK_ID]
            seen = found[name][..., : expected.shape[-1]]  # a vocabulary may be filled up
            np.testing.assert_allclose(seen * scale, expected * scale, rtol=0, atol=CLOSE)
