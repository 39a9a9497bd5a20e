"""A canary on real nodes under load: pods that are not worse replace the present ones, and a plan whose answers fail is
taken back.

The tests share one endpoint. Each test establishes the state that it needs, which is quick in this order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from testbed.kubectl import Kubectl
from tests.endtoend_cluster.installation import Endpoint, Installation, Json, cpus
from tests.endtoend_cluster.load import constant_load, until_answered
from tests.optimizer.end_to_end.small_model import write_small_bert

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

NAME = "canary"
PERCENT = 50
"""One new pod next to one present pod: each gets half of the requests."""
MINUTES = 1
PER_SECOND = 16
"""The new pod answers the 200 requests that a decision needs within the minute."""
SECONDS = 900.0
"""For a step on a busy machine; each ends by itself."""
DAMAGED = "^"
"""A token of the small model's vocabulary that is in no text that the optimisation uses."""
TOKENS = 62
LONG_TEXT = " ".join(["river"] * TOKENS)
SPEC: Json = {
    "workload": {"sequenceLengths": [16]},
    "serving": {"maxInputTokens": TOKENS + 2},
    "optimization": {"mode": "Disabled", "budgetSeconds": 60},
    "rollout": {"canary": {"percent": PERCENT, "minutes": MINUTES}, "drainSeconds": 3},
}


@dataclass(frozen=True)
class CanaryEndpoint(Endpoint):
    """An endpoint whose rollouts begin with a canary."""

    damaged: Path
    """A model with NaN as the weights of the token DAMAGED, so that requests with it fail."""

    def serve_with_cache(self, **changes: object) -> None:
        """Apply it with a cache of answers, which needs no optimisation. Its pods are faster than those without."""
        caches = {"caches": {"answersMebibytes": 16}}
        self.apply(**SPEC | {"serving": SPEC["serving"] | caches} | changes)

    def canary(self, body: Json) -> Json:
        """Its `status.canary`."""
        found: Json = body.get("status", {}).get("canary") or {}
        return found

    def deployments(self) -> dict[str, Json]:
        """The Deployments of its runtime pods, by name."""
        found = self.kubectl.items("deployments", f"penstock.dev/endpoint={self.name}")
        return {one["metadata"]["name"]: one for one in found if not one["metadata"]["name"].endswith("-gateway")}

    def all_pods(self) -> set[str]:
        """The uids of its serving pods, with those that are being deleted."""
        labels = f"app.kubernetes.io/name=penstock-runtime,penstock.dev/endpoint={self.name}"
        return {pod["metadata"]["uid"] for pod in self.kubectl.items("pods", labels)}


@pytest.fixture(scope="module")
def endpoint(installation: Installation, file_sources: Path) -> Iterator[CanaryEndpoint]:
    """In a namespace of its own: another endpoint's job would take the core of its canary."""
    folder = write_small_bert(file_sources / "damaged")
    token = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(DAMAGED)
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][token] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # Jobs run as another user.
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    cluster = installation.cluster
    with cluster.temporary_namespace(wait_for_pods=True) as namespace:
        kubectl: Kubectl = cluster.kubectl.within(namespace)
        yield CanaryEndpoint(installation, kubectl, NAME, folder)
        kubectl("delete", "modelendpoint", NAME, "--ignore-not-found")


