"""Fixtures that render the chart with a real helm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.charts.helm import Helm


@pytest.fixture(scope="session")
def chart(helm: Path) -> Helm:
    """helm, for the project's chart."""
    return Helm(helm)
