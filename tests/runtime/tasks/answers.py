"""How two answers are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def assert_alike(ours: Any, theirs: Any, *, within: float = 1e-5, path: str = "answer") -> None:
    """Equal in everything, and in numbers within an absolute difference."""
    if isinstance(ours, np.ndarray):
        ours = ours.tolist()
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), path
        assert list(ours) == list(theirs), path
        for key in theirs:
            assert_alike(ours[key], theirs[key], within=within, path=f"{path}.{key}")
    elif isinstance(theirs, list):
        assert isinstance(ours, list), path
        assert len(ours) == len(theirs), f"{path}: {ours} {theirs}"
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(mine, other, within=within, path=f"{path}[{index}]")
    elif isinstance(theirs, float | np.floating):
        assert type(ours) is float, f"{path}: {type(ours)}"
        assert ours == pytest.approx(float(theirs), abs=within, rel=within), path
    else:
        assert ours == theirs, path
