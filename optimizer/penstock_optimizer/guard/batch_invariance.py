"""Whether answers of an engine depend on the requests that run at the same time: the same requests alone and together.

Requests run as in the server: its scheduler mixes chunks of prompts with the next tokens of other sequences, and half
of the requests choose their tokens with a seed, the other half take the most probable ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.manifest import BatchInvariance
from penstock_runtime.engines.base import StepEngine
from penstock_runtime.generation.sampling import SamplingParameters, TokenHistory, sample
from penstock_runtime.generation.scheduler import Scheduler
from penstock_runtime.generation.scheduler import Sequence as Scheduled

Tokens = NDArray[np.int32]
"""Token ids [tokens]."""

AT_ONCE = 16
BUDGET = 96
"""Tokens of a step: prompts are in several chunks, next to tokens of other sequences."""
TEMPERATURE = 0.8
SHORTER = 4
"""Answers differ by up to this number of tokens, so that sequences begin and end at different times."""


@dataclass(frozen=True)
class ComparedRequest:
    """A prompt and how it is continued."""

    prompt: Tokens
    length: int
    """Tokens to generate."""
    seed: int | None
    """None: always the most probable token."""


def requests_of(prompts: Sequence[Tokens], count: int, length: int) -> list[ComparedRequest]:
    """`count` requests with these prompts, repeated in order; each second request has a seed."""
    return [
        ComparedRequest(
            prompts[number % len(prompts)], max(1, length - number % SHORTER), number if number % 2 else None
        )
        for number in range(count)
    ]


def run_requests(engine: StepEngine, requests: Sequence[ComparedRequest], at_once: int) -> list[list[int]]:
    """The tokens of each answer, with up to `at_once` requests in the same steps."""
    scheduler = Scheduler(engine.blocks, engine.block_size, max_sequences=at_once, reuse=False)
    sequences = [
        Scheduled(number, one.prompt.tolist(), len(one.prompt) + one.length) for number, one in enumerate(requests)
    ]
    histories = [TokenHistory(sequence.tokens) for sequence in sequences]
    for sequence in sequences:
        scheduler.add(sequence)
    left = len(sequences)
    while left:
        step = scheduler.plan(BUDGET)
        logits = engine.step(step.engine_rows())
        chosen = []
        for sequence, row in zip(step.sampled, logits, strict=True):
            one, history = requests[sequence.number], histories[sequence.number]
            how = SamplingParameters(temperature=0.0 if one.seed is None else TEMPERATURE, seed=one.seed or 0)
            token = sample(row, how, history, len(sequence.tokens) - len(one.prompt)).token
            history.add(token)
            chosen.append(token)
        scheduler.commit(step, chosen)
        for sequence in step.sampled:
            if len(sequence.tokens) == sequence.limit:
                scheduler.remove(sequence)
                left -= 1
    return [sequence.tokens[len(one.prompt) :] for sequence, one in zip(sequences, requests, strict=True)]


def measure_invariance(
    engine: StepEngine,
    requests: Sequence[ComparedRequest],
    *,
    at_once: int = AT_ONCE,
    goes_on: Callable[[], bool] = lambda: True,
) -> BatchInvariance:
    """Run groups of `at_once` requests together, and each request alone. After the first group only if `goes_on`."""
    count = differing = tokens = same = 0
    for begin in range(0, len(requests), at_once):
        if begin and not goes_on():
            break
        group = requests[begin : begin + at_once]
        together = run_requests(engine, group, at_once)
        for one, expected in zip(group, together, strict=True):
            (alone,) = run_requests(engine, [one], 1)
            count += 1
            differing += alone != expected
            tokens += len(alone)
            same += _same_beginning(alone, expected)
    return BatchInvariance(requests=count, differing=differing, at_once=at_once, same_tokens=same / max(tokens, 1))


def _same_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens before the first that differs: those after it belong to another text."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((at for at, (first, second) in pairs if first != second), len(one))


def within(seconds: float) -> Callable[[], bool]:
    """True until this time has passed."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() < end
