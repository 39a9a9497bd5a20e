"""For all tests."""

from __future__ import annotations

from hypothesis import settings

# Machines differ and are shared: a slow example is no failure. The pytest timeout ends what hangs.
settings.register_profile("penstock", deadline=None, print_blob=True)
settings.load_profile("penstock")

# A Kubernetes for the tests that name one: `control_plane`, `kubectl` and others, described there.
pytest_plugins = ["testbed.fixtures"]
