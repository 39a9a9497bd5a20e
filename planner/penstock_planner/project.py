"""Measurements of this project: `project.yaml` in this package, as evidence for plans.

They count where the user has no measurement of the class. Machines were virtual, and some had other work: the figures
are lower bounds of whole physical cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import yaml

from penstock.capacity import TokenCurve, TokenPoint
from penstock_planner.evidence import (
    CLOSED_LOOP_ERROR,
    Evidence,
    Interval,
    Origin,
    curve_of_closed_loop,
    curve_of_tokens,
    of_file,
)
from penstock_planner.processors import LEAST_WIDTH, LoadRates, processor_of

MIXED_TOKENS = 65
"""Mean length of the mixed lengths."""
ANSWER_TOKENS = 64
"""Of text generation."""
CAVEATS = ("on virtual CPUs of a shared host, each counted as a physical core: a lower bound",)


@dataclass(frozen=True)
class Project:
    """The measurements."""

    closed_loops: tuple[dict[str, Any], ...]
    generation: tuple[dict[str, Any], ...]
    curves: tuple[tuple[str, Evidence], ...]
    """Family and evidence."""

    @property
    def loads(self) -> tuple[LoadRates, ...]:
        """The same loads on several processors."""
        rates: dict[tuple[str, int], dict[str, float]] = {}
        for one in self.closed_loops:
            processor = processor_of(one["hardwareClass"])
            for tokens, (rate, _) in one["one"].items():
                rates.setdefault((f"1 client, {tokens} tokens", tokens), {})[processor] = rate
            for tokens, (rate, _) in one["many"].items():
                rates.setdefault((f"16 clients, {tokens} tokens", tokens), {})[processor] = rate
            rates.setdefault(("32 clients, mixed lengths", MIXED_TOKENS), {})[processor] = one["mixed"][0]
        return tuple(LoadRates(name, tokens, found) for (name, tokens), found in rates.items())

    def evidence(self, family: str, tokens: int, model: str, objective_milliseconds: float) -> tuple[Evidence, ...]:
        """For a family of encoders and a mean length, or for a model of text generation by its name."""
        found = [one for of, one in self.curves if of == family]
        found += [_of_closed_loop(one, tokens) for one in self.closed_loops if one["family"] == family]
        name = model.lower()
        found += [_of_generation(one, objective_milliseconds) for one in self.generation if one["model"] in name]
        return tuple(found)


@cache
def project() -> Project:
    """Those in this package."""
    text = resources.files("penstock_planner").joinpath("project.yaml").read_text(encoding="utf-8")
    value = yaml.safe_load(text)
    curves = [
        (model["family"], _ours(evidence, ("random weights",)))
        for model in value["models"]
        for evidence in of_file(yaml.safe_dump({"measurements": model["measurements"]}), name="project.yaml")
    ]
    return Project(tuple(value["closedLoops"]), tuple(value["generation"]), tuple(curves))


def _ours(evidence: Evidence, caveats: tuple[str, ...] = ()) -> Evidence:
    return replace(
        evidence, origin=Origin.MEASURED_BY_PROJECT, caveats=(*evidence.caveats, *caveats, *CAVEATS),
        basis=f"measured by the project: {evidence.basis}",
    )  # fmt: skip


def _of_closed_loop(one: dict[str, Any], tokens: int) -> Evidence:
    """The throughput with 16 clients and the latency with one, of the shortest measured length that is not shorter.

    Without a measurement of 16 clients at that length, the throughput of one client counts, a lower bound.
    """
    length = min((known for known in one["one"] if known >= tokens), default=max(one["one"]))
    alone, latency = one["one"][length]
    rate = one["many"].get(length, (alone,))[0]
    return _ours(
        Evidence(
            hardware_class=one["hardwareClass"],
            cores=one["cores"],
            plan="int8",
            curve=curve_of_closed_loop(rate, latency),
            origin=Origin.MEASURED_BY_PROJECT,
            basis=f"{one['source']}, {length} tokens",
            interval=Interval.around(CLOSED_LOOP_ERROR),
            caveats=("latency under load estimated by a queueing formula",),
        )
    )


def _of_generation(one: dict[str, Any], objective_milliseconds: float) -> Evidence:
    points = [
        TokenPoint(
            clients=clients, requests_per_second=rate / ANSWER_TOKENS, tokens_per_second=rate,
            first_token_p95_milliseconds=first, next_token_p95_milliseconds=following, samples=1,
        )
        for clients, first, following, rate in one["points"]
    ]  # fmt: skip
    return _ours(
        Evidence(
            hardware_class=one["hardwareClass"],
            cores=one["cores"],
            plan="native-int8",
            curve=curve_of_tokens(TokenCurve.of(points, first_token=objective_milliseconds, next_token=None)),
            origin=Origin.MEASURED_BY_PROJECT,
            basis=one["source"],
            interval=Interval.around(LEAST_WIDTH),
            caveats=("prompts of 128 tokens, answers of 64; times are medians, where the objective is a p95",),
            tokens_per_request=float(ANSWER_TOKENS),
        )
    )
