from __future__ import annotations

from collections import Counter

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ArtefactError
from penstock.recipe import Recipe
from penstock_runtime.engines.operators import count_operators
from tests.runtime.minilm import ORT_DYNAMIC, ORT_FP32, graph


@pytest.mark.parametrize("recipe", [ORT_FP32, ORT_DYNAMIC], ids=lambda recipe: str(recipe.name))
def test_operators_are_counted_as_the_onnx_package_counts_them(recipe: Recipe) -> None:
    path, _ = graph(recipe)
    found = count_operators(path.read_bytes())

    assert found == Counter(node.op_type for node in onnx.load(path).graph.node)
    assert found.total() > 20


@given(content=st.binary(max_size=200))
def test_other_bytes_are_an_error_or_hold_nothing(content: bytes) -> None:
    try:
        found = count_operators(content)
    except ArtefactError:
        return
    assert isinstance(found, Counter)
