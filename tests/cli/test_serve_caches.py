"""`spec.serving.caches` of a file are settings of `penstock serve`; variables of the environment count before."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_cli.serve import _cache_variables
from penstock_cli.terminal import settings_from
from tests.cli.endpoints import write_endpoint


def test_caches_of_a_file_are_settings(tiny: Path, tmp_path: Path) -> None:
    file = write_endpoint(tmp_path / "e.yaml", tiny, serving={"caches": {"answersMebibytes": 8}})

    found = settings_from(_cache_variables(file) | {}, {})

    assert (found.caches.answer_cache_bytes, found.caches.token_cache_bytes) == (8 * 2**20, 0)


@pytest.mark.parametrize("serving", [{}, {"caches": {}}])
def test_without_caches_nothing_is_set(tiny: Path, tmp_path: Path, serving: dict[str, object]) -> None:
    assert _cache_variables(write_endpoint(tmp_path / "e.yaml", tiny, serving=serving)) == {}
    assert _cache_variables(tmp_path) == {}


def test_the_environment_counts_before_the_file(tiny: Path, tmp_path: Path) -> None:
    file = write_endpoint(tmp_path / "e.yaml", tiny, serving={"caches": {"answersMebibytes": 8}})

    found = settings_from(_cache_variables(file) | {"PENSTOCK_ANSWER_CACHE_BYTES": "77"}, {})

    assert found.caches.answer_cache_bytes == 77
