"""The child's program: its messages, and where it can run."""

from __future__ import annotations

import ast
import socket
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_runtime.engines.neuron.process import WORKER
from penstock_runtime.engines.neuron.worker import receive, send


@given(
    header=st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "bytes"), st.integers() | st.text(max_size=8)
    ),
    payload=st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20), max_size=4),
)
def test_a_message_arrives_as_it_was_sent(header: dict[str, object], payload: list[list[int]]) -> None:
    arrays = [np.array(values, np.int32) for values in payload]
    one, other = socket.socketpair()
    with one, other:
        send(one, header, *arrays)
        found, data = receive(other)

    assert {name: value for name, value in found.items() if name != "bytes"} == header
    assert np.frombuffer(data, np.int32).tolist() == [value for values in payload for value in values]


def test_the_end_of_the_connection_is_no_message() -> None:
    one, other = socket.socketpair()
    with other:
        one.sendall(b"\0\0")
        one.close()
        with pytest.raises(EOFError):
            receive(other)


def test_the_program_runs_on_python_310_with_the_standard_library_alone() -> None:
    tree = ast.parse(WORKER.read_text(encoding="utf-8"), feature_version=(3, 10))

    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported
    assert imported <= sys.stdlib_module_names
