"""A rig for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testbed.haproxy import VERSIONS
from tests.gateway.rig import Rig, running_rig

OLDER, OF_THE_IMAGE = VERSIONS


@pytest.fixture(params=[OF_THE_IMAGE, pytest.param(OLDER, marks=pytest.mark.extended)])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Gateways, replicas and the API between them, with each HAProxy that the gateway works with."""
    with running_rig(request.param) as running:
        yield running
