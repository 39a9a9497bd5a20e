"""An endpoint of text generation with the small model of the fixture `chat_model`."""

from __future__ import annotations

import httpx

from tests.endtoend_cluster.installation import Endpoint, Json
from tests.gateway.streams import chat, read_stream

CONTEXT = 4096
TOKENS = 1500
"""Of an answer: some seconds, so that each change of the pods meets streams in progress."""
NO_END = {"1": -100}
"""The model is random, and its end token would come by chance."""
SECONDS = 600.0
SPEC: Json = {
    # And the model, which is the value of the fixture.
    "task": "text-generation",
    "objective": {"timeToFirstToken": {"p95Milliseconds": 60_000}},
    "workload": {"lengths": "16,32"},
    "serving": {},
    # Nothing is searched for: the fp32 model serves first, and then the same with its measured capacity.
    "optimization": {"mode": "Disabled", "budgetSeconds": 120},
    "scaling": {"mode": "None"},
    "rollout": {"drainSeconds": 3, "finishSeconds": 120},
}


def until_streamed(address: str, endpoint: Endpoint) -> None:
    """Wait until the Service leads to a pod that generates."""

    def is_it(_: Json) -> bool:
        with httpx.Client(trust_env=False, verify=False, timeout=60) as client:
            found = read_stream(client, f"http://{address}", {**chat(4), "logit_bias": NO_END})
            return found.problem == "" and found.generated == 4

    endpoint.until(is_it, "streaming", seconds=SECONDS)
