"""Chooses the requests that calibrate and judge, and judges a candidate with the tasks and the engine that serve: its
answers alone, and whether batching changes them.

Requests are Penstock's texts and the endpoint's, in the form of its task, no labels. Calibration and judging sets share
no text. Both have every length, from one token to more than the model takes, since the range of an activation and the
effect of rounding depend on it: very short texts have other outliers than long ones.

In a batch, each request must get the answer that it would get alone. Dynamic int8 breaks this: the scale of its
activations comes from the whole batch. Static and fp32 graphs keep it, if a row's numbers are summed in the same order
whatever the other rows are; otherwise the last bits change, and rounding to int8 sometimes makes that a step of
its grid, which every later layer enlarges.

The batches are those that the runtime's batch policy makes of the judging rows.
"""

from __future__ import annotations

import ast
import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from itertools import cycle, islice
from typing import Any, TypeVar

import numpy as np

from penstock.manifest import GraphIO, Metric, Verdict
from penstock.recipe import BF16_REST, LARGEST_BATCH_TOKENS, LARGEST_PADDING_SHARE, Batching, Precision, Recipe
from penstock.resources.endpoint import AccuracyBudget
from penstock.tasks import TaskName
from penstock_optimizer.guard.judge import ObservedAnswer, SampleRequest, judge
from penstock_runtime.batching.queue import BatchPolicy, RowQueue
from penstock_runtime.engines.base import Engine
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.errors import InferenceFailed, InvalidInput
from penstock_runtime.rows import Outputs, Row, run_rows
from penstock_runtime.tasks.base import Judged, JudgedWith, Prepared, Task

T = TypeVar("T")

CANDIDATES_PER_QUERY = 5
"""Number of texts in each ranking or similarity request."""
TOGETHER = 4
"""Number of themes that make a text of more than 512 tokens."""
LABELS = ("travel", "business", "cooking", "science", "sport", "technology", "law")
ENTITY_LABELS = ("person", "organization", "place", "date", "product", "animal")
TOP_MASKS = 10
STRATA = ((8, 0.30), (32, 0.35), (128, 0.25), (None, 0.10))
"""Length classes: upper end in tokens (the last one is open) and share. Few texts are long, since each costs as much as
dozens of short ones and averages its errors out."""
CALIBRATION_ROWS = 128
JUDGING_SAMPLES = 240


@dataclass(frozen=True)
class Theme:
    """Sentences about one subject, and questions that they answer."""

    questions: tuple[str, ...]
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """Texts to make requests from. Two corpora of one `split` share no text."""

    themes: tuple[Theme, ...]
    texts: tuple[str, ...]
    """Separate texts: short, foreign, hostile, and the endpoint's."""

    def singles(self) -> tuple[str, ...]:
        """All texts, short and long: each of `texts`; of each theme its sentences, the first few together, and all
        together; and several themes together."""
        joined: list[str] = []
        for theme in self.themes:
            joined += [*theme.sentences, " ".join(theme.sentences[:3]), " ".join(theme.sentences)]
        for start in range(0, len(self.themes), TOGETHER):
            joined.append(" ".join(part for theme in self.themes[start : start + TOGETHER] for part in theme.sentences))
        return (*self.texts, *joined)


@cache
def own_corpus() -> Corpus:
    """The texts that come with Penstock."""
    themes = []
    for block in _lines("themes.txt").split("\n\n"):
        lines = [line for line in block.splitlines() if line]
        questions = tuple(line[2:] for line in lines if line.startswith("? "))
        sentences = tuple(line for line in lines if not line.startswith("? "))
        if sentences:
            themes.append(Theme(questions, sentences))
    texts = [line for name in ("short.txt", "languages.txt") for line in _lines(name).splitlines() if line]
    texts += [_literal(line) for line in _lines("hostile.txt").splitlines() if line]
    return Corpus(tuple(themes), tuple(texts))


def _lines(name: str) -> str:
    """One of the package's text files, without the comment at its head."""
    text = (files("penstock_optimizer.guard") / "texts" / name).read_text(encoding="utf-8")
    return "\n".join(line for line in text.split("\n") if not line.startswith("# ")).strip("\n")


def _literal(line: str) -> str:
    """Evaluate a string literal, which may be multiplied by a number."""
    text, times, count = line.rpartition('" * ')
    return str(ast.literal_eval(text + '"')) * int(count) if times else str(ast.literal_eval(line))


