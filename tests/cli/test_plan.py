"""`penstock plan`: its forms, what it reads, and what it measures."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result

from penstock.capacity import CapacityCurve
from penstock.manifest import Manifest
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.reading import from_file
from penstock.resources.shipped_classes import HARDWARE_CLASSES
from penstock_cli.planning.noise import Noise, watch
from penstock_cli.planning.objects import cluster_plan, load_of_week, week_queries
from penstock_planner.evidence import Origin
from penstock_planner.ledger import read_ledger
from penstock_planner.offers import class_of_cpu
from penstock_runtime.host import read_host
from tests.cli.endpoints import PROGRAM, clean_environment, invoke, write_endpoint
from tests.planner.cases import CURVE, TOKENS

TOKEN = "open-sesame"
OBJECTIVE = {"latency": {"p95Milliseconds": 50}}
MEASURED = """
measurements:
  - hardwareClass: icelake
    source: a test
    plan: native-int8
    points: [{requestsPerSecond: 20, p95Milliseconds: 10}, {requestsPerSecond: 80, p95Milliseconds: 40}]
"""


@pytest.fixture
def emotion(tmp_path: Path) -> Path:
    return write_endpoint(
        tmp_path / "emotion.yaml", "hf://bhadresh-savani/distilbert-base-uncased-emotion@main",
        task="text-classification", objective=OBJECTIVE,
    )  # fmt: skip


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Options that keep the test away from the files of the user."""
    measured = tmp_path / "measured.yaml"
    measured.write_text(MEASURED)
    return [
        "--store", str(tmp_path / "store"), "--ledger", str(tmp_path / "ledger.jsonl"), "--measurements", str(measured),
    ]  # fmt: skip


def test_the_table_has_the_choice_the_losers_and_the_limits(emotion: Path, words: list[str]) -> None:
    done = invoke("plan", emotion, "--rate", "50", "--peak", "100", "--classes", "icelake,inf2,gpu-t4", *words)

    assert done.exit_code == 0, done.output
    assert "plan       icelake, 1 core, native-int8 (given): 1 to 2 replicas on 1 c6i.2xlarge, " in done.output
    assert "cheapest within the objective" in done.output
    assert "unknown    gpu-t4, 1 core: nothing is known of this model on gpu-t4." in done.output
    assert "inf2: not yet run on a device" in done.output
    assert "prices: USD, us-east-1, prices of 2026-07-20" in done.output


def test_json_and_csv_have_the_same_rows(emotion: Path, words: list[str]) -> None:
    asked = ["plan", emotion, "--rate", "200", *words, "--output"]
    value = json.loads(invoke(*asked, "json").output)
    rows = list(csv.DictReader(io.StringIO(invoke(*asked, "csv").output)))

    assert [(row["hardware_class"], row["cores"]) for row in value["rows"]] == [
        (row["hardware_class"], int(row["cores"])) for row in rows
    ]
    assert {row["hardware_class"] for row in rows} >= {"icelake", "graviton4", "zen5-full-cores", "inf1", "gpu-l4"}
    assert value["load"]["peak_requests_per_second"] == 200


def test_the_page_is_one_file_with_the_plot(emotion: Path, words: list[str]) -> None:
    page = invoke("plan", emotion, "--rate", "200", *words, "--output", "html").output

    assert page.startswith("<!doctype html>")
    assert "Cost of a month over p95 latency" in page


