"""What a quantiser returns, and copies of a graph with its weights file."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from penstock.manifest import GraphIO


@dataclass(frozen=True)
class Built:
    """A candidate on disk."""

    path: Path
    """`model.onnx`, `model.xml` with `model.bin` next to it, or `model.native`."""
    io: GraphIO
    fused_nodes: dict[str, int] = field(default_factory=dict)
    """Fused and quantised operators by type: what was done, as evidence."""
    notes: tuple[str, ...] = ()
    """What calibration decided, such as `alpha 0.7`."""

    @property
    def size_bytes(self) -> int:
        """All files of the candidate."""
        return sum(file.stat().st_size for file in self.path.parent.glob(f"{self.path.stem}.*"))


def copy_graph(graph: Path, path: Path) -> None:
    """Copy `graph` to `path`, and its weights files under their own names (the graph refers to them)."""
    shutil.copyfile(graph, path)
    data = graph.with_name(f"{graph.name}.data")
    if data.exists():
        shutil.copyfile(data, path.with_name(data.name))
