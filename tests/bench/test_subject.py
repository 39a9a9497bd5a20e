"""Facts about the measured model that are known before a server starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from penstock.errors import SpecError
from penstock_bench import BenchOptions
from penstock_bench.subject import Subject, read_subject
from tests.bench.conftest import StartStub
from tests.optimizer.end_to_end.optimising import QUICK, endpoint
from tests.optimizer.end_to_end.small_model import write_small_bert


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose mask token is in tokenizer.json only."""
    path = write_small_bert(tmp_path / "small")
    (path / "tokenizer_config.json").unlink()
    return path


def subject(folder: Path, task: str, **changes: str) -> Subject:
    file = folder.parent / "endpoint.yaml"
    resource = endpoint(folder, QUICK, task=task).model_dump(mode="json", by_alias=True)
    resource["spec"] |= changes
    file.write_text(yaml.safe_dump(resource))
    return read_subject(BenchOptions(target=str(file), output=folder.parent / "out"), models=folder.parent)


@pytest.mark.parametrize(
    ("end", "below"),
    [("/", ""), ("/models/b/", "/models/b"), ("/models/b/predict", "/models/b"), ("/predict", ""), ("/x", "/x")],
)
def test_the_path_of_a_url_is_kept(end: str, below: str, start_stub: StartStub) -> None:
    url = start_stub().url

    found = read_subject(BenchOptions(target=f"{url}{end}", task="fill-mask"), models=Path())

    assert found.url == f"{url}{below}"


def test_a_mask_token_that_only_the_tokenizer_itself_names_is_found(folder: Path) -> None:
    assert subject(folder, "fill-mask").mask_token == "[MASK]"


def test_fill_mask_without_a_mask_token_is_refused_before_anything_is_started(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text().replace("[MASK]", "[BLANK]"))
    file.write_text(json.dumps(content))

    with pytest.raises(SpecError, match="has no mask token") as refused:
        subject(folder, "fill-mask")
    assert "tokenizer_config.json" in refused.value.remedy
    assert subject(folder, "feature-extraction").mask_token is None


def test_an_endpoint_for_inferentia_has_a_note_that_cpus_are_measured(folder: Path) -> None:
    (note,) = subject(folder, "feature-extraction", hardwareClass="inf2").notes

    assert note == "the endpoint is for inf2, AWS Inferentia, which is not used here: CPUs of this machine are measured"
    assert subject(folder, "feature-extraction").notes == ()
