"""Base models of the families for the benchmarks: with MiniLM's tokenizer, as other servers need a usual one."""

from __future__ import annotations

from pathlib import Path

from benchmarks.models import made_once, write_tokenizer
from penstock_bench.random_models.families import write_family


def family_model(name: str) -> Path:
    """The family's base model as an embedder of texts of up to 512 tokens; written once."""
    return made_once(f"family-{name}", lambda path: write_family(path, name, tokenizer=write_tokenizer))
