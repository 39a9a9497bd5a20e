"""Which settings are measured, and the reasons for leaving out the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_bench.grid import (
    PUBLISHED_BATCHES,
    PUBLISHED_CORES,
    PUBLISHED_LENGTHS,
    plan_grid,
)


def test_the_published_experiment_has_192_settings() -> None:
    grid = plan_grid(PUBLISHED_CORES, PUBLISHED_LENGTHS, PUBLISHED_BATCHES, machine_cores=8, max_tokens=512)

    assert len(set(grid.settings)) == 192
    assert grid.left_out == ()


@pytest.mark.parametrize(
    ("cores", "lengths", "machine", "settings", "left_out"),
    [
        (
            (1, 8), (8, 512), 4, ["1 core, 8 tokens, batch 1"],
            ("8 cores: this machine has 4", "512 tokens: this model takes 256"),
        ),
        # Special tokens alone are no text.
        (
            (2,), (2, 128), 4, ["2 cores, 128 tokens, batch 1"],
            ("2 tokens: the shortest input of this task has 3 with this tokenizer",),
        ),
        (
            (1, 2), (8,), None, ["8 tokens, batch 1"],
            ("numbers of cores: a server given by URL has those that it has",),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_named(
    cores: tuple[int, ...],
    lengths: tuple[int, ...],
    machine: int | None,
    settings: list[str],
    left_out: tuple[str, ...],
) -> None:
    grid = plan_grid(cores, lengths, (1,), machine_cores=machine, max_tokens=256)

    assert [setting.label for setting in grid.settings] == settings
    assert grid.left_out == left_out


@given(
    st.lists(st.integers(1, 16), min_size=1),
    st.lists(st.integers(1, 600), min_size=1),
    st.lists(st.integers(1, 64), min_size=1),
    st.integers(1, 8),
    st.integers(8, 512),
)
def test_every_value_is_either_measured_or_named(
    cores: list[int], lengths: list[int], batches: list[int], machine: int, most: int
) -> None:
    grid = plan_grid(cores, lengths, batches, machine_cores=machine, max_tokens=most)

    assert len(grid.left_out) == len({c for c in cores if c > machine}) + len(
        {length for length in lengths if length > most or length < 3}
    )
    assert len(grid.settings) == len({c for c in cores if c <= machine}) * len(
        {length for length in lengths if 3 <= length <= most}
    ) * len(set(batches))
    assert list(grid.settings) == sorted(set(grid.settings))
