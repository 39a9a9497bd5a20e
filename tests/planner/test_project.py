"""The project's own measurements: each figure is in the documents, and each becomes evidence with its source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock_planner.evidence import Origin
from penstock_planner.project import project

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = (DOCS / "reference" / "figures.md").read_text(encoding="utf-8")
GENERATION = (DOCS / "lab" / "native-generation.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("index", range(3))
def test_each_closed_loop_is_in_the_tables(index: int) -> None:
    one = project().closed_loops[index]
    rows = [line for line in FIGURES.splitlines() if line.startswith("| Penstock |")]

    for part in ([*one["one"].values()], [*one["many"].values(), one["mixed"]]):
        cells = [rf"\| {rate:,} \({p95:g}\) \|" for rate, p95 in part]
        assert any(all(re.search(cell, row) for cell in cells) for row in rows), cells


def test_each_figure_of_text_generation_is_in_the_table() -> None:
    for one in project().generation:
        for clients, first, following, rate in one["points"]:
            assert f"| native-int8 | 128 | {clients} | {first} | {following} | {rate} |" in GENERATION


def test_the_encoders_of_the_published_target_are_known_out_of_the_box() -> None:
    for family, model in (("distilbert", "d"), ("bert-base", "b"), ("minilm-l6", "m")):
        found = project().evidence(family, 128, model, 100)
        assert {one.origin for one in found} == {Origin.MEASURED_BY_PROJECT}
        assert "sapphirerapids" in {one.hardware_class for one in found}
        assert all(one.basis.startswith("measured by the project: ") for one in found)
        assert all("a lower bound" in one.caveats[-1] for one in found)


def test_a_longer_text_is_never_faster() -> None:
    by_length = [project().evidence("minilm-l6", tokens, "", 100) for tokens in (8, 32, 64, 128, 256, 512, 4096)]
    for processor in range(3):
        rates = [found[processor].curve.points[-1].completed_per_second for found in by_length[1:]]
        assert rates == sorted(rates, reverse=True)


def test_a_decoder_is_found_by_its_name() -> None:
    found = project().evidence("", 128, "hf://HuggingFaceTB/SmolLM2-135M-Instruct@main", 1000)

    assert {one.hardware_class for one in found} == {"sapphirerapids", "zen4-full-cores"}
    assert all(one.tokens_per_request == 64 and one.curve.rate_within(1000) for one in found)
    assert project().evidence("", 128, "hf://org/other@main", 1000) == ()
