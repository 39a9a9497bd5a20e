"""Offers from hardware classes, prices and evidence: the nodes that hold a replica, and its evidence.

An offer is a hardware class with a number of cores. Its evidence is measured or given; where there is none, the
project's own measurements of the class count, and then estimates from another number of cores or another class.
Inferentia and GPUs have published and estimated figures only. Published figures of CPUs are of other software: they are
offers of their own, for comparison. Text generation has measured and given figures only: its speed depends on the
memory, which does not follow from the arithmetic of a core.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.capacity import CapacityCurve
from penstock.hardware import INF1_UNSUPPORTED, NOT_RUN, CpuIdentity, NeuronGeneration
from penstock.prices import InstancePrice, PriceList
from penstock.prices.pod_costs import measured_pod_bytes, unmeasured_pod_bytes
from penstock.resources.hardware_class import HardwareClassSpec
from penstock_optimizer.neuron.plans import HOST_MILLISECONDS, Basis, NeuronFigure, figures_for
from penstock_optimizer.neuron.published import Mode, ModelShape, PublishedFigure, shape_of
from penstock_planner.compare import Node, Offer, counted
from penstock_planner.evidence import CLOSED_LOOP_ERROR, Evidence, Interval, Origin, curve_of_closed_loop, wider
from penstock_planner.processors import LEAST_WIDTH, LoadRates, class_ratio

GPU = "gpu-"
"""Beginning of the names of GPU classes in a price list. Penstock has no GPU runtime: they are for comparison."""
NODE_RESERVE = 1
"""Physical cores of each node that are kept for the kubelet, the system and daemons, as `reservedSystemCPUs`."""
NODE_RESERVE_BYTES = 2**30
"""The same of memory. Clouds keep 0.5 to 2 GiB of the nodes in the list."""
GPU_CAVEATS = (
    "published GPU figures of a T4 are of the device or of one process: HTTP and tokenisation are not included",
    "the PyTorch figures of 2021 are half of what TensorRT reaches on the same T4",
    "int8 figures are left out: their accuracy was not compared with fp32",
)
NEURON_CAVEATS = (
    NOT_RUN,
    f"HTTP and tokenisation by Penstock are added to published figures: {HOST_MILLISECONDS:g} ms for each request",
)
NEURON_ESTIMATE_ERROR = LEAST_WIDTH
"""No device was measured by the project; the leave-one-out error of the fitted times is smaller."""


MOST_SCALED = 0.2
"""An estimate for another number of cores is off by up to this share."""


@dataclass(frozen=True)
class OfferInputs:
    """Everything that offers are made from."""

    classes: Mapping[str, HardwareClassSpec]
    prices: PriceList
    evidence: tuple[Evidence, ...] = ()
    published: tuple[PublishedFigure, ...] = ()
    shape: ModelShape | None = None
    """Of the model; None: no published figures and no estimates for accelerators."""
    tokens: int = 128
    """The compiled length that the endpoint's texts fit into."""
    memory_bytes: int | None = None
    """Memory of a pod by the endpoint's spec; None: by the measurement, as far as there is one."""
    caches_bytes: int = 0
    """Memory of the endpoint's caches, in addition to a measurement."""
    project: tuple[Evidence, ...] = ()
    """Of this kind of model, measured by the project: they count for the classes without `evidence`."""
    loads: tuple[LoadRates, ...] = ()
    """Rates of several processors, measured by the project: the speed of one class against another."""

    @property
    def known(self) -> tuple[Evidence, ...]:
        """The measurements: for each class those of the user, else those of the project."""
        own = {one.hardware_class for one in self.evidence}
        return (*self.evidence, *(one for one in self.project if one.hardware_class not in own))


def class_of_cpu(classes: Mapping[str, HardwareClassSpec], cpu: CpuIdentity) -> str | None:
    """The class that this processor belongs to, by itself or, where a hypervisor hides it, by its instruction set.

    Classes without a promise about the processor (such as `any`) do not count.
    """
    promising = {name: spec for name, spec in classes.items() if spec.isa is not None}
    for name, spec in promising.items():
        if not spec.objection(cpu, name=name):
            return name
    if cpu.microarchitecture:
        return None
    return next((name for name, spec in promising.items() if spec.isa is cpu.isa), None)


