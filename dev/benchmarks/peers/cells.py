"""The measured settings: one client and many at fixed lengths, many with mixed lengths; and the aims. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.models import MOST_TOKENS
from penstock_bench.judge import QUIET_ENOUGH
from penstock_bench.results import Figures, paired_ratio
from penstock_optimizer.load.workload import STANDARD_LENGTHS, LengthMix

MIXED = 0
"""Instead of a length: log-normal, median 44, p95 187, at most 512 tokens."""
MIXED_TEXTS = 256


@dataclass(frozen=True)
class Cell:
    """One measurement of every server."""

    clients: int
    tokens: int

    @property
    def name(self) -> str:
        """In tables, such as `128 tokens, 16 clients`."""
        lengths = "mixed lengths" if self.tokens == MIXED else f"{self.tokens} tokens"
        return f"{lengths}, {self.clients} client{'s' if self.clients > 1 else ''}"

    def lengths(self, *, seed: int) -> list[int]:
        """Of the texts to send, in order: enough different ones that no cache could help."""
        if self.tokens == MIXED:
            return LengthMix(maximum=MOST_TOKENS).sample(MIXED_TEXTS, seed=seed)
        return [self.tokens] * 64


SINGLE = tuple(Cell(clients=1, tokens=tokens) for tokens in STANDARD_LENGTHS)
CONCURRENT = tuple(Cell(clients=clients, tokens=tokens) for clients in (16, 64) for tokens in (32, 128))
TRAFFIC = (Cell(clients=32, tokens=MIXED),)
GROUPS: Mapping[str, tuple[Cell, ...]] = {"single": SINGLE, "concurrent": CONCURRENT, "mixed": TRAFFIC}

MIXED_RATE = 2.5
MIXED_P95 = 0.40
SHORTEST_RATE = 1.3


@dataclass(frozen=True)
class Aim:
    """The aim in one cell against one server, and whether it was reached."""

    cell: str
    peer: str
    text: str
    passed: bool | None
    """None: the machine was too busy to tell."""


def aims(cell: Cell, figures: Mapping[str, Figures], *, ours: str, same_graph: Sequence[str], cores: int) -> list[Aim]:
    """Judge one cell. `same_graph`: servers of the kind that must not be faster for one client (TEI with our int8
    file); every server is held against in the other cells."""
    own = figures.get(ours)
    if own is None or own.latency is None:
        return [Aim(cell.name, ours, "answered nothing", passed=False)] if own is not None else []
    found = []
    for peer, theirs in figures.items():
        ratio = paired_ratio(own, theirs)
        if peer == ours or ratio is None or theirs.latency is None:
            continue
        foreign = max(own.foreign_cores or 0.0, theirs.foreign_cores or 0.0) / cores
        reached: bool
        if cell.tokens == MIXED:
            share = own.latency.p95 / theirs.latency.p95
            text = f"{ratio:.2f}x the rate ({MIXED_RATE:g}x asked), {share:.0%} of the p95 ({MIXED_P95:.0%} asked)"
            reached = ratio >= MIXED_RATE and share <= MIXED_P95
        elif cell.clients > 1:
            text, reached = f"{ratio:.2f}x the rate (ahead asked)", ratio > 1
        elif peer in same_graph:
            asked = SHORTEST_RATE if cell.tokens == min(STANDARD_LENGTHS) else 1.0
            text, reached = f"{ratio:.2f}x the rate ({asked:g}x asked)", ratio >= asked
        else:
            continue
        if foreign > QUIET_ENOUGH:
            found.append(Aim(cell.name, peer, f"{text}; others took {foreign:.0%} of the CPUs", passed=None))
        else:
            found.append(Aim(cell.name, peer, text, passed=reached))
    return found
