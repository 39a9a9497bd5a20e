"""The folder of results: written after every setting in one piece, found again after an interruption, set aside when
another experiment comes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from penstock_bench.results.report import render
from penstock_bench.results.results import BenchResults
from penstock_bench.results.tables import to_csv
from penstock_runtime.host.disk import translate_full_disk, prepare_folder

RESULTS, TABLE, REPORT = "results.json", "results.csv", "report.html"
WHAT = "the folder"
"""In errors about it."""


class ResultsFolder:
    """`results.json` (everything), `results.csv`, `report.html`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self) -> None:
        """Make the folder; HostError, before anything is measured, when nothing can be written there."""
        prepare_folder(self.path, what=WHAT, option="--output")

    def read(self) -> BenchResults | None:
        """What an earlier run has left; None without one, or of another version of Penstock."""
        try:
            return BenchResults.model_validate_json((self.path / RESULTS).read_bytes())
        except (OSError, ValidationError):
            return None

    def unfinished(self, experiment: str) -> BenchResults | None:
        """What an interrupted run of the same experiment has measured."""
        earlier = self.read()
        same = earlier is not None and earlier.experiment == experiment and not earlier.finished
        return earlier if same else None

    def set_aside(self) -> Path | None:
        """Move the files of an earlier run into a new folder next to them, and return it; None where there are none."""
        files = [file for name in (RESULTS, TABLE, REPORT) if (file := self.path / name).exists()]
        if not files:
            return None
        earlier = self.read()
        name = "earlier" if earlier is None else earlier.created.partition("+")[0].replace(":", "-")
        number = 1
        while (aside := self.path / (name if number == 1 else f"{name}-{number}")).exists():
            number += 1
        with translate_full_disk(self.path, what=WHAT):
            aside.mkdir()
            for file in files:
                file.rename(aside / file.name)
        return aside

    def write(self, results: BenchResults) -> None:
        """All three files, each written atomically: a reader at any time, also after a crash, finds the
        one before or this one."""
        contents: Mapping[str, str] = {
            RESULTS: results.model_dump_json(indent=1),
            TABLE: to_csv(results),
            REPORT: render(results),
        }
        with translate_full_disk(self.path, what=WHAT):
            for name, content in contents.items():
                draft = self.path / f".{name}.draft"
                draft.write_text(content, encoding="utf-8")
                draft.replace(self.path / name)
