"""Fills the template."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from penstock.manifest import Manifest, Outcome
from penstock_optimizer.report import view
from penstock_optimizer.report.charts import agreement_chart, capacity_chart, gemm_chart, latency_chart, swatch


def render_report(manifest: Manifest) -> str:
    """The whole page as HTML: no scripts, and nothing loaded from anywhere."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        files("penstock_optimizer.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    )
    series = view.series(manifest)
    metric = view.main_metric(manifest)
    lengths = view.lengths_shown(manifest)
    return template.render(
        manifest=manifest,
        headline=view.headline(manifest),
        why=view.why(manifest),
        tiles=view.tiles(manifest),
        plan=view.plan_text(manifest.chosen.plan),
        length_rows=view.length_rows(manifest),
        lengths=lengths,
        candidates=view.candidate_rows(manifest, lengths),
        plans=view.plan_rows(manifest),
        # The charts escape the texts in them.
        swatches=[Markup(swatch(one)) for one in series],  # noqa: S704
        latency_chart=Markup(latency_chart(series)),  # noqa: S704
        agreement_chart=Markup(  # noqa: S704
            agreement_chart(series, metric=metric.name, budget=metric.budget) if metric is not None else ""
        ),
        metric=metric.name.replace("_", " ") if metric is not None else "",
        capacity_chart=Markup(capacity_chart(manifest.capacity)),  # noqa: S704
        gemm_chart=Markup(gemm_chart(manifest.gemm)),  # noqa: S704
        first_looks=view.has_first_looks(manifest),
        tried=sum(one.outcome is not Outcome.SKIPPED for one in manifest.candidates),
    )
