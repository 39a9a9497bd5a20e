"""A queue that behaves as the measured replica does."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.capacity import CapacityCurve, CapacityPoint
from penstock.errors import SettingError
from penstock_simulator.fleet import MODEL, RATES, ReplicaModel, measured, reference_curve

MINILM = (
    (30.0, 30.0, 10.6, 24.7), (48.0, 48.0, 13.0, 36.6), (76.8, 76.0, 17.0, 39.7), (122.9, 120.5, 20.0, 49.4),
    (155.4, 154.5, 18.6, 45.6), (164.8, 163.0, 23.5, 54.5), (174.8, 177.0, 28.6, 69.4), (196.6, 195.0, 22.1, 53.7),
)  # fmt: skip
"""A measured curve: MiniLM on two cores that were not ours alone (arrivals/s, answers/s, p50, p95)."""


def curve(rows: tuple[tuple[float, float, float, float], ...]) -> CapacityCurve:
    return CapacityCurve(
        points=tuple(
            CapacityPoint(
                arrivals_per_second=rate, completed_per_second=done, p50_milliseconds=p50, p95_milliseconds=p95,
                p99_milliseconds=p95 * 1.3, samples=200,
            )
            for rate, done, p50, p95 in rows
        ),
        p95_objective_milliseconds=50,
    )  # fmt: skip


def test_the_fit_finds_the_queue_that_a_curve_was_measured_on() -> None:
    found = ReplicaModel.from_curve(reference_curve())

    assert found.servers == MODEL.servers
    assert found.saturation == pytest.approx(MODEL.saturation, rel=0.05)
    assert found.mean_service_seconds + found.fixed_seconds == pytest.approx(0.155, rel=0.05)


def test_the_fit_of_a_noisy_measurement_is_within_a_factor_of_two_at_each_point() -> None:
    """Its points scatter by that much among themselves."""
    rows = curve(MINILM)
    found = ReplicaModel.from_curve(rows)

    again = measured(found, [row[0] for row in MINILM], p95_objective_milliseconds=50)

    ratios = [
        ours.p95_milliseconds / theirs.p95_milliseconds for ours, theirs in zip(again.points, rows.points, strict=True)
    ]
    assert found.servers == 2
    assert max(ratios) < 2
    assert min(ratios) > 0.5
    assert float(np.exp(np.mean(np.abs(np.log(ratios))))) < 1.6


def test_the_reference_meets_its_objective_up_to_about_ten_requests_per_second() -> None:
    found = reference_curve()

    assert found.requests_per_second == pytest.approx(10.3, abs=0.3)
    assert not found.points[-1].meets(600)
    assert [round(point.arrivals_per_second, 1) for point in found.points] == RATES


def test_a_curve_without_points_is_an_error_with_a_remedy() -> None:
    with pytest.raises(SettingError, match=r"no points\. Give an artefact"):
        ReplicaModel.from_curve(CapacityCurve())
