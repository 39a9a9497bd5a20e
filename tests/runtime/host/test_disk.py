"""Errors of a full disk: the folder, the reason, the free space and the remedy."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from penstock.errors import HostError, OutOfDisk
from penstock_runtime.host.disk import (
    FULL,
    LEAST_FREE_BYTES,
    free_bytes,
    is_full,
    prepare_folder,
    translate_full_disk,
    translate_write_errors,
)


@pytest.mark.parametrize("number", sorted(FULL))
def test_errors_of_a_full_disk_name_the_folder_and_the_remedy(number: int, tmp_path: Path) -> None:
    with pytest.raises(OutOfDisk) as caught, translate_full_disk(tmp_path, what="the store"):
        raise OSError(number, "whatever")

    assert caught.value.message.startswith(f"the store {tmp_path} cannot take more: ")
    assert "MiB are free" in caught.value.message
    assert "start again" in caught.value.remedy


def test_dev_full_is_translated_to_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(OutOfDisk, match="No space left on device"), translate_full_disk(tmp_path, what="the store"):
        Path("/dev/full").write_text("x", encoding="ascii")


def test_the_error_of_a_worker_on_a_full_disk_gets_the_folder(tmp_path: Path) -> None:
    with (
        pytest.raises(OutOfDisk, match="cannot take more: File too large"),
        translate_full_disk(tmp_path, what="the store"),
    ):
        raise OutOfDisk("File too large")


def test_a_complete_error_is_not_changed(tmp_path: Path) -> None:
    first = OutOfDisk("the work folder is full", remedy="Free space")

    with pytest.raises(OutOfDisk) as caught, translate_full_disk(tmp_path, what="the store"):
        raise first

    assert caught.value is first


def test_other_errors_are_left_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), translate_full_disk(tmp_path, what="the store"):
        raise PermissionError(errno.EACCES, "no")


def test_a_file_in_place_of_a_subfolder_is_named(tmp_path: Path) -> None:
    (tmp_path / "work").touch()

    with pytest.raises(HostError) as caught, translate_full_disk(tmp_path, what="the store"):
        (tmp_path / "work" / "logs").mkdir()

    assert caught.value.message == f"the store {tmp_path} cannot be used ({tmp_path}/work/logs: Not a directory)"
    assert caught.value.remedy == "Delete that or give this process access to it, or choose another folder"


@pytest.mark.parametrize("place", [(), ("{}",), ("/",)], ids=["nowhere", "the folder", "above it"])
def test_other_errors_of_a_folder_name_it_and_the_flag(place: tuple[str, ...], tmp_path: Path) -> None:
    error = PermissionError(errno.EACCES, "Permission denied", *(one.format(tmp_path) for one in place))

    with pytest.raises(HostError) as caught, translate_write_errors(tmp_path, what="the folder", option="--output"):
        raise error

    assert caught.value.message == f"the folder {tmp_path} cannot be written (Permission denied)"
    assert caught.value.remedy == "Give a folder that this process may write with --output"


def test_a_full_disk_is_the_same_error_wherever_a_folder_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutOfDisk), translate_write_errors(tmp_path, what="the folder", option="--output"):
        raise OSError(errno.ENOSPC, "whatever")


def test_a_folder_is_created_or_an_error_is_raised(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "a" / "b", what="the folder", option="--output")

    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match=r"file/c cannot be written \(Not a directory\)"):
        prepare_folder(tmp_path / "file" / "c", what="the folder", option="--output")


def test_the_free_space_of_a_missing_folder_is_that_of_its_parent(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") > LEAST_FREE_BYTES
    assert not is_full(tmp_path / "not" / "yet")
    assert is_full(Path("/proc"))
