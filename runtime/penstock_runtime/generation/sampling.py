"""Chooses the next token of a sequence from its logits. Pure: the result depends on the arguments alone.

The random number of a token comes from a counter-based generator of (seed, choice, position), so that a seeded request
gets the same tokens whatever other requests run at the same time. The order of the steps is the same as in
transformers' `generate`: repetition penalty, (presence and frequency penalty, logit bias,) temperature, top_k, top_p,
min_p.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
GREEDIEST = 1e-5
"""Temperatures below this are taken as 0: the division would overflow float32."""
SORTED = (256, 4096)
"""Numbers of most probable tokens among which `top_p` is looked for, before all are sorted."""
CHUNK = 64
"""Values of which the sum or maximum is taken, before a search among the results."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How tokens are chosen."""

    temperature: float = 1.0
    """0: always the most probable token."""
    top_p: float = 1.0
    """Only the most probable tokens that together have this probability; 1: all."""
    top_k: int = 0
    """Only this number of the most probable tokens; 0: all."""
    min_p: float = 0.0
    """Only tokens with at least this share of the highest probability; 0: all."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt and continuation, and multiplies negative ones; 1: none."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that occurs in the continuation."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that a token occurs in the continuation."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    seed: int = 0
    """64 bits, unsigned."""
    is_default_seed: bool = False
    """The request has no `seed`: each of its prompts gets other random numbers."""
    top_logprobs: int | None = None
    """The number of most probable tokens to report for each token; None: no probabilities at all."""

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature < GREEDIEST or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases apply."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token."""

    token: int
    logprob: float | None = None
    """Natural logarithm of its probability in the model's own distribution, before penalties and temperature."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens of that distribution, with their logarithms."""


class TokenHistory:
    """The tokens of one sequence, counted for the penalties."""

    def __init__(self, prompt: Collection[int]) -> None:
        self._seen = np.unique(np.fromiter(prompt, dtype=np.intp, count=len(prompt)))
        """Distinct tokens. An array: a step of a long prompt does not collect them again."""
        self._counts: dict[int, int] = {}

    def add(self, token: int) -> None:
        """A token was generated."""
        if token not in self._counts:
            self._counts[token] = 0
            if not (self._seen == token).any():
                self._seen = np.append(self._seen, token)
        self._counts[token] += 1

    def penalise(self, logits: Logits, parameters: SamplingParameters) -> Logits:
        """A copy of the logits with penalties and biases."""
        changed = logits.copy()
        if parameters.repetition_penalty != 1:
            seen = self._seen[self._seen < len(logits)]
            values = changed[seen]
            penalty = np.float32(parameters.repetition_penalty)
            changed[seen] = np.where(values < 0, values * penalty, values / penalty)
        if (parameters.presence_penalty or parameters.frequency_penalty) and self._counts:
            used = np.fromiter(self._counts, dtype=np.intp, count=len(self._counts))
            counts = np.fromiter(self._counts.values(), dtype=np.float32, count=len(used))
            changed[used] -= parameters.presence_penalty + parameters.frequency_penalty * counts
        for token, bias in parameters.logit_bias.items():
            changed[token] += np.float32(bias)
        return changed


def sample(
    logits: Logits,
    parameters: SamplingParameters,
    history: TokenHistory,
    position: int,
    choice: int = 0,
    *,
    allowed: NDArray[np.bool_] | None = None,
) -> SampledToken:
    """The next token. `logits`: float32 [vocabulary], not changed. `position`: number of generated tokens before it.
    `choice`: number of the continuation, if a request has several. `allowed`: tokens to choose from, [vocabulary], at
    least one; None: all."""
    scores = history.penalise(logits, parameters) if parameters.changes_logits else logits
    if allowed is not None:
        scores = np.where(allowed, scores, np.float32(-np.inf))
    if parameters.greedy:
        token = int(np.argmax(scores))
    else:
        tokens, weights = _weights(scores, parameters)
        token = _pick(weights, uniform(parameters.seed, choice, position))
        token = token if tokens is None else int(tokens[token])
    if parameters.top_logprobs is None:
        return SampledToken(token)
    return with_probabilities(logits, token, parameters.top_logprobs)


