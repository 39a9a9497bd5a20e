"""The load process: a LoadSpec as JSON on standard input, a LoadResult as JSON on standard output."""

from __future__ import annotations

import gc
import sys

from penstock_optimizer.load.generator import generate
from penstock_optimizer.load.spec import LoadSpec


def main() -> None:
    """Read, run, write."""
    spec = LoadSpec.model_validate_json(sys.stdin.buffer.read())
    # A collection pauses for milliseconds, and the recording grows for seconds only.
    gc.disable()
    result = generate(spec)
    sys.stdout.write(result.model_dump_json())


if __name__ == "__main__":
    main()
