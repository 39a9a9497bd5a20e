from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import ArtefactError, HostError
from penstock.hardware import CpuIdentity, Isa
from penstock.manifest import MANIFEST_NAME, Axes, Manifest, ServedGraph, ServedModel
from penstock.recipe import Batching, EngineName, Plan, Precision, Recipe, ShortRoute
from penstock.tasks import TaskName
from penstock_runtime.host import HostMemory, read_host
from penstock_runtime.serving.loaded_model import fit_plan, load_artefact
from tests.runtime.minilm import ORT_DYNAMIC, ORT_FP32, copied_graph, copy_settings, manifest_of

HERE = CpuIdentity(isa=Isa.AVX512_VNNI)
HOST = replace(read_host(), cpu=HERE)


def plan(recipe: Recipe = ORT_FP32, **options: object) -> Plan:
    return Plan.model_validate({"recipe": recipe, "streams": 2, "threads_per_stream": 1, **options})


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    """Two graphs and the model's settings, with a manifest."""
    root = tmp_path / "artefact"
    served = {recipe: copied_graph(root, recipe, plan(recipe)) for recipe in (ORT_DYNAMIC, ORT_FP32)}
    copy_settings(root)
    write(root, manifest_of(root, chosen=served[ORT_DYNAMIC], baseline=served[ORT_FP32], cpu=HERE, cores=2))
    return root


def write(root: Path, manifest: Manifest) -> None:
    (root / MANIFEST_NAME).write_text(manifest.model_dump_json())


def test_either_model_of_an_artefact_is_loaded_with_its_plan(artefact: Path) -> None:
    chosen = load_artefact(artefact, "chosen", HOST)
    baseline = load_artefact(artefact, "baseline", HOST, max_tokens=64)

    assert (chosen.which, chosen.plan.recipe, chosen.engine.facts.precision) == ("chosen", ORT_DYNAMIC, "i8")
    assert (baseline.which, baseline.plan.recipe, baseline.engine.facts.precision) == ("baseline", ORT_FP32, "f32")
    assert (chosen.max_tokens, baseline.max_tokens) == (256, 64)
    assert chosen.manifest is not None
    assert chosen.task.name is TaskName.FEATURE_EXTRACTION
    assert chosen.findings == baseline.findings == ()
    for model in (chosen, baseline):
        model.close()
        model.close()


ROUTE = ShortRoute(
    longest_tokens=16,
    recipe=ORT_FP32,
    batching=Batching.PADDED,
    max_batch_rows=8,
    wide_from_tokens=16,
    wide_alone_from_tokens=8,
)


def routed(artefact: Path) -> Manifest:
    """The artefact's chosen model with its fp32 graph for short rows."""
    manifest = Manifest.load(artefact)
    chosen = ServedModel(
        path=manifest.chosen.path,
        io=manifest.chosen.io,
        plan=plan(ORT_DYNAMIC, short=ROUTE),
        short=ServedGraph(path=manifest.baseline.path, io=manifest.baseline.io),
    )
    changed = manifest.model_copy(update={"chosen": chosen})
    write(artefact, changed)
    return changed


def test_a_plan_with_a_route_loads_both_graphs(artefact: Path) -> None:
    assert Manifest.load(artefact) != routed(artefact) == Manifest.load(artefact)

    model = load_artefact(artefact, "chosen", HOST)
    one_core = load_artefact(artefact, "chosen", HOST, cores=1)

    facts = model.engine.facts
    assert facts.short is not None
    assert (facts.precision, facts.short.precision, facts.weight_copies) == ("i8", "f32", 2)
    assert one_core.plan.short == ROUTE.model_copy(update={"wide_from_tokens": None, "wide_alone_from_tokens": None})
    for each in (model, one_core):
        each.close()


def test_the_graph_of_short_rows_is_verified_and_its_memory_counted(artefact: Path) -> None:
    manifest = routed(artefact)
    needed = sum((artefact / one).stat().st_size for one in (manifest.chosen.path, manifest.baseline.path)) * 2
    with pytest.raises(HostError):
        load_artefact(artefact, "chosen", replace(HOST, memory=HostMemory(total=2**34, limit=needed, available=needed)))
    (artefact / manifest.baseline.path).write_bytes(b"another graph")

    with pytest.raises(ArtefactError, match="is not the file that was optimised"):
        load_artefact(artefact, "chosen", HOST)


def test_a_graph_of_short_rows_with_other_outputs_is_refused(artefact: Path) -> None:
    manifest = routed(artefact)
    assert manifest.chosen.short is not None
    io = manifest.chosen.short.io.model_copy(update={"outputs": {"logits": Axes.ROW}})
    short = manifest.chosen.short.model_copy(update={"io": io})
    write(artefact, manifest.model_copy(update={"chosen": manifest.chosen.model_copy(update={"short": short})}))

    with pytest.raises(ArtefactError, match=r"short rows gives \['logits'\]"):
        load_artefact(artefact, "chosen", HOST)


def test_a_manifest_from_before_there_were_routes_loads(artefact: Path) -> None:
    content = json.loads((artefact / MANIFEST_NAME).read_bytes())
    for which in ("chosen", "baseline"):
        assert content[which].pop("short") is None
        assert content[which]["plan"].pop("short") is None
    (artefact / MANIFEST_NAME).write_text(json.dumps(content))

    load_artefact(artefact, "chosen", HOST).close()