def test_artefacts_of_the_store_are_the_evidence(artefact: Path, tiny: Path, tmp_path: Path, words: list[str]) -> None:
    place = tmp_path / "store" / "made"
    shutil.copytree(artefact, place)
    manifest = Manifest.load(artefact).model_copy(update={"capacity": CURVE, "serving_rss_bytes": 8 * 2**30})
    (place / "manifest.json").write_text(manifest.model_dump_json())
    (tmp_path / "store" / "broken").mkdir()
    (tmp_path / "store" / "broken" / "manifest.json").write_text("{")
    file = write_endpoint(tmp_path / "tiny.yaml", tiny)
    assert manifest.model.source == f"file://{tiny}"
    prices = tmp_path / "prices.yaml"
    classes = (
        "{icelake: &nodes {small: {perHour: 0.1, cpus: 8, memoryGiB: 8}, n: {perHour: 1, cpus: 8, memoryGiB: 16}}, "
        "sapphirerapids: *nodes, zen4: *nodes, zen5: *nodes, any: *nodes}"
    )
    prices.write_text(f"date: 2026-01-01\nclasses: {classes}\n")

    done = invoke("plan", file, "--rate", "100", "--p95", "50", "--prices", prices, *words, "--output", "json")

    rows = json.loads(done.output)["rows"]
    origins = [row["evidence"]["origin"] for row in rows if row["evidence"] and str(place) in row["evidence"]["basis"]]
    assert Origin.MEASURED_HERE.value in origins
    measured = [row for row in rows if row["evidence"] and str(place) in row["evidence"]["basis"]]
    assert {row["node"] for row in measured} == {"n"}
    assert all("a replica needs 10.6 GiB of memory: small left out" in row["caveats"] for row in measured)


def test_text_generation_is_planned_by_tokens_and_not_estimated_for_other_classes(
    artefact: Path, tiny: Path, tmp_path: Path
) -> None:
    place = tmp_path / "store" / "made"
    shutil.copytree(artefact, place)
    manifest = Manifest.load(artefact).model_copy(update={"capacity": CapacityCurve(), "token_capacity": TOKENS})
    (place / "manifest.json").write_text(manifest.model_dump_json())
    prices = tmp_path / "prices.yaml"
    classes = {name: {"n": {"perHour": 1, "cpus": 8}} for name in ("icelake", "sapphirerapids", "zen4", "zen5", "any")}
    prices.write_text(json.dumps({"date": "2026-01-01", "classes": classes}))

    done = invoke(
        "plan", write_endpoint(tmp_path / "tiny.yaml", tiny), "--rate", "2", "--p95", "500", "--prices", prices,
        "--cores", "1,2", "--store", tmp_path / "store", "--ledger", tmp_path / "ledger.jsonl", "--output", "json",
    )  # fmt: skip

    value = json.loads(done.output)
    (row,) = [one for one in value["rows"] if one["evidence"]]
    assert row["figures"]["p95_peak"] <= 500
    assert row["evidence"]["caveats"][0] == "p95 is of the time to the first token"
    assert value["notes"][0].endswith("reserved, with 60 of them in a request")


@pytest.mark.parametrize(
    ("words_of_test", "problem"),
    [
        ([], "the endpoint has no objective.timeToFirstToken. Give --p95"),
        (["--p95", "900", "--verify", "http://127.0.0.1:1"], "which --verify does not measure"),
    ],
)
def test_text_generation_needs_an_objective_of_its_own(tmp_path: Path, words_of_test: list[str], problem: str) -> None:
    chat = write_endpoint(tmp_path / "chat.yaml", "hf://org/chat@main", task="text-generation", objective={})

    done = invoke("plan", chat, "--rate", "5", "--store", tmp_path, "--ledger", tmp_path / "ledger", *words_of_test)

    assert (done.exit_code, problem in done.stderr) == (1, True)


def test_a_trace_of_text_generation_is_for_the_simulator(tmp_path: Path) -> None:
    chat = write_endpoint(tmp_path / "chat.yaml", "hf://org/chat@main", task="text-generation", objective={})

    done = invoke("plan", chat, "--trace", tmp_path / "day.csv", "--store", tmp_path, "--ledger", tmp_path / "ledger")

    assert done.exit_code == 1
    assert "or replay the trace with penstock simulate ARTEFACT --trace" in done.stderr


