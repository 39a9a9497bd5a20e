"""Traces as users bring them: six kinds of some forty minutes, a figure a minute, drawn at random."""

from __future__ import annotations

import math
import os
import random
from itertools import pairwise

import numpy as np
import pytest

from penstock_operator.decide import Service
from penstock_simulator.choices import PolicyKind
from penstock_simulator.compare import Experiment, compare, judge, together
from penstock_simulator.fleet import MODEL, reference_curve
from penstock_simulator.traces import Trace

TRACES = 12
"""Two of each kind; the figures of docs/decisions/autoscaler.md are of the first 24."""
KNOBS = {
    PolicyKind.PENSTOCK: (0.6, 0.65, 0.7, 0.82),
    PolicyKind.HPA_P95: (0.55, 0.7, 0.9, 1.2),
    PolicyKind.HPA_IN_FLIGHT: (0.6, 0.85, 1.15, 1.5),
    PolicyKind.KEDA: (0.5, 0.6, 0.7, 0.8),
    PolicyKind.KPA: (0.45, 0.65, 0.8, 0.95, 1.1),
}


def invented(seed: int) -> Trace:
    """Requests/s for the reference endpoint, of which one replica takes ten."""
    draw = random.Random(seed)
    low, high = draw.uniform(1, 12), draw.uniform(18, 60)
    minutes: list[float] = []
    match seed % 6:
        case 0:
            kind = "stairs"
            for _ in range(8):
                minutes += [draw.uniform(low, high)] * 5
        case 1:
            kind = "minutes"
            minutes = [draw.uniform(low, high) for _ in range(40)]
        case 2:
            kind = "bursts"
            minutes = [high if minute % draw.choice((7, 8)) == 5 else low for minute in range(45)]
        case 3:
            kind = "office"
            hours = [math.exp(-(((m - 14) / 5) ** 2) / 2) + math.exp(-(((m - 30) / 6) ** 2) / 2) for m in range(45)]
            minutes = [low + high * share for share in hours]
        case 4:
            kind = "batch"
            minutes = [low] * 10 + [high] * 8 + [low] * 12 + [high * 0.7] * 8 + [low] * 7
        case _:
            kind, level = "walk", low + high / 3
            for _ in range(45):
                level = min(high, max(low, level * math.exp(draw.gauss(0, 0.25))))
                minutes.append(level)
    changes = sum(one != other for one, other in pairwise(minutes))
    return Trace(f"{kind}-{seed}", "drawn at random", np.repeat(np.array(minutes), 60), changes)


@pytest.mark.extended
def test_with_one_setting_for_all_traces_fewer_requests_are_late() -> None:
    """Of a single one a rival with a knob chosen in hindsight may have fewer; that setting is not known beforehand."""
    service = Service.from_curve(reference_curve(), pooled=True)
    assert service is not None
    traces = tuple(invented(seed) for seed in range(TRACES))
    experiment = Experiment(service=service, model=MODEL, traces=traces, policies=tuple(KNOBS), knobs=KNOBS, seeds=(1,))

    points = together(list(compare(experiment, workers=min(4, os.cpu_count() or 1))))

    ours = next(point for point in points if point.kind is PolicyKind.PENSTOCK and point.knob == 0.75)
    for rival in set(KNOBS) - {PolicyKind.PENSTOCK}:
        verdict = judge(ours, points, rival)
        assert verdict is not None
        assert verdict.fewer, verdict
        assert verdict.over is None or verdict.over.ahead == 1, verdict
