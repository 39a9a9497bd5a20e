"""The sizes that the caches report, compared with the allocated memory: MiniLM's tokenizer, made-up outputs."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from penstock.manifest import Axes, GraphIO
from penstock.tasks import TaskName
from penstock_runtime.engines.base import EngineFacts, Streams, Threads
from penstock_runtime.engines.thread_streams import ThreadStreams
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Batch, Outputs
from penstock_runtime.serving.cache import BoundedCache, memory_size
from penstock_runtime.serving.loaded_model import LoadedModel
from penstock_runtime.serving.predictor import MANY_ROWS, Predictor
from penstock_runtime.settings import CacheSettings
from penstock_runtime.tasks import make_task
from penstock_runtime.tasks.embeddings.feature_extraction import TokenIds
from tests.runtime import minilm
from tests.runtime.batching.echo import plan
from tests.runtime.serving.small import SumTask, small_model

Ask = Callable[[random.Random], Any]

LIMIT = 10_000_000
JUDGED_BYTES = 300_000
"""Of what is remembered: enough for differences between single requests to level out."""
ENOUGH, TOO_MUCH = 0.6, 1.2
"""Of the size that a cache reports. Less than all where values share what each is counted with."""

FEATURES, CLASSES = TaskName.FEATURE_EXTRACTION, TaskName.TEXT_CLASSIFICATION
ENTITIES, ANSWERS, MASKS = TaskName.TOKEN_CLASSIFICATION, TaskName.QUESTION_ANSWERING, TaskName.FILL_MASK
RANKS = TaskName.TEXT_RANKING
ARCHITECTURES = {
    FEATURES: ("BertModel", {"last_hidden_state": Axes.TOKENS}),
    CLASSES: ("BertForSequenceClassification", {"logits": Axes.ROW}),
    RANKS: ("BertForSequenceClassification", {"logits": Axes.ROW}),
    ENTITIES: ("BertForTokenClassification", {"logits": Axes.TOKENS}),
    ANSWERS: ("BertForQuestionAnswering", {"start_logits": Axes.TOKENS, "end_logits": Axes.TOKENS}),
    MASKS: ("BertForMaskedLM", {"logits": Axes.TOKENS}),
}
SENTIMENTS = ("NEGATIVE", "POSITIVE")
EMOTIONS = tuple(f"emotion {number}" for number in range(28))
TAGS = ("O", "B-PER", "I-PER", "B-LOC")


@dataclass(eq=False)
class RandomEngine:
    """Outputs of the right shapes."""

    outputs: Mapping[str, Axes]
    width: int
    facts: EngineFacts = field(default_factory=lambda: EngineFacts("random", "1", Threads(1, 1), "f32"))

    def run(self, batch: Batch) -> Outputs:
        rows, tokens = batch.input_ids.shape
        chance = np.random.default_rng(int(batch.input_ids.sum()))
        found = {}
        for name, axes in self.outputs.items():
            shape = (rows, tokens) if axes is Axes.TOKENS else (rows,)
            shape = shape if name.endswith("_logits") else (*shape, self.width)
            found[name] = chance.normal(0, 5, shape).astype(np.float32)
        return found

    run_wide = run
    run_widening = run

    def start_streams(self) -> Streams:
        return ThreadStreams(self)

    def close(self) -> None:
        pass


def model(name: TaskName, labels: Sequence[str], path: Path) -> LoadedModel:
    """A head of random answers on MiniLM's tokenizer."""
    architecture, outputs = ARCHITECTURES[name]
    for file in minilm.folder().path.iterdir():
        if file.name.startswith(("tokenizer", "vocab", "special_tokens")):
            shutil.copy(file, path / file.name)
    config = {**minilm.folder().config, "architectures": [architecture], "id2label": dict(enumerate(labels))}
    (path / "config.json").write_text(json.dumps(config))
    width = {FEATURES: int(config["hidden_size"]), MASKS: int(config["vocab_size"])}.get(name, len(labels))
    return LoadedModel(
        task=make_task(name, ModelFolder.open(path, weights=False)),
        engine=RandomEngine(outputs, width),
        plan=plan(rows=1),
        io=GraphIO(inputs=("input_ids", "attention_mask"), outputs=dict(outputs)),
    )


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choice(minilm.WORDS) for _ in range(count))


