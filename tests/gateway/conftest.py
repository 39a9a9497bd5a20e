"""A rig for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.rig import Rig, running_rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Gateways, replicas and the API between them."""
    with running_rig() as running:
        yield running
