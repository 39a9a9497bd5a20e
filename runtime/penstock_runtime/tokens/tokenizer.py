"""The tokenizer of one model folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.tokens.backend import check_vocabulary, open_backend, own_size, uses_type_ids
from penstock_runtime.tokens.classes import class_of
from penstock_runtime.tokens.pieces import Pieces, Side, Template, probe
from penstock_runtime.tokens.specials import TokenFiles
from penstock_runtime.tokens.words import LONGEST_TEXTS, Words

CHARACTERS_PER_TOKEN = 12
"""How much of a long text is looked at first: English has some 4.5 characters a token, CJK 1, source code 3."""

GROWTH = 4
"""How much more is looked at when that was not enough."""

MARGIN_WORDS = 2
"""Words next to a cut whose tokens may change with what stood behind it (a split may look one word ahead)."""


class Tokenizer:
    """Splits texts and puts rows together. Immutable after `load`: any number of threads may use it at once."""

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
        """`config`: tokenizer_config.json. `size`: the backend's `own_size`, where it is known. `embedded`: how
        many tokens the model has vectors for, where those are not all; None otherwise."""
        config = {} if config is None else config
        self._backend = backend
        self._words = Words.of(backend)
        self._decoder = backend.decoder
        self._cleans_up = config.get("clean_up_tokenization_spaces") is True
        added = backend.get_added_tokens_decoder()
        self._longest_added = max((len(token.content) for token in added.values()), default=0)
        self.single: Template = probe(backend, pair=False, type_ids=type_ids)
        self.pair: Template = probe(backend, pair=True, type_ids=type_ids)
        self.side = Side.LEFT if config.get("truncation_side") == "left" else Side.RIGHT
        """Which end of an over-long text the model's own files give up."""
        self.pads_left: bool = config.get("padding_side") == "left"
        """True for the few families that read the second text first (XLNet)."""
        self.cls_id: int | None = specials.get("cls_token")
        self.pad_id: int | None = specials.get("pad_token")
        self.unk_id: int | None = specials.get("unk_token")
        self.mask_id: int | None = specials.get("mask_token")
        if embedded is not None and self.mask_id is not None and self.mask_id >= embedded:
            self.mask_id = None  # the class's name for it, which the model was not trained with
        self.mask_token: str | None = None if self.mask_id is None else backend.id_to_token(self.mask_id)
        size = own_size(backend) if size is None else size
        self.vocabulary_size: int = max(size, max(added, default=-1) + 1)
        """One more than the highest id: a vocabulary may have gaps."""
        self._embedded = embedded
        self.embedded_size: int = self.vocabulary_size if embedded is None else embedded
        """Ids below this have a vector in the model; others must be in no row."""
        self.continuing_prefix: str = getattr(backend.model, "continuing_subword_prefix", None) or ""
        """What a token starts with that continues a word (`##`); empty when words are not marked so."""

    @classmethod
    def load(cls, folder: ModelFolder) -> Tokenizer:
        """Read the tokenizer's files of a model folder.

        CorruptModel when tokenizer.json is missing, not readable, or another model's; UnsupportedModel for a template
        of a strange form.
        """
        return cls.open(folder.path, folder.tokenizer, folder.config, lower_case=folder.lower_case)

    @classmethod
    def open(cls, path: Path, file: Path, config: Mapping[str, Any], *, lower_case: bool = False) -> Tokenizer:
        """As `load`, from `file` in the folder `path` of a model with this `config.json`."""
        files = TokenFiles.read(path)
        own = files.settings
        backend, specials = open_backend(file, files, class_of(own, config), lower_case=lower_case)
        size = own_size(backend)
        embedded = check_vocabulary(backend, size, file, config)
        types = uses_type_ids(config, own)
        return cls(backend, specials, type_ids=types, config=own, size=size, embedded=embedded)

    @property
    def backend(self) -> Any:
        """The library's object, to count tokens with; not to be changed."""
        return self._backend

    def split(
        self, texts: Sequence[str], *, limit: int | None = None, side: Side = Side.RIGHT, offsets: bool = False
    ) -> list[Pieces]:
        """The tokens of each text, without those of the template; `offsets` adds characters and words.

        `limit`: no more tokens of each are wanted than this, counted from the end that `side` does not give up. A much
        longer text is then not looked at as a whole; its `Pieces` say that they are not complete and hold more than
        `limit` tokens, the first (or last) `limit` of which are those of the whole text. The model may have no vector
        for some of them: see `require_embedded`.
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
        """InvalidInput for a token that the tokenizer was given and the model was not.

        `where` is the field of the error; `label` replaces it in the message.
        """
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
        """A token as the vocabulary spells it, such as `##ing`."""
        return str(self._backend.id_to_token(number))

    def id_of(self, token: str) -> int | None:
        """The number of a token as the vocabulary spells it."""
        number: int | None = self._backend.token_to_id(token)
        return number

    def one_of(self, text: str, side: Side) -> int | None:
        """The token that is left of a text when all others are given up at `side`; None when it has none."""
        return next(iter(self.split([text], limit=1, side=side)[0].keep(1, side).ids), None)

    def join(self, tokens: Sequence[str]) -> str:
        """Tokens, as the vocabulary spells them, as text."""
        return " ".join(tokens) if self._decoder is None else str(self._decoder.decode(list(tokens)))

    def decode(self, rows: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str]:
        """Ids as texts, each as transformers' `decode` gives it."""
        texts: list[str] = self._backend.decode_batch([list(ids) for ids in rows], skip_special_tokens=skip_special)
        return [_clean_up(text) for text in texts] if self._cleans_up else texts

    def _encode(self, texts: Sequence[str], *, offsets: bool) -> list[Pieces]:
        # Always the batch functions: they release the interpreter lock, the single one does not.
        if offsets:
            full = self._backend.encode_batch(list(texts), add_special_tokens=False)
            return [Pieces(ids=e.ids, offsets=e.offsets, words=e.word_ids) for e in full]
        if self._words is not None and sum(map(len, texts)) <= LONGEST_TEXTS:
            return [Pieces(ids=self._ids(text, self._words)) for text in texts]
        return [Pieces(ids=e.ids) for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _ids(self, text: str, words: Words) -> list[int]:
        ids = words.ids(text)
        if ids is None:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
            ids = encoding.ids
        return ids

    def _first_look(self, limit: int) -> int:
        return limit * CHARACTERS_PER_TOKEN + self._longest_added

    def _end(self, text: str, limit: int, side: Side, *, offsets: bool) -> Pieces:
        """At least `limit` + 1 tokens of one end of a long text, or all of it when that takes as much.

        The answer is that of the whole text: tokens near the cut, which the rest might change, do not count.
        """
        size = self._first_look(limit)
        while size * GROWTH < len(text):
            part = text[:size] if side is Side.RIGHT else text[-size:]
            pieces = self._encode([part], offsets=True)[0]
            start, stop = self._sure(pieces, size, side)
            if stop - start > limit:
                sure = pieces.part(start, stop)
                if not offsets:
                    return Pieces(ids=sure.ids, complete=False)
                shift = 0 if side is Side.RIGHT else len(text) - size
                moved = [(first + shift, last + shift) for first, last in sure.offsets or ()]
                return Pieces(ids=sure.ids, offsets=moved, words=sure.words, complete=False)
            size *= GROWTH
        return self._encode([text], offsets=offsets)[0]

    def _sure(self, pieces: Pieces, size: int, side: Side) -> tuple[int, int]:
        """The range of tokens that the text behind the cut cannot change: far enough from it in words and characters.

        Splits, merges and normalisation act within a word; an added token may be torn by the cut.
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
    """English punctuation and short forms without the spaces that joining tokens leaves before them."""
    for spaced in (" .", " ?", " !", " ,"):
        text = text.replace(spaced, spaced[1:])
    text = text.replace(" ' ", "'")
    for spaced in (" n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced[1:])
    return text
