"""The published experiment: DistilBERT text classification, two cores, one client, one text a request, 8 to 512 tokens.

    python -m benchmarks.distilbert [--cores 2] [--seconds 6] [--rounds 5] [--output bench/distilbert]

Penstock's chosen plan against a plain transformers pipeline behind FastAPI, interleaved, in one run. Weights are
random: speed does not depend on them. Writes results.csv, results.json, report.html and results.md.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.experiment import experiment
from benchmarks.models import distilbert
from penstock.tasks import TaskName

main = experiment(
    "distilbert-66m", distilbert, TaskName.TEXT_CLASSIFICATION, output=Path("bench/distilbert"), text=__doc__
)

if __name__ == "__main__":
    main()
