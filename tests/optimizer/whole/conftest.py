from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_optimizer import capacity, capacity_steps
from tests.optimizer.whole.small_model import write_small_bert


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model. Not to be changed."""
    return write_small_bert(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def short_points() -> Iterator[None]:
    """Few points of the capacity curve, of a second: tests/endtoend waits for those that users get."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity_steps, "GROWTH", 2.2)
        patch.setattr(capacity_steps, "REFINEMENTS", 1)
        patch.setattr(capacity, "SATURATION_SECONDS", 0.7)
        patch.setattr(capacity, "LEAST_SECONDS", 0.7)
        patch.setattr(capacity, "MOST_SECONDS", 1.0)
        patch.setattr(capacity, "LONGEST_SECONDS", 3.0)
        yield
