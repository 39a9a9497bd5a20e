"""Load over time: requests/s, second by second.

Built-in traces are stated in multiples of what one replica takes within its objective (1.0 = one replica at its limit),
so that they mean the same for every endpoint. Each declares how often its load changes direction or level: a policy
that changes direction more often reacts to noise or to itself.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from penstock.errors import SettingError
from penstock_simulator.choices import BUILT_IN_TRACES

WARM_UP_SECONDS = 600
"""Before each trace its first load lasts for this long, uncounted: every policy starts where it would stand."""
MOST_BYTES = 256 * 2**20
"""Of a file: the times of some twelve million requests."""
BIN_SECONDS = 60
"""Single requests are counted in minutes: the simulator draws arrivals at random from rates."""
COLUMNS = ("seconds", "requests_per_second")
"""Of a file, in the order in which they stand where no header names them."""
LONGEST_SECONDS = 31 * 24 * 3600
"""Of a file's trace. Every run goes through it second by second: this takes a quarter of a minute without a request."""
LEAST_REQUESTS = 100
"""Of a file's trace without its warm-up: progress is shown as a share of them."""
MOST_REQUESTS = 20_000_000
"""Of a file's trace with its warm-up: one run of them takes a minute and 4 GB, and there are hundreds of runs."""


@dataclass(frozen=True)
class Trace:
    """Requests per second, one figure a second."""

    name: str
    description: str
    rates: np.ndarray
    """Shape [seconds], float64, requests/s; without the warm-up."""
    changes: int
    """How often the load changes by construction: its level, its direction, or from standing still to moving about."""

    @property
    def seconds(self) -> int:
        """How long it lasts."""
        return len(self.rates)

    @property
    def changes_text(self) -> str:
        """For people."""
        return f"{self.changes} change{'' if self.changes == 1 else 's'} of load"

    @property
    def requests(self) -> float:
        """How many to expect, with the warm-up."""
        return float(self.rates.sum() + WARM_UP_SECONDS * self.rates[0])

    def arrivals(self, random: np.random.Generator) -> np.ndarray:
        """Arrival times of a Poisson process with these rates after the warm-up; shape [requests], rising, seconds."""
        rates = np.concatenate([np.full(WARM_UP_SECONDS, self.rates[0]), self.rates])
        counts = random.poisson(rates)
        times = np.repeat(np.arange(len(rates)), counts) + random.random(counts.sum())
        return np.sort(times)


Shape = Callable[[np.random.Generator], np.ndarray]


def _levels(*parts: tuple[float, float]) -> np.ndarray:
    """Constant stretches: (load, minutes) each."""
    return np.concatenate([np.full(round(minutes * 60), load) for load, minutes in parts])


def _step(_: np.random.Generator) -> np.ndarray:
    return _levels((1.5, 10), (5.0, 35))


def _ramp(_: np.random.Generator) -> np.ndarray:
    up = np.linspace(1.0, 7.0, 20 * 60)
    return np.concatenate([_levels((1.0, 5)), up, _levels((7.0, 5)), up[::-1], _levels((1.0, 5))])


def _spike(_: np.random.Generator) -> np.ndarray:
    return _levels((1.5, 15), (6.0, 3), (1.5, 42))


def _diurnal(_: np.random.Generator) -> np.ndarray:
    seconds = np.arange(2 * 40 * 60)
    return 4.0 - 3.0 * np.cos(2 * np.pi * seconds / (40 * 60))


def _flash_crowd(_: np.random.Generator) -> np.ndarray:
    rise = np.linspace(1.2, 8.0, 30)
    decay = 1.2 + 6.8 * np.exp(-np.arange(45 * 60) / (10 * 60))
    return np.concatenate([_levels((1.2, 10)), rise, decay])


def _noisy(random: np.random.Generator) -> np.ndarray:
    """Log-normal, correlated over half a minute, a fifth up and down.

    Its one change of load is that it begins: the warm-up has the load of the first second, which may be a fifth
    off the mean.
    """
    seconds, correlation, spread = 60 * 60, 30.0, 0.2
    keep = np.exp(-1 / correlation)
    shocks = random.normal(0, spread * np.sqrt(1 - keep * keep), seconds)
    path = np.empty(seconds)
    value = 0.0
    for second in range(seconds):
        value = keep * value + shocks[second]
        path[second] = value
    return 3.0 * np.exp(path - spread * spread / 2)


def _on_off(_: np.random.Generator) -> np.ndarray:
    return np.concatenate([_levels((1.0, 8), (4.5, 8)) for _ in range(4)] + [_levels((1.0, 8))])


