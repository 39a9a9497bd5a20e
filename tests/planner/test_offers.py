"""Offers: replicas that fit on a node, the class of a processor, and estimates where nothing is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.hardware import INF1_UNSUPPORTED, NOT_RUN, CpuIdentity, Isa
from penstock.prices import shipped_prices
from penstock.resources.hardware_class import HardwareClassSpec, Price
from penstock.resources.shipped_classes import HARDWARE_CLASSES
from penstock_optimizer.neuron.plans import HOST_MILLISECONDS
from penstock_optimizer.neuron.published import SHAPES, published_rows
from penstock_planner.compare import Load, Offer, compare
from penstock_planner.evidence import Evidence, Origin
from penstock_planner.offers import OfferInputs, class_of_cpu, offers
from penstock_planner.project import project
from tests.examples import examples
from tests.planner.cases import CURVE, evidence


def inputs(*known: Evidence, family: str | None = "bert-base", tokens: int = 128) -> OfferInputs:
    shape = SHAPES[family] if family is not None else None
    return OfferInputs(HARDWARE_CLASSES, shipped_prices(), known, published_rows(), shape, tokens)


def nodes(name: str, cores: int) -> dict[str, int]:
    (found,) = [one for one in offers(inputs(evidence(name, cores)), [name], [cores]) if one.cores == cores]
    return {node.name: node.replicas for node in found.nodes}


@pytest.mark.parametrize(
    ("name", "cores", "node", "replicas"),
    [
        # A vCPU is a thread: 4 vCPUs are two cores, of which one is kept for the node itself.
        ("icelake", 1, "c6i.xlarge", 1),
        ("icelake", 1, "c6i.2xlarge", 3),
        ("icelake", 2, "c6i.2xlarge", 1),
        ("icelake", 1, "c6i.large", None),
        # A vCPU is a whole core.
        ("zen4-full-cores", 1, "c7a.xlarge", 3),
        ("zen4-full-cores", 4, "c7a.xlarge", None),
        ("graviton3", 2, "c7g.2xlarge", 3),
        ("inf1", 4, "inf1.xlarge", 1),
        ("inf1", 16, "inf1.6xlarge", 1),
        ("inf1", 4, "inf1.24xlarge", 16),
        ("inf1", 16, "inf1.xlarge", None),
        ("inf2", 2, "inf2.24xlarge", 6),
        ("gpu-t4", 1, "g4dn.xlarge", 1),
    ],
)
def test_replicas_that_fit_on_a_node(name: str, cores: int, node: str, replicas: int | None) -> None:
    assert nodes(name, cores).get(node) == replicas


GIB = 2**30


@pytest.mark.parametrize(
    ("resident", "asked", "expected"),
    [
        (None, None, {"c6i.xlarge": 1, "c6i.2xlarge": 3, "c6i.4xlarge": 7}),
        # A pod requests 1.3 times the measured memory and 256 MiB, and 1 GiB of a node is not for pods.
        (4 * GIB, None, {"c6i.xlarge": 1, "c6i.2xlarge": 2, "c6i.4xlarge": 5}),
        (8 * GIB, None, {"c6i.2xlarge": 1, "c6i.4xlarge": 2}),
        (4 * GIB, 15 * GIB, {"c6i.2xlarge": 1, "c6i.4xlarge": 2}),
    ],
)
def test_a_node_holds_as_many_replicas_as_it_has_memory_for(
    resident: int | None, asked: int | None, expected: dict[str, int]
) -> None:
    known = replace(evidence("icelake", 1), resident_bytes=resident)
    (found,) = offers(replace(inputs(known), memory_bytes=asked), ["icelake"], [1])

    assert {node.name: node.replicas for node in found.nodes if node.name in {"c6i.xlarge", *expected}} == expected
    left_out = [text for text in found.caveats if "left out" in text]
    assert left_out == ([] if "c6i.xlarge" in expected else left_out[:1])
    assert all("GiB of memory: c6i.xlarge" in text for text in left_out)


def test_a_model_that_was_not_measured_has_the_memory_of_its_weights() -> None:
    large = replace(inputs(evidence("icelake", 1), family="bert-large"), caches_bytes=12 * GIB)

    (found,) = offers(large, ["icelake"], [1])

    # 335 M weights of 4 bytes, 2.5 times, 512 MiB, and the caches: 15.6 GiB.
    assert {node.name: node.replicas for node in found.nodes} == {"c6i.4xlarge": 1, "c6i.8xlarge": 4}
    assert any("a replica needs 15.6 GiB of memory" in text for text in found.caveats)


def test_an_estimate_for_other_cores_needs_the_same_memory() -> None:
    known = replace(evidence("icelake", 1), resident_bytes=8 * GIB)
    found = by_place(offers(inputs(known), ["icelake"], [2]))

    assert {node.name: node.replicas for node in found["icelake", 2].nodes}["c6i.4xlarge"] == 2


def test_a_model_that_no_node_has_the_memory_for_is_not_offered_with_the_reason() -> None:
    known = replace(evidence("icelake", 1), resident_bytes=100 * GIB)
    (found,) = offers(replace(inputs(known), caches_bytes=GIB), ["icelake"], [1])

    assert found.nodes == ()
    assert found.problem.startswith("a replica needs 131 GiB of memory, and no node of icelake")
    comparison = compare([found], Load(mean=10, peak=10, p95_milliseconds=50))
    assert comparison.best is None
    assert "131 GiB" in comparison.rows[0].why


def test_the_price_of_a_class_counts_before_the_list() -> None:
    priced = HARDWARE_CLASSES["icelake"].model_copy(update={"price": Price(per_core_hour=0.04)})
    made = OfferInputs({"icelake": priced}, shipped_prices(), (evidence("icelake", 2),))

    (found,) = offers(made, ["icelake"], [2])

    assert [(node.per_hour, node.replicas, node.is_share) for node in found.nodes] == [(0.08, 1, True)]


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        (CpuIdentity(vendor="GenuineIntel", family=6, model=106, isa=Isa.AVX512_VNNI), "icelake"),
        (CpuIdentity(vendor="GenuineIntel", family=6, model=143, isa=Isa.AMX), "sapphirerapids"),
        (CpuIdentity(vendor="GenuineIntel", family=6, model=173, isa=Isa.AMX), "graniterapids"),
        (CpuIdentity(vendor="AuthenticAMD", family=25, model=17, isa=Isa.AVX512_BF16), "zen4"),
        (CpuIdentity(vendor="0x41", family=8, model=0xD4F, isa=Isa.NEON_I8MM), "graviton4"),
        # A hypervisor hides the model: by the instruction set.
        (CpuIdentity(vendor="GenuineIntel", family=6, model=167, isa=Isa.AMX), "sapphirerapids"),
        (CpuIdentity(vendor="AuthenticAMD", family=25, model=1, isa=Isa.AVX2), None),
    ],
)
def test_the_class_of_a_processor(cpu: CpuIdentity, name: str | None) -> None:
    assert class_of_cpu(HARDWARE_CLASSES, cpu) == name


def by_place(found: tuple[Offer, ...]) -> dict[tuple[str, int], Offer]:
    return {(one.hardware_class, one.cores): one for one in found if not one.not_chosen}


def test_measured_figures_count_before_all_others() -> None:
    found = by_place(offers(inputs(evidence("icelake", 2), family="distilbert"), ["icelake"], [1, 2, 4]))

    origins = {cores: {one.origin for one in found["icelake", cores].evidence} for cores in (1, 2, 4)}
    assert origins == {1: {Origin.ESTIMATED}, 2: {Origin.MEASURED_ON_CLASS}, 4: {Origin.ESTIMATED}}


def test_other_numbers_of_cores_are_estimated_in_proportion() -> None:
    found = by_place(offers(inputs(evidence("icelake", 2)), ["icelake"], [4, 1]))

    (wide,), (narrow,) = found["icelake", 4].evidence, found["icelake", 1].evidence
    assert wide.curve.rate_within(50) == pytest.approx(160)
    # One core also needs longer for each text.
    assert narrow.curve.rate_within(100) == pytest.approx(40)
    assert wide.interval.low < 0.75
    assert wide.interval.high > 1.3
    assert "in proportion to the cores, from 2 measured" in wide.basis


def test_other_classes_are_estimated_from_the_arithmetic_of_a_core() -> None:
    found = by_place(offers(inputs(evidence("sapphirerapids", 1)), ["zen4-full-cores", "graviton4"], [1]))

    (zen4,) = found["zen4-full-cores", 1].evidence
    assert zen4.origin is Origin.ESTIMATED
    assert zen4.interval.low < 0.5
    assert zen4.interval.high > 2
    assert "of sapphirerapids, 0.073 to 0.58 times as fast" in zen4.basis


CAVEAT = "measured on shared cores"


@settings(max_examples=examples(100))
@given(
    st.sampled_from(["icelake", "zen4-full-cores", "zen5-full-cores", "graviton4", "sapphirerapids"]),
    st.sampled_from(["zen4", "sapphirerapids", "graviton3"]), st.integers(1, 8), st.integers(1, 8),
    st.floats(0, 0.5), st.booleans(),
)  # fmt: skip
def test_an_estimate_is_never_more_exact_than_its_source_and_has_its_caveats(  # noqa: PLR0917 - drawn by position
    name: str, source: str, cores: int, measured: int, error: float, is_ours: bool
) -> None:
    known = replace(evidence(source, measured, error=error), caveats=(CAVEAT,))
    made = replace(inputs(*([] if is_ours else [known]), family=None), loads=project().loads)
    made = replace(made, project=(known,) if is_ours else ())

    (found,) = by_place(offers(made, [name], [cores]))[name, cores].evidence

    assert CAVEAT in found.caveats
    assert found.interval.low <= known.interval.low
    assert found.interval.high >= known.interval.high
    if (name, cores) != (source, measured):
        assert found.origin is Origin.ESTIMATED
        assert found.is_rough


def test_ice_lake_from_zen_4_is_not_within_five_per_cent() -> None:
    made = replace(inputs(evidence("zen4", 2, error=0.05)), loads=project().loads)

    (found,) = by_place(offers(made, ["icelake"], [2]))["icelake", 2].evidence

    assert found.interval.low <= 0.65 * 0.95
    assert found.interval.high >= 1.35 * 1.05
    assert "1.8 times as fast by the int8 and fp32 arithmetic" in found.basis


def test_the_users_measurement_of_a_class_counts_before_the_projects() -> None:
    made = replace(inputs(evidence("zen4", 2)), project=(evidence("zen4", 1), evidence("icelake", 1)))

    assert [(one.hardware_class, one.cores) for one in made.known] == [("zen4", 2), ("icelake", 1)]


def test_figures_of_other_software_are_an_offer_of_their_own_and_never_chosen() -> None:
    made = inputs(family="distilbert")

    (other,) = [one for one in offers(made, ["icelake"], [2]) if one.evidence]
    comparison = compare([other], Load(10, 10, 100))

    assert other.not_chosen == "it is of software that Penstock does not run"
    assert comparison.rows[0].is_feasible
    assert (comparison.best, comparison.likely) == (None, None)


@pytest.mark.parametrize("family", sorted(SHAPES))
def test_no_figure_of_inferentia_is_faster_than_our_own_http(family: str) -> None:
    for offer in offers(inputs(family=family), ["inf1", "inf2"], [1]):
        for one in offer.evidence:
            assert one.curve.points[-1].completed_per_second <= 1000 / HOST_MILLISECONDS
            assert one.curve.points[0].p95_milliseconds > HOST_MILLISECONDS


def test_every_offer_of_inferentia_states_that_nothing_was_run() -> None:
    found = offers(inputs(), ["inf1", "inf2"], [1])

    assert {(one.hardware_class, one.cores) for one in found} == {("inf1", 4), ("inf1", 16), ("inf2", 2)}
    for one in found:
        assert NOT_RUN in one.caveats
        assert one.evidence
        assert all(NOT_RUN in known.caveats for known in one.evidence)
        assert (INF1_UNSUPPORTED in one.caveats) is (one.hardware_class == "inf1")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("inf1", "AWS no longer supports Inf1"), ("inf2", "the runtime for Inferentia is not yet run on a device")],
)
def test_inferentia_is_chosen_only_when_it_is_named(name: str, reason: str) -> None:
    load = Load(200, 400, 50)

    shown = compare(offers(inputs(), [name], [1]), load)
    named = compare(offers(inputs(), [name], [1], chosen=[name]), load)

    assert shown.best is None
    assert all(reason in row.why for row in shown.rows if row.is_feasible)
    assert shown.nearest.startswith("nothing can be judged")
    assert named.best is not None


def test_gpus_are_for_comparison_and_print_their_caveats() -> None:
    (found,) = offers(inputs(), ["gpu-t4"], [1])

    assert found.not_chosen == "Penstock has no GPU runtime"
    assert any("half of what TensorRT" in text for text in found.caveats)
    assert found.evidence
    assert all("int8" not in one.plan for one in found.evidence)
    assert any("device time only" in text for one in found.evidence for text in one.caveats)


def test_large_models_on_an_l4_have_published_figures_of_servers() -> None:
    given = inputs(family="bert-large")

    (found,) = offers(given, ["gpu-l4"], [1])

    assert max(one.curve.points[-1].completed_per_second for one in found.evidence) == pytest.approx(138.2, rel=0.06)
    assert all("over HTTP" in " ".join(one.caveats) for one in found.evidence)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere", "there is no hardware class nowhere"),
        ("any", "no price of a node for 1 core of any"),
        ("gpu-l4", "nothing is known of this model on gpu-l4"),
        ("zen4-full-cores", "nothing is known of this model on zen4-full-cores"),
    ],
)
def test_what_cannot_be_judged_has_a_problem_and_a_remedy(name: str, problem: str) -> None:
    (found,) = offers(inputs(), [name], [1])

    assert (found.problem, bool(found.remedy), found.evidence) == (problem, True, ())


def test_of_a_gpu_without_figures_other_measurements_are_asked_for() -> None:
    (found,) = offers(inputs(), ["gpu-l4"], [1])

    assert found.remedy == "Measure another server on such a node, and give --measurements"
    assert not found.caveats  # they are about published figures


@settings(max_examples=examples(100))
@given(
    st.sampled_from(sorted(HARDWARE_CLASSES)), st.integers(1, 64),
    st.one_of(st.none(), st.sampled_from(sorted(SHAPES))), st.sampled_from([32, 64, 128, 256, 512]), st.booleans(),
)  # fmt: skip
def test_any_class_and_number_of_cores_gives_figures_or_a_problem(
    name: str, cores: int, family: str | None, tokens: int, is_measured: bool
) -> None:
    known = (evidence("icelake", 2),) if is_measured else ()

    for one in offers(inputs(*known, family=family, tokens=tokens), [name], [cores]):
        assert bool(one.problem) is not bool(one.evidence and one.nodes)
        assert all(node.replicas >= 1 for node in one.nodes)
        for figure in one.evidence:
            assert (figure.hardware_class, figure.cores) == (one.hardware_class, one.cores)
            assert 0 < figure.interval.low <= 1 <= figure.interval.high


def test_a_class_without_a_name_for_neuron_generations_has_no_published_figures() -> None:
    own = HardwareClassSpec(neuron=HARDWARE_CLASSES["inf2"].neuron, price=Price(per_core_hour=0.3))
    made = OfferInputs({"mine": own}, shipped_prices(), (), published_rows(), SHAPES["bert-base"])

    (found,) = offers(made, ["mine"], [1])

    assert found.problem == "nothing is known of this model on mine"
    assert CURVE.points
