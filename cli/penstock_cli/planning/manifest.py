"""`penstock plan --write`: the ModelEndpoint of the chosen hardware."""

from __future__ import annotations

from pathlib import Path

import yaml

from penstock.errors import SettingError
from penstock.resources.endpoint import ModelEndpoint, ModelEndpointSpec
from penstock_planner.compare import HardwareComparison


def chosen_endpoint(comparison: HardwareComparison, name: str, spec: ModelEndpointSpec) -> str:
    """A ModelEndpoint with the chosen class and cores, and as many replicas as the peak needs, as YAML that has been
    validated as the API server does it. All other fields are as they were.

    SettingError when nothing is chosen.
    """
    best = comparison.best
    if best is None or best.sizing is None:
        likely = comparison.likely
        settle = f"Decide about {likely.name} first: {comparison.measure} there" if likely else comparison.nearest
        raise SettingError("nothing is chosen that a manifest could be of", field="--write", remedy=settle)
    fields = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    fields |= {"hardwareClass": best.offer.hardware_class, "cores": best.offer.cores}
    least = max(spec.scaling.min_replicas, 1)
    by_trace = [one.most_replicas for one in comparison.traced if one.row.offer is best.offer]
    most = max(best.sizing.replicas_peak, least, *by_trace, spec.scaling.max_replicas if _is_set(spec) else 0)
    fields["scaling"] = {**fields.get("scaling", {}), "maxReplicas": most}
    body = {"apiVersion": "penstock.dev/v1alpha1", "kind": "ModelEndpoint", "metadata": {"name": name}, "spec": fields}
    ModelEndpoint.from_object(body)
    note = f"# {best.why}: {best.name} ({best.evidence.origin.value if best.evidence else ''})"
    return f"{note}\n{yaml.safe_dump(body, sort_keys=False, allow_unicode=True)}"


def _is_set(spec: ModelEndpointSpec) -> bool:
    return "max_replicas" in spec.scaling.model_fields_set


def write_endpoint(path: Path, text: str) -> None:
    """Write it to a new file. SettingError when there is one already, or it cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SettingError(
            f"{path} cannot be written ({error.strerror})", field="--write", remedy="Name a file that does not exist"
        ) from error
