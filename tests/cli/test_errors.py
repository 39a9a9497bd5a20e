"""An error that the user can fix is one sentence and a remedy, with status 1 and without a traceback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.manifest import MANIFEST_NAME
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.reading import from_file
from penstock_cli.optimize import target_of
from penstock_runtime.host import read_host
from penstock_runtime.models.sources.transfer import FetchProgress, OnProgress
from tests.cli.endpoints import SECONDS, clean_environment, invoke, run, write_endpoint

Prepare = Callable[[Path, Path], Path]
"""Makes an endpoint file with a certain mistake from a valid model and an empty folder."""


def text(content: str | bytes) -> Prepare:
    """A file with this content."""

    def prepare(_: Path, folder: Path) -> Path:
        path = folder / "endpoint.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return prepare


def spec(**fields: Any) -> Prepare:
    """A valid file except for these fields."""
    return lambda model, folder: write_endpoint(folder / "endpoint.yaml", fields.pop("model", model), **fields)


def damaged(damage: Callable[[Path], Any]) -> Prepare:
    """A valid file whose model has been damaged."""

    def prepare(model: Path, folder: Path) -> Path:
        copy = shutil.copytree(model, folder / "model")
        damage(copy)
        return write_endpoint(folder / "endpoint.yaml", copy)

    return prepare


def pickle_only(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def truncate(model: Path) -> None:
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)


def want_code(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_own.Own"}}))


def forge(model: Path) -> None:
    """A text with a line break and an escape sequence, which clears a terminal."""
    path = "../\nall is well\x1b[2J"
    modules = [{"path": path, "type": "sentence_transformers.models.Transformer"}]
    (model / "modules.json").write_text(json.dumps(modules))


WRONG: dict[str, tuple[Prepare, str, str]] = {
    "missing file": (
        lambda _, folder: folder / "none.yaml",
        "none.yaml: No such file",
        "Give the path of a ModelEndpoint",
    ),
    "folder": (lambda model, _: model, "Is a directory", "Give the path of a ModelEndpoint"),
    "not YAML": (text("{ a: ["), "line 1, column 7: not YAML", "Check indentation"),
    "not text": (text(b"\xff\xfe\x00"), "is not UTF-8 text", "Give the path of a ModelEndpoint"),
    "empty": (text(""), "holds nothing", "Start it with `apiVersion: penstock.dev/v1alpha1`"),
    "another kind": (text("kind: Pod\napiVersion: v1\n"), "Pod", "ModelEndpoint"),
    "unknown field": (spec(taks="feature-extraction"), "spec.taks: there is no such field", "Did you mean task?"),
    "missing field": (spec(task=None), "spec.task is missing", "docs/reference/model-endpoint.md lists the fields"),
    "unknown task": (
        spec(task="feature-extracton"),
        "spec.task: 'feature-extracton' is not one of",
        "Did you mean feature-extraction?",
    ),
    "no model source": (spec(model="/models/x"), "'/models/x' is not a model source", "Did you mean file:///models/x?"),
    "no such model": (spec(model="file:///none/at/all"), "/none/at/all is not there", "Give the folder that holds"),
    "no such package": (spec(model="pkg://no_such_package/model"), "no package no_such_package", "pip install"),
    "a task that the model has no head for": (
        spec(task="question-answering"),
        "is a BertModel, which has no head for question-answering",
        "It can do feature-extraction, sentence-similarity",
    ),
    "longer input than the model takes": (
        spec(serving={"maxInputTokens": 4096}),
        "serving.maxInputTokens is 4096",
        "Set it to 128 or less",
    ),
    "more cores than there are": (spec(cores=256), "cores: 256 was asked for", "Write cores: "),
    "pickled weights": (
        damaged(pickle_only),
        "holds pytorch_model.bin, which is a pickle",
        "Convert it to safetensors (docs/how-to/convert-a-model.md#safetensors)",
    ),
    "truncated weights": (
        damaged(truncate),
        "is not a whole safetensors file: it is truncated",
        "Fetch the model again",
    ),
    "a model with code of its own": (
        damaged(want_code),
        "wants code of the model's own",
        "docs/how-to/convert-a-model.md#remote-code",
    ),
    "control characters in a text of the model": (
        damaged(forge),
        r"modules.json points to ../\nall is well\x1b[2J, outside the folder",
        "Use a model from a source you trust",
    ),
    "no configuration": (damaged(lambda model: (model / "config.json").unlink()), "config.json", ". "),
    "no tokenizer": (damaged(lambda model: (model / "tokenizer.json").unlink()), "tokenizer.json", ". "),
}


def assert_one_sentence(output: str, problem: str, remedy: str) -> None:
    """The last line is the whole error, and there is no traceback."""
    assert "Traceback" not in output
    assert output.count("error: ") == 1
    error = output[output.index("error: ") :].strip()
    assert problem in error
    assert remedy in error[error.index(problem) + len(problem) :] + "\n"


@pytest.mark.parametrize("case", WRONG)
def test_optimize_prints_the_problem_and_its_remedy(case: str, tiny: Path, tmp_path: Path) -> None:
    prepare, problem, remedy = WRONG[case]
    result = invoke("optimize", prepare(tiny, tmp_path), "--store", tmp_path / "store", "--models", tmp_path / "models")

    assert result.exit_code == 1
    assert_one_sentence(result.stderr, problem, remedy)


@pytest.mark.parametrize("case", ["missing file", "unknown field", "pickled weights", "more cores than there are"])
def test_serve_prints_the_problem_and_its_remedy(case: str, tiny: Path, tmp_path: Path) -> None:
    prepare, problem, remedy = WRONG[case]
    result = run("serve", prepare(tiny, tmp_path), "--port", 0, "--store", tmp_path / "store")

    assert result.returncode == 1
    assert_one_sentence(result.stderr, problem, remedy)


@pytest.mark.parametrize(
    ("words", "environment", "hint"),
    [
        (["optimize", "x.yaml"], {"PENSTOCK_OPTIMIZE_CORES": "abc"}, "PENSTOCK_OPTIMIZE_CORES: 'abc'"),
        (["serve", "x.yaml"], {"PENSTOCK_SERVE_CORES": "0"}, "PENSTOCK_SERVE_CORES: 0 is not"),
        (["bench", "x.yaml"], {"PENSTOCK_BENCH_LENGTHS": "1,,2"}, "PENSTOCK_BENCH_LENGTHS: '1,,2'"),
        (["optimize", "x.yaml"], {"PENSTOCK_STORE": __file__}, "PENSTOCK_STORE: Directory"),
        (["optimize", "x.yaml", "--cores", "abc"], {"PENSTOCK_OPTIMIZE_CORES": "1"}, "'--cores': 'abc'"),
    ],
)
def test_the_error_about_a_value_names_its_origin(words: list[str], environment: dict[str, str], hint: str) -> None:
    result = invoke(*words, environment=environment)

    assert result.exit_code == 2
    assert f"Error: Invalid value for {hint}" in result.stderr


@pytest.mark.parametrize("command", ["optimize", "serve"])
@pytest.mark.parametrize(
    ("store", "problem"),
    [
        # Not even root may make a folder there.
        ("/proc/penstock", "the store /proc/penstock cannot be written"),
        ("taken/store", "taken/store cannot be written (Not a directory)"),
    ],
)
def test_a_store_that_cannot_be_written(command: str, store: str, problem: str, file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    port = ["--port", "0"] if command == "serve" else []

    result = run(command, file, "--store", tmp_path / store, *port)

    assert result.returncode == 1
    assert_one_sentence(result.stderr, problem, "--store")


def test_a_file_where_the_store_has_its_work_folder(artefact: Path, file: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    key = artefact.name.removesuffix(".baseline")
    (store / f"{key}.work").touch()

    result = run("optimize", file, "--store", store)

    assert result.returncode == 1
    assert_one_sentence(
        result.stderr,
        f"the store {store} cannot be used ({store}/{key}.work/export/fused.json: Not a directory)",
        "Delete that",
    )


@pytest.mark.parametrize("flag", ["--port", "--internal-port", "--grpc-port"])
def test_a_port_in_use(flag: str, artefact: Path) -> None:
    if flag == "--grpc-port":
        pytest.importorskip("grpc")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        others = [] if flag == "--port" else ["--port", 0]
        result = run("serve", artefact, flag, port, *others)

    assert result.returncode == 1
    assert_one_sentence(result.stderr, f"cannot listen on 127.0.0.1:{port}: Address already in use", f"another {flag}")


@pytest.mark.parametrize("missing", ["certificate", "key"])
def test_a_missing_file_of_the_certificate_is_named(missing: str, artefact: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("certificate", "key")}
    for name in files.keys() - {missing}:
        files[name].touch()
    result = run("serve", artefact, "--port", 0, "--tls-certificate", files["certificate"], "--tls-key", files["key"])

    assert result.returncode == 1
    assert_one_sentence(result.stderr, f"No such file or directory: '{files[missing]}'", "Give PEM files")


class Forbidding(BaseHTTPRequestHandler):
    """Answers everything with 403."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_a_store_that_refuses_access_is_asked_once_and_its_library_logs_nothing(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    path = write_endpoint(tmp_path / "endpoint.yaml", "gs://bucket/model")
    with ThreadingHTTPServer(("127.0.0.1", 0), Forbidding) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        result = run("optimize", path, "--store", tmp_path, environment={"STORAGE_EMULATOR_HOST": url})
        server.shutdown()

    assert result.returncode == 1
    assert "trying again" not in result.stdout + result.stderr
    assert [line for line in result.stderr.splitlines() if not line.startswith(("cpu ", "model ", "error: "))] == []
    assert_one_sentence(
        result.stderr, "gs://bucket/model: the store refuses access (HTTP 403 Forbidden", "Give credentials"
    )