@pytest.mark.parametrize(
    ("words_of_test", "problem"),
    [
        ([], "the load is not known. Give --rate"),
        (["--rate", "5", "--peak", "4"], "--peak 4 is under --rate 5"),
        (["--rate", "5", "--prices", "none.yaml"], "none.yaml cannot be read"),
        (["--rate", "5", "--measurements", "none.yaml"], "none.yaml cannot be read"),
    ],
)
def test_wrong_options_are_one_sentence(emotion: Path, words_of_test: list[str], problem: str) -> None:
    done = invoke("plan", emotion, *words_of_test)

    assert done.exit_code == 1
    assert f"error: {problem}" in done.stderr


def test_an_objective_is_needed(tiny: Path, tmp_path: Path) -> None:
    done = invoke("plan", write_endpoint(tmp_path / "e.yaml", tiny), "--rate", "5")

    assert (done.exit_code, "the endpoint has no objective.latency. Give --p95" in done.stderr) == (1, True)


class Answers(BaseHTTPRequestHandler):
    """A model server without `/info`, and a Prometheus."""

    protocol_version = "HTTP/1.1"
    value = "12.5"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(200, [{"label": "joy", "score": 1.0}])

    def do_GET(self) -> None:
        if not self.path.startswith("/api/v1/query?"):
            self._answer(404, {})
            return
        series = [{"metric": {}, "value": [0, self.value]}] if self.value else []
        self._answer(200, {"status": "success", "data": {"resultType": "vector", "result": series}})

    def _answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        """Nothing: the test reads no log."""


