"""Load over time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import SettingError
from penstock_simulator.choices import BUILT_IN_TRACES
from penstock_simulator.traces import (
    LONGEST_SECONDS,
    MOST_REQUESTS,
    WARM_UP_SECONDS,
    Trace,
    built_in,
    from_csv,
    from_file,
)


@pytest.mark.parametrize("name", BUILT_IN_TRACES)
def test_a_built_in_trace_scales_with_the_replica(name: str) -> None:
    small, large = built_in(name, 10, 1), built_in(name, 100, 1)

    assert small.rates.min() > 0
    assert np.allclose(small.rates * 10, large.rates)
    assert 1800 <= small.seconds <= 2 * 3600


@pytest.mark.parametrize(("name", "peak", "changes"), [("step", 5, 1), ("spike", 6, 2), ("flash-crowd", 8, 2)])
def test_loads_are_what_the_descriptions_say(name: str, peak: float, changes: int) -> None:
    trace = built_in(name, 1, 1)

    assert trace.rates.max() == pytest.approx(peak)
    assert trace.changes == changes


def test_noise_differs_between_seeds_and_has_the_stated_mean_and_spread() -> None:
    one, other = built_in("noisy", 1, 1).rates, built_in("noisy", 1, 2).rates

    assert not np.allclose(one, other)
    assert one.mean() == pytest.approx(3, rel=0.1)
    assert np.log(one).std() == pytest.approx(0.2, rel=0.25)


def test_a_noise_trace_changes_once_after_its_constant_warm_up() -> None:
    trace = built_in("noisy", 10, 2)

    counts = np.bincount(trace.arrivals(np.random.default_rng(2)).astype(int) // 10)

    still, moving = counts[: WARM_UP_SECONDS // 10], counts[WARM_UP_SECONDS // 10 :]
    assert trace.changes == 1
    assert still.var() == pytest.approx(still.mean(), rel=0.4), "the variance of a Poisson count"
    assert moving.var() > 3 * moving.mean()
    assert still.mean() > 1.1 * moving.mean(), "with this seed the level changes as well"


def test_arrivals_follow_the_rates_after_the_warm_up() -> None:
    trace = Trace("two", "", np.array([5.0] * 1000 + [50.0] * 1000), 1)

    arrivals = trace.arrivals(np.random.default_rng(3))

    counts = np.histogram(arrivals, bins=[0, WARM_UP_SECONDS, WARM_UP_SECONDS + 1000, WARM_UP_SECONDS + 2000])[0]
    assert counts == pytest.approx([5 * WARM_UP_SECONDS, 5000, 50_000], rel=0.05)
    assert np.all(np.diff(arrivals) >= 0)


def test_a_row_of_a_file_lasts_until_the_next_and_the_last_row_ends_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "monday.csv"
    path.write_text("seconds,requests_per_second\n0,10\n60,50.5\n\n90,10\n100,0\n")

    trace = from_csv(path)

    assert trace.name == "monday"
    assert trace.rates.tolist() == [10.0] * 60 + [50.5] * 30 + [10.0] * 10
    assert trace.changes == 2


@pytest.mark.parametrize(
    "text",
    [
        "0,10\n60,0\n",
        "seconds,requests_per_second\n0,10\n60,0\n",
        "requests_per_second,seconds\n10,0\n0,60\n",
        "\n Seconds, Requests_per_second\n0,10\n60,0\n",
        "\ufeffseconds,requests_per_second\n0,10\n60,0\n",
        "day,requests_per_second,errors,seconds\nMonday,10,0,0\nMonday,0,1,60\n",
    ],
    ids=["no header", "header", "swapped", "spaces", "Excel", "more columns"],
)
def test_columns_are_read_by_their_names_where_they_have_some(text: str, tmp_path: Path) -> None:
    path = tmp_path / "load.csv"
    path.write_text(text, encoding="utf-8")

    assert from_csv(path).rates.tolist() == [10.0] * 60


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,rps\n0,1\n", "line 1: the columns are 'time,rps', and seconds and requests_per_second are read"),
        ("seconds;requests_per_second\n0;1\n", "are 'seconds;requests_per_second', and seconds and"),
        ("seconds,seconds,requests_per_second\n0,1,2\n", "line 1: the columns are"),
        ("x,5\n0,1\n", "line 1: 'x,5' is not a later time"),
        ("requests_per_second,seconds\n10,0\n5\n", "line 3: '5' is not a later time"),
        ('0,"' + "1" * 200_000, "is not CSV: field larger than field limit"),
        ("0,1\n", "has 1 rows of figures"),
        ("0,1\n60,x\n", "line 2: '60,x' is not a later time and a rate from 0"),
        ("0,1\n60,2\n60,3\n", "line 3"),
        ("0,1\n60,-2\n", "line 2"),
        ("0,1\n60\n", "line 2"),
        ("0,1\n60,nan\n", "line 2"),
    ],
)
def test_mistakes_in_a_file_are_named_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)

    with pytest.raises(SettingError, match=message):
        from_csv(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0,1\n1e12,0\n",
            "is a trace of 1e\\+12 seconds, and 1 to 2,678,400 can be simulated. Give a longer or a shorter",
        ),
        ("-1e308,1\n1e308,0\n", "is a trace of inf seconds, and 1 to 2,678,400"),
        ("0,1\n0.4,0\n", "is a trace of 0.4 seconds, and 1 to 2,678,400"),
        (
            "0,1e9\n60,0\n",
            r"asks for 6e\+10 requests, and for 6e\+11 in the 600 seconds .* up to 20,000,000",
        ),
        ("0,1\n60,1e308\n120,0\n", "asks for inf requests"),
        ("0,0\n60,0\n", "asks for 0 requests"),
        ("0,1\n60,0\n", "asks for 60 requests"),
    ],
)
def test_traces_outside_the_limits_are_refused_with_the_limit(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)

    with pytest.raises(SettingError, match=message):
        from_csv(path)


def test_a_trace_at_the_limits_of_time_and_requests_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(f"0,0\n{LONGEST_SECONDS - 10},{MOST_REQUESTS / 10}\n{LONGEST_SECONDS},0\n")

    trace = from_csv(path)

    assert (trace.seconds, trace.requests) == (LONGEST_SECONDS, MOST_REQUESTS)


def test_a_missing_or_binary_file_is_an_error_of_the_setting(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(SettingError, match="No such file"):
        from_csv(tmp_path / "none.csv")
    with pytest.raises(SettingError, match="is not UTF-8 text"):
        from_csv(tmp_path / "binary.csv")


def test_times_of_requests_are_counted_in_minutes(tmp_path: Path) -> None:
    path = tmp_path / "requests.txt"
    path.write_text("\n".join(["time", *(str(1000 + second / 2) for second in range(480)), "", "1240.0"]))

    trace = from_file(path)

    assert trace.seconds == 240
    assert trace.rates.tolist() == [2.0] * 240


def test_times_may_be_written_for_people(tmp_path: Path) -> None:
    path = tmp_path / "requests.txt"
    path.write_text("\n".join(f"2026-11-28T10:{second // 60:02}:{second % 60:02}+00:00" for second in range(301)))

    assert from_file(path).rates.tolist() == [1.0] * 300


def test_a_range_query_of_prometheus_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "day.json"
    series = [{"values": [[0, "2"], [60, "4"]]}, {"values": [[60, "1"], [0, "NaN"]]}]
    path.write_text(json.dumps({"status": "success", "data": {"result": series}}))

    assert from_file(path).rates.tolist() == [2.0] * 60 + [5.0] * 60


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not the answer to a range query"),
        ('{"data": {"result": []}}', "no two times"),
        ('{"data": {"result": [{"values": [[0, "x"]]}]}}', "not the answer to a range query"),
        ("1\n2\nnever\n", "line 3, 'never', is no time"),
        ("name\n", "it has no times"),
        ("1\n1e300\n", "seconds apart"),
        ("1\n2\n", "no two times"),
        ("", "it has no times"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)

    with pytest.raises(SettingError, match=problem):
        from_file(path)