def offers(
    inputs: OfferInputs, names: Sequence[str], cores: Sequence[int], *, chosen: Sequence[str] = ()
) -> tuple[Offer, ...]:
    """An offer for each class and each of these numbers of cores, and for those that were measured.

    Inferentia is offered in whole devices: of the sizes with published or fitted figures. A GPU class has one GPU.
    Inferentia is for comparison only unless the user names the class in `chosen`; GPUs always.
    """
    found = []
    for name in names:
        measured = {one.cores for one in inputs.known if one.hardware_class == name}
        spec = inputs.classes.get(name)
        if name.startswith(GPU):
            counts = measured or {1}
        elif spec is not None and spec.neuron is not None:
            counts = measured | ({4, 16} if name == NeuronGeneration.INF1.value else {spec.neuron.cores_per_device})
        else:
            counts = measured | set(cores)
        made = [_offer(inputs, name, spec, count) for count in sorted(counts)]
        found += [replace(offer, not_chosen=_not_chosen(name, chosen)) for offer in made]
        found += _of_other_software(inputs, name, sorted(counts))
    return tuple(found)


def _of_other_software(inputs: OfferInputs, name: str, counts: Sequence[int]) -> list[Offer]:
    """The published figures of a CPU class."""
    spec = inputs.classes.get(name)
    found = []
    for cores in counts:
        evidence = _published_cpu(inputs, name, cores)
        nodes = _nodes(inputs.prices, name, spec, cores)
        if evidence and nodes:
            found.append(Offer(name, cores, evidence, nodes, not_chosen="it is of software that Penstock does not run"))
    return found


def _not_chosen(name: str, chosen: Sequence[str]) -> str:
    if name.startswith(GPU):
        return "Penstock has no GPU runtime"
    if name not in set(NeuronGeneration) or name in chosen:
        return ""
    reason = INF1_UNSUPPORTED if name == NeuronGeneration.INF1.value else f"the runtime for Inferentia is {NOT_RUN}"
    return f"{reason}; name it in --classes to choose it"


def _offer(inputs: OfferInputs, name: str, spec: HardwareClassSpec | None, cores: int) -> Offer:
    is_gpu = name.startswith(GPU)
    caveats: tuple[str, ...] = ()
    if spec is not None and spec.neuron is not None:
        caveats = NEURON_CAVEATS + ((INF1_UNSUPPORTED,) if name == NeuronGeneration.INF1.value else ())
    offer = Offer(name, cores, caveats=caveats)
    if spec is None and not is_gpu:
        return replace(
            offer, problem=f"there is no hardware class {name}", remedy="List the classes: kubectl get hardwareclasses"
        )
    own, currency = None if spec is None else spec.price, inputs.prices.currency
    if own is not None and own.currency != currency:
        return replace(
            offer,
            problem=f"its price is in {own.currency}, and other prices are in {currency}",
            remedy=f"Give --prices with a list in {own.currency}, or set price.currency of the classes alike",
        )
    nodes = _nodes(inputs.prices, name, spec, cores)
    if not nodes:
        return replace(
            offer,
            problem=f"no price of a node for {counted(cores, 'core')} of {name}",
            remedy="Set price.perCoreHour of the class, or add instance types to --prices",
        )
    evidence = _evidence(inputs, name, spec, cores)
    is_cpu = not is_gpu and (spec is None or spec.neuron is None)
    memory = _memory_bytes(inputs, evidence) if is_cpu or inputs.memory_bytes is not None else 0
    holding = _holding(inputs.prices, name, nodes, memory)
    needs = f"a replica needs {memory / 2**30:.3g} GiB of memory"
    if not holding:
        return replace(
            offer,
            problem=f"{needs}, and no node of {name} in the list of prices has that much for pods",
            remedy="Add larger instance types to --prices, or lower spec.pod.memory",
        )
    if len(holding) < len(nodes):
        too_small = sorted({node.name for node in nodes} - {node.name for node in holding})
        caveats += (f"{needs}: {', '.join(too_small)} left out",)
    nodes = holding
    if not evidence:
        remedy = "Run penstock optimize on such a node, or give --measurements"
        if is_gpu:
            remedy = "Measure another server on such a node, and give --measurements"
        return replace(offer, nodes=nodes, problem=f"nothing is known of this model on {name}", remedy=remedy)
    return replace(offer, nodes=nodes, evidence=evidence, caveats=GPU_CAVEATS if is_gpu else caveats)


