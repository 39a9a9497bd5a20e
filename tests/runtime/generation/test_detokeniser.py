"""Text of tokens, piece by piece, and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock_runtime.generation.detokeniser import REPLACEMENT, Detokeniser, StopStrings

Decode = Callable[[Sequence[int]], str]


def byte_level() -> Tokenizer:
    """A byte for each token, as the rare characters of GPT-2, Llama 3 and Qwen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words with a mark for the space before them, and bytes for other characters, as Llama 2, Gemma and Mistral."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for character in ["\u2581", *"abc dehlorw"]:
        vocabulary.setdefault(character, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
texts = st.text(st.one_of(st.sampled_from("ab c"), st.characters(exclude_categories=["Cs"])), max_size=60).filter(
    lambda text: REPLACEMENT not in text
)


@pytest.mark.parametrize("name", list(TOKENIZERS))
@settings(deadline=None)
@given(texts)
def test_the_pieces_are_the_text_and_no_piece_has_half_a_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    detokeniser = Detokeniser(tokenizer.decode)
    pieces = [detokeniser.push(one) for one in ids]
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) + detokeniser.finish() == whole


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=80))
def test_bytes_that_are_no_text_are_given_once(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte level"]
    detokeniser = Detokeniser(tokenizer.decode)
    text = "".join(map(detokeniser.push, ids)) + detokeniser.finish()
    if REPLACEMENT not in tokenizer.decode(ids):
        assert text == tokenizer.decode(ids)
    assert text.replace(REPLACEMENT, "") == tokenizer.decode(ids).replace(REPLACEMENT, "")


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_tokens_that_are_no_text_do_not_make_each_next_one_slower(name: str) -> None:
    tokenizer, decoded = TOKENIZERS[name], []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return str(tokenizer.decode(list(ids)))

    byte = "\u0122" if name == "byte level" else "<0x80>"  # one that never begins a character
    token = tokenizer.token_to_id(byte)
    detokeniser = Detokeniser(decode)

    text = "".join(detokeniser.push(token) for _ in range(500)) + detokeniser.finish()

    assert text == REPLACEMENT * 500
    assert max(decoded) < 100


def test_a_character_is_given_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte level"]
    detokeniser = Detokeniser(tokenizer.decode)
    pieces = [detokeniser.push(one) for one in tokenizer.encode("a€b").ids]
    assert pieces == ["a", "", "", "€", "b"]


def test_a_character_that_never_becomes_complete_is_given_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte level"]
    detokeniser = Detokeniser(tokenizer.decode)
    assert [detokeniser.push(one) for one in tokenizer.encode("a€").ids[:-1]] == ["a", "", ""]
    assert detokeniser.finish() == REPLACEMENT


@pytest.mark.parametrize(
    ("stops", "include", "expected", "found"),
    [
        (["END"], False, "one two ", "END"),
        (["END"], True, "one two END", "END"),
        (["zzz"], False, "one two END more", None),
        (["two", "one two"], False, "", "one two"),
        (["END", " more"], False, "one two ", "END"),
        ([], False, "one two END more", None),
    ],
)
def test_the_text_ends_before_the_first_stop_string(
    stops: list[str], include: bool, expected: str, found: str | None
) -> None:
    for size in (1, 2, 5, 99):
        text = "one two END more"
        filtered = StopStrings(stops, include=include)
        given_text = "".join(filtered.push(text[at : at + size]) for at in range(0, len(text), size))
        given_text += filtered.finish()
        assert (given_text, filtered.found) == (expected, found)


@settings(deadline=None)
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    filtered = StopStrings(stops)
    got, at = "", 0
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        got += filtered.push(text[at : at + size])
        at += size
        assert not any(stop in got for stop in stops)
    got += filtered.finish()
    if filtered.found is None:
        assert got == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(got + filtered.found)


def test_nothing_is_held_back_that_cannot_become_a_stop_string() -> None:
    filtered = StopStrings(["\n\nUser:"])
    assert filtered.push("a\n") == "a"
    assert filtered.push("b") == "\nb"
