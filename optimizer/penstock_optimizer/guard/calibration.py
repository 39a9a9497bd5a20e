"""Makes the requests that calibrate and judge: Penstock's texts and the endpoint's, in the form of its task, no labels.

Calibration and judging sets share no text. Both have every length, from one token to more than the model takes, since
the range of an activation and the effect of rounding depend on it: very short texts have other outliers than long ones.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import cycle, islice
from typing import TypeVar

from penstock.tasks import TaskName
from penstock_optimizer.guard.gate import prepare
from penstock_optimizer.guard.judge import SampleRequest
from penstock_runtime.rows import Row
from penstock_runtime.tasks.base import Task

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
