"""Each family's logits on OpenVINO against those of transformers in fp32, through the paged cache."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.errors import CorruptModel, UnsupportedModel
from penstock_optimizer.generation.decoder_families import read_decoder
from penstock_optimizer.generation.decoder_graph import decoder_facts, write_graph
from penstock_optimizer.generation.weights import Storage
from penstock_runtime.generation.engine import Row, StepEngine
from penstock_runtime.generation.openvino_engine import EngineOptions, load
from penstock_runtime.models.folder import ModelFolder
from tests.optimizer.generation.tiny import FAMILIES, VOCABULARY, expected_logits, save_tiny

pytestmark = pytest.mark.parity

LARGEST_DIFFERENCE = 1e-3
LENGTH = 45
"""Tokens: more than a block of the cache, and more than the windows."""


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[StepEngine, list[NDArray[np.int32]], list[NDArray[np.float32]]]:
    """An engine with a tiny model, two texts, and their expected logits."""
    folder = tmp_path_factory.mktemp("model")
    model = save_tiny(request.param, folder)
    decoder = read_decoder(ModelFolder.open(folder))
    write_graph(decoder, Storage.FP32, folder / "graph" / "model.xml")
    engine = load(folder / "graph" / "model.xml", decoder_facts(decoder), EngineOptions(threads=1), blocks=8)
    random = np.random.default_rng(1)
    texts = [random.integers(0, VOCABULARY, length).astype(np.int32) for length in (LENGTH, LENGTH - 8)]
    return engine, texts, [expected_logits(model, text) for text in texts]


def blocks(*numbers: int, tokens: int = LENGTH) -> NDArray[np.int32]:
    """The first of these blocks, enough for this number of tokens."""
    return np.array(numbers[: -(-tokens // 32)], np.int32)


def test_a_prompt_in_one_step(case: tuple[StepEngine, list[NDArray[np.int32]], list[NDArray[np.float32]]]) -> None:
    engine, (text, _), (expected, _) = case
    logits = engine.step([Row(text, 0, blocks(5, 2), len(text))])
    assert np.abs(logits - expected).max() < LARGEST_DIFFERENCE


def test_a_prompt_in_chunks_and_then_token_by_token(
    case: tuple[StepEngine, list[NDArray[np.int32]], list[NDArray[np.float32]]],
) -> None:
    engine, (text, _), (expected, _) = case
    ends = [0, 13, 33, *range(34, LENGTH + 1)]
    logits = [
        engine.step([Row(text[begin:end], begin, blocks(7, 1, tokens=end), end - begin)])
        for begin, end in pairwise(ends)
    ]
    assert np.abs(np.concatenate(logits) - expected).max() < LARGEST_DIFFERENCE


def test_chunks_and_single_tokens_of_several_sequences_in_one_step(
    case: tuple[StepEngine, list[NDArray[np.int32]], list[NDArray[np.float32]]],
) -> None:
    engine, (first, second), (expected_first, expected_second) = case
    engine.step([Row(first[:20], 0, blocks(0, tokens=20), 0)])
    logits = engine.step([Row(first[20:21], 20, blocks(0, tokens=21), 1), Row(second[:30], 0, blocks(3, tokens=30), 2)])
    assert np.abs(logits[0] - expected_first[20]).max() < LARGEST_DIFFERENCE
    assert np.abs(logits[1:] - expected_second[28:30]).max() < LARGEST_DIFFERENCE
    logits = engine.step([Row(second[30:37], 30, blocks(3, 4), 7), Row(first[21:45], 21, blocks(0, 6), 1)])
    assert np.abs(logits[:7] - expected_second[30:37]).max() < LARGEST_DIFFERENCE
    assert np.abs(logits[7] - expected_first[44]).max() < LARGEST_DIFFERENCE


def test_a_step_without_wanted_logits_gives_none(
    case: tuple[StepEngine, list[NDArray[np.int32]], list[NDArray[np.float32]]],
) -> None:
    engine, (text, _), _ = case
    assert engine.step([Row(text[:4], 0, blocks(0, tokens=4), 0)]).shape == (0, VOCABULARY)


def test_another_family_is_refused_with_the_names_of_those_that_are_served(tmp_path: Path) -> None:
    save_tiny("gpt2", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "gpt2"', '"model_type": "mamba"'))
    with pytest.raises(UnsupportedModel, match=r"mamba.*gemma3_text, gpt2, llama"):
        read_decoder(ModelFolder.open(tmp_path))


def test_a_scaling_of_rotary_positions_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    save_tiny("llama with linear scaling", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"linear"', '"yarn"'))
    with pytest.raises(UnsupportedModel, match="scaled by 'yarn'"):
        read_decoder(ModelFolder.open(tmp_path))


def test_a_missing_factor_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    save_tiny("llama with linear scaling", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"factor"', '"other"'))
    with pytest.raises(CorruptModel, match=r"config.json: rope_scaling has the factor None"):
        read_decoder(ModelFolder.open(tmp_path))
