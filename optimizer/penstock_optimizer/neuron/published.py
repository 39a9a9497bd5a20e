"""Published throughput and latency of encoders: the rows of `published_encoders.csv` in this package, with sources.

They are figures of other authors on their machines. Most are closed loops inside one process: without HTTP and, where
the row does not mention it, without tokenisation.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources


class Mode(StrEnum):
    """How a model is spread over the cores of an accelerator."""

    DATA_PARALLEL = "data_parallel"
    """One copy of the model for each core."""
    PIPELINE = "pipeline"
    """One copy of the model over several cores, each with a part of its layers."""
    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True)
class PublishedFigure:
    """One published measurement."""

    hardware_class: str
    """A hardware class, or `gpu-...`."""
    instance: str
    model: str
    tokens: int
    batch: int
    mode: Mode
    cores_per_model: int
    """Of a pipeline: its cores; else 1."""
    instance_cores: int
    """Cores that the throughput is of; 1 for a GPU."""
    per_second: float
    """Sequences per second."""
    p50_milliseconds: float | None
    p95_milliseconds: float | None
    p99_milliseconds: float | None
    precision: str
    software: str
    source_kind: str
    source: str
    remark: str

    @property
    def latency_milliseconds(self) -> float:
        """The p95, or the nearest published quantile: the p99, else the median."""
        found = self.p95_milliseconds or self.p99_milliseconds or self.p50_milliseconds
        return found if found is not None else 1000 * self.batch / self.per_second

    @property
    def release(self) -> tuple[int, ...]:
        """The number of the Neuron SDK that it was measured with, such as (2, 20, 0); empty if it is not stated."""
        found = re.search(r"SDK ([\d.]+)", self.software)
        return tuple(map(int, found[1].strip(".").split("."))) if found else ()

    @property
    def is_anomalous(self) -> bool:
        """Whether it contradicts all other rows, by its remark."""
        return "anomalous" in self.remark

    @property
    def uses_the_whole_instance(self) -> bool:
        """False for a row of one core of several: its throughput does not fit the price of the node."""
        return "ONE core" not in self.remark


def parse_rows(lines: Iterable[str]) -> tuple[PublishedFigure, ...]:
    """The rows of a CSV file in the form of `published_encoders.csv`. ValueError or KeyError for another form."""

    def number(text: str) -> float | None:
        return float(text) if text else None

    return tuple(
        PublishedFigure(
            hardware_class=row["hardware_class"],
            instance=row["instance"],
            model=row["model"],
            tokens=int(row["tokens"]),
            batch=int(row["batch"]),
            mode=Mode(row["mode"]),
            cores_per_model=int(row["cores_per_model"] or 1),
            instance_cores=int(row["instance_cores"] or 1),
            per_second=float(row["per_second"]),
            p50_milliseconds=number(row["p50_milliseconds"]),
            p95_milliseconds=number(row["p95_milliseconds"]),
            p99_milliseconds=number(row["p99_milliseconds"]),
            precision=row["precision"],
            software=row["software"],
            source_kind=row["source_kind"],
            source=row["source"],
            remark=row["remark"],
        )
        for row in csv.DictReader(lines)
    )


@cache
def published_rows() -> tuple[PublishedFigure, ...]:
    """The rows in this package."""
    text = resources.files("penstock_optimizer.neuron").joinpath("published_encoders.csv").read_text(encoding="utf-8")
    return parse_rows(text.splitlines())


@dataclass(frozen=True)
class ModelShape:
    """What the time of an encoder depends on."""

    family: str
    """Models of one family have the same time; empty if it is not one of `SHAPES`."""
    layers: int
    hidden: int
    weights: int
    embedding_weights: int = 0
    """Weights of the embeddings, which are on the host on Inf1."""

    @property
    def block_weights(self) -> int:
        """Weights that one pass reads: 12 H^2 for each layer (Kaplan et al., 2020), also where layers share them."""
        return 12 * self.layers * self.hidden**2

    @property
    def device_weights(self) -> int:
        """Weights that are on an Inf1 device."""
        return self.weights - self.embedding_weights

    def operations(self, tokens: int) -> float:
        """Floating-point operations of one sequence: 24 L H^2 s + 4 L H s^2 (Kaplan et al., 2020, and attention)."""
        return self.layers * (24.0 * self.hidden**2 * tokens + 4.0 * self.hidden * tokens**2)


SHAPES = {
    "bert-base": ModelShape("bert-base", 12, 768, 110_000_000, 24_000_000),
    "bert-large": ModelShape("bert-large", 24, 1024, 335_000_000, 32_000_000),
    "distilbert": ModelShape("distilbert", 6, 768, 66_000_000, 24_000_000),
    "albert-base": ModelShape("albert-base", 12, 768, 11_700_000, 4_000_000),
    "minilm-l6": ModelShape("minilm-l6", 6, 384, 22_700_000, 12_000_000),
    "minilm-l12": ModelShape("minilm-l12", 12, 384, 33_400_000, 12_000_000),
}
"""Shapes with published figures, and those that estimates are made for. RoBERTa, ELECTRA and CamemBERT of one size
compute what BERT computes."""

_NAMES = (
    (r"minilm[-_.]?(?:l[-_]?12|12)|l12[-_]h384", "minilm-l12"),
    (r"minilm[-_.]?(?:l[-_]?6|6)|l6[-_]h384", "minilm-l6"),
    (r"distil", "distilbert"),
    (r"albert[-_]base", "albert-base"),
    (r"large", "bert-large"),
    (r"bert.*base|base.*bert|electra.*base|mpnet|(?:bge|gte|e5)[-_]base|bert[-_]base", "bert-base"),
)
"""Patterns of a model's name, the first that is found counts."""


def shape_of(model: str) -> ModelShape | None:
    """The shape of a model, from its name; None if the name does not tell.

    `xlm-` and `deberta` models have other sizes at the same names and are not matched.
    """
    name = model.lower()
    if re.search(r"xlm-|deberta|modernbert|small|tiny|mini(?!lm)", name):
        return None
    return next((SHAPES[family] for pattern, family in _NAMES if re.search(pattern, name)), None)
