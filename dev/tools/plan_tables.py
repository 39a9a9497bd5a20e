"""The tables of docs/lab/plan-intervals.md, generated from the project's measurements and from the published rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock_optimizer.neuron.plans import FITTED_TOKENS
from penstock_optimizer.neuron.published import published_rows, shape_of
from penstock_planner.processors import ClassRatio, LeftOut, leave_one_out
from penstock_planner.project import project


def left_out_table(kind: Callable[[LeftOut], ClassRatio | None]) -> str:
    """A row for each ordered pair of processors, a column for each load: the measured ratio and its interval."""
    found = leave_one_out(project().loads)
    names = list(dict.fromkeys(one.load.name for one in found))
    rows = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for target, source in dict.fromkeys((one.target, one.source) for one in found):
        cells = {one.load.name: _cell(one, kind(one)) for one in found if (one.target, one.source) == (target, source)}
        rows.append(f"| {target} / {source} | {' | '.join(cells[name] for name in names)} |")
    judged = [(ratio.outside(one.measured), one) for one in found if (ratio := kind(one)) is not None]
    inside = sum(outside == 1 for outside, _ in judged)
    worst = max(outside for outside, _ in judged)
    return "\n".join([*rows, "", f"{inside} of {len(judged)} within; the worst is outside by a factor of {worst:.2f}."])


def _cell(one: LeftOut, ratio: ClassRatio | None) -> str:
    if ratio is None:
        return f"{one.measured:.2f}"
    text = f"{one.measured:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return text if ratio.outside(one.measured) == 1 else f"**{text}**"


def fitted_rows() -> list[tuple[str, float, float, float]]:
    """Published rows of one Inf2 device: family, block weights, operations of a batch, milliseconds of a batch."""
    return [
        (
            shape.family, shape.block_weights, shape.operations(FITTED_TOKENS) * row.batch,
            2 * row.batch / row.per_second * 1e3,
        )
        for row in published_rows()
        if row.instance == "inf2.xlarge" and row.tokens == FITTED_TOKENS and not row.is_anomalous
        and (shape := shape_of(row.model)) is not None
    ]  # fmt: skip


def inf2_fit(without: str = "") -> tuple[float, float, float]:
    """a, b and c of `a + b * weights + c * operations`: least relative squares, without one family."""
    kept = [row for row in fitted_rows() if row[0] != without]
    made = np.array([[1, weights, operations] for _, weights, operations, _ in kept])
    times = np.array([time for *_, time in kept])
    a, b, c = np.linalg.lstsq(made / times[:, None], np.ones(len(kept)), rcond=None)[0]
    return float(a), float(b), float(c)


def inf2_errors() -> dict[str, tuple[float, float]]:
    """For each family the lowest and highest relative error of its rows' times, fitted without them."""
    found = {}
    for family in sorted({row[0] for row in fitted_rows()}):
        a, b, c = inf2_fit(without=family)
        errors = [(a + b * row[1] + c * row[2]) / row[3] - 1 for row in fitted_rows() if row[0] == family]
        found[family] = (min(errors), max(errors))
    return found


def inf2_table() -> str:
    """A row for each family that is left out."""
    rows = ["| Left out | Rows | a, ms | Error of the time |", "|---|---|---|---|"]
    for family, (low, high) in inf2_errors().items():
        count = sum(row[0] == family for row in fitted_rows())
        rows.append(f"| {family} | {count} | {inf2_fit(without=family)[0]:.3f} | {low:+.0%} to {high:+.0%} |")
    return "\n".join(rows)


LAB = "docs/lab/plan-intervals.md"
PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "left-out-arithmetic": (LAB, lambda: left_out_table(lambda one: one.arithmetic)),
    "left-out-tables": (LAB, lambda: left_out_table(lambda one: one.tables)),
    "left-out-inf2": (LAB, inf2_table),
}
"""Name of the part -> document and the function that generates it."""
