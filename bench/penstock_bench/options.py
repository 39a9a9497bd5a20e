"""What to measure: the options of `penstock bench`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from penstock.manifest import Frozen
from penstock_bench.grid import PUBLISHED_BATCHES, PUBLISHED_CORES, PUBLISHED_LENGTHS


class BenchOptions(Frozen):
    """See `penstock bench --help`; each field's description is that of its flag."""

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
    task: str | None = Field(default=None, description="Task of a server given by URL, when its /info does not tell.")
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
