"""Writes the parts of charts/ that come from the code (`make crds`); `--check` fails if they are not current.

The operator's RBAC rules come from dev/tools/operator_rights.py. The custom resource definitions come from crds/: the
chart penstock has them as they are, which helm installs once, and the chart penstock-crds as templates, which helm
upgrades too. dev/tools/make_crds.py writes the HardwareClasses.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "operator")]

from tools.operator_rights import (  # noqa: E402 - the path comes first
    CLUSTER,
    COLLECTION,
    GATEWAY,
    GATEWAY_API,
    HPA,
    KEDA,
    NAMESPACED,
    OWN,
    SCALERS,
    SECRETS,
    Grant,
    rules,
)

CHART = Path("charts/penstock")
OPERATOR_NAME = '{{ include "penstock.name" . }}'
DEFINITIONS_CHART = Path("charts/penstock-crds")


def rbac() -> str:
    """The rules as templates/rbac.yaml reads them, each with its reason."""
    lines = ["# Generated from dev/tools/operator_rights.py by `make crds`: change that file."]
    parts = {
        "cluster": CLUSTER,
        "namespaced": NAMESPACED,
        "scalers": SCALERS,
        "hpa": HPA,
        "keda": KEDA,
        "gatewayApi": GATEWAY_API,
        "secrets": SECRETS,
        "own": OWN,
        "collection": COLLECTION,
        "gateway": GATEWAY,
    }
    for name, grants in parts.items():
        lines.append(f"{name}:")
        for grant in grants:
            lines += _rule(grant)
    return "\n".join(lines) + "\n"


def _rule(grant: Grant) -> list[str]:
    (rule,) = rules([grant], OPERATOR_NAME)
    text = yaml.safe_dump([rule], default_flow_style=None, sort_keys=True, width=200).rstrip()
    return [f"  # {grant.why}", *(f"  {line}" for line in text.splitlines())]


def images(root: Path) -> str:
    """The images of an installation with the default values, one on a line, for registries without a way out; without
    the images for Inferentia."""
    chart = yaml.safe_load((root / CHART / "Chart.yaml").read_text(encoding="utf-8"))
    values = yaml.safe_load((root / CHART / "values.yaml").read_text(encoding="utf-8"))
    # Few users need the images for Inferentia; they build them.
    named = (image for name, image in values["images"].items() if isinstance(image, dict) and "Neuron" not in name)
    return "".join(f"{image['repository']}:{image['tag'] or chart['appVersion']}\n" for image in named)


def generated(root: Path = ROOT) -> dict[Path, str]:
    """Path below the repository -> its content."""
    found = {CHART / "files/rbac.yaml": rbac(), CHART / "images.txt": images(root)}
    for definition in sorted((root / "crds").glob("*.yaml")):
        text = definition.read_text(encoding="utf-8")
        # `helm show crds` writes the files one after the other, as they are.
        found[CHART / "crds" / definition.name] = "---\n" + text
        found[DEFINITIONS_CHART / "templates" / definition.name] = template_of(text)
    return found


def template_of(definition: str) -> str:
    """A custom resource definition as a template of the chart penstock-crds, which adds labels and annotations.

    ValueError if the text has no metadata of the form that `make crds` writes.
    """
    # Two braces in a description would be an instruction of the template.
    escaped = definition.replace("{{", "{{ `{{` }}")
    head = r"^(metadata:\n  name: \S+\n)"
    included = r"""\1  {{- include "penstock-crds.metadata" . | nindent 2 }}\n"""
    text, count = re.subn(head, included, escaped, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{count} lines `metadata:` followed by a name in a definition, expected 1")
    return text


def differences(wanted: Mapping[Path, str], root: Path = ROOT) -> list[str]:
    """Files that differ from what the code generates, one sentence each."""
    found = [
        f"{path} differs from what the code generates: run make crds"
        for path, text in wanted.items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]
    folders = (CHART / "crds", DEFINITIONS_CHART / "templates")
    found += [
        f"{path.relative_to(root)} is no longer in crds/: remove it"
        for folder in folders
        for path in sorted((root / folder).glob("*.yaml"))
        if path.relative_to(root) not in wanted
    ]
    return found


def main(arguments: list[str]) -> None:
    """Write, or check."""
    wanted = generated()
    if "--check" in arguments:
        found = differences(wanted)
        if found:
            raise SystemExit("\n".join(found))
        return
    for path, text in wanted.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
