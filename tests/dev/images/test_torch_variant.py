"""The optimiser with PyTorch takes models of architectures that have no builder here."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from images.archive import Archive
from images.build import Builder
from penstock.tasks import Head
from tests.cli.endpoints import write_endpoint
from tests.dev.images.container import engine, volume

pytestmark = pytest.mark.extended


@pytest.fixture
def mounts(tmp_path: Path) -> dict[str, Path]:
    """A folder with such a model and an endpoint that serves it as it is, and a volume for artefacts."""
    from tests.optimizer.export.models import SMALL, make

    folder = tmp_path / "models"
    folder.mkdir()
    make(folder / "relative", "BertConfig", Head.SEQUENCE, **SMALL, position_embedding_type="relative_key")
    write_endpoint(
        folder / "endpoint.yaml",
        "file:///models/relative",
        task="text-classification",
        optimization={"mode": "Disabled"},
    )
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
    return {"/models": folder, "/var/lib/penstock/artefacts": volume(tmp_path / "artefacts")}


@pytest.mark.timeout(2400)  # with the building of an image of 1.8 GB
def test_an_architecture_without_a_builder_is_exported_and_served(
    images: Builder,
    archive: Callable[[str], Archive],
    mounts: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        engine(images, archive("optimizer-torch"), tmp_path_factory.mktemp("torch")) as started,
        started.run("serve", "/models/endpoint.yaml", mounts=mounts) as container,
    ):
        container.until("GET", "/readyz", is_it=lambda answer: answer.status == 200)
        answer = container.ask("POST", "/predict", {"inputs": "I like you."})

    assert answer.status == 200
    assert "label" in str(answer.body)


@pytest.mark.timeout(2400)  # with the building of an image of 1.8 GB
def test_the_error_of_the_usual_optimiser_names_what_is_missing(
    images: Builder,
    archive: Callable[[str], Archive],
    mounts: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        engine(images, archive("optimizer"), tmp_path_factory.mktemp("usual")) as started,
        started.run("serve", "/models/endpoint.yaml", mounts=mounts) as container,
    ):
        status = container.process.wait(120)

    assert status == 1
    assert "torch" in container.read_output()
    assert "Traceback" not in container.read_output()
