"""Every recipe from a whole model: built, loaded by the engine that serves, and compared with fp32."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from penstock.errors import OptimizationError
from penstock.hardware import Isa
from penstock.manifest import Axes, GraphIO
from penstock.recipe import EngineName, Precision, Recipe
from penstock.tasks import HEAD_OF_TASK, TaskName
from penstock_optimizer.export import Flavour, export
from penstock_optimizer.guard.gate import calibration_rows, forward_of, own_corpus, samples, split
from penstock_optimizer.quantise import Built, build
from penstock_optimizer.search.recipes import REFERENCE, candidate_recipes
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float
from penstock_runtime.tasks import make_task
from tests.golden.models import BERT, DISTILBERT, KINDS, MPNET, Kind, Sizes, write_model
from tests.optimizer.end_to_end.small_model import (
    write_small_deberta,
    write_small_gte,
    write_small_modernbert,
    write_small_nomic,
)
from tests.tasks import COMMON_TASKS

SIZES = Sizes(width=128, layers=2, heads=4, inner=256, positions=64)
EVERYTHING = (tuple(EngineName), tuple(Precision))
MADE = {
    recipe.full_name: recipe
    for isa in (Isa.AMX, Isa.AVX512)
    for recipe in candidate_recipes(isa, *EVERYTHING).recipes
    if recipe != REFERENCE
}
FLAVOURS = {EngineName.ONNXRUNTIME: Flavour.FUSED, EngineName.OPENVINO: Flavour.PLAIN, EngineName.NATIVE: Flavour.FUSED}


ModelOf = Callable[..., "Model"]
"""Kind, and task where it is not feature-extraction, to the model; each made once."""


class Model:
    """A small model with its graphs and calibration rows."""

    def __init__(self, folder: Path, path: Path, task: TaskName, mask: str) -> None:
        model = ModelFolder.open(path)
        self.task = make_task(task, model)
        self.exported = {
            engine: export(model, HEAD_OF_TASK[task], folder / flavour.value, flavour=flavour)
            for engine, flavour in FLAVOURS.items()
        }
        calibrating, judging = split(own_corpus())
        self.rows = calibration_rows(self.task, samples(task, calibrating, mask=mask), at_most=24)
        self.judging = calibration_rows(self.task, samples(task, judging, mask=mask), at_most=12)

    def build(self, recipe: Recipe, out: Path) -> Built:
        source = self.exported[recipe.engine]
        return build(recipe, source.path, source.io, self.rows, out)

    def outputs(self, recipe: Recipe, path: Path) -> list[Float]:
        """All outputs of the graph for each judging row, flat."""
        engine = load_engine(path, self.exported[recipe.engine].io, recipe, Threads(1, 1))
        forward = forward_of(engine, self.exported[recipe.engine].io)
        found = [np.concatenate([value.ravel() for value in forward([row])[0].values()]) for row in self.judging]
        engine.close()
        return found

    def error(self, recipe: Recipe, path: Path) -> float:
        """|candidate - reference|^2 / |reference|^2 over all rows."""
        reference = np.concatenate(self.outputs(REFERENCE, self.exported[EngineName.ONNXRUNTIME].path))
        return float(np.sum((np.concatenate(self.outputs(recipe, path)) - reference) ** 2) / np.sum(reference**2))


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    @cache
    def make(kind: Kind, task: TaskName = TaskName.FEATURE_EXTRACTION) -> Model:
        folder = tmp_path_factory.mktemp(f"{kind.name}-{task.value}")
        path = write_model(folder / "model", task, kind, SIZES)
        return Model(folder, path, task, "<mask>" if kind.pad else "[MASK]")

    return make


@pytest.mark.parametrize("name", MADE)
def test_every_candidate_of_a_bert_is_near_fp32(name: str, model_of: ModelOf, tmp_path: Path) -> None:
    recipe = MADE[name]
    model = model_of(BERT)

    built = model.build(recipe, tmp_path)

    limit = {Precision.FP32: 1e-8, Precision.BF16: 1e-3}.get(recipe.precision, 0.02)
    assert model.error(recipe, built.path) < limit
    assert built.size_bytes == sum(file.stat().st_size for file in tmp_path.iterdir()), "nothing is left behind"
    assert built.io == model.exported[recipe.engine].io


@pytest.mark.parametrize("name", ["onnxruntime int8-static compensated per-channel smooth", "openvino bf16"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_family_can_be_made(kind: Kind, name: str, model_of: ModelOf, tmp_path: Path) -> None:
    model = model_of(kind)

    assert model.error(MADE[name], model.build(MADE[name], tmp_path).path) < 0.02


NEWER = {
    "modernbert": write_small_modernbert,
    "deberta": write_small_deberta,
    "nomic": write_small_nomic,
    "gte": write_small_gte,
}


@pytest.fixture(scope="module", params=NEWER)
def newer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose layers have parts that BERT's do not have."""
    folder = tmp_path_factory.mktemp("newer")
    path = NEWER[request.param](folder / request.param)
    (path / "modules.json").unlink()  # the native engine would pool the token vectors, the others would not
    return Model(folder, path, TaskName.FEATURE_EXTRACTION, "[MASK]")


