"""`penstock bench`: the published experiment on any endpoint, interleaved with plain transformers.

`grid`, `judge`, `results` and `report` are pure; `cell` sends the requests from a separate process, `baseline` is the
server that Penstock is compared with, `floor` the forward pass alone; `run_bench` does it all.
"""

from penstock_bench.grid import BenchOptions
from penstock_bench.results import BenchResults
from penstock_bench.run import BenchProgress, run_bench

__all__ = ["BenchOptions", "BenchProgress", "BenchResults", "run_bench"]
