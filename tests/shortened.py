"""A short search for the plan and few points of the capacity curve: an optimisation with all its stages, in less time.

`shortened()` is for this process; `python -m tests.shortened MODULE WORDS` runs one of our programs so. What users get
is waited for by tests/endtoend_cluster, and by tests/endtoend on `make test-all`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def shortened() -> Iterator[None]:
    """While the block runs."""
    from penstock_cli import serve
    from penstock_optimizer.capacity import curve as capacity
    from penstock_optimizer.targets import plan_search
    from penstock_optimizer.targets import target as budget

    with pytest.MonkeyPatch.context() as patch:
        # What `penstock serve` starts is shortened as well.
        patch.setattr(serve, "PROGRAM", ("tests.shortened", *serve.PROGRAM))
        for module in (budget, plan_search):
            patch.setattr(module, "MOST_PLANS_SECONDS", 1.0)
        # An idle point, a good one and, most often, one beyond saturation.
        patch.setattr(capacity, "GROWTH", 4.0)
        patch.setattr(capacity, "REFINEMENTS", 0)
        patch.setattr(capacity, "VOTES", 1)
        patch.setattr(capacity, "SATURATION_SECONDS", 0.5)
        patch.setattr(capacity, "LEAST_SECONDS", 0.5)
        patch.setattr(capacity, "MOST_SECONDS", 0.8)
        patch.setattr(capacity, "LONGEST_SECONDS", 3.0)
        yield


if __name__ == "__main__":
    _, module, *words = sys.argv
    sys.argv = [module, *words]
    with shortened():
        runpy.run_module(module, run_name="__main__", alter_sys=True)
