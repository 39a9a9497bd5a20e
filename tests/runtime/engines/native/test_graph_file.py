"""A written graph is read back; incomplete or inconsistent files are refused before the C code reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ArtefactError
from penstock_runtime.engines.native.graph_file import GraphOutput, GraphStep, NativeGraph, read, write
from tests.runtime.engines.native.programs import source


def graph() -> NativeGraph:
    first, tensors = source(np.arange(96, dtype=np.float32).reshape(3, 32))
    norm = GraphStep(
        operator="norm", source=0, target=1, outputs=32, epsilon=1e-12, tensors={"weights": "g", "bias": "b"}
    )  # fmt: skip
    tensors |= {"g": np.ones(32, np.float32), "b": np.zeros(32, np.float32)}
    return NativeGraph((first, norm), GraphOutput(name="y", buffer=1, width=32, per_row=False), tensors)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "model.native", graph())
    return tmp_path / "model.native"


def test_a_written_graph_is_read_back(path: Path) -> None:
    wanted, found = graph(), read(path)

    assert found.steps == wanted.steps
    assert found.output == wanted.output
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, array in wanted.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], array)
        assert found.tensors[name].ctypes.data % 64 == 0


def test_the_same_graph_makes_the_same_bytes(path: Path, tmp_path: Path) -> None:
    write(tmp_path / "again.native", graph())

    assert (tmp_path / "again.native").read_bytes() == path.read_bytes()


def test_a_tensor_of_another_shape_is_not_written(tmp_path: Path) -> None:
    wrong = graph()

    with pytest.raises(ValueError, match="bias"):
        write(tmp_path / "x", NativeGraph(wrong.steps, wrong.output, {**wrong.tensors, "b": np.zeros(31, np.float32)}))


def test_a_missing_file_is_an_artefact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="is missing"):
        read(tmp_path / "model.native")


def test_a_truncated_file_is_refused(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    cut = tmp_path / "cut.native"
    for size in [*range(0, len(whole) - 256, 61), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ArtefactError):
            read(cut)


def _header(whole: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(whole[8:16], "little")
    return json.loads(whole[16 : 16 + size]), whole[16 + size :]


def _with(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    header, rest = _header(path.read_bytes())
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-(16 + len(text)) % 64)
    path.write_bytes(b"PENSTOCK" + len(text).to_bytes(8, "little") + text + rest)


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "another version": lambda header: header.update(version=2),
    "an unknown field": lambda header: header.update(more=1),
    "an unknown operator": lambda header: header["steps"][1].update(operator="conv"),
    "a buffer that cannot be": lambda header: header["steps"][1].update(target=64),
    "more outputs than weights": lambda header: header["steps"][1].update(outputs=64),
    "more words than vectors": lambda header: header["steps"][0].update(inputs=1000),
    "more positions than vectors": lambda header: header["steps"][0].update(positions=1000),
    "a tensor beyond the end": lambda header: header["tensors"]["b"].update(offset=1 << 20),
    "a tensor off its alignment": lambda header: header["tensors"]["b"].update(offset=4),
    "a tensor of another type": lambda header: header["tensors"]["b"].update(dtype="int8"),
    "a tensor that is not there": lambda header: header["steps"][1]["tensors"].update(bias="c"),
    "a tensor too many": lambda header: header["steps"][1]["tensors"].update(factors="b"),
    "an output that no step writes": lambda header: header["output"].update(buffer=7),
    "an output wider than its buffer": lambda header: header["output"].update(width=33),
    "a column without a name": lambda header: header["output"].update(columns=["start"]),
    "two columns of one name": lambda header: header["output"].update(columns=["start"] * 32),
    "an enormous tensor": lambda header: header["tensors"]["b"].update(shape=[1 << 40, 1 << 40]),
    "no steps": lambda header: header.update(steps=[]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_altered_header_is_refused(path: Path, what: str) -> None:
    _with(path, CHANGES[what])

    with pytest.raises(ArtefactError, match=r"model\.native"):
        read(path)


@pytest.mark.parametrize("content", [b"", b"PENSTOCK", b"\0" * 200, b"PENSTOCK" + b"\xff" * 100])
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.native").write_bytes(content)

    with pytest.raises(ArtefactError):
        read(tmp_path / "model.native")
