"""`penstock plan`: compares hardware for an endpoint by cost and latency, from measured and published figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from penstock.artefact_store import DEFAULT_STORE
from penstock.errors import SettingError, SpecError
from penstock.prices import CLOUDS, PriceList, currency_sign, load_prices, shipped_prices
from penstock.resources.endpoint import ModelEndpoint, ModelEndpointSpec
from penstock.resources.endpoint_parts.rollout import GatewayMode
from penstock.resources.fields.text_fields import parse_quantity
from penstock.resources.files.reading import from_file
from penstock.resources.shipped_classes import HARDWARE_CLASSES
from penstock.tasks import TaskName
from penstock_cli.planning.manifest import chosen_endpoint, write_endpoint
from penstock_cli.planning.objects import ClusterPlan, load_of_week, of_store, read_cluster
from penstock_cli.planning.table import print_table
from penstock_cli.terminal import FiniteRange, Names, PositiveIntegers, paced, refuse_options
from penstock_optimizer.neuron.published import SHAPES, published_rows, shape_of
from penstock_planner.compare import HardwareComparison, Load, Offer, compare, counted
from penstock_planner.evidence import Evidence, of_file
from penstock_planner.ledger import DEFAULT_LEDGER, error_text, read_ledger, widened
from penstock_planner.offers import GPU, OfferInputs, offers
from penstock_planner.page import (
    csv_text,
    html_page,
    json_text,
)
from penstock_planner.project import project

DEFAULT_CORES = (1, 2, 4)
START_UP_SECONDS = 40.0
"""Of a replica under `--trace`: the default of `penstock simulate`."""
DEFAULT_TOKENS = 65
"""Mean length of the default workload: log-normal, median 44, p95 186."""


OF_A_CLUSTER = ("prometheus", "namespace", "context", "measure")
OF_A_FILE = ("store",)
OF_VERIFY = ("verify_replicas", "verify_seconds", "auth_token")
OF_MEASURE = ("measure_seconds", "dry_run")
OF_A_LOAD = ("rate", "peak", "p95_milliseconds", "trace", "write", "verify")
"""Options by the input that they work with."""
ANY_LOAD = Load(mean=1.0, peak=1.0, p95_milliseconds=1000.0)
"""For a corpus, which has no load."""


@dataclass(frozen=True)
class PlannedEndpoint:
    """The endpoint to plan for, and its measurements."""

    name: str
    spec: ModelEndpointSpec
    cluster: ClusterPlan | None = None
    """None: a file."""


@click.command
@click.argument("target", metavar="FILE|NAME")
@click.option("--rate", type=FiniteRange(min=0, min_open=True), help="Requests per second, on average over a month.")
@click.option("--peak", type=FiniteRange(min=0, min_open=True), help="Highest rate that lasts. Default: --rate.")
@click.option(
    "--p95",
    "p95_milliseconds",
    type=FiniteRange(min=0, min_open=True),
    help="p95 in milliseconds, of text generation for the first token. Default: objective.latency or "
    "objective.timeToFirstToken of the endpoint.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    help="Texts of a corpus, instead of a load: compares node-hours and the cost of one run, on demand and spot.",
)
@click.option(
    "--classes",
    type=Names("hardware class", "icelake,zen4"),
    help="Hardware classes to compare. Default: all with a price.",
)
@click.option(
    "--cores",
    type=PositiveIntegers(),
    default=",".join(map(str, DEFAULT_CORES)),
    show_default=True,
    help="Cores of a replica to compare, besides those that were measured.",
)
@click.option(
    "--prices",
    metavar="CLOUD|FILE",
    help="aws, gcp or azure for a shipped list, or a YAML file. Default: aws.",
)
@click.option(
    "--measurements",
    type=click.Path(dir_okay=False, path_type=Path),
    help="YAML file with further measurements, such as of GPUs.",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Requests over time, for the load and for a simulation of each candidate: times of requests, one in a line; "
    "lines of seconds,requests_per_second; or JSON of a range query of Prometheus.",
)
@click.option(
    "--write",
    type=click.Path(dir_okay=False, path_type=Path),
    help="New file for the ModelEndpoint with the chosen class, cores and replicas.",
)
@click.option("--family", type=click.Choice(sorted(SHAPES)), help="Kind of model, if its name does not show it.")
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_STORE,
    envvar="PENSTOCK_STORE",
    show_default=True,
    show_envvar=True,
    help="Folder of artefacts, whose capacity curves are used.",
)
@click.option(
    "--output",
    "-o",
    type=click.Choice(["table", "json", "csv", "html"]),
    default="table",
    show_default=True,
    help="Form of the result, on standard output.",
)
@click.option("--namespace", "-n", default="", help="Of NAME. Default: the namespace of the current context.")
@click.option("--context", default="", help="The context of the kubeconfig. Default: the current one.")
@click.option("--prometheus", metavar="URL", default="", help="Prometheus with the load of NAME in the last week.")
@click.option(
    "--measure",
    is_flag=True,
    help="First have the operator optimise the model on one node of each class of --classes, or of each class that has "
    "nodes and was not measured.",
)
@click.option(
    "--measure-seconds",
    type=FiniteRange(min=1),
    default=7200.0,
    show_default=True,
    help="Give up the measurements after this time.",
)
@click.option("--dry-run", is_flag=True, help="List the classes and nodes that --measure would use, and end.")
@click.option("--verify", metavar="URL", default="", help="Measure the server there, and compare with the plan.")
@click.option(
    "--verify-replicas", type=click.IntRange(min=1), default=1, show_default=True, help="Replicas behind that URL."
)
@click.option(
    "--verify-seconds", type=FiniteRange(min=1), default=10.0, show_default=True, help="Duration of the measurement."
)
@click.option(
    "--auth-token",
    default="",
    envvar="PENSTOCK_AUTH_TOKEN",
    show_envvar=True,
    help="Bearer token that the server at --verify asks for. Prefer the variable: a flag is visible in the process "
    "list.",
)
@click.option(
    "--ledger",
    type=click.Path(dir_okay=False, path_type=Path),
    default=DEFAULT_LEDGER,
    show_default=True,
    help="File with the predictions that were measured.",
)
def command(target: str, **options: Any) -> None:
    """Compare hardware for an endpoint: latency, replicas and cost of each class and number of cores.

    FILE is a ModelEndpoint: its artefacts in --store, the shipped classes and prices are used. NAME is an endpoint of
    the cluster: its classes, prices and OptimizedModels are used, through kubectl with your rights.

    Replicas are those that the autoscaler would ask for. Reserved cost is of whole nodes for the peak, used cost of the
    share of nodes that the mean load takes. Each figure is measured, published or estimated, with its interval.
    """
    options["target"] = target
    _refuse_unread(target, options)
    subject = _subject(target, options["namespace"], options["context"])
    if subject.spec.task is TaskName.TEXT_GENERATION:
        _refuse_of_encoders(options)
    if options["verify"]:
        from penstock_cli.planning.verification import base_of

        base_of(options["verify"])
    trace = None
    say = paced(partial(click.echo, err=True))
    if options["trace"] is not None:
        from penstock_cli.planning.trace import read_trace

        trace, mean, peak = read_trace(options["trace"], partial(click.echo, err=True))
        options |= {"rate": mean, "peak": options["peak"] or peak}
    of_corpus = options["rows"] is not None
    load, notes = (ANY_LOAD, []) if of_corpus else _load(subject, options)
    if options["measure"] and subject.cluster is not None:
        from penstock_cli.planning.measure import measured

        unmeasured = measured(subject.name, subject.cluster, options)
        if unmeasured is None:
            return
        notes += unmeasured
        subject = _subject(target, options["namespace"], options["context"])
    inputs = _inputs(subject, options, load)
    if of_corpus:
        from penstock_cli.planning.corpus import print_corpus

        notes += _price_notes(inputs)
        currency, output = inputs.prices.currency, options["output"]
        print_corpus(_offers(subject, options, inputs), options["rows"], notes, currency=currency, output=output)
        return
    comparison = _comparison(subject, options, load, notes, inputs)
    if trace is not None:
        from penstock_cli.planning.trace import traced

        comparison = replace(comparison, traced=traced(comparison, trace, start_up_seconds=START_UP_SECONDS, say=say))
    if options["write"] is not None:
        write_endpoint(options["write"], chosen_endpoint(comparison, subject.name, subject.spec))
    output = options["output"]
    if output == "table":
        print_table(comparison)
    else:
        click.echo(_TEXTS[output](comparison), nl=False)
    if options["verify"]:
        from penstock_cli.planning.verification import verify_plan

        chosen: tuple[str, ...] = options["classes"] or ()
        ledger = options["ledger"].expanduser()
        entry = verify_plan(
            comparison, subject.spec, url=options["verify"], token=options["auth_token"],
            replicas=options["verify_replicas"], seconds=options["verify_seconds"], classes=inputs.classes,
            stated=chosen[0] if len(chosen) == 1 else None, ledger=ledger, quiet=output != "table",
        )  # fmt: skip
        if output != "table":
            # Standard output has the plan alone, which a program may read.
            click.echo(
                f"verified: p95 predicted {entry.predicted_p95_milliseconds:.3g} ms, measured "
                f"{entry.measured_p95_milliseconds:.3g} ms; kept in {ledger}",
                err=True,
            )


def _comparison(
    subject: PlannedEndpoint,
    options: dict[str, Any],
    load: Load,
    notes: list[str],
    inputs: OfferInputs,
) -> HardwareComparison:
    """All offers of the classes, with notes on the load, the prices and the endpoint's own class."""
    spec = subject.spec
    if inputs.shape is None and spec.task is not TaskName.TEXT_GENERATION:
        notes.append("the kind of model is not known from its name: give --family for published figures")
    notes += _price_notes(inputs)
    notes += filter(None, [error_text(read_ledger(options["ledger"].expanduser()), spec.model)])
    found = _offers(subject, options, inputs)
    measure = f"penstock optimize {options['target']}"
    if subject.cluster is not None:
        measure = f"penstock plan {subject.name} --measure"
    comparison = compare(found, load, notes=notes, currency=inputs.prices.currency, measure=measure)
    own = () if subject.cluster is None else _present_class(subject, comparison)
    return replace(comparison, notes=(*own, *_cost_of_tokens(comparison), *comparison.notes))


