"""A table of words and their tokens, which replaces the `tokenizers` library for ASCII texts and BERT tokenizers.

They split a text of printable ASCII into words and single marks, and the tokens of each do not depend on its
neighbours. So the library tokenises each word once, and the table is used from then on, in a fraction of the time
(docs/decisions/tokens-from-a-table.md).
"""

from __future__ import annotations

import re
from typing import Any, cast

from tokenizers.models import WordPiece

from penstock_runtime.tokens.backend import component

LONGEST_TEXTS = 100_000
"""Characters of all texts together: more, which would take some 6 ms and longer, are left to the library, which lets
the interpreter's lock go meanwhile."""
MOST_LEARNT = 16_384
"""Words that are kept in addition to those of the vocabulary: some 5 MB."""
LONGEST_LEARNT = 32
"""Characters of such a word."""
MOST_ADDED = 32
"""Added tokens that a text is searched for, one by one."""

_PLAIN = re.compile(r"[\t\n\r -~]*")
_WORDS = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")


class Words:
    """The table of one tokenizer. Any number of threads may use it at once; it grows to a bound."""

    def __init__(self, backend: Any, *, lower_case: bool) -> None:
        """Use `of`, which knows whether a tokenizer is of this kind."""
        self._backend = backend
        self._lower_case = lower_case
        self._added = tuple(token.content.lower() for token in backend.get_added_tokens_decoder().values())
        shared: set[str] = set.intersection(*map(set, self._added)) if self._added else set()
        self._sign = min(shared, default="")
        """What is in all of them, such as `[`: one look instead of one for each."""
        longest = backend.model.max_input_chars_per_word
        # What is a word of the vocabulary as a whole is taken as a whole.
        self._whole: dict[str, int] = {
            word: number
            for word, number in backend.get_vocab(with_added_tokens=False).items()
            if len(word) <= longest and _WORDS.fullmatch(word)
        }
        self._learnt: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of(cls, backend: Any) -> Words | None:
        """The table for the library's tokenizer, or None where words are not independent or marks not single."""
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
        """The tokens of a text without those of a template; None for a text that only the library can split."""
        if not (text.isascii() and (text.isprintable() or _PLAIN.fullmatch(text))):
            return None
        lowered = text.lower()
        if self._sign in lowered and any(token in lowered for token in self._added):
            return None
        words = _WORDS.findall(lowered if self._lower_case else text)
        # All at once, without the interpreter: most texts have nothing else.
        numbers = list(map(self._whole.get, words))
        if None not in numbers:
            return cast("list[int]", numbers)
        ids: list[int] = []
        for word, number in zip(words, numbers, strict=True):
            if number is None:
                ids += self._learnt.get(word) or self._asked(word)
            else:
                ids.append(number)
        return ids

    def _asked(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._backend.encode(word, add_special_tokens=False).ids)
        if len(word) <= LONGEST_LEARNT and len(self._learnt) < MOST_LEARNT:
            self._learnt[word] = ids
        return ids


def _is_searched(content: str) -> bool:
    """Whether an added token is found in a plain text as it is written. The normaliser makes a space of a tab and
    nothing of a control character, in the text and in the token."""
    return content.isascii() and content.isprintable() and " " not in content