_BUILT_IN: dict[str, tuple[str, int, Shape]] = {
    "step": ("1.5 replicas' worth, from minute 10 on 5", 1, _step),
    "ramp": ("from 1 to 7 in 20 minutes, and back", 2, _ramp),
    "spike": ("1.5, but 6 for 3 minutes", 2, _spike),
    "diurnal": ("two days of 40 minutes each, between 1 and 7", 4, _diurnal),
    "flash-crowd": ("from 1.2 to 8 within 30 s, fading over 10 minutes", 2, _flash_crowd),
    "noisy": ("3, from the first minute on give or take a fifth, correlated over half a minute", 1, _noisy),
    "on-off": ("1 and 4.5 in turns of 8 minutes", 8, _on_off),
}
"""Name -> description, changes of load, shape."""


def built_in(name: str, requests_per_second: float, seed: int) -> Trace:
    """A built-in trace for replicas that take this rate (requests/s) within their objective."""
    description, changes, shape = _BUILT_IN[name]
    loads = shape(np.random.default_rng([seed, 7]))
    return Trace(name, description, loads * requests_per_second, changes)


def from_file(path: Path) -> Trace:
    """The trace in a file: requests by their times, one in a line (seconds, or ISO 8601); the answer of Prometheus to a
    range query of a rate (JSON); or `from_csv`. SettingError for another file.
    """
    try:
        size = path.stat().st_size
        with path.open(encoding="utf-8-sig") as file:
            first = next((line.strip() for line in file if line.strip()), "")
    except (OSError, UnicodeDecodeError):
        return from_csv(path)  # its error names what is wrong
    if size > MOST_BYTES:
        raise SettingError(
            f"{path} has {size:,} bytes, and {MOST_BYTES:,} are read",
            field="--trace",
            remedy="Give rates by time (seconds,requests_per_second) instead of single requests",
        )
    if first.startswith("{"):
        return _of_rates(path, _of_prometheus(path))
    return from_csv(path) if "," in first else _of_rates(path, _of_times(path))


def _of_rates(path: Path, rows: list[tuple[float, float]]) -> Trace:
    """Rates that last until the next time; the last row ends the trace."""
    if len(rows) < 2:
        raise _no_trace(path, "no two times")
    _check_size(path, rows)
    begin = rows[0][0]
    rates: list[float] = []
    for (_, rate), (until, _) in pairwise(rows):
        rates += [rate] * (round(until - begin) - len(rates))
    levels = np.array(rates)
    return Trace(path.stem, f"from {path.name}", levels, turns(levels))


def _no_trace(path: Path, problem: str) -> SettingError:
    return SettingError(
        f"{path} is no trace: {problem}",
        field="--trace",
        remedy="Give times of requests, one in a line, lines of seconds,requests_per_second, or the answer of "
        "Prometheus to /api/v1/query_range",
    )


