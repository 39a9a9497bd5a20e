"""`penstock convert`: writes a ModelEndpoint for a KServe InferenceService, and what of it has no counterpart."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from penstock.errors import SpecError
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.fields.text_fields import is_quantity, parse_quantity
from penstock.resources.files.yaml_documents import Loader, read_documents
from penstock.tasks import TaskName

TASKS = {
    "sequence_classification": TaskName.TEXT_CLASSIFICATION,
    "token_classification": TaskName.TOKEN_CLASSIFICATION,
    "fill_mask": TaskName.FILL_MASK,
    "text_embedding": TaskName.FEATURE_EXTRACTION,
    "text_generation": TaskName.TEXT_GENERATION,
}
"""`--task` of KServe's Hugging Face server -> ours."""
HINTS = {
    "spec.transformer": "the tasks of Penstock tokenise and pool themselves; other steps need a service of your own",
    "spec.explainer": "there is no explainer",
    "spec.predictor.canaryTrafficPercent": "spec.rollout.canary compares new pods with the present ones first",
    "spec.predictor.scaleTarget": "replicas follow the measured capacity (spec.objective)",
    "spec.predictor.scaleMetric": "replicas follow the measured capacity (spec.objective)",
    "spec.predictor.containerConcurrency": "batches are made of the requests that wait",
    "spec.predictor.timeout": "a request has 30 seconds",
    "spec.predictor.logger": "there is an access log without contents",
    "spec.predictor.batcher": "batches are made of the requests that wait",
    "spec.predictor.model.runtime": "the optimiser chooses the engine",
    "spec.predictor.model.env": "variables of all pods are extraEnv of the chart",
    "spec.predictor.model.resources": "pods get whole cores (spec.cores) and memory by measurement (spec.pod.memory)",
}
"""Why a field is left out, by path; it also holds for the fields below."""
SERVER_FIELDS = (
    "status",
    *(f"metadata.{name}" for name in ("creationTimestamp", "generation", "managedFields", "resourceVersion", "uid")),
)
"""The API server and the controller write these: `kubectl get -o yaml` has them, and no user wrote them."""
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_MODEL = "spec.predictor.model"
_BLOB = re.compile(r"https://([^/]+)\.blob\.core\.windows\.net/(.+)")


