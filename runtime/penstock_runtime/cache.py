"""A bounded memory of what has been computed before, by content. Used from one thread."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any, Generic, TypeVar

import orjson

T = TypeVar("T")

_OVERHEAD_BYTES = 256
"""Of an entry: key, links, boxes."""


class BoundedCache(Generic[T]):
    """The most recently used values, as many as fit into `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._values: OrderedDict[bytes, tuple[T, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> T | None:
        """The value, which is now the most recently used."""
        found = self._values.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: bytes, value: T, size: int) -> None:
        """Remember a value of `size` bytes, and forget the least recently used ones beyond the limit."""
        size += _OVERHEAD_BYTES
        if size > self.max_bytes:
            return
        old = self._values.pop(key, None)
        if old is not None:
            self.bytes -= old[1]
        self._values[key] = (value, size)
        self.bytes += size
        while self.bytes > self.max_bytes:
            _, (_, freed) = self._values.popitem(last=False)
            self.bytes -= freed

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
        self.bytes = 0


def content_key(*parts: Any) -> bytes | None:
    """A hash of JSON values, the same for the same content; None for what is not JSON (refused elsewhere)."""
    try:
        text = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return None
    return hashlib.blake2b(text, digest_size=32).digest()


def json_size(value: Any) -> int:
    """Bytes of a value as JSON: about what it takes in memory, numpy arrays included."""
    return len(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
