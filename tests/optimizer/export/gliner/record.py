"""Records the answers of the package gliner: `pip install gliner==0.2.29`, then
`python -m tests.optimizer.export.gliner.record`.

Entities of each text at a threshold that leaves several, flat and with several labels for a span.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.optimizer.export.gliner.folders import CASES, LABELS, TEXTS, THRESHOLD, write_gliner

GOLDEN = Path(__file__).with_name("golden.json")


def main() -> None:
    """Write `GOLDEN`."""
    package = importlib.import_module("gliner")
    recorded: dict[str, Any] = {"gliner": importlib.metadata.version("gliner")}
    for case in CASES:
        with TemporaryDirectory() as place:
            model = package.GLiNER.from_pretrained(str(write_gliner(Path(place, case), case)), local_files_only=True)
            recorded[case] = {
                kind: [
                    [
                        [one["start"], one["end"], one["label"], round(one["score"], 6)]
                        for one in model.predict_entities(
                            text, list(LABELS), threshold=THRESHOLD, multi_label=kind == "multi_label"
                        )
                    ]
                    for text in TEXTS
                ]
                for kind in ("flat", "multi_label")
            }
    GOLDEN.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
