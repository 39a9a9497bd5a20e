from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_runtime.serving.cache import BoundedCache, content_key

ENTRY = 288
"""What an entry costs besides its value."""


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    cache: BoundedCache[str] = BoundedCache(3 * (ENTRY + 10))
    for name in "abc":
        cache.put(name.encode(), name, 10)
    assert cache.get(b"a") == "a"
    cache.put(b"d", "d", 10)

    assert [cache.get(name) for name in (b"a", b"b", b"c", b"d")] == ["a", None, "c", "d"]
    assert (cache.hits, cache.misses) == (4, 1)


def test_a_value_larger_than_the_cache_evicts_nothing() -> None:
    cache: BoundedCache[str] = BoundedCache(ENTRY + 10)
    cache.put(b"a", "a", 10)
    cache.put(b"b", "b", 11)

    assert (cache.get(b"a"), cache.get(b"b")) == ("a", None)


@given(puts=st.lists(st.tuples(st.binary(max_size=1), st.integers(0, 2000)), max_size=60))
def test_the_cache_never_exceeds_its_limit(puts: list[tuple[bytes, int]]) -> None:
    cache: BoundedCache[int] = BoundedCache(3000)
    for key, size in puts:
        cache.put(key, size, size)
        assert cache.bytes <= cache.max_bytes
        assert cache.bytes == sum(value + ENTRY for value, _ in cache._values.values())
    cache.clear()
    assert (len(cache), cache.bytes) == (0, 0)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("a", {"x": 1, "y": 2}), ("a", {"y": 2, "x": 1}), True),
        (("a", {}), ("a", None), False),
        (("a", "b"), (["a", "b"],), False),
        ((1, "a"), (2, "a"), False),
        (("a", {"x": True}), ("a", {"x": 1}), False),
    ],
)
def test_the_key_is_the_content(one: tuple[object, ...], other: tuple[object, ...], same: bool) -> None:
    assert (content_key(*one) == content_key(*other)) is same


def test_a_value_that_is_not_json_has_no_key() -> None:
    assert content_key("\ud800", {}) is None
    assert content_key(object()) is None
