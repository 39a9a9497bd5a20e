"""Caches the tokens of words, for ASCII texts and tokenizers of the BERT kind.

With those, a text of printable ASCII consists of words and single punctuation marks, with tokens that do not depend on
the context. So each word is tokenised by the library once and looked up from then on, which takes a fraction of the
time (docs/decisions/tokens-from-a-table.md).
"""

from __future__ import annotations

import re
from typing import Any, cast

from tokenizers.models import WordPiece

from penstock_runtime.tokens.backend import component

LONGEST_TEXTS = 100_000
"""Characters of all texts together. Longer ones would take 6 ms and more; the library releases the interpreter lock
meanwhile."""
MOST_LEARNT = 16_384
"""Cached words that are not in the vocabulary: some 5 MB."""
LONGEST_LEARNT = 32
"""Characters of a cached word."""
MOST_ADDED = 32
"""Added tokens to search in each text, one by one."""

_PLAIN = re.compile(r"[\t\n\r -~]*")
_WORDS = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")


class WordTable:
    """The word cache of one tokenizer. Thread-safe, bounded."""

    def __init__(self, backend: Any, *, lower_case: bool) -> None:
        """Use `of`, which checks that the tokenizer is of this kind."""
        self._backend = backend
        self._lower_case = lower_case
        self._added = tuple(token.content.lower() for token in backend.get_added_tokens_decoder().values())
        shared: set[str] = set.intersection(*map(set, self._added)) if self._added else set()
        self._sign = min(shared, default="")
        """A character that all of them contain, such as `[`: one search instead of one for each."""
        longest = backend.model.max_input_chars_per_word
        # A word of the vocabulary is one token.
        self._whole: dict[str, int] = {
            word: number
            for word, number in backend.get_vocab(with_added_tokens=False).items()
            if len(word) <= longest and _WORDS.fullmatch(word)
        }
        self._learnt: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of(cls, backend: Any) -> WordTable | None:
        """The cache of a tokenizer; None if its words depend on the context or punctuation marks are not single."""
        normalizer = component(backend.normalizer)
        steps = normalizer.get("normalizers", ()) if normalizer.get("type") == "Sequence" else [normalizer]
        kinds = {step.get("type") for step in steps}
        added = backend.get_added_tokens_decoder().values()
        if (
            not isinstance(backend.model, WordPiece)
            or component(backend.pre_tokenizer).get("type") != "BertPreTokenizer"
            or "BertNormalizer" not in kinds
            or not kinds <= {"BertNormalizer", "Lowercase"}
            or len(added) > MOST_ADDED
            or not all(_is_searched(token.content) for token in added)
        ):
            return None
        lower_case = any(step["type"] == "Lowercase" or step["lowercase"] for step in steps)
        return cls(backend, lower_case=lower_case)

    def ids(self, text: str) -> list[int] | None:
        """The tokens of a text without the template's; None for a text that only the library can tokenise."""
        if not (text.isascii() and (text.isprintable() or _PLAIN.fullmatch(text))):
            return None
        lowered = text.lower()
        if self._sign in lowered and any(token in lowered for token in self._added):
            return None
        words = _WORDS.findall(lowered if self._lower_case else text)
        # In one call, without interpreter code for each word: sufficient for most texts.
        numbers = list(map(self._whole.get, words))
        if None not in numbers:
            return cast("list[int]", numbers)
        ids: list[int] = []
        for word, number in zip(words, numbers, strict=True):
            if number is None:
                ids += self._learnt.get(word) or self._tokenised(word)
            else:
                ids.append(number)
        return ids

    def _tokenised(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._backend.encode(word, add_special_tokens=False).ids)
        if len(word) <= LONGEST_LEARNT and len(self._learnt) < MOST_LEARNT:
            self._learnt[word] = ids
        return ids


def _is_searched(content: str) -> bool:
    """True if an added token occurs in an ASCII text as it is written.

    The normaliser replaces tabs by spaces and removes control characters, in texts and in tokens.
    """
    return content.isascii() and content.isprintable() and " " not in content
