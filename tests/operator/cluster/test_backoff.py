"""Waiting times between attempts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_operator.cluster.errors import Backoff


@given(st.integers(1, 5000), st.floats(0.01, 10), st.floats(10, 1000))
def test_a_wait_doubles_up_to_its_limit_and_has_jitter(failures: int, first: float, limit: float) -> None:
    whole = min(limit, first * 2.0 ** min(failures - 1, 60))

    wait = Backoff(first_seconds=first, limit_seconds=limit).seconds(failures)

    assert whole * 0.5 <= wait <= whole


@given(st.floats(0, 100))
def test_the_wait_is_at_least_the_servers_retry_after(asked: float) -> None:
    wait = Backoff(first_seconds=0.1, limit_seconds=1.0).seconds(1, at_least=asked)

    assert wait >= asked
    assert wait <= max(asked * 1.25, 1.0)


@pytest.mark.parametrize(("attempts", "failures", "another"), [(0, 10**6, True), (3, 2, True), (3, 3, False)])
def test_retries_end_after_the_allowed_attempts(attempts: int, failures: int, another: bool) -> None:
    assert Backoff(first_seconds=1, limit_seconds=1, attempts=attempts).allows(failures) is another