def test_a_new_pod_first_gets_its_share_of_the_requests_and_then_replaces_the_present_one(
    endpoint: CanaryEndpoint,
) -> None:
    # The result takes over from the fp32 graph without a canary.
    endpoint.apply(**SPEC | {"rollout": {"drainSeconds": 3}, "gateway": {"mode": "Always"}})
    endpoint.until_optimised(seconds=SECONDS)
    endpoint.until(lambda _: len(endpoint.all_pods()) == 1, "served by one pod", seconds=SECONDS)
    (present,) = endpoint.all_pods()
    until_answered(endpoint.address(), seconds=300)

    with constant_load(endpoint.address(), per_second=PER_SECOND, text=LONG_TEXT) as load:
        load.more(PER_SECOND)
        endpoint.serve_with_cache()
        body = endpoint.until(
            lambda body: endpoint.canary(body).get("phase") == "Running" and endpoint.canary(body)["requests"] > 0,
            "served by a canary as well",
            seconds=SECONDS,
        )
        assert endpoint.condition("Progressing", body)["reason"] == "CanaryRunning"
        assert endpoint.condition("Available", body)["status"] == "True"
        assert endpoint.deployments()[NAME]["spec"]["paused"] is True
        old, new = sorted(endpoint.pods(), key=lambda pod: bool(pod["metadata"]["uid"] != present))
        assert old["metadata"]["uid"] == present
        assert cpus(old)
        assert cpus(new)
        assert not cpus(old) & cpus(new)

        body = endpoint.until_optimised(seconds=SECONDS)
        endpoint.until(lambda _: len(endpoint.all_pods()) == 1, "served by one pod", seconds=SECONDS)
        load.more(PER_SECOND)

    assert load.failures == []
    result = endpoint.canary(body)
    assert (result["phase"], result["reason"], result["errors"]) == ("Passed", "NotWorse", 0)
    print(result["message"])
    requests = re.search(r"(\d+) requests to new pods .* of (\d+) (?:requests )?to the others", result["message"])
    assert requests, result["message"]
    to_new, to_present = map(int, requests.groups())
    assert to_new == result["requests"] >= 200
    # Half of some hundred requests: the standard deviation is 3 % at most.
    assert 0.35 <= to_new / (to_new + to_present) <= 0.65
    assert to_new + to_present <= load.answered
    assert list(endpoint.deployments()) == [NAME]
    assert not endpoint.deployments()[NAME]["spec"].get("paused")
    assert present not in endpoint.all_pods()


def test_a_plan_whose_answers_fail_is_taken_back_and_the_present_pod_serves_on(endpoint: CanaryEndpoint) -> None:
    endpoint.serve_with_cache()
    before = endpoint.until_optimised(seconds=SECONDS)
    present = endpoint.all_pods()
    assert len(present) == 1

    with (
        constant_load(endpoint.address(), per_second=PER_SECOND / 2) as load,
        constant_load(endpoint.address(), per_second=PER_SECOND / 2, text=f"I like {DAMAGED}") as affected,
    ):
        affected.more(PER_SECOND)
        assert affected.failures == []
        endpoint.serve_with_cache(model=f"file://{endpoint.damaged}")
        endpoint.until(
            lambda body: endpoint.condition("Progressing", body).get("reason") == "CanaryRejected",
            "taken back",
            seconds=SECONDS,
        )
        endpoint.until(lambda _: endpoint.all_pods() == present, "served by its first pod only", seconds=SECONDS)
        failed = list(affected.failures)
        load.more(PER_SECOND)
        affected.more(PER_SECOND)

    assert load.failures == []
    # The others were answered by the present pod, and all of them are since the new pod has ended.
    assert failed
    assert all(failure.startswith("500: ") for failure in failed)
    assert affected.failures == failed

    body = endpoint.read()
    result = endpoint.canary(body)
    assert (result["phase"], result["reason"]) == ("Rejected", "MoreErrors")
    assert 0 < result["errors"] <= len(failed)
    progressing = endpoint.condition("Progressing", body)
    assert progressing["status"] == "False"
    assert "requests to new pods had an error" in progressing["message"]
    assert endpoint.condition("Ready", body)["reason"] == "CanaryRejected"
    assert endpoint.condition("Available", body)["status"] == "True"
    assert list(endpoint.deployments()) == [NAME]
    assert body["status"]["plan"]["digest"] == before["status"]["plan"]["digest"]
    assert "CanaryRejected" in endpoint.kubectl("get", "events", f"--field-selector=involvedObject.name={NAME}")

    # With the spec of before nothing is left to replace.
    endpoint.serve_with_cache()
    endpoint.until_optimised(seconds=SECONDS)
    assert endpoint.all_pods() == present
    assert not endpoint.deployments()[NAME]["spec"].get("paused")