def _memory_bytes(inputs: OfferInputs, evidence: Sequence[Evidence]) -> int:
    """Memory of a replica, as the operator requests it; 0: not known. A model that was not measured has its fp32
    weights, which are served until the optimisation has ended."""
    if inputs.memory_bytes is not None:
        return inputs.memory_bytes
    measured = [one.resident_bytes for one in evidence if one.resident_bytes]
    if measured:
        return measured_pod_bytes(max(measured)) + inputs.caches_bytes
    return unmeasured_pod_bytes(4 * inputs.shape.weights) + inputs.caches_bytes if inputs.shape is not None else 0


def _holding(prices: PriceList, name: str, nodes: Sequence[Node], memory: int) -> tuple[Node, ...]:
    """The nodes with as many replicas as they have memory for, without those that hold none."""
    found = []
    for node in nodes:
        price = prices.classes.get(name, {}).get(node.name)
        if memory and price is not None and price.memory_gib and not node.is_share:
            fitting = int(price.memory_gib * 2**30 - NODE_RESERVE_BYTES) // memory
            found.append(replace(node, replicas=min(node.replicas, fitting)))
        else:
            found.append(node)
    return tuple(node for node in found if node.replicas > 0)


def _nodes(prices: PriceList, name: str, spec: HardwareClassSpec | None, cores: int) -> tuple[Node, ...]:
    if spec is not None and spec.price is not None:
        return (Node(f"{cores} x a core", spec.price.per_core_hour * cores, 1, is_share=True),)
    found = []
    for instance, price in prices.classes.get(name, {}).items():
        fitting = _replicas_on(price, name, spec, cores)
        if fitting > 0:
            found.append(
                Node(
                    instance, price.per_hour, fitting,
                    spot_per_hour=price.spot_per_hour, committed_per_hour=price.reserved_per_hour,
                )
            )  # fmt: skip
    return tuple(found)


