"""The settings of the experiment: cores x lengths x batches, and which of them this machine cannot do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PUBLISHED_CORES = (1, 2, 4, 8)
PUBLISHED_LENGTHS = (8, 16, 32, 64, 128, 256, 384, 512)
PUBLISHED_BATCHES = (1, 2, 4, 8, 16, 32)
"""4 x 8 x 6 = 192 settings: the experiment as it was published."""


@dataclass(frozen=True, order=True)
class BenchSetting:
    """One cell of the experiment."""

    cores: int
    """Physical cores of the server; 0 where the server is not ours to place (given by URL)."""
    tokens: int
    batch: int
    """Texts in one request."""

    @property
    def label(self) -> str:
        """In progress lines, such as `2 cores, 128 tokens, batch 4`."""
        cores = "" if self.cores == 0 else "1 core, " if self.cores == 1 else f"{self.cores} cores, "
        return f"{cores}{self.tokens} tokens, batch {self.batch}"


@dataclass(frozen=True)
class BenchGrid:
    """What will be measured, and what not, in words."""

    settings: tuple[BenchSetting, ...]
    """By cores, then length, then batch: servers are started once for each number of cores."""
    left_out: tuple[str, ...]
    """One sentence for each value that this machine or model cannot do."""

    @property
    def cores(self) -> tuple[int, ...]:
        """The numbers of cores, ascending."""
        return tuple(sorted({setting.cores for setting in self.settings}))

    def of(self, cores: int) -> tuple[BenchSetting, ...]:
        """The settings with this number of cores."""
        return tuple(setting for setting in self.settings if setting.cores == cores)


def plan_grid(
    cores: Iterable[int],
    lengths: Iterable[int],
    batches: Iterable[int],
    *,
    machine_cores: int | None,
    max_tokens: int,
    shortest: int = 3,
) -> BenchGrid:
    """The settings that can be measured here.

    `machine_cores`: physical cores that this process may use; None: the server is given by URL and has the cores that
    it has. `max_tokens`: the longest input of the model. `shortest`: tokens of the shortest input of the task.
    """
    left_out: list[str] = []
    if machine_cores is None:
        possible_cores: Sequence[int] = (0,)
        left_out.append("numbers of cores: a server given by URL has those that it has")
    else:
        wanted = sorted(set(cores))
        possible_cores = [count for count in wanted if count <= machine_cores]
        left_out += [f"{_count(count)}: this machine has {machine_cores}" for count in wanted if count > machine_cores]
    possible_lengths: list[int] = []
    for tokens in sorted(set(lengths)):
        if tokens > max_tokens:
            left_out.append(f"{tokens} tokens: this model takes {max_tokens}")
        elif tokens < shortest:
            left_out.append(f"{tokens} tokens: the shortest input of this task has {shortest} with this tokenizer")
        else:
            possible_lengths.append(tokens)
    return BenchGrid(
        settings=tuple(
            BenchSetting(cores=count, tokens=tokens, batch=batch)
            for count in possible_cores
            for tokens in possible_lengths
            for batch in sorted(set(batches))
        ),
        left_out=tuple(left_out),
    )


def _count(cores: int) -> str:
    return "1 core" if cores == 1 else f"{cores} cores"
