"""The guard of live traffic on real nodes: the memory of a pod is damaged while it serves, and fp32 takes over."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from penstock_optimizer.load.workload import EVERYDAY_WORDS
from tests.damaged_memory import damage_tile
from tests.endtoend_cluster.installation import Endpoint, Json, processes
from tests.endtoend_cluster.load import constant_load, predict, until_answered

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

PER_SECOND = 8
SECONDS = 900.0
"""For a step on a busy machine; each ends by itself."""
SPEC: Json = {
    # One replica: its alarm is the endpoint's. The load is known where the autoscaler decides.
    "scaling": {"minReplicas": 1, "maxReplicas": 2},
    "optimization": {
        "budgetSeconds": 600,
        "engines": ["native", "onnxruntime"],
        "precisions": ["fp32", "int8-rowwise"],
    },
    "guard": {"live": {"cpuShare": 0.5}},
}


def environment(pod: Json) -> set[str]:
    return {one["name"] for one in pod["spec"]["containers"][0]["env"]}


def native_graph(process: int) -> Path:
    """The file of the native engine that a process has mapped."""
    found = re.search(r" (/\S+\.native)$", Path(f"/proc/{process}/maps").read_text(), re.MULTILINE)
    assert found, "the plan of the native engine does not serve"
    return Path(f"/proc/{process}/root{found[1]}")


def test_fp32_takes_over_from_a_pod_with_damaged_weights_without_a_failed_request(
    endpoint: Callable[[str], Endpoint],
) -> None:
    dice = random.Random(5)
    served = endpoint("watched")
    served.apply(**SPEC)
    served.until_optimised(seconds=SECONDS)
    served.until(lambda _: len(served.pods()) == 1, "served by one pod", seconds=SECONDS)
    until_answered(served.address(), seconds=300)
    [before] = served.pods()
    assert "PENSTOCK_FP32" not in environment(before)
    sound = predict(served.address()).vector

    def text() -> str:
        return " ".join(dice.choices(EVERYDAY_WORDS, k=dice.randint(3, 12)))

    with constant_load(served.address(), per_second=PER_SECOND, text=text) as load:
        served.until(
            lambda body: (body["status"].get("guard") or {}).get("answers", 0) >= 10,
            "compared with fp32",
            seconds=SECONDS,
        )
        assert served.condition("AnswersAgree")["reason"] in {"Watching", "Agrees"}

        places = [damage_tile(process, native_graph(process), layer=10) for process in serving(before)]
        assert sum(places) == 1
        damaged = time.monotonic()
        body = served.until(
            lambda body: served.condition("AnswersAgree", body).get("reason") == "Returned", "returned", seconds=SECONDS
        )
        found_after = time.monotonic() - damaged
        alarm = datetime.fromisoformat(served.condition("AnswersAgree", body)["lastTransitionTime"])
        served.until(lambda _: only_fp32(served), "served by fp32 alone", seconds=SECONDS)
        returned_after = (datetime.now(UTC) - alarm).total_seconds()
        load.more(2 * PER_SECOND)

    print(served.kubectl("get", "modelendpoint", "watched", "--output", "wide"))
    print(served.kubectl("describe", "modelendpoint", "watched")[-6000:])
    print(f"alarm after {found_after:.1f} s, fp32 alone after further {returned_after:.1f} s; {load.answered} answers")
    assert load.failures == []
    [recorded] = served.read()["status"]["guard"]["alarms"]
    assert recorded["digest"] == before["metadata"]["annotations"]["penstock.dev/artefact"]
    assert recorded["evidence"] >= 100
    vector = predict(served.address()).vector
    assert float(np.dot(vector, sound) / np.linalg.norm(vector) / np.linalg.norm(sound)) > 0.98


def serving(pod: Json) -> list[int]:
    """The processes of a pod that have the graph in memory."""
    return [one for one in processes(pod) if ".native" in Path(f"/proc/{one}/maps").read_text()]


def only_fp32(served: Endpoint) -> bool:
    """All its pods, with those that are being deleted, serve fp32, and one is ready."""
    labels = f"app.kubernetes.io/name=penstock-runtime,penstock.dev/endpoint={served.name}"
    pods = served.kubectl.items("pods", labels)
    ready = [one for pod in pods for one in pod["status"].get("conditions", []) if one["type"] == "Ready"]
    return all("PENSTOCK_FP32" in environment(pod) for pod in pods) and any(one["status"] == "True" for one in ready)
