"""The images for AWS Inferentia, which cannot be built without AWS's packages: what can be checked in their recipe."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from images.target import ROOT, TARGETS, USUAL

DOCKERFILE = (ROOT / "Dockerfile").read_text()
NEURON = [name for name in TARGETS if "neuron" in name]
STAGE = re.compile(r"^FROM (?:--platform=\S+ )?(\S+) AS (\S+)$", re.MULTILINE)


def test_every_image_is_a_stage_and_stages_copy_from_earlier_ones_only() -> None:
    known = {"scratch"}
    for block in re.split(r"^(?=FROM )", DOCKERFILE, flags=re.MULTILINE)[1:]:
        found = STAGE.match(block)
        assert found is not None
        base, name = found.groups()
        assert base in known or base.startswith("${")
        used = set(re.findall(r"--from=(\S+)|from=(\w+),", block))
        assert {one or other for one, other in used} <= known
        known.add(name)

    assert set(TARGETS) <= known


@pytest.mark.parametrize("name", NEURON)
def test_images_for_inferentia_name_their_interpreter_and_that_no_device_has_run_them(name: str) -> None:
    stage = next(block for block in DOCKERFILE.split("\nFROM ") if f" AS {name}\n" in block)

    assert "ENV PENSTOCK_NEURON_PYTHON=/opt/neuron/bin/python" in stage
    assert "/opt/neuron /opt/neuron" in stage
    assert "not yet run on a device" in stage
    assert ("AWS no longer supports" in stage) == name.endswith("-legacy")
    assert name not in USUAL


@pytest.mark.parametrize("argument", sorted(set(re.findall(r"^ARG (NEURON_\w+)", DOCKERFILE, flags=re.MULTILINE))))
def test_each_build_argument_has_a_default(argument: str) -> None:
    assert re.search(rf'^ARG {argument}=("?)\S.*\1$', DOCKERFILE, flags=re.MULTILINE)


def test_the_packages_are_installed_into_their_own_environment_from_the_named_indexes(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)

    done = subprocess.run(
        ["sh", ROOT / "dev/images/inside/neuron-install", python, "torch==2.9.*", "numpy<2"],
        env={**os.environ, "NEURON_INDEX": "https://one.example", "NEURON_TORCH_INDEX": "https://two.example"},
        check=True,
        capture_output=True,
        text=True,
    )

    words = done.stdout.splitlines()
    assert words[words.index("--python") + 1] == "/opt/neuron/bin/python"
    indexes = [words[at + 1] for at, word in enumerate(words) if word == "--extra-index-url"]
    assert indexes == ["https://one.example", "https://two.example"]
    assert words[-2:] == ["torch==2.9.*", "numpy<2"]
