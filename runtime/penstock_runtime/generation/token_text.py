"""The text and bytes of single tokens, for lists of probabilities. Pure."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


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
