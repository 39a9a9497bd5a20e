"""Drives an engine of text generation without a server: greedy continuations, logits along given texts, and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from penstock.manifest import GenerationSpeed, LatencyPoint
from penstock_optimizer.candidate.measure import CONTENTION
from penstock_optimizer.guard.batch_invariance import Tokens
from penstock_runtime.engines.base import StepEngine
from penstock_runtime.rows import Float, StepRow

TOGETHER = 8
"""Sequences in one step: a usual number of clients, and few enough for the logits of large vocabularies."""
CHUNK = 64
"""Tokens of a prompt in one step: most prompts of the guard take several."""
REPEATS = 5


@dataclass(frozen=True)
class Forced:
    """A text along which engines are forced: a prompt and its continuation."""

    prompt: Tokens
    continuation: Tokens
    """One token at least."""


class _Blocks:
    """The cache blocks of sequences that run side by side."""

    def __init__(self, engine: StepEngine, sequences: int) -> None:
        self._size = engine.block_size
        self._each = engine.blocks // sequences
        self.tokens = self._each * self._size
        """The longest sequence."""

    def of(self, sequence: int, tokens: int) -> Tokens:
        """The blocks that hold this number of tokens of a sequence."""
        first = sequence * self._each
        return np.arange(first, first + -(-tokens // self._size), dtype=np.int32)


def blocks_needed(engine: StepEngine | int, longest: int, sequences: int = TOGETHER) -> int:
    """Blocks for `sequences` of `longest` tokens; `engine` or its block size."""
    size = engine if isinstance(engine, int) else engine.block_size
    return sequences * -(-longest // size)


def continue_greedily(engine: StepEngine, prompts: Sequence[Tokens], length: int) -> list[tuple[Tokens, Float]]:
    """Greedy continuations of `length` tokens, and the logits [length, vocabulary] that gave them. `TOGETHER` at a
    time."""
    found: list[tuple[Tokens, Float]] = []
    for start in range(0, len(prompts), TOGETHER):
        group = prompts[start : start + TOGETHER]
        blocks = _Blocks(engine, TOGETHER)
        last = _prefill(engine, group, blocks)
        chosen = [[int(row.argmax())] for row in last]
        logits = [[row] for row in last]
        for _ in range(length - 1):
            rows = [_next_row(blocks, index, len(prompt), chosen[index]) for index, prompt in enumerate(group)]
            for index, row in enumerate(engine.step(rows)):
                chosen[index].append(int(row.argmax()))
                logits[index].append(row)
        found += [(np.array(tokens, np.int32), np.stack(rows)) for tokens, rows in zip(chosen, logits, strict=True)]
    return found


def forced_logits(engine: StepEngine, texts: Sequence[Forced]) -> list[Float]:
    """The logits [continuation, vocabulary] of each text: prompts in chunks, then token by token through the cache."""
    found: list[Float] = []
    for start in range(0, len(texts), TOGETHER):
        group = texts[start : start + TOGETHER]
        blocks = _Blocks(engine, TOGETHER)
        logits = [[row] for row in _prefill(engine, [text.prompt for text in group], blocks)]
        for step in range(max(len(text.continuation) for text in group) - 1):
            running = [index for index, text in enumerate(group) if step < len(text.continuation) - 1]
            rows = [
                _next_row(blocks, index, len(group[index].prompt), group[index].continuation[: step + 1].tolist())
                for index in running
            ]
            for index, row in zip(running, engine.step(rows), strict=True):
                logits[index].append(row)
        found += [np.stack(rows) for rows in logits]
    return found


def _prefill(engine: StepEngine, prompts: Sequence[Tokens], blocks: _Blocks) -> list[Float]:
    """The logits [vocabulary] of each prompt's last token."""
    found = []
    for index, prompt in enumerate(prompts):
        for begin in range(0, len(prompt), CHUNK):
            end = min(begin + CHUNK, len(prompt))
            row = StepRow(prompt[begin:end], begin, blocks.of(index, end), int(end == len(prompt)))
            logits = engine.step([row])
        found.append(logits[0])
    return found


def _next_row(blocks: _Blocks, sequence: int, prompt: int, tokens: Sequence[int]) -> StepRow:
    """The step that reads the last of the tokens that follow a prompt."""
    position = prompt + len(tokens) - 1
    return StepRow(np.array([tokens[-1]], np.int32), position, blocks.of(sequence, position + 1), 1)


def measure_speed(engine: StepEngine, prompt: Tokens, output_tokens: int) -> GenerationSpeed:
    """Times of one client, and the rate of `TOGETHER` clients, prompts included. After a warm-up."""
    continue_greedily(engine, [prompt] * TOGETHER, 2)
    with CONTENTION.measured():
        first = [_prompt_seconds(engine, prompt) for _ in range(REPEATS)]
    blocks = _Blocks(engine, TOGETHER)
    _prefill(engine, [prompt], blocks)
    gaps = []
    with CONTENTION.measured():
        for count in range(1, output_tokens):
            row = _next_row(blocks, 0, len(prompt), [1] * count)
            begin = perf_counter()
            engine.step([row])
            gaps.append(perf_counter() - begin)
    begin = perf_counter()
    continue_greedily(engine, [prompt] * TOGETHER, output_tokens)
    rate = TOGETHER * output_tokens / (perf_counter() - begin)
    return GenerationSpeed(
        prompt_tokens=len(prompt),
        output_tokens=output_tokens,
        first_token_milliseconds=1000 * median(first),
        next_token_p50_milliseconds=1000 * float(np.quantile(gaps, 0.5)),
        next_token_p95_milliseconds=1000 * float(np.quantile(gaps, 0.95)),
        tokens_per_second=rate,
        clients=TOGETHER,
    )


def measure_prompts(engine: StepEngine, lengths: Sequence[int]) -> tuple[LatencyPoint, ...]:
    """The time of a prompt of each length, alone and in one step."""
    points = []
    for length in lengths:
        prompt = (np.arange(length) % engine.vocabulary).astype(np.int32)
        _prompt_seconds(engine, prompt)
        with CONTENTION.measured():
            times = sorted(1000 * _prompt_seconds(engine, prompt) for _ in range(REPEATS))
        middle = median(times)
        spread = (times[-2] - times[1]) / middle
        points.append(
            LatencyPoint(tokens=length, p50_milliseconds=middle, minimum_milliseconds=times[0], spread=spread)
        )
    return tuple(points)


def _prompt_seconds(engine: StepEngine, prompt: Tokens) -> float:
    row = StepRow(prompt, 0, np.arange(-(-len(prompt) // engine.block_size), dtype=np.int32), 1)
    begin = perf_counter()
    engine.step([row])
    return perf_counter() - begin