@pytest.mark.parametrize("name", MADE)
def test_every_candidate_of_newer_families_is_near_fp32(name: str, newer: Model, tmp_path: Path) -> None:
    recipe = MADE[name]

    built = newer.build(recipe, tmp_path)

    limit = {Precision.FP32: 1e-8, Precision.BF16: 1e-3}.get(recipe.precision, 0.02)
    assert newer.error(recipe, built.path) < limit


@pytest.mark.parametrize("task", list(COMMON_TASKS))
@pytest.mark.parametrize("engine", [EngineName.ONNXRUNTIME, EngineName.OPENVINO])
def test_every_head_can_be_made(engine: EngineName, task: TaskName, model_of: ModelOf, tmp_path: Path) -> None:
    recipe = next(r for r in MADE.values() if r.engine is engine and r.precision is Precision.INT8_STATIC)
    model = model_of(DISTILBERT, task)

    assert model.error(recipe, model.build(recipe, tmp_path).path) < 0.02


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("onnxruntime int8-static compensated per-channel smooth", {"QAttention": 2, "MatMulIntegerToFloat": 6}),
        ("onnxruntime int8-dynamic", {"QAttention": 2, "DynamicQuantizeMatMul": 6, "DynamicQuantizeLinear": 2}),
        ("openvino int8-static compensated per-channel smooth", {"FakeQuantize": 8, "int8 weights": 12}),
        ("openvino int8-rowwise group-32", {"int8 weights": 14}),
    ],
)
def test_what_was_quantised_is_counted(name: str, counts: dict[str, int], model_of: ModelOf, tmp_path: Path) -> None:
    built = model_of(BERT).build(MADE[name], tmp_path)

    assert {operator: built.fused_nodes.get(operator) for operator in counts} == counts


def test_an_attention_with_a_bias_on_its_scores_keeps_it(model_of: ModelOf, tmp_path: Path) -> None:
    """MPNet's relative positions: ONNX Runtime's QAttention would drop them."""
    recipe = MADE["onnxruntime int8-static compensated per-channel smooth"]

    built = model_of(MPNET).build(recipe, tmp_path)

    assert "QAttention" not in built.fused_nodes
    assert built.fused_nodes["MultiHeadAttention"] == 2


def test_the_strength_of_smoothing_is_reported(model_of: ModelOf, tmp_path: Path) -> None:
    built = model_of(BERT).build(MADE["onnxruntime int8-static compensated per-channel smooth"], tmp_path)

    assert [note.split()[0] for note in built.notes] == ["alpha"]


@pytest.mark.parametrize("name", [name for name in MADE if "int8-static" in name and "reduced" not in name])
def test_the_same_texts_make_the_same_graph(name: str, model_of: ModelOf, tmp_path: Path) -> None:
    model = model_of(BERT)
    one, other = (model.build(MADE[name], tmp_path / str(turn)) for turn in (1, 2))

    for before, after in zip(model.outputs(MADE[name], one.path), model.outputs(MADE[name], other.path), strict=True):
        np.testing.assert_array_equal(before, after)


def test_openvino_s_recipe_prints_and_logs_nothing(
    model_of: ModelOf, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        model_of(BERT).build(MADE["openvino int8-static compensated per-channel smooth"], tmp_path)

    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert caplog.records == []


@pytest.mark.parametrize("engine", [one for one in EngineName if one is not EngineName.NEURON])
def test_an_option_that_no_quantiser_uses_is_refused(engine: EngineName, model_of: ModelOf, tmp_path: Path) -> None:
    recipe = Recipe(engine=engine, precision=Precision.INT8_STATIC, options=("per-chanel",))

    with pytest.raises(OptimizationError, match="no option per-chanel"):
        model_of(BERT).build(recipe, tmp_path)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.INT8_ROWWISE),
        Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.BF16),
        Recipe(engine=EngineName.OPENVINO, precision=Precision.INT8_DYNAMIC),
    ],
    ids=lambda recipe: recipe.full_name,
)
def test_a_precision_that_an_engine_lacks_is_an_error_that_names_both(
    recipe: Recipe, model_of: ModelOf, tmp_path: Path
) -> None:
    with pytest.raises(OptimizationError, match=recipe.precision.value):
        model_of(BERT).build(recipe, tmp_path)


@pytest.mark.parametrize("name", [name for name in MADE if "smooth" in name])
def test_calibration_without_texts_is_an_error(name: str, model_of: ModelOf, tmp_path: Path) -> None:
    model = model_of(BERT)
    source = model.exported[MADE[name].engine]

    with pytest.raises(OptimizationError, match="calibration"):
        build(MADE[name], source.path, source.io, [], tmp_path)


