"""The page of the charts' values has every value with its default and its comment."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.charts.helm import CHART
from tools.chart_tables import Value, values

TEXT = """# About the file.

# -- One value,
# in two lines.
one: 1

# -- A section.
two:
  # With a comment.
  three: {a: "x"}
  four: []
"""


def test_values_have_the_comment_above_them_and_their_default() -> None:
    assert list(values(TEXT)) == [
        Value("one", 1, "One value, in two lines."),
        Value("two", None, "A section."),
        Value("two.three", {"a": "x"}, "With a comment."),
        Value("two.four", [], ""),
    ]


def test_a_value_at_the_top_without_a_comment_is_an_error() -> None:
    with pytest.raises(ValueError, match="five has no comment"):
        list(values("# About.\n\nfive: 5\n"))


def test_the_page_has_every_value_with_its_default() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    found = {value.path: value.default for value in values(text)}
    page = (CHART.parents[1] / "docs/reference/chart-values.md").read_text(encoding="utf-8")

    assert found["maxConcurrentRollouts"] == yaml.safe_load(text)["maxConcurrentRollouts"]
    for path, default in found.items():
        assert f"| `{path}` | {'' if default is None else f'`{json.dumps(default)}`'} |" in page