class Fields:
    """An object with fields that are taken one by one; fields that are left at the end were not understood."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self._value = copy.deepcopy(dict(value))

    def take(self, path: str, key: str = "") -> Any:
        """Remove a field, or the entry `key` of it, and return it; None if it is not there."""
        above, _, last = (path, "", key) if key else path.rpartition(".")
        return self._object(above).pop(last, None)

    def names(self, path: str) -> list[str]:
        """The names of the fields of an object; empty if it is none."""
        return list(self._object(path))

    def _object(self, path: str) -> dict[str, Any]:
        at: Any = self._value
        for name in filter(None, path.split(".")):
            at = at.get(name) if isinstance(at, dict) else None
        return at if isinstance(at, dict) else {}

    def left(self) -> Iterator[str]:
        """The paths of the fields that are left; lists as a whole."""
        yield from _paths(self._value, "")


def _paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        below = [found for name, inner in value.items() for found in _paths(inner, f"{path}.{name}".strip("."))]
        yield from [path] if below and path in HINTS else below
    elif value not in (None, [], ""):
        yield path


def convert(service: Mapping[str, Any], *, task: str = "") -> tuple[dict[str, Any], list[str]]:
    """The ModelEndpoint for an InferenceService, as JSON values without defaults, and a line for each field left out.

    `task` counts instead of that in the arguments. SpecError for a model that Penstock does not serve.
    """
    fields = Fields(service)
    fields.take("apiVersion")
    for path in SERVER_FIELDS:
        fields.take(path)
    if fields.take("kind") != "InferenceService":
        raise SpecError("the object is no InferenceService", field="kind", remedy="Give one of serving.kserve.io")
    fields.take("metadata.annotations", LAST_APPLIED)
    metadata = {key: value for key in ("name", "namespace", "labels") if (value := fields.take(f"metadata.{key}"))}
    arguments = _arguments(fields.take(f"{_MODEL}.args") or [])
    model, left = _model(fields, arguments)
    spec: dict[str, Any] = {"model": model, "task": _task(fields, arguments, task), "cores": _cores(fields)}
    for name in ("max_length", "max_model_len"):
        if "serving" not in spec and arguments.get(name, "").isdigit():
            spec["serving"] = {"maxInputTokens": int(arguments.pop(name))}
    spec |= _scaling(fields)
    spec |= _pod(fields)
    left += [f"the argument --{name}" for name in arguments if name not in {"model_name", "model_id", "model_dir"}]
    left += [f"{path}{_hint(path)}" for path in fields.left()]
    value = {"apiVersion": "penstock.dev/v1alpha1", "kind": "ModelEndpoint", "metadata": metadata, "spec": spec}
    ModelEndpoint.from_object(value, origin="the converted InferenceService")
    return value, left


def _hint(path: str) -> str:
    known = next((text for name, text in HINTS.items() if path == name or path.startswith(f"{name}.")), "")
    return f": {known}" if known else ""


def _arguments(words: Any) -> dict[str, str]:
    """Flags of a container, as `--name=value` or `--name value`; a flag without a value is `true`."""
    if not isinstance(words, list):
        raise SpecError(
            f"{_MODEL}.args is {str(words)!r}, and no list",
            field=f"{_MODEL}.args",
            remedy="Write one argument in each entry of a list",
        )
    found: dict[str, str] = {}
    name = ""
    for word in map(str, words):
        if word.startswith("-"):
            flag, equals, value = word.lstrip("-").partition("=")
            name = flag.replace("-", "_")
            found[name] = value if equals else "true"
        elif name:
            found[name], name = word, ""
    return found


def _model(fields: Fields, arguments: dict[str, str]) -> tuple[str, list[str]]:
    """The model, and a line for a part of its address that `spec.model` does not have."""
    name, revision = arguments.get("model_id", ""), arguments.pop("model_revision", "")
    storage = str(fields.take(f"{_MODEL}.storageUri") or "")
    if not storage and name:
        return f"hf://{name}{f'@{revision}' if revision else ''}", []
    if storage.startswith("hf://"):
        location, colon, after = storage.removeprefix("hf://").partition(":")
        return f"hf://{location}{f'@{after}' if colon else ''}", []
    if (blob := _BLOB.fullmatch(storage)) is not None:
        return f"az://{blob[2]}", [f"the storage account {blob[1]}: name it in the Secret of spec.modelCredentials"]
    if storage.startswith(("s3://", "gs://", "oci://", "pvc://")):
        return storage, []
    if not storage:
        there = ", ".join(fields.names("spec.predictor")) or "nothing"
        raise SpecError(
            f"there is no model in {_MODEL} (spec.predictor has {there})",
            field=_MODEL,
            remedy=f"Give it as {_MODEL}.storageUri, or as --model_id in {_MODEL}.args",
        )
    raise SpecError(
        f"{_MODEL}.storageUri is {storage!r}, which Penstock does not load",
        field=f"{_MODEL}.storageUri",
        remedy="Copy the model to hf://, s3://, gs://, az://, oci:// or pvc://, or name it with --model_id in the args",
    )


def _task(fields: Fields, arguments: dict[str, str], task: str) -> str:
    kind, given = fields.take(f"{_MODEL}.modelFormat.name"), arguments.pop("task", "")
    fields.take(f"{_MODEL}.modelFormat.version")
    fields.take(f"{_MODEL}.protocolVersion")
    if task:
        return task
    if given in TASKS:
        return TASKS[given].value
    if given:
        raise SpecError(
            f"{_MODEL}.args: Penstock does not have the task {given}",
            field=f"{_MODEL}.args",
            remedy=f"Keep it on KServe, or give another one with --task: {', '.join(one.value for one in TaskName)}",
        )
    raise SpecError(
        f"the InferenceService does not state the task (its model format is {kind or 'not given'})",
        field=f"{_MODEL}.args",
        remedy=f"Give it with --task: {', '.join(one.value for one in TaskName)}",
    )


def _cores(fields: Fields) -> int:
    """CPUs of the limit, else of the request, as whole cores; 1 without either."""
    asked = {path: fields.take(path) for path in (f"{_MODEL}.resources.{kind}.cpu" for kind in ("limits", "requests"))}
    path, value = next(((path, value) for path, value in asked.items() if value), ("", 1))
    if not is_quantity(str(value)):
        raise SpecError(f"{path} is {value!r}, and no quantity", field=path, remedy="Write it as 2 or 1500m")
    return max(1, math.ceil(parse_quantity(str(value))))


def _scaling(fields: Fields) -> dict[str, Any]:
    least, most = (fields.take(f"spec.predictor.{name}") for name in ("minReplicas", "maxReplicas"))
    scaling = {
        **({"minReplicas": least} if least is not None else {}),
        **({"maxReplicas": most} if most else {"maxReplicas": least} if isinstance(least, int) and least > 4 else {}),
    }
    return {"scaling": scaling} if scaling else {}


def _pod(fields: Fields) -> dict[str, Any]:
    names = ("nodeSelector", "tolerations", "serviceAccountName", "priorityClassName", "imagePullSecrets", "labels")
    pod = {name: value for name in names if (value := fields.take(f"spec.predictor.{name}"))}
    return {"pod": pod} if pod else {}


class _Dumper(yaml.SafeDumper):
    """SafeDumper with quotes around the texts that kubectl would read as numbers, such as `12e4567`."""


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    tag = "tag:yaml.org,2002:str"
    plain = Loader("").resolve(yaml.ScalarNode, value, (True, False)) == tag
    return dumper.represent_scalar(tag, value, style=None if plain else "'")


_Dumper.add_representer(str, _text)


def document(endpoint: Mapping[str, Any], left: list[str]) -> str:
    """The YAML of the endpoint, below a comment with what was left out."""
    lines = ["# Left out:", *(f"# - {one}" for one in left)] if left else ["# Nothing was left out."]
    text = yaml.dump(dict(endpoint), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return "\n".join(lines) + f"\n{text}"


@click.command
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--task", default="", help="The task, where the InferenceService does not state it.")
def command(file: Path, task: str) -> None:
    """Write a ModelEndpoint for each KServe InferenceService in FILE.

    The YAML goes to standard output. A comment above each one lists the fields that have no counterpart. Compare the
    answers and the load before you move clients: docs/how-to/move-from-kserve.md.
    """
    remedy = "kubectl get inferenceservice NAME -o yaml > FILE"
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{file}: {error.strerror}", remedy="Give a file that can be read") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{file} is not UTF-8 text", remedy=remedy) from error
    found = list(_services(read_documents(text, str(file))))
    if not found:
        raise SpecError(f"{file} has no InferenceService", remedy=remedy)
    click.echo("---\n".join(_converted(one, task, f"{file}: InferenceService {_name(one)}") for one in found), nl=False)


def _services(objects: list[Any]) -> Iterator[dict[str, Any]]:
    """The InferenceServices, also those in a List, as `kubectl get` writes several."""
    for one in objects:
        if isinstance(one, dict) and one.get("kind") in {"List", "InferenceServiceList"}:
            items = one.get("items")
            yield from _services(items if isinstance(items, list) else [])
        elif isinstance(one, dict) and one.get("kind") == "InferenceService":
            yield one


def _name(service: Mapping[str, Any]) -> str:
    metadata = service.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return str(name or "without a name")


def _converted(service: Mapping[str, Any], task: str, origin: str) -> str:
    try:
        return document(*convert(service, task=task))
    except SpecError as error:
        problems = error.problems if len(error.problems) > 1 else ()
        message = f"{origin}: {error.message}"
        raise SpecError(message, field=error.field, remedy=error.remedy, problems=problems) from error
