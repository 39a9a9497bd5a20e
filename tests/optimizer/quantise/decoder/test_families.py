"""Each family's logits on OpenVINO and on the native engine against those of transformers in fp32, through the paged
cache.

The plan in fp32 is held to transformers directly. The native plans round weights, activations and the cache on purpose.
They are held to numpy with the same rounding, and numpy without rounding to transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.errors import CorruptModel, UnsupportedModel
from penstock_optimizer.export import DECODERS, read_decoder
from penstock_optimizer.export.transformer import Decoder
from penstock_optimizer.quantise.decoder.native_file import write_native
from penstock_optimizer.quantise.decoder.openvino_graph import decoder_facts, write_graph
from penstock_optimizer.quantise.decoder.storage import Storage
from penstock_runtime.engines.base import StepEngine
from penstock_runtime.engines.native import decoder_engine
from penstock_runtime.engines.openvino_decoder import EngineOptions, load
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import StepRow
from tests.optimizer.quantise.decoder.random_decoders import exact_logits, native_logits
from tests.optimizer.quantise.decoder.tiny import FAMILIES, VOCABULARY, expected_logits, save_tiny
from tests.runtime.engines.native.programs import needs_library

pytestmark = pytest.mark.parity

LARGEST_DIFFERENCE = 1e-3
LENGTH = 45
"""Tokens: more than a block of the cache, and more than the windows."""


Tokens = NDArray[np.int32]
Logits = NDArray[np.float32]
Case = tuple[StepEngine, list[Tokens], list[Logits]]


@dataclass(frozen=True)
class Family:
    """A tiny model, two texts, and their expected logits."""

    folder: Path
    decoder: Decoder
    texts: list[Tokens]
    expected: list[Logits]


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp("model")
    model = save_tiny(request.param, folder)
    random = np.random.default_rng(1)
    texts = [random.integers(0, VOCABULARY, length).astype(np.int32) for length in (LENGTH, LENGTH - 8)]
    decoder = read_decoder(ModelFolder.open(folder))
    return Family(folder, decoder, texts, [expected_logits(model, text) for text in texts])


@pytest.fixture(scope="module")
def case(family: Family) -> Iterator[Case]:
    """OpenVINO in fp32."""
    path = family.folder / "graph" / "model.xml"
    write_graph(family.decoder, Storage.FP32, path)
    engine = load(path, decoder_facts(family.decoder), EngineOptions(threads=1), blocks=8)
    yield engine, family.texts, family.expected
    engine.close()


def blocks(*numbers: int, tokens: int = LENGTH) -> NDArray[np.int32]:
    """The first of these blocks, enough for this number of tokens."""
    return np.array(numbers[: -(-tokens // 32)], np.int32)


def in_chunks(engine: StepEngine, text: Tokens, ends: Iterable[int]) -> Logits:
    """The logits of all tokens, computed in chunks that end here."""
    parts = [
        engine.step([StepRow(text[begin:end], begin, blocks(7, 1, tokens=end), end - begin)])
        for begin, end in pairwise([0, *ends])
    ]
    return np.concatenate(parts)


def test_a_prompt_in_one_step(case: Case) -> None:
    engine, (text, _), (expected, _) = case
    logits = engine.step([StepRow(text, 0, blocks(5, 2), len(text))])
    assert np.abs(logits - expected).max() < LARGEST_DIFFERENCE


def test_a_prompt_in_chunks_and_then_token_by_token(case: Case) -> None:
    engine, (text, _), (expected, _) = case
    assert np.abs(in_chunks(engine, text, [13, 33, *range(34, LENGTH + 1)]) - expected).max() < LARGEST_DIFFERENCE


def test_every_token_by_itself(case: Case) -> None:
    engine, (text, _), (expected, _) = case
    assert np.abs(in_chunks(engine, text, range(1, LENGTH + 1)) - expected).max() < LARGEST_DIFFERENCE


def test_chunks_and_single_tokens_of_several_sequences_in_one_step(case: Case) -> None:
    engine, (first, second), (expected_first, expected_second) = case
    engine.step([StepRow(first[:20], 0, blocks(0, tokens=20), 0)])
    logits = engine.step(
        [StepRow(first[20:21], 20, blocks(0, tokens=21), 1), StepRow(second[:30], 0, blocks(3, tokens=30), 2)]
    )
    assert np.abs(logits[0] - expected_first[20]).max() < LARGEST_DIFFERENCE
    assert np.abs(logits[1:] - expected_second[28:30]).max() < LARGEST_DIFFERENCE
    logits = engine.step([StepRow(second[30:37], 30, blocks(3, 4), 7), StepRow(first[21:45], 21, blocks(0, 6), 1)])
    assert np.abs(logits[:7] - expected_second[30:37]).max() < LARGEST_DIFFERENCE
    assert np.abs(logits[7] - expected_first[44]).max() < LARGEST_DIFFERENCE


def test_numpy_without_rounding(family: Family) -> None:
    for text, expected in zip(family.texts, family.expected, strict=True):
        assert np.abs(exact_logits(family.decoder, text) - expected).max() < LARGEST_DIFFERENCE


@needs_library
@pytest.mark.parametrize("bits", [8, 4])
def test_the_native_engine_differs_by_its_rounding_only(bits: int, family: Family) -> None:
    (text, other), decoder = family.texts, family.decoder
    path = family.folder / f"native-{bits}" / "model.native"
    write_native(decoder, bits, path)
    engine = decoder_engine.load(path, decoder_facts(decoder), 2, blocks=8)
    try:
        whole = in_chunks(engine, text, [LENGTH])
        by_token = in_chunks(engine, text, range(1, LENGTH + 1))
        row = StepRow(other, 0, blocks(0, 3, tokens=len(other)), len(other))
        in_company = engine.step([StepRow(text[:20], 0, blocks(5, tokens=20), 0), row])
        alone = engine.step([row])
    finally:
        engine.close()
    np.testing.assert_array_equal(whole, by_token)
    np.testing.assert_array_equal(in_company, alone)
    expected = native_logits(decoder, bits, text)
    # tests/runtime/engines/native/test_decoder_engine.py has the reason: numbers half way between two steps.
    difference = np.abs(whole - expected) / expected.std()
    assert difference.mean() < 3e-4
    assert difference.max() < 1e-2


def test_a_step_without_wanted_logits_gives_none(case: Case) -> None:
    engine, (text, _), _ = case
    assert engine.step([StepRow(text[:4], 0, blocks(0, tokens=4), 0)]).shape == (0, VOCABULARY)


def test_another_family_is_refused_with_the_names_of_those_that_are_served(tmp_path: Path) -> None:
    save_tiny("gpt2", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "gpt2"', '"model_type": "mamba"'))
    with pytest.raises(UnsupportedModel, match=r"mamba.*gemma3_text, gpt2, llama"):
        read_decoder(ModelFolder.open(tmp_path))


def test_every_family_that_generates_has_a_tiny_model() -> None:
    import transformers

    tested = {getattr(transformers, kind).model_type for kind, _ in FAMILIES.values()}

    assert tested == set(DECODERS)


def test_a_decoder_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    save_tiny("qwen2", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "qwen2"', '"model_type": "qwen2", "is_causal": false'))
    with pytest.raises(UnsupportedModel, match="its tokens also attend to those after them"):
        read_decoder(ModelFolder.open(tmp_path))


def test_a_scaling_of_rotary_positions_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    save_tiny("llama with linear scaling", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"linear"', '"dynamic"'))
    with pytest.raises(UnsupportedModel, match=r"positions are scaled \(dynamic\)"):
        read_decoder(ModelFolder.open(tmp_path))


def test_a_missing_factor_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    save_tiny("llama with linear scaling", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"factor"', '"other"'))
    with pytest.raises(CorruptModel, match=r"config.json: rope_scaling.factor is None"):
        read_decoder(ModelFolder.open(tmp_path))