async def share_held(predictor: Predictor, cache: str, asked: Sequence[bytes], parameters: Mapping[str, Any]) -> float:
    """Of the size that the cache reports, after these requests one by one; it stays under its limit."""
    wanted = orjson.dumps(parameters)
    for body in asked[:3]:
        await predictor.predict(orjson.loads(body), orjson.loads(wanted))
    gc.collect()
    tracemalloc.start()
    try:
        before: int = predictor.facts()["caches"][cache]["bytes"]
        counted = before
        for body in asked[3:]:
            # Parsed here, as from a request, so that only the cache holds references to it.
            await predictor.predict(orjson.loads(body), orjson.loads(wanted))
            counted = predictor.facts()["caches"][cache]["bytes"]
            if counted - before > JUDGED_BYTES:
                break
        # So that no thread holds a reference to what it has worked on last.
        await predictor.drain()
        await asyncio.get_running_loop().shutdown_default_executor()
        return freed_bytes(predictor._answers if cache == "answers" else predictor._prepared) / (counted - before)
    finally:
        tracemalloc.stop()


def freed_bytes(cache: BoundedCache[Any] | None) -> int:
    """Memory that the cache alone held since tracing began.

    Not all that was allocated since then: the process, which has run other tests, allocates for other purposes, too.
    """
    assert cache is not None
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    cache.clear()
    gc.collect()
    return held - tracemalloc.get_traced_memory()[0]


def judged(loaded: LoadedModel, caches: CacheSettings, ask: Ask, parameters: Mapping[str, Any], *, count: int) -> float:
    """As `share_held`, of distinct requests."""
    chance = random.Random(5)
    asked = [orjson.dumps(ask(chance)) for _ in range(count)]

    async def main() -> float:
        predictor = Predictor(loaded, caches=caches)
        cache = "answers" if caches.answer_cache_bytes else "tokens"
        return await share_held(predictor, cache, asked, parameters)

    return asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "labels", "ask", "parameters"),
    [
        (FEATURES, SENTIMENTS, lambda chance: words(chance, 8), {"pooling": "mean"}),
        (
            FEATURES,
            SENTIMENTS,
            lambda chance: words(chance, 8),
            {"pooling": "mean", "dimensions": 8, "normalize": False},
        ),
        (FEATURES, SENTIMENTS, lambda chance: [words(chance, 8) for _ in range(20)], {"pooling": "mean"}),
        (FEATURES, SENTIMENTS, lambda chance: words(chance, 8), {"pooling": "none"}),
        (CLASSES, SENTIMENTS, lambda chance: words(chance, 8), {}),
        (CLASSES, EMOTIONS, lambda chance: words(chance, 8), {"top_k": 28}),
        (CLASSES, EMOTIONS, lambda chance: [words(chance, 3) for _ in range(MANY_ROWS + 1)], {}),
        (ENTITIES, TAGS, lambda chance: words(chance, 60), {}),
        (ENTITIES, TAGS, lambda chance: words(chance, 8), {"aggregation_strategy": "simple"}),
        (ANSWERS, SENTIMENTS, lambda chance: {"question": words(chance, 5), "context": words(chance, 100)}, {}),
        (
            ANSWERS,
            SENTIMENTS,
            lambda chance: {"question": words(chance, 5), "context": words(chance, 100)},
            {"top_k": 10},
        ),
        (MASKS, SENTIMENTS, lambda chance: f"{words(chance, 8)} 大きな町 [MASK]", {"top_k": 20}),
    ],
)
def test_the_counted_size_of_answers_covers_their_memory(
    name: TaskName, labels: Sequence[str], ask: Ask, parameters: Mapping[str, Any], tmp_path: Path
) -> None:
    share = judged(model(name, labels, tmp_path), CacheSettings(answer_cache_bytes=LIMIT), ask, parameters, count=900)

    assert ENOUGH < share < TOO_MUCH


@pytest.mark.parametrize(
    ("name", "labels", "ask", "parameters"),
    [
        (ENTITIES, TAGS, lambda chance: words(chance, 100), {}),
        (ENTITIES, TAGS, lambda chance: words(chance, 5), {}),
        (ENTITIES, TAGS, lambda chance: [words(chance, 5) for _ in range(20)], {}),
        (ENTITIES, TAGS, lambda chance: words(chance, 800), {"aggregation_strategy": "simple", "stride": 16}),
        (ANSWERS, SENTIMENTS, lambda chance: {"question": words(chance, 5), "context": words(chance, 100)}, {}),
        (ANSWERS, SENTIMENTS, lambda chance: {"question": words(chance, 5), "context": words(chance, 800)}, {}),
    ],
)
def test_the_counted_size_of_tokens_with_spans_covers_their_memory(
    name: TaskName, labels: Sequence[str], ask: Ask, parameters: Mapping[str, Any], tmp_path: Path
) -> None:
    share = judged(model(name, labels, tmp_path), CacheSettings(token_cache_bytes=LIMIT), ask, parameters, count=150)

    assert ENOUGH < share < TOO_MUCH


