"""The trace of the benchmark of caches."""

from __future__ import annotations

from collections import Counter

from benchmarks.zipf import zipf_trace


def test_the_ranks_of_a_zipf_trace_follow_its_law() -> None:
    trace = zipf_trace(100, 1.0, 50_000, seed=3)
    counts = Counter(trace)

    assert trace == zipf_trace(100, 1.0, 50_000, seed=3)
    assert set(trace) <= set(range(100))
    # The first text comes with 1/H(100) = 19.3 %, the second half as often, the tenth a tenth as often.
    assert abs(counts[0] / 50_000 - 0.193) < 0.01
    assert abs(counts[0] / counts[1] - 2) < 0.15
    assert abs(counts[0] / counts[9] - 10) < 1.2
