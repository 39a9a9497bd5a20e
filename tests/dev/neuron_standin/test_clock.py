"""Simulated: the stand-in's times agree with published rows within the bounds that they are documented with."""

from __future__ import annotations

import pytest

from neuron_standin.clock import Work, saturated
from penstock_optimizer.neuron.published import Mode, PublishedFigure, published_rows, shape_of


def _simulated(row: PublishedFigure) -> float:
    cores = row.instance_cores
    work = Work(row.batch)
    return saturated(row.hardware_class, work, cores=cores, cores_per_model=row.cores_per_model).per_second


def _rows(hardware_class: str, source_kind: str) -> list[PublishedFigure]:
    return [
        row
        for row in published_rows()
        if row.hardware_class == hardware_class
        and row.source_kind == source_kind
        and row.tokens == 128
        and row.uses_the_whole_instance
        and (family := shape_of(row.model)) is not None
        and family.family == "bert-base"
    ]


INF1 = _rows("inf1", "aws-blog-2021")


@pytest.mark.parametrize("row", INF1, ids=lambda row: f"{row.instance}-{row.mode}-{row.batch}")
def test_simulated_throughput_of_inf1_is_within_15_percent(row: PublishedFigure) -> None:
    assert _simulated(row) == pytest.approx(row.per_second, rel=0.15)


def test_all_eight_rows_of_inf1_are_simulated() -> None:
    assert len(INF1) == 8
    assert {row.mode for row in INF1} == {Mode.DATA_PARALLEL, Mode.PIPELINE}


def test_simulated_throughput_of_inf2_is_within_7_percent() -> None:
    names = ("bert-base-uncased", "roberta-base")
    rows = [row for row in _rows("inf2", "aws-neuron-sdk") if row.instance == "inf2.xlarge" and row.model in names]
    assert len(rows) >= 8
    off = {f"{row.model} {row.batch} {row.software}": _simulated(row) / row.per_second - 1 for row in rows}
    assert {name: error for name, error in off.items() if abs(error) > 0.07} == {}


def test_latency_of_a_pipeline_counts_the_batches_in_it() -> None:
    # Published p95: 13.8 ms for four batches over 4 cores, 6.9 ms for twelve over 16.
    for cores, milliseconds in ((4, 13.8), (16, 6.9)):
        found = saturated("inf1", Work(1), cores=cores, cores_per_model=cores)
        assert found.latency_milliseconds == pytest.approx(milliseconds, rel=0.05)
    with pytest.raises(ValueError, match="no published times for a pipeline over 8 cores"):
        saturated("inf1", Work(1), cores=8, cores_per_model=8)