def _price_notes(inputs: OfferInputs) -> list[str]:
    source = f" ({inputs.prices.source})" if inputs.prices.source else ""
    return [f"prices: {inputs.prices.summary}{source}"]


def _offers(subject: PlannedEndpoint, options: dict[str, Any], inputs: OfferInputs) -> list[Offer]:
    """The offers of the classes, with intervals that contain the errors of the ledger."""
    past, chosen = read_ledger(options["ledger"].expanduser()), options["classes"] or ()
    return [
        replace(offer, evidence=tuple(widened(one, past, subject.spec.model) for one in offer.evidence))
        for offer in offers(inputs, chosen or _default_classes(inputs), options["cores"], chosen=chosen)
    ]


def _refuse_unread(target: str, options: dict[str, Any]) -> None:
    if is_file(target):
        refuse_options(OF_A_CLUSTER, "the NAME of an endpoint")
    else:
        refuse_options(OF_A_FILE, "a FILE")
    if not options["verify"]:
        refuse_options(OF_VERIFY, "--verify")
    if options["rows"] is not None:
        refuse_options(OF_A_LOAD, "a load, which --rows replaces")
    if not options["measure"]:
        refuse_options(OF_MEASURE, "--measure")
    if options["rate"] is not None or options["trace"] is not None:
        refuse_options(["prometheus"], "the load of an endpoint, which --rate or --trace replaces")
    if options["rate"] is not None:
        refuse_options(["trace"], "a load that --rate does not give")


