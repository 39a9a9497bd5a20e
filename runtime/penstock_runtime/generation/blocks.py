"""Accounting of the cache blocks in an engine's pool: which are in use, shared, or kept for prompts that begin alike.

Pure: the engine owns the memory of the blocks, this module their numbers. A block that is full and computed is
registered by a hash of everything before its end, so that a later sequence with the same beginning can share it. A
shared block is never written again, because a sequence only writes behind its registered blocks.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

HASH_BYTES = 16


def block_hashes(tokens: Sequence[int], block_size: int, tenant: str) -> list[bytes]:
    """The hash of each full block of a sequence: of the tenant, the tokens of the block, and all tokens before it.

    Sequences of different tenants never have a hash in common, so that no tenant can learn from the speed of an answer
    the prompts of another one.
    """
    parent = tenant_root(tenant)
    hashes = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = next_hash(parent, tokens[start : start + block_size])
        hashes.append(parent)
    return hashes


def tenant_root(tenant: str) -> bytes:
    """The hash before the first block of a tenant's sequences."""
    return hashlib.blake2b(tenant.encode(), digest_size=HASH_BYTES).digest()


def next_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block after the block with the hash `parent`."""
    content = np.asarray(tokens, dtype="<i4").tobytes()
    return hashlib.blake2b(content, digest_size=HASH_BYTES, key=parent).digest()


class BlockPool:
    """The blocks of one engine. Every block is in use by one or more sequences, kept for its content, or empty."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._empty = list(range(count - 1, -1, -1))
        self._users: dict[int, int] = {}
        """Number of sequences that use a block."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Registered blocks that no sequence uses, the least recently used first."""
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: empty ones, and those that are only kept for their content."""
        return len(self._empty) + len(self._kept)

    @property
    def in_use(self) -> int:
        """Blocks that sequences use."""
        return len(self._users)

    @property
    def kept(self) -> int:
        """Blocks that no sequence uses, kept for prompts that begin alike."""
        return len(self._kept)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The registered blocks of the longest common beginning."""
        found = []
        for one in hashes:
            block = self._block_of.get(one)
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, matched: Sequence[int], more: int) -> bool:
        """Whether a sequence can use the matched blocks and `more` further ones."""
        kept = sum(block in self._kept for block in matched)
        return more <= self.available - kept

    def use(self, blocks: Iterable[int]) -> None:
        """Count one more sequence for each of these registered blocks."""
        for block in blocks:
            self._kept.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1

    def allocate(self, count: int) -> list[int]:
        """Blocks for one sequence to write; their former content is forgotten. ValueError if there are too few."""
        if count > self.available:
            raise ValueError(f"{count} blocks are wanted and {self.available} are available")
        given = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _none = self._kept.popitem(last=False)
                self._block_of.pop(self._hash_of.pop(block))
            self._users[block] = 1
            given.append(block)
        return given

    def register(self, block: int, content: bytes) -> None:
        """A block in use is full and computed: `content` is its hash. Does nothing if another block has the same."""
        if content not in self._block_of and block not in self._hash_of:
            self._block_of[content] = block
            self._hash_of[block] = content

    def release(self, blocks: Sequence[int]) -> None:
        """A sequence no longer uses these blocks. Registered ones are kept; the last of them are the first to go."""
        for block in reversed(blocks):
            users = self._users[block] - 1
            if users:
                self._users[block] = users
                continue
            del self._users[block]
            if block in self._hash_of:
                self._kept[block] = None
            else:
                self._empty.append(block)
