from __future__ import annotations

import pytest

from penstock_runtime.batching.queue import DEFAULT_TOKENS_PER_SECOND, TokenRate


def test_the_rate_is_the_sum_of_all_workers() -> None:
    rate = TokenRate(4)
    assert rate.tokens_per_second == 4 * DEFAULT_TOKENS_PER_SECOND

    for _ in range(10):
        rate.add(500, 0.1)

    assert rate.tokens_per_second == pytest.approx(4 * 5000)


def test_the_rate_forgets_old_times() -> None:
    rate = TokenRate(1)
    for _ in range(100):
        rate.add(1000, 1.0)
    for _ in range(30):
        rate.add(100, 1.0)

    assert 100 <= rate.tokens_per_second < 120
