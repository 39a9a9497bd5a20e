"""The software bill of materials lists what an image has."""

from __future__ import annotations

import re
from collections.abc import Callable

from images.archive import Archive
from images.sbom import bill_of_materials


def test_the_bill_of_a_built_image_has_its_packages_once_each(archive: Callable[[str], Archive]) -> None:
    bill = bill_of_materials(archive("gateway"), "localhost/penstock-gateway:1.2.3")

    found = [component["purl"] for component in bill["components"]]
    assert len(found) == len(set(found)) > 50
    assert any(re.match(r"pkg:deb/debian/haproxy@3\.0", purl) for purl in found)
    assert bill["metadata"]["component"]["version"] == "1.2.3"
    assert bill == bill_of_materials(archive("gateway"), "localhost/penstock-gateway:1.2.3")
