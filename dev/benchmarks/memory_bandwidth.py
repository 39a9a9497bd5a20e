"""How fast this machine's cores read memory: what limits a single stream of generated text.

    python -m benchmarks.memory_bandwidth [--cores 2] [--megabytes 256]

Each core looks for the largest number of an array of its own that no cache holds. The result is the best of several
rounds in which all read at the same time. A token of one client reads all weights once: bytes of the weights, times
tokens per second, is the share of this that a plan uses.
"""

from __future__ import annotations

import os
import threading
import time

import click
import numpy as np

from benchmarks.program import Program

ROUNDS = 10
PASSES = 4
"""Times that each core reads its array in a round."""


def best_rate(cores: int, megabytes: int) -> float:
    """Bytes per second of all cores."""
    cpus = sorted(os.sched_getaffinity(0))[:cores]
    together = threading.Barrier(len(cpus))
    rates = np.zeros((len(cpus), ROUNDS))

    def read(number: int, cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})
        # Written, so that its pages exist.
        array = np.ones(megabytes * 2**20 // 8, np.int64)
        for turn in range(ROUNDS):
            together.wait()
            begin = time.perf_counter()
            for _ in range(PASSES):
                array.max()
            rates[number, turn] = PASSES * array.nbytes / (time.perf_counter() - begin)

    threads = [threading.Thread(target=read, args=(number, cpu), daemon=True) for number, cpu in enumerate(cpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return float(rates.sum(axis=0).max())


@click.command(cls=Program, help=__doc__)
@click.option("--cores", default=2, show_default=True)
@click.option("--megabytes", default=256, show_default=True, help="Of each core's array.")
def main(cores: int, megabytes: int) -> None:
    """Print the rate."""
    print(f"{best_rate(cores, megabytes) / 1e9:.1f} GB/s with {cores} cores")


if __name__ == "__main__":
    main()
