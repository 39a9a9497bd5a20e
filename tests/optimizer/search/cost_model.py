"""A simulated machine: latency and throughput of a plan by a formula, with noise."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from penstock.recipe import Batching, EngineName, Plan, Precision, Recipe
from penstock_optimizer.search.climb import PlanFailed
from penstock_optimizer.search.goal import PlanSample

FP32 = Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.FP32)
INT8 = Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.INT8_DYNAMIC, options=("per-channel",))
STATIC = Recipe(engine=EngineName.OPENVINO, precision=Precision.INT8_STATIC)


@dataclass
class CostModel:
    """Measures plans by formula, and counts calls."""

    speed: dict[Recipe, float] = field(default_factory=lambda: {FP32: 1.0, INT8: 2.0, STATIC: 1.8})
    short_speed: dict[Recipe, float] = field(default_factory=dict)
    """Speed at 8 and 16 tokens, where it differs."""
    routed_rate: float = 1.0
    """Factor on the requests/s of plans with a second graph."""
    noise: float = 0.0
    drift: float = 0.0
    """Relative slow-down with every measurement: a machine that gets busier."""
    broken: frozenset[Plan] = frozenset()
    seed: int = 0
    measured: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def true_sample(self, plan: Plan) -> PlanSample:
        """The result without noise."""
        speed = self.speed[plan.recipe]
        wide_from = plan.alone_wide_from
        wide = wide_from is not None
        # Wide runs are faster from 64 tokens on, and slower below.
        reach = plan.streams * plan.threads_per_stream if wide else plan.threads_per_stream
        p95 = 30.0 / speed / (1 + 0.8 * (reach - 1))
        small_wide = wide_from is not None and wide_from < 64
        p50 = 5.0 / speed / (1 + 0.3 * (plan.threads_per_stream - 1)) * (1.1 if small_wide else 1.0)
        rows = 100.0 * speed * plan.streams * (1 + 0.7 * (plan.threads_per_stream - 1))
        if plan.batching is Batching.PADDED:
            # Best near 15 % padding and 8 rows.
            rows *= 1.2 - abs(plan.max_padding_share - 0.15) - 0.01 * abs(plan.max_batch_rows - 8)
        short = plan.short.recipe if plan.short is not None else plan.recipe
        return PlanSample(
            p50_milliseconds=p50,
            p95_milliseconds=p95,
            requests_per_second=rows * (self.routed_rate if plan.short is not None else 1.0),
            loaded_p95_milliseconds=p95 * 2,
            short_milliseconds={tokens: tokens / 8 / self.short_speed.get(short, speed) for tokens in (8, 16)},
            second_graph_bytes=40_000_000 if plan.short is not None else None,
        )

    def __call__(self, plan: Plan) -> PlanSample:
        """One noisy measurement."""
        if plan in self.broken:
            raise PlanFailed("killed by signal 11", plan)
        self.measured.append(plan)
        true = self.true_sample(plan)
        slow = (1 + self.drift) ** len(self.measured)

        def factor() -> float:
            return max(0.2, self._random.gauss(1.0, self.noise)) if self.noise else 1.0

        return PlanSample(
            p50_milliseconds=true.p50_milliseconds * factor() * slow,
            p95_milliseconds=true.p95_milliseconds * factor() * slow,
            requests_per_second=true.requests_per_second / factor() / slow,
            loaded_p95_milliseconds=(true.loaded_p95_milliseconds or 1.0) * factor() * slow,
            short_milliseconds={tokens: ms * factor() * slow for tokens, ms in true.short_milliseconds.items()},
            second_graph_bytes=true.second_graph_bytes,
        )
