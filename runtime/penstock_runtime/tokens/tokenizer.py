"""The tokenizer of a model folder: splits texts into tokens, also long ones, and decodes tokens.

For tokenizers of the BERT kind, a text of printable ASCII consists of words and single punctuation marks, with tokens
that do not depend on the context. `WordTable` has each such word tokenised by the library once and looks it up from
then on, which takes a fraction of the time (docs/decisions/tokens-from-a-table.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers.models import WordPiece

from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import TOKENIZER, ModelFolder
from penstock_runtime.tokens.backend import (
    check_vocabulary,
    component,
    missing_unknown,
    open_backend,
    own_size,
    uses_type_ids,
)
from penstock_runtime.tokens.classes import class_of
from penstock_runtime.tokens.convert import convert
from penstock_runtime.tokens.pieces import Pieces, Side, Template, probe
from penstock_runtime.tokens.specials import TokenFiles

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
        # A word of the vocabulary is one token. Pieces of words are in it too: `ids` looks for words only.
        self._whole: dict[str, int] = backend.get_vocab(with_added_tokens=False)
        for word in [word for word in self._whole if len(word) > longest]:
            del self._whole[word]
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


CHARACTERS_PER_TOKEN = 12
"""Characters of a long text to tokenise first, for each token: English has some 4.5, CJK 1, source code 3."""

LARGE_LOOK = 200_000
"""Characters."""
GROWTH = 4
"""The factor by which that part grows if it was not sufficient."""

MARGIN_WORDS = 2
"""Words before a cut with tokens that may depend on the text after it (a pre-tokenizer may look one word ahead)."""


class Tokenizer:
    """Splits texts into tokens. Immutable after `load`, and thread-safe."""

    def __init__(
        self,
        backend: Any,
        specials: Mapping[str, int],
        *,
        type_ids: bool,
        config: Mapping[str, Any] | None = None,
        size: int | None = None,
        embedded: int | None = None,
    ) -> None:
        """`config`: tokenizer_config.json. `size`: the backend's `own_size`, if known. `embedded`: the number of
        embeddings of the model, if not all tokens have one; None otherwise."""
        config = {} if config is None else config
        self._backend = backend
        self._words = WordTable.of(backend)
        self._decoder = backend.decoder
        self._cleans_up = config.get("clean_up_tokenization_spaces") is True
        added = backend.get_added_tokens_decoder()
        self._longest_added = max((len(token.content) for token in added.values()), default=0)
        self.single: Template = probe(backend, pair=False, type_ids=type_ids)
        self.pair: Template = probe(backend, pair=True, type_ids=type_ids)
        self.side = Side.LEFT if config.get("truncation_side") == "left" else Side.RIGHT
        """The truncation side of the model's files."""
        self.pads_left: bool = config.get("padding_side") == "left"
        """True for the few model families that take the second text first (XLNet)."""
        self.cls_id: int | None = specials.get("cls_token")
        self.pad_id: int | None = specials.get("pad_token")
        self.unk_id: int | None = specials.get("unk_token")
        self.mask_id: int | None = specials.get("mask_token")
        if embedded is not None and self.mask_id is not None and self.mask_id >= embedded:
            self.mask_id = None  # the default of the class, without an embedding in the model
        self.mask_token: str | None = None if self.mask_id is None else backend.id_to_token(self.mask_id)
        size = own_size(backend) if size is None else size
        self.vocabulary_size: int = max(size, max(added, default=-1) + 1)
        """The highest id plus one: a vocabulary may have gaps."""
        self._embedded = embedded
        self._lacks_unknown = missing_unknown(backend)
        self.embedded_size: int = self.vocabulary_size if embedded is None else embedded
        """Ids below this have an embedding in the model; rows must not contain higher ones."""
        self.continuing_prefix: str = getattr(backend.model, "continuing_subword_prefix", None) or ""
        """The prefix of tokens that continue a word (`##`); empty if the tokenizer has none."""

    @property
    def findings(self) -> tuple[str, ...]:
        """Findings about the files, as sentences for the user."""
        if not self._lacks_unknown:
            return ()
        finding = (
            "The vocabulary of tokenizer.json has no unknown token, so that inputs with other characters or words are "
            "refused (422): add the token that its model names as unk_token, and an embedding for it"
        )
        return (finding,)

    @classmethod
    def load(cls, folder: ModelFolder) -> Tokenizer:
        """Read the tokenizer's files of a model folder. Without a tokenizer.json one is made of the other files.

        CorruptModel if the files are missing, invalid, or of another model; UnsupportedModel for an unsupported
        template, and as `convert`.
        """
        return cls.open(folder.path, folder.tokenizer, folder.config, lower_case=folder.lower_case)

    @classmethod
    def open(cls, path: Path, file: Path, config: Mapping[str, Any], *, lower_case: bool = False) -> Tokenizer:
        """As `load`, from `file` in the folder `path` of a model with this `config.json`."""
        files = TokenFiles.read(path)
        own = files.settings
        content = None if file.name == TOKENIZER else convert(path, config)
        kind = class_of(own, config)
        backend, specials = open_backend(file, files, kind, lower_case=lower_case, content=content)
        size = own_size(backend)
        embedded = check_vocabulary(backend, size, file, config)
        types = uses_type_ids(config, own)
        return cls(backend, specials, type_ids=types, config=own, size=size, embedded=embedded)

    @property
    def backend(self) -> Any:
        """The object of the tokenizers library, for counting tokens; must not be changed."""
        return self._backend

    def split(
        self, texts: Sequence[str], *, limit: int | None = None, side: Side = Side.RIGHT, offsets: bool = False
    ) -> list[Pieces]:
        """The tokens of each text, without the template's; `offsets` adds character offsets and word numbers.

        `limit`: at most this number of tokens of each text is needed, counted from the end that is not truncated. A
        much longer text is then not tokenised as a whole. Its `Pieces` are not `complete` and have more than `limit`
        tokens, of which the first (or last) `limit` are those of the whole text. Some may have no embedding in the
        model: see `require_embedded`.
        """
        if limit is None or max(map(len, texts), default=0) <= (enough := GROWTH * self._first_look(limit)):
            return self._encode(texts, offsets=offsets)
        long = {index for index, text in enumerate(texts) if len(text) > enough}
        whole = [text for index, text in enumerate(texts) if index not in long]
        pieces = iter(self._encode(whole, offsets=offsets))
        return [
            self._end(text, limit, side, offsets=offsets) if index in long else next(pieces)
            for index, text in enumerate(texts)
        ]

    def require_embedded(self, ids: Iterable[int], where: str, *, label: str = "") -> None:
        """InvalidInput for a token that has no embedding in the model, or a text that cannot be split into tokens.

        `where` is the field of the error; `label`, if given, names it in the message instead.
        """
        if self._lacks_unknown and self.vocabulary_size in (ids := list(ids)):
            raise InvalidInput(
                f"{label or where} has a character or word that this model's vocabulary lacks, and the vocabulary has "
                "no unknown token in its place",
                field=where,
                remedy="Leave it out, or serve a model whose tokenizer has an unknown token",
            )
        if self._embedded is None:
            return
        strange = next((one for one in ids if one >= self._embedded), None)
        if strange is not None:
            raise InvalidInput(
                f"{label or where} has {self.token(strange)!r}, which is token {strange} of the tokenizer; the model "
                f"knows 0 to {self._embedded - 1}",
                field=where,
                remedy="Leave it out, or serve the model with a table that has it (resize_token_embeddings)",
            )

    def token(self, number: int) -> str:
        """The token of this id in the vocabulary, such as `##ing`."""
        return str(self._backend.id_to_token(number))

    def id_of(self, token: str) -> int | None:
        """The id of a token of the vocabulary; None if there is none."""
        number: int | None = self._backend.token_to_id(token)
        return number

    def one_of(self, text: str, side: Side) -> int | None:
        """The id of the one token that is left of a text truncated at `side`; None if it has no tokens."""
        return next(iter(self.split([text], limit=1, side=side)[0].keep(1, side).ids), None)

    def join(self, tokens: Sequence[str]) -> str:
        """The text of tokens of the vocabulary."""
        return " ".join(tokens) if self._decoder is None else str(self._decoder.decode(list(tokens)))

    def decode(self, rows: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str]:
        """The text of each row of ids, as transformers' `decode`."""
        texts: list[str] = self._backend.decode_batch([list(ids) for ids in rows], skip_special_tokens=skip_special)
        return [_clean_up(text) for text in texts] if self._cleans_up else texts

    def _encode(self, texts: Sequence[str], *, offsets: bool) -> list[Pieces]:
        if not self._lacks_unknown:
            return self._encode_known(texts, offsets=offsets)
        return [self._encode_or_mark(text, offsets=offsets) for text in texts]

    def _encode_or_mark(self, text: str, *, offsets: bool) -> Pieces:
        """The tokens of a text; one token beyond the vocabulary if it cannot be split, for `require_embedded`."""
        try:
            return self._encode_known([text], offsets=offsets)[0]
        except Exception:  # the library raises plain Exception for all errors
            return Pieces(ids=[self.vocabulary_size], offsets=[(0, len(text))], words=[0])

    def _encode_known(self, texts: Sequence[str], *, offsets: bool) -> list[Pieces]:
        # The batch functions release the interpreter lock, `encode` does not.
        if offsets:
            full = self._backend.encode_batch(list(texts), add_special_tokens=False)
            return [Pieces(ids=e.ids, offsets=e.offsets, words=e.word_ids) for e in full]
        if self._words is not None and sum(map(len, texts)) <= LONGEST_TEXTS:
            return [Pieces(ids=self._ids(text, self._words)) for text in texts]
        return [Pieces(ids=e.ids) for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _ids(self, text: str, words: WordTable) -> list[int]:
        ids = words.ids(text)
        if ids is None:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
            ids = encoding.ids
        return ids

    def _first_look(self, limit: int) -> int:
        # Of many tokens a smaller part: each character may be a token, which takes 300 bytes.
        return min(limit * CHARACTERS_PER_TOKEN, max(2 * limit, LARGE_LOOK)) + self._longest_added

    def _end(self, text: str, limit: int, side: Side, *, offsets: bool) -> Pieces:
        """At least `limit` + 1 tokens of one end of a long text, or all tokens if that takes as long.

        The tokens are the same as of the whole text: tokens near the cut, which the rest may change, are dropped.
        """
        size = self._first_look(limit)
        while size * GROWTH < len(text):
            found = self._part(text, size, limit, side, offsets=offsets)
            if found is not None:
                return found
            size *= GROWTH
        return self._encode([text], offsets=offsets)[0]

    def _part(self, text: str, size: int, limit: int, side: Side, *, offsets: bool) -> Pieces | None:
        """The tokens of `size` characters at the end of a text; None if these are not over `limit`."""
        part = text[:size] if side is Side.RIGHT else text[-size:]
        pieces = self._encode([part], offsets=True)[0]
        start, stop = self._sure(pieces, size, side)
        if stop - start <= limit:
            return None
        sure = pieces.part(start, stop)
        if not offsets:
            return Pieces(ids=sure.ids, complete=False)
        shift = 0 if side is Side.RIGHT else len(text) - size
        moved = [(first + shift, last + shift) for first, last in sure.offsets or ()]
        return Pieces(ids=sure.ids, offsets=moved, words=sure.words, complete=False)

    def _sure(self, pieces: Pieces, size: int, side: Side) -> tuple[int, int]:
        """The range of tokens that the text after the cut cannot change: at a safe distance in words and characters.

        Splits, merges and normalisation act within a word; the cut may divide an added token.
        """
        words, offsets = pieces.words or [], pieces.offsets or []
        numbers = [word for word in words if word is not None]
        if not numbers:
            return 0, 0
        if side is Side.RIGHT:
            last = numbers[-1] - MARGIN_WORDS
            stop = len(words)
            while stop and (
                (word := words[stop - 1]) is None or word > last or offsets[stop - 1][1] > size - self._longest_added
            ):
                stop -= 1
            return 0, stop
        first = numbers[0] + MARGIN_WORDS
        start = 0
        while start < len(words) and (
            (word := words[start]) is None or word < first or offsets[start][0] < self._longest_added
        ):
            start += 1
        return start, len(words)


def _clean_up(text: str) -> str:
    """Remove the spaces before English punctuation and contractions, as transformers does."""
    for spaced in (" .", " ?", " !", " ,"):
        text = text.replace(spaced, spaced[1:])
    text = text.replace(" ' ", "'")
    for spaced in (" n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced[1:])
    return text
