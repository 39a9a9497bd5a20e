"""Plain scalars are what `kubectl annotate --local --filename FILE a=b --output json` (1.33) makes of them."""

from __future__ import annotations

import json
import math

import pytest
import yaml

from penstock.errors import SpecError
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.reading import from_yaml
from penstock.resources.files.yaml_documents import Loader, read_documents

READ: list[tuple[str, object]] = [
    ("1e2", 100.0), ("1E2", 100.0), ("1e+2", 100.0), ("1e-2", 0.01), ("1.5e3", 1500.0), ("100.0", 100.0),
    (".5", 0.5), ("+.5", 0.5), ("-.5", -0.5), ("1.", 1.0), (".1e3", 100.0), ("08.5", 8.5), ("09", 9.0),
    ("+12", 12), ("017", 15), ("0o17", 15), ("0O17", 15), ("-0o17", -15), ("-017", -15), ("0x1F", 31), ("-0X1f", -31),
    ("0b101", 5), ("+0b11", 3), ("0", 0), ("-0", 0),
    ("1_000", 1000), ("1__0", 10), ("1_", 1), ("0_7", 7), ("0x_1f", 31), ("1_0.5_0", 10.5), (".5_5", 0.55),
    ("18446744073709551615", 2**64 - 1), ("18446744073709551616", 2.0**64), ("-9223372036854775809", -(2.0**63)),
    ("077777777777777777777777777", 77777777777777777777777777.0),
    ("1:30", "1:30"), ("190:20:30.15", "190:20:30.15"), ("1e400", "1e400"), ("0o8", "0o8"), ("1e2x", "1e2x"),
    (".e3", ".e3"), ("._5", "._5"), (".5_", ".5_"), ("_1", "_1"), ("0x1p4", "0x1p4"), ("+", "+"), ("0x", "0x"),
    ("0xffffffffffffffffffff", "0xffffffffffffffffffff"), ("nan", "nan"), ("=", "="),
    ("2026-11-21", "2026-11-21"), ("2026-11-21T10:00:00Z", "2026-11-21T10:00:00Z"),
    ("y", True), ("Yes", True), ("on", True), ("TRUE", True), ("n", False), ("No", False), ("OFF", False),
    ("yES", "yES"), ("tRUE", "tRUE"), ("~", None), ("null", None), ("", None), ("nULL", "nULL"),
    (".inf", math.inf), ("+.INF", math.inf), ("-.Inf", -math.inf), (".iNF", ".iNF"),
    ("!!float 3", 3.0), ("!!float 1e2", 100.0), ("!!int 0o17", 15), ("!!str 1e2", "1e2"), ("'1e2'", "1e2"),
    ("!!bool y", True),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), READ)
def test_a_scalar_is_what_kubectl_reads(text: str, value: object) -> None:
    found = yaml.load(f"a: {text}", Loader)["a"]

    assert (type(found), found) == (type(value), value)


def test_nan_is_read_as_nan() -> None:
    assert math.isnan(yaml.load("a: .NaN", Loader)["a"])


@pytest.mark.parametrize("text", ["!!int 1.5", "!!int 1:30", "!!float x", "!!bool 1", "!!bool ~"])
def test_the_error_about_a_wrong_tag_has_its_line(text: str) -> None:
    with pytest.raises(
        SpecError, match=r"^a.yaml, line 2, column 4: not YAML: '.*' is no (whole number|number|boolean)"
    ):
        read_documents(f"b: 1\na: {text}", "a.yaml")


@pytest.mark.parametrize("escaped", [True, False])
def test_json_is_read_as_json(escaped: bool) -> None:
    value = {"a": "\U0001f642 \t /", "b": [1, 2.0, 1e30, True], "c": {"d": "1"}}
    text = json.dumps(value, ensure_ascii=escaped, indent=2)

    assert read_documents(f"\n{text}\n", "a.json") == [value]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "a": 2}', "a.json, line 2: a is there twice"),
        ('{"a": "\\ud83d"}', "a: half of a character"),
        ('{"a": NaN}', "a: nan is no number in JSON"),
        ('{"a": 1e999}', "a: inf is no number in JSON"),
        ('{"a": 1,,}', "a.json, line 1"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "a.json"),
    ],
)
def test_an_error_in_json_is_named(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_documents(text, "a.json")

    assert message in str(caught.value)


ENDPOINT = """
apiVersion: penstock.dev/v1alpha1
kind: ModelEndpoint
metadata: {{name: emotion}}
spec: {{model: 'hf://org/name', task: fill-mask, cores: {cores}, optimization: {{budgetSeconds: {budget}}}}}
"""


@pytest.mark.parametrize(("cores", "budget", "read"), [("1e1", "1e2", (10, 100)), ("0o10", "1_000.0", (8, 1000))])
def test_numbers_of_an_endpoint_may_be_written_as_for_kubectl(cores: str, budget: str, read: tuple[int, int]) -> None:
    spec = from_yaml(ModelEndpoint, ENDPOINT.format(cores=cores, budget=budget)).spec

    assert (spec.cores, spec.optimization.budget_seconds) == read


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        ("1:30", "spec.cores: must be a whole number (given: '1:30'). Write the number alone"),
        ("1.5e0", "spec.cores: must be a whole number (given: 1.5)"),
        ("'1e1'", "spec.cores: must be a whole number (given: '1e1'). Write it without quotes"),
    ],
)
def test_a_number_that_kubectl_does_not_read_as_an_integer_is_refused(cores: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_yaml(ModelEndpoint, ENDPOINT.format(cores=cores, budget=60))

    assert message in str(caught.value)
