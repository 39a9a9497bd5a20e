"""What the autoscaler reads of an endpoint from the caches."""

from __future__ import annotations

import pytest

from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.facts.names import FP32
from penstock_operator.limits.quotas import Allocation, Amount
from penstock_operator.scaling.read.target import ScalingTarget, ScalingTargets
from tests.operator.decide.cases import Replay, traffic
from tests.operator.endpoint.kube import RESULT, SETTINGS, Kube, result, token_result
from tests.operator.endpoint.test_inferentia import MEASURED, PROVISIONAL, on, report_capacity


def target_of(kube: Kube, model: str = "earlier") -> ScalingTarget | None:
    """The target from caches that have the endpoint, this OptimizedModel and the Deployment."""
    cache = ClusterCache(SETTINGS)
    for store, value in (
        (cache.endpoints, kube.endpoint),
        (cache.models, kube.objects["OptimizedModel", model]),
        (cache.deployments, kube.deployment),
    ):
        store.put({**value, "metadata": {**value["metadata"], "namespace": "a", "resourceVersion": "1"}})
    return ScalingTargets(cache).find(ObjectKey("a", kube.name))


def test_replicas_with_a_pinned_artefact_have_the_capacity_that_was_measured_for_it() -> None:
    pins = {"mode": "Pinned", "artefact": RESULT}
    kube = Kube(optimization=pins, scaling={"mode": "Internal", "minReplicas": 1, "maxReplicas": 4})
    kube.publish("earlier", RESULT)
    kube.objects["OptimizedModel", "earlier"]["status"]["result"] = result().to_object()
    kube.reconcile()

    target = target_of(kube)

    assert target is not None
    assert target.service is not None
    assert target.service.p95_objective_milliseconds == 20.0


@pytest.mark.parametrize(("cores", "share"), [(1, 0.5), (2, 1.0), (4, 1.0)])
def test_a_pinned_artefact_on_fewer_cores_than_it_was_measured_on_takes_less(cores: int, share: float) -> None:
    """By four times too few replicas, if it is a quarter of the cores."""
    kube = Kube(optimization={"mode": "Pinned", "artefact": RESULT}, scaling={"minReplicas": 1}, cores=cores)
    kube.publish("earlier", RESULT)
    flat = {"requestsPerSecond": 80.0, "completedPerSecond": 80.0, "p95Milliseconds": 5.0}
    capacity = {"requestsPerSecond": 80.0, "p95ObjectiveMilliseconds": 20.0, "points": [flat]}
    kube.objects["OptimizedModel", "earlier"]["status"]["result"] = result(capacity=capacity).to_object()
    kube.reconcile()

    target = target_of(kube)

    assert target is not None
    assert target.service is not None
    assert target.service.total(1) == pytest.approx(80 * share)
    assert target.service.p95_of(40 * share, 1) == pytest.approx(5 / share)


def test_pods_that_serve_fp32_after_an_alarm_take_as_much_less_as_the_plan_was_faster() -> None:
    kube = Kube(optimization={"mode": "Pinned", "artefact": RESULT}, scaling={"minReplicas": 1, "maxReplicas": 4})
    kube.publish("earlier", RESULT)
    flat = {"requestsPerSecond": 80.0, "completedPerSecond": 80.0, "p95Milliseconds": 5.0}
    capacity = {"requestsPerSecond": 80.0, "p95ObjectiveMilliseconds": 20.0, "points": [flat]}
    made = result(capacity=capacity, speedUp=4.0)
    kube.objects["OptimizedModel", "earlier"]["status"]["result"] = made.to_object()
    kube.reconcile()
    kube.deployment["metadata"]["annotations"][FP32] = "true"

    target = target_of(kube)

    assert target is not None
    assert target.service is not None
    assert target.service.total(1) == pytest.approx(20)


def test_replicas_of_text_generation_have_the_capacity_in_tokens() -> None:
    pins = {"mode": "Pinned", "artefact": RESULT}
    kube = Kube(
        task="text-generation",
        optimization=pins,
        scaling={"mode": "Internal", "minReplicas": 1, "maxReplicas": 4},
    )
    kube.publish("earlier", RESULT)
    kube.objects["OptimizedModel", "earlier"]["status"]["result"] = token_result().to_object()
    kube.reconcile()

    target = target_of(kube)

    assert target is not None
    assert target.generates
    assert target.objective_seconds == 0.5
    assert target.service is not None
    assert target.service.tokens_per_request == pytest.approx(60)


def test_the_autoscaler_decides_within_what_the_quota_gave_the_endpoint() -> None:
    kube = Kube(scaling={"mode": "Internal", "minReplicas": 1, "maxReplicas": 4}).optimised()
    cache = ClusterCache(SETTINGS)
    for store, value in ((cache.endpoints, kube.endpoint), (cache.deployments, kube.deployment)):
        store.put({**value, "metadata": {**value["metadata"], "namespace": "a", "resourceVersion": "1"}})
    key, found = ObjectKey("a", kube.name), []
    for most in (None, 9, 2, 0):
        uid = kube.endpoint["metadata"]["uid"]
        cache.quotas.put(key, uid, None if most is None else Allocation(Amount(2, 1), most))
        target = ScalingTargets(cache).find(key)
        assert target is not None
        found.append((target.settings.max_replicas, target.settings.limited_by_quota))

    assert found == [(4, False), (4, False), (2, True), (1, True)]


def test_an_endpoint_on_inferentia_scales_by_the_provisional_capacity_and_then_by_what_its_pod_measured() -> None:
    """From one replica to two and back: as on CPUs, from the status of its OptimizedModel to the decision."""
    kube = on("inf2", 2, scaling={"mode": "Internal", "minReplicas": 1, "maxReplicas": 4})
    kube.reconcile()
    kube.job_succeeds(result(capacity=PROVISIONAL, pinned=None))
    kube.reconcile()
    kube.pods_serve()

    def replayed() -> Replay:
        target = target_of(kube, kube.endpoint["status"]["optimizedModel"])
        assert target is not None
        assert target.service is not None
        return Replay(target.settings, target.service)

    # One replica takes 200 requests/s by published figures, and 90 as measured.
    assert max(replayed().play(traffic(120, p95=9), 600)) == 1
    report_capacity(kube, facts=MEASURED)
    kube.reconcile()
    replay = replayed()
    assert replay.play(traffic(20, p95=9), 600)[-1] == 1
    assert replay.play(traffic(120, p95=9), 600)[-1] == 2
    assert replay.play(traffic(20, p95=9), 1800)[-1] == 1
    # The guard: answers are late although the curve predicts that they are not.
    assert replay.play(traffic(40, p95=900, good=0.02), 600)[-1] > 1
