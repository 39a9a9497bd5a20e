"""The build cache stays within bounds, and is deleted on request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from images.build import KEPT, Builder, builder
from images.emulation import EMULATORS, MACHINES, own_architecture
from images.errors import ImageError, ToolMissing
from images.target import TARGETS, target_named


@pytest.fixture
def elsewhere(images: Builder, tmp_path: Path, checkout: Path) -> Builder:
    """A builder of another checkout with a cache of its own, which has an archive already."""
    builder = replace(images, cache=tmp_path / "cache", root=checkout)
    builder.cache.mkdir()
    builder.archive(TARGETS["runtime"]).write_bytes(b"built before")
    return builder


def test_a_cached_build_is_not_repeated(elsewhere: Builder) -> None:
    assert elsewhere.build(TARGETS["runtime"]).read_bytes() == b"built before"


def test_a_changed_source_is_another_archive(elsewhere: Builder, checkout: Path) -> None:
    before = elsewhere.archive(TARGETS["runtime"])

    (checkout / "penstock/a.py").write_text("changed")

    assert elsewhere.archive(TARGETS["runtime"]) != before


def test_another_base_makes_another_archive(elsewhere: Builder) -> None:
    other = replace(elsewhere, base="registry.example/debian:trixie-slim")

    assert other.archive(TARGETS["runtime"]) != elsewhere.archive(TARGETS["runtime"])


def test_without_the_tools_the_error_names_how_to_get_them(elsewhere: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(ToolMissing, match=r"apt-get install buildah mmdebstrap.*docker build --target runtime"):
        elsewhere.build(TARGETS["operator"])


def test_a_new_base_needs_its_tools_also_where_images_are_built_on_another(
    elsewhere: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(ToolMissing, match=r"apt-get install buildah mmdebstrap"):
        replace(elsewhere, base="registry.example/debian:trixie-slim").refresh_base()


def test_an_unknown_image_is_an_error_with_the_known_names() -> None:
    with pytest.raises(ImageError, match="no image 'runtim': choose of operator, runtime, gateway, optimizer"):
        target_named("runtim")


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


def test_images_for_another_processor_have_a_cache_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """buildah knows a layer again by its commands, which are the same for each processor."""
    monkeypatch.setenv("PENSTOCK_IMAGES_CACHE", str(tmp_path))
    (other,) = set(MACHINES.values()) - {own_architecture()}

    assert builder(print).cache == tmp_path
    assert builder(print, other).cache == tmp_path / other


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
