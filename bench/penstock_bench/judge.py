"""Whether the speed aimed at is reached, length by length, and by which rule: it depends on the CPU. Pure.

The published figures compare Hugging Face Infinity with plain transformers.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from types import MappingProxyType

from penstock.hardware import Isa
from penstock.manifest import Frozen

TABLE = "infinity_c6i_2cores_batch1.csv"
TABLE_CORES = 2
TABLE_BATCH = 1


@dataclass(frozen=True)
class PublishedRow:
    """Requests per second at one length."""

    tokens: int
    infinity_per_second: float
    transformers_per_second: float

    @property
    def ratio(self) -> float:
        """How much faster Infinity was."""
        return self.infinity_per_second / self.transformers_per_second


@cache
def published_table() -> Mapping[int, PublishedRow]:
    """The rows by length in tokens, ascending. The file's comment names the source."""
    lines = resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return MappingProxyType(
        {
            int(row["sequence_length"]): PublishedRow(
                tokens=int(row["sequence_length"]),
                infinity_per_second=float(row["infinity_rps"]),
                transformers_per_second=float(row["transformers_rps"]),
            )
            for row in rows
        }
    )


@cache
def published_source() -> str:
    """The comment at the top of the table: model, machine, source."""
    lines = resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


SHORT_TOKENS = 32
"""Up to here the work around the model weighs as much as the model, and the ratio aimed at is higher."""
RATIO_SHORT_WITH_INT8 = 8.0
RATIO_SHORT_WITHOUT_INT8 = 5.0
FLOOR_ALLOWANCE = 1.10
"""Without int8 products no engine is several times faster than another at long inputs: there the aim is to lose
nothing around the fastest of them."""
QUIET_ENOUGH = 0.15
"""Other processes took more than this of the servers' CPUs: nothing is judged. Noise slows down
plain transformers most, since its threads wait for each other."""


class SpeedRule(StrEnum):
    """The rule for this CPU."""

    INT8_PRODUCTS = "int8-products"
    NO_INT8_PRODUCTS = "no-int8-products"

    @classmethod
    def of(cls, isa: Isa) -> SpeedRule:
        """By instruction set: VNNI, AMX and Arm's dot products count."""
        return cls.INT8_PRODUCTS if isa.has_int8_dot else cls.NO_INT8_PRODUCTS

    @property
    def sentence(self) -> str:
        """For reports."""
        if self is SpeedRule.INT8_PRODUCTS:
            return (
                f"this CPU has 8-bit dot products (VNNI, AMX or alike): at least the published ratio to plain "
                f"transformers at every length, and {RATIO_SHORT_WITH_INT8:g}x up to {SHORT_TOKENS} tokens"
            )
        return (
            f"this CPU has no 8-bit dot products (no VNNI): {RATIO_SHORT_WITHOUT_INT8:g}x plain transformers up to "
            f"{SHORT_TOKENS} tokens; beyond, end to end within {FLOOR_ALLOWANCE - 1:.0%} of the fastest engine's own "
            "forward pass in the same run"
        )


class LengthVerdict(Frozen):
    """One length."""

    tokens: int
    rule: SpeedRule
    ratio: float | None
    """Requests per second divided by the rate of the baseline in the same run; None without a baseline."""
    published_ratio: float | None
    milliseconds: float
    """Median, end to end."""
    floor_milliseconds: float | None
    """Median of the fastest engine's forward pass alone; None where it was not measured."""
    passed: bool | None
    """None: the measurement does not decide it."""
    reason: str
    """Such as `6.1x, 8x asked for`."""


def judge_lengths(
    isa: Isa,
    *,
    milliseconds: Mapping[int, float],
    ratios: Mapping[int, float],
    floors: Mapping[int, float],
    foreign_shares: Mapping[int, float] | None = None,
) -> tuple[LengthVerdict, ...]:
    """Judge every measured length, ascending; all mappings by tokens. `foreign_shares`: what other processes took of
    the servers' CPUs."""
    rule = SpeedRule.of(isa)
    verdicts = (
        _judge(rule, tokens, milliseconds[tokens], ratios.get(tokens), floors.get(tokens))
        for tokens in sorted(milliseconds)
    )
    return tuple(_unless_noisy(verdict, (foreign_shares or {}).get(verdict.tokens, 0.0)) for verdict in verdicts)


def _unless_noisy(verdict: LengthVerdict, share: float) -> LengthVerdict:
    if share <= QUIET_ENOUGH or verdict.passed is None:
        return verdict
    reason = f"{verdict.reason}; too noisy to judge: others took {share:.0%} of the servers' CPUs"
    return verdict.model_copy(update={"passed": None, "reason": reason})


def asked_ratio(rule: SpeedRule, tokens: int) -> float | None:
    """The ratio to the baseline that the rule requires; None if it has no ratio."""
    if rule is SpeedRule.NO_INT8_PRODUCTS:
        return RATIO_SHORT_WITHOUT_INT8 if tokens <= SHORT_TOKENS else None
    row = published_table().get(tokens)
    published = row.ratio if row is not None else 0.0
    asked = max(published, RATIO_SHORT_WITH_INT8) if tokens <= SHORT_TOKENS else published
    return asked or None


def _judge(
    rule: SpeedRule, tokens: int, milliseconds: float, ratio: float | None, floor: float | None
) -> LengthVerdict:
    row = published_table().get(tokens)
    asked = asked_ratio(rule, tokens)
    passed: bool | None = None
    if asked is not None:
        if ratio is None:
            reason = f"{asked:.2f}x asked for, no baseline measured"
        else:
            # Compared as printed: 5.06 required and 5.06 reached is a pass.
            passed = round(ratio, 2) >= round(asked, 2)
            reason = f"{ratio:.2f}x, {asked:.2f}x asked for"
    elif rule is SpeedRule.NO_INT8_PRODUCTS:
        if floor is None:
            reason = "the engines' own forward pass was not measured"
        else:
            over = milliseconds / floor - 1
            passed = milliseconds <= floor * FLOOR_ALLOWANCE
            reason = f"{over:+.0%} to the fastest forward pass, {FLOOR_ALLOWANCE - 1:.0%} allowed"
    else:
        reason = "no published figure for this length"
    return LengthVerdict(
        tokens=tokens,
        rule=rule,
        ratio=ratio,
        published_ratio=row.ratio if row is not None else None,
        milliseconds=milliseconds,
        floor_milliseconds=floor,
        passed=passed,
        reason=reason,
    )
