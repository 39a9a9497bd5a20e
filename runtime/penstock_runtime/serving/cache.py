"""A cache of computed values by a hash of their inputs, limited in bytes. Used from one thread."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import fields, is_dataclass
from sys import getsizeof
from typing import Any, Generic, TypeVar

import numpy as np
import orjson

T = TypeVar("T")

_OVERHEAD_BYTES = 288
"""Of an entry: its key, its links and its slot in the table, which has room for more (230 to 330 bytes measured)."""
_SMALL_INTEGERS = range(-5, 257)
"""The interpreter has only one object of each."""
_NUMBERS = {int, float}
_NUMBER_BYTES = 28


class BoundedCache(Generic[T]):
    """The most recently used values, limited to `max_bytes`."""

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
        """Store a value of `size` bytes, and drop the least recently used ones over the limit."""
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
        """Drop all values."""
        self._values.clear()
        self.bytes = 0


def content_key(*parts: Any) -> bytes | None:
    """A hash of JSON values, the same for the same content; None for what is not JSON (refused elsewhere)."""
    try:
        text = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return None
    return hashlib.blake2b(text, digest_size=32).digest()


def memory_size(value: Any) -> int:
    """Bytes that a value takes in memory, which is several times its JSON: what JSON has, tuples, dataclasses, arrays.

    Keys are not counted: they are names, and the same for all. Other texts are, also where values share them, so that
    it is rather too much than too little.
    """
    size = 0
    left = [value]
    while left:
        one = left.pop()
        kind = type(one)
        if one is None or (kind is int and one in _SMALL_INTEGERS):
            continue
        size += getsizeof(one)
        if kind is float or kind is int:
            continue
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list | tuple):
            if set(map(type, one)) <= _NUMBERS:
                # All at once: a request may have a million token ids.
                size += len(one) * _NUMBER_BYTES
            else:
                left += one
        elif isinstance(one, str):
            if not one.isascii():
                # Writing it as JSON also keeps its UTF-8 form, if that is not there already.
                size += len(one.encode(errors="surrogatepass"))
        elif isinstance(one, np.ndarray):
            if one.base is not None:
                # A view keeps its whole array.
                left.append(one.base)
        elif is_dataclass(one):
            left += [getattr(one, field.name) for field in fields(one)]
    return size