@pytest.fixture
def server() -> Iterator[str]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    made.daemon_threads = True
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}"
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the measurement reads of this machine: quiet, unless the test changes it."""
    state: dict[str, Any] = {"busy": 0.02, "steal": 0.01, "load_average": 0.5, "programs": ()}

    def watch(_: tuple[int, ...], measure: Callable[[], Any]) -> tuple[Any, Noise]:
        return measure().model_copy(update={"send_lag_p99_milliseconds": 0.0}), Noise(**state)

    monkeypatch.setattr("penstock_cli.planning.verification.watch", watch)
    return state


def test_a_plan_is_verified_at_the_peak_and_kept_in_the_ledger(
    emotion: Path, words: list[str], server: str, tmp_path: Path, machine: dict[str, Any]
) -> None:
    asked = ["plan", emotion, "--rate", "20", "--peak", "90", "--classes", "icelake", "--cores", "1", *words]

    done = invoke(*asked, "--verify", server, "--verify-seconds", "1")

    assert done.exit_code == 0, done.output
    (entry,) = read_ledger(tmp_path / "ledger.jsonl")
    assert (entry.hardware_class, entry.cores, entry.origin) == ("icelake", 1, "given")
    # Two replicas at the peak.
    assert entry.requests_per_second == pytest.approx(45)
    assert entry.predicted_p95_milliseconds == pytest.approx(22.5)
    assert entry.noise == pytest.approx(0.03)
    assert (entry.refused_share, entry.load_average) == (0, 0.5)
    assert entry.cpu == "stated: icelake"
    assert re.search(r"predicted  p95 22.5 ms \(given\)\nmeasured   p95 [\d.e+]+ ms", done.output)
    assert "machine    stated: icelake; others 3% of its CPUs, load 0.5" in done.output
    # Later plans state how far past ones were off, and have wider intervals.
    later = invoke(*asked, "--output", "json").output
    assert "icelake (given): 1 measured, p95 off by" in later
    slow, _ = json.loads(later)["rows"][0]["evidence"]["speed_interval"]
    fast_enough = entry.predicted_p95_milliseconds / entry.measured_p95_milliseconds
    assert slow <= max(0.051, round(fast_enough, 3))
    # What a program reads is the plan alone.
    as_json = invoke(*asked, "--verify", server, "--verify-seconds", "1", "--output", "json")
    assert json.loads(as_json.stdout)["rows"]
    assert "verified: p95 predicted 22.5 ms, measured" in as_json.stderr


def test_a_noisy_measurement_is_shown_and_not_kept(
    emotion: Path, words: list[str], server: str, tmp_path: Path, machine: dict[str, Any]
) -> None:
    machine.update(busy=0.4, load_average=17.0, programs=("pytest", "cc1"))

    done = invoke(
        "plan", emotion, "--rate", "30", "--classes", "icelake", "--cores", "1", *words, "--verify", server,
        "--verify-seconds", "1",
    )  # fmt: skip

    assert done.exit_code == 1
    assert "measured   p95" in done.output
    assert (
        "error: not kept: other work (pytest, cc1) and the hypervisor had 41% of the server's CPUs, load 17.0; "
        "the limit is 15%. End the other work"
    ) in done.stderr
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_server_that_does_not_state_its_processor_needs_a_class(emotion: Path, words: list[str], server: str) -> None:
    done = invoke("plan", emotion, "--rate", "30", *words, "--verify", server)

    assert done.exit_code == 1
    assert f"error: the server at {server} does not state its processor. Name its class alone in" in done.stderr


def test_entries_of_the_ledger_are_listed_and_removed(
    emotion: Path, words: list[str], server: str, tmp_path: Path, machine: dict[str, Any]
) -> None:
    asked = ["plan", emotion, "--rate", "30", "--classes", "icelake", "--cores", "1", *words]
    invoke(*asked, "--verify", server, "--verify-seconds", "1")
    (entry,) = read_ledger(tmp_path / "ledger.jsonl")
    options = ["ledger", "--ledger", tmp_path / "ledger.jsonl"]

    listed = invoke(*options).output
    unknown = invoke(*options, "--remove", "deadbeef")
    removed = invoke(*options, "--remove", entry.key)

    assert listed.startswith(f"{entry.key}   ")
    assert "icelake, 1 x hf://bhadresh-savani" in listed
    assert "30 requests/s: p95 15 ms predicted (given), " in listed
    assert (unknown.exit_code, "has no entry deadbeef. List the keys: penstock ledger" in unknown.stderr) == (1, True)
    assert removed.output.startswith("removed 1;")
    assert "no predictions in" in invoke(*options).output


def test_what_else_runs_on_the_cpus_is_seen() -> None:
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    code = f"import os; os.sched_setaffinity(0, [{allowed[0]}]); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            found, noise = watch((allowed[0],), lambda: "measured")
        finally:
            process.kill()

    assert found == "measured"
    assert noise.busy > 0.5
    assert noise.share <= 1
    assert noise.load_average >= 0


def test_a_server_that_does_not_answer_is_an_error(emotion: Path, words: list[str]) -> None:
    done = invoke("plan", emotion, "--rate", "30", "--classes", "icelake", *words, "--verify", "http://127.0.0.1:9")

    assert done.exit_code == 1
    assert "nothing answers at http://127.0.0.1:9" in done.stderr


@contextmanager
def real_server(artefact: Path, *flags: object) -> Iterator[str]:
    """`penstock serve`, which asks for the token `open-sesame`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", *PROGRAM, "serve", artefact, "--port", port, *flags]
    environment = clean_environment(PENSTOCK_AUTH_TOKEN=TOKEN)
    with subprocess.Popen([str(word) for word in words], env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            while not is_ready(url, process):
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def is_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz").status_code == 200
    return False


def own_class() -> str:
    return class_of_cpu(HARDWARE_CLASSES, read_host().cpu) or "any"


def test_a_server_with_keys_is_verified_and_measured(
    emotion: Path, artefact: Path, tmp_path: Path, machine: dict[str, Any]
) -> None:
    name = own_class()
    prices, measured = tmp_path / "prices.yaml", tmp_path / "own.yaml"
    prices.write_text(f"date: 2026-01-01\nclasses: {{{name}: {{n: {{perHour: 1, cpus: 16}}}}}}\n")
    measured.write_text(MEASURED.replace("icelake", name))
    asked = [
        "plan", emotion, "--rate", "30", "--classes", f"{name},icelake", "--prices", prices, "--measurements", measured,
        "--cores", "1", "--store", tmp_path / "s", "--ledger", tmp_path / "l.jsonl",
    ]  # fmt: skip
    with real_server(artefact) as url:
        verify = ["--verify", url, "--verify-seconds", "1"]
        refused = invoke(*asked, *verify)
        done = invoke(*asked, *verify, environment={"PENSTOCK_AUTH_TOKEN": TOKEN})

    assert refused.exit_code == 1
    assert f"{url}/info asks for a token (401)" in refused.stderr
    assert done.exit_code == 0, done.output
    (entry,) = read_ledger(tmp_path / "l.jsonl")
    assert (entry.refused_share, entry.hardware_class) == (0, name)
    assert " family " in entry.cpu


def test_a_server_of_another_class_is_refused(
    words: list[str], artefact: Path, tmp_path: Path, machine: dict[str, Any]
) -> None:
    other = "graviton4" if own_class() != "graviton4" else "icelake"
    # Not even where the endpoint names the class.
    asked = write_endpoint(
        tmp_path / "e.yaml", "hf://a/distilbert@main", task="text-classification", objective=OBJECTIVE,
        hardwareClass=other,
    )  # fmt: skip
    measured = tmp_path / "other.yaml"
    measured.write_text(MEASURED.replace("icelake", other))
    with real_server(artefact) as url:
        done = invoke(
            "plan", asked, "--rate", "30", "--classes", other, *words[:-1], measured, "--verify", url,
            environment={"PENSTOCK_AUTH_TOKEN": TOKEN},
        )  # fmt: skip

    assert done.exit_code == 1
    assert f"the server at {url} is of another class than the plan: {own_class()}, 1 core (" in done.stderr
    assert f"the plan has figures of {other}, 1 core" in done.stderr
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_server_that_answers_from_memory_is_not_verified_and_the_bench_has_a_note(
    emotion: Path, words: list[str], artefact: Path, tmp_path: Path
) -> None:
    key = {"PENSTOCK_AUTH_TOKEN": TOKEN}
    with real_server(artefact, "--answer-cache-bytes", 1_000_000) as url:
        plan = invoke("plan", emotion, "--rate", "30", "--classes", "icelake", *words, "--verify", url, environment=key)
        brief = ["--lengths", "8", "--batches", "1", "--seconds", "0.1", "--rounds", "1"]
        bench = invoke("bench", url, *brief, "--output", tmp_path / "bench", environment=key)

    assert plan.exit_code == 1
    assert f"the server at {url} keeps answers" in plan.stderr
    assert not (tmp_path / "ledger.jsonl").exists()
    assert bench.exit_code == 0, bench.output
    assert "note       the server keeps answers" in bench.output


def test_an_address_that_cannot_be_verified_is_refused_before_the_plan(emotion: Path, words: list[str]) -> None:
    done = invoke("plan", emotion, "--rate", "30", *words, "--verify", "localhost:8080")

    assert done.exit_code == 1
    assert done.stdout == ""
    assert "localhost:8080 cannot be measured. Give http://host:port" in done.stderr


def test_the_load_of_the_last_week_comes_from_prometheus(server: str) -> None:
    assert load_of_week(server, "default", "emotion") == (12.5, 12.5)


def test_the_queries_are_about_the_pods_of_the_endpoint() -> None:
    mean, highest = week_queries("team", "my-emotion")

    assert 'namespace="team",pod=~"my-emotion-[a-z0-9]{1,10}-[a-z0-9]{5}"' in mean.replace("\\\\", "")
    assert (mean[:14], highest[:14], mean[-7:]) == ("avg_over_time(", "max_over_time(", "[7d:1m])"[-7:])


def point(rate: float, p95: float) -> dict[str, float]:
    return {"requestsPerSecond": rate, "completedPerSecond": rate, "p95Milliseconds": p95}


def cluster_objects() -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    spec = {"model": "hf://a/distilbert@main", "task": "text-classification", "hardwareClass": "dear", "cores": 1}
    endpoint = {
        "metadata": {"name": "emotion", "namespace": "team", "resourceVersion": "7"},
        "spec": {**spec, "objective": OBJECTIVE, "scaling": {"maxReplicas": 90}},
        "status": {"scaling": {"desired": 2, "requestsPerSecond": 120.0}},
    }
    classes = [
        {"metadata": {"name": name}, "spec": {"price": {"perCoreHour": price}}}
        for name, price in (("dear", 0.08), ("cheap", 0.05))
    ]
    result = {
        "plan": {
            "summary": "native-int8, 1x1 threads", "engine": "native", "precision": "int8-static", "streams": 1,
            "threadsPerStream": 1, "batching": "single",
        },
        "accuracy": {"withinBudget": True},
        "cpu": {"vendor": "x", "family": 1, "model": 1, "stepping": 1, "modelName": "A CPU", "isa": "avx2"},
        "cores": 1, "residentBytes": 10**9,
        "capacity": {"p95ObjectiveMilliseconds": 50, "points": [point(20, 10), point(80, 50)]},
    }  # fmt: skip
    models = [
        {"metadata": {"name": f"m{index}"}, "spec": {**spec, **changed}, "status": {"phase": "Ready", "result": result}}
        for index, changed in enumerate(
            [{}, {"hardwareClass": "cheap"}, {"model": "hf://a/other@main"}, {"task": "fill-mask"}]
        )
    ]
    return endpoint, classes, [*models, {"metadata": {"name": "new"}, "spec": spec}]


def test_a_cluster_gives_its_classes_prices_models_and_load() -> None:
    endpoint, classes, models = cluster_objects()

    found = cluster_plan(endpoint, classes=classes, models=models)

    assert (found.namespace, found.requests_per_second) == ("team", 120)
    assert sorted(found.classes) == ["cheap", "dear"]
    assert [(one.hardware_class, one.basis) for one in found.evidence] == [
        ("dear", "OptimizedModel m0, A CPU"), ("cheap", "OptimizedModel m1, A CPU"),
    ]  # fmt: skip
    assert {one.resident_bytes for one in found.evidence} == {10**9}


def test_a_measurement_in_a_class_without_a_processor_is_also_one_of_the_class_of_its_processor() -> None:
    endpoint, classes, models = cluster_objects()
    classes += [
        {"metadata": {"name": "cascadelake"}, "spec": {"isa": "avx512-vnni"}},
        {"metadata": {"name": "graniterapids"}, "spec": {"isa": "amx"}},
        {"metadata": {"name": "sapphirerapids"}, "spec": {"isa": "amx"}},
    ]
    # A processor that a hypervisor hides: the older generation of those with its instructions.
    models[0]["status"]["result"]["cpu"]["isa"] = "amx"

    found = cluster_plan(endpoint, classes=classes, models=models[:1]).evidence

    assert [(one.hardware_class, one.curve, one.origin) for one in found] == [
        (name, found[0].curve, Origin.MEASURED_ON_CLASS) for name in ("dear", "sapphirerapids")
    ]
    assert found[1].caveats == (*found[0].caveats, "measured with the cores of the class dear")


def test_fields_of_a_later_release_are_ignored() -> None:
    endpoint, classes, models = cluster_objects()
    known = cluster_plan(endpoint, classes=classes, models=models)
    classes[1]["spec"] |= {"later": {"x": 1}}
    classes[1]["spec"]["price"]["later"] = "yes"
    endpoint["spec"]["later"] = models[0]["spec"]["later"] = models[0]["status"]["later"] = 1
    classes.append({"metadata": {"name": "unreadable"}, "spec": {"price": "free"}})

    assert cluster_plan(endpoint, classes=classes, models=models) == known


Cluster = Callable[..., Result]


@pytest.fixture
def of_cluster(tmp_path: Path) -> Cluster:
    """Runs `penstock plan emotion` with a kubectl that prints these objects."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        '#!/bin/sh\ncase "$*" in *modelendpoints*) f=one;; *hardwareclasses*) f=classes;; *) f=models;; esac\n'
        f"cat {tmp_path}/$f.json\n"
    )
    kubectl.chmod(0o755)

    def plan(endpoint: Any, classes: Any, models: Any) -> Result:
        for name, value in (("one", endpoint), ("classes", {"items": classes}), ("models", {"items": models})):
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return invoke(
            "plan", "emotion", "--namespace", "team", "--cores", "1", "--ledger", tmp_path / "l",
            environment={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        )  # fmt: skip

    return plan


def test_an_endpoint_without_requests_needs_a_load(of_cluster: Cluster) -> None:
    endpoint, classes, models = cluster_objects()
    endpoint["status"]["scaling"]["requestsPerSecond"] = 0.0

    done = of_cluster(endpoint, classes, models)

    assert done.exit_code == 1
    assert "error: the endpoint gets no requests at present. Give --rate" in done.stderr
    assert "--prometheus URL" in done.stderr


def test_why_the_endpoints_own_hardware_has_no_figures(of_cluster: Cluster) -> None:
    endpoint, classes, models = cluster_objects()
    del classes[0]["spec"]["price"]

    done = of_cluster(endpoint, classes, models)

    assert "hardware (dear, 1 core) has no figures here: no price of a node for 1 core of dear" in done.output


def test_the_cheaper_class_of_a_cluster_is_named(of_cluster: Cluster) -> None:
    done = of_cluster(*cluster_objects())

    assert done.exit_code == 0, done.output
    assert "load at present: 120 requests/s; give --prometheus for the load of the last week" in done.output
    # Two replicas of 0.08 and of 0.05 an hour.
    assert (
        "cheap, 1 core would be cheaper than the endpoint's dear, 1 core: $73 against $117 a month reserved ($44 less)"
        in done.output
    )


def test_costs_are_in_the_currency_of_the_price_of_the_endpoints_class(of_cluster: Cluster) -> None:
    endpoint, classes, models = cluster_objects()
    for one in classes:
        one["spec"]["price"]["currency"] = "EUR"
    in_dollars = {"metadata": {"name": "imported"}, "spec": {"price": {"perCoreHour": 0.01}}}

    done = of_cluster(endpoint, [*classes, in_dollars], models)

    assert done.exit_code == 0, done.output
    assert "EUR 73 against EUR 117 a month reserved (EUR 44 less)" in done.output
    assert "$" not in done.output
    assert "prices: EUR" in done.output
    assert "imported, 1 core: its price is in USD, and other prices are in EUR" in done.output


def test_the_manifest_of_the_winner_is_one_that_the_api_server_takes(tmp_path: Path, words: list[str]) -> None:
    asked = write_endpoint(
        tmp_path / "e.yaml", "hf://a/distilbert@main", task="text-classification", objective=OBJECTIVE,
        cores=4, hardwareClass="zen4", optimization={"budgetSeconds": 60}, scaling={"minReplicas": 1},
    )  # fmt: skip
    made = tmp_path / "made.yaml"
    options = ["plan", asked, "--rate", "200", "--classes", "icelake", *words, "--write", made]

    done = invoke(*options)

    assert done.exit_code == 0, done.output
    spec, before = from_file(ModelEndpoint, made).spec, from_file(ModelEndpoint, asked).spec
    assert (spec.hardware_class, spec.cores, spec.scaling.max_replicas) == ("icelake", 1, 4)
    assert spec.optimization == before.optimization
    assert (spec.model, spec.objective) == (before.model, before.objective)
    assert made.read_text().startswith("# cheapest within the objective: icelake, 1 core (given)\n")
    again = invoke(*options)
    assert (again.exit_code, "Name a file that does not exist" in again.stderr) == (1, True)


def test_without_a_choice_no_manifest_is_written(emotion: Path, words: list[str], tmp_path: Path) -> None:
    done = invoke("plan", emotion, "--rate", "5", "--p95", "0.1", *words, "--write", tmp_path / "made.yaml")

    assert done.exit_code == 1
    assert "error: nothing is chosen that a manifest could be of. " in done.stderr
    assert not (tmp_path / "made.yaml").exists()


def test_a_trace_gives_the_load_the_replicas_of_each_hour_and_what_they_cost(
    emotion: Path, words: list[str], tmp_path: Path
) -> None:
    trace, prices = tmp_path / "day.csv", tmp_path / "prices.yaml"
    trace.write_text("0,20\n3600,150\n7200,0\n")
    node = "{n: {perHour: 1, spotPerHour: 0.25, reservedPerHour: 0.6, cpus: 4}}"
    prices.write_text(f"date: 2026-01-01\nclasses: {{icelake: {node}}}\n")
    asked = ["plan", emotion, "--trace", trace, "--prices", prices, "--classes", "icelake", "--cores", "1", *words]

    value = json.loads(invoke(*asked, "--output", "json").stdout)
    table = invoke(*asked).output

    assert value["load"]["mean_requests_per_second"] == 85
    assert value["load"]["peak_requests_per_second"] == 150
    (one,) = value["trace"]
    quiet, busy = one["replicas_by_hour"]
    # 80 requests/s within the objective, with a headroom of 0.75.
    assert quiet == 1
    # A step: the autoscaler starts more for a while.
    assert 2.5 < busy <= one["most_replicas"] < 20
    assert one["replica_hours"] == pytest.approx(quiet + busy, abs=0.1)
    assert one["per_month"]["on_demand"] == pytest.approx(one["replica_hours"] / 2 * 730, rel=1e-4)
    assert one["per_month"]["spot"] == pytest.approx(one["per_month"]["on_demand"] / 4, rel=1e-4)
    assert one["per_month"]["reserved"] == pytest.approx(one["most_replicas"] * 0.6 * 730, rel=1e-4)
    assert 0 <= one["late_share"] < 0.1
    assert re.search(r"trace      icelake, 1 core: [\d.]+% late, [\d.]+ replica-hours in 2 h, at most \d+ rep", table)


@pytest.mark.parametrize("cloud", ["gcp", "azure"])
def test_the_prices_of_a_cloud_are_named(emotion: Path, words: list[str], cloud: str) -> None:
    value = json.loads(invoke("plan", emotion, "--rate", "50", *words, "--prices", cloud, "--output", "json").output)

    assert any(f"karpenter-provider-{cloud}" in note for note in value["notes"])
    assert value["chosen"] is not None


def test_a_corpus_is_planned_without_a_load(tmp_path: Path) -> None:
    endpoint = write_endpoint(tmp_path / "e.yaml", "hf://sentence-transformers/all-MiniLM-L6-v2")
    asked = ["plan", endpoint, "--rows", 10**8, "--prices", "gcp", "--store", tmp_path / "none"]

    table = invoke(*asked)
    shown = json.loads(invoke(*asked, "--output=json").stdout)
    lines = invoke(*asked, "--output=csv").stdout.splitlines()

    assert table.exit_code == 0, table.output
    best = shown["rows"][0]
    assert f"plan       {best['hardware_class']}, " in table.output
    assert best["spot"] < best["on_demand"]
    assert len(lines) == 1 + len(shown["rows"])
    refused = invoke(*asked, "--output=html")
    assert (refused.exit_code, "Give --output table, json or csv" in refused.output) == (1, True)
