"""Text generation in the simulator: service times follow output tokens, lateness the first token."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.capacity import TokenCurve, TokenPoint
from penstock.errors import SettingError
from penstock_operator.decide import Service
from penstock_simulator.choices import Dispatch, PolicyKind
from penstock_simulator.compare import Traffic, simulate
from penstock_simulator.fleet import Fleet, FleetSettings, ReplicaModel
from penstock_simulator.policies import Endpoint, Limits, make_policy
from penstock_simulator.traces import Trace, built_in

POINTS = [(1, 60.0, 100.0), (2, 110.0, 150.0), (4, 190.0, 220.0), (8, 300.0, 400.0), (16, 360.0, 900.0)]
LENGTHS = ((100, 30), (100, 60), (100, 90))


def curve() -> TokenCurve:
    points = [
        TokenPoint(
            clients=clients,
            requests_per_second=tokens / 60,
            tokens_per_second=tokens,
            first_token_p95_milliseconds=first,
            next_token_p95_milliseconds=20,
            samples=20,
        )
        for clients, tokens, first in POINTS
    ]
    return TokenCurve.of(points, first_token=500, next_token=None, lengths=LENGTHS)


MODEL = ReplicaModel.from_tokens(curve())


def test_the_queue_has_a_server_for_each_client_within_the_objective() -> None:
    assert MODEL.servers == 8
    assert MODEL.saturation == pytest.approx(5)
    assert MODEL.first_token_seconds == 0.1


def test_without_points_there_is_no_queue() -> None:
    with pytest.raises(SettingError, match="no points"):
        ReplicaModel.from_tokens(TokenCurve())


def test_service_times_are_proportional_to_output_tokens() -> None:
    times = MODEL.service_seconds(np.random.default_rng(0), 3000)
    assert set(np.round(times, 9)) == {0.8, 1.6, 2.4}
    assert times.mean() == pytest.approx(1.6, rel=0.05)


@pytest.mark.parametrize("dispatch", [Dispatch.LEAST_OUTSTANDING, Dispatch.GATEWAY_QUEUE])
def test_lateness_counts_to_the_first_token_and_a_server_is_busy_to_the_last(dispatch: Dispatch) -> None:
    model = ReplicaModel(servers=1, mean_service_seconds=2, sigma=0, first_token_seconds=0.25)
    fleet = Fleet(model, FleetSettings(dispatch=dispatch, start_up_seconds=0))
    fleet.resize(1, 0.0)
    fleet.activate(0.0)
    fleet.advance([1.0, 1.5], [2.0, 2.0], 10.0)
    ended = [(when, round(latency, 6)) for when, _, latency in fleet.take_log()]
    # The second waits until 3.0, when the first has its last token.
    assert ended == [(3.0, 0.25), (5.0, 1.75)]


@pytest.mark.parametrize("name", ["step", "spike"])
def test_our_policy_follows_the_traces_and_few_first_tokens_are_late(name: str) -> None:
    service = Service.from_tokens(curve())
    assert service is not None
    trace: Trace = built_in(name, service.rate, seed=1)
    endpoint = Endpoint(service, MODEL, Limits(1, 24))
    result = simulate(
        Traffic.of(trace, endpoint, seed=1),
        endpoint,
        make_policy(PolicyKind.PENSTOCK, endpoint, 0.75),
        FleetSettings(start_up_seconds=40),
        scrape_interval=2,
    )
    assert result.late / result.requests < 0.06
    assert max(result.replicas) >= float(trace.rates.max()) / service.rate
    # With a quarter of headroom at each moment, and twice that for noise, surges and windows.
    needed = float(trace.rates.sum()) / 3600 / (0.75 * service.rate)
    assert result.replica_hours < 2 * needed
