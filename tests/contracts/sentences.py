"""How often docstrings and comments use sentence patterns that a reader has to decode, per 10,000 words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from typing import NamedTuple

PATTERNS = {
    "that of": r"\b(that|those) of\b",
    "what, as a noun": r"\bwhat (it|is|has|the|they|he|a|an|this|that|was|are|its)\b",
    "whose": r"\bwhose\b",
    "of its own": r"\bof (its|their) own\b",
    "others": r"\bothers\b",
    "ask, of code": r"\bask(s|ed|ing)?\b",
    "turn": r"\bturns?\b",
    "place": r"\bplaces?\b",
}
WORD = re.compile(r"[A-Za-z][\w'-]*")
ANY = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS.values()), re.IGNORECASE)


class Count(NamedTuple):
    """Words, and how many of the patterns are in them."""

    words: int
    hits: int

    @property
    def share(self) -> float:
        """Hits per 10,000 words."""
        return self.hits / max(self.words, 1) * 10_000


def prose(source: str) -> str:
    """The docstrings and comments of a Python file."""
    parts = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join([*parts, *(one.string.lstrip("#") for one in tokens if one.type == tokenize.COMMENT)])


def count(sources: Iterable[str]) -> Count:
    """Of these Python files together."""
    texts = [prose(source) for source in sources]
    return Count(sum(len(WORD.findall(text)) for text in texts), sum(len(ANY.findall(text)) for text in texts))
