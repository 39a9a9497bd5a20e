"""docs/reference/tasks.md matches the schemas and the answers of the tasks. Other tests keep its tables fresh."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from penstock.tasks import ENCODER_TASKS, TaskName
from penstock_runtime.tasks import DEFAULT_LIMITS, request_schema, response_schema
from tests.runtime.tasks.answers import assert_alike
from tests.runtime.tasks.families import Built
from tools.task_tables import PARTS, parameters_table

TEXT = (Path(__file__).parents[3] / "docs" / "reference" / "tasks.md").read_text(encoding="utf-8")
PROSE = " ".join(TEXT.split())


def section(name: TaskName) -> str:
    found = re.search(rf"^## {name.value}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def exchange(name: TaskName) -> tuple[dict[str, Any], Any]:
    """The request and the answer of the section's example."""
    found = re.search(
        r"```\ncurl [^']*'content-type: application/json'\s*\\?\s*-d '(.*?)'\n(.*?)\n```", section(name), re.DOTALL
    )
    assert found is not None
    return json.loads(found[1]), json.loads(found[2])


@pytest.mark.parametrize("name", ENCODER_TASKS)
def test_tables_of_the_documents_match_the_code(name: TaskName) -> None:
    document, make = PARTS[f"parameters of {name.value}"]
    assert document == "docs/reference/tasks.md"
    assert make() == parameters_table(name)
    assert parameters_table(name) in section(name), "run `make docs`"


@pytest.mark.parametrize("name", ENCODER_TASKS)
def test_the_examples_fit_the_schemas(name: TaskName) -> None:
    request, answer = exchange(name)
    jsonschema_rs.validate(request_schema(name), request)
    jsonschema_rs.validate(response_schema(name), answer)


@pytest.mark.parametrize("name", [TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY])
def test_the_documented_figures_of_minilm_hold(name: TaskName, minilm: Built) -> None:
    request, answer = exchange(name)
    found = minilm.task(name)(request["inputs"], **request.get("parameters", {}))
    assert_alike(found, answer, within=6e-5)


def test_the_limits_are_the_documented_ones() -> None:
    assert f"`--max-inputs` entries ({DEFAULT_LIMITS.items:,})" in PROSE
    assert f"`--max-rows` ({DEFAULT_LIMITS.rows:,})" in PROSE
