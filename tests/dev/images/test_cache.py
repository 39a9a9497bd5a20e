"""The build cache stays within bounds, and is deleted on request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from images.build import KEPT, Builder
from images.emulation import EMULATORS
from images.errors import ToolMissing
from images.target import TARGETS


@pytest.fixture
def elsewhere(images: Builder, tmp_path: Path, checkout: Path) -> Builder:
    """A builder of another checkout with a cache of its own, which has an archive already."""
    builder = replace(images, cache=tmp_path / "cache", root=checkout)
    builder.cache.mkdir()
    builder.archive(TARGETS["runtime"]).write_bytes(b"built before")
    return builder


@pytest.fixture
def small(images: Builder, tmp_path: Path, checkout: Path) -> Iterator[Builder]:
    """A builder of images of a single file, in a cache of its own."""
    (checkout / "Dockerfile").write_text("ARG BASE\nFROM ${BASE} AS runtime\nARG VERSION\nCOPY penstock /penstock\n")
    builder = replace(images, cache=tmp_path / "cache", root=checkout, base="scratch")
    try:
        builder.build(TARGETS["runtime"])
    except ToolMissing as missing:
        pytest.skip(str(missing))
    yield builder
    builder.clean()


def test_the_layers_of_a_replaced_image_are_deleted(small: Builder, checkout: Path) -> None:
    for turn in range(3):
        (checkout / "penstock/a.py").write_text(f"changed {turn}")
        small.build(TARGETS["runtime"])

    assert len(list((small.cache / "storage/overlay").glob("*/diff"))) == 1
    assert len(list(small.cache.glob("*.oci.tar"))) == KEPT


def test_the_next_build_deletes_the_leftovers_of_killed_builds(small: Builder, checkout: Path) -> None:
    buildah = small.buildah
    before = small.archive(TARGETS["runtime"])
    buildah.run("from", "scratch")

    (checkout / "penstock/a.py").write_text("changed")
    with buildah.mounted(before) as root:
        small.build(TARGETS["runtime"])
        assert (root / "penstock/a.py").is_file()  # files that a running process has mounted are kept

    assert buildah.run("containers", "--json") in {"", "null", "[]"}


def test_clean_deletes_the_mounted_images_of_another_processor(small: Builder) -> None:
    for architecture in EMULATORS:
        other = replace(small, cache=small.cache / architecture)
        other.build(TARGETS["runtime"])
        other.buildah.run("mount", other.buildah.run("from", "scratch"))

    small.clean()

    assert {path.name for path in small.cache.iterdir()} == {"lock"}


def test_clean_deletes_everything(elsewhere: Builder) -> None:
    (elsewhere.cache / "tmp").mkdir()

    elsewhere.clean()

    assert {path.name for path in elsewhere.cache.iterdir()} <= {"lock"}
