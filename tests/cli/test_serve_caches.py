"""`spec.serving.caches` of a file are settings of `penstock serve`; variables of the environment count before."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_cli.serve import _variables_of
from penstock_cli.terminal import settings_from
from tests.cli.endpoints import write_endpoint


@pytest.mark.parametrize(
    ("serving", "environment", "found"),
    [
        ({"caches": {"answersMebibytes": 8}}, {}, (8 * 2**20, 0)),
        ({"caches": {"answersMebibytes": 8}}, {"PENSTOCK_ANSWER_CACHE_BYTES": "77"}, (77, 0)),
        ({"caches": {}}, {}, (0, 0)),
        ({}, {}, (0, 0)),
    ],
)
def test_caches_of_a_file_are_settings_below_those_of_the_environment(
    serving: dict[str, object], environment: dict[str, str], found: tuple[int, int], tiny: Path, tmp_path: Path
) -> None:
    variables = _variables_of(write_endpoint(tmp_path / "e.yaml", tiny, serving=serving))
    caches = settings_from(variables | environment, {}).caches

    assert (caches.answer_cache_bytes, caches.token_cache_bytes) == found
    assert bool(variables) is bool(serving.get("caches"))
    assert _variables_of(tmp_path) == {}
