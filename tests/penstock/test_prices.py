"""Prices: the shipped list, and lists of users."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from penstock.errors import SettingError
from penstock.prices import CLOUDS, instance_price, load_prices, read_prices, shipped_prices
from penstock.resources.shipped_classes import HARDWARE_CLASSES


@pytest.mark.parametrize(
    ("cloud", "date", "region"),
    [("aws", "2026-07-20", "us-east-1"), ("gcp", "2026-08-03", "us-central1"), ("azure", "2026-06-18", "eastus")],
)
def test_each_shipped_list_has_a_date_a_region_and_a_source(cloud: str, date: str, region: str) -> None:
    prices = shipped_prices(cloud)

    assert prices.date == dt.date.fromisoformat(date)
    assert (prices.region, prices.currency) == (region, "USD")
    assert f"karpenter-provider-{cloud}" in prices.source


@pytest.mark.parametrize("cloud", CLOUDS)
def test_each_shipped_price_is_of_a_shipped_class_or_a_gpu(cloud: str) -> None:
    names = [name for name in shipped_prices(cloud).classes if not name.startswith("gpu-")]

    assert [name for name in names if name not in HARDWARE_CLASSES] == []
    for name in names:
        for node in shipped_prices(cloud).classes[name].values():
            assert node.spot_per_hour is None or 0 < node.spot_per_hour < node.per_hour


def test_the_price_of_an_instance_type_is_found_in_any_list() -> None:
    for name, region, cost in (("c7i.xlarge", "us-east-1", 0.1785), ("Standard_D4s_v6", "eastus", 0.202)):
        found = instance_price(name)
        assert found is not None
        assert (found[0].region, found[1].per_hour) == (region, cost)
    assert instance_price("m1.small") is None


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
