"""The images for AWS Inferentia, which cannot be built without AWS's packages: what can be checked in their recipe."""

from __future__ import annotations

import os
import re
import shutil
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


def test_programs_that_lack_a_library_are_named(tmp_path: Path) -> None:
    script, programs = ROOT / "dev/images/inside/missing-libraries", tmp_path / "programs"
    programs.mkdir()
    source = tmp_path / "source.c"
    source.write_text("int other(void); int main(void) { return other(); }\n")
    library = tmp_path / "libabsent.so.2"
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-o", library, "-xc", "-"], input=b"int other(void) { return 0; }", check=True)
    subprocess.run([compiler, "-o", programs / "driver", source, library], check=True)

    def missing() -> tuple[int, str]:
        done = subprocess.run(["sh", script, programs], check=False, capture_output=True, text=True)
        return done.returncode, done.stdout

    assert missing() == (0, "")
    library.unlink()
    status, found = missing()
    assert status == 1
    assert found.startswith(f"{programs / 'driver'}: ")
    assert "libabsent.so.2" in found


def test_the_image_that_compiles_has_what_the_compiler_and_its_packages_are_linked_to() -> None:
    stage = next(block for block in DOCKERFILE.split("\nFROM ") if " AS optimizer-neuron\n" in block)

    assert "apt-install libxml2" in stage
    assert "COPY --from=neuron-library /opt/aws/neuron /opt/aws/neuron" in stage
    assert "LD_LIBRARY_PATH=/opt/aws/neuron/lib" in stage
    (pair,) = re.findall(r'NEURON_LIBRARY_PACKAGES="(.*)"', DOCKERFILE)
    assert all("=" in package for package in pair.split())
