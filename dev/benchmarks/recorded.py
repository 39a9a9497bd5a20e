"""Traces shaped like recorded production traffic, drawn at random from a seed.

The built-in traces of `traces.py` isolate one change of load each. These combine what recordings show together: a daily
or weekly course, noise that is wider than a Poisson count, scheduled jobs, bursts with heavy tails. A day is compressed
to between 45 minutes and three hours, so that a run takes seconds; that makes slopes steeper against the start-up time
than they are in production. Rates are in multiples of what one replica takes within its objective, as in `traces.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock_simulator.traces import Shape, Trace, turns

HOUR = 3600

Load = npt.NDArray[np.float64]
"""Requests per second, second by second; shape [seconds]."""


def _noise(random: np.random.Generator, seconds: int, *, spread: float, correlation: float) -> Load:
    """Log-normal factors with mean 1, correlated over some seconds; shape [seconds]."""
    keep = np.exp(-1 / correlation)
    shocks = random.normal(0, spread * np.sqrt(1 - keep * keep), seconds)
    path = np.empty(seconds)
    value = random.normal(0, spread)
    for second in range(seconds):
        value = keep * value + shocks[second]
        path[second] = value
    return np.exp(path - spread * spread / 2)


def _day(seconds: int) -> Load:
    """Time of day, 0 to 1; shape [seconds]."""
    return np.arange(seconds) / seconds


def _wikipedia(random: np.random.Generator) -> Load:
    time = 2 * np.pi * _day(3 * HOUR)
    course = 3.5 - 1.8 * np.cos(time) - 0.6 * np.cos(2 * time - 0.8)
    return course * _noise(random, len(course), spread=0.04, correlation=60)


def _azure_functions(random: np.random.Generator) -> Load:
    seconds = 3 * HOUR
    course = 2.2 - 0.7 * np.cos(2 * np.pi * _day(seconds))
    minutes = np.repeat(np.exp(random.normal(0, 0.3, seconds // 60) - 0.045), 60)
    load: Load = course * minutes * _noise(random, seconds, spread=0.1, correlation=10)
    for begin in range(0, seconds, 900):
        load[begin : begin + int(random.uniform(10, 40))] += random.uniform(0.5, 2.0)
    return load


def _news_crowd(random: np.random.Generator) -> Load:
    seconds = 3 * HOUR
    load = 1.2 * _noise(random, seconds, spread=0.12, correlation=45)
    for third in range(3):
        begin = int(seconds / 3 * third + random.uniform(600, 1500))
        rise = int(random.uniform(20, 240))
        height = random.uniform(3, 8)
        after = np.arange(seconds - begin - rise)
        load[begin : begin + rise] += height * np.linspace(0, 1, rise)
        load[begin + rise :] += height / (1 + after / random.uniform(120, 400)) ** 1.3
    return load


def _business_hours(random: np.random.Generator) -> Load:
    parts = []
    for _ in range(4):
        time = _day(45 * 60)
        morning, afternoon = random.uniform(3.5, 5.5, 2)
        shape = morning * np.exp(-(((time - 0.38) / 0.09) ** 2) / 2)
        shape += afternoon * np.exp(-(((time - 0.66) / 0.11) ** 2) / 2)
        parts.append(0.5 + shape)
    course = np.concatenate(parts)
    return course * _noise(random, len(course), spread=0.08, correlation=30)


def _cron_bursts(random: np.random.Generator) -> Load:
    seconds = 2 * HOUR
    load = 1.2 * _noise(random, seconds, spread=0.1, correlation=30)
    for begin in range(300, seconds, 600):
        load[begin : begin + int(random.uniform(45, 100))] += random.uniform(2.5, 4.0)
    for begin in range(1800, seconds, 3600):
        load[begin : begin + 420] += random.uniform(3.0, 5.0)
    return load


def _ramp_bursts(random: np.random.Generator) -> Load:
    seconds = 2 * HOUR
    load = np.linspace(1.0, 5.0, seconds) * _noise(random, seconds, spread=0.08, correlation=30)
    at = random.exponential(240)
    while at < seconds:
        length = int(min(20 * (random.pareto(1.3) + 1), 600))
        load[int(at) : int(at) + length] += min(0.5 * (random.pareto(1.5) + 1), 6.0)
        at += length + random.exponential(240)
    return load


def _week(random: np.random.Generator) -> Load:
    parts = []
    for weekday in range(7):
        time = 2 * np.pi * _day(45 * 60)
        high = random.uniform(2.4, 3.0) if weekday < 5 else random.uniform(0.8, 1.2)
        parts.append(0.8 + high * (1 - np.cos(time)) / 2 * (1.15 - 0.25 * np.sin(2 * time)))
    course = np.concatenate(parts)
    return course * _noise(random, len(course), spread=0.07, correlation=60)


def _pareto_sources(random: np.random.Generator) -> Load:
    seconds = 2 * HOUR
    load = np.zeros(seconds)
    for _ in range(120):
        at, on = -random.uniform(0, 600), random.random() < 0.4
        while at < seconds:
            length = (20 if on else 30) * (random.pareto(1.4) + 1)
            if on:
                load[max(0, int(at)) : max(0, int(at + length))] += 0.06
            at, on = at + length, not on
    return np.maximum(load, 0.1)


def _random_walk(random: np.random.Generator) -> Load:
    level, minutes = 2.5, []
    for _ in range(120):
        level = min(6.0, max(0.5, level * np.exp(random.normal(0, 0.2))))
        minutes.append(level)
    return np.repeat(np.array(minutes), 60)


def _sports(random: np.random.Generator) -> Load:
    parts = []
    for _ in range(2):
        time = _day(75 * 60)
        course = 1.0 + 0.8 * np.sin(np.pi * time)
        kick_off = int(random.uniform(600, 900))
        for begin, length, height in ((kick_off, 1200, 1.8), (kick_off + 1200, 420, 3.5), (kick_off + 1620, 1300, 2.0)):
            course[begin : begin + length] += height * random.uniform(0.8, 1.2)
        after = np.arange(len(course) - kick_off - 2920)
        course[kick_off + 2920 :] += 3.5 * np.exp(-after / 240)
        parts.append(course)
    course = np.concatenate(parts)
    return course * _noise(random, len(course), spread=0.08, correlation=20)


def _dips(random: np.random.Generator) -> Load:
    seconds = 2 * HOUR
    load = 3.5 * _noise(random, seconds, spread=0.06, correlation=30)
    at = random.uniform(300, 900)
    while at < seconds:
        length = int(random.uniform(60, 240))
        load[int(at) : int(at) + length] *= random.uniform(0.1, 0.5)
        at += length + random.uniform(300, 1200)
    return load


def _sparse(random: np.random.Generator) -> Load:
    seconds = 3 * HOUR
    load = 0.15 * _noise(random, seconds, spread=0.3, correlation=60)
    at = random.exponential(600)
    while at < seconds:
        length = int(random.uniform(60, 600))
        load[int(at) : int(at) + length] += random.uniform(0.3, 1.6)
        at += length + random.exponential(600)
    return load


_RECORDED: dict[str, tuple[str, Shape]] = {
    "wikipedia": ("page views of an encyclopaedia: a smooth day with two peaks, little noise", _wikipedia),
    "azure-functions": (
        "serverless invocations: a flat day, wide noise by the minute, timers on the quarter of an hour",
        _azure_functions,
    ),
    "news-crowd": ("a quiet site and three crowds, each rising within minutes and fading by a power law", _news_crowd),
    "business-hours": ("an office's day with a lunch dip, four days and a quiet night between each", _business_hours),
    "cron-bursts": ("a low base, a burst each ten minutes, a longer one on the hour", _cron_bursts),
    "ramp-bursts": (
        "a launch: a slow rise over the whole trace, and bursts with Pareto-distributed heights and lengths",
        _ramp_bursts,
    ),
    "week": ("five working days and a weekend", _week),
    "pareto-sources": (
        "many clients that are on and off for Pareto-distributed times, so that noise has all time scales",
        _pareto_sources,
    ),
    "random-walk": ("a level that drifts by up to a quarter each minute", _random_walk),
    "sports": ("match evenings: jumps at kick-off, half-time and the end, over a slow evening course", _sports),
    "dips": (
        "a steady load that drops for one to four minutes and returns, as after a failed client deployment",
        _dips,
    ),
    "sparse": ("a small service: under half a replica's worth, with occasional sessions", _sparse),
}
"""Name -> description, shape."""

RECORDED = tuple(_RECORDED)
"""The names of these traces."""


def recorded(name: str, requests_per_second: float, seed: int) -> Trace:
    """One of these traces for replicas that take this rate (requests/s) within their objective."""
    description, shape = _RECORDED[name]
    rates = shape(np.random.default_rng([seed, 13])) * requests_per_second
    return Trace(name, description, rates, turns(rates))