def split(corpus: Corpus, own_texts: Sequence[str] = ()) -> tuple[Corpus, Corpus]:
    """A corpus for calibration and one for judging, without a common text: split by hash, so that it does not depend on
    the order or on other texts. `own_texts` are the endpoint's, divided in the same way. A third of the themes and of
    the texts calibrates."""
    texts = list(dict.fromkeys([*corpus.texts, *own_texts]))
    calibrates = {text for text in texts if _hash(text) % 3 == 0}
    themes = sorted(corpus.themes, key=lambda theme: _hash(theme.sentences[0]))
    third = len(themes) // 3
    return (
        Corpus(tuple(themes[:third]), tuple(text for text in texts if text in calibrates)),
        Corpus(tuple(themes[third:]), tuple(text for text in texts if text not in calibrates)),
    )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:8], "big")


def samples(task: TaskName, corpus: Corpus, *, mask: str = "[MASK]") -> tuple[SampleRequest, ...]:
    """Make requests of a task from a corpus. `mask` is the tokenizer's mask token (fill-mask only)."""
    return _SAMPLES[task](corpus, mask)


def _single(corpus: Corpus, _mask: str) -> tuple[SampleRequest, ...]:
    return tuple(SampleRequest(text) for text in corpus.singles())


def _similarity(corpus: Corpus, _mask: str) -> tuple[SampleRequest, ...]:
    return tuple(
        SampleRequest({"source_sentence": query, "sentences": candidates}) for query, candidates in _queries(corpus)
    )


def _ranking(corpus: Corpus, _mask: str) -> tuple[SampleRequest, ...]:
    return tuple(
        SampleRequest({"query": query, "texts": candidates}, {"raw_scores": True})
        for query, candidates in _queries(corpus)
    )


def _queries(corpus: Corpus) -> list[tuple[str, list[str]]]:
    """Questions with sentences of their theme and of other themes, and texts with other texts; all lengths."""
    result = []
    others = cycle(corpus.singles())
    for theme in corpus.themes:
        for index, question in enumerate(theme.questions):
            near = [theme.sentences[(index + step) % len(theme.sentences)] for step in (0, 3)]
            result.append((question, [*near, " ".join(theme.sentences[:4]), *islice(others, CANDIDATES_PER_QUERY - 3)]))
        result.append((theme.sentences[0], [" ".join(theme.sentences), *islice(others, CANDIDATES_PER_QUERY - 1)]))
    result += [(text, list(islice(others, CANDIDATES_PER_QUERY))) for text in corpus.texts[::2]]
    return result


def _tokens(corpus: Corpus, _mask: str) -> tuple[SampleRequest, ...]:
    return tuple(
        SampleRequest(text, {"aggregation_strategy": "none", "ignore_labels": []})
        for text in corpus.singles()
        if text.strip()
    )


def _questions(corpus: Corpus, _mask: str) -> tuple[SampleRequest, ...]:
    """Each theme's questions with its sentences as context, with some of them, and with another theme's sentences in
    front."""
    result = []
    for theme, other in zip(corpus.themes, (*corpus.themes[1:], *corpus.themes[:1]), strict=True):
        contexts = (
            " ".join(theme.sentences),
            " ".join(theme.sentences[:5]),
            " ".join((*other.sentences, *theme.sentences, *other.sentences)),
        )
        result += [
            SampleRequest({"question": question, "context": context})
            for question in theme.questions
            for context in contexts
        ]
    starters = cycle(("What is this about?", "Who is meant?", "What happened?", "Where?", "When?"))
    result += [
        SampleRequest({"question": next(starters), "context": text})
        for text in corpus.singles()
        if len(text.split()) > 5
    ]
    return tuple(result)


def _masks(corpus: Corpus, mask: str) -> tuple[SampleRequest, ...]:
    """Mask one word of each text, at another position in each."""
    result = []
    for text in corpus.singles():
        words = text.split()
        if words:
            at = _hash(text) % min(len(words), 100)
            result.append(SampleRequest(" ".join((*words[:at], mask, *words[at + 1 :])), {"top_k": TOP_MASKS}))
    return tuple(result)