def uniform(seed: int, choice: int, position: int) -> float:
    """A random number from 0 to 1 (excluded) that depends on the arguments only: Philox, by Salmon et al. 2011."""
    key, counter = np.array([seed, choice], dtype=np.uint64), np.array([0, 0, 0, position], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def distribution(scores: Logits, parameters: SamplingParameters) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The tokens that may be chosen, and their probabilities, with the sum 1."""
    tokens, weights = _weights(scores, parameters)
    return np.arange(len(weights)) if tokens is None else tokens, weights / weights.sum(dtype=np.float64)


def _weights(scores: Logits, parameters: SamplingParameters) -> tuple[NDArray[np.intp] | None, Logits]:
    """The tokens that may be chosen (None: all), and numbers in proportion to their probabilities.

    A vocabulary has up to 150,000 tokens: everything over all of them is a single pass in float32.
    """
    tokens: NDArray[np.intp] | None = None
    if 0 < parameters.top_k < len(scores):
        # As transformers: tokens equal to the last of the `top_k` stay as well.
        tokens = _largest(scores, parameters.top_k)
        scores = scores[tokens]
    scaled = scores / np.float32(parameters.temperature)
    weights: Logits = np.exp(scaled - scaled.max())
    if parameters.top_p < 1:
        total = float(weights.sum(dtype=np.float64))
        for count in (*SORTED, len(weights)):
            # Ties of the last one included, so that the order is the same as after sorting all of them.
            likely = _largest(weights, min(count, len(weights)))
            order = likely[np.argsort(-weights[likely], kind="stable")]
            shares = np.cumsum(weights[order], dtype=np.float64)
            if shares[-1] >= parameters.top_p * total:
                break
        tokens, weights = order if tokens is None else tokens[order], weights[order]
        kept = max(1, int(np.count_nonzero(shares - weights < parameters.top_p * total)))
        tokens, weights = tokens[:kept], weights[:kept]
    if parameters.min_p > 0:
        likely = np.flatnonzero(weights >= np.float32(parameters.min_p) * weights.max())
        tokens, weights = likely if tokens is None else tokens[likely], weights[likely]
    return tokens, weights


def _largest(values: Logits, count: int) -> NDArray[np.intp]:
    """The indices of all values that are not below the `count`-th largest, in order."""
    full = len(values) // CHUNK * CHUNK
    if count <= full // CHUNK:
        # At least `count` values are not below the `count`-th largest of the chunks' maxima.
        maxima = values[:full].reshape(-1, CHUNK).max(axis=1)
        candidates = np.flatnonzero(values >= np.partition(maxima, len(maxima) - count)[len(maxima) - count])
    else:
        candidates = np.arange(len(values))
    found = values[candidates]
    largest: NDArray[np.intp] = candidates[found >= np.partition(found, len(found) - count)[len(found) - count]]
    return largest


def _pick(weights: Logits, number: float) -> int:
    """The index at which the sum of the weights exceeds `number` times the sum of all."""
    full = len(weights) // CHUNK * CHUNK
    sums = np.append(
        weights[:full].reshape(-1, CHUNK).sum(axis=1, dtype=np.float64), weights[full:].sum(dtype=np.float64)
    )
    ends = np.cumsum(sums)
    target = number * ends[-1]
    chunk = min(int(np.searchsorted(ends, target, side="right")), len(ends) - 1)
    start = chunk * CHUNK
    inside = np.cumsum(weights[start : start + CHUNK], dtype=np.float64) + (ends[chunk - 1] if chunk else 0.0)
    index = start + int(np.searchsorted(inside, target, side="right"))
    return min(index, len(weights) - 1)


def with_probabilities(logits: Logits, token: int, count: int) -> SampledToken:
    """A token with the logarithm of its probability, and the `count` most probable tokens."""
    highest = float(logits.max())
    total = highest + float(np.log(np.exp(logits - np.float32(highest)).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if count:
        likeliest = _largest(logits, min(count, len(logits)))
        order = likeliest[np.argsort(-logits[likeliest], kind="stable")][:count]
        top = tuple((int(one), float(logits[one]) - total) for one in order)
    return SampledToken(token, float(logits[token]) - total, top)
