"""The scheduler, over an engine with a real paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_runtime.generation.blocks import BlockPool, block_hashes, tenant_root
from penstock_runtime.generation.scheduler import ChunkBudget, Scheduler, Sequence
from tests.runtime.generation.paged_engine import PagedEngine

BLOCK = 4


@dataclass(frozen=True)
class Asked:
    """A request of a test."""

    prompt: tuple[int, ...]
    more: int
    """Tokens to generate."""
    at: int = 0
    """The step in which it arrives."""
    cancelled_at: int | None = None
    tenant: str = ""
    client: str = ""


def check_pool(scheduler: Scheduler) -> None:
    """No block leaks, none is shared by sequences that differ in it, none is both in use and free."""
    pool = scheduler.pool
    used: dict[int, list[tuple[Sequence, int]]] = {}
    for sequence in scheduler.running:
        assert len(sequence.blocks) * scheduler.block_size >= sequence.computed
        # A block that is registered under the hash of other tokens would be reused for these.
        registered = sequence.tokens[: sequence.registered * scheduler.block_size]
        hashes = block_hashes(registered, scheduler.block_size, sequence.tenant)
        assert sequence.last_hash == (hashes[-1] if hashes else tenant_root(sequence.tenant))
        for index, block in enumerate(sequence.blocks):
            used.setdefault(block, []).append((sequence, index))
    assert pool.in_use == len(used)
    assert pool.in_use + pool.available == pool.count
    for sharers in used.values():
        beginnings = set()
        for sequence, index in sharers:
            assert len(sharers) == 1 or index < sequence.registered
            beginnings.add((sequence.tenant, tuple(sequence.tokens[: (index + 1) * scheduler.block_size])))
        assert len(sharers) == 1 or len(beginnings) == 1
    for sequence in scheduler.waiting:
        assert not sequence.blocks


def run(
    engine: PagedEngine, asked: list[Asked], *, budget: int = 8, most: int = 64, reuse: bool = True
) -> tuple[list[list[int]], list[Sequence]]:
    """Generate greedily until all are done: the generated tokens and the sequences, in the order of `asked`."""
    scheduler = Scheduler(engine.blocks, engine.block_size, max_sequences=most, reuse=reuse)
    sequences = [
        Sequence(number, list(one.prompt), len(one.prompt) + one.more, one.tenant, one.client)
        for number, one in enumerate(asked)
    ]
    open_ones = dict(zip(sequences, asked, strict=True))
    for step_number in range(2000):
        for sequence, one in zip(sequences, asked, strict=True):
            if one.at == step_number and sequence in open_ones:
                scheduler.add(sequence)
            if one.cancelled_at == step_number and open_ones.pop(sequence, None) is not None:
                scheduler.remove(sequence)
        step = scheduler.plan(budget)
        check_pool(scheduler)
        generating = sum(row.count == 1 and row.samples for row in step.rows)
        assert step.tokens <= max(budget, generating + 1)
        if step.rows:
            logits = engine.step(step.engine_rows())
            assert len(logits) == len(step.sampled)
            scheduler.commit(step, [int(np.argmax(row)) for row in logits])
            check_pool(scheduler)
        for sequence in list(open_ones):
            if len(sequence.tokens) == sequence.limit:
                scheduler.remove(sequence)
                del open_ones[sequence]
        if not open_ones:
            assert scheduler.pool.in_use == 0
            assert not scheduler.running
            assert not scheduler.waiting
            return [sequence.tokens[sequence.prompt_tokens :] for sequence in sequences], sequences
    raise AssertionError("not all sequences ended")


def alone(one: Asked) -> list[int]:
    """The tokens of a request without others, its prompt in one chunk, on an engine with much memory."""
    (tokens,), _ = run(PagedEngine(), [Asked(one.prompt, one.more)], budget=64, reuse=False)
    return tokens


prompts = st.one_of(
    st.lists(st.integers(0, 39), min_size=1, max_size=20).map(tuple),
    st.integers(1, 20).map(lambda length: tuple(range(length))),  # many begin alike
)
requests = st.builds(
    Asked,
    prompts,
    more=st.integers(1, 12),
    at=st.integers(0, 12),
    cancelled_at=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    tenant=st.sampled_from(["", "a"]),
    client=st.sampled_from(["", "x", "y"]),
)


@settings(deadline=None)
@given(st.lists(requests, min_size=1, max_size=8), st.integers(1, 12), st.integers(9, 20), st.integers(1, 8))
def test_every_request_ends_with_the_tokens_that_it_gets_alone(
    asked: list[Asked], budget: int, blocks: int, most: int
) -> None:
    tokens, sequences = run(PagedEngine(blocks=blocks), asked, budget=budget, most=most)
    for one, generated, sequence in zip(asked, tokens, sequences, strict=True):
        assert generated == alone(one)[: len(generated)]
        assert one.cancelled_at is not None or len(sequence.tokens) == sequence.limit


def test_generating_sequences_get_a_token_in_each_step_while_a_long_prompt_is_computed() -> None:
    engine = PagedEngine()
    run(engine, [Asked((1, 2, 3), 20), Asked(tuple(range(32)), 2, at=2)], budget=5)
    chunks = [step for step in engine.steps if len(step) == 2 and step[1][1] > 1]
    assert len(chunks) >= 7
    assert all(step[0][1] == 1 and step[1][1] <= 4 for step in chunks)


def test_the_youngest_sequence_gives_up_its_blocks_and_is_computed_again() -> None:
    asked = [Asked((1, 2, 3, 4), 12), Asked((5, 6, 7, 8), 12)]
    tokens, sequences = run(PagedEngine(blocks=6), asked, reuse=False)
    assert tokens == [alone(one) for one in asked]
    assert [sequence.preemptions for sequence in sequences] == [0, sequences[1].preemptions]
    assert sequences[1].preemptions >= 1


def test_a_sequence_of_which_no_block_is_left_has_its_hashes_from_the_beginning() -> None:
    asked = [Asked((1, 2, 3, 4), 16), Asked((5, 6, 7, 8), 12)]
    tokens, sequences = run(PagedEngine(blocks=5), asked)  # `check_pool` looks at the hashes
    assert tokens == [alone(one) for one in asked]
    assert sequences[1].preemptions >= 1


def started(scheduler: Scheduler) -> list[int]:
    """Compute a step; the numbers of the running sequences."""
    step = scheduler.plan(64)
    scheduler.commit(step, [1] * len(step.sampled))
    return [sequence.number for sequence in scheduler.running]


def test_a_client_with_many_requests_does_not_keep_another_one_waiting() -> None:
    scheduler = Scheduler(64, BLOCK, max_sequences=2)
    many = [Sequence(number, [1, 2], 20, client="many") for number in range(10)]
    for sequence in many:
        scheduler.add(sequence)
    assert started(scheduler) == [0, 1]
    few = [Sequence(number, [3, 4], 20, client="few") for number in (10, 11)]
    for sequence in few:
        scheduler.add(sequence)
    scheduler.remove(many[0])
    assert started(scheduler) == [1, 10]
    # Both clients run one: the order of arrival decides.
    scheduler.remove(many[1])
    assert started(scheduler) == [2, 10]
    scheduler.remove(few[0])
    assert started(scheduler) == [2, 11]


def test_the_client_that_runs_the_most_gives_up_its_blocks_first() -> None:
    scheduler = Scheduler(6, BLOCK, reuse=False)
    sequences = [Sequence(number, [1] * 3, 24, client="few" if number == 2 else "many") for number in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert started(scheduler) == [0, 1, 2]
    while not any(sequence.preemptions for sequence in sequences):
        started(scheduler)
    assert [sequence.preemptions for sequence in sequences] == [0, 1, 0]
    assert [sequence.number for sequence in scheduler.running] == [0, 2]


def test_prompts_that_begin_alike_share_blocks_of_one_tenant_only() -> None:
    prompt = tuple(range(13))
    asked = [Asked(prompt, 1, tenant="a"), Asked(prompt, 1, at=9, tenant="a"), Asked(prompt, 1, at=9, tenant="b")]
    _, sequences = run(PagedEngine(), asked, budget=16)
    assert [sequence.reused for sequence in sequences] == [0, 12, 0]


def test_the_last_token_of_a_prompt_is_computed_although_its_block_is_cached() -> None:
    prompt = tuple(range(12))
    tokens, sequences = run(PagedEngine(), [Asked(prompt, 3), Asked(prompt, 3, at=9)], budget=16)
    assert sequences[1].reused == 8
    assert tokens[0] == tokens[1]


def test_kept_blocks_give_way_to_new_sequences() -> None:
    asked = [Asked(tuple(range(start, start + 12)), 1, at=3 * start) for start in range(6)]
    tokens, _ = run(PagedEngine(blocks=4), asked)
    assert tokens == [alone(one) for one in asked]


def test_no_more_sequences_run_than_allowed() -> None:
    engine = PagedEngine()
    run(engine, [Asked((1, 2), 4)] * 5, most=2)
    assert max(len(step) for step in engine.steps) == 2


@pytest.mark.parametrize(("tokens", "limit"), [(0, 4), (5, 4), (3, 17)])
def test_a_sequence_that_can_never_run_is_refused(tokens: int, limit: int) -> None:
    scheduler = Scheduler(4, BLOCK)
    with pytest.raises(ValueError, match="tokens"):
        scheduler.add(Sequence(0, [1] * tokens, limit))
    assert not scheduler.waiting


def test_the_pool_gives_no_block_twice() -> None:
    pool = BlockPool(3)
    first = pool.allocate(2)
    with pytest.raises(ValueError, match="2 blocks are wanted and 1 are available"):
        pool.allocate(2)
    assert len({*first, *pool.allocate(1)}) == 3
    assert pool.available == 0


@given(st.lists(st.integers(0, 9), max_size=20), st.lists(st.integers(0, 9), max_size=20))
def test_two_sequences_have_the_hashes_of_their_common_blocks_in_common(first: list[int], second: list[int]) -> None:
    common = 0
    while first[common : common + BLOCK] == second[common : common + BLOCK] and common + BLOCK <= len(first):
        common += BLOCK
    shared = set(block_hashes(first, BLOCK, "a")) & set(block_hashes(second, BLOCK, "a"))
    assert len(shared) == common // BLOCK
    assert not set(block_hashes(first, BLOCK, "a")) & set(block_hashes(second, BLOCK, "b"))


def test_the_budget_follows_the_measured_time_of_a_token() -> None:
    budget = ChunkBudget(0.05)
    assert budget.tokens(0) == 512
    for _ in range(50):
        budget.observe(0, 4, 0.02)
        budget.observe(100, 4, 0.02 + 100 * 0.0005)
    assert budget.tokens(4) == pytest.approx(4 + 60, abs=2)
    for _ in range(100):
        budget.observe(100, 4, 1.0)
    assert budget.tokens(4) == 4 + 16
