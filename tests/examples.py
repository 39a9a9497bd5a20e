"""How many examples a property is tried on: a quarter by default, all of them with PENSTOCK_TEST_THOROUGH=1.

`make test-all` sets it. It and the workflows (PENSTOCK_TEST_DRAWS=new) draw anew each time: what a run does not find
another one does. `make test` tries the same examples every time, so that it fails for what a change did and not by
chance.
"""

from __future__ import annotations

import os
from pathlib import Path

THOROUGH = os.environ.get("PENSTOCK_TEST_THOROUGH", "") == "1"
NEW_DRAWS = THOROUGH or os.environ.get("PENSTOCK_TEST_DRAWS", "") == "new"
FAILED_EXAMPLES = Path("~/.cache/penstock/hypothesis").expanduser()
FEWEST = 10


def examples(count: int) -> int:
    """The divisor of a property's examples, without PENSTOCK_TEST_THOROUGH."""
    return count if THOROUGH else max(min(count, FEWEST), count // 4)
