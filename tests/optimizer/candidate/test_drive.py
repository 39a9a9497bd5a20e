"""Driving an engine along texts, on an engine of the tests with a real cache."""

from __future__ import annotations

import numpy as np
import pytest

from penstock_optimizer.candidate.drive import Forced, continue_greedily, forced_logits, measure_prompts, measure_speed
from tests.runtime.generation.paged_engine import PagedEngine


def engine() -> PagedEngine:
    return PagedEngine(context=160, block_size=4, blocks=8 * 40)


def prompts(*lengths: int) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    random = np.random.default_rng(5)
    return [random.integers(0, 40, length).astype(np.int32) for length in lengths]


@pytest.mark.parametrize("lengths", [(1,), (3, 70, 130), (5,) * 11])
def test_an_engine_forced_along_its_own_continuations_gives_their_logits_again(lengths: tuple[int, ...]) -> None:
    texts = prompts(*lengths)
    found = continue_greedily(engine(), texts, 6)
    forced = forced_logits(engine(), [Forced(text, tokens) for text, (tokens, _) in zip(texts, found, strict=True)])
    assert len(forced) == len(texts)
    for (tokens, logits), again in zip(found, forced, strict=True):
        np.testing.assert_array_equal(logits.argmax(1), tokens)
        np.testing.assert_array_equal(logits, again)


def test_continuations_may_differ_in_length() -> None:
    texts = prompts(4, 4)
    whole = continue_greedily(engine(), texts, 5)
    forced = forced_logits(engine(), [Forced(texts[0], whole[0][0][:2]), Forced(texts[1], whole[1][0])])
    assert [len(logits) for logits in forced] == [2, 5]
    np.testing.assert_array_equal(forced[1], whole[1][1])


def test_times_name_what_was_measured() -> None:
    speed = measure_speed(engine(), prompts(12)[0], 4)
    assert (speed.prompt_tokens, speed.output_tokens, speed.clients) == (12, 4, 8)
    assert 0 < speed.next_token_p50_milliseconds <= speed.next_token_p95_milliseconds
    assert speed.tokens_per_second > 0
    points = measure_prompts(engine(), [3, 16])
    assert [point.tokens for point in points] == [3, 16]
    assert all(0 < point.minimum_milliseconds <= point.p50_milliseconds for point in points)
