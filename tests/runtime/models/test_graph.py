from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptModel
from penstock.recipe import Recipe
from penstock_runtime.models.graph import count_operators
from tests.runtime.minilm import ORT_DYNAMIC, ORT_FP32, graph


@pytest.mark.parametrize("recipe", [ORT_FP32, ORT_DYNAMIC], ids=lambda recipe: str(recipe.name))
def test_operators_are_counted_as_the_onnx_package_counts_them(recipe: Recipe) -> None:
    path, _ = graph(recipe)
    found = count_operators(path)

    assert found == Counter(node.op_type for node in onnx.load(path).graph.node)
    assert found.total() > 20


@given(content=st.binary(max_size=200))
def test_other_bytes_are_an_error_or_an_empty_graph(content: bytes) -> None:
    try:
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            found = count_operators(Path(file.name))
    except CorruptModel:
        return
    assert isinstance(found, Counter)