def _zero_shot(corpus: Corpus, _mask: str) -> tuple[SampleRequest, ...]:
    """Every third text: each costs as many rows as there are labels."""
    return tuple(
        SampleRequest(text, {"candidate_labels": list(LABELS)}) for text in corpus.singles()[::3] if text.strip()
    )


def _entities(corpus: Corpus, _mask: str) -> tuple[SampleRequest, ...]:
    return tuple(
        SampleRequest(text, {"candidate_labels": list(ENTITY_LABELS)}) for text in corpus.singles() if text.strip()
    )


_SAMPLES: dict[TaskName, Callable[[Corpus, str], tuple[SampleRequest, ...]]] = {
    TaskName.FEATURE_EXTRACTION: _single,
    TaskName.SENTENCE_SIMILARITY: _similarity,
    TaskName.TEXT_RANKING: _ranking,
    TaskName.TEXT_CLASSIFICATION: _single,
    TaskName.TOKEN_CLASSIFICATION: _tokens,
    TaskName.QUESTION_ANSWERING: _questions,
    TaskName.FILL_MASK: _masks,
    TaskName.ZERO_SHOT_CLASSIFICATION: _zero_shot,
    TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION: _entities,
}


def calibration_rows(task: Task, requests: Sequence[SampleRequest], *, at_most: int = CALIBRATION_ROWS) -> list[Row]:
    """Rows of all lengths for calibration, the same for the same requests."""
    rows = [row for prepared in prepare(task, requests) for row in prepared.rows]
    return _by_length(rows, [row.length for row in rows], at_most)


