"""The rule by CPU, and the published table that it is derived from."""

from __future__ import annotations

import pytest

from penstock.hardware import Isa
from penstock_bench.judge import judge_lengths, published_source, published_table


def test_published_ratios_are_those_of_the_table() -> None:
    ratios = {tokens: round(row.ratio, 2) for tokens, row in published_table().items()}

    assert ratios == {8: 5.06, 16: 4.24, 32: 3.75, 64: 3.46, 128: 3.06, 256: 3.0, 384: 3.4, 512: 3.0}
    assert "Hugging Face" in published_source()


@pytest.mark.parametrize(
    ("isa", "tokens", "ratio", "milliseconds", "floor", "passed", "reason"),
    [
        (Isa.AMX, 8, 8.1, 1.0, None, True, "8.10x, 8.00x asked for"),
        (Isa.AMX, 8, 7.9, 1.0, None, False, "7.90x, 8.00x asked for"),
        # 3.4643 is required: a ratio that is printed as equal passes.
        (Isa.AMX, 64, 3.461, 1.0, None, True, "3.46x, 3.46x asked for"),
        (Isa.AMX, 64, None, 1.0, None, None, "3.46x asked for, no baseline measured"),
        (Isa.AMX, 100, 9.0, 1.0, None, None, "no published figure for this length"),
        (Isa.AVX2, 32, 5.0, 1.0, None, True, "5.00x, 5.00x asked for"),
        (Isa.AVX2, 128, 1.2, 10.9, 10.0, True, "+9% to the fastest forward pass, 10% allowed"),
        (Isa.AVX2, 128, 9.0, 11.5, 10.0, False, "+15% to the fastest forward pass, 10% allowed"),
        (Isa.AVX2, 128, 9.0, 11.5, None, None, "the engines' own forward pass was not measured"),
        (Isa.AVX512_VNNI, 32, 8.0, 1.0, None, True, "8.00x, 8.00x asked for"),
        (Isa.AVX_VNNI, 32, 7.0, 1.0, None, False, "7.00x, 8.00x asked for"),
        (Isa.AVX512, 64, 9.0, 11.5, None, None, "the engines' own forward pass was not measured"),
    ],
)
def test_verdicts(
    *,
    isa: Isa,
    tokens: int,
    ratio: float | None,
    milliseconds: float,
    floor: float | None,
    passed: bool | None,
    reason: str,
) -> None:
    (verdict,) = judge_lengths(
        isa,
        milliseconds={tokens: milliseconds},
        ratios={} if ratio is None else {tokens: ratio},
        floors={} if floor is None else {tokens: floor},
    )

    assert (verdict.passed, verdict.reason) == (passed, reason)


def test_nothing_is_judged_on_a_noisy_machine() -> None:
    verdicts = judge_lengths(
        Isa.AMX,
        milliseconds={8: 1.0, 64: 1.0},
        ratios={8: 90.0, 64: 90.0},
        floors={},
        foreign_shares={8: 0.6, 64: 0.05},
    )

    assert [verdict.passed for verdict in verdicts] == [None, True]
    assert verdicts[0].reason == ("90.00x, 8.00x asked for; too noisy to judge: others took 60% of the servers' CPUs")
