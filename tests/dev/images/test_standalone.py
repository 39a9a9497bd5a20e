"""The images without Kubernetes, as `docker run` has them: optimise and serve a model, serve an artefact."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from images.archive import Archive
from images.build import Builder
from penstock_cli.main import INTERRUPTED
from tests.cli.endpoints import write_endpoint, write_tiny
from tests.dev.images.container import Answer, Engine, engine, ready, volume

pytestmark = pytest.mark.slow

QUESTION = {"inputs": ["I like you.", "I love you."]}


@pytest.fixture(scope="module")
def optimizer(
    images: Builder, archive: Callable[[str], Archive], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    # Another test may need the demonstration's image, which is the same with a model: one image fewer to build.
    with engine(images, archive("optimizer-demo"), tmp_path_factory.mktemp("optimizer")) as started:
        yield started


@pytest.fixture(scope="module")
def runtime(
    images: Builder, archive: Callable[[str], Archive], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with engine(images, archive("runtime"), tmp_path_factory.mktemp("runtime")) as started:
        yield started


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and endpoints that name it by its path in a container."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "tiny")
    openvino = {"budgetSeconds": 150, "engines": ["openvino"], "precisions": ["int8-static"]}
    few = {"engines": ["onnxruntime"], "precisions": ["fp32", "int8-dynamic"], "budgetSeconds": 40}
    # The accuracy is not tested here, and rounding changes a model of random numbers much.
    loose = {"accuracy": {"minCosine": 0.5}}
    lengths = {"workload": {"sequenceLengths": [8]}}
    write_endpoint(folder / "endpoint.yaml", "file:///models/tiny", optimization=few | loose, **lengths)
    write_endpoint(folder / "openvino.yaml", "file:///models/tiny", optimization=openvino | loose, **lengths)
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
    return folder


def check(answer: Answer) -> None:
    """It is an answer of the model, with what it took in milliseconds."""
    assert answer.status == 200
    assert len(answer.body) == 2
    assert float(answer.headers["x-compute-time"]) > 0


@pytest.mark.timeout(900)
def test_a_model_is_served_while_it_is_optimised_and_its_artefact_by_the_smaller_image(
    optimizer: Engine, runtime: Engine, models: Path, tmp_path: Path
) -> None:
    artefacts = volume(tmp_path / "artefacts")

    with optimizer.run(
        "serve", "/models/endpoint.yaml", mounts={"/models": models, "/var/lib/penstock/artefacts": artefacts}
    ) as container:
        container.until("GET", "/readyz", is_it=ready)
        first = container.ask("POST", "/predict", QUESTION)
        check(first)
        container.until("GET", "/info", is_it=lambda _: "took over in the running server" in container.read_output())
        check(container.ask("POST", "/predict", QUESTION))
        assert container.end() == 0
    # Next to it is the fp32 one that was served meanwhile.
    (finished,) = [path.parent for path in artefacts.glob("*/report.html") if path.parent.suffix != ".baseline"]

    with runtime.run("serve", "/artefact", mounts={"/artefact": finished}) as container:
        container.until("GET", "/readyz", is_it=ready)
        answer = container.ask("POST", "/predict", QUESTION)
        check(answer)
        assert container.ask("GET", "/metrics").status == 200
        assert container.end() == 0


@pytest.mark.timeout(600)
def test_openvino_and_its_quantiser_work_after_the_trimming(optimizer: Engine, models: Path, tmp_path: Path) -> None:
    artefacts = volume(tmp_path / "artefacts")
    # It was quantised, run and judged with any outcome, or ran out of time on a busy machine.
    late = r"failed, \w+ did not end within|skipped, .* while it was tried"
    fine = re.compile(rf"openvino-int8: (passed|slower|rejected|{late})")

    with optimizer.run(
        "optimize", "/models/openvino.yaml", mounts={"/models": models, "/var/lib/penstock/artefacts": artefacts}
    ) as container:
        container.until_output(fine)
        # Later stages are the same as for the image's other engine. `docker stop` ends it cleanly.
        assert container.end() == INTERRUPTED

    assert "the same command goes on from there" in container.read_output()
    assert "rror" not in container.read_output()


@pytest.mark.extended  # the test above runs OpenVINO, and the one before it a complete search
@pytest.mark.timeout(600)
def test_a_search_with_openvino_ends(optimizer: Engine, models: Path, tmp_path: Path) -> None:
    artefacts = volume(tmp_path / "artefacts")

    with optimizer.run(
        "optimize", "/models/openvino.yaml", mounts={"/models": models, "/var/lib/penstock/artefacts": artefacts}
    ) as container:
        status = container.process.wait(400)

    assert status == 0, container.read_output()
    assert list(artefacts.glob("*/manifest.json"))
    assert "rror" not in container.read_output()


def test_the_error_of_the_smaller_image_names_the_one_that_optimises(runtime: Engine, models: Path) -> None:
    with runtime.run("serve", "/models/endpoint.yaml", mounts={"/models": models}) as container:
        status = container.process.wait(240)

    assert status == 1
    assert "penstock-optimizer" in container.read_output()
    assert "Traceback" not in container.read_output()


@pytest.mark.parametrize("which", ["optimizer", "runtime"])
def test_without_arguments_the_image_runs_the_pods_process_and_names_missing_settings(
    which: str, request: pytest.FixtureRequest
) -> None:
    started: Engine = request.getfixturevalue(which)

    with started.run() as container:
        status = container.process.wait(240)

    assert status != 0
    assert "PENSTOCK_" in container.read_output()
    assert "Traceback" not in container.read_output()


@pytest.mark.parametrize("which", ["optimizer", "runtime"])
def test_the_image_prints_its_version(which: str, request: pytest.FixtureRequest) -> None:
    started: Engine = request.getfixturevalue(which)

    with started.run("--version") as container:
        assert container.process.wait(240) == 0

    assert container.read_output().startswith("penstock, version ")