def _refuse_of_encoders(options: dict[str, Any]) -> None:
    """SettingError for what is not possible with text generation."""
    if options["verify"]:
        raise SettingError(
            "the p95 of text generation is of the time to the first token, which --verify does not measure",
            field="--verify",
            remedy="Leave it out, and compare with the metric penstock_first_token_seconds of the running endpoint",
        )
    if options["trace"] is not None:
        raise SettingError(
            "--trace simulates encoders: a request of text generation keeps its replica for many steps",
            field="--trace",
            remedy="Give --rate and --peak, or replay the trace with penstock simulate ARTEFACT --trace",
        )


_TEXTS: dict[str, Callable[[HardwareComparison], str]] = {
    "json": json_text,
    "csv": csv_text,
    "html": partial(html_page, title="Hardware for the endpoint"),
}


def _inputs(subject: PlannedEndpoint, options: dict[str, Any], load: Load) -> OfferInputs:
    family, spec = options["family"], subject.spec
    shape = SHAPES[family] if family is not None else shape_of(spec.model)
    tokens, ours = _bucket(spec), project()
    return OfferInputs(
        classes=HARDWARE_CLASSES if subject.cluster is None else subject.cluster.classes,
        prices=_prices(subject, options["prices"]),
        evidence=_evidence(subject, options["store"], options["measurements"]),
        published=published_rows(),
        shape=shape,
        tokens=tokens,
        memory_bytes=math.ceil(parse_quantity(memory)) if (memory := spec.pod.memory) is not None else None,
        caches_bytes=caches.total_bytes if (caches := spec.serving.caches) is not None else 0,
        project=ours.evidence(shape.family if shape is not None else "", tokens, spec.model, load.p95_milliseconds),
        loads=ours.loads,
    )


