"""The native engine of text generation: against numpy on every instruction set, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.errors import ArtefactError
from penstock.manifest import DecoderFacts
from penstock_optimizer.export.transformer import Activation, Decoder, Dense
from penstock_optimizer.quantise.decoder.native_file import packed, write_native
from penstock_runtime.engines.native.decoder_engine import NativeStepEngine, load
from penstock_runtime.engines.native.decoder_file import NativeDecoderFile, ProductPart, read_decoder_file
from penstock_runtime.engines.native.library import Kernels
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import StepRow
from tests.optimizer.quantise.decoder.random_decoders import (
    VOCABULARY,
    facts_of,
    native_logits,
    random_decoder,
    whole_weights,
)
from tests.runtime.engines.native.programs import AVAILABLE, needs_library

pytestmark = needs_library
KERNELS = pytest.mark.parametrize("kernels", AVAILABLE, ids=lambda kernels: kernels.name.lower())
BITS = pytest.mark.parametrize("bits", [8, 4])
POOL = 24
Tokens = NDArray[np.int32]

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases, a head of its own": {"biased": True, "tied": False, "head_size": 24, "turned": 24, "inner": 72},
    "one key head, a window": {"heads": 8, "key_heads": 1, "window": 9, "head_size": 32, "turned": 32},
    "six heads on three": {"hidden": 96, "heads": 6, "key_heads": 3, "head_size": 64, "turned": 64},
    "norms as Gemma": {"normed_heads": True, "normed_outputs": True, "activation": Activation.GELU_TANH, "window": 40},
    "as GPT-2": {"positions": True, "biased": True, "gated": False, "turned": None, "activation": Activation.GELU_TANH},
    "turned in part": {"head_size": 32, "turned": 12, "inner": 160, "activation": Activation.RELU},
    "many inputs": {
        "hidden": 576,
        "heads": 9,
        "key_heads": 9,
        "head_size": 64,
        "turned": 64,
        "inner": 1536,
        "layers": 1,
    },
}


def text(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


def blocks(*numbers: int, tokens: int) -> Tokens:
    """The first of these blocks, enough for this number of tokens."""
    return np.array(numbers[: -(-tokens // 32)], np.int32)


def opened(
    decoder: Decoder, folder: Path, bits: int = 8, kernels: Kernels | None = None, threads: int = 2
) -> NativeStepEngine:
    write_native(decoder, bits, folder / "model.native")
    return load(folder / "model.native", facts_of(decoder), threads, blocks=POOL, kernels=kernels)


@KERNELS
@BITS
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_stored_weights_and_rounded_activations(
    kernels: Kernels, bits: int, shape: str, tmp_path: Path
) -> None:
    decoder, ids = random_decoder(3, **SHAPES[shape]), text(70)
    engine = opened(decoder, tmp_path, bits, kernels)
    try:
        logits = engine.step([StepRow(ids, 0, blocks(5, 2, 9, tokens=70), 70)])
    finally:
        engine.close()
    expected = native_logits(decoder, bits, ids)
    # A number half way between two steps may be rounded the other way in float32, which changes it by 1/32767 of the
    # largest of its token, or in the cache by 1/2048 of itself.
    difference = np.abs(logits - expected) / expected.std()
    assert difference.mean() < 1e-4
    assert difference.max() < 2e-3


@KERNELS
@settings(max_examples=12, deadline=None)
@given(
    inputs=st.sampled_from([32, 64, 160, 320, 512, 544, 1120]),
    outputs=st.sampled_from([32, 64, 96, 352]),
    lines=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 25, 33, 48]),
    bits=st.sampled_from([8, 4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_step_of_any_number_of_lines_has_the_bits_of_single_lines(
    *,
    kernels: Kernels,
    inputs: int,
    outputs: int,
    lines: int,
    bits: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Products of few lines, of many, and of tiles."""
    decoder = random_decoder(seed, hidden=inputs, inner=outputs, layers=1)
    engine = opened(decoder, tmp_path_factory.mktemp("model"), bits, kernels)
    ids = text(lines, seed)
    try:
        together = engine.step([StepRow(ids, 0, blocks(1, 2, tokens=lines), lines)])
        alone = [engine.step([StepRow(ids[at : at + 1], at, blocks(3, 4, tokens=at + 1), 1)])[0] for at in range(lines)]
    finally:
        engine.close()
    np.testing.assert_array_equal(together, np.stack(alone))
    assert np.abs(together).max() > 0


