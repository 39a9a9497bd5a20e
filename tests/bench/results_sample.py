"""Made-up results in the form of a real run."""

from __future__ import annotations

from penstock.hardware import CpuIdentity, Isa
from penstock.tasks import TaskName
from penstock_bench.cell import CellResult
from penstock_bench.judge import published_table
from penstock_bench.results import BASELINE, OURS, BenchResults, Figures, Served, SettingResult

VNNI = CpuIdentity(vendor="GenuineIntel", family=6, model=106, model_name="Intel Xeon 8375C", isa=Isa.AVX512_VNNI)
ZEN3 = CpuIdentity(vendor="AuthenticAMD", family=25, model=1, model_name="AMD EPYC 7763", isa=Isa.AVX2)


def figures(rate: float, *, batch: int = 1, foreign: float = 0.0, failures: int = 0) -> Figures:
    milliseconds = 1e3 / rate
    cells = [
        CellResult(
            seconds=1.0,
            latencies_milliseconds=(milliseconds * 0.9, milliseconds, milliseconds * 1.3),
            groups=(8, 8, 8),
            completed_per_second=rate * factor / batch,
            failures={"429": failures} if failures else {},
            first_failure="429 busy" if failures else "",
            server_cores=1.9,
            foreign_cores=foreign,
        )
        for factor in (0.98, 1.0, 1.02)
    ]
    return Figures.of(cells)


def sample_results(
    *, cpu: CpuIdentity = VNNI, ratio: float = 9.0, baseline: bool = True, foreign: float = 0.0, failures: int = 0
) -> BenchResults:
    """All published lengths at two cores, batch 1 and 4, as fast as published and `ratio` times the baseline."""
    settings = []
    for tokens, row in published_table().items():
        for batch in (1, 4):
            ours = figures(row.infinity_per_second, batch=batch, foreign=foreign, failures=failures)
            found = {OURS: ours}
            if baseline:
                found[BASELINE] = figures(row.infinity_per_second / ratio, batch=batch)
            settings.append(
                SettingResult(
                    cores=2,
                    tokens=tokens,
                    batch=batch,
                    figures=found,
                    floor_milliseconds=0.95e3 / row.infinity_per_second if batch == 1 else None,
                )
            )
    return BenchResults(
        created="2026-11-21T17:00:00+00:00",
        version="0.1.0",
        target="distilbert",
        model="file:///models/<distilbert>",
        task=TaskName.TEXT_CLASSIFICATION,
        cpu=cpu,
        machine_cores=4,
        seconds_per_setting=3.0,
        rounds=3,
        libraries={"torch": "2.15.0", "openvino": "2026.4.1"},
        served=(Served(cores=2, plan="openvino-int8, 2x1 threads", cpus=(0, 1), client_cpus=(2, 3)),),
        settings=tuple(settings),
        left_out=("8 cores: this machine has 4",),
        notes=("with 4 cores the client ran on the server's CPUs",),
    )