def _prices(subject: PlannedEndpoint, given: str | None) -> PriceList:
    """The list that was given, or the shipped one. The shipped one has no part in the plan of an endpoint whose class
    has a price in another currency."""
    if given is not None:
        return shipped_prices(given) if given in CLOUDS else load_prices(Path(given))
    shipped = shipped_prices()
    own = None if subject.cluster is None else subject.cluster.classes.get(subject.spec.hardware_class)
    if own is None or own.price is None or own.price.currency == shipped.currency:
        return shipped
    source = f"those of the HardwareClasses alone, since the shipped ones are in {shipped.currency}"
    return PriceList(date=datetime.now(UTC).date(), currency=own.price.currency, source=source, classes={})


def is_file(target: str) -> bool:
    """Whether the target is a file, not the name of an endpoint."""
    return Path(target).is_file() or target.endswith((".yaml", ".yml", ".json"))


def _subject(target: str, namespace: str, context: str) -> PlannedEndpoint:
    """The file, or the endpoint of the cluster with that name."""
    if is_file(target):
        endpoint = from_file(ModelEndpoint, Path(target))
        return PlannedEndpoint(endpoint.metadata.name, endpoint.spec)
    cluster = read_cluster(target, namespace, context)
    return PlannedEndpoint(target, cluster.spec, cluster)


def _load(subject: PlannedEndpoint, options: dict[str, Any]) -> tuple[Load, list[str]]:
    rate, peak, p95, prometheus = options["rate"], options["peak"], options["p95_milliseconds"], options["prometheus"]
    notes = []
    if rate is None and subject.cluster is not None:
        if prometheus:
            rate, highest = load_of_week(prometheus, subject.cluster.namespace, subject.name)
            notes.append(f"load of the last week: {rate:.3g} requests/s on average, {highest:.3g} at the peak")
            peak = highest if peak is None else peak
        else:
            rate = subject.cluster.requests_per_second
            if rate:
                notes.append(f"load at present: {rate:.3g} requests/s; give --prometheus for the load of the last week")
    if rate == 0:
        raise SettingError(
            "the endpoint gets no requests at present",
            field="--rate",
            remedy="Give --rate, the requests per second, or --prometheus URL for the load of the last week",
        )
    if rate is None:
        raise SettingError(
            "the load is not known", field="--rate", remedy="Give --rate, the requests per second, such as --rate 200"
        )
    if p95 is None:
        p95 = _objective_p95(subject.spec)
    peak = rate if peak is None else peak
    if peak < rate:
        raise SettingError(f"--peak {peak:g} is under --rate {rate:g}", field="--peak", remedy="Raise --peak")
    spec = subject.spec
    scaling, gateway = spec.scaling, spec.gateway
    pooled = gateway.mode is GatewayMode.ALWAYS or (gateway.mode is GatewayMode.AUTO and scaling.min_replicas == 0)
    load = Load(
        mean=rate,
        peak=peak,
        p95_milliseconds=p95,
        headroom=scaling.headroom,
        # In a file, maxReplicas is often the default: it limits only where it was written.
        most_replicas=scaling.max_replicas if "max_replicas" in scaling.model_fields_set else None,
        least_replicas=max(scaling.min_replicas, 1),
        pooled=pooled,
    )
    return load, notes


