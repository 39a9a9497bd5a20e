"""Makes the requests of a workload: their lengths in tokens, texts of exactly these lengths, and the HTTP bodies.

Without a stated workload, lengths are log-normal with a median of 44 tokens and a 95th percentile near 187, which is
typical of short texts in production (questions, sentences, product titles; a tail of paragraphs).

Texts are made of everyday words that add exactly one token each, found by trying them with the tokenizer. Where too few
do (a tiny or foreign vocabulary), the vocabulary's entries are tried.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from penstock.errors import UnsupportedModel
from penstock.resources.endpoint import Workload
from penstock.tasks import TaskName
from penstock_optimizer.load.client import RequestBody
from penstock_runtime.tokens.pieces import Side

DEFAULT_MEDIAN_TOKENS = 44
DEFAULT_SIGMA = 0.88
"""Standard deviation of the logarithm: puts the 95th percentile at 187 tokens, the mean at 64."""
STANDARD_LENGTHS = (8, 16, 32, 64, 128, 256, 384, 512)
"""The lengths of the published tables: latency is measured at these."""


@dataclass(frozen=True)
class LengthMix:
    """A distribution of lengths in tokens, special tokens included, within [minimum, maximum]."""

    maximum: int
    """The model's limit."""
    lengths: tuple[int, ...] = ()
    """Equally likely, as often as listed; empty: log-normal."""
    minimum: int = 3

    @classmethod
    def of(cls, workload: Workload, *, maximum: int) -> LengthMix:
        """The mix of an endpoint's workload, limited to the longest row of its model."""
        return cls(maximum=maximum, lengths=workload.sequence_lengths)

    def sample(self, count: int, *, seed: int) -> list[int]:
        """`count` lengths in random order, stratified: the sample has the quantiles of the distribution.

        Two samples of one size differ in order only, so that repeated measurements compare like with like.
        """
        if self.lengths:
            listed = sorted(self.lengths)
            drawn = [float(listed[index * len(listed) // count]) for index in range(count)]
        else:
            normal = statistics.NormalDist()
            drawn = [
                DEFAULT_MEDIAN_TOKENS * math.exp(DEFAULT_SIGMA * normal.inv_cdf((index + 0.5) / count))
                for index in range(count)
            ]
        lengths = [max(min(round(value), self.maximum), min(self.minimum, self.maximum)) for value in drawn]
        random.Random(seed).shuffle(lengths)  # noqa: S311 - reproducible, not secret
        return lengths

    @property
    def summary(self) -> str:
        """One line for the report, such as `median 44 tokens, p95 187`."""
        sample = sorted(self.sample(1000, seed=0))
        return f"median {sample[500]} tokens, p95 {sample[950]}, longest {sample[-1]}"


def measured_lengths(maximum: int, mix: LengthMix | None = None) -> tuple[int, ...]:
    """The lengths to measure latency at: the standard ones that the model can take, and the stated ones.

    At most four stated lengths are added, so that a long list does not use up the time budget.
    """
    lengths = {length for length in STANDARD_LENGTHS if length <= maximum} or {maximum}
    if mix is not None and mix.lengths:
        stated = sorted({min(length, maximum) for length in mix.lengths} - lengths)
        step = max(1, len(stated) // 4)
        lengths.update(stated[::step][:4])
    return tuple(sorted(lengths))


_FREQUENT = (
    "the of and to in is was for on that with as it by from at his an were are which this also be has or had first "
    "one their its new after but who not they have her she two been other when there all during into school time "
    "may years more most only over city some world would where later up such used many can state about national "
    "out known university united then made under between number people before while part year game team through "
    "music life against home south north well three same name second four high long each being small use large "
    "work group often film public house now day several found general left government including end family based "
    "local public service station road water line season system company early order place power great final war "
    "west east town country however book played area called back near court law main open land set named head "
    "party story form point died old next play run show play white black red green blue light night day morning "
    "food market price money question answer letter reason idea plan test result change move turn hand eye face "
    "door street river mountain sea rain wind snow summer winter garden tree flower bird horse dog cat fish"
)
EVERYDAY_WORDS = tuple(dict.fromkeys(_FREQUENT.split()))
"""Frequent English words, most of which are one token in any English or multilingual vocabulary."""

ATTEMPTS = 64
CANDIDATES_FROM_VOCABULARY = 3000
ENOUGH_WORDS = 64


class TextMaker:
    """Makes texts for one tokenizer. Counts include the special tokens that the tokenizer adds."""

    def __init__(self, tokenizer: Tokenizer, *, seed: int = 0) -> None:
        # A copy: the tokenizer that serves must keep its truncation and padding.
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._random = random.Random(seed)  # noqa: S311 - reproducible, not secret

    def count(self, text: str, pair: str | None = None) -> int:
        """Tokens of a text, or of a pair."""
        return len(self.ids(text, pair))

    def ids(self, text: str, pair: str | None = None) -> list[int]:
        """The tokens of a text, or of a pair, with special tokens: all of them and no padding, whatever the model's
        tokenizer is set to."""
        ids: list[int] = self._tokenizer.encode(text, pair).ids
        return ids

    @cached_property
    def specials(self) -> int:
        """Tokens that the tokenizer adds to a single text."""
        return int(self._tokenizer.num_special_tokens_to_add(is_pair=False))

    @cached_property
    def one_token_words(self) -> tuple[str, ...]:
        """Words that add one token each to the end of a text."""
        found = self._one_token_words(EVERYDAY_WORDS)
        if len(found) < ENOUGH_WORDS:
            entries = sorted(self._tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
            words = (self._tokenizer.decode([index]).strip() for _, index in entries[:CANDIDATES_FROM_VOCABULARY])
            found += self._one_token_words(tuple(dict.fromkeys(word for word in words if word.isalnum())))
        if not found:
            raise UnsupportedModel(
                "no word adds exactly one token with this tokenizer, so that no texts of a given length can be made",
                remedy="State typical inputs in spec.workload.texts",
            )
        return tuple(dict.fromkeys(found))

    def text(self, tokens: int) -> str:
        """A text of exactly `tokens` tokens, or of the fewest possible (special tokens and one word)."""
        wanted = max(tokens, self.specials + 1)
        return self._grow(wanted, self.count, words=wanted - self.specials)

    def pair(self, first: str, tokens: int) -> str:
        """A second text, so that the pair has exactly `tokens` tokens, or the fewest possible."""
        fewest = self.count(first, self.one_token_words[0])
        wanted = max(tokens, fewest)
        return self._grow(wanted, lambda text: self.count(first, text), words=1 + wanted - fewest)

    def _grow(self, wanted: int, count: Callable[[str], int], *, words: int) -> str:
        """Draw words until their count is right; words that merge with a neighbour are drawn again."""
        number = words
        for _ in range(ATTEMPTS):
            text = " ".join(self._random.choices(self.one_token_words, k=number))
            counted = count(text)
            if counted == wanted:
                return text
            number = max(1, number + wanted - counted)
        raise UnsupportedModel(
            f"no text of exactly {wanted} tokens was found with this tokenizer in {ATTEMPTS} attempts",
            remedy="State typical inputs in spec.workload.texts",
        )

    def _one_token_words(self, words: tuple[str, ...]) -> list[str]:
        """The `words` that add one token each, alone and when repeated."""
        if not words:
            return []
        singles = [self._tokenizer.encode(f"{word} {word}", add_special_tokens=False).ids for word in words]
        return [word for word, ids in zip(words, singles, strict=True) if len(ids) == 2]


QUESTION_TOKENS = 10
"""Length of a short question or query before the text of a pair."""
CANDIDATE_LABELS = ("news", "weather", "sport")
WITHOUT_MASK = "fill-mask needs the tokenizer's mask token"
_SINGLE_TEXT = frozenset(
    {TaskName.FEATURE_EXTRACTION, TaskName.TEXT_CLASSIFICATION, TaskName.TOKEN_CLASSIFICATION, TaskName.FILL_MASK}
)
"""Tasks with single texts as requests, so that the endpoint's texts can be sent."""


def predict_bodies(
    task: TaskName, tokenizer: Tokenizer, lengths: Sequence[int], *, mask_token: str | None = None, seed: int = 0
) -> tuple[RequestBody, ...]:
    """One body for each length, grouped by it. For pairs it is the length of the pair.

    A request of sentence-similarity and of zero-shot-classification has several rows of about that length.
    """
    maker = TextMaker(tokenizer, seed=seed)
    return tuple(
        RequestBody(
            body=json.dumps(_payload(task, maker, tokens, mask_token), ensure_ascii=False, separators=(",", ":")),
            group=tokens,
        )
        for tokens in lengths
    )


def sends_texts(task: TaskName, workload: Workload) -> bool:
    """True where the requests are the endpoint's texts: it states some, and the task takes single texts."""
    return bool(workload.texts) and task in _SINGLE_TEXT


def mix_of_texts(
    task: TaskName,
    tokenizer: Tokenizer,
    workload: Workload,
    *,
    maximum: int,
    mask_token: str | None = None,
    side: Side = Side.RIGHT,
) -> LengthMix:
    """The lengths of the endpoint's texts as `workload_bodies` sends them, each as likely as it is listed."""
    listed = _listed(task, tokenizer, workload, maximum, mask_token=mask_token, side=side)
    return LengthMix(maximum=maximum, lengths=tuple(body.group for body in listed), minimum=1)


def workload_bodies(
    task: TaskName,
    tokenizer: Tokenizer,
    workload: Workload,
    mix: LengthMix,
    *,
    count: int,
    mask_token: str | None = None,
    side: Side = Side.RIGHT,
) -> tuple[RequestBody, ...]:
    """The bodies of an endpoint's workload: its texts where it states some and the task takes single texts (for
    fill-mask with a mask token added where it is missing); else texts of its lengths. `side`: the end of a long text
    that is truncated."""
    if sends_texts(task, workload):
        listed = _listed(task, tokenizer, workload, mix.maximum, mask_token=mask_token, side=side)
        return tuple(listed[index % len(listed)] for index in range(max(count, len(listed))))
    return predict_bodies(task, tokenizer, mix.sample(count, seed=0), mask_token=mask_token)


def _listed(
    task: TaskName, tokenizer: Tokenizer, workload: Workload, maximum: int, *, mask_token: str | None, side: Side
) -> list[RequestBody]:
    """One body for each stated text, grouped by its tokens, or by `maximum` where it is truncated."""
    maker, texts = TextMaker(tokenizer), workload.texts
    if task is TaskName.FILL_MASK:
        if mask_token is None:
            raise ValueError(WITHOUT_MASK)
        mask = tokenizer.token_to_id(mask_token)
        # The token at the truncated end is a special one. A mask is added at the other end.
        kept = slice(maximum - 1) if side is Side.RIGHT else slice(1 - maximum, None)
        before, behind = (f"{mask_token} ", "") if side is Side.RIGHT else ("", f" {mask_token}")
        texts = tuple(text if mask in maker.ids(text)[kept] else f"{before}{text}{behind}" for text in texts)
    return [
        RequestBody(body=json.dumps({"inputs": text}, ensure_ascii=False), group=min(maker.count(text), maximum))
        for text in texts
    ]


def _payload(task: TaskName, maker: TextMaker, tokens: int, mask_token: str | None) -> Mapping[str, Any]:
    """The body of one request in the HF shape."""
    match task:
        case TaskName.QUESTION_ANSWERING:
            question, context = _pair(maker, tokens)
            return {"inputs": {"question": question, "context": context}}
        case TaskName.TEXT_RANKING:
            query, text = _pair(maker, tokens)
            return {"inputs": {"query": query, "texts": [text]}}
        case TaskName.SENTENCE_SIMILARITY:
            return {"inputs": {"source_sentence": maker.text(tokens), "sentences": [maker.text(tokens)]}}
        case TaskName.ZERO_SHOT_CLASSIFICATION | TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION:
            return {"inputs": maker.text(tokens), "parameters": {"candidate_labels": list(CANDIDATE_LABELS)}}
        case TaskName.FILL_MASK:
            if mask_token is None:
                raise ValueError(WITHOUT_MASK)
            return {"inputs": f"{maker.text(tokens - 1)} {mask_token}"}
        case _:
            return {"inputs": maker.text(tokens)}


def _pair(maker: TextMaker, tokens: int) -> tuple[str, str]:
    first = maker.text(min(QUESTION_TOKENS, max(tokens // 2, 1)))
    return first, maker.pair(first, tokens)