def _of_times(path: Path) -> list[tuple[float, float]]:
    """Requests per second in each minute of the times in a file; the rest of the last minute is left out."""
    times = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        text = line.strip()
        if not text:
            continue
        try:
            times.append(float(text) if _is_number(text) else datetime.fromisoformat(text).timestamp())
        except (ValueError, OverflowError):
            if times:
                raise _no_trace(path, f"line {number}, {text[:40]!r}, is no time") from None
    if not times:
        raise _no_trace(path, "it has no times")
    begin, end = min(times), max(times)
    if end - begin > LONGEST_SECONDS:
        raise _no_trace(path, f"its times are {end - begin:,.6g} seconds apart")
    minutes = int((end - begin) // BIN_SECONDS)
    counts = np.bincount(((np.array(times) - begin) // BIN_SECONDS).astype(np.int64), minlength=minutes + 1)
    rates = [(begin + BIN_SECONDS * minute, float(counts[minute]) / BIN_SECONDS) for minute in range(minutes)]
    return [*rates, (begin + BIN_SECONDS * minutes, 0.0)]


def _of_prometheus(path: Path) -> list[tuple[float, float]]:
    """The sum of all series of a range query, at the times that any has; the last step is as long as the one before."""
    try:
        series = json.loads(path.read_text(encoding="utf-8-sig"))["data"]["result"]
        totals: dict[float, float] = {}
        for one in series:
            for at, value in one["values"]:
                rate = float(value)
                if np.isfinite(rate):
                    totals[float(at)] = totals.get(float(at), 0.0) + max(rate, 0.0)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _no_trace(path, f"not the answer to a range query ({type(error).__name__}: {error})") from error
    rows = sorted(totals.items())
    return [*rows, (2 * rows[-1][0] - rows[-2][0], 0.0)] if len(rows) > 1 else rows


def from_csv(path: Path) -> Trace:
    """Columns `seconds,requests_per_second`: each rate lasts until the next row's time; the last row ends the trace.

    A header names the columns, in any order. SettingError names the line of the first mistake.
    """
    rows = _rows(path)
    if len(rows) < 2:
        raise SettingError(
            f"{path} has {len(rows)} rows of figures",
            field="--trace",
            remedy="Write at least two: where the load begins, and where the trace ends",
        )
    return _of_rates(path, rows)


def _check_size(path: Path, rows: list[tuple[float, float]]) -> None:
    """SettingError for a trace that cannot be simulated or is too large, before memory is taken for it."""
    seconds = rows[-1][0] - rows[0][0]
    if not 1 <= seconds <= LONGEST_SECONDS:
        raise SettingError(
            f"{path} is a trace of {seconds:,.6g} seconds, and 1 to {LONGEST_SECONDS:,} can be simulated",
            field="--trace",
            remedy="Give a longer or a shorter part of it; times are in seconds",
        )
    requests = sum(rate * (until - since) for (since, rate), (until, _) in pairwise(rows))
    warm_up = WARM_UP_SECONDS * rows[0][1]
    if requests < LEAST_REQUESTS or requests + warm_up > MOST_REQUESTS:
        raise SettingError(
            f"{path} asks for {requests:,.6g} requests, and for {warm_up:,.6g} in the {WARM_UP_SECONDS} seconds of its "
            f"first rate that come before it; {LEAST_REQUESTS} and more can be simulated, up to {MOST_REQUESTS:,} with "
            "those before it",
            field="--trace",
            remedy="Give a longer or a shorter part of it; rates are requests per second",
        )


def _rows(path: Path) -> list[tuple[float, float]]:
    lines = _lines(path)
    places = list(range(len(COLUMNS)))
    if lines and not any(map(_is_number, lines[0][1])):
        number, header = lines.pop(0)
        names = [name.strip().lower() for name in header]
        if any(names.count(column) != 1 for column in COLUMNS):
            raise SettingError(
                f"{path}, line {number}: the columns are {','.join(names)!r}, and {' and '.join(COLUMNS)} are read",
                field="--trace",
                remedy=f"Write {','.join(COLUMNS)} above them, with commas, or nothing where they stand in this order",
            )
        places = [names.index(column) for column in COLUMNS]
    rows: list[tuple[float, float]] = []
    for number, line in lines:
        cells = [line[place] if place < len(line) else "" for place in places]
        wrong = not all(map(_is_number, cells))
        if wrong or float(cells[1]) < 0 or (rows and float(cells[0]) <= rows[-1][0]):
            raise SettingError(
                f"{path}, line {number}: {','.join(line)!r} is not a later time and a rate from 0",
                field="--trace",
                remedy="Write lines like 60,120.5: seconds, rising, and requests per second",
            )
        rows.append((float(cells[0]), float(cells[1])))
    return rows


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """The cells of each line that is not empty, with its number."""
    try:
        # Excel begins UTF-8 with a mark, which is no part of the first name.
        with path.open(encoding="utf-8-sig", newline="") as file:
            return [(number, line) for number, line in enumerate(csv.reader(file), 1) if line]
    except OSError as error:
        remedy = f"Give a readable CSV file, or one of the built-in traces: {', '.join(BUILT_IN_TRACES)}"
        raise SettingError(f"{path}: {error.strerror}", field="--trace", remedy=remedy) from error
    except UnicodeDecodeError as error:
        raise SettingError(f"{path} is not UTF-8 text", field="--trace", remedy="Give a CSV file") from error
    except csv.Error as error:
        raise SettingError(f"{path} is not CSV: {error}", field="--trace", remedy="Give a CSV file") from error


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def turns(rates: np.ndarray) -> int:
    """Changes of load in a series of rates: changes of direction by over a tenth of the range."""
    reach = 0.1 * float(rates.max() - rates.min())
    count, direction = 0, 0
    low = high = float(rates[0])
    for rate in rates.tolist():
        if direction >= 0:
            high = max(high, rate)
        if direction <= 0:
            low = min(low, rate)
        if direction <= 0 and rate > low + reach:
            count, direction, high = count + 1, 1, rate
        elif direction >= 0 and rate < high - reach:
            count, direction, low = count + 1, -1, rate
    return count
