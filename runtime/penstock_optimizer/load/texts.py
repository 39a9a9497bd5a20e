"""Texts of exactly so many tokens, for any tokenizer: everyday words, varied, the same for the same seed.

Works by measuring, not by knowing the tokenizer: words whose addition to a text adds one token are its bricks. Where
everyday words give none (a tiny or foreign vocabulary), the vocabulary's own entries are tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cached_property

from tokenizers import Tokenizer

from penstock.errors import UnsupportedModel

_FREQUENT = (
    "the of and to in is was for on that with as it by from at his an were are which this also be has or had first "
    "one their its new after but who not they have her she two been other when there all during into school time "
    "may years more most only over city some world would where later up such used many can state about national "
    "out known university united then made under between number people before while part year game team through "
    "music life against home south north well three same name second four high long each being small use large "
    "work group often film public house now day several found general left government including end family based "
    "local public service station road water line season system company early order place power great final war "
    "west east town country however book played area called back near court law main open land set named head "
    "party story form point died old next play run show play white black red green blue light night day morning "
    "food market price money question answer letter reason idea plan test result change move turn hand eye face "
    "door street river mountain sea rain wind snow summer winter garden tree flower bird horse dog cat fish"
)
EVERYDAY_WORDS = tuple(dict.fromkeys(_FREQUENT.split()))
"""Frequent English words, most of which are one token in any English or multilingual vocabulary."""

ATTEMPTS = 64
CANDIDATES_FROM_VOCABULARY = 3000
ENOUGH_BRICKS = 64


class TextMaker:
    """Makes texts for one tokenizer. Counts include the special tokens that the tokenizer adds."""

    def __init__(self, tokenizer: Tokenizer, *, seed: int = 0) -> None:
        # A copy: switching truncation and padding off must not reach the tokenizer that serves.
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._random = random.Random(seed)  # noqa: S311 - reproducible, not secret

    def count(self, text: str, pair: str | None = None) -> int:
        """Tokens of a text, or of a pair."""
        return len(self.ids(text, pair))

    def ids(self, text: str, pair: str | None = None) -> list[int]:
        """The tokens of a text, or of a pair, special ones included: all of them, and no padding, whatever the model's
        own tokenizer is set to."""
        ids: list[int] = self._tokenizer.encode(text, pair).ids
        return ids

    @cached_property
    def specials(self) -> int:
        """Tokens that the tokenizer adds to a single text."""
        return int(self._tokenizer.num_special_tokens_to_add(is_pair=False))

    @cached_property
    def bricks(self) -> tuple[str, ...]:
        """Words that add one token each to the end of a text."""
        found = self._one_token_words(EVERYDAY_WORDS)
        if len(found) < ENOUGH_BRICKS:
            entries = sorted(self._tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
            words = (self._tokenizer.decode([index]).strip() for _, index in entries[:CANDIDATES_FROM_VOCABULARY])
            found += self._one_token_words(tuple(dict.fromkeys(word for word in words if word.isalnum())))
        if not found:
            raise UnsupportedModel(
                "no word adds exactly one token with this tokenizer, so that no texts of a given length can be made",
                remedy="State typical inputs in spec.workload.texts",
            )
        return tuple(dict.fromkeys(found))

    def text(self, tokens: int) -> str:
        """A text of exactly `tokens` tokens; of the fewest possible when that is more (specials and one word)."""
        wanted = max(tokens, self.specials + 1)
        return self._grow(wanted, self.count, words=wanted - self.specials)

    def pair(self, first: str, tokens: int) -> str:
        """A second text, so that the pair has exactly `tokens` tokens, or the fewest possible."""
        fewest = self.count(first, self.bricks[0])
        wanted = max(tokens, fewest)
        return self._grow(wanted, lambda text: self.count(first, text), words=1 + wanted - fewest)

    def _grow(self, wanted: int, count: Callable[[str], int], *, words: int) -> str:
        """Draw words until their count is right; neighbours that merge are drawn again."""
        number = words
        for _ in range(ATTEMPTS):
            text = " ".join(self._random.choices(self.bricks, k=number))
            counted = count(text)
            if counted == wanted:
                return text
            number = max(1, number + wanted - counted)
        raise UnsupportedModel(
            f"no text of exactly {wanted} tokens was found with this tokenizer in {ATTEMPTS} attempts",
            remedy="State typical inputs in spec.workload.texts",
        )

    def _one_token_words(self, words: tuple[str, ...]) -> list[str]:
        """Those of `words` that add one token, both behind a word of their own kind and behind each other."""
        if not words:
            return []
        singles = [self._tokenizer.encode(f"{word} {word}", add_special_tokens=False).ids for word in words]
        return [word for word, ids in zip(words, singles, strict=True) if len(ids) == 2]
