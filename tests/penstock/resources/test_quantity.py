"""Quantities as Kubernetes writes them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.resources.fields.text_fields import is_quantity, parse_quantity, written


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("3", 3), ("+3", 3), ("-1", -1), ("1.5", Fraction(3, 2)), (".5", Fraction(1, 2)), ("5.", 5),
        ("500m", Fraction(1, 2)), ("3920m", Fraction(98, 25)), ("2Gi", 2**31), ("16336404Ki", 16336404 * 1024),
        ("1k", 1000), ("2M", 2_000_000), ("1e3", 1000), ("1E3", 1000), ("1E", 10**18), ("1Ei", 2**60),
        ("15n", Fraction(15, 10**9)), ("2u", Fraction(1, 500_000)), (7, 7),
    ],
)  # fmt: skip
def test_a_quantity_means_a_number(text: str | int, value: Fraction | int) -> None:
    assert parse_quantity(text) == value
    assert is_quantity(str(text))


@pytest.mark.parametrize("text", ["", "Gi", "2 Gi", "2GB", "1.2.3", "1e", "0x10", "1K", "２", "1e9999", "2Gi\n", "1_0"])
def test_other_text_is_no_quantity(text: str) -> None:
    assert not is_quantity(text)
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


@given(st.text(max_size=8))
def test_any_text_is_parsed_or_is_a_spec_error(text: str) -> None:
    assert is_quantity(text) is False or parse_quantity(text) is not None


@pytest.mark.parametrize(
    ("value", "resource", "words"),
    [
        (Fraction(2**31), "memory", "2 GiB"),
        (Fraction(3 * 2**29), "memory", "1.5 GiB"),
        (Fraction(100), "memory", "100 bytes"),
        (Fraction(4), "cpu", "4"),
        (Fraction(98, 25), "cpu", "3.92"),
        (Fraction(1, 3), "cpu", "0.333"),
    ],
)
def test_a_quantity_is_written_for_people(value: Fraction, resource: str, words: str) -> None:
    assert written(value, resource) == words