def _objective_p95(spec: ModelEndpointSpec) -> float:
    """The endpoint's objective in milliseconds; of text generation for the first token."""
    generates = spec.task is TaskName.TEXT_GENERATION
    latency = spec.objective.time_to_first_token if generates else spec.objective.latency
    if latency is None:
        name, example = ("timeToFirstToken", 1000) if generates else ("latency", 50)
        raise SettingError(
            f"the endpoint has no objective.{name}",
            field="--p95",
            remedy=f"Give --p95 in milliseconds, such as --p95 {example}",
        )
    return latency.p95_milliseconds


def _cost_of_tokens(comparison: HardwareComparison) -> tuple[str, ...]:
    """The cost of a million output tokens of the chosen offer; empty for encoders."""
    best = comparison.best
    if best is None or best.sizing is None or best.evidence is None or best.evidence.tokens_per_request is None:
        return ()
    each = best.evidence.tokens_per_request
    cost = best.sizing.reserved_per_million / each
    sign = currency_sign(comparison.currency)
    return (f"a million output tokens cost {sign}{cost:.3g} reserved, with {each:.3g} of them in a request",)


def _bucket(spec: ModelEndpointSpec) -> int:
    """The compiled length for the mean length of the workload: a power of two from 32."""
    lengths = spec.workload.sequence_lengths
    mean = sum(lengths) / len(lengths) if lengths else DEFAULT_TOKENS
    return max(32, 1 << math.ceil(math.log2(max(mean, 1))))


def _evidence(subject: PlannedEndpoint, store: Path, given: Path | None) -> tuple[Evidence, ...]:
    found: list[Evidence] = []
    if subject.cluster is not None:
        found += subject.cluster.evidence
    else:
        found += of_store(subject.spec, store)
    if given is not None:
        try:
            text = given.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(
                f"{given} cannot be read ({error})", field="--measurements", remedy="Give a readable YAML file"
            ) from error
        found += of_file(text, name=str(given))
    return tuple(found)


def _default_classes(inputs: OfferInputs) -> tuple[str, ...]:
    """Classes with a price; GPUs too. One that was measured and has none is kept, to state that."""
    priced = [name for name, spec in inputs.classes.items() if spec.price is not None or name in inputs.prices.classes]
    gpus = [name for name in inputs.prices.classes if name.startswith(GPU)]
    measured = [one.hardware_class for one in inputs.evidence]
    found = tuple(dict.fromkeys([*priced, *gpus, *measured]))
    if not found:
        raise SpecError(
            "no hardware class has a price",
            remedy="Set price.perCoreHour of the classes, or give --prices",
        )
    return found


def _present_class(subject: PlannedEndpoint, comparison: HardwareComparison) -> tuple[str, ...]:
    """Whether another class is cheaper than the endpoint's own."""
    spec, best = subject.spec, comparison.best
    own = next(
        (
            row
            for row in comparison.rows
            if (row.offer.hardware_class, row.offer.cores) == (spec.hardware_class, spec.cores)
        ),
        None,
    )
    if own is None or own.sizing is None:
        why = f": {own.why}" if own is not None and own.why else ""
        hardware = f"{spec.hardware_class}, {counted(spec.cores, 'core')}"
        return (f"the endpoint's own hardware ({hardware}) has no figures here{why}",)
    if best is None or best.sizing is None:
        return ()
    if best.offer is own.offer:
        return (f"the endpoint's class {spec.hardware_class} with {counted(spec.cores, 'core')} is the cheapest",)
    saved = own.sizing.reserved_per_month - best.sizing.reserved_per_month
    sign = currency_sign(comparison.currency)
    state = "" if own.is_feasible else ", and misses the objective"
    text = (
        f"{best.name} would be cheaper than the endpoint's {own.name}{state}: "
        f"{sign}{best.sizing.reserved_per_month:,.0f} against {sign}{own.sizing.reserved_per_month:,.0f} a month "
        f"reserved ({sign}{saved:,.0f} less)"
    )
    return (text,)