def alter_graph(artefact: Path) -> None:
    with next(artefact.glob("model/*/model.onnx")).open("ab") as graph:
        graph.write(b"\0")


def made_elsewhere(artefact: Path) -> None:
    manifest = json.loads((artefact / MANIFEST_NAME).read_text())
    manifest["cpu"]["isa"] = "avx2" if read_host().cpu.isa.value != "avx2" else "amx"
    (artefact / MANIFEST_NAME).write_text(json.dumps(manifest))


def make_manifest_a_folder(artefact: Path) -> None:
    (artefact / MANIFEST_NAME).unlink()
    (artefact / MANIFEST_NAME).mkdir()


ALTERED: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "graph altered": (alter_graph, "is not the file that was optimised", "Fetch the artefact again"),
    "made on another instruction set": (made_elsewhere, "was measured and judged on", "penstock optimize"),
    "file gone": (lambda artefact: (artefact / "tokenizer.json").unlink(), "tokenizer.json cannot be read", "again"),
    "manifest gone": (
        lambda artefact: (artefact / MANIFEST_NAME).unlink(),
        "has no manifest.json",
        "penstock optimize",
    ),
    "manifest broken": (
        lambda artefact: (artefact / MANIFEST_NAME).write_text("{"),
        "is not a manifest that this version reads",
        "Run penstock optimize again",
    ),
    "manifest no file": (make_manifest_a_folder, "manifest.json cannot be read (Is a directory)", "penstock optimize"),
}


