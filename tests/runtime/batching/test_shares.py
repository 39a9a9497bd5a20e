from __future__ import annotations

import pytest

from penstock_runtime.batching.queue import FairShares


def test_the_client_that_was_served_least_is_next() -> None:
    shares = FairShares()
    shares.charge("a", 10)
    shares.charge("b", 3)

    assert shares.next(["a", "b"]) == "b"
    shares.charge("b", 10)
    assert shares.next(["a", "b"]) == "a"


def test_a_client_that_comes_later_has_no_credit_and_one_that_was_alone_no_debt() -> None:
    shares = FairShares()
    for _ in range(100):
        assert shares.next(["a"]) == "a"
        shares.charge("a", 10)
    served = []
    for _ in range(10):
        client = shares.next(["a", "b"])
        served.append(client)
        shares.charge(client, 10)

    assert served.count("a") == pytest.approx(5, abs=1)


def test_what_it_remembers_is_bounded() -> None:
    shares = FairShares()
    for number in range(10_000):
        client = f"client {number}"
        assert shares.next([client]) == client
        shares.charge(client, 1)

    assert len(shares._times) <= 1025
