"""The software bill of materials of an image, in CycloneDX 1.6 (https://cyclonedx.org/docs/1.6/json/).

It lists the Debian packages of dpkg's status and the Python packages of the `dist-info` folders, as an image has them.
"""

from __future__ import annotations

import email.parser
import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from images.archive import Archive

DPKG_STATUS = "var/lib/dpkg/status"
_METADATA = re.compile(r"(^|/)[^/]+\.dist-info/METADATA$")
NAMESPACE = uuid.UUID("6f6f0d1e-2a0d-5b39-9f0f-0f6a4f1b3c55")
"""Of the serial numbers: the same image has the same one."""

Json = dict[str, Any]


def debian_packages(status: str) -> Iterator[Json]:
    """Components of the installed packages of a dpkg status file."""
    for paragraph in status.split("\n\n"):
        fields = email.parser.HeaderParser().parsestr(paragraph)
        if fields.get("Status", "").split()[-1:] == ["installed"]:
            name, version, machine = (str(fields.get(key, "")) for key in ("Package", "Version", "Architecture"))
            purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?arch={machine}"
            yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def python_package(metadata: str) -> Json:
    """Component of a Python package, from its METADATA."""
    fields = email.parser.HeaderParser().parsestr(metadata)
    name, version = str(fields["Name"]), str(fields["Version"])
    purl = f"pkg:pypi/{quote(re.sub(r'[-_.]+', '-', name).lower())}@{quote(version, safe='')}"
    made: Json = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    expression = fields.get("License-Expression")
    return {**made, "licenses": [{"expression": str(expression)}]} if expression else made


def bill_of_materials(archive: Archive, reference: str) -> Json:
    """The bill of an image. `reference`: its name, such as `localhost/penstock-runtime:0.2.0`."""
    visible = archive.files()
    texts: Mapping[str, str] = {
        path: content.decode(errors="replace")
        for _, member, content in archive.entries()
        if (path := member.name.removeprefix("./").strip("/")) in visible
        and (path == DPKG_STATUS or _METADATA.search(path))
    }
    found = [*debian_packages(texts.get(DPKG_STATUS, ""))]
    found += [python_package(text) for path, text in texts.items() if path != DPKG_STATUS]
    components = {component["purl"]: component for component in found}
    name, _, version = reference.rpartition(":")
    digest = str(archive.manifest["config"]["digest"])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, digest)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "bom-ref": digest,
                "name": name,
                "version": version,
                "hashes": [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}],
            }
        },
        "components": [components[purl] for purl in sorted(components)],
    }
