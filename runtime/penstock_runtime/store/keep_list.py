"""What is not to be deleted from a store."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.artefact_store import ALGORITHM, DIGITS_KEPT, Digest
from penstock.errors import SettingError

_FORM = re.compile(rf"(?:{ALGORITHM}:)?([0-9a-f]{{{DIGITS_KEPT}}})[0-9a-f]{{0,{64 - DIGITS_KEPT}}}")


@dataclass(frozen=True)
class Kept:
    """Digests by their first digits: whatever begins like one of them is kept."""

    beginnings: frozenset[str] = frozenset()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Kept:
        """From digests, whole or cut. ValueError: one is none, or too short."""
        found = {text: _FORM.fullmatch(text) for text in texts}
        wrong = next((text for text, match in found.items() if match is None), None)
        if wrong is not None:
            raise ValueError(f"{wrong[:100]!r} is no digest with {DIGITS_KEPT} digits or more")
        return cls(frozenset(match[1] for match in found.values() if match is not None))

    @classmethod
    def read(cls, path: Path | None) -> Kept:
        """From a file with `{"keep": [...]}`; None: nothing is kept.

        SettingError: it cannot be read, so nothing may be deleted.
        """
        if path is None:
            return cls()
        try:
            return cls.of(map(str, json.loads(path.read_text(encoding="utf-8"))["keep"]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise SettingError(
                f"--keep-file {path} does not say what to keep ({type(error).__name__}: {error})",
                field="--keep-file",
                remedy='Write {"keep": ["sha256:..."]}; an empty list keeps nothing',
            ) from error

    def __or__(self, other: Kept) -> Kept:
        return Kept(self.beginnings | other.beginnings)

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, Digest) and digest.hexadecimal[:DIGITS_KEPT] in self.beginnings
