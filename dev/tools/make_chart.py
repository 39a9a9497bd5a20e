"""Writes the parts of charts/penstock that come from the code (`make crds`); `--check` fails if they are not current.

The operator's RBAC rules come from dev/tools/operator_rights.py, the custom resource definitions from crds/.
dev/tools/make_crds.py writes the HardwareClasses.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "operator")]

from tools.operator_rights import CLUSTER, COLLECTION, GATEWAY_API, KEDA, NAMESPACED, OWN, SECRETS, Grant, rules  # noqa: E402 - the path comes first

CHART = Path("charts/penstock")


def rbac() -> str:
    """The rules as templates/rbac.yaml reads them, each with its reason."""
    lines = ["# Generated from dev/tools/operator_rights.py by `make crds`: change that file."]
    parts = {
        "cluster": CLUSTER,
        "namespaced": NAMESPACED,
        "keda": KEDA,
        "gatewayApi": GATEWAY_API,
        "secrets": SECRETS,
        "own": OWN,
        "collection": COLLECTION,
    }
    for name, grants in parts.items():
        lines.append(f"{name}:")
        for grant in grants:
            lines += _rule(grant)
    return "\n".join(lines) + "\n"


def _rule(grant: Grant) -> list[str]:
    (rule,) = rules([grant])
    text = yaml.safe_dump([rule], default_flow_style=None, sort_keys=True, width=200).rstrip()
    return [f"  # {grant.why}", *(f"  {line}" for line in text.splitlines())]


def generated(root: Path = ROOT) -> dict[Path, str]:
    """Path below the repository -> its content."""
    found = {CHART / "files/rbac.yaml": rbac()}
    for definition in sorted((root / "crds").glob("*.yaml")):
        # `helm show crds` writes the files one after the other, as they are.
        found[CHART / "crds" / definition.name] = "---\n" + definition.read_text(encoding="utf-8")
    return found


def differences(wanted: Mapping[Path, str], root: Path = ROOT) -> list[str]:
    """Files that differ from what the code generates, one sentence each."""
    found = [
        f"{path} differs from what the code generates: run make crds"
        for path, text in wanted.items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]
    known = {path.name for path in wanted if path.parent.name == "crds"}
    found += [
        f"{path.relative_to(root)} is no longer in crds/: remove it"
        for path in sorted((root / CHART / "crds").glob("*.yaml"))
        if path.name not in known
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
