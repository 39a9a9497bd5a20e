"""An artefact for Inferentia on the command line, with the stand-in for the Neuron SDK."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.tasks import TaskName
from tests.cli.endpoints import run, write_endpoint
from tests.endtoend.process import Served
from tests.runtime.engines.neuron.small import Standin, compile_kinds, install_standin, write_artefact
from tests.runtime.http.serving import write_folder


@pytest.fixture
def standin(tmp_path: Path) -> Standin:
    pytest.importorskip("torch")
    return install_standin(tmp_path / "standin")


@pytest.fixture
def artefact(standin: Standin, tmp_path: Path) -> Path:
    """Of a classifier, compiled for one text of up to 32 tokens and four of up to 64."""
    path = compile_kinds(standin, tmp_path / "compiled", [("classes", 1)])["classes", 1]
    write_artefact(tmp_path / "artefact", path, "classes", TaskName.TEXT_CLASSIFICATION, write_folder)
    return tmp_path / "artefact"


@pytest.mark.slow
def test_an_artefact_is_served_and_measured_by_its_url(standin: Standin, artefact: Path, tmp_path: Path) -> None:
    refused = run("serve", artefact, "--port", "0", "--cores", "1", environment=standin.variables())
    with Served(artefact, environment=standin.variables()) as served:
        served.ready()
        status, answer = served.predict("i like you")
        device = served.info()["predictor"]["device"]
        measured = run(
            "bench", f"http://127.0.0.1:{served.port}", "--lengths", "8", "--batches", "1", "--seconds", "0.5",
            "--rounds", "1", "--output", tmp_path / "bench",
        )  # fmt: skip
        output = served.output

    assert refused.returncode == 1
    assert "error: --cores counts CPU cores, and this artefact runs on AWS Inferentia" in refused.stderr
    assert status == 200
    assert answer
    assert (device["cores"], device["copies"]) == (2, 2)
    assert "device     2 copies on 2 NeuronCores, compiled for 1x32, 4x64 tokens" in output
    assert "note       AWS Inferentia (inf2): not yet run on a device" in output
    assert measured.returncode == 0, measured.stderr
    assert (tmp_path / "bench" / "report.html").is_file()


def test_a_host_without_devices_is_one_sentence(standin: Standin, artefact: Path) -> None:
    ended = run("serve", artefact, "--port", "0", environment=standin.variables(devices=False))

    assert ended.returncode == 1
    assert "error: no Neuron device can be used here" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_file_for_inferentia_is_served_by_cpus_whatever_its_neuron_cores(tiny: Path, tmp_path: Path) -> None:
    file = write_endpoint(
        tmp_path / "tiny.yaml", tiny, hardwareClass="inf2", cores=24, optimization={"mode": "Disabled"}
    )
    with Served(file, "--store", tmp_path / "store") as served:
        served.ready()
        output = served.output

    assert "note       hardwareClass inf2 is AWS Inferentia" in output
