"""The published target of BERT behind FastAPI: over 100 requests/s under 100 ms for less than 250 USD a month.

    python -m benchmarks.fastapi_target [--cores 1] [--budget 240] [--write FILE]

Optimises DistilBERT and BERT-base for text classification on this machine, and plans them on c6i, c7i, c7a and c7g:
this machine's class from the measured curve, the remaining ones from estimates. Weights are random: speed does not
depend on them. `--write` keeps the measured curves in the form of the `models` in the planner's `project.yaml`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click
import yaml

from benchmarks.models import bert, distilbert
from benchmarks.ours import store
from benchmarks.program import Program
from penstock.errors import SettingError
from penstock.manifest import Manifest
from penstock.prices import PriceList, shipped_prices
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.shipped_classes import HARDWARE_CLASSES
from penstock.tasks import TaskName
from penstock_bench.server import find_or_make
from penstock_optimizer.neuron.published import SHAPES, published_rows
from penstock_planner.compare import HardwareComparison, Load, compare
from penstock_planner.evidence import Evidence, of_manifest
from penstock_planner.offers import OfferInputs, class_of_cpu, offers
from penstock_planner.page import cells, headline, judged
from penstock_planner.project import project
from penstock_runtime.host import read_host

RATE, P95_MILLISECONDS, DOLLARS = 100.0, 100.0, 250.0
CLASSES = ("icelake", "sapphirerapids", "zen4-full-cores", "graviton3")
FAMILIES_OF_NODES = ("c6i.", "c7i.", "c7a.", "c7g.")


def target_prices() -> PriceList:
    """The shipped prices of the target's instance families."""
    prices = shipped_prices()
    kept = {
        name: {node: price for node, price in nodes.items() if node.startswith(FAMILIES_OF_NODES)}
        for name, nodes in prices.classes.items()
    }
    return prices.model_copy(update={"classes": {name: nodes for name, nodes in kept.items() if nodes}})


def plan(family: str, evidence: tuple[Evidence, ...], cores: tuple[int, ...] = (1, 2, 4)) -> HardwareComparison:
    """The comparison for the target's load."""
    inputs = OfferInputs(
        HARDWARE_CLASSES, target_prices(), evidence, published_rows(), SHAPES[family], loads=project().loads
    )
    return compare(offers(inputs, CLASSES, cores), Load(RATE, RATE, P95_MILLISECONDS))


def is_reached(comparison: HardwareComparison) -> bool:
    """Whether the chosen row costs less than the target's dollars, whole nodes included."""
    best = comparison.best
    return best is not None and best.sizing is not None and best.sizing.reserved_per_month < DOLLARS


@click.command(cls=Program, help=__doc__)
@click.option("--cores", default=1, show_default=True, help="Cores of the replica that is measured.")
@click.option("--budget", default=240.0, show_default=True, help="Seconds of each optimisation.")
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="File for the measured curves.")
def main(*, cores: int, budget: float, write: Path | None) -> None:
    """Measure and plan."""
    measured = []
    reached = True
    for family, folder in (("distilbert", distilbert()), ("bert-base", bert())):
        artefact = find_or_make(
            target_endpoint(family, folder, cores, budget), cores, store=store(), models=store(),
            on_line=lambda line: click.echo(f"          {line}"),
        )  # fmt: skip
        manifest = Manifest.load(artefact)
        here = read_host().cpu
        evidence = of_manifest(
            manifest,
            class_of_cpu(HARDWARE_CLASSES, manifest.cpu) or "any",
            here=here,
            folder="benchmarks.fastapi_target",
        )
        if evidence is None:
            raise SettingError(
                f"{artefact} has no capacity curve",
                field="--budget",
                remedy="Give a larger --budget, or a quiet machine",
            )
        comparison = plan(family, (evidence,))
        click.echo(f"\n{family}: {headline(comparison)}")
        for row in judged(comparison):
            click.echo("  " + " | ".join(cells(row)))
        measured.append(_given(evidence, family))
        reached = reached and is_reached(comparison)
    if write is not None:
        write.write_text(yaml.safe_dump({"models": measured}, sort_keys=False, width=110), encoding="utf-8")
    click.echo(f"\ntarget    {'pass' if reached else 'FAIL'}: under {DOLLARS:g} USD a month")


def target_endpoint(name: str, folder: Path, cores: int, budget: float) -> ModelEndpoint:
    """The resource with the target's objective."""
    return ModelEndpoint.from_object(
        {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "ModelEndpoint",
            "metadata": {"name": name},
            "spec": {
                "model": f"file://{folder}",
                "task": TaskName.TEXT_CLASSIFICATION.value,
                "cores": cores,
                "objective": {"latency": {"p95Milliseconds": P95_MILLISECONDS}},
                "optimization": {"budgetSeconds": budget},
            },
        }
    )


def _given(evidence: Evidence, family: str) -> dict[str, object]:
    today = datetime.now(UTC).date().isoformat()
    return {
        "family": family,
        "measurements": [
            {
                "hardwareClass": evidence.hardware_class,
                "cores": evidence.cores,
                "plan": evidence.plan,
                "source": f"python -m benchmarks.fastapi_target, {evidence.basis.split(', ')[1]}, {today}",
                "error": round(1 - evidence.interval.low, 3),
                "points": [
                    {
                        "requestsPerSecond": round(point.arrivals_per_second, 1),
                        "p95Milliseconds": round(point.p95_milliseconds, 1),
                    }
                    for point in evidence.curve.points
                    if point.meets(point.p95_milliseconds)
                ],
            }
        ],
    }


if __name__ == "__main__":
    main()
