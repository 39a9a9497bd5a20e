"""Decisions over a course of load, tick by tick. One replica handles 10 requests/s; headroom 0.75, window 300 s."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from penstock_operator.decide import Cause, Idle, Metrics, ScalingSettings, State, Unknown, Value
from penstock_operator.decide.settings import WhenMissing
from tests.operator.decide.cases import SETTINGS, TICK, Replay, flips, service, traffic, without

OUTAGE = Metrics.unknown("prometheus answered 503")


def test_a_step_scales_up_at_the_first_tick_that_shows_it() -> None:
    replay = Replay().settled(6)
    assert replay.replicas == 1

    decision = replay.tick(traffic(60))

    assert decision.cause is Cause.DEMAND
    assert decision.replicas == 5  # the step limit: at most 4 more at once
    assert replay.tick(traffic(60)).replicas >= 8


def test_surplus_replicas_of_a_surge_are_removed_before_they_have_started() -> None:
    """The height of a sudden rise is not known at once; replicas that have not started are removed when it is."""
    replay = Replay().settled(6)
    replay.ready = 1

    numbers = replay.play(traffic(60), 35)

    assert max(numbers) > 15
    # Nine for the demand; the others for the backlog that grows until they serve.
    assert 9 <= numbers[-1] <= 13
    assert replay.now - (replay.state.grown_at or 0) < 40
    replay.ready = None
    assert replay.play(traffic(60), 900)[-1] == 9


def test_a_fall_of_the_load_scales_down_in_steps_after_half_the_window() -> None:
    replay = Replay().settled(60)
    peak = replay.replicas
    least, interval = replay.settings.shrink_window_seconds / 2, replay.settings.shrink_interval_seconds
    begin, before = replay.now, peak

    steps = []
    while replay.now < begin + 900:
        if replay.tick(traffic(5.5)).replicas != before:
            steps.append((replay.now - begin, before, replay.replicas))
            before = replay.replicas

    assert least <= steps[0][0] <= least * 1.6
    assert all(after >= before - max(1, before // 2) for _, before, after in steps)
    assert all(later[0] - earlier[0] >= interval for earlier, later in pairwise(steps))
    assert replay.replicas == 1  # enough for 7.5, of which noise may use a quarter


@pytest.mark.parametrize(("strict", "earliest", "latest"), [(True, 300, 340), (False, 150, 240)])
def test_a_window_that_an_endpoint_sets_is_not_halved_while_the_load_falls(
    strict: bool, earliest: float, latest: float
) -> None:
    window = {"shrink_window_seconds": 300.0, "strict_window": strict}
    replay = Replay(SETTINGS.model_copy(update=window)).settled(60)
    begin, peak = replay.now, replay.replicas

    while replay.tick(traffic(7)).replicas == peak:
        assert replay.now < begin + 900

    assert earliest <= replay.now - begin <= latest


def test_a_load_that_dips_a_little_keeps_the_margin_between_growing_and_shrinking() -> None:
    replay = Replay().settled(10)
    assert replay.replicas == 2

    assert set(replay.play(traffic(9), 300) + replay.play(traffic(8), 300) + replay.play(traffic(7.1), 900)) == {2}
    assert replay.play(traffic(6.2), 1200)[-1] == 1


def test_a_ramp_is_scaled_ahead_of_the_load() -> None:
    """Each replica that the ramp needs was requested a start-up time before; the load doubles in 200 s."""
    replay = Replay().settled(20)
    slope, lead = 0.1, replay.settings.start_up_seconds

    numbers = replay.play(lambda seconds: traffic(20 + slope * seconds), 400)

    needed = [(20 + slope * (index * 5 + lead)) / 10 for index in range(len(numbers))]
    assert all(number >= load for number, load in zip(numbers, needed, strict=True))


def test_a_spike_changes_the_direction_once() -> None:
    replay = Replay().settled(15)
    before = replay.replicas

    numbers = [before, *replay.play(traffic(80), 120), *replay.play(traffic(15), 3000)]

    assert max(numbers) >= 11
    assert numbers[-1] <= before + 1
    assert flips(numbers) == 1


def test_a_daily_load_changes_the_direction_once_at_each_peak_and_trough() -> None:
    replay = Replay().settled(10)

    numbers = replay.play(lambda seconds: traffic(60 - 50 * math.cos(2 * math.pi * seconds / 14_400)), 28_800)

    assert flips(numbers) == 3
    assert max(numbers) >= 14


def test_an_outage_at_the_peak_does_not_scale_down_and_restarts_the_window() -> None:
    replay = Replay().settled(60)
    peak = replay.replicas

    during = replay.play(OUTAGE, 1200)
    assert set(during) == {peak}
    assert replay.decisions[-1].cause is Cause.UNKNOWN
    assert not replay.decisions[-1].metrics_available.status
    assert "prometheus answered 503 for 1195 s" in replay.decisions[-1].metrics_available.message

    after = replay.play(traffic(6), replay.settings.shrink_window_seconds)
    assert set(after) == {peak}
    assert replay.play(traffic(6), 1200)[-1] == 1


def test_a_falling_load_changes_the_direction_once_and_a_dip_removes_no_replica() -> None:
    falling, dipping = Replay().settled(80), Replay().settled(80)
    before = dipping.replicas

    course = falling.play(lambda since: traffic(max(10.0, 80 - since / 10)), 1800)

    for minute in range(4, 12):
        # Smoothing of half a minute, half a window of peaks, and one step per minute.
        a_while_ago = 80 - (60 * minute - 150) / 10
        assert course[int(60 * minute / TICK)] <= math.ceil(a_while_ago / SETTINGS.headroom / 10), minute
    assert flips([before, *course]) == 0
    assert set(dipping.play(traffic(72), 30) + dipping.play(traffic(80), 600)) == {before}


def test_a_short_outage_is_not_reported_and_does_not_restart_the_window() -> None:
    replay = Replay().settled(60)
    peak = replay.replicas
    replay.play(traffic(6), replay.settings.shrink_window_seconds / 2 - 20)

    replay.tick(OUTAGE)

    assert replay.decisions[-1].metrics_available.status
    assert replay.replicas == peak
    assert replay.play(traffic(6), 120)[-1] < peak


def test_a_long_outage_falls_back_upwards_only() -> None:
    settings = ScalingSettings(max_replicas=20, when_metrics_missing=WhenMissing.FALLBACK, fallback_replicas=5)

    few, many = Replay(settings).settled(6), Replay(settings).settled(60)
    peak = many.replicas

    assert few.play(OUTAGE, 55) == [1] * 11
    assert few.play(OUTAGE, 30)[-1] == 5
    assert "fall-back of 5" in next(d.reason for d in few.decisions if d.cause is Cause.FALLBACK)
    assert set(many.play(OUTAGE, 600)) == {peak}


@pytest.mark.parametrize("lost", ["arrivals_fast", "arrivals_slow", "in_flight", "good_share", "p95_milliseconds"])
def test_one_unknown_metric_forbids_a_scale_down_and_the_reason_names_it(lost: str) -> None:
    replay = Replay().settled(60)
    peak = replay.replicas

    numbers = replay.play(without(traffic(6), **{lost: Unknown("prometheus gave nan for it")}), 1200)

    assert set(numbers) == {peak}
    assert "prometheus gave nan for it" in replay.decisions[-1].reason


def test_one_known_rate_is_enough_to_scale_up() -> None:
    replay = Replay().settled(6)

    partly = without(OUTAGE, arrivals_slow=Value(35.0), coverage=1.0)

    assert replay.play(partly, 60)[-1] >= 5


def test_an_idle_endpoint_shrinks_to_its_minimum_and_to_zero_where_that_is_allowed() -> None:
    kept = Replay().settled(20)
    ended = Replay(ScalingSettings(min_replicas=0, max_replicas=5)).settled(20)

    assert kept.play(traffic(0), 1500)[-1] == 1
    assert ended.play(traffic(0), 1500)[-1] == 0
    assert ended.tick(Metrics(Idle(), Idle(), Value(3), Idle(), Idle())).replicas == 1  # held by the gateway


def test_a_partial_scrape_is_extrapolated_and_forbids_a_scale_down() -> None:
    replay = Replay().settled(40)
    before = replay.replicas

    half = without(traffic(10), coverage=0.5)
    assert set(replay.play(half, 900)) == {before}
    assert "50% of the ready replicas" in replay.decisions[-1].reason
    assert replay.decisions[-1].metrics_available.reason == "PartialScrape"

    assert replay.play(without(traffic(40), coverage=0.5), 120)[-1] >= 11


def test_surge_pods_of_a_rollout_are_no_reason_to_change() -> None:
    """Twice the pods with the same traffic; the work of starting raises p95."""
    replay = Replay().settled(40)
    before = replay.replicas
    replay.rolling_out, replay.ready = True, 2 * before

    assert set(replay.play(traffic(40, p95=900, good=0.5), 600)) == {before}
    assert set(replay.play(traffic(6), 900)) == {before}
    assert replay.decisions[-1].reason.count("rolled out") == 1
    assert replay.tick(traffic(100)).replicas > before


def test_a_backlog_asks_for_more_than_the_rate() -> None:
    calm, behind = Replay().settled(35), Replay().settled(35)

    calm.tick(traffic(35))
    behind.tick(traffic(35, in_flight=600))

    assert behind.replicas > calm.replicas
    assert "waiting to be worked off in" in behind.decisions[-1].reason


def test_late_answers_in_steady_state_add_one_replica_after_the_other() -> None:
    replay = Replay(SETTINGS.model_copy(update={"slowdown_most": 1.0})).settled(30)
    before = replay.replicas

    replay.play(traffic(30, good=0.8), 200)
    assert replay.replicas == before + 1
    assert any(decision.cause is Cause.GUARD for decision in replay.decisions)
    replay.play(traffic(30, good=0.8), 170)
    assert replay.replicas == before + 2


def test_replicas_slower_than_measured_are_noticed_and_more_are_asked_for() -> None:
    replay = Replay().settled(30)
    before = replay.replicas
    slow = service().p95_of(30, before, slowdown=1.4)

    replay.play(traffic(30, p95=slow, good=0.99), 600)

    assert replay.replicas > before
    assert replay.state.slowdown > 1.2
    assert "slower than measured" in replay.decisions[-1].reason


def test_a_curve_that_no_longer_holds_is_a_condition() -> None:
    replay = Replay(SETTINGS.model_copy(update={"max_replicas": 4})).settled(30)
    slow = service().p95_of(30, 4, slowdown=1.8)

    replay.play(traffic(30, p95=slow), 1200)

    condition = replay.decisions[-1].curve_current
    assert (condition.status, condition.reason) == (False, "SlowerThanMeasured")
    assert "optimise again" in condition.message


def test_replicas_faster_than_measured_remove_none() -> None:
    replay = Replay().settled(30)
    before = replay.replicas

    assert set(replay.play(traffic(30, p95=20), 1200)) == {before}


def test_a_p95_near_the_objective_forbids_a_scale_down() -> None:
    replay = Replay(SETTINGS.model_copy(update={"slowdown_most": 1.0})).settled(60)
    peak = replay.replicas

    assert set(replay.play(traffic(6, p95=195), 1200)) == {peak}
    assert "p95 is 195 ms" in replay.decisions[-1].reason


def test_a_scale_down_that_was_taken_back_makes_the_window_long_enough_and_time_shortens_it() -> None:
    replay = Replay().settled(10)
    pause = 400

    for bout in range(3):
        replay.play(traffic(60), 300)
        peak = replay.replicas
        numbers = replay.play(traffic(10), pause)
        # After the first pause the number rises again, which lengthens the window; the replicas stay during the others.
        assert (min(numbers) == replay.replicas == peak) == (bout > 0)

    assert replay.settings.shrink_window_seconds * replay.state.window_factor > pause
    for _ in range(1200):
        replay.tick(traffic(10), seconds=15)
    assert replay.state.window_factor == 1


def test_a_pause_longer_than_any_window_does_not_make_the_window_longer() -> None:
    replay = Replay().settled(60)
    longest = replay.settings.shrink_window_seconds * replay.settings.longest_window_factor

    replay.play(traffic(6), longest * 1.5)
    replay.play(traffic(60), 60)

    assert replay.state.window_factor == 1


def test_a_new_leader_without_state_holds_for_a_window() -> None:
    replay = Replay().settled(60)
    peak = replay.replicas
    replay.state = State()

    assert set(replay.play(traffic(6), replay.settings.shrink_window_seconds - 10)) == {peak}
    assert "has just begun to watch" in replay.decisions[-1].reason
    assert replay.play(traffic(6), 600)[-1] < peak


@pytest.mark.parametrize(
    ("jump", "words"), [(-3600, "the clock went back by"), (3600, "the load was not observed for 36")]
)
def test_a_clock_that_jumps_does_not_scale_down(jump: float, words: str) -> None:
    replay = Replay().settled(60)
    peak = replay.replicas
    replay.play(traffic(6), replay.settings.shrink_window_seconds / 2 - 20)

    replay.now += jump
    numbers = replay.play(traffic(6), replay.settings.shrink_window_seconds - 10)

    assert set(numbers) == {peak}
    assert words in replay.decisions[-1].reason


def test_leaders_may_have_clocks_that_differ_by_a_second() -> None:
    replay = Replay().settled(60)
    replay.play(traffic(6), 60)
    peaks = replay.state.peaks

    replay.tick(traffic(6), seconds=-1.0)

    assert replay.state.peaks[:-1] == peaks[:-1]


def test_changed_bounds_apply_at_once_with_and_without_metrics() -> None:
    replay = Replay(replicas=12)

    replay.settings = SETTINGS.model_copy(update={"max_replicas": 5})
    assert replay.tick(OUTAGE).replicas == 5
    replay.settings = SETTINGS.model_copy(update={"min_replicas": 7})
    decision = replay.tick(traffic(10))

    assert (decision.replicas, decision.cause) == (7, Cause.BOUNDS)
    assert "minReplicas is 7" in decision.reason


def test_the_sentence_names_the_quota_where_it_limits_the_number() -> None:
    replay = Replay(replicas=2)
    replay.settings = SETTINGS.model_copy(update={"max_replicas": 2, "limited_by_quota": True})
    decision = replay.tick(traffic(60))

    assert (decision.replicas, decision.cause) == (2, Cause.MAXIMUM)
    assert "are wanted, the quota of the namespace allows 2" in decision.reason


def test_at_the_maximum_the_sentence_has_the_wanted_number() -> None:
    replay = Replay(SETTINGS.model_copy(update={"max_replicas": 3}))

    replay.play(traffic(60), 60)

    assert replay.decisions[-1].cause is Cause.MAXIMUM
    assert "8 are wanted, maxReplicas is 3" in replay.decisions[-1].reason


def test_without_a_curve_the_number_stays() -> None:
    replay = Replay(service=None, replicas=3)

    assert set(replay.play(traffic(500), 300)) == {3}
    assert replay.decisions[-1].cause is Cause.NO_CURVE
    assert not replay.decisions[-1].curve_current.status
    assert "was not measured" in replay.decisions[-1].reason


def test_the_status_stays_small() -> None:
    replay = Replay().settled(60)
    replay.play(traffic(6), 400)

    assert len(replay.state.model_dump_json(by_alias=True, exclude_defaults=True)) < 1000


def test_replicas_for_a_backlog_are_removed_when_it_is_gone() -> None:
    """Late answers of earlier requests do not keep the replicas: no later demand needed them."""
    replay = Replay().settled(10)
    replay.play(traffic(10), 300)
    late = traffic(40, in_flight=600, p95=3000, good=0.5)
    for _ in range(6):
        replay.ready = replay.ready or replay.replicas
        replay.tick(late)
    precaution = replay.replicas
    replay.ready = None

    replay.play(traffic(40, p95=3000, good=0.5), 20)

    assert replay.replicas < precaution
    assert replay.replicas * 10 >= 40 / 0.75
    assert replay.state.shrinking_since is None, "growing again does not lengthen the window"
