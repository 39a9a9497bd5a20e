"""Continuous batching: decides which tokens of which sequences the next step computes. Pure: no engine, no clock.

A step holds the next token of every sequence that generates, and chunks of prompts within a token budget, so that a
long prompt does not delay the running sequences. A sequence starts once its prompt fits into the block pool: first
those of the client with the fewest running sequences, in the order of their arrival. When a generating sequence finds
no free block, the youngest sequence of the client that runs the most gives up its blocks and waits before the others of
its client; its tokens are computed again later. The oldest sequence never gives up its blocks, and no sequence may need
more blocks than the pool has, so every sequence ends.

    scheduler.add(sequence)
    step = scheduler.plan()         # rows for the engine
    scheduler.commit(step, tokens)  # the sampled token of each row with logits
    scheduler.remove(sequence)      # finished or cancelled
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from penstock_runtime.generation.blocks import BlockPool, block_hashes, next_hash, tenant_root
from penstock_runtime.rows import StepRow

DEFAULT_SEQUENCES = 64
DEFAULT_BUDGET = 512
MOST_SCORED = 64
"""Tokens of a row with the logits of each, which may be 150,000 numbers."""


@dataclass(eq=False, slots=True)
class Sequence:
    """The tokens of a prompt and of its continuation, and how far they are computed."""

    number: int
    """Order of arrival, unique."""
    tokens: list[int]
    """Prompt and generated tokens."""
    limit: int
    """The largest number of tokens that it may reach."""
    tenant: str = ""
    """Sequences share blocks within a tenant only."""
    client: str = ""
    """Clients get equal shares: see the module's text."""
    is_bulk: bool = False
    """It starts after all that are not."""
    prompt_tokens: int = 0
    computed: int = 0
    """Tokens that the cache holds."""
    blocks: list[int] = field(default_factory=list)
    registered: int = 0
    """Full blocks of the sequence that the pool knows by their hash."""
    last_hash: bytes = b""
    """Hash of the last registered block."""
    reused: int = 0
    """Tokens of the prompt that were in the cache when the sequence started."""
    started: bool = False
    """It has been scheduled at least once."""
    preemptions: int = 0
    scores_prompt: bool = False
    """The logits of all tokens of the prompt are needed: none of it is taken from the cache."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.last_hash = tenant_root(self.tenant)

    @property
    def missing(self) -> int:
        """Tokens that the cache does not hold yet: 1 while the sequence generates."""
        return len(self.tokens) - self.computed

    def __lt__(self, other: Sequence) -> bool:
        return self.number < other.number


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A sequence's part of a step."""

    sequence: Sequence
    count: int
    """Tokens to compute, from `sequence.computed` on."""
    samples: bool
    """The row ends with the sequence's last token, so that its logits give the next one."""

    @property
    def logits(self) -> int:
        """The number of its last tokens of which the logits are needed."""
        if self.sequence.scores_prompt and self.sequence.computed < self.sequence.prompt_tokens:
            return self.count
        return int(self.samples)


@dataclass(frozen=True, slots=True)
class Step:
    """The next work of the engine. Empty if there is nothing to do."""

    rows: tuple[PlannedRow, ...]
    block_size: int
    preempted: int = 0
    """Sequences that gave up their blocks for this step."""

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(row.count for row in self.rows)

    @property
    def prompt_rows(self) -> tuple[PlannedRow, ...]:
        """The rows that compute a prompt, or compute tokens again after a preemption."""
        return tuple(row for row in self.rows if row.count > 1 or not row.samples)

    @property
    def prompt_tokens(self) -> int:
        """Their tokens."""
        return sum(row.count for row in self.prompt_rows)

    @property
    def sampled(self) -> tuple[Sequence, ...]:
        """The sequences that get a token, in the order of the logits."""
        return tuple(row.sequence for row in self.rows if row.samples)

    def engine_rows(self) -> list[StepRow]:
        """The rows in the form of the engine."""
        return [_engine_row(row, self.block_size) for row in self.rows]


