"""`penstock space`: its text, and its errors. tests/optimizer/end_to_end/test_vector_space.py compares real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.manifest import MANIFEST_NAME
from penstock.tasks import TaskName
from penstock.vector_space import VectorSpace
from penstock_cli.space import rows
from tests.cli.endpoints import invoke
from tests.optimizer.report.sample import sample_manifest
from tests.runtime.http.serving import make_model, serving

SPACE = VectorSpace(
    weights="a" * 64,
    tokenizer="b" * 64,
    modules="c" * 64,
    pooling="mean",
    kind="dense",
    normalised=True,
    dimensions=384,
    max_tokens=256,
    truncate_side="right",
    prompts={"query": "query: "},
    default_prompt="",
)


def write(folder: Path, space: VectorSpace | None) -> Path:
    folder.mkdir()
    manifest = sample_manifest().model_copy(update={"vector_space": space, "files": {}})
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json())
    return folder


def test_an_artefact_is_shown_with_its_parts(tmp_path: Path) -> None:
    shown = invoke("space", write(tmp_path / "a", SPACE)).output

    assert shown.splitlines()[0].split() == ["space", SPACE.id]
    assert "dense, 384 values, scaled to length 1" in shown
    assert "query: 'query: '" in shown


def test_two_spaces_are_compared_by_the_parts_that_differ(tmp_path: Path) -> None:
    other = SPACE.model_copy(update={"tokenizer": "d" * 64, "pooling": "cls", "modules": "e" * 64})
    result = invoke("space", write(tmp_path / "a", SPACE), "--against", write(tmp_path / "b", other), "--json")

    assert result.exit_code == 1
    assert json.loads(result.output)["differences"] == ["the tokenizer", "pooling and modules", "the pooling"]


def test_the_identifier_is_stable() -> None:
    """Clients store it: another value for the same fields would make each stored index invalid."""
    assert SPACE.id == "vs1-2166fc89c8a44e62"


@pytest.mark.parametrize("field", VectorSpace.model_fields)
def test_each_field_is_part_of_the_identifier(field: str) -> None:
    value = getattr(SPACE, field)
    changed = {str: "another", bool: not value, int: 7, dict: {}}[type(value)]

    assert SPACE.model_copy(update={field: changed}).id != SPACE.id


def test_all_parts_are_shown() -> None:
    assert [name for name, _ in rows(SPACE)] == [
        "space", "vectors", "pooling", "limit", "prompts", "default", "weights", "tokenizer", "modules",
    ]  # fmt: skip


def test_an_artefact_without_a_space_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    result = invoke("space", write(tmp_path / "a", None))

    assert result.exit_code == 1
    assert "states no vector space" in result.output
    assert "penstock optimize" in result.output


def test_a_server_of_another_task_is_an_error(tmp_path: Path) -> None:
    with serving(make_model(tmp_path, TaskName.TEXT_CLASSIFICATION), TaskName.TEXT_CLASSIFICATION) as endpoint:
        result = invoke("space", endpoint.url)

    assert result.exit_code == 1
    assert "states no vector space" in result.output


@pytest.mark.parametrize("target", ["http://127.0.0.1:9", "/no/such/folder"])
def test_what_cannot_be_read_is_an_error(target: str) -> None:
    result = invoke("space", target)

    assert result.exit_code == 1
    assert result.output.startswith("error: ")
