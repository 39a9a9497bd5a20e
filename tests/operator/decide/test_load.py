"""`replicas_for_load` is what the autoscaler settles at: plans of hardware take it for their replicas."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_operator.decide import ScalingSettings, replicas_for_load
from tests.examples import examples
from tests.operator.decide.cases import Replay, service, traffic


@settings(max_examples=examples(60), deadline=None)
@given(st.floats(0.5, 900), st.floats(0.4, 0.95), st.booleans())
def test_the_autoscaler_asks_for_as_many_replicas_at_a_steady_load(rate: float, headroom: float, pooled: bool) -> None:
    chosen = ScalingSettings(min_replicas=1, max_replicas=1000, headroom=headroom, grow_factor=1000)
    replay = Replay(chosen, service(pooled=pooled))

    for _ in range(80):
        decided = replay.tick(traffic(rate), seconds=15).wanted

    assert decided == replicas_for_load(service(pooled=pooled), rate, headroom)


def test_no_load_needs_no_replica_and_any_load_needs_one() -> None:
    assert replicas_for_load(service(), 0, 0.75) == 0
    assert replicas_for_load(service(), 1e-6, 0.75) == 1
