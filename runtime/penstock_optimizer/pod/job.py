"""The course of an optimisation job.

spec, machine, store     wrong ones are told before anything is fetched
download                 with time-outs and retries
baseline                 the fp32 artefact, published within a minute: the endpoint answers with it meanwhile
optimise                 within the spec's budget, going on from the work folder where one survived
publish                  the result; then the summary
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from penstock.artefact_store import StoreUri
from penstock.errors import HostError, SettingError
from penstock.manifest import Manifest
from penstock.resources.base import API_VERSION
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.job_summary import Summary, summary_of
from penstock.resources.optimized_model import OptimizedModelSpec
from penstock.resources.problems import spec_error
from penstock.resources.result import ArtefactReference
from penstock_optimizer.job.optimise import optimise, prepare
from penstock_optimizer.pod.lines import Lines
from penstock_optimizer.pod.variables import JobVariables
from penstock_runtime.host import read_host
from penstock_runtime.models.sources import fetch_model
from penstock_runtime.store import ArtefactStore, Published, open_store
from penstock_runtime.store.retries import Retries

ATTEMPTS = 8
"""A minute and a half of waiting for the store: what was found in ten minutes is worth it."""


class PodJob:
    """One job. `baseline` is set as soon as it is published: a job that fails later reports it all the same."""

    def __init__(self, variables: JobVariables, lines: Lines) -> None:
        self._variables = variables
        self._lines = lines
        self.baseline: ArtefactReference | None = None

    def run(self) -> Summary:
        """All of it; PenstockError of all kinds."""
        variables, lines = self._variables, self._lines
        endpoint = read_endpoint(variables)
        store = self._store()
        grant = read_host().usable_cores(endpoint.spec.cores)
        pinned = "pinned to" if grant.pinned else "not pinned, on"
        lines.stage("start", f"{pinned} CPUs {', '.join(map(str, grant.cpus))}")
        _require_writable(variables.work)
        models = variables.work / "models"
        token = os.environ.get("HF_TOKEN") or None
        source = endpoint.spec.source
        lines.stage("download", f"looking for {source}")
        fetch_model(source, cache=models, token=token, on_progress=lines.transfer("download", "fetching"))
        lines.stage("export", "writing the fp32 graph")
        prepared = prepare(endpoint, store=variables.work, models=models, token=token)
        if not prepared.finished:
            published = self._publish(store, prepared.artefact)
            self.baseline = reference(published)
            lines.published("baseline", published)
        artefact = optimise(endpoint, store=variables.work, models=models, token=token, on_progress=lines.progress)
        published = self._publish(store, artefact)
        lines.published("artefact", published)
        return summary_of(
            Manifest.load(artefact),
            digest=str(published.digest),
            uri=published.uri,
            size_bytes=published.bytes,
            baseline=self.baseline,
        )

    def _store(self) -> ArtefactStore:
        if not self._variables.store_uri:
            raise SettingError(
                "PENSTOCK_STORE_URI is not set: the result would have nowhere to go",
                field="PENSTOCK_STORE_URI",
                remedy="Set it to file:///path or s3://bucket/prefix (docs/reference/artefact-store.md)",
            )
        retries = Retries(
            ATTEMPTS, told=lambda error, wait: self._lines.stage("publish", f"{error.message} (again in {wait:.0f} s)")
        )
        return open_store(StoreUri.parse(self._variables.store_uri), retries=retries)

    def _publish(self, store: ArtefactStore, folder: Path) -> Published:
        return store.publish(folder, self._lines.transfer("publish", "publishing"))


def reference(published: Published) -> ArtefactReference:
    """As a status holds it."""
    return ArtefactReference(digest=str(published.digest), uri=published.uri, bytes=published.bytes)


def read_endpoint(variables: JobVariables) -> ModelEndpoint:
    """What is to be optimised. SettingError: the spec or the texts cannot be read; SpecError: it is wrong."""
    spec = _read_spec(variables.spec)
    wanted = spec.endpoint_spec()
    if wanted.workload.texts_from is not None:
        texts = _read_texts(variables.texts)
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


def _read_texts(path: Path | None) -> tuple[str, ...]:
    field = "PENSTOCK_TEXTS"
    if path is None:
        raise SettingError(
            f"the spec takes its texts from a ConfigMap, and {field} does not say where it is mounted",
            field=field,
            remedy="Mount the ConfigMap's key as a file, and set the variable to its path",
        )
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"{field}: {path} cannot be read ({error})", field=field, remedy="Check the ConfigMap and its key"
        ) from error
    texts = tuple(line.strip() for line in lines if line.strip())
    if not texts:
        raise SettingError(f"{field}: {path} holds no texts", field=field, remedy="Write one text on each line")
    return texts


def _require_writable(folder: Path) -> None:
    """HostError now rather than after a download of gigabytes."""
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
