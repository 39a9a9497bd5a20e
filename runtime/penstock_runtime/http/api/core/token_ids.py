"""Inputs that may be texts or token ids, for the APIs of OpenAI and text-embeddings-inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock_runtime.errors import InvalidInput
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.embeddings.feature_extraction import TokenIds
from penstock_runtime.tasks.fields import Integer, JsonSchema, ListOf, Text

ABOUT_IDS = (
    "A text or a list of texts; or either as token ids, of this model's own tokenizer and without special tokens."
)
LARGEST = 2**31 - 1
ID = Integer(0, LARGEST)
LONGEST = 100_000
"""Maximum ids of one text: more than any encoder takes, to limit the part that is cut."""


@dataclass(frozen=True)
class TextsOrIds:
    """A text, texts, the ids of a text, or the ids of texts; decided by the first entry of a list."""

    limits: RequestLimits
    longest: int = LONGEST
    """Maximum ids of one text."""
    words: str = "a text, a list of texts, or token ids"
    python: type = object

    def parse(self, value: Any, where: str) -> str | list[str] | TokenIds:
        """The inputs for a feature-extraction task."""
        if isinstance(value, str):
            return Text().parse(value, where)
        if not isinstance(value, list):
            raise InvalidInput(f"{where} must be {self.words}", field=where, remedy=f"Send {self.words}")
        first = value[0] if value else ""
        if isinstance(first, list):
            return TokenIds(self._lists.parse(value, where), single=False)
        if isinstance(first, int | float) and not isinstance(first, bool):
            return TokenIds([self._ids.parse(value, where)], single=True)
        texts: list[str] = self._texts.parse(value, where)
        return texts

    def schema(self) -> JsonSchema:
        """JSON schema of the four forms."""
        kinds = (Text(), self._texts, self._ids, self._lists)
        return {"anyOf": [kind.schema() for kind in kinds]}

    @property
    def _texts(self) -> ListOf:
        return ListOf(Text(), self.limits.items)

    @property
    def _ids(self) -> ListOf:
        return ListOf(ID, self.longest, words="a list of token ids")

    @property
    def _lists(self) -> ListOf:
        return ListOf(self._ids, self.limits.items, words="a list of lists of token ids")
