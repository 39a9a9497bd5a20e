"""Makes text of tokens: of a sequence while it is generated, without half characters and stop strings, and of single
tokens. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_HELD = 16
"""Tokens that are held back as the beginning of a character. It has up to four bytes; more are no character."""
LONGEST_WINDOW = 16
"""Tokens that are decoded together before the older ones are dropped."""
WIDEST_WINDOW = 64
"""Tokens that are decoded together at most, once all of their text is given."""
KEPT = 6
"""Tokens before the next one that are decoded with it: a decoder may join or strip spaces between tokens."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Detokeniser:
    """The text of one sequence, piece by piece.

    Tokens are decoded in a window, because the text of a token depends on earlier ones. A character whose bytes are
    spread over several tokens is held back until its last byte: decoders write U+FFFD for it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0
        """Characters of the window's text that were returned."""
        self._held = 0
        """Tokens since then."""

    def push(self, token: int) -> str:
        """The text that this token completes; often one word, empty while a character is incomplete."""
        self._window.append(token)
        text = self._decode(self._window)
        end = len(text.rstrip(REPLACEMENT))
        self._held += 1
        if self._held > LONGEST_HELD:
            end = len(text)
        new = text[self._given : end]
        if new or end == len(text):
            self._held = 0
        self._given = max(self._given, end)
        if len(self._window) > LONGEST_WINDOW and end == len(text):
            self._shorten(text)
        return new

    def finish(self) -> str:
        """The text that was held back: replacement characters for a character that never became complete."""
        rest = self._decode(self._window)[self._given :]
        self._given += len(rest)
        return rest

    def _shorten(self, text: str) -> None:
        kept = self._window[-KEPT:]
        beginning = self._decode(kept)
        # A window may not begin inside a character: its text would change with the next token. Tokens that are no
        # text have no better position.
        is_place = REPLACEMENT not in beginning and text.endswith(beginning.lstrip())
        if is_place or len(self._window) > WIDEST_WINDOW:
            self._window = kept
            self._given = len(beginning)


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the stop string is part of the text."""
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> str:
        """The text that is certainly not part of a stop string. Nothing follows once one is found."""
        if self.found is not None:
            return ""
        text = self._held + piece
        first = min(((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if first is not None:
            at, self.found = first
            self._held = ""
            return text[: at + len(self.found)] if self._include else text[:at]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    @property
    def held(self) -> str:
        """The text that is held back at present."""
        return self._held

    def finish(self) -> str:
        """The text that was held back, when it ends without a stop string."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@cache
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level tokenizers, by the rule of GPT-2: printable characters are themselves, the other bytes
    are the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def token_bytes(backend: Any, token: int, *, byte_level: bool) -> bytes:
    """The bytes of a token, which may be a part of a character. `backend`: of the tokenizers library."""
    name = backend.id_to_token(token)
    if name is None:
        return b""
    if byte_level:
        alphabet = _byte_of_character()
        if all(character in alphabet for character in name):
            return bytes(alphabet[character] for character in name)
        return str(name).encode()  # an added token, which is written as it is
    found = BYTE.fullmatch(name)
    return bytes([int(found[1], 16)]) if found else str(name).replace("\u2581", " ").encode()
