"""The same requests alone and together, on an engine of the tests with a real cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from penstock_optimizer.guard.batch_invariance import Tokens, measure_invariance, requests_of, run_requests
from penstock_runtime.rows import Float, StepRow
from tests.runtime.generation.paged_engine import PagedEngine


def prompts(*lengths: int) -> list[Tokens]:
    random = np.random.default_rng(5)
    return [random.integers(0, 40, length).astype(np.int32) for length in lengths]


def engine() -> PagedEngine:
    return PagedEngine(context=160, block_size=4, blocks=160)


class VaryingEngine(PagedEngine):
    """Its logits depend on the number of rows in a step."""

    def step(self, rows: Sequence[StepRow]) -> Float:
        logits = super().step(rows)
        logits[:, len(rows) % logits.shape[1]] += 100.0
        return logits


def test_half_of_the_requests_have_a_seed_and_their_lengths_differ() -> None:
    found = requests_of(prompts(3, 9), 6, 5)
    assert [one.seed for one in found] == [None, 1, None, 3, None, 5]
    assert [one.length for one in found] == [5, 4, 3, 2, 5, 4]
    assert [len(one.prompt) for one in found] == [3, 9] * 3


def test_answers_have_their_lengths_in_any_number_of_requests_at_once() -> None:
    requests = requests_of(prompts(3, 120, 9), 7, 6)
    found = [run_requests(engine(), requests, at_once) for at_once in (1, 3, 16)]
    assert found[0] == found[1] == found[2]
    assert [len(tokens) for tokens in found[0]] == [one.length for one in requests]


def test_an_engine_that_gives_the_same_bits_in_any_batch_is_found_to_do_so() -> None:
    found = measure_invariance(engine(), requests_of(prompts(3, 9, 120), 20, 5), at_once=8)
    assert (found.requests, found.differing, found.same_tokens, found.at_once) == (20, 0, 1.0, 8)


def test_an_engine_whose_logits_depend_on_the_batch_is_found_out() -> None:
    varying = VaryingEngine(context=160, block_size=4, blocks=160)
    found = measure_invariance(varying, requests_of(prompts(3, 9, 40), 16, 5), at_once=8)
    assert found.requests == 16
    assert found.differing >= 8
    assert found.same_tokens < 0.5


def test_without_time_one_group_is_compared() -> None:
    found = measure_invariance(engine(), requests_of(prompts(3), 20, 4), at_once=4, goes_on=lambda: False)
    assert found.requests == 4


@pytest.mark.extended
def test_a_thousand_requests_are_the_same_alone_and_16_at_a_time() -> None:
    requests = requests_of(prompts(*range(1, 60)), 1000, 12)
    found = measure_invariance(PagedEngine(context=160, block_size=4, blocks=400), requests, at_once=16)
    assert (found.requests, found.differing) == (1000, 0)