def _replicas_on(price: InstancePrice, name: str, spec: HardwareClassSpec | None, cores: int) -> int:
    if spec is None or name.startswith(GPU):
        return max(price.devices, 1) // cores
    if spec.neuron is not None:
        devices = cores // spec.neuron.cores_per_device
        host = devices * spec.neuron.host_cpus_per_device
        return min(price.devices // devices, price.cpus // host) if devices else 0
    return (price.cpus // spec.threads_per_core - NODE_RESERVE) // cores


def _evidence(inputs: OfferInputs, name: str, spec: HardwareClassSpec | None, cores: int) -> tuple[Evidence, ...]:
    own = tuple(one for one in inputs.known if (one.hardware_class, one.cores) == (name, cores))
    if own:
        return own
    shape = inputs.shape
    if shape is not None and spec is not None and spec.neuron is not None:
        rows, tokens = inputs.published, inputs.tokens
        return (
            tuple(
                _of_neuron(figure, name) for figure in figures_for(rows, NeuronGeneration(name), cores, shape, tokens)
            )
            if name in set(NeuronGeneration)
            else ()
        )
    if shape is not None and name.startswith(GPU):
        return _gpu(inputs.published, name, shape, inputs.tokens)
    return _scaled_cores(inputs, name, cores) or _scaled_class(inputs, name, cores)


def _of_neuron(figure: NeuronFigure, name: str) -> Evidence:
    low, high = figure.lowest_per_second, figure.highest_per_second
    is_published = figure.basis is Basis.PUBLISHED
    interval = Interval.around(CLOSED_LOOP_ERROR if is_published else NEURON_ESTIMATE_ERROR)
    if low is not None and high is not None and low < high:
        interval = Interval(min(low / figure.per_second, 1 - 0.1), max(high / figure.per_second, 1 + 0.1))
    return Evidence(
        hardware_class=name,
        cores=figure.cores,
        plan=figure.candidate.summary,
        curve=curve_of_closed_loop(*figure.over_http(figure.per_second), batch=figure.candidate.batch),
        origin=Origin.PUBLISHED if is_published else Origin.ESTIMATED,
        basis=figure.evidence,
        interval=interval,
        caveats=(NOT_RUN, "latency under load estimated by a queueing formula"),
    )


def _gpu(rows: Iterable[PublishedFigure], name: str, shape: ModelShape, tokens: int) -> tuple[Evidence, ...]:
    found = []
    for row in rows:
        family = shape_of(row.model)
        if row.hardware_class != name or family is None or family.family != shape.family or row.precision == "int8":
            continue
        if row.mode is not Mode.GPU or row.tokens < tokens:
            continue
        curve = curve_of_closed_loop(row.per_second, row.latency_milliseconds, batch=row.batch)
        caveats = [f"published at {row.tokens} tokens"] + ([row.remark] if row.remark else [])
        found.append(
            Evidence(
                name, 1, f"{row.software}, {row.precision}, batch {row.batch}", curve, Origin.PUBLISHED,
                f"{row.model}: {row.source}", Interval.around(CLOSED_LOOP_ERROR), tuple(caveats),
            )
        )  # fmt: skip
    return tuple(found)


def _published_cpu(inputs: OfferInputs, name: str, cores: int) -> tuple[Evidence, ...]:
    """Published rows of a CPU class for this number of cores, of the shortest length that covers the endpoint's."""
    shape = inputs.shape
    if shape is None:
        return ()
    rows = [
        row
        for row in inputs.published
        if row.mode is Mode.CPU and (row.hardware_class, row.instance_cores) == (name, cores)
        and row.tokens >= inputs.tokens
        and (family := shape_of(row.model)) is not None and family.family == shape.family
    ]  # fmt: skip
    nearest = min((row.tokens for row in rows), default=0)
    return tuple(
        Evidence(
            name, cores, f"{row.software}, {row.precision}",
            curve_of_closed_loop(row.per_second, row.latency_milliseconds), Origin.PUBLISHED,
            f"{row.model} at {row.tokens} tokens: {row.source}", Interval.around(CLOSED_LOOP_ERROR),
            (row.remark, "the software of the publication, not Penstock"),
        )
        for row in rows
        if row.tokens == nearest
    )  # fmt: skip


def _scaled_cores(inputs: OfferInputs, name: str, cores: int) -> tuple[Evidence, ...]:
    """An estimate from the nearest measured number of cores of the same class."""
    measured = [one for one in inputs.known if one.hardware_class == name and one.tokens_per_request is None]
    if not measured:
        return ()
    source = min(measured, key=lambda one: (abs(math.log(cores / one.cores)), one.cores))
    return (
        replace(
            source,
            cores=cores,
            curve=_with_cores(source, cores),
            origin=Origin.ESTIMATED,
            basis=f"in proportion to the cores, from {source.cores} measured ({source.basis})",
            interval=source.interval.times(Interval.around(MOST_SCALED)),
        ),
    )


def _with_cores(source: Evidence, cores: int) -> CapacityCurve:
    """Fewer cores run a long text more slowly as well; more cores are not counted to make it faster."""
    factor = cores / source.cores
    return wider(source.curve, factor) if factor > 1 else source.curve.faster(factor)


def _scaled_class(inputs: OfferInputs, name: str, cores: int) -> tuple[Evidence, ...]:
    """The estimate with the narrowest interval from another class that was measured."""
    found = []
    for source in inputs.known:
        ratio = class_ratio(name, source.hardware_class, inputs.tokens, inputs.loads)
        if ratio is None or source.tokens_per_request is not None:
            continue
        interval = source.interval.times(ratio.interval)
        if cores != source.cores:
            interval = interval.times(Interval.around(MOST_SCALED))
        found.append(
            replace(
                source,
                hardware_class=name,
                cores=cores,
                plan=f"as on {source.hardware_class}",
                curve=_with_cores(source, cores).faster(ratio.middle),
                origin=Origin.ESTIMATED,
                basis=f"from {counted(source.cores, 'core')} of {source.hardware_class}, "
                f"{ratio.basis} ({source.basis})",
                interval=interval,
            )
        )
    return (min(found, key=lambda one: one.interval.high / one.interval.low),) if found else ()