def judging_samples(
    task: Task, requests: Sequence[SampleRequest], *, at_most: int = JUDGING_SAMPLES
) -> list[SampleRequest]:
    """Requests of all lengths for judging; those that the task refuses are left out."""
    taken, lengths = [], []
    for request in requests:
        for prepared in prepare(task, [request]):
            taken.append(request)
            lengths.append(prepared.tokens // max(len(prepared.rows), 1))
    return _by_length(taken, lengths, at_most)


def _by_length(things: Sequence[T], lengths: Sequence[int], at_most: int) -> list[T]:
    """`at_most` of the items, in the shares of the length classes of `STRATA` as far as they have enough, evenly from
    each class; the other classes fill what one lacks."""
    classes: list[list[int]] = [[] for _ in STRATA]
    for index, length in enumerate(lengths):
        place = next(i for i, (upper, _) in enumerate(STRATA) if upper is None or length <= upper)
        classes[place].append(index)
    wanted = [min(len(members), round(at_most * share)) for members, (_, share) in zip(classes, STRATA, strict=True)]
    for place, members in enumerate(classes):
        wanted[place] += min(len(members) - wanted[place], max(at_most - sum(wanted), 0))
    chosen = [members[i] for members, count in zip(classes, wanted, strict=True) for i in _evenly(len(members), count)]
    return [things[index] for index in sorted(chosen[:at_most])]


def _evenly(size: int, count: int) -> list[int]:
    """`count` different indices below `size`, evenly spaced."""
    return [index * size // count for index in range(count)]


Forward = Callable[[Sequence[Row]], Sequence[Outputs]]
"""Runs rows in one batch, padded to the longest, and returns each row's outputs without padding."""

TOLERANCE = 1e-4
"""The largest relative difference |batched - alone| / |alone| of a row's outputs that counts as equal: what summing in
another order changes in a deep fp32 model. It changes the cosine of a vector by 5e-9."""
BF16_TOLERANCE = 2.0**-8
"""The same where activations are rounded to bf16: the largest error of one rounding."""
ROWS_PER_BATCH = 8
LONG_TOKENS = 64
LONG_ROWS = 4
"""How many longer rows are compared: they cost much, and their sums are made in the same way as for shorter ones."""
WAITING = 24
"""Rows in the queue while padded batches are made, as under load."""
SEED = 20261121
"""Seed of their order in the queue."""


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of a recipe, as far as batching matters."""

    tolerance: float = TOLERANCE
    rounds: bool = False
    """Activations are rounded on the way. Where sums differ in their last bits, a number crosses a rounding limit so
    rarely that samples may not show it (2 of 100 pairs of MiniLM's rows), and then changes by 2 %."""


FP32 = Arithmetic()


def arithmetic_of(recipe: Recipe) -> Arithmetic:
    """The arithmetic of a recipe."""
    if recipe.precision is Precision.FP32:
        return FP32
    is_bf16 = recipe.precision is Precision.BF16 or BF16_REST in recipe.options
    return Arithmetic(BF16_TOLERANCE if is_bf16 else TOLERANCE, rounds=True)


def forward_of(engine: Engine, io: GraphIO) -> Forward:
    """An engine's forward pass, with the code that serves."""
    return partial(run_rows, engine.run, io)


@dataclass(eq=False)
class SingleRowForward:
    """Runs one row at a time, and caches the outputs of shorter rows: the guard needs them twice."""

    forward: Forward
    _kept: dict[int, tuple[Row, Outputs]] = field(default_factory=dict)

    def __call__(self, rows: Sequence[Row]) -> list[Outputs]:
        """Each row's outputs, run alone."""
        return [self._one(row) for row in rows]

    def _one(self, row: Row) -> Outputs:
        if id(row) not in self._kept:
            outputs = self.forward([row])[0]
            if row.length > LONG_TOKENS:
                return outputs
            # The row is stored too, so that no other one can get its id.
            self._kept[id(row)] = (row, outputs)
        return self._kept[id(row)][1]


def equal_groups(rows: Sequence[Row], grid: ShapeGrid | None = None) -> list[list[Row]]:
    """The batches that the batch policy makes of rows of equal length (for an engine that pads to a grid: of equal
    points on it)."""
    policy = BatchPolicy(Batching.EQUAL_LENGTH, ROWS_PER_BATCH, LARGEST_BATCH_TOKENS, 0.0, grid)
    return _batches(_sampled(rows), policy)


def padded_groups(rows: Sequence[Row], grid: ShapeGrid | None = None) -> list[list[Row]]:
    """The batches that the batch policy makes of rows of different lengths with the largest padding that a plan may
    allow."""
    policy = BatchPolicy(Batching.PADDED, ROWS_PER_BATCH, LARGEST_BATCH_TOKENS, LARGEST_PADDING_SHARE, grid)
    some = _sampled(rows)
    order = random.Random(SEED).sample(some, len(some))  # noqa: S311 - reproducible, not secret
    groups = []
    for start in range(0, len(order), WAITING):
        groups += _batches(order[start : start + WAITING], policy)
    return [group for group in groups if len({policy.length(row) for row in group}) > 1]


def _sampled(rows: Sequence[Row]) -> list[Row]:
    short = [row for row in rows if row.length <= LONG_TOKENS]
    long = sorted((row for row in rows if row.length > LONG_TOKENS), key=lambda row: row.length)
    return [*short, *long[:LONG_ROWS]]


def _batches(rows: Sequence[Row], policy: BatchPolicy) -> list[list[Row]]:
    """The batches that one worker takes from a queue of these rows, without batches of one."""
    queue = RowQueue(policy)
    queue.push(rows, None, arrived=0.0, deadline=math.inf, tokens_per_second=1.0)
    groups = []
    while taken := queue.take(streams=1, now=0.0).rows:
        if len(taken) > 1:
            groups.append([entry.row for entry in taken])
    return groups


def relative_difference(alone: Outputs, batched: Outputs) -> float:
    """|batched - alone| / |alone| over all outputs of a row; inf for other shapes or values that are not finite."""
    squared = norm = 0.0
    for name, expected in alone.items():
        actual = batched[name]
        if actual.shape != expected.shape:
            return float("inf")
        squared += float(np.sum((actual.astype(np.float64) - expected) ** 2))
        norm += float(np.sum(expected.astype(np.float64) ** 2))
    result = float(np.sqrt(squared / max(norm, 1e-30)))
    return result if np.isfinite(result) else float("inf")


@dataclass(frozen=True)
class Invariance:
    """The widest batching that changes no row, and the evidence."""

    batching: Batching
    metrics: tuple[Metric, ...]


def measure_invariance(
    forward: Forward,
    rows: Sequence[Row],
    *,
    alone: Forward | None = None,
    arithmetic: Arithmetic = FP32,
    grid: ShapeGrid | None = None,
) -> Invariance:
    """Run rows in batches and alone; find the widest batching in which all rows stay the same.

    `alone` runs rows one by one (default: by `forward`). `grid` is the engine's, if it has one: its sums depend on the
    shape, and arithmetic that rounds is not padded to another one. A kind of batch that the rows do not offer is not
    proved: it fails closed.
    """
    metrics = []
    widest = Batching.SINGLE
    one_by_one = alone or SingleRowForward(forward)
    for batching, groups in (
        (Batching.EQUAL_LENGTH, equal_groups(rows, grid)),
        (Batching.PADDED, padded_groups(rows, grid)),
    ):
        if batching is Batching.PADDED and arithmetic.rounds and grid is not None:
            break
        worst = max((_worst(forward, one_by_one, group) for group in groups), default=float("inf"))
        held = worst <= arithmetic.tolerance
        if np.isfinite(worst):
            metrics.append(
                Metric(
                    name=f"batch_invariance_{batching.value}",
                    value=worst,
                    budget=arithmetic.tolerance,
                    higher_is_better=False,
                    passed=held,
                )
            )
        if not held:
            break
        widest = batching
    return Invariance(widest, tuple(metrics))


def _worst(forward: Forward, alone: Forward, group: Sequence[Row]) -> float:
    return max(map(relative_difference, alone(group), forward(group)))


@dataclass(frozen=True, eq=False)
class Reference:
    """The judging requests, tokenised once, with the outcomes of the fp32 reference."""

    prepared: tuple[Prepared, ...]
    observed: tuple[ObservedAnswer, ...]

    @property
    def rows(self) -> list[Row]:
        """All rows of all requests."""
        return [row for prepared in self.prepared for row in prepared.rows]


def prepare(task: Task, samples: Sequence[SampleRequest]) -> tuple[Prepared, ...]:
    """Tokenise requests, without those that the task refuses (too long where nothing may be truncated), and those
    without a row."""
    result = []
    further = task.judging_parameters if isinstance(task, JudgedWith) else {}
    for sample in samples:
        try:
            prepared = task.prepare(task.parse(sample.inputs, {**sample.parameters, **further}))
        except InvalidInput:
            continue
        if prepared.rows:
            result.append(prepared)
    return tuple(result)


def observe(task: Task, forward: Forward, prepared: Prepared) -> ObservedAnswer:
    """Run each row of a request alone. InferenceFailed for NaN, as when serving."""
    reduced = tuple(task.reduce(row, forward([row])[0]) for row in prepared.rows)
    kept: tuple[Any, ...] = reduced
    if isinstance(task, Judged):
        # Arrays, which are stored between processes.
        kept = tuple(array for row, one in zip(prepared.rows, reduced, strict=True) for array in task.judged(row, one))
    return ObservedAnswer(task.assemble(prepared, reduced), kept)


def observe_reference(task: Task, forward: Forward, samples: Sequence[SampleRequest]) -> Reference:
    """Run the judging requests through the reference, once for all candidates."""
    prepared = prepare(task, samples)
    return Reference(prepared, tuple(observe(task, forward, one) for one in prepared))


def judge_candidate(
    task: Task,
    forward: Forward,
    reference: Reference,
    budget: AccuracyBudget,
    *,
    arithmetic: Arithmetic = FP32,
    grid: ShapeGrid | None = None,
) -> Verdict:
    """Judge a candidate: its answers one row at a time, and whether batches change them, as far as its arithmetic
    (`arithmetic_of`) can, in the shapes of its engine's `grid`.

    A candidate is rejected if its engine fails or its outputs hold NaN; other errors are raised.
    """
    alone = SingleRowForward(forward)
    verdict = judge_answers(task, alone, reference, budget)
    if not verdict.passed:
        return verdict
    invariance = measure_invariance(forward, reference.rows, alone=alone, arithmetic=arithmetic, grid=grid)
    return verdict.model_copy(
        update={"metrics": (*verdict.metrics, *invariance.metrics), "batching": invariance.batching.value}
    )


def judge_answers(task: Task, forward: Forward, reference: Reference, budget: AccuracyBudget) -> Verdict:
    """Judge only the answers, row by row: for two graphs that were each proved in batches, and serve together."""
    try:
        observed = [observe(task, forward, prepared) for prepared in reference.prepared]
    except InferenceFailed as error:
        return Verdict(passed=False, reason=f"a judging request failed: {error.message}", texts=len(reference.prepared))
    return judge(task.name, reference.observed, observed, budget)
