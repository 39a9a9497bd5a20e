"""Prices: the shipped list, and lists of users."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from penstock.errors import SettingError
from penstock.resources.shipped_classes import HARDWARE_CLASSES
from penstock_planner.prices import load_prices, read_prices, shipped_prices


def test_the_shipped_list_has_a_date_a_region_and_a_source() -> None:
    prices = shipped_prices()

    assert prices.date >= dt.date(2026, 7, 20)
    assert (prices.region, prices.currency) == ("us-east-1", "USD")
    assert "karpenter-provider-aws" in prices.source


def test_each_shipped_price_is_of_a_shipped_class_or_a_gpu() -> None:
    unknown = [
        name for name in shipped_prices().classes if name not in HARDWARE_CLASSES and not name.startswith("gpu-")
    ]

    assert unknown == []


def test_instances_of_inferentia_have_their_devices() -> None:
    classes = shipped_prices().classes

    assert {name: one.devices for name, one in classes["inf1"].items()} == {
        "inf1.xlarge": 1, "inf1.2xlarge": 1, "inf1.6xlarge": 4, "inf1.24xlarge": 16,
    }  # fmt: skip
    assert classes["inf2"]["inf2.48xlarge"].devices == 12


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("classes: [", "is not YAML"),
        ("classes: {}", "date"),
        ("date: 2026-01-01\nclasses: {icelake: {x: {perHour: -1, cpus: 4}}}", "perHour"),
        ("date: 2026-01-01\nclasses: {icelake: {x: {perHour: .nan, cpus: 4}}}", "perHour"),
        ("date: 2026-01-01\nclasses: {icelake: {x: {perHour: 1}}}", "cpus"),
        ("date: 2026-01-01\nclasses: {}\nprices: 1", "prices"),
        ("[]", "the whole"),
    ],
)
def test_a_wrong_list_names_the_file_and_the_field(text: str, problem: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_prices(text, name="mine.yaml")

    assert "mine.yaml" in caught.value.message
    assert problem in caught.value.message
    assert caught.value.remedy


def test_a_missing_file_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        load_prices(tmp_path / "none.yaml")
