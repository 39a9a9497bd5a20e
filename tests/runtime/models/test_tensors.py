"""Safetensors headers: files of the format's own library are read, and files that it would refuse are refused."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from penstock.errors import CorruptModel
from penstock_runtime.models import safetensors
from penstock_runtime.models.safetensors import read_header


def raw(path: Path, header: Any, body: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


ONE = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def test_files_written_by_safetensors_are_read(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "w": np.zeros((3, 4), np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.ones((), np.float16),
        "ids": np.arange(5, dtype=np.int64),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    read = read_header(tmp_path, tmp_path / "a.safetensors")
    assert {name: tensor.shape for name, tensor in read.items()} == {name: t.shape for name, t in tensors.items()}
    assert (read["w"].dtype, read["w"].parameters, read["scalar"].parameters) == ("F32", 12, 1)


@pytest.mark.parametrize(
    ("header", "body", "why"),
    [
        (ONE, b"1234567", "truncated: 8 bytes of tensors promised, 7 there"),
        (ONE, b"123456789", "1 bytes follow its last tensor"),
        (b"{", b"", "header is not JSON"),
        ([1], b"", "header is not a JSON object"),
        ({"a": 1}, b"", "tensor a has no dtype, shape and data_offsets"),
        ({"a": {**ONE["a"], "data_offsets": [0]}}, b"", "tensor a has no dtype, shape and data_offsets"),
        ({"a": {**ONE["a"], "shape": [-2]}}, b"12345678", r"tensor a has shape \[-2\]"),
        ({"a": {**ONE["a"], "shape": "x"}}, b"12345678", "tensor a has shape 'x'"),
        ({"a": {**ONE["a"], "shape": [True, 2]}}, b"12345678", "tensor a has shape"),
        ({"a": {**ONE["a"], "data_offsets": [8, 0]}}, b"12345678", "tensor a has shape"),
        ({"a": {**ONE["a"], "dtype": "Q9"}}, b"12345678", "unknown dtype 'Q9'"),
        ({"a": {**ONE["a"], "dtype": ["F32"]}}, b"12345678", "unknown dtype"),
        ({"a": {**ONE["a"], "shape": [3]}}, b"12345678", "does not take 8 bytes"),
        ({"a": {**ONE["a"], "data_offsets": [8, 16]}}, b"1" * 16, "starts at byte 8 instead of 0"),
        ({**ONE, "b": ONE["a"]}, b"12345678", "tensor b starts at byte 0 instead of 8"),
    ],
)
def test_an_inconsistent_header_is_an_error_with_the_reason(header: Any, body: bytes, why: str, tmp_path: Path) -> None:
    path = raw(tmp_path / "a.safetensors", header, body)
    with pytest.raises(CorruptModel, match=why):
        read_header(path.parent, path)
    with pytest.raises(SafetensorError):
        safe_open(path, framework="np")


@pytest.mark.parametrize(
    ("shape", "why"), [([1] * 8 + [2], "has 9 axes"), ([2**62] * 100_000, "has 100000 axes"), ([2**63, 0], "has shape")]
)
def test_axes_and_sizes_have_a_limit_before_anything_is_computed_of_them(
    shape: list[int], why: str, tmp_path: Path
) -> None:
    path = raw(tmp_path / "a.safetensors", {"a": {**ONE["a"], "shape": shape}}, b"12345678")
    with pytest.raises(CorruptModel, match=why):
        read_header(path.parent, path)


@pytest.mark.parametrize(("bytes_", "tensors"), [(safetensors.LONGEST_HEADER, 3), (500, safetensors.MOST_TENSORS)])
def test_a_header_over_a_limit_is_refused_before_it_is_parsed(
    bytes_: int, tensors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = raw(tmp_path / "a.safetensors", {f"t{index}": {**ONE["a"], "shape": []} for index in range(20)})
    monkeypatch.setattr(safetensors, "LONGEST_HEADER", bytes_)
    monkeypatch.setattr(safetensors, "MOST_TENSORS", tensors)
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(CorruptModel, match=r"does not fit|more than 3 tensors"):
        read_header(path.parent, path)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, (100).to_bytes(8, "little") + b"{}"])
def test_a_file_without_room_for_its_header_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CorruptModel, match=r"a.safetensors"):
        read_header(tmp_path, tmp_path / "a.safetensors")


@given(st.data())
def test_truncated_files_and_wrong_lengths_are_refused_as_by_the_library(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.safetensors")
        save_file({"w": np.zeros((3, 4), np.float32), "b": np.zeros(7, np.int8)}, path)
        whole = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        else:
            whole[data.draw(st.integers(0, len(whole) - 56))] = data.draw(st.integers(0, 255))
            path.write_bytes(whole)
        try:
            read_header(path.parent, path)
        except CorruptModel:
            return
        # Whatever we accept, the library accepts: engines and builders read the file with it.
        with safe_open(path, framework="np") as file:
            assert list(file.keys()) is not None
