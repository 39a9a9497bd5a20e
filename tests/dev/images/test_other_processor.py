"""Images for another processor than the building machine's: what the build's scripts take from TARGETARCH."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.markers import Marker

from images.inside.pinned import is_for

INSIDE = Path(__file__).parents[3] / "dev/images/inside"
SHOWN = ("machine", "compiler", "CC", "_PYTHON_HOST_PLATFORM")


def settings(folder: Path, machine: str, **environment: str) -> Mapping[str, str]:
    """What the script sets on a building machine of that processor."""
    (folder / "uname").write_text(f"#!/bin/sh\necho {machine}\n")
    (folder / "uname").chmod(0o755)
    shown = "; ".join(f'echo "{name}=${name}"' for name in SHOWN)
    words = ["env", "-i", f"PATH={folder}:{os.environ['PATH']}", *(f"{k}={v}" for k, v in environment.items())]
    done = subprocess.run(
        [*words, "sh", "-ec", f". {INSIDE / 'target'}; {shown}"], check=True, capture_output=True, text=True
    )
    return {name: value for name, _, value in (line.partition("=") for line in done.stdout.splitlines()) if value}


@pytest.mark.parametrize(
    ("machine", "environment"),
    [
        ("x86_64", {}),
        ("x86_64", {"TARGETARCH": ""}),
        ("x86_64", {"TARGETARCH": "amd64"}),
        ("aarch64", {"TARGETARCH": "arm64"}),
    ],
)
def test_an_image_for_the_building_machines_processor_changes_nothing(
    tmp_path: Path, machine: str, environment: dict[str, str]
) -> None:
    assert settings(tmp_path, machine, **environment) == {"machine": machine, "compiler": "gcc libc6-dev"}


def test_an_image_for_arm64_is_compiled_and_packaged_on_amd64(tmp_path: Path) -> None:
    assert settings(tmp_path, "x86_64", TARGETARCH="arm64") == {
        "machine": "aarch64",
        "compiler": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
        "CC": "aarch64-linux-gnu-gcc",
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }


def test_an_image_for_amd64_is_compiled_and_packaged_on_arm64(tmp_path: Path) -> None:
    assert settings(tmp_path, "aarch64", TARGETARCH="amd64") == {
        "machine": "x86_64",
        "compiler": "gcc-x86-64-linux-gnu libc6-dev-amd64-cross",
        "CC": "x86_64-linux-gnu-gcc",
        "_PYTHON_HOST_PLATFORM": "linux-x86_64",
    }


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_pip_takes_the_wheels_of_the_named_platform(tmp_path: Path, machine: str) -> None:
    for platform in ("manylinux_2_17_x86_64", "manylinux_2_17_aarch64"):
        with zipfile.ZipFile(tmp_path / f"sample-1.0-py3-none-{platform}.whl", "w") as wheel:
            wheel.writestr("sample.py", platform)
            wheel.writestr("sample-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: sample\nVersion: 1.0\n")
            wheel.writestr("sample-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: py3-none-{platform}\n")
            wheel.writestr("sample-1.0.dist-info/RECORD", "")

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps"]
    subprocess.run(
        [*pip, "--no-compile", "--find-links", tmp_path, "--target", tmp_path / "installed", "sample"],
        env={**os.environ, "_PYTHON_HOST_PLATFORM": f"linux-{machine}"},
        check=True,
    )

    assert (tmp_path / "installed/sample.py").read_text() == f"manylinux_2_17_{machine}"


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
