"""Trimming removes what its patterns name, and notices when a package has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from images.inside import trim


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("ten bytes\n")


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_pattern_that_matches_nothing_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a/keep.py")
    monkeypatch.setitem(trim.GROUPS, "a", ("a/gone.so",))

    with pytest.raises(SystemExit, match=r"matches 'a/gone.so' of group 'a': the package has changed"):
        trim.trim(tmp_path, ["a"], "x86_64")


def test_packages_for_another_processor_have_no_plugins_of_intels_devices(tmp_path: Path) -> None:
    """As the wheel of OpenVINO 2026.4 for aarch64 has it."""
    common = [pattern.replace("*", "2641") for pattern in trim.GROUPS["openvino"]]
    intel = trim.ONLY_X86_64["openvino"]
    write(tmp_path, *common, "openvino/libs/libopenvino.so.2641")

    trim.trim(tmp_path, ["openvino"], "aarch64")

    assert names(tmp_path) == {"openvino/libs/libopenvino.so.2641"}
    write(tmp_path, *common, *intel)
    trim.trim(tmp_path, ["openvino"], "x86_64")
    assert names(tmp_path) == {"openvino/libs/libopenvino.so.2641"}
