from __future__ import annotations

import pytest

from penstock_runtime.batching.queue import DEFAULT_TOKENS_PER_SECOND, QueueBounds, TokenRate
from penstock_runtime.errors import InvalidInput, Overloaded

BOUNDS = QueueBounds(rows=10, tokens=100)


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


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1), (1, 1), (1000, 1), (1001, 2), (9500, 10), (10**9, 60)])
def test_retry_after_is_the_time_that_the_queue_takes(tokens: int, seconds: int) -> None:
    rate = TokenRate(1)
    rate.add(1000, 1.0)

    assert rate.retry_after_seconds(tokens) == seconds


@pytest.mark.parametrize(
    ("rows", "tokens", "waiting_rows", "waiting_tokens"),
    [
        (1, 1, 0, 0),
        (10, 100, 0, 0),
        (1, 10, 9, 90),
        (5, 10, 5, 90),
        (1, 500, 0, 0),  # one row over the bound is accepted when no other waits: it cannot be split
    ],
)
def test_requests_that_fit_into_the_queue_are_accepted(
    rows: int, tokens: int, waiting_rows: int, waiting_tokens: int
) -> None:
    BOUNDS.check(rows, tokens, waiting_rows, waiting_tokens, TokenRate(1))


@pytest.mark.parametrize(
    ("rows", "tokens", "waiting_rows", "waiting_tokens"),
    [
        (1, 1, 10, 50),
        (1, 1, 5, 100),
        (2, 2, 9, 50),
        (2, 20, 5, 90),
        (10, 100, 1, 1),
        (1, 500, 1, 1),
    ],
)
def test_a_full_queue_refuses_one_row_and_many_alike(
    rows: int, tokens: int, waiting_rows: int, waiting_tokens: int
) -> None:
    with pytest.raises(Overloaded) as caught:
        BOUNDS.check(rows, tokens, waiting_rows, waiting_tokens, TokenRate(1))

    assert caught.value.retry_after_seconds >= 1
    assert f"{waiting_rows} sequences of {waiting_tokens} tokens" in caught.value.message


@pytest.mark.parametrize(("rows", "tokens", "what"), [(11, 50, "11 sequences"), (5, 101, "101 tokens")])
@pytest.mark.parametrize("waiting", [0, 9])
def test_a_request_larger_than_the_queue_is_refused_permanently(
    rows: int, tokens: int, what: str, waiting: int
) -> None:
    with pytest.raises(InvalidInput) as caught:
        BOUNDS.check(rows, tokens, waiting, waiting, TokenRate(1))

    assert what in caught.value.message
    assert "smaller requests" in caught.value.remedy