@pytest.mark.parametrize("name", [name for name in MADE if "int8" in name])
def test_a_graph_without_quantisable_products_is_an_error(name: str, model_of: ModelOf, tmp_path: Path) -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["input_ids"], ["x"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["x", "axis"], ["last_hidden_state"]),
        ],
        "nothing",
        [helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["batch", "tokens"])],
        [helper.make_tensor_value_info("last_hidden_state", onnx.TensorProto.FLOAT, ["batch", "tokens", 1])],
        [onnx.numpy_helper.from_array(np.array([2], np.int64), "axis")],
    )
    path = tmp_path / "nothing.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    io = GraphIO(inputs=("input_ids",), outputs=model_of(BERT).exported[EngineName.OPENVINO].io.outputs)

    with pytest.raises(OptimizationError, match="quantise"):
        build(MADE[name], path, io, model_of(BERT).rows, tmp_path / "out")


def old_graph(path: Path, opset: int) -> GraphIO:
    """Two products and what is between them, in a form that exporters of the time before opset 13 wrote."""
    random = np.random.default_rng(0)
    constants = {
        "table": random.standard_normal((3000, 128)),
        "up": random.standard_normal((128, 256)) / 11,
        "up.bias": random.standard_normal(256),
        "down": random.standard_normal((256, 128)) / 16,
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "input_ids"], ["x"], "embed"),
            helper.make_node("MatMul", ["x", "up"], ["product"], "up"),
            helper.make_node("Add", ["product", "up.bias"], ["sum"], "add"),
            helper.make_node("Softmax", ["sum"], ["shares"], "softmax", axis=2),
            helper.make_node("Mul", ["sum", "shares"], ["inner"], "mul"),
            helper.make_node("MatMul", ["inner", "down"], ["last_hidden_state"], "down"),
        ],
        "old",
        [helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["batch", "tokens"])],
        [helper.make_tensor_value_info("last_hidden_state", onnx.TensorProto.FLOAT, ["batch", "tokens", 128])],
        [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=6), str(path))
    return GraphIO(inputs=("input_ids",), outputs={"last_hidden_state": Axes.TOKENS})


@pytest.mark.parametrize("opset", [9, 11])
@pytest.mark.parametrize("name", [name for name in MADE if not name.startswith("native")])
def test_a_graph_of_an_old_opset_is_quantised_too(name: str, opset: int, model_of: ModelOf, tmp_path: Path) -> None:
    model, path = model_of(BERT), tmp_path / "old.onnx"
    io = old_graph(path, opset)
    outputs = []
    for recipe, file in (
        (REFERENCE, path),
        (MADE[name], build(MADE[name], path, io, model.rows, tmp_path / "out").path),
    ):
        engine = load_engine(file, io, recipe, Threads(1, 1))
        outputs.append([forward_of(engine, io)([row])[0]["last_hidden_state"] for row in model.judging])
        engine.close()

    reference, found = (np.concatenate(one) for one in outputs)
    assert float(np.sum((found - reference) ** 2) / np.sum(reference**2)) < 0.02


def test_the_error_for_a_graph_that_onnx_cannot_convert_names_the_opset(model_of: ModelOf, tmp_path: Path) -> None:
    path = tmp_path / "old.onnx"
    io = old_graph(path, 11)
    old = onnx.load(str(path))
    old.graph.node[4].op_type = "Unheard"
    onnx.save(old, str(path))

    with pytest.raises(OptimizationError, match=r"old\.onnx is of opset 11, .* convert it to 13") as refused:
        build(MADE["openvino int8-static compensated per-channel smooth"], path, io, model_of(BERT).rows, tmp_path)
    assert "opset 13" in refused.value.remedy


def test_the_fp32_graph_is_copied_with_its_external_weights(model_of: ModelOf, tmp_path: Path) -> None:
    source = model_of(BERT).exported[EngineName.ONNXRUNTIME]
    large = tmp_path / "large" / "model.onnx"
    large.parent.mkdir()
    onnx.save_model(onnx.load(str(source.path)), str(large), save_as_external_data=True, location="model.onnx.data")

    built = build(REFERENCE, large, source.io, [], tmp_path / "out")
    shutil.rmtree(large.parent)

    assert model_of(BERT).error(REFERENCE, built.path) == 0
    assert {file.name for file in built.path.parent.iterdir()} == {"model.onnx", "model.onnx.data"}


@pytest.mark.parametrize("name", [name for name in MADE if "onnxruntime int8" in name and "reduced" not in name])
def test_a_large_graph_has_external_weights(
    name: str, model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_optimizer.quantise.linear.LARGE", 1000)

    built = model_of(BERT).build(MADE[name], tmp_path)

    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    assert built.size_bytes > 100_000
    assert model_of(BERT).error(MADE[name], built.path) < 0.02