def test_a_route_without_its_graph_is_no_manifest(artefact: Path) -> None:
    content = json.loads(routed(artefact).model_dump_json())
    content["chosen"]["short"] = None
    (artefact / MANIFEST_NAME).write_text(json.dumps(content))

    with pytest.raises(ArtefactError, match="short rows have no graph of their own"):
        load_artefact(artefact, "chosen", HOST)


def test_a_plan_for_another_instruction_set_is_refused_with_both_names(artefact: Path) -> None:
    other = replace(HOST, cpu=CpuIdentity(isa=Isa.AVX2))

    with pytest.raises(ArtefactError, match=r"on avx512-vnni, and this processor is avx2") as caught:
        load_artefact(artefact, "chosen", other)

    assert "penstock optimize" in caught.value.remedy
    load_artefact(artefact, "baseline", other).close()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config_sentence_transformers.json", {"prompts": {"q": "another "}, "default_prompt_name": "q"}),
        ("sentence_bert_config.json", {"max_seq_length": 4}),
        ("special_tokens_map.json", {"cls_token": "[MASK]"}),
    ],
)
def test_a_file_that_was_added_and_would_change_answers_is_named(artefact: Path, name: str, content: object) -> None:
    (artefact / name).write_text(json.dumps(content))

    with pytest.raises(ArtefactError, match=rf"/{name} was not there when the artefact was made"):
        load_artefact(artefact, "chosen", HOST)


def test_files_of_an_artefact_that_are_not_read_are_ignored(artefact: Path) -> None:
    (artefact / "report.html").touch()
    (artefact / "lost+found").mkdir(mode=0o700)
    (artefact / ".config.json.swp").touch()

    load_artefact(artefact, "chosen", HOST).close()


@pytest.mark.parametrize("name", ["tokenizer.json", f"model/{ORT_DYNAMIC.slug}/model.onnx", "1_Pooling/config.json"])
@pytest.mark.parametrize("harm", ["altered", "missing"])
def test_an_altered_or_missing_file_is_named(artefact: Path, name: str, harm: str) -> None:
    path = artefact / name
    if harm == "altered":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()

    with pytest.raises(ArtefactError) as caught:
        load_artefact(artefact, "chosen", HOST)

    assert str(path) in caught.value.message
    assert caught.value.remedy


def test_files_that_the_caller_has_verified_are_not_read_again(artefact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("a file was hashed again"))

    load_artefact(artefact, "chosen", HOST, verified=True).close()


def test_the_other_models_graph_is_not_needed(artefact: Path) -> None:
    shutil.rmtree(artefact / "model" / ORT_FP32.slug)

    load_artefact(artefact, "chosen", HOST).close()


def test_a_graph_without_a_digest_is_refused(artefact: Path) -> None:
    manifest = Manifest.load(artefact)
    files = {name: digest for name, digest in manifest.files.items() if name != manifest.chosen.path}
    write(artefact, manifest.model_copy(update={"files": files}))

    with pytest.raises(ArtefactError, match="no digest of model/"):
        load_artefact(artefact, "chosen", HOST)


def test_too_little_memory_is_an_error_before_loading(artefact: Path) -> None:
    tight = replace(HOST, memory=HostMemory(total=2**34, limit=2**27, available=2**26))

    with pytest.raises(HostError, match="serving onnxruntime-int8-dynamic"):
        load_artefact(artefact, "chosen", tight)


def test_fewer_cores_than_planned_are_reported_as_a_finding(artefact: Path) -> None:
    model = load_artefact(artefact, "chosen", HOST, cores=1)

    assert (model.plan.streams, model.plan.threads_per_stream) == (1, 1)
    assert model.engine.facts.threads.streams == 1
    assert "made for 2 cores" in model.findings[0]
    model.close()


@pytest.mark.parametrize(
    ("streams", "threads", "cores", "fitted"),
    [
        (4, 1, None, (4, 1)),
        (4, 1, 4, (4, 1)),
        (4, 1, 8, (4, 1)),
        (4, 1, 3, (3, 1)),
        (2, 4, 4, (1, 4)),
        (2, 4, 5, (1, 4)),
        (1, 8, 2, (1, 2)),
        (4, 2, 1, (1, 1)),
    ],
)
def test_a_plan_is_fitted_to_the_cores(streams: int, threads: int, cores: int | None, fitted: tuple[int, int]) -> None:
    asked = Plan(
        recipe=Recipe(engine=EngineName.OPENVINO, precision=Precision.FP32),
        streams=streams,
        threads_per_stream=threads,
        batching=Batching.PADDED,
        wide_from_tokens=128,
        wide_alone_from_tokens=16,
    )

    found, findings = fit_plan(asked, cores)

    assert (found.streams, found.threads_per_stream) == fitted
    assert bool(findings) == (fitted != (streams, threads))
    assert found.streams * found.threads_per_stream <= (cores or streams * threads)
    wide = (None, None) if found.streams == 1 else (128, 16)
    assert (found.wide_from_tokens, found.wide_alone_from_tokens) == wide


def test_a_manifest_without_a_wide_length_for_a_single_client_uses_the_general_one(artefact: Path) -> None:
    routed(artefact)
    file = artefact / MANIFEST_NAME
    value = json.loads(file.read_text())
    written = value["chosen"]["plan"]
    written["wide_from_tokens"] = 64
    for part in (written, written["short"]):
        del part["wide_alone_from_tokens"]
    file.write_text(json.dumps(value))

    found = Manifest.load(artefact).chosen.plan

    short = found.of_short_rows
    assert short is not None
    assert (found.alone_wide_from, short.alone_wide_from) == (64, 16)
