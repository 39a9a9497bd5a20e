"""Runs an optimisation job: reads the spec, downloads the model, optimises it, publishes the artefacts.

    spec, machine, store     checked before anything is downloaded
    download                 with time-outs and retries
    baseline                 the fp32 artefact, published within a minute: the endpoint serves it in the meantime
    optimise                 within the spec's budget, continuing from the work folder if there is one
    publish                  the result; then the summary

`JobEvents` writes one JSON object a line to standard output, for people:

    {"event": "progress", "done": 7, "of": 23, "stage": "candidates", "message": "onnxruntime-int8-dynamic: passed"}
    {"event": "baseline", "digest": "sha256:...", "uri": "...", "bytes": 90000000}
    {"event": "artefact", "digest": "sha256:...", "uri": "...", "bytes": 110000000}
    {"event": "summary", "summary": {...}}

`done` and `of` are steps of the whole; both are 0 until their number is known. The operator reads the newest state by
`GET /progress` (`serve_progress`): it has no right to read logs, and a log may have a text of a model that imitates an
event:

    {"done": 7, "of": 23, "stage": "candidates", "message": "...", "baseline": {"digest": "sha256:...", ...}}
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.artefact_store import StoreUri
from penstock.errors import HostError, SettingError, TextsChanged
from penstock.hardware import NeuronGeneration
from penstock.logs import json_line
from penstock.manifest import Manifest
from penstock.resources.base import API_VERSION
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.problems import spec_error
from penstock.resources.job_summary import Summary, summary_of
from penstock.resources.optimized_model import OptimizedModelSpec, texts_digest, texts_of
from penstock.resources.result import ArtefactReference
from penstock.settings import hugging_face_token, setting
from penstock_optimizer.job.job import config_check
from penstock_optimizer.job.progress import ProgressEvent, transfer_message
from penstock_optimizer.optimise import optimise, prepare
from penstock_runtime.host import read_host
from penstock_runtime.host.termination import DEFAULT_LOG
from penstock_runtime.models.sources.fetch import fetch_model
from penstock_runtime.models.sources.transfer import FetchProgress as Transfer
from penstock_runtime.remote import Retries
from penstock_runtime.settings import Variables
from penstock_runtime.store import ArtefactStore, Published, open_store


class JobVariables(Variables):
    """An optimisation job."""

    spec: str = setting(
        "", "The spec of the OptimizedModel: JSON itself, or the path of a file that holds it. Must be given."
    )
    store_uri: str = setting(
        "",
        "The artefact store to publish into: `file:///path`, `s3://bucket/prefix`, `gs://`, `az://` "
        "(docs/reference/artefact-store.md). Credentials come by the variables of the store's own library. "
        "Must be given.",
    )
    work: Path = setting(
        Path("/var/lib/penstock/work"),
        "Folder for the model and for what is made of it. A job that finds it as an interrupted one left it goes on "
        "from there.",
    )
    texts: Path | None = setting(
        None,
        "File with the texts of spec.workload.textsFrom, one a line: the value of the ConfigMap's key, mounted.",
    )
    progress_port: int | None = setting(
        None, "Port of `GET /progress`, the newest state of the job as JSON. Not set: none.", ge=0, le=65535
    )
    progress_host: str = setting("127.0.0.1", "Address of that port; the operator sets 0.0.0.0.")
    neuron_target: NeuronGeneration | None = setting(
        None, "Compile for this generation of AWS Inferentia: `inf1` or `inf2`. Not set: optimise for the CPU."
    )
    neuron_python: Path | None = setting(
        None,
        "Interpreter with torch, transformers and the Neuron SDK, for the process that compiles. The images set it. "
        "Not set: the job's own.",
    )
    termination_log: Path = setting(
        DEFAULT_LOG,
        "File that the result or the failure is written to as JSON of at most 4,096 bytes. It must exist, as in a pod.",
    )


Write = Callable[[bytes], object]
QUIET_SECONDS = 2.0
"""Transferred bytes are reported at most once in this time."""


def to_standard_output(line: bytes) -> None:
    """Write at once and in one piece, as a signal handler needs it."""
    os.write(1, line)


class JobEvents:
    """Writes the events of a job, and keeps its newest state."""

    def __init__(self, write: Write = to_standard_output) -> None:
        self._write = write
        self.state: dict[str, Any] = {"done": 0, "of": 0, "stage": "", "message": "", "baseline": None}
        """As `/progress` has it: JSON values. Replaced as a whole, so that another thread may read it."""
        self._step, self._steps = 0, 0
        self._moved = 0.0

    def progress(self, event: ProgressEvent) -> None:
        """Write a step of the optimisation."""
        self._step, self._steps = event.step, event.steps
        self.stage(event.stage.value, event.message)

    def stage(self, stage: str, message: str) -> None:
        """Write the current activity, between steps."""
        progress = {"done": self._step, "of": self._steps, "stage": stage, "message": _text(message)}
        self.state = {**self.state, **progress}
        self._write_event("progress", **progress)

    def transfer(self, stage: str, verb: str) -> Callable[[Transfer], None]:
        """A callback that writes the progress of a download or upload, such as `download` and `fetching`."""

        def moved(event: Transfer) -> None:
            now = time.monotonic()
            last = event.bytes_total > 0 and event.bytes_done == event.bytes_total
            if not event.note and not last and now - self._moved < QUIET_SECONDS:
                return
            self._moved = now
            self.stage(stage, transfer_message(event, verb))

        return moved

    def published(self, event: str, published: Published) -> None:
        """Write that an artefact is in the store; `event` is `baseline` or `artefact`."""
        artefact = {"digest": str(published.digest), "uri": published.uri, "bytes": published.bytes}
        if event == "baseline":
            self.state = {**self.state, "baseline": artefact}
        self._write_event(event, **artefact)

    def summary(self, summary: Summary) -> None:
        """Write the result of the job."""
        self._write_event("summary", summary=json.loads(summary.to_message()))

    def _write_event(self, event: str, **fields: Any) -> None:
        self._write(json_line({"event": event, **fields}).encode() + b"\n")


MESSAGE_CHARACTERS = 1000


def _text(message: str) -> str:
    """At most 1,000 characters, all of them in UTF-8: a file's name may have bytes that are not."""
    return message[:MESSAGE_CHARACTERS].encode("utf-8", "replace").decode()


