"""Which settings are measured, and the reasons for leaving out the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_bench.grid import (
    PUBLISHED_BATCHES,
    PUBLISHED_CORES,
    PUBLISHED_LENGTHS,
    BenchSetting,
    plan_grid,
)


def test_the_published_experiment_has_192_settings() -> None:
    grid = plan_grid(PUBLISHED_CORES, PUBLISHED_LENGTHS, PUBLISHED_BATCHES, machine_cores=8, max_tokens=512)

    assert len(set(grid.settings)) == 192
    assert grid.left_out == ()


def test_settings_that_this_machine_cannot_run_are_named() -> None:
    grid = plan_grid((1, 8), (8, 512), (1,), machine_cores=4, max_tokens=256)

    assert grid.settings == (BenchSetting(1, 8, 1),)
    assert grid.left_out == ("8 cores: this machine has 4", "512 tokens: this model takes 256")


def test_a_text_of_special_tokens_alone_is_not_measured() -> None:
    grid = plan_grid((1,), (2, 8), (1,), machine_cores=4, max_tokens=256)

    assert grid.settings == (BenchSetting(1, 8, 1),)
    assert grid.left_out == ("2 tokens: the shortest input of this task has 3 with this tokenizer",)


def test_the_cores_of_a_server_given_by_url_are_not_varied() -> None:
    grid = plan_grid((1, 2), (8,), (1, 4), machine_cores=None, max_tokens=512)

    assert grid.settings == (BenchSetting(0, 8, 1), BenchSetting(0, 8, 4))
    assert grid.left_out == ("numbers of cores: a server given by URL has those that it has",)


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


@pytest.mark.parametrize(
    ("setting", "label"),
    [
        (BenchSetting(1, 8, 1), "1 core, 8 tokens, batch 1"),
        (BenchSetting(2, 128, 4), "2 cores, 128 tokens, batch 4"),
        (BenchSetting(0, 8, 1), "8 tokens, batch 1"),
    ],
)
def test_a_setting_has_its_label(setting: BenchSetting, label: str) -> None:
    assert setting.label == label
