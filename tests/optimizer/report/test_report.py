"""The report: its contents, and that a real browser shows it without any request."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.capacity import CapacityCurve, TokenCurve, TokenPoint
from penstock.manifest import CandidateFacts, GenerationSpeed, Manifest, Outcome, ReasonCode, ServedGraph, ServedModel
from penstock.recipe import Batching, ShortRoute
from penstock.resources.result import Result
from penstock_bench.report import render as render_bench
from penstock_optimizer.report.view import (
    agreement_chart,
    capacity_chart,
    gemm_chart,
    headline,
    length_rows,
    plan_text,
    render_report,
    series,
    tiles,
    why,
)
from penstock_report.charts import latency_chart
from tests.bench.results_sample import sample_results
from tests.optimizer.report.sample import FP32, FP32_PLAN, IO, PLAN, latency, sample_manifest
from tests.runtime.http.browser import browser

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)


def changed(**changes: object) -> Manifest:
    return Manifest.model_validate({**dict(sample_manifest()), **changes})


def bare() -> Manifest:
    """A manifest of mode Off: the fp32 graph, nothing measured."""
    sample = sample_manifest()
    reference = sample.candidates[0].model_copy(update={"outcome": Outcome.CHOSEN, "latency": ()})
    return changed(
        candidates=(reference,),
        chosen=sample.baseline,
        capacity=CapacityCurve(),
        gemm=(),
        speed_up={},
        trials=(),
        findings=(),
    )


def routed() -> Manifest:
    """Short rows on a graph of their own."""
    sample = sample_manifest()
    static = sample.candidates[2]
    short = ShortRoute(longest_tokens=16, recipe=static.recipe, batching=Batching.PADDED, max_batch_rows=8)
    chosen = ServedModel(
        path=sample.chosen.path,
        io=IO,
        plan=PLAN.model_copy(update={"short": short}),
        short=ServedGraph(path=f"model/{static.recipe.slug}/model.onnx", io=IO),
    )
    faster = static.model_copy(update={"latency": latency(0.3)})
    return changed(chosen=chosen, candidates=(*sample.candidates[:2], faster, *sample.candidates[3:]))


def test_a_route_is_in_the_headline_the_plan_and_the_times_of_its_lengths() -> None:
    manifest = routed()
    plan = manifest.chosen.plan
    assert plan.short is not None

    name = plan.short.recipe.name
    assert headline(manifest).endswith(f"rows of up to 16 tokens by {name}.")
    assert plan_text(plan) == (
        f"{PLAN.summary}, one row a run, all cores from 64 tokens; "
        f"up to 16 tokens {name}, padded up to 8 rows / 512 tokens"
    )
    assert [row.speed_up for row in length_rows(manifest)][:3] == ["3.33×", "3.33×", "2.08×"]
    assert html.escape(plan_text(plan)) in render_report(manifest)


def test_the_result_in_a_status_has_the_times_of_short_rows_from_the_recipe_that_serves_them() -> None:
    manifest = routed()
    plain = manifest.model_copy(update={"chosen": sample_manifest().chosen})
    before, after = Result.of(plain), Result.of(manifest)
    assert manifest.chosen.plan.short is not None

    name = manifest.chosen.plan.short.recipe.name
    assert after.plan.summary.endswith(f"; up to 16 tokens {name}")
    assert [new.tokens for old, new in zip(before.latency, after.latency, strict=True) if old != new] == [8, 16]
    assert {one.recipe for one in before.rejected} - {one.recipe for one in after.rejected} == {name}


def test_the_first_lines_have_the_choice_and_its_reason() -> None:
    manifest = sample_manifest()

    assert headline(manifest) == (
        "onnxruntime-int8-dynamic-per-channel is served on 2 cores of AMD EPYC 7763 64-Core Processor (avx2)."
    )
    assert why(manifest) == (
        "Fastest within the accuracy budget: single-request latency 1.8 times that of fp32. "
        "Of the other candidates: 3 slower, 1 outside the accuracy budget, 1 failed, 1 not tried."
    )
    assert [(tile.figure, tile.meaning) for tile in tiles(manifest)] == [
        ("2.1×", "as fast as fp32 at 32 tokens"),
        ("2.1×", "as fast as fp32 at 128 tokens"),
        ("0.9901", "min cosine to fp32 (budget 0.985)"),
        ("84.9/s", "requests within p95 50 ms, one replica over HTTP"),
    ]


SLOWER, REJECTED, FAILED, SKIPPED = Outcome.SLOWER, Outcome.REJECTED, Outcome.FAILED, Outcome.SKIPPED


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ((SLOWER, REJECTED, FAILED, SKIPPED), "no candidate within the accuracy budget beats fp32 beyond the noise"),
        ((REJECTED, REJECTED, SKIPPED), "no other candidate is within the accuracy budget"),
        ((FAILED, SKIPPED), "every other candidate failed"),
        ((FAILED, REJECTED), "every other candidate failed or is outside the accuracy budget"),
        ((SKIPPED, SKIPPED), "no other candidate was tried"),
        ((), "no other candidate was tried"),  # mode Disabled, and the artefact of before the search
    ],
)
def test_fp32_as_the_winner_is_stated_with_the_outcomes_of_the_others(others: tuple[Outcome, ...], reason: str) -> None:
    first, *rest = sample_manifest().candidates
    candidates = [one.model_copy(update={"outcome": outcome}) for one, outcome in zip(rest, others, strict=False)]
    manifest = changed(chosen=sample_manifest().baseline, candidates=(first, *candidates))

    assert headline(manifest) == (
        f"The fp32 graph itself is served on 2 cores of AMD EPYC 7763 64-Core Processor (avx2): {reason}."
    )


@pytest.mark.parametrize("reason", [code for code in ReasonCode if code.is_out_of_time])
def test_fp32_that_is_served_because_time_ran_out_is_not_called_the_winner(reason: ReasonCode) -> None:
    first, slower, late, *_ = sample_manifest().candidates
    late = late.settled(SKIPPED, reason)
    slower = slower.model_copy(update={"outcome": SLOWER})

    found = headline(changed(chosen=sample_manifest().baseline, candidates=(first, slower, late)))

    assert found.endswith(": the best so far, as the time budget ended before all others were measured.")


ONE_ROW = "onnxruntime-int8-dynamic-per-channel, 2x1 threads, one row a run"


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (PLAN, f"{ONE_ROW}, all cores from 64 tokens"),
        (
            PLAN.model_copy(update={"wide_alone_from_tokens": 8}),
            f"{ONE_ROW}, all cores from 64 tokens, from 8 for a client alone",
        ),
        (PLAN.model_copy(update={"wide_alone_from_tokens": 64}), f"{ONE_ROW}, all cores from 64 tokens"),
        (
            PLAN.model_copy(update={"wide_from_tokens": None, "wide_alone_from_tokens": 8}),
            f"{ONE_ROW}, all cores from 8 tokens for a client alone",
        ),
        (PLAN.model_copy(update={"wide_from_tokens": None}), ONE_ROW),
        (FP32_PLAN, "onnxruntime-fp32, 2x1 threads, padded up to 8 rows / 512 tokens / 15% padding"),
    ],
)
def test_a_plan_is_described_in_words(plan: object, expected: str) -> None:
    assert plan_text(plan) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("manifest", [sample_manifest(), bare()], ids=["full", "bare"])
def test_every_chart_is_well_formed_and_loads_nothing(manifest: Manifest) -> None:
    page = render_report(manifest)

    for chart in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ET.fromstring(chart)
    assert not re.search(r"(?:src|href)=[\"'](?!data:)", page)
    assert "url(" not in page
    assert "@import" not in page
    assert "<script" not in page


def test_every_candidate_is_in_the_page_with_its_reason() -> None:
    manifest = sample_manifest()
    page = render_report(manifest)

    for candidate in manifest.candidates:
        assert html.escape(candidate.recipe.name) in page
        assert html.escape(candidate.reason, quote=False).replace("'", "&#39;") in page


def test_external_texts_are_escaped() -> None:
    sample = sample_manifest()
    nasty = "<script>alert(1)</script>"
    candidates = [one.model_copy(update={"reason": nasty}) for one in sample.candidates]
    page = render_report(
        changed(
            model=sample.model.model_copy(update={"source": nasty}),
            cpu=sample.cpu.model_copy(update={"model_name": nasty}),
            findings=(nasty,),
            candidates=tuple(candidates),
        )
    )

    assert nasty not in page
    assert page.count(html.escape(nasty)) >= 4


def test_the_capacity_of_text_generation_is_a_table_with_its_limits() -> None:
    points = [
        TokenPoint(
            clients=clients,
            requests_per_second=clients,
            tokens_per_second=40 * clients,
            first_token_p95_milliseconds=100 * clients,
            next_token_p95_milliseconds=20,
            samples=20,
        )
        for clients in (1, 2, 4)
    ]
    page = render_report(changed(token_capacity=TokenCurve.of(points, first_token=250, next_token=None)))
    assert "Limits: 250 ms to the first token, 100 ms between tokens" in page
    rows = [re.findall("<td[^>]*>([^<]*)</td>", row) for row in page.split('id="tokens"')[1].split("<tr>")[2:5]]
    assert rows == [
        ["1", "40", "1", "100", "20", "yes"],
        ["2", "80", "2", "200", "20", "yes, most tokens"],
        ["4", "160", "4", "400", "20", "no"],
    ]
    assert "one replica with 2 clients" in page


def test_the_speed_up_of_text_generation_is_of_answers() -> None:
    """A prompt that takes twice as long as with fp32 does not hide that tokens come five times as fast."""

    def speed(first: float, following: float) -> GenerationSpeed:
        return GenerationSpeed(
            prompt_tokens=32,
            output_tokens=101,
            first_token_milliseconds=first,
            next_token_p50_milliseconds=following,
            next_token_p95_milliseconds=following,
            tokens_per_second=100,
            clients=4,
        )

    before = sample_manifest()
    speeds = {before.baseline.plan.recipe: speed(100, 50), before.chosen.plan.recipe: speed(200, 10)}
    candidates = [one.model_copy(update={"generation": speeds.get(one.recipe)}) for one in before.candidates]
    manifest = before.model_copy(update={"candidates": tuple(candidates), "speed_up": {32: 0.5}})

    assert manifest.typical_speed_up == pytest.approx((100 + 100 * 50) / (200 + 100 * 10))
    assert [(tile.figure, tile.meaning) for tile in tiles(manifest)][:2] == [
        ("4.2×", "as many tokens/s of an answer as fp32, one client"),
        ("0.5×", "as fast as fp32 for a prompt of 32 tokens"),
    ]
    assert Result.of(manifest).speed_up == pytest.approx(4.25)


def test_charts_without_data_are_left_out() -> None:
    manifest = bare()

    assert latency_chart(series(manifest)) == ""
    assert agreement_chart(series(manifest), metric="min_cosine", budget=0.985) == ""
    assert capacity_chart(manifest.capacity) == ""
    assert gemm_chart(()) == ""
    assert "<h2>What one replica takes</h2>" not in render_report(manifest)


def test_a_rejected_candidate_is_drawn_under_the_budget() -> None:
    manifest = sample_manifest()
    chart = ET.fromstring(agreement_chart(series(manifest), metric="min_cosine", budget=0.985))
    limit = next(line for line in chart.iter("line") if line.get("class") == "limit")
    heights: dict[str, float] = {}
    for shape in chart.iter():
        title = shape.find("title")
        if title is None or title.text is None:
            continue
        corners = [pair.split(",") for pair in (shape.get("points") or "").split()]
        y = float(shape.get("cy") or sum(float(pair[1]) for pair in corners) / max(len(corners), 1))
        heights[title.text.split(":")[0]] = y

    rejected = {one.recipe.name for one in manifest.candidates if one.outcome is Outcome.REJECTED}
    assert {name for name, y in heights.items() if y > float(limit.get("y1") or 0)} == rejected
    assert FP32.name in heights


# In a real browser


@contextmanager
def site(page: str) -> Iterator[tuple[str, list[str]]]:
    """Serve a page under a policy that forbids it to load anything; yields its URL and the paths asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = page.encode()
            self.send_response(200)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
            self.send_header("content-security-policy", policy)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/report.html", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def browse(page: str, profile: Path) -> tuple[str, list[str], list[str]]:
    """The document in the browser, its console output, and its requests to the server."""
    with site(page) as (url, asked):
        done = subprocess.run(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--disable-background-networking", f"--user-data-dir={profile}", "--enable-logging=stderr",
                "--window-size=390,800", "--dump-dom", url,
            ],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line], asked


needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt-get install chromium")


@needs_chromium
def test_a_real_browser_shows_the_report_without_errors_or_requests(tmp_path: Path) -> None:
    document, console, asked = browse(render_report(sample_manifest()), tmp_path)

    assert console == []
    assert asked == ["/report.html"]
    text = re.sub(r"<[^>]+>", " ", document)
    for expected in ("84.9/s", "0.9901", "2.08×", "killed by signal 11 (SIGSEGV)", "min cosine 0.9071", "212 MB"):
        assert expected in html.unescape(text)


@needs_chromium
def test_the_browser_test_detects_errors_and_requests(tmp_path: Path) -> None:
    page = render_report(sample_manifest()).replace("</body>", '<img src="/spy.png"><script>boom()</script></body>')
    _, console, asked = browse(page, tmp_path)

    assert len(console) == 2
    assert asked == ["/report.html"]


@needs_chromium
def test_names_without_a_break_do_not_widen_the_page_of_a_phone(tmp_path: Path) -> None:
    unbroken = "hf://sentence-transformers/all-MiniLM-L6-v2@8b3219a92973c328a8e22fadcfa821b5dc75636a"
    sample = sample_manifest()
    report = changed(
        model=sample.model.model_copy(update={"source": unbroken}),
        candidates=tuple(one.model_copy(update={"reason": f"no {unbroken}"}) for one in sample.candidates),
        findings=(f"There is no {unbroken}.",),
    )
    benched = sample_results().model_copy(update={"model": unbroken, "notes": (f"there is no {unbroken}",)})
    too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    with browser(tmp_path / "profile") as browsing:
        for name, page in (("report", render_report(report)), ("bench", render_bench(benched))):
            file = tmp_path / f"{name}.html"
            file.write_text(page)
            browsing.open(file.as_uri(), width=360, height=2600)

            assert browsing.run(too_wide) == 0, name


def test_no_candidate_measured_still_makes_a_page() -> None:
    sample = sample_manifest()
    failed = CandidateFacts(recipe=PLAN.recipe, outcome=Outcome.FAILED, reason="killed by signal 9 (SIGKILL)")
    page = render_report(changed(candidates=(sample.candidates[0].model_copy(update={"latency": ()}), failed)))

    assert "killed by signal 9" in page


def test_figures_of_a_quick_sample_are_marked() -> None:
    full = sample_manifest()
    glimpsed = tuple(
        one.model_copy(update={"latency": one.latency[:3]}) if one.outcome is Outcome.SLOWER else one
        for one in full.candidates
    )
    everywhere = tuple(one.model_copy(update={"latency": full.candidates[0].latency}) for one in full.candidates)

    assert "settled at first sight" in render_report(changed(candidates=glimpsed))
    assert "settled at first sight" not in render_report(changed(candidates=everywhere))
