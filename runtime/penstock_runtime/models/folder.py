"""A model folder on disk, read and checked. (Signature agreed; see the methods.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any


class Pooling(StrEnum):
    """How token vectors become one (`1_Pooling/config.json`)."""

    CLS = "cls"
    MEAN = "mean"
    MAX = "max"
    LAST = "last"


@dataclass(frozen=True)
class ModelFolder:
    """What a model's own files say."""

    path: Path
    config: Mapping[str, Any]
    """`config.json`."""

    @classmethod
    def open(cls, path: Path) -> ModelFolder:
        """Read and check a folder. UnsafeModel for pickled weights only, or remote code; CorruptModel for missing or
        truncated files; each error names the file."""
        raise NotImplementedError

    @cached_property
    def model_type(self) -> str:
        """Such as `bert`."""
        raise NotImplementedError

    @cached_property
    def architecture(self) -> str:
        """First entry of `architectures`, such as `BertForSequenceClassification`."""
        raise NotImplementedError

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """`id2label` in order of ids."""
        raise NotImplementedError

    @cached_property
    def max_tokens(self) -> int:
        """The longest sequence, special tokens included: position table less its offset, and the tokenizer's or
        sentence-transformers' own limit where lower."""
        raise NotImplementedError

    @cached_property
    def pooling(self) -> Pooling | None:
        """From sentence-transformers' modules; None when the folder is a plain transformers model."""
        raise NotImplementedError

    @cached_property
    def normalize(self) -> bool:
        """True when sentence-transformers' modules end in Normalize."""
        raise NotImplementedError

    @cached_property
    def safetensors(self) -> tuple[Path, ...]:
        """Weight files in shard order; empty when there are none."""
        raise NotImplementedError

    @cached_property
    def onnx(self) -> Path | None:
        """The model's own graph: `model.onnx` or `onnx/model.onnx`."""
        raise NotImplementedError

    def digest(self) -> str:
        """sha256 over names and contents of the files that matter."""
        raise NotImplementedError