@pytest.mark.parametrize(
    ("name", "ask", "parameters"),
    [
        (FEATURES, lambda chance: words(chance, 100), {}),
        (FEATURES, lambda chance: [words(chance, 1) for _ in range(200)], {}),
        (FEATURES, lambda chance: [f"{words(chance, 1)} é" for _ in range(200)], {}),
        (CLASSES, lambda chance: [f"{words(chance, 1)} é" for _ in range(200)], {}),
        (CLASSES, lambda chance: [{"text": words(chance, 1), "text_pair": words(chance, 1)} for _ in range(200)], {}),
        (RANKS, lambda chance: [[words(chance, 1), words(chance, 1)] for _ in range(200)], {}),
        (RANKS, lambda chance: {"query": words(chance, 1), "texts": [words(chance, 1) for _ in range(200)]}, {}),
        (MASKS, lambda chance: f"{words(chance, 3)} [MASK]", {"targets": minilm.WORDS}),
    ],
)
def test_the_counted_size_of_other_tokens_covers_their_memory(
    name: TaskName, ask: Ask, parameters: Mapping[str, Any], tmp_path: Path
) -> None:
    labels = SENTIMENTS[:1] if name is RANKS else SENTIMENTS
    share = judged(model(name, labels, tmp_path), CacheSettings(token_cache_bytes=LIMIT), ask, parameters, count=60)

    # A table of words has one integer of each kind for all texts.
    assert 0.3 < share < TOO_MUCH


def test_token_ids_beyond_the_models_limit_are_counted(tmp_path: Path) -> None:
    async def main() -> int:
        predictor = Predictor(model(FEATURES, SENTIMENTS, tmp_path), caches=CacheSettings(token_cache_bytes=LIMIT))
        await predictor.predict(TokenIds([[5000] * 10_000], single=True), {})
        await predictor.drain()
        counted: int = predictor.facts()["caches"]["tokens"]["bytes"]
        return counted

    assert asyncio.run(main()) > 10_000 * (8 + 28)


def test_answers_of_many_rows_are_measured_in_another_thread() -> None:
    class Watched(list[Any]):
        """A list that records its readers."""

        read_in_loop: bool | None = None

        def __iter__(self) -> Iterator[Any]:
            try:
                asyncio.get_running_loop()
                self.read_in_loop = True
            except RuntimeError:
                self.read_in_loop = False
            return super().__iter__()

    class Lists(SumTask):
        def assemble(self, prepared: Any, reduced: Sequence[Any]) -> Any:
            return Watched(reduced)

    async def main() -> list[Any]:
        predictor = Predictor(small_model(task=Lists()), caches=CacheSettings(answer_cache_bytes=LIMIT))
        answers = [await predictor.predict([1] * count, {}) for count in (MANY_ROWS, MANY_ROWS + 1)]
        assert predictor.facts()["caches"]["answers"]["entries"] == 2
        await predictor.drain()
        return [answer.value.read_in_loop for answer in answers]

    assert asyncio.run(main()) == [True, False]


@pytest.mark.parametrize(
    "make",
    [
        lambda one: {"scores": [number / one for number in range(500)], "indices": list(range(500, 900))},
        lambda one: [None, True, 5, f"text {one}", (f"text {one + 1}", one / 7), [], {}],
        lambda one: np.full((10, 384), one, dtype=np.float32)[np.newaxis],
        lambda one: [np.full(384, one, dtype=np.float32)[:8] for _ in range(20)],
        lambda one: [f"{one} " + text for text in ("größer " * 20, "町" * 50, "🚰" * 30)],
    ],
)
def test_the_estimated_size_of_a_value_is_its_allocated_memory(make: Callable[[int], Any]) -> None:
    make(1000)
    gc.collect()
    tracemalloc.start()
    try:
        # Serialised once, as answers are.
        value = [make(1000 + number) for number in range(50)]
        orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert ENOUGH < held / memory_size(value) < TOO_MUCH
