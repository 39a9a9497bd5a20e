"""Damages the weights of a running process, as a broken memory would: no file and no digest shows it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from penstock_runtime.engines.native.graph_file import read


def damage_tile(process: int, graph: Path, *, layer: int = 0, length: int = 65_536) -> int:
    """Overwrite a tile of a linear layer of a graph of the native engine in the memory of a process: its own, or
    another's as root. Returns the number of places."""
    linear = [one for one in read(graph).tensors.values() if one.dtype == np.int8 and one.ndim == 2]
    # Packed weights begin with four inputs of each of the first outputs, in all kernels.
    begin = re.escape(linear[layer].T[:8, :4].tobytes())
    places = 0
    with Path(f"/proc/{process}/mem").open("r+b", buffering=0) as memory:
        for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines():
            addresses, rights, *_ = line.split()
            low, high = (int(part, 16) for part in addresses.split("-"))
            if rights != "rw-p":
                continue
            memory.seek(low)
            try:
                held = memory.read(high - low)
            except OSError:  # of a device
                continue
            for found in re.finditer(begin, held):
                memory.seek(low + found.start())
                memory.write(bytes(byte ^ 0x55 for byte in held[found.start() : found.start() + length]))
                places += 1
    return places