def only_a_product(bits: int, inputs: int, outputs: int, folder: Path) -> tuple[NativeDecoderFile, DecoderFacts]:
    """A decoder whose layer adds nothing and whose normalisation is exact: a token's logits are the head's product with
    numbers of 16 bits, whose magnitudes are those of all tokens, and whose signs are the token's own."""
    random = np.random.default_rng(inputs)
    decoder = replace(random_decoder(1, hidden=inputs, layers=1), head=np.zeros((VOCABULARY, inputs), np.float32))
    write_native(decoder, 8, folder / "model.native")
    file = read_decoder_file(folder / "model.native")
    parts, tensors = file.parts, dict(file.tensors)
    (layer,) = parts.layers
    for nothing in (layer.output, layer.down):
        tensors[nothing.packed] = np.zeros_like(tensors[nothing.packed])
    signs = random.choice([-64, 64], tensors[parts.embeddings.packed].shape).astype(np.int8)
    tensors[parts.embeddings.packed] = signs.view(np.uint8)
    tensors[parts.embeddings.scales] = np.full(parts.embeddings.outputs, 1 / 64, np.float32)
    magnitudes = random.integers(0, 32767, inputs)
    magnitudes[0] = 32767
    tensors[parts.final_norm.weight] = np.float32(2.0**-15) * magnitudes.astype(np.float32)
    assert parts.head is not None
    weights = random.normal(0, 1, (outputs, inputs)).astype(np.float32)
    tensors["head"], tensors["scales"] = packed(weights, bits)
    head = ProductPart(inputs=inputs, outputs=outputs, bits=8 if bits == 8 else 4, packed="head", scales="scales")
    norm = parts.final_norm.model_copy(update={"epsilon": 0.0})
    changed = {"head": head, "final_norm": norm, "embedding_scale": 1.0}
    return NativeDecoderFile(parts.model_copy(update=changed), tensors), facts_of(decoder)


@BITS
@pytest.mark.parametrize("inputs", [32, 96, 512, 544, 1120])
def test_every_instruction_set_gives_the_bits_of_the_exact_sums_of_a_product(
    bits: int, inputs: int, tmp_path: Path
) -> None:
    """Nothing else of a step is rounded, so no instruction set may differ from numpy by a bit."""
    file, facts = only_a_product(bits, inputs, 96, tmp_path)
    signs = whole_weights(file.tensors[file.parts.embeddings.packed], 8) // 64
    magnitudes = (file.tensors[file.parts.final_norm.weight] * 2**15).astype(np.int64)
    weights = whole_weights(file.tensors["head"], bits).astype(np.int64)
    for kernels in AVAILABLE:
        engine = NativeStepEngine(file, facts, blocks=POOL, threads=1, kernels=kernels)
        try:
            for lines in (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 33, 70):
                ids = text(lines, lines)
                logits = engine.step([StepRow(ids, 0, blocks(1, 2, 3, tokens=lines), lines)])
                sums = (signs[ids] * magnitudes) @ weights.T
                expected = sums.astype(np.float32) * (file.tensors["scales"] * np.float32(2.0**-15))
                np.testing.assert_array_equal(logits, expected[:, :VOCABULARY], err_msg=f"{kernels.name}, {lines}")
        finally:
            engine.close()


@pytest.fixture(params=[8, 4])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NativeStepEngine]:
    made = opened(random_decoder(5, window=50), tmp_path, request.param)
    yield made
    made.close()


def in_chunks(engine: NativeStepEngine, ids: Tokens, ends: list[int], numbers: tuple[int, ...]) -> NDArray[np.float32]:
    parts = [
        engine.step([StepRow(ids[begin:end], begin, blocks(*numbers, tokens=end), end - begin)])
        for begin, end in pairwise([0, *ends])
    ]
    return np.concatenate(parts)


