"""The calibration and judging texts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock_optimizer.guard.gate import Corpus, Theme, own_corpus, split


def whole(corpus: Corpus) -> set[str]:
    return {*corpus.texts, *(sentence for theme in corpus.themes for sentence in theme.sentences)}


def test_there_are_several_hundred_texts_in_many_languages_and_of_every_sort() -> None:
    corpus = own_corpus()

    assert len(whole(corpus)) > 350
    assert len(corpus.themes) >= 18
    assert all(2 <= len(theme.questions) <= 4 and len(theme.sentences) >= 9 for theme in corpus.themes)
    scripts = {"Ж": "Cyrillic", "ء": "Arabic", "א": "Hebrew", "अ": "Devanagari", "\u4e00": "Han", "가": "Hangul"}
    for first, name in scripts.items():
        block = range(ord(first) - 64, ord(first) + 20_000 if name in {"Han", "Hangul"} else ord(first) + 64)
        assert any(ord(letter) in block for text in corpus.texts for letter in text), name
    for part in ("\U0001f600", "https://", "SELECT", "def add", "192.168.0.1", "\u200b"):
        assert any(part in text for text in corpus.texts), part


def test_no_text_comes_twice() -> None:
    corpus = own_corpus()
    sentences = [sentence for theme in corpus.themes for sentence in theme.sentences]

    assert len(corpus.texts) == len(set(corpus.texts))
    assert len(sentences) == len(set(sentences))


def test_no_comment_line_is_taken_for_a_text() -> None:
    assert not [text for text in whole(own_corpus()) if "Apache" in text]


def test_calibration_and_judging_share_no_text() -> None:
    calibrating, judging = split(own_corpus(), ["one of the endpoint's", "another", "a third", "a fourth"])

    assert not whole(calibrating) & whole(judging)
    assert not set(calibrating.singles()) & set(judging.singles())
    assert whole(calibrating) | whole(judging) > whole(own_corpus())


@given(st.lists(st.text(max_size=20), max_size=30), st.randoms(use_true_random=False))
def test_the_split_of_a_text_does_not_depend_on_the_others(texts: list[str], shuffler: object) -> None:
    order = sorted(texts, key=lambda _: shuffler.random())  # type: ignore[attr-defined]  # random.Random

    first, second = split(own_corpus(), texts), split(own_corpus(), order)

    assert [set(corpus.texts) for corpus in first] == [set(corpus.texts) for corpus in second]
    own = [set(corpus.texts) for corpus in split(own_corpus())]
    assert all(before <= set(after.texts) for before, after in zip(own, first, strict=True))


def test_texts_reach_from_a_letter_to_more_than_any_model_takes() -> None:
    for corpus in split(own_corpus()):
        words = [len(text.split()) for text in corpus.singles()]
        assert min(words) <= 1
        assert max(words) > 400


def test_joined_texts_have_sentences_of_one_theme_in_order() -> None:
    themes = tuple(Theme((), (f"{name} one.", f"{name} two.", f"{name} three.", f"{name} four.")) for name in "ABC")

    singles = Corpus(themes, ("short",)).singles()

    assert singles[0] == "short"
    assert "A one. A two. A three." in singles
    assert "B one. B two. B three. B four." in singles
    assert singles[-1].startswith("A one.")
    assert singles[-1].endswith("C four.")