REQUEST_SECONDS = 5.0
"""A client of `/progress` gets this long for its request: one is answered at a time."""


def serve_progress(events: JobEvents, host: str, port: int) -> HTTPServer:
    """Serve `GET /progress` in a thread that ends with the process. HostError when the port cannot be opened."""

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            found = self.path == "/progress"
            body = json_line(events.state if found else {"error": "there is only /progress"}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing: the log has the events of the job."""

    class Server(HTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Nothing: a client that goes away is no event of the job."""

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise HostError(
            f"the port {port} of the progress cannot be opened ({error.strerror})",
            remedy="Set PENSTOCK_PROGRESS_PORT to a free port, or leave it unset",
        ) from error
    threading.Thread(target=server.serve_forever, name="progress", daemon=True).start()
    return server


ATTEMPTS = 8
"""A minute and a half of retries: the result of ten minutes is worth the wait."""


class PodJob:
    """One job. `baseline` is set when it is published: a job that fails later still reports it."""

    def __init__(self, variables: JobVariables, events: JobEvents) -> None:
        self._variables = variables
        self._events = events
        self.baseline: ArtefactReference | None = None

    def run(self) -> Summary:
        """Run the whole job; PenstockError of all kinds."""
        variables, events = self._variables, self._events
        endpoint = read_endpoint(variables)
        store = self._store()
        target = variables.neuron_target
        # Early, like the store: a job that cannot compile should not download gigabytes first.
        neuron = None
        if target is not None:
            from penstock_optimizer.neuron.session import NeuronToolchain

            neuron = NeuronToolchain.read(target, variables.neuron_python or Path(sys.executable))
        grant = read_host().usable_cores(endpoint.spec.cores if neuron is None else None)
        pinned = "pinned to" if grant.pinned else "not pinned, on"
        events.stage("start", f"{pinned} CPUs {', '.join(map(str, grant.cpus))}")
        _require_writable(variables.work)
        models = variables.work / "models"
        token = hugging_face_token(os.environ)
        source = endpoint.spec.source
        events.stage("download", f"looking for {source}")
        on_transfer = events.transfer("download", "fetching")
        fetch_model(source, cache=models, token=token, on_progress=on_transfer, check=config_check(endpoint.spec))
        events.stage("export", "writing the fp32 graph")
        if neuron is None:
            self._publish_baseline(endpoint, store, models, token)
        artefact = optimise(
            endpoint, store=variables.work, models=models, token=token, neuron=neuron, on_progress=events.progress
        )
        published = self._publish(store, artefact)
        events.published("artefact", published)
        return summary_of(
            Manifest.load(artefact),
            digest=str(published.digest),
            uri=published.uri,
            size_bytes=published.bytes,
            baseline=self.baseline,
        )

    def _publish_baseline(self, endpoint: ModelEndpoint, store: ArtefactStore, models: Path, token: str | None) -> None:
        """Publish the artefact that is served in the meantime. Not for Inferentia, whose pods have nothing to serve
        before the compiled model (`penstock_optimizer.targets.neuron`)."""
        prepared = prepare(endpoint, store=self._variables.work, models=models, token=token)
        if not prepared.finished:
            published = self._publish(store, prepared.artefact)
            self.baseline = reference(published)
            self._events.published("baseline", published)

    def _store(self) -> ArtefactStore:
        if not self._variables.store_uri:
            raise SettingError(
                "PENSTOCK_STORE_URI is not set: the result would have nowhere to go",
                field="PENSTOCK_STORE_URI",
                remedy="Set it to file:///path or s3://bucket/prefix (docs/reference/artefact-store.md)",
            )
        retries = Retries(
            ATTEMPTS,
            on_failure=lambda error, wait: self._events.stage("publish", f"{error.message} (again in {wait:.0f} s)"),
        )
        return open_store(StoreUri.parse(self._variables.store_uri), retries=retries)

    def _publish(self, store: ArtefactStore, folder: Path) -> Published:
        return store.publish(folder, self._events.transfer("publish", "publishing"))


def reference(published: Published) -> ArtefactReference:
    """The reference to a published artefact, as a status has it."""
    return ArtefactReference(digest=str(published.digest), uri=published.uri, bytes=published.bytes)


def read_endpoint(variables: JobVariables) -> ModelEndpoint:
    """The endpoint to optimise. SettingError when the spec or the texts cannot be read; SpecError when the spec is
    invalid; TextsChanged when the spec has other texts."""
    spec = _read_spec(variables.spec)
    wanted = spec.endpoint_spec()
    if wanted.workload.texts_from is not None:
        texts = _read_texts(variables.texts, spec.texts_digest)
        wanted = wanted.model_copy(
            update={"workload": wanted.workload.model_copy(update={"texts": texts, "texts_from": None})}
        )
    return ModelEndpoint.model_validate(
        {"apiVersion": API_VERSION, "kind": ModelEndpoint.KIND, "metadata": {"name": "model"}, "spec": wanted}
    )


def _read_spec(given: str) -> OptimizedModelSpec:
    field = "PENSTOCK_SPEC"
    if not given:
        raise SettingError(
            f"{field} is not set: there is nothing to optimise",
            field=field,
            remedy="Set it to the spec of an OptimizedModel as JSON, or to the path of a file that holds it",
        )
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(
                f"{field}: {given[:200]} cannot be read ({error})", field=field, remedy="Mount the spec there"
            ) from error
    try:
        return OptimizedModelSpec.model_validate_json(text)
    except ValidationError as error:
        raise spec_error(error, OptimizedModelSpec, field) from error


def _read_texts(path: Path | None, digest: str | None) -> tuple[str, ...]:
    field = "PENSTOCK_TEXTS"
    if path is None:
        raise SettingError(
            f"the spec takes its texts from a ConfigMap, and {field} is not set",
            field=field,
            remedy=f"Mount the ConfigMap's key as a file, and set {field} to its path",
        )
    try:
        texts = texts_of(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TextsChanged(
            f"{field}: there is no {path}: the ConfigMap or its key is gone", remedy="Create it again"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"{field}: {path} cannot be read ({error})", field=field, remedy="Check the ConfigMap and its key"
        ) from error
    if not texts:
        raise SettingError(f"{field}: {path} holds no texts", field=field, remedy="Write one text on each line")
    if digest is not None and texts_digest(texts) != digest:
        raise TextsChanged(
            "the ConfigMap of workload.textsFrom has other texts than those of this optimisation",
            remedy="Nothing: the operator starts an optimisation for the present texts",
        )
    return texts


def _require_writable(folder: Path) -> None:
    """Raise HostError now rather than after a download of gigabytes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise HostError(
            f"the folder {folder} cannot be made ({error.strerror})",
            remedy="Mount a volume that this user may write (an emptyDir with an fsGroup)",
        ) from error
    if not writable:
        raise HostError(
            f"the folder {folder} cannot be written by user {os.getuid()}",
            remedy="Mount a volume that this user may write (an emptyDir with an fsGroup)",
        )