def test_a_prompt_gives_the_same_bits_however_it_is_cut(engine: NativeStepEngine) -> None:
    ids = text(130)
    whole = in_chunks(engine, ids, [130], (0, 1, 2, 3, 4))
    for ends in ([1, 2, 40, 130], [31, 32, 33, 64, 128, 130], [*range(1, 131)]):
        np.testing.assert_array_equal(in_chunks(engine, ids, ends, (9, 4, 8, 2, 6)), whole)


@BITS
def test_a_prompt_longer_than_one_call_of_a_product_gives_the_same_bits_in_parts(bits: int, tmp_path: Path) -> None:
    ids, engine = text(300), opened(random_decoder(6, hidden=320, inner=288, layers=1), tmp_path, bits)
    try:
        whole = in_chunks(engine, ids, [300], tuple(range(10)))
        parts = in_chunks(engine, ids, [7, 200, 263, 300], tuple(range(12, 22)))
    finally:
        engine.close()
    np.testing.assert_array_equal(parts, whole)


def test_a_sequence_gives_the_same_bits_in_any_company(engine: NativeStepEngine) -> None:
    texts = [text(length, seed) for seed, length in enumerate((40, 70, 3, 97, 1, 33))]
    homes = [tuple(range(4 * index, 4 * index + 4)) for index in range(len(texts))]
    alone = [in_chunks(engine, ids, [len(ids)], home) for ids, home in zip(texts, homes, strict=True)]
    together = [[] for _ in texts]  # type: list[list[NDArray[np.float32]]]
    done = [0] * len(texts)
    random = np.random.default_rng(1)
    while any(at < len(ids) for at, ids in zip(done, texts, strict=True)):
        rows, which = [], []
        for index, ids in enumerate(texts):
            count = min(int(random.choice([0, 1, 1, 5, 20])), len(ids) - done[index])
            if count:
                end = done[index] + count
                home = homes[len(texts) - 1 - index]
                rows.append(StepRow(ids[done[index] : end], done[index], blocks(*home, tokens=end), count))
                which.append(index)
                done[index] = end
        if not rows:
            continue
        logits = engine.step(rows)
        for index, row in zip(which, rows, strict=True):
            together[index].append(logits[: row.logits])
            logits = logits[row.logits :]
    for expected, found in zip(alone, together, strict=True):
        np.testing.assert_array_equal(np.concatenate(found), expected)


@KERNELS
@BITS
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_token_whose_numbers_are_not_finite_has_no_logits_nor_have_those_that_see_it(
    kernels: Kernels, bits: int, number: float, tmp_path: Path
) -> None:
    decoder = random_decoder(9, positions=True, biased=True, gated=False, turned=None, activation=Activation.GELU_TANH)
    assert decoder.positions is not None
    ids, engine = text(70), opened(decoder, tmp_path, bits, kernels)
    clean = in_chunks(engine, ids, [70], (0, 1, 2))
    engine.close()
    table = decoder.positions.copy()
    table[40, 3] = number
    engine = opened(replace(decoder, positions=table), tmp_path, bits, kernels)
    try:
        for ends in ([70], [30, 45, 70], [40, 41, 42, 70]):
            logits = in_chunks(engine, ids, ends, (0, 1, 2))
            np.testing.assert_array_equal(logits[:40], clean[:40])
            assert np.isnan(logits[40:].max(axis=1)).all()
        # Numbers that another sequence has left in its blocks are not seen.
        np.testing.assert_array_equal(in_chunks(engine, ids[:35], [20, 33, 35], (1, 0)), clean[:35])
    finally:
        engine.close()


