"""The plan of an experiment: options, the grid of settings, CPUs of server and client, the time left. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from penstock.manifest import Frozen
from penstock_runtime.host import Host

PUBLISHED_CORES = (1, 2, 4, 8)
PUBLISHED_LENGTHS = (8, 16, 32, 64, 128, 256, 384, 512)
PUBLISHED_BATCHES = (1, 2, 4, 8, 16, 32)
"""4 x 8 x 6 = 192 settings: the experiment as it was published."""


@dataclass(frozen=True, order=True)
class BenchSetting:
    """One cell of the experiment."""

    cores: int
    """Physical cores of the server; 0 for a server given by URL."""
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


class BenchOptions(Frozen):
    """See `penstock bench --help`; the descriptions of fields are the help of its flags."""

    target: str = Field(
        description="A ModelEndpoint YAML file, which is optimised and served for each number of cores; or the URL of "
        "a running server (http://host:port, with the path before /predict where it has one), measured as it is.",
    )
    cores: tuple[int, ...] = Field(
        default=PUBLISHED_CORES, min_length=1, description="Physical cores of the server, each a series of its own."
    )
    lengths: tuple[int, ...] = Field(default=PUBLISHED_LENGTHS, min_length=1, description="Tokens of each text.")
    batches: tuple[int, ...] = Field(default=PUBLISHED_BATCHES, min_length=1, description="Texts in one request.")
    seconds: float = Field(
        default=3.0, gt=0, description="Seconds that each server is measured in each setting, all rounds together."
    )
    rounds: int = Field(
        default=3, ge=1, le=50, description="Rounds of each setting: the servers take turns, the median counts."
    )
    patience_seconds: float = Field(
        default=120.0, gt=0, description="No further round of a setting is begun after this time (slow settings)."
    )
    baseline: bool = Field(
        default=False,
        description="Measure plain transformers behind FastAPI in the same run, in turns, on the same cores (needs the "
        "bench extra, torch: `pip install 'penstock[bench]'`).",
    )
    tokenizer: Path | None = Field(
        default=None,
        description="Model folder whose tokenizer makes the texts, for a server given by URL. Default: everyday "
        "English words, counted as one token each.",
    )
    task: str | None = Field(
        default=None, description="Task of a server given by URL, when its /info does not name it."
    )
    info_url: str = Field(
        default="",
        description="Where the server given by URL answers /info, if not at that URL: on its --internal-port; pods of "
        "an endpoint on port 8081. Without it, the report does not name plan, model and CPU.",
    )
    auth_token: str = Field(
        default="",
        repr=False,
        description="Bearer token that the server given by URL asks for. Prefer the variable: a flag is visible in the "
        "process list.",
    )
    output: Path = Field(default=Path("bench"), description="Folder for results.csv, results.json and report.html.")
    store: Path | None = Field(default=None, description="Folder of artefacts. Default: that of penstock optimize.")
    models: Path | None = Field(default=None, description="Folder of models from the network. Default: the same way.")
    fresh: bool = Field(
        default=False, description="Measure everything anew, even where an interrupted run could go on."
    )
    seed: int = Field(default=0, description="Makes the same texts again.")


@dataclass(frozen=True)
class Placement:
    """Logical CPUs."""

    server: tuple[int, ...]
    """One for each physical core."""
    client: tuple[int, ...]
    """Of other cores; empty when the server has them all, and the client has to share them."""

    @property
    def note(self) -> str:
        """A warning about the figures; empty if there is none."""
        if self.client:
            return ""
        cores = "the one core" if len(self.server) == 1 else f"all {len(self.server)} cores"
        return f"with {len(self.server)} cores the client ran on the server's CPUs: {cores} of this machine are in use"


def place(host: Host, cores: int) -> Placement:
    """The server's CPUs as the runtime itself would choose them; the client's on cores of which the server has nothing.

    HostError when the machine has fewer cores.
    """
    grant = host.usable_cores(cores)
    taken = {cpu for core in host.cores if set(core.cpus) & set(grant.cpus) for cpu in core.cpus}
    return Placement(server=grant.cpus, client=tuple(cpu for cpu in host.allowed if cpu not in taken))


FEWEST = 3
"""Settings to be measured before an estimate is shown."""


def remaining_seconds(taken: Sequence[tuple[BenchSetting, float]], missing: Sequence[BenchSetting]) -> float | None:
    """Seconds for the settings in `missing`, by the seconds of the measured ones; None while too few are known.

    The shortest took the time that every setting takes; the time beyond it grew with the tokens of a request
    and shrank with the cores, since a cell ends with whole requests.
    """
    if len(taken) < FEWEST:
        return None
    least = min(seconds for _, seconds in taken)
    work = sum(_work(setting) for setting, _ in taken)
    slope = sum(seconds - least for _, seconds in taken) / work
    return sum(least + slope * _work(setting) for setting in missing)


def _work(setting: BenchSetting) -> float:
    return setting.tokens * setting.batch / max(setting.cores, 1)
