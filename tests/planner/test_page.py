"""A comparison as a table, JSON, CSV and HTML."""

from __future__ import annotations

import csv
import html.parser
import io
import json
from dataclasses import replace

import pytest

from penstock.hardware import NOT_RUN
from penstock_planner.compare import HardwareComparison, Offer, compare
from penstock_planner.evidence import Origin
from penstock_planner.offers import offers
from penstock_planner.page import COLUMNS, caveats, cells, csv_text, headline, heads, html_page, json_text, unjudged
from tests.planner.cases import LOAD, offer
from tests.planner.test_offers import inputs


def everything() -> HardwareComparison:
    own = [offer("icelake"), offer("zen4", per_hour=2.0, origin=Origin.ESTIMATED, error=0.4)]
    others = offers(inputs(), ["inf2", "gpu-t4", "gpu-l4"], [1])
    return compare([*own, *others, Offer("<zen5>", 1, problem="no <figures>")], LOAD, notes=("prices & sources",))


class Balanced(html.parser.HTMLParser):
    """Fails at tags that are not closed in order."""

    VOID = frozenset({"meta", "link", "br", "line", "circle", "polygon", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_csv_has_a_line_for_each_row_with_all_columns() -> None:
    comparison = everything()

    rows = list(csv.DictReader(io.StringIO(csv_text(comparison))))

    assert len(rows) == len(comparison.rows)
    assert tuple(rows[0]) == COLUMNS
    for row, one in zip(rows, comparison.rows, strict=True):
        assert row["why"] == one.why
        assert bool(row["reserved_per_month"]) is (one.sizing is not None)
        if one.sizing is not None:
            low, high = float(row["reserved_per_month_low"]), float(row["reserved_per_month_high"])
            assert low <= float(row["reserved_per_month"]) <= high


def test_json_has_the_figures_their_origin_and_the_choice() -> None:
    comparison = everything()

    value = json.loads(json_text(comparison))

    assert value["load"]["mean_requests_per_second"] == 200
    chosen = value["rows"][value["chosen"]]
    assert comparison.best is not None
    assert comparison.best.sizing is not None
    assert chosen["hardware_class"] == comparison.best.offer.hardware_class
    assert chosen["figures"]["replicas_peak"] == comparison.best.sizing.replicas_peak
    assert {row["evidence"]["origin"] for row in value["rows"] if row["evidence"]} >= {"published", "estimated"}


def test_the_page_is_whole_escaped_and_draws_each_row() -> None:
    comparison = everything()
    page = html_page(comparison, title="a <title>")

    parser = Balanced()
    parser.feed(page)

    assert parser.open == []
    text = "".join(parser.text)
    assert "<zen5>, 1 core: no <figures>" in text
    assert "a <title>" in text
    assert "<script" not in page
    assert "http-equiv" not in page
    assert page.count('class="mark ') == sum(row.sizing is not None for row in comparison.rows)


@pytest.mark.parametrize("form", [csv_text, json_text, lambda comparison: html_page(comparison, title="t"), headline])
def test_each_form_states_that_inferentia_was_not_run(form: object) -> None:
    comparison = compare(offers(inputs(), ["inf2"], [1], chosen=["inf2"]), LOAD)

    assert callable(form)
    assert NOT_RUN in form(comparison)
    assert NOT_RUN in " ".join(cells(comparison.rows[0]))
    assert any(NOT_RUN in text for text in caveats(comparison))


def test_cells_fit_their_heads_and_show_the_interval() -> None:
    comparison = everything()

    assert {len(cells(row)) for row in comparison.rows} == {len(heads(comparison))}
    zen4 = next(row for row in comparison.rows if row.offer.hardware_class == "zen4")
    assert cells(zen4)[6] == "5,840 (4,380 to 14,600)"


def test_every_form_has_the_currency() -> None:
    euros = compare([offer("icelake")], LOAD, currency="EUR")

    assert json.loads(json_text(euros))["currency"] == "EUR"
    assert next(csv.DictReader(io.StringIO(csv_text(euros))))["currency"] == "EUR"
    assert "EUR " in headline(euros)
    for text in (headline(euros), html_page(euros, title="t"), *heads(euros)):
        assert "$" not in text
    assert "$/M used" in heads(everything())


def test_offers_without_figures_are_grouped_by_reason() -> None:
    known = unjudged(everything())

    assert "<zen5>, 1 core: no <figures>" in known
    assert any(text.startswith("gpu-l4, 1 core: nothing is known") for text in known)


def test_the_headline_names_the_nearest_answer() -> None:
    late = compare([offer()], replace(LOAD, p95_milliseconds=5))

    assert headline(late).startswith(
        "Nothing meets the objective (200 requests/s, 800 at the peak, p95 within 5 ms); near"
    )
    assert late.best is None


def test_an_empty_comparison_has_a_page() -> None:
    page = html_page(compare([], LOAD), title="t")

    assert "nothing can be judged" in page
    assert "<svg" not in page