@KERNELS
def test_values_between_two_float16_numbers_go_to_the_even_one(kernels: Kernels, tmp_path: Path) -> None:
    """The first token attends to itself alone. Its values are constants; the output compares them in pairs."""
    step = np.float32(2.0**-10)
    between, even = [1 + step / 2, 1 + 3 * step / 2], [1, 1 + 2 * step]
    values = np.repeat(np.array([between[0], even[0], between[1], even[1]], np.float32), 4)
    output = np.zeros((64, 64), np.float32)
    for row, kind in ((1, 0), (2, 2)):
        pairs = np.repeat(np.eye(4)[kind] - np.eye(4)[kind + 1], 4)
        output[row] = np.outer([100, 100, -100, -100], pairs).reshape(-1)
    made = random_decoder(0, layers=1, tied=False)
    layer = replace(
        made.layers[0],
        value=Dense(np.zeros((32, 64), np.float32), np.concatenate([values, -values])),
        output=Dense(output, None),
        down=Dense(np.zeros_like(made.layers[0].down.weight), None),
    )
    table = np.zeros_like(made.embeddings)
    table[:, 0] = 1
    head = np.eye(*made.embeddings.shape, dtype=np.float32)
    decoder = replace(made, layers=(layer,), embeddings=table, embedding_scale=1.0, head=head)
    ids = text(1)

    with closing(opened(decoder, tmp_path, kernels=kernels)) as engine:
        (logits,) = in_chunks(engine, ids, [1], (0,))

    assert np.abs(logits[1:3]).max() < 0.05 * logits[0]


def test_any_number_of_threads_gives_the_same_bits(tmp_path: Path) -> None:
    ids, found = text(90), []
    for threads in (1, 2, 5):
        made = opened(random_decoder(8, hidden=160, inner=320), tmp_path, threads=threads)
        found.append(in_chunks(made, ids, [60, 61, 90], (3, 2, 1)))
        made.close()
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_only_wanted_logits_are_given(engine: NativeStepEngine) -> None:
    first, second = text(20), text(30, 1)
    assert engine.step([StepRow(first, 0, blocks(0, tokens=20), 0)]).shape == (0, VOCABULARY)
    logits = engine.step([StepRow(first, 0, blocks(0, tokens=20), 1), StepRow(second, 0, blocks(1, tokens=30), 2)])
    assert logits.shape == (3, VOCABULARY)
    np.testing.assert_array_equal(logits[1:], in_chunks(engine, second, [30], (3,))[-2:])


@pytest.mark.parametrize(
    "row",
    [
        StepRow(np.array([VOCABULARY], np.int32), 0, np.array([0], np.int32), 1),
        StepRow(np.array([-1], np.int32), 0, np.array([0], np.int32), 1),
        StepRow(np.array([1], np.int32), 0, np.array([POOL], np.int32), 1),
        StepRow(np.array([1], np.int32), POOL * 32, np.zeros(POOL + 1, np.int32), 1),
    ],
    ids=["a token beyond the vocabulary", "a negative token", "a block beyond the pool", "a position beyond the pool"],
)
def test_numbers_outside_of_their_range_are_an_error(engine: NativeStepEngine, row: StepRow) -> None:
    with pytest.raises(InferenceFailed, match="does not exist"):
        engine.step([row])


def test_a_cut_or_foreign_file_is_refused(tmp_path: Path) -> None:
    decoder = random_decoder(1)
    write_native(decoder, 8, tmp_path / "model.native")
    content = (tmp_path / "model.native").read_bytes()
    (tmp_path / "cut.native").write_bytes(content[:-4096])
    with pytest.raises(ArtefactError, match="cut short"):
        load(tmp_path / "cut.native", facts_of(decoder), 1, blocks=2)
    (tmp_path / "odd.native").write_bytes(content.replace(b'"heads":4', b'"heads":3'))
    with pytest.raises(ArtefactError, match="do not fit together"):
        load(tmp_path / "odd.native", facts_of(decoder), 1, blocks=2)
    (tmp_path / "old.native").write_bytes(content.replace(b'{"version":2,', b'{"version":1,'))
    with pytest.raises(ArtefactError, match="wrong at version"):
        load(tmp_path / "old.native", facts_of(decoder), 1, blocks=2)
    (tmp_path / "bits.native").write_bytes(content.replace(b'"bits":8', b'"bits":4', 1))
    with pytest.raises(ArtefactError, match="not"):
        load(tmp_path / "bits.native", facts_of(decoder), 1, blocks=2)
    with pytest.raises(ArtefactError, match="of another model"):
        load(tmp_path / "model.native", facts_of(decoder).model_copy(update={"vocabulary": 7}), 1, blocks=2)
