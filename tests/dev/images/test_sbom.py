"""The software bill of materials lists what an image has."""

from __future__ import annotations

import re
from collections.abc import Callable

from images.archive import Archive
from images.sbom import bill_of_materials, debian_packages, python_package

STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.41-12+deb13u1
Description: shared libraries
 Status: hold

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1.0
"""


def test_installed_debian_packages_are_listed() -> None:
    (found,) = debian_packages(STATUS)

    assert found["purl"] == "pkg:deb/debian/libc6@2.41-12%2Bdeb13u1?arch=amd64"
    assert (found["name"], found["version"]) == ("libc6", "2.41-12+deb13u1")


def test_python_packages_have_their_canonical_name_and_licence() -> None:
    found = python_package(
        "Metadata-Version: 2.4\nName: PyYAML_Plus\nVersion: 6.0+cpu\nLicense-Expression: MIT\n\nName: x\n"
    )

    assert found["purl"] == "pkg:pypi/pyyaml-plus@6.0%2Bcpu"
    assert found["licenses"] == [{"expression": "MIT"}]


def test_the_bill_of_a_built_image_has_its_packages_once_each(archive: Callable[[str], Archive]) -> None:
    bill = bill_of_materials(archive("gateway"), "localhost/penstock-gateway:1.2.3")

    found = [component["purl"] for component in bill["components"]]
    assert len(found) == len(set(found)) > 50
    assert any(re.match(r"pkg:deb/debian/haproxy@3\.0", purl) for purl in found)
    assert bill["metadata"]["component"]["version"] == "1.2.3"
    assert bill == bill_of_materials(archive("gateway"), "localhost/penstock-gateway:1.2.3")
