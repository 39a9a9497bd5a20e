"""The memory of bulk work does not depend on the size of the input, nor on the size of its row groups."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

ROOT = Path(__file__).parents[2]
SECONDS = 500.0
PAYLOAD_BYTES = 10_000
PROGRAM = """
import sys
from pathlib import Path
from tests.bulk.corpora import load, planned
folder = Path(sys.argv[1])
with load(folder / "models") as model:
    plan, _, work = planned(folder / sys.argv[2], folder / f"out-{sys.argv[2]}", model, shard_rows=700)
    assert work.run().rows == plan.rows
# Not getrusage: its peak includes the process that started this one.
print(next(int(line.split()[1]) / 1024 for line in Path("/proc/self/status").open() if line.startswith("VmHWM")))
"""

pytestmark = pytest.mark.slow


def some_rows(count: int) -> Iterator[dict[str, str]]:
    return ({"text": f"bird {row % 100}", "payload": f"{row:08}" * (PAYLOAD_BYTES // 8)} for row in range(count))


def write(path: Path, count: int) -> None:
    """Parquet with one row group, or JSON lines; not more than some rows in the memory of this process."""
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in some_rows(count))
        return
    table = pa.Table.from_pylist(list(some_rows(count)))
    parquet.write_table(table, path, row_group_size=count, use_dictionary=False, compression="none")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_peak_memory_is_the_same_for_a_larger_input(suffix: str, tmp_path: Path) -> None:
    peaks = {}
    for count in (8_000, 24_000):  # 80 and 240 MB
        name = f"{count}.{suffix}"
        write(tmp_path / name, count)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), name],
            cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        peaks[count] = float(done.stdout)
    print(suffix, peaks)

    assert peaks[24_000] < 1.1 * peaks[8_000], peaks
