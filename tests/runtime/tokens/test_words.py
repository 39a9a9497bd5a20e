"""The table of words, compared with the library that it is made from."""

from __future__ import annotations

import string
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from penstock_runtime.tokens import Tokenizer
from penstock_runtime.tokens import tokenizer as words
from penstock_runtime.tokens.tokenizer import LONGEST_TEXTS, WordTable
from tests.examples import examples
from tests.runtime.tasks.families import BERT, DISTILBERT, MPNET, ROBERTA, XLM_ROBERTA, Family, tokenizer_of
from tests.runtime.tasks.texts import HARD, LONG, MORE

WORD_PIECES = (BERT, DISTILBERT, MPNET)
PLAIN = st.text(string.printable, max_size=200)
# Of what the vocabulary was made of, so that words are found, and fall into pieces.
SPOKEN = st.lists(
    st.sampled_from([*" ".join([LONG, *MORE]).split(), "\t", "--", "x" * 99, "x" * 101]), max_size=40
).map(" ".join)


def backend_of(family: Family) -> Any:
    """A separate tokenizer, to be changed. Pipelines of other tests may have set the shared one to truncate or pad."""
    shared = tokenizer_of(family).backend_tokenizer
    own = type(shared).from_str(shared.to_str())
    own.no_truncation()
    own.no_padding()
    return own


def table_of(backend: Any) -> WordTable:
    table = WordTable.of(backend)
    assert table is not None
    return table


def asked(backend: Any, text: str) -> list[int]:
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("family", WORD_PIECES, ids=lambda family: family.name)
@settings(max_examples=examples(300), deadline=None)
@given(text=PLAIN | SPOKEN)
def test_the_table_has_the_tokens_of_the_library_or_none(family: Family, text: str) -> None:
    backend = backend_of(family)
    ids = table_of(backend).ids(text)

    assert ids is None or ids == asked(backend, text)


@pytest.mark.parametrize("family", WORD_PIECES, ids=lambda family: family.name)
def test_the_table_gives_the_librarys_tokens_for_ascii_texts_repeatedly(family: Family) -> None:
    backend = backend_of(family)
    table = table_of(backend)
    for text in (LONG, *MORE, "", " ", "Don't\tpanic: it's 100% (mostly) harmless!\r\n", "UPPER lower MiXed a1b2"):
        if text.isascii():
            assert table.ids(text) == table.ids(text) == asked(backend, text), text


@pytest.mark.parametrize(
    "text",
    ["café", "naïve", "“quotes”", "日本", "a\x00b", "a\x0bb", "a\x7fb", "a\u00a0b", "a [MASK] b", "[mask]", "x[SEP]y"],
)
def test_texts_that_cannot_be_tokenised_word_by_word_are_left_to_the_library(text: str) -> None:
    assert table_of(backend_of(BERT)).ids(text) is None


@pytest.mark.parametrize("text", HARD.values(), ids=list(HARD))
def test_unusual_texts_get_the_librarys_tokens_or_none(text: str) -> None:
    backend = backend_of(BERT)
    ids = table_of(backend).ids(text)
    assert ids is None or ids == asked(backend, text)


def test_lower_casing_before_the_normaliser_is_applied() -> None:
    backend = backend_of(DISTILBERT)  # keeps capitals
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), backend.normalizer])

    table = table_of(backend)

    assert table.ids("The Cat") == asked(backend, "The Cat") == table.ids("the cat")


def test_other_kinds_of_tokenizers_have_no_table() -> None:
    whitespace, accents, added, named = (backend_of(BERT) for _ in range(4))
    whitespace.pre_tokenizer = pre_tokenizers.Whitespace()
    accents.normalizer = normalizers.Sequence([normalizers.NFKC(), accents.normalizer])
    added.add_tokens([f"tag{number}" for number in range(words.MOST_ADDED)])
    named.add_tokens([AddedToken("naïve", normalized=True)])
    others = [backend_of(family) for family in (ROBERTA, XLM_ROBERTA)]

    assert [WordTable.of(backend) for backend in (whitespace, accents, added, named, *others)] == [None] * 6


@pytest.mark.parametrize("content", ["new york", "new\tyork", "new\x00york", " york"])
@pytest.mark.parametrize("normalized", [True, False])
def test_added_words_that_the_normaliser_may_write_otherwise_leave_no_table(content: str, *, normalized: bool) -> None:
    backend = backend_of(BERT)
    backend.add_tokens([AddedToken(content, normalized=normalized)])
    tokenizer = Tokenizer(backend, {}, type_ids=True)

    assert WordTable.of(backend) is None
    for text in ("in new york", "in New\tYork", "new\n york", "newyork"):
        assert tokenizer.split([text])[0].ids == asked(backend, text)


def test_added_words_in_any_spelling_are_left_to_the_library() -> None:
    backend = backend_of(BERT)
    backend.add_tokens([AddedToken("Penstock", normalized=True)])
    table = table_of(backend)

    assert [table.ids(text) for text in ("penstock", "a PENSTOCK", "unpenstocked")] == [None] * 3
    assert table.ids("pen stock") == asked(backend, "pen stock")


def test_unknown_words_are_learnt_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MOST_LEARNT", 100)
    backend = backend_of(BERT)
    table = table_of(backend)

    texts = [" ".join(f"w{one}x{other}" for other in range(30)) for one in range(100)] + ["q" * 33]
    answers = [table.ids(text) for text in texts]

    assert answers == [asked(backend, text) for text in texts]
    assert len(table._learnt) == 100


def test_threads_add_words_to_the_table_concurrently() -> None:
    backend = backend_of(BERT)
    table = table_of(backend)
    texts = [f"{word} and z{number} {word}s" for number, word in enumerate(LONG.split()) if word.isascii()]
    expected = [asked(backend, text) for text in texts]
    found: list[list[list[int] | None]] = []

    threads = [threading.Thread(target=lambda: found.append([table.ids(text) for text in texts])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [expected] * 4


def test_many_texts_together_are_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(backend_of(BERT), {}, type_ids=True)
    texts = ["the cat sat on the mat. " * 10] * (LONGEST_TEXTS // 240 + 1)
    expected = [piece.ids for text in texts for piece in tokenizer.split([text])]

    def never(*_: Any) -> None:
        raise AssertionError("the table was used")

    monkeypatch.setattr(WordTable, "ids", never)

    assert [piece.ids for piece in tokenizer.split(texts)] == expected
