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
from penstock.resources.text_fields import is_quantity, parse_quantity
from penstock.tasks import TaskName

TASKS = {
    "sequence_classification": TaskName.TEXT_CLASSIFICATION,
    "token_classification": TaskName.TOKEN_CLASSIFICATION,
    "fill_mask": TaskName.FILL_MASK,
    "text_embedding": TaskName.FEATURE_EXTRACTION,
}
"""`--task` of KServe's Hugging Face server -> ours."""
HINTS = {
    "spec.transformer": "the tasks of Penstock tokenise and pool themselves; other steps need a service of your own",
    "spec.explainer": "there is no explainer",
    "spec.predictor.canaryTrafficPercent": "a new plan replaces the old one as a whole, after its accuracy was checked",
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
"""Why a field is left out, by path; it also holds for what is below."""
_MODEL = "spec.predictor.model"
_BLOB = re.compile(r"https://[^/]+\.blob\.core\.windows\.net/(.+)")


class Fields:
    """An object whose fields are taken one by one; what is left at the end was not understood."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self._value = copy.deepcopy(dict(value))

    def take(self, path: str) -> Any:
        """Remove a field and return it; None if it is not there."""
        *above, last = path.split(".")
        at: Any = self._value
        for name in above:
            at = at.get(name) if isinstance(at, dict) else None
        return at.pop(last, None) if isinstance(at, dict) else None

    def left(self) -> Iterator[str]:
        """The paths of the fields that are left; lists as a whole."""
        yield from _paths(self._value, "")


def _paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        if path in HINTS and value:
            yield path
            return
        for name, inner in value.items():
            yield from _paths(inner, f"{path}.{name}".strip("."))
    elif value not in (None, [], ""):
        yield path


def convert(service: Mapping[str, Any], *, task: str = "") -> tuple[dict[str, Any], list[str]]:
    """The ModelEndpoint for an InferenceService, as JSON values without defaults, and a line for each field left out.

    `task` counts instead of that in the arguments. SpecError for a model that Penstock does not serve.
    """
    fields = Fields(service)
    fields.take("apiVersion")
    if fields.take("kind") != "InferenceService":
        raise SpecError("the object is no InferenceService", field="kind", remedy="Give one of serving.kserve.io")
    metadata = {key: value for key in ("name", "namespace", "labels") if (value := fields.take(f"metadata.{key}"))}
    arguments = _arguments(fields.take(f"{_MODEL}.args") or [])
    spec: dict[str, Any] = {"model": _model(fields, arguments), "task": _task(fields, arguments, task)}
    cores = _cores(fields)
    spec["cores"] = cores
    if (length := arguments.pop("max_length", arguments.pop("max_model_len", ""))).isdigit():
        spec["serving"] = {"maxInputTokens": int(length)}
    spec |= _scaling(fields)
    spec |= _pod(fields)
    left = [f"the argument --{name}" for name in arguments if name not in {"model_name", "model_id", "model_dir"}]
    left += [f"{path}{_hint(path)}" for path in fields.left()]
    value = {"apiVersion": "penstock.dev/v1alpha1", "kind": "ModelEndpoint", "metadata": metadata, "spec": spec}
    ModelEndpoint.from_object(value, origin="the converted InferenceService")
    return value, left


def _hint(path: str) -> str:
    known = next((text for name, text in HINTS.items() if path == name or path.startswith(f"{name}.")), "")
    return f": {known}" if known else ""


def _arguments(words: list[Any]) -> dict[str, str]:
    """Flags of a container, as `--name=value` or `--name value`; a flag without a value is `true`."""
    found: dict[str, str] = {}
    name = ""
    for word in map(str, words):
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").replace("-", "_").partition("=")
            found[name] = value if equals else "true"
        elif name:
            found[name], name = word, ""
    return found


def _model(fields: Fields, arguments: dict[str, str]) -> str:
    name, revision = arguments.get("model_id", ""), arguments.pop("model_revision", "")
    storage = str(fields.take(f"{_MODEL}.storageUri") or "")
    if not storage and name:
        return f"hf://{name}{f'@{revision}' if revision else ''}"
    if storage.startswith("hf://"):
        location, colon, after = storage.removeprefix("hf://").partition(":")
        return f"hf://{location}{f'@{after}' if colon else ''}"
    if (blob := _BLOB.fullmatch(storage)) is not None:
        return f"az://{blob[1]}"
    if storage.startswith(("s3://", "gs://", "pvc://")):
        return storage
    raise SpecError(
        f"{_MODEL}.storageUri is {storage!r}, which Penstock does not load" if storage else "there is no model",
        field=f"{_MODEL}.storageUri",
        remedy="Copy the model to hf://, s3://, gs://, az:// or pvc://, or name it with --model_id in the args",
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
            f"the task {given} is not one of Penstock, which serves encoders",
            field=f"{_MODEL}.args",
            remedy=f"Keep it on KServe. Penstock has {', '.join(one.value for one in TaskName)}",
        )
    raise SpecError(
        f"the InferenceService does not state the task (its model format is {kind or 'not given'})",
        field=f"{_MODEL}.args",
        remedy=f"Give it with --task: {', '.join(one.value for one in TaskName)}",
    )


def _cores(fields: Fields) -> int:
    """CPUs of the limit, else of the request, as whole cores; 1 without either."""
    asked = [str(fields.take(f"{_MODEL}.resources.{kind}.cpu") or "") for kind in ("limits", "requests")]
    return next((max(1, math.ceil(parse_quantity(text))) for text in asked if is_quantity(text)), 1)


def _scaling(fields: Fields) -> dict[str, Any]:
    least, most = (fields.take(f"spec.predictor.{name}") for name in ("minReplicas", "maxReplicas"))
    scaling = {
        **({"minReplicas": least} if least is not None else {}),
        **({"maxReplicas": most} if most else {"maxReplicas": least} if least and least > 4 else {}),
    }
    return {"scaling": scaling} if scaling else {}


def _pod(fields: Fields) -> dict[str, Any]:
    names = ("nodeSelector", "tolerations", "serviceAccountName", "priorityClassName", "imagePullSecrets", "labels")
    pod = {name: value for name in names if (value := fields.take(f"spec.predictor.{name}"))}
    return {"pod": pod} if pod else {}


def document(endpoint: Mapping[str, Any], left: list[str]) -> str:
    """The YAML of the endpoint, below a comment with what was left out."""
    lines = ["# Left out:", *(f"# - {one}" for one in left)] if left else ["# Nothing was left out."]
    text = yaml.safe_dump(dict(endpoint), sort_keys=False, allow_unicode=True)
    return "\n".join(lines) + f"\n{text}"


@click.command
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--task", default="", help="The task, where the InferenceService does not state it.")
def command(file: Path, task: str) -> None:
    """Write a ModelEndpoint for each KServe InferenceService in FILE.

    The YAML goes to standard output. A comment above each one lists the fields that have no counterpart. Compare the
    answers and the load before you move clients: docs/how-to/move-from-kserve.md.
    """
    try:
        objects = [one for one in yaml.safe_load_all(file.read_text(encoding="utf-8")) if one is not None]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{file} is not YAML: {error}", remedy="kubectl get inferenceservice NAME -o yaml") from error
    found = [one for one in objects if isinstance(one, dict) and one.get("kind") == "InferenceService"]
    if not found:
        raise SpecError(f"{file} has no InferenceService", remedy="kubectl get inferenceservice NAME -o yaml > FILE")
    click.echo("---\n".join(document(*convert(one, task=task)) for one in found), nl=False)