@pytest.mark.parametrize("case", ALTERED)
def test_an_artefact_that_must_not_be_served(case: str, artefact: Path, tmp_path: Path) -> None:
    alter, problem, remedy = ALTERED[case]
    copy = shutil.copytree(artefact, tmp_path / "artefact")
    alter(copy)
    result = run("serve", copy, "--port", 0)

    assert result.returncode == 1
    assert_one_sentence(result.stderr, problem, remedy)


@pytest.mark.parametrize("command", ["serve", "simulate"])
def test_a_store_instead_of_an_artefact_in_it(command: str, artefact: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for name in ("0123.baseline", "0123", "0123.work"):
        (store / name).mkdir(parents=True)
    for name in ("0123", "0123.baseline"):  # the newest is the one that is served meanwhile
        shutil.copy(artefact / MANIFEST_NAME, store / name / MANIFEST_NAME)

    result = invoke(command, store)

    assert result.exit_code == 1
    assert_one_sentence(result.stderr, f"{store} has no manifest.json", f"such as {store / '0123'}\n")


@pytest.mark.parametrize(
    ("command", "remedy"), [("serve", "Give a ModelEndpoint file"), ("simulate", "Give the folder")]
)
def test_a_folder_that_holds_no_artefact(command: str, remedy: str, tmp_path: Path) -> None:
    result = invoke(command, tmp_path)

    assert result.exit_code == 1
    assert_one_sentence(result.stderr, "has no manifest.json", remedy)


def test_more_cores_than_this_machine_has() -> None:
    result = invoke("host", "--cores", 4096)

    assert result.exit_code == 1
    assert_one_sentence(result.stderr, "cores: 4096 was asked for", "Write cores: ")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["optimize", "x.yaml", "--cores", "0"], "0 is not in the range x>=1"),
        (["optimize", "x.yaml", "--budget", "soon"], "'soon' is not a valid float"),
        (["optimize", "x.yaml", "--budget", "nan"], "'nan' is not a finite number"),
        (["optimize", "x.yaml", "--budget", "1e12"], "is not in the range 1<=x<=86400"),
        (["bench", "x.yaml", "--seconds", "nan"], "'nan' is not a finite number"),
        (["bench", "x.yaml", "--patience-seconds", "inf"], "'inf' is not a finite number"),
        (["simulate", "--p95-milliseconds", "nan"], "'nan' is not a finite number"),
        (["simulate", "--headroom", "nan"], "'nan' is not a finite number"),
        (["simulate", "--price", "inf"], "'inf' is not a finite number"),
        (["optimize", "x.yaml", "--stroe", "y"], "--store"),
        (["serve"], "Missing argument 'FILE|ARTEFACT|oci://...'"),
        (["optimize", "x.yaml", "--store", __file__], "is a file"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(words: list[str], complaint: str) -> None:
    result = invoke(*words)

    assert result.exit_code == 2
    assert complaint in result.stderr


def test_the_progress_of_a_fetch_is_shown(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object, on_transfer: OnProgress, **__: object) -> None:
        on_transfer(FetchProgress("hf://a/b@main", "", 0, 0, "using the cached revision"))
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock_optimizer.optimise.optimise", fetch)
    shown = invoke("optimize", file, "--store", tmp_path / "store").output

    assert "note       using the cached revision" in shown


@pytest.mark.parametrize(
    ("given", "status"), [(subprocess.DEVNULL, 1), (subprocess.PIPE, -signal.SIGTERM)], ids=["nothing", "a pipe"]
)
def test_json_ends_with_its_input_only_when_that_is_a_pipe(given: int, status: int, file: Path, tmp_path: Path) -> None:
    """An optimisation that waits without end, or for half a second and then fails."""
    program = (
        "import sys, threading\n"
        "import penstock_optimizer.optimise as optimise\n"
        "from penstock_cli.main import main\n"
        "from penstock.errors import HostError\n"
        "def wait(*_, **__):\n"
        "    threading.Event().wait(float(sys.argv.pop()))\n"
        "    raise HostError('it was not ended')\n"
        "optimise.optimise = wait\n"
        "main(sys.argv[1:4])\n"
    )
    seconds = 0.5 if status == 1 else SECONDS
    words = [sys.executable, "-c", program, "optimize", str(file), "--json", str(seconds)]
    child = subprocess.Popen(words, stdin=given, stderr=subprocess.PIPE, env=clean_environment(), text=True)
    _, printed = child.communicate(timeout=SECONDS)  # closes its input

    assert child.returncode == status
    assert ("so the result is not needed" if status < 0 else "it was not ended") in printed


def test_an_interrupted_optimisation_prints_how_to_resume(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock_optimizer.optimise.optimise", end)
    result = invoke("optimize", file, "--store", tmp_path / "store")

    assert result.exit_code == 130
    assert "interrupted: the same command goes on from there" in result.output


@pytest.mark.parametrize(
    ("asked", "hardware_class", "target"),
    [
        (None, "inf2", "inf2"),
        (None, "inf1", "inf1"),
        (None, "any", None),
        (None, "our-own", None),
        ("none", "inf2", None),
        ("inf1", "any", "inf1"),
    ],
)
def test_the_neuron_target_is_as_asked_or_the_shipped_class(
    asked: str | None, hardware_class: str, target: str | None, tmp_path: Path
) -> None:
    file = write_endpoint(tmp_path / "endpoint.yaml", tmp_path, hardwareClass=hardware_class, cores=4)
    assert target_of(asked, from_file(ModelEndpoint, file)) == target


def test_an_endpoint_for_inferentia_needs_the_neuron_sdk(tmp_path: Path) -> None:
    file = write_endpoint(tmp_path / "endpoint.yaml", tmp_path, hardwareClass="inf2", cores=2)
    ended = run("optimize", str(file), "--store", str(tmp_path / "store"))
    assert ended.returncode == 1
    assert "error: compiling for inf2 needs torch-neuronx, neuronx-cc" in ended.stderr
    assert "PENSTOCK_NEURON_PYTHON" in ended.stderr
    assert not (tmp_path / "store").exists()
