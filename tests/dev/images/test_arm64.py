"""The images for arm64 are built, and start under QEMU: no such processor is needed, and none was tried."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from images.archive import Archive
from images.build import Builder, builder
from images.target import project_version, target_named
from tests.cli.endpoints import write_endpoint, write_tiny
from tests.dev.images.container import Container, engine, ready, volume

pytestmark = [pytest.mark.extended, pytest.mark.timeout(5400)]  # with the building of the image, half of it emulated

SECONDS = 600.0
"""An emulated interpreter needs a minute for its imports."""

PROCESSOR = "neoverse-n1"
"""What QEMU emulates: the cores of AWS's Graviton 2. With SME, which its default `max` has, ONNX Runtime's products of
int8 are wrong under QEMU 7.2 (Debian 12)."""
CPUINFO = """\
processor\t: {number}
BogoMIPS\t: 100.00
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
"""The same in /proc/cpuinfo, where QEMU 7.2 leaves this machine's: ONNX Runtime finds no Arm processor and crashes."""

EM_AARCH64 = 183
"""The machine in the head of an ELF file."""


@pytest.fixture(scope="module")
def arm64() -> Builder:
    """The builder of images for arm64."""
    return builder(lambda line: print(line, file=sys.stderr, flush=True), "arm64")


Start = Callable[..., AbstractContextManager[Container]]


@contextmanager
def started(arm64: Builder, name: str, folder: Path) -> Iterator[Start]:
    """Starts containers of the image `name`, which is one for arm64."""
    archive = Archive(arm64.build(target_named(name)))
    assert archive.configuration["architecture"] == "arm64"
    assert programs_by_machine(archive).keys() == {EM_AARCH64}
    cpuinfo = folder / "cpuinfo"
    cpuinfo.write_text("".join(CPUINFO.format(number=number) for number in range(os.cpu_count() or 1)))
    with engine(arm64, archive, folder) as starts:

        def start(
            *words: str, mounts: Mapping[str, Path] | None = None, entrypoint: Sequence[str] | None = None
        ) -> AbstractContextManager[Container]:
            seen = {**(mounts or {}), "/proc/cpuinfo": cpuinfo}
            return starts.run(*words, mounts=seen, environment={"QEMU_CPU": PROCESSOR}, entrypoint=entrypoint)

        yield start


def programs_by_machine(archive: Archive) -> dict[int, list[str]]:
    """Names of all programs and libraries, by the machine in their head."""
    found: dict[int, list[str]] = {}
    for _, member, content in archive.entries():
        if content.startswith(b"\x7fELF"):
            found.setdefault(int.from_bytes(content[18:20], "little"), []).append(member.name)
    return found


def printed(container: Container) -> str:
    """What it printed until it ended well."""
    try:
        status = container.process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        # QEMU cannot end the first process of a container by the signal of a crash, and waits.
        pytest.fail(f"not ended after {SECONDS:.0f} s:\n{container.read_output()}")
    assert status == 0, container.read_output()
    return container.read_output()


def test_the_gateways_haproxy_and_its_control_process_start(arm64: Builder, tmp_path: Path) -> None:
    with started(arm64, "gateway", tmp_path) as gateway:
        with gateway("-v", entrypoint=["haproxy"]) as container:
            assert "HAProxy version" in printed(container)
        imports = "import penstock_gateway.process, platform; print(platform.machine())"
        with gateway("-P", "-c", imports, entrypoint=["python3"]) as container:
            assert printed(container) == "aarch64\n"


def test_the_operator_prints_its_settings(arm64: Builder, tmp_path: Path) -> None:
    with started(arm64, "operator", tmp_path) as operator, operator("--help") as container:
        assert "PENSTOCK_" in printed(container)


def test_the_optimizer_has_its_builder_and_prints_its_version(arm64: Builder, tmp_path: Path) -> None:
    with started(arm64, "optimizer", tmp_path) as optimizer:
        with optimizer("--version") as container:
            assert printed(container).startswith(f"penstock, version {project_version()}")
        imports = "import penstock_optimizer.pod.__main__, onnx, huggingface_hub; print(onnx.__version__)"
        with optimizer("-I", "-c", imports, entrypoint=["python"]) as container:
            assert re.fullmatch(r"\d+\.\d+\.\d+\n", printed(container))


def test_the_runtime_has_its_engines_and_prints_its_version(arm64: Builder, tmp_path: Path) -> None:
    with started(arm64, "runtime", tmp_path) as runtime:
        with runtime("--version") as container:
            assert printed(container).startswith(f"penstock, version {project_version()}")
        engines = "import onnxruntime, openvino, tokenizers; print(openvino.Core().available_devices)"
        with runtime("-I", "-c", engines, entrypoint=["python"]) as container:
            assert "CPU" in printed(container)
        native = "from penstock_runtime.engines.native.library import best_kernels; print(best_kernels().name)"
        with runtime("-I", "-c", native, entrypoint=["python"]) as container:
            assert printed(container) == "PLAIN\n"


def test_a_model_is_optimised_and_its_artefact_gives_the_models_answers(arm64: Builder, tmp_path: Path) -> None:
    models, artefacts = tmp_path / "models", volume(tmp_path / "artefacts")
    models.mkdir()
    write_tiny(models / "tiny")
    # The reference alone: to quantise takes minutes more.
    few = {"engines": ["onnxruntime"], "precisions": ["fp32"], "budgetSeconds": 240}
    write_endpoint(models / "endpoint.yaml", "file:///models/tiny", optimization=few, workload={"sequenceLengths": [8]})
    subprocess.run(["chmod", "-R", "a+rX", models], check=True)
    mounts = {"/models": models, "/var/lib/penstock/artefacts": artefacts}
    with (
        started(arm64, "optimizer", tmp_path) as optimizer,
        optimizer("optimize", "/models/endpoint.yaml", mounts=mounts) as container,
    ):
        assert "Neoverse N1" in printed(container)
    (finished,) = [path.parent for path in artefacts.glob("*/report.html") if path.parent.suffix != ".baseline"]
    texts = ["I like you.", "I love you."]

    with (
        started(arm64, "runtime", tmp_path) as runtime,
        runtime("serve", "/artefact", mounts={"/artefact": finished}) as container,
    ):
        container.until("GET", "/readyz", is_it=ready)
        answer = container.ask("POST", "/predict", {"inputs": texts})
        assert container.end() == 0

    # PyTorch comes with it: no other test of the file needs that.
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(models / "tiny"), device="cpu").encode(texts)
    assert answer.status == 200
    np.testing.assert_allclose(np.array(answer.body), expected, atol=1e-4)
