"""Which namespaces a HardwareClass selects."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.resources.hardware_class import NamespaceSelector


@pytest.mark.parametrize(
    ("selector", "labels", "expected"),
    [
        ({}, {}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "1", "b": "2"}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "2"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1", "2"]}]}, {"a": "2"}, True),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1", "2"]}]}, {}, False),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, {}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, {"a": "1"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"a": ""}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {}, False),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, {}, True),
        ({"matchLabels": {"a": "1"}, "matchExpressions": [{"key": "b", "operator": "Exists"}]}, {"a": "1"}, False),
    ],
)
def test_a_selector_selects_as_a_label_selector_does(
    selector: dict[str, Any], labels: dict[str, str], expected: bool
) -> None:
    assert NamespaceSelector.model_validate(selector).includes(labels) is expected


@pytest.mark.parametrize(
    "requirement",
    [
        {"key": "a", "operator": "Gt", "values": ["1"]},
        {"key": "a", "operator": "In"},
        {"key": "a", "operator": "Exists", "values": ["1"]},
    ],
)
def test_a_requirement_that_selects_nothing_is_refused(requirement: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        NamespaceSelector.model_validate({"matchExpressions": [requirement]})
