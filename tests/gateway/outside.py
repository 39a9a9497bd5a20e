"""The gateway's process outside a cluster: as in its pod, but for where the API server is.

python -m tests.gateway.outside URL FOLDER         with the PENSTOCK_GATEWAY_ variables
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from penstock_gateway.follow import ApiServerAccess
from penstock_gateway.process import GatewayProcess
from penstock_gateway.settings import GatewaySettings

if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.DEBUG)
    settings = GatewaySettings.from_environment(os.environ)
    sys.exit(GatewayProcess(settings, ApiServerAccess(sys.argv[1]), folder=Path(sys.argv[2])).run())
