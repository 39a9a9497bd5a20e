"""No number in a model's config.json decides how much memory its export takes: each is made huge, one at a time."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.tasks import Head
from penstock_optimizer.export import DECODERS, family_of, read_decoder
from penstock_optimizer.export.build.encoder import build
from penstock_optimizer.export.build.operators import Flavour
from penstock_optimizer.export.reader import NotBuildable
from penstock_runtime.models.folder import ModelFolder

MOST_BYTES = 256 * 2**20
"""A table of angles for 131,072 positions takes some of it."""
HUGE = 10**9


def changed(path: Path) -> Iterator[str]:
    """Write config.json once for each of its whole numbers, with another value, and give the number's name."""
    file = path / "config.json"
    original = file.read_text()
    config = json.loads(original)
    for name, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool):
            file.write_text(json.dumps({**config, name: HUGE}))
            yield name
    file.write_text(original)


def read(path: Path) -> None:
    """All that is read of a folder before its graph is written."""
    folder = ModelFolder.open(path)
    family = family_of(folder)
    assert family is not None
    model = family(folder)
    encoder = model.encoder()
    build(encoder, model.top(Head.ENCODER, encoder), Flavour.PLAIN)
    if folder.model_type in DECODERS:
        read_decoder(folder)


def main() -> None:
    """Prints the numbers that take too much, of the folders that are the arguments."""
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
    for path in map(Path, sys.argv[1:]):
        read(path)
        for name in changed(path):
            tracemalloc.start()
            try:
                read(path)
            except (PenstockError, NotBuildable):
                pass
            except MemoryError:
                print(path.name, name, "MemoryError")
            if (peak := tracemalloc.get_traced_memory()[1]) > MOST_BYTES:
                print(path.name, name, f"{peak:,} bytes")
            tracemalloc.stop()


@pytest.mark.parity
def test_no_number_of_a_configuration_decides_how_much_memory_an_export_takes(tmp_path: Path) -> None:
    from tests.optimizer.export.models import DECODERS as DECODER_FIELDS
    from tests.optimizer.export.models import FAMILIES, make

    t5 = {"vocab_size": 61, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 3}
    for name, fields in {**FAMILIES, **DECODER_FIELDS, "T5Config": t5}.items():
        tied: dict[str, Any] = {"tie_word_embeddings": True} if name in DECODER_FIELDS else {}
        make(tmp_path / name, name, Head.ENCODER, **fields, **tied)

    command = [sys.executable, "-m", __name__, *map(str, sorted(tmp_path.iterdir()))]
    found = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


if __name__ == "__main__":
    main()
