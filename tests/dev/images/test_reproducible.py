"""Two builds of the same sources give the same image for every user."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from images.archive import Archive
from images.base import make_base
from images.build import Builder
from images.buildah import require
from images.content import copy_sources
from images.emulation import own_architecture
from images.errors import ToolMissing
from images.machine import Machine
from images.target import USUAL, target_named

pytestmark = pytest.mark.extended

CANARY = "canary.invalid"


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.timeout(2400)  # two complete builds, with the compiler's stage
def test_a_second_build_by_another_machine_gives_the_same_layers(
    archive: Callable[[str], Archive], images: Builder, tmp_path: Path, name: str
) -> None:
    """The second build has settings that the first has not: if one got into a layer, the digest would differ."""
    copy_sources(images.root, tmp_path / "checkout")
    frozen = replace(images, root=tmp_path / "checkout")
    archive(name)  # skips where nothing can be built
    first = Archive(frozen.build(target_named(name)))
    machine = images.machine
    other = Machine(
        apt=(*machine.apt, f'Acquire::http::Proxy::{CANARY} "DIRECT";'),
        pip={**(machine.pip or {}), "trusted-host": CANARY},
        certificates=machine.certificates,
        proxies=machine.proxies,
        mirror=machine.mirror,
        security_mirror=machine.security_mirror,
    )

    again = replace(frozen, machine=other).rebuild(target_named(name), tmp_path / "again.oci.tar")

    second = Archive(again)
    assert [layer.diff_id for layer in second.layers] == [layer.diff_id for layer in first.layers]
    assert [layer.digest for layer in second.layers] == [layer.digest for layer in first.layers]
    assert second.configuration == first.configuration


def test_a_base_is_the_same_whatever_the_permissions_of_its_folder(images: Builder) -> None:
    require_tools()
    digests = set()
    for mode in (0o755, 0o700):
        with tempfile.TemporaryDirectory(prefix="penstock-test-base-") as name:
            folder = Path(name)
            folder.chmod(mode)
            make_base(images.machine, folder / "base.tar", folder / "log", own_architecture())
            digests.add(hashlib.sha256((folder / "base.tar").read_bytes()).hexdigest())

    assert len(digests) == 1


def require_tools() -> None:
    try:
        require("mmdebstrap")
    except ToolMissing as missing:
        pytest.skip(str(missing))
