"""Numbers of kept tokens, compared with the truncation of the tokenizers library itself."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from penstock_runtime.tokens import Side, longest_first, windows
from penstock_runtime.tokens.pieces import count_windows


def library() -> Any:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


@given(first=st.integers(0, 40), second=st.integers(0, 40), room=st.integers(1, 50))
def test_two_texts_share_the_room_as_in_the_library(first: int, second: int, room: int) -> None:
    backend = library()
    backend.enable_truncation(room, strategy="longest_first")
    kept = backend.encode("a " * first, "b " * second).ids
    assert longest_first(first, second, room) == (kept.count(0), kept.count(1))


@given(first=st.integers(0, 1000), second=st.integers(0, 1000), room=st.integers(1, 600))
def test_truncation_never_lengthens_a_text_and_uses_the_whole_limit(first: int, second: int, room: int) -> None:
    kept = longest_first(first, second, room)
    assert kept[0] <= first
    assert kept[1] <= second
    assert sum(kept) == min(first + second, room)


@pytest.mark.parametrize("side", Side)
@given(tokens=st.integers(1, 120), room=st.integers(1, 40), data=st.data())
def test_windows_are_those_of_the_library(side: Side, tokens: int, room: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, room - 1))
    backend = tokenizers.Tokenizer(models.WordLevel({str(n): n for n in range(tokens)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.enable_truncation(room, stride=overlap, direction=side.value)
    encoding = backend.encode(" ".join(map(str, range(tokens))))
    expected = [(one.ids[0], one.ids[-1] + 1) for one in (encoding, *encoding.overflowing)]
    assert windows(tokens, room, overlap, side) == expected


@given(tokens=st.integers(0, 2000), room=st.integers(1, 200), data=st.data())
def test_windows_are_counted_without_making_them(tokens: int, room: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, room - 1))
    assert count_windows(tokens, room, overlap) == len(windows(tokens, room, overlap))


@pytest.mark.parametrize("overlap", [-1, 4, 5])
def test_an_overlap_that_leaves_no_step_is_refused(overlap: int) -> None:
    with pytest.raises(ValueError, match="leave a step in windows of 4"):
        windows(10, 4, overlap)
