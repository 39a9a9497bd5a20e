"""For all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.examples import THOROUGH, examples

# Machines differ and are shared: a slow example is no failure. The pytest timeout ends what hangs.
settings.register_profile(
    "penstock", deadline=None, print_blob=True, max_examples=examples(100), derandomize=not THOROUGH
)
settings.load_profile("penstock")

# A Kubernetes for the tests that name one: `control_plane`, `kubectl` and others, described there.
pytest_plugins = ["testbed.fixtures"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: one that begins last keeps a single worker busy while the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
