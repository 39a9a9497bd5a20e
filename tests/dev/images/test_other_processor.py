"""Images for another processor than the building machine's: what the build's scripts take from TARGETARCH."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.markers import Marker

from images.inside.pinned import is_for

INSIDE = Path(__file__).parents[3] / "dev/images/inside"


def test_no_requirement_of_the_images_depends_on_the_processor() -> None:
    """pip, which runs on the building machine, would decide by that one's."""
    found = re.findall(r"^[\w.-]+==\S+ ; (.*?) \\$", (INSIDE / "hashes.txt").read_text(), re.MULTILINE)

    assert found
    for marker in found:
        assert holds(marker, "x86_64") == holds(marker, "aarch64"), marker


def holds(marker: str, machine: str) -> bool:
    """Whether the marker is true on Linux, on this processor, with the images' Python."""
    python = {"python_full_version": "3.13.5", "python_version": "3.13", "implementation_name": "cpython"}
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    return Marker(marker).evaluate({**python, **linux, "platform_machine": machine})


@pytest.mark.parametrize(
    ("tags", "machine", "expected"),
    [
        ("py3-none-any", "aarch64", True),
        ("cp313-cp313-manylinux_2_17_x86_64.manylinux2014_x86_64", "x86_64", True),
        ("cp313-cp313-manylinux_2_17_x86_64.manylinux2014_x86_64", "aarch64", False),
        ("py3-none-manylinux_2_28_aarch64", "aarch64", True),
    ],
)
def test_wheels_are_for_one_processor_or_for_all(tags: str, machine: str, expected: bool) -> None:
    assert is_for(f"sample-1.0-{tags}.whl", machine) is expected
