"""How a serving process ends, and what remains for the next start."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from penstock.manifest import MANIFEST_NAME, Manifest
from tests.cli.endpoints import SHORTENED, clean_environment, run, write_endpoint
from tests.endtoend.conftest import FEW
from tests.endtoend.process import Served, gone
from tests.runtime.models.hub_server import running_hub

pytestmark = pytest.mark.slow

DRAIN_SECONDS = 240


def optimising(server: Served) -> list[psutil.Process]:
    """Wait until the search runs; returns its processes."""
    server.wait_until(lambda info: info["optimization"] is not None and info["optimization"]["stage"] == "candidates")
    found = server.family()
    assert any("optimize" in process.cmdline() for process in found)
    return found


def test_the_optimisation_ends_with_the_server(endless: Path, tmp_path: Path) -> None:
    with Served(endless, "--store", tmp_path / "store") as server:
        server.ready()
        family = optimising(server)

        assert server.end() == 0
        assert gone([*family, *server.family()]), "an orphaned process continues the optimisation"
        assert "Traceback" not in server.output


def test_a_killed_optimisation_is_reported(endless: Path, tmp_path: Path) -> None:
    """Kill it as the kernel does when memory runs out."""
    with Served(endless, "--store", tmp_path / "store") as server:
        server.ready()
        optimizer = next(process for process in optimising(server) if "optimize" in process.cmdline())
        optimizer.kill()
        server.wait_for("goes on serving: it was killed by signal 9 (SIGKILL, out of memory in all likelihood)")

        assert "the next start goes on from there" in server.output
        assert server.predict("still answered")[0] == 200
        assert "killed by signal 9" in server.info()["optimization_error"]


@pytest.mark.extended  # tests/optimizer/end_to_end/test_budgets.py and pod/test_pod_job.py test continued runs
def test_results_of_a_killed_server_are_reused(tiny: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    file = write_endpoint(
        tmp_path / "tiny.yaml", tiny, workload={"sequenceLengths": [8, 32]}, optimization={"budgetSeconds": 300, **FEW}
    )
    with Served(file, "--store", store) as server:
        server.ready()
        family = optimising(server)
        server.wait_until(lambda _: bool(list(store.glob("*.work/candidates/onnxruntime-fp32.json"))))
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        assert gone(family), "an orphaned process continues the optimisation, and holds the lock"
    (record,) = store.glob("*.work/candidates/onnxruntime-fp32.json")
    known = json.loads(record.read_text())["facts"]
    assert not [path for path in store.glob(f"*/{MANIFEST_NAME}") if "." not in path.parent.name]

    done = run("optimize", file, "--store", store, program=SHORTENED)

    assert done.returncode == 0, done.stderr
    (artefact,) = [path.parent for path in store.glob(f"*/{MANIFEST_NAME}") if "." not in path.parent.name]
    reference = next(one for one in Manifest.load(artefact).candidates if one.recipe.name == "onnxruntime-fp32")
    # Equal to the last digit: it was read, not measured again.
    assert reference.build_seconds == known["build_seconds"]


def test_a_second_signal_ends_at_once(endless: Path, tmp_path: Path) -> None:
    slow = ("--drain-delay-seconds", DRAIN_SECONDS, "--drain-limit-seconds", DRAIN_SECONDS + 60)
    with Served(endless, "--store", tmp_path / "store", *slow) as server:
        server.ready()
        family = optimising(server)
        server.send(signal.SIGINT)
        server.wait_for("SIGINT: draining")
        assert server.predict("still answered")[0] == 200
        assert server.get("/readyz")[0] == 503
        begun = time.monotonic()
        status = server.end(signal.SIGINT)

        assert status == -signal.SIGINT
        assert time.monotonic() - begun < DRAIN_SECONDS / 2
        assert gone(family)
        assert "ending at once" in server.output


@contextmanager
def hub_that_never_ends_its_answer() -> Iterator[tuple[str, threading.Event]]:
    """A slow server: its URL, and an event for its first request. It sends a byte now and then, so that no time-out
    ends it."""
    asked, over = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            with suppress(OSError):  # the client has gone
                while not over.wait(0.2):
                    self.wfile.write(b".")
                    self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        over.set()
        server.shutdown()


def test_a_signal_ends_the_server_during_the_fetch_of_the_model(tmp_path: Path) -> None:
    file = write_endpoint(tmp_path / "far.yaml", "hf://an-owner/far-away")
    with hub_that_never_ends_its_answer() as (url, asked):
        environment = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hub")}
        with Served(file, "--store", tmp_path / "store", "--models", tmp_path, environment=environment) as server:
            assert asked.wait(DRAIN_SECONDS)

            assert server.end() == 0
            assert "Traceback" not in server.output


def test_the_progress_of_a_fetch_is_reported(tiny: Path, tmp_path: Path) -> None:
    """A failure that is tried again; then, without a hub, that a cached copy is used."""
    file = write_endpoint(tmp_path / "far.yaml", "hf://org/model")
    words = ("--store", tmp_path / "store", "--models", tmp_path / "models", "--no-optimize")
    with running_hub() as hub:
        hub.add("org/model", tiny)
        hub.failures = [502]
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
        with Served(file, *words, environment=environment) as server:
            server.wait_for("note       hf://org/model@main: the hub at ")
            assert "(HTTP 502): trying again in " in server.output
            server.ready()
            assert server.end() == 0
    with Served(file, *words, environment=environment) as server:
        server.wait_for("using the cached revision 0123456789ab")
        server.ready()


def test_without_optimisation_nothing_is_searched(endless: Path, tmp_path: Path) -> None:
    with Served(endless, "--store", tmp_path / "store", "--no-optimize") as server:
        server.ready()
        info = server.info()

        assert server.family() == []
        assert server.predict("I like you.")[0] == 200
        assert info["optimization"] is None
        assert info["predictor"]["which"] == "baseline"
        assert info["verdict"]["reason"] == "the fp32 graph as it was exported"
        assert info["plan"]["recipe"]["precision"] == "fp32"
        assert "until the optimisation is through" not in server.output
        assert server.end() == 0
    assert not list((tmp_path / "store").glob("*.work/candidates"))


def test_a_model_whose_answers_are_no_numbers_is_never_ready(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("query.weight"))
    save_file({**tensors, name: np.full_like(tensors[name], np.nan)}, model / "model.safetensors")
    file = write_endpoint(tmp_path / "tiny.yaml", model)

    done = run("serve", file, "--port", "0", "--store", tmp_path / "store", "--no-optimize")

    assert done.returncode == 1
    assert f"error: file://{model}: the onnxruntime-fp32 graph gives NaN" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_disabled_optimisation_searches_nothing(tiny: Path, tmp_path: Path) -> None:
    file = write_endpoint(tmp_path / "tiny.yaml", tiny, optimization={"mode": "Disabled"})
    with Served(file, "--store", tmp_path / "store") as server:
        server.ready()
        info = server.info()

        assert server.family() == []
        assert info["optimization"] is None
        assert info["plan"]["recipe"]["precision"] == "fp32"


FAILING = {
    "a budget of no use": (
        {"budgetSeconds": 0.5, **FEW},
        "the time budget of 0.5 s leaves too little after the export",
    ),
    "an accuracy that nothing has": (
        {"budgetSeconds": 300, "accuracy": {"minCosine": 1.0}, "whenNoCandidate": "Fail", **FEW},
        "no candidate is within the accuracy budget",
    ),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_failed_optimisation_leaves_fp32_in_service_and_reports_the_reason(
    case: str, tiny: Path, tmp_path: Path
) -> None:
    optimization, reason = FAILING[case]
    file = write_endpoint(tmp_path / "tiny.yaml", tiny, optimization=optimization)
    with Served(file, "--store", tmp_path / "store") as server:
        server.ready()
        before = server.predict("I like you.")
        server.wait_for("the optimisation failed, and the fp32 plan goes on serving")
        info = server.info()

        assert reason in info["optimization_error"]
        assert info["optimization"] is None
        assert info["phase"] == "ready"
        assert info["predictor"]["which"] == "baseline"
        assert server.predict("I like you.") == before
        assert reason in server.output
        assert "Traceback" not in server.output
        assert gone(server.family())
        assert server.end() == 0


def test_the_command_that_optimize_ends_with_serves_what_it_made(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    file = write_endpoint(folder / "tiny.yaml", tiny, cores=2, optimization={"mode": "Disabled"})
    places = ("--store", folder / "store", "--models", folder / "models")
    done = run("optimize", file, *places, "--cores", 1, program=SHORTENED)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("serve it"))

    words = shlex.split(line.removeprefix("serve it"))

    assert words[:3] == ["penstock", "serve", str(file)]
    with Served(file, *words[3:]) as server:
        server.ready()
        assert "made before, for this model and machine" in server.output
        assert server.end() == 0


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-"], ids=["input", "input and output"])
def test_without_standard_input_the_server_ends_cleanly(closed: str, tiny: Path, tmp_path: Path) -> None:
    file = write_endpoint(tmp_path / "tiny.yaml", tiny)
    # As the `penstock` script starts.
    start = "import sys; from penstock_cli.entry import main; sys.argv[0] = 'penstock'; main()"
    words = [sys.executable, "-c", start, "serve", file, "--store", tmp_path / "store", "--no-optimize", "--port", "0"]
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *map(str, words)],
        env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "ready: requests are answered" in line:
                    process.terminate()
            assert process.wait(DRAIN_SECONDS) == 0
        finally:
            process.kill()
