"""`python -m penstock_gateway`: the process of the gateway's pod."""

from __future__ import annotations

import sys

from penstock_gateway.process import main

if __name__ == "__main__":
    sys.exit(main())
