"""The published experiment with the real MiniLM: embeddings, two cores, one client, one text each, 8 to 512 tokens.

    python -m benchmarks.minilm [--cores 2] [--seconds 6] [--rounds 5] [--output bench/minilm]

Penstock's chosen plan against a plain transformers pipeline behind FastAPI, interleaved, in one run. Writes
results.csv, results.json, report.html and results.md.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.experiment import experiment
from benchmarks.models import minilm
from penstock.tasks import TaskName

main = experiment("minilm-512", minilm, TaskName.FEATURE_EXTRACTION, output=Path("bench/minilm"), text=__doc__)

if __name__ == "__main__":
    main()