def _engine_row(row: PlannedRow, block_size: int) -> StepRow:
    sequence = row.sequence
    start, end = sequence.computed, sequence.computed + row.count
    blocks = sequence.blocks[: -(-end // block_size)]
    return StepRow(
        np.array(sequence.tokens[start:end], dtype=np.int32), start, np.array(blocks, dtype=np.int32), row.logits
    )


class Scheduler:
    """The sequences of one engine and the blocks that they use. For one thread."""

    def __init__(
        self, blocks: int, block_size: int, *, max_sequences: int = DEFAULT_SEQUENCES, reuse: bool = True
    ) -> None:
        """`blocks` of `block_size` tokens are in the pool. `reuse`: share blocks of prompts that begin alike."""
        self.pool = BlockPool(blocks)
        self.block_size = block_size
        self.max_sequences = max_sequences
        self._reuse = reuse
        self.waiting: list[Sequence] = []
        """In order of arrival."""
        self.running: list[Sequence] = []
        """In order of arrival."""

    @property
    def capacity(self) -> int:
        """The largest number of tokens of one sequence that the pool can hold."""
        return self.pool.count * self.block_size

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. ValueError if it could never run: its `limit` exceeds the pool, or it has no tokens."""
        if not 1 <= len(sequence.tokens) <= sequence.limit:
            raise ValueError(f"{len(sequence.tokens)} tokens in a sequence of at most {sequence.limit}")
        if sequence.limit > self.capacity:
            raise ValueError(f"a sequence of {sequence.limit} tokens does not fit into {self.capacity}")
        insort(self.waiting, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has finished or was cancelled. Not to be called between `plan` and `commit`."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def plan(self, budget: int = DEFAULT_BUDGET) -> Step:
        """The next step: a token of each generating sequence, and at most `budget` tokens in all where prompts wait.

        At least one prompt token is computed in a step if any prompt waits and its blocks fit, whatever the budget.
        """
        rows: list[PlannedRow] = []
        preempted = 0
        for sequence in tuple(self.running):
            if sequence.missing == 1 and sequence in self.running:
                preempted += self._make_room(sequence)
                if sequence in self.running:
                    rows.append(PlannedRow(sequence, 1, samples=True))
        left = max(1, budget - len(rows))
        for sequence in self.running:
            if sequence.missing > 1 and left:
                left -= self._add_chunk(rows, sequence, left)
        while left and not preempted and (admitted := self._admit()) is not None:
            left -= self._add_chunk(rows, admitted, left)
        return Step(tuple(rows), self.block_size, preempted)

    def commit(self, step: Step, tokens: SequenceOf[int]) -> None:
        """The step has been computed; `tokens` are the next ones of `step.sampled`, in order."""
        sampled = iter(tokens)
        for row in step.rows:
            sequence = row.sequence
            sequence.computed += row.count
            self._register(sequence)
            if row.samples:
                sequence.tokens.append(next(sampled))

    def _add_chunk(self, rows: list[PlannedRow], sequence: Sequence, left: int) -> int:
        count = min(left, sequence.missing, MOST_SCORED if sequence.scores_prompt else left)
        rows.append(PlannedRow(sequence, count, samples=count == sequence.missing))
        return count

    def _make_room(self, sequence: Sequence) -> int:
        """Give a generating sequence the block for its next token; returns the number of preempted sequences."""
        preempted = 0
        while len(sequence.blocks) * self.block_size < len(sequence.tokens):
            if self.pool.available:
                sequence.blocks += self.pool.allocate(1)
                continue
            # Older ones have their token in this step already.
            younger = self.running[self.running.index(sequence) :]
            shares = Counter(one.client for one in self.running)
            given_up = max(younger, key=lambda one: (shares[one.client], one.number))
            self._preempt(given_up)
            preempted += 1
            if given_up is sequence:
                break
        return preempted

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        insort(self.waiting, sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.registered = 0
        sequence.last_hash = tenant_root(sequence.tenant)

    def _admit(self) -> Sequence | None:
        """Start the next waiting sequence if its tokens fit, with a block in reserve for each running sequence.

        While they do not fit no other one starts, so that blocks become free for a long prompt too.
        """
        if not self.waiting or len(self.running) >= self.max_sequences:
            return None
        shares = Counter(one.client for one in self.running)
        sequence = min(self.waiting, key=lambda one: (one.is_bulk, shares[one.client], not one.started, one.number))
        size = self.block_size
        hashes: list[bytes] = []
        if self._reuse and not sequence.scores_prompt:
            # The last token is always computed: its logits are needed.
            hashes = block_hashes(sequence.tokens[: len(sequence.tokens) - 1], size, sequence.tenant)
        matched = self.pool.match(hashes)
        needed = -(-len(sequence.tokens) // size) - len(matched)
        if not self.pool.fits(matched, needed + len(self.running)):
            return None
        self.waiting.remove(sequence)
        self.pool.use(matched)
        sequence.blocks = matched + self.pool.allocate(needed)
        sequence.computed = len(matched) * size
        sequence.registered = len(matched)
        if matched:
            sequence.last_hash = hashes[len(matched) - 1]
        if not sequence.started:
            sequence.reused = sequence.computed
        sequence.started = True
        insort(self.running, sequence)
        return sequence

    def _register(self, sequence: Sequence) -> None:
        size = self.block_size
        while self._reuse and (sequence.registered + 1) * size <= sequence.computed:
            start = sequence.registered * size
            sequence.last_hash = next_hash(sequence.last_hash, sequence.tokens[start : start + size])
            self.pool.register(sequence.blocks[sequence.registered], sequence.last_hash)
            sequence.registered += 1


class ChunkBudget:
    """The token budget of a step, from measured steps: the largest with which a step stays within a target time.

    The time of a step is taken as `fixed + tokens * each`, both exponentially smoothed; a step without prompt tokens
    measures the first, a step with prompt tokens the second.
    """

    SMOOTHING = 0.2
    """Weight of the newest step."""
    LOWEST = 16
    """Prompt tokens of a step, whatever the target: a prompt always goes on."""

    def __init__(self, target_seconds: float) -> None:
        self.target_seconds = target_seconds
        self._fixed: float | None = None
        self._each: float | None = None

    def observe(self, prompt_tokens: int, generating: int, seconds: float) -> None:
        """A step of `prompt_tokens` of prompts and the next token of `generating` sequences took this long."""
        if prompt_tokens == 0:
            self._fixed = _smoothed(self._fixed, seconds, self.SMOOTHING)
        else:
            fixed = min(self._fixed or 0.0, 0.9 * seconds) if generating else 0.0
            self._each = _smoothed(self._each, (seconds - fixed) / prompt_tokens, self.SMOOTHING)

    def tokens(self, generating: int) -> int:
        """The budget of the next step, in which `generating` sequences get their next token."""
        if not generating:
            return DEFAULT_BUDGET
        if self._each is None:
            return generating + self.LOWEST
        room = self.target_seconds - (self._fixed or 0.0)
        chunk = int(room / self._each) if self._each > 0 else DEFAULT_BUDGET
        return generating + max(self.LOWEST, min(DEFAULT_BUDGET, chunk))


def _smoothed(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)
