"""A model's own ONNX file is used if it runs and its outputs have a form that the tasks know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.errors import CorruptModel, UnsafeModel, UnsupportedModel
from penstock.manifest import Axes
from penstock.tasks import Head
from penstock_optimizer.export import Flavour, export, own_graph
from penstock_optimizer.export.reader import open_session
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.graph import graph_data
from tests.optimizer.export.judge import assert_equals_torch, rows
from tests.optimizer.export.models import ENCODER_HEADS, FAMILIES, SMALL, Made, make
from tests.runtime.models.folders import bare_folder, write_onnx_with_weights


def with_own_graph(tmp_path: Path, head: Head, *, config_class: str = "BertConfig") -> Made:
    """A model of which only the graph is left, as an exporter would write it next to config.json."""
    made = make(tmp_path / "model", config_class, head, **FAMILIES[config_class])
    source = make(tmp_path / "source", config_class, head, **FAMILIES[config_class])
    export(source.folder, head, made.path, flavour=Flavour.PLAIN)
    (made.path / "model.safetensors").unlink()
    return made


def edit(made: Made, change: Callable[[onnx.ModelProto], None]) -> None:
    """Change the graph on disk."""
    model = onnx.load(str(made.path / "model.onnx"))
    change(model)
    onnx.save(model, str(made.path / "model.onnx"))


def rename(model: onnx.ModelProto, names: dict[str, str]) -> None:
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)


@pytest.mark.parity
@pytest.mark.parametrize("head", [head for head in ENCODER_HEADS if head is not Head.MASKED_LM])
def test_is_copied_and_answers_as_before(head: Head, tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, head)

    exported = export(made.folder, head, tmp_path / "out")

    assert exported.how == "own-onnx"
    assert exported.path.read_bytes() == (made.path / "model.onnx").read_bytes()
    assert exported.parameters > 10_000
    assert_equals_torch(exported, made, rows(13), rows(4, 17, 9))


def test_a_masked_language_model_answers_for_every_token(tmp_path: Path) -> None:
    """Ours answers for the mask tokens alone, those of other exporters for every token: as one that tags words does."""
    made = with_own_graph(tmp_path, Head.TOKEN)

    exported = export(made.folder, Head.MASKED_LM, tmp_path / "out")

    assert exported.io.outputs == {"logits": Axes.TOKENS}


@pytest.mark.parity
@pytest.mark.parametrize(
    ("head", "names"),
    [
        (Head.ENCODER, {"last_hidden_state": "token_embeddings"}),
        (Head.SEQUENCE, {"logits": "output_0"}),
        (Head.SPAN, {"start_logits": "output_0", "end_logits": "output_1"}),
    ],
)
def test_outputs_with_other_names_are_renamed(head: Head, names: dict[str, str], tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, head)
    edit(made, lambda model: rename(model, names))

    exported = export(made.folder, head, tmp_path / "out")

    assert_equals_torch(exported, made, rows(4, 17, 9))


@pytest.mark.parity
def test_further_outputs_are_ignored(tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, Head.ENCODER)

    def add_pooled(model: onnx.ModelProto) -> None:
        rename(model, {"last_hidden_state": "token_embeddings"})
        model.graph.node.append(
            helper.make_node("ReduceMean", ["token_embeddings"], ["sentence_embedding"], axes=[1], keepdims=0)
        )
        model.graph.output.append(helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, None))

    edit(made, add_pooled)

    assert_equals_torch(export(made.folder, Head.ENCODER, tmp_path / "out"), made, rows(4, 17, 9))


@pytest.mark.parity
@pytest.mark.parametrize(
    ("head", "names"),
    [
        (Head.ENCODER, {}),
        (Head.ENCODER, {"last_hidden_state": "token_embeddings"}),
        (Head.SEQUENCE, {}),
        (Head.SPAN, {}),
    ],
)
@pytest.mark.parametrize("external", [False, True])
def test_a_graph_of_half_precision_gets_float32_outputs(
    head: Head, names: dict[str, str], tmp_path: Path, *, external: bool
) -> None:
    made = with_own_graph(tmp_path, head)
    edit(made, lambda model: rename(model, names))
    model = onnx.load(str(made.path / "model.onnx"))
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
    for value in model.graph.output:
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    del model.graph.value_info[:]  # of float32
    onnx.save(model, str(made.path / "model.onnx"), save_as_external_data=external, location="model.onnx_data")

    exported = export(made.folder, head, tmp_path / "out")

    assert_equals_torch(exported, made, rows(4, 17, 9), close=0.02)


@pytest.mark.parity
def test_inputs_are_those_that_the_graph_has(tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, Head.ENCODER, config_class="DistilBertConfig")

    exported = export(made.folder, Head.ENCODER, tmp_path / "out")

    assert exported.io.inputs == ("input_ids", "attention_mask")


@pytest.mark.parity
@pytest.mark.parametrize("output", ["logits", "output_0"])
def test_external_weights_are_copied(output: str, tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, Head.SEQUENCE)
    model = onnx.load(str(made.path / "model.onnx"))
    rename(model, {"logits": output})
    onnx.save(model, str(made.path / "model.onnx"), save_as_external_data=True, location="model.onnx_data")

    for _ in range(2):  # the second time over the first
        exported = export(made.folder, Head.SEQUENCE, tmp_path / "out")

    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["model.onnx", "model.onnx.data"]
    assert (tmp_path / "out" / "model.onnx.data").stat().st_size < 4 * exported.parameters + 4096
    assert_equals_torch(exported, made, rows(13))


@pytest.mark.parametrize("names", [("model.onnx_data", "Constant_7_attr__value"), ("weights.bin", "onnx__MatMul_7")])
def test_external_weights_under_other_names_are_copied(names: tuple[str, str], tmp_path: Path) -> None:
    """Older exporters wrote one file for each tensor, named like it."""
    write_onnx_with_weights(bare_folder(tmp_path / "model") / "model.onnx", *names)

    exported = export(ModelFolder.open(tmp_path / "model"), Head.ENCODER, tmp_path / "out")

    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["model.onnx", "model.onnx.data"]
    (answer,) = open_session(exported.path).run(["last_hidden_state"], {"input_ids": np.ones((1, 2), np.int64)})
    assert np.array_equal(answer, np.full((1, 2, 4), 2, np.float32))


def test_a_missing_weight_file_is_an_error(tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, Head.ENCODER)
    model = onnx.load(str(made.path / "model.onnx"))
    onnx.save(model, str(made.path / "model.onnx"), save_as_external_data=True, location="weights")
    folder = ModelFolder.open(made.path)
    (made.path / "weights").unlink()

    with pytest.raises(CorruptModel, match="keeps weights in weights, which is not in its folder"):
        export(folder, Head.ENCODER, tmp_path / "out")


def test_a_supported_architecture_is_built_from_its_weights_and_not_from_the_graph(tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, Head.ENCODER)
    made.model.save_pretrained(made.path)

    assert export(made.folder, Head.ENCODER, tmp_path / "out").how == "builder"


def test_the_models_own_graph_is_preferred_to_torch(tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, Head.ENCODER)
    made.model.save_pretrained(made.path)
    made.rewrite_config(model_type="something-else")

    assert export(made.folder, Head.ENCODER, tmp_path / "out").how == "own-onnx"


def test_a_graph_for_another_task_is_refused_with_what_it_answers(tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, Head.SEQUENCE)

    with pytest.raises(UnsupportedModel, match=r"logits float32 \[2, 3\].*nothing is last_hidden_state"):
        export(made.folder, Head.ENCODER, tmp_path / "out")


def test_labels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, Head.TOKEN)
    made.rewrite_config(id2label={"0": "a", "1": "b"})

    with pytest.raises(UnsupportedModel, match="2 labels"):
        export(made.folder, Head.TOKEN, tmp_path / "out")


def test_unknown_inputs_are_named(tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, Head.ENCODER)
    edit(made, lambda model: rename(model, {"token_type_ids": "position_ids"}))

    with pytest.raises(UnsupportedModel, match="wants the inputs position_ids") as caught:
        export(made.folder, Head.ENCODER, tmp_path / "out")
    assert "input_ids, attention_mask, token_type_ids" in caught.value.remedy


def test_a_fixed_length_is_refused(tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, Head.ENCODER)

    def fix(model: onnx.ModelProto) -> None:
        for value in model.graph.input:
            value.type.tensor_type.shape.dim[1].dim_value = 128

    edit(made, fix)

    with pytest.raises(UnsupportedModel, match="input input_ids is not int64"):
        export(made.folder, Head.ENCODER, tmp_path / "out")


def test_a_graph_that_does_not_run_is_corrupt(tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, Head.ENCODER)

    def break_it(model: onnx.ModelProto) -> None:
        del model.graph.initializer[0]

    edit(made, break_it)

    with pytest.raises(CorruptModel, match="does not run"):
        export(made.folder, Head.ENCODER, tmp_path / "out")


def test_a_file_that_is_no_graph_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "model.onnx").write_bytes(b"\x3a\x00")
    folder = ModelFolder.open(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"\x3a\x05hello")

    with pytest.raises(CorruptModel, match=r"model\.onnx"):
        export(folder, Head.ENCODER, tmp_path / "out")


def test_fused_operators_of_the_file_are_counted(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.ENCODER, **SMALL)
    export(made.folder, Head.ENCODER, made.path)
    (made.path / "model.safetensors").unlink()

    exported = export(made.folder, Head.ENCODER, tmp_path / "out")

    assert exported.fused_nodes == {"LayerNormalization": 5, "Attention": 2, "Gelu": 2}


def test_external_weights_that_become_a_link_after_the_check_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_onnx_with_weights(bare_folder(tmp_path / "model") / "model.onnx", "model.onnx_data")
    folder = ModelFolder.open(tmp_path / "model")
    (tmp_path / "secret").write_bytes(bytes(4096))

    def swap(model: Path, graph: Path) -> tuple[Path, ...]:
        found = graph_data(model, graph)
        for file in found:
            file.unlink()
            file.symlink_to(tmp_path / "secret")
        return found

    monkeypatch.setattr(own_graph, "graph_data", swap)
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsafeModel, match=r"is a link to .*secret, outside the model's folder"):
        own_graph.take_own_graph(folder, Head.ENCODER, tmp_path / "out" / "model.onnx")
    assert list((tmp_path / "out").iterdir()) == []


def end_in(made: Made, operator: str, *, output: str = "logits", inner: str = "scores", **attributes: int) -> None:
    """Put an operator behind the logits; `inner`: what the logits are called then."""

    def append(model: onnx.ModelProto) -> None:
        rename(model, {"logits": inner})
        model.graph.node.append(helper.make_node(operator, [inner], [output], **attributes))
        model.graph.output[0].name = output

    edit(made, append)


class TestFunctionAtTheEnd:
    """Tasks get logits from a graph that ends in a function from logits to scores."""

    @pytest.mark.parity
    @pytest.mark.parametrize("head", [Head.SEQUENCE, Head.TOKEN])
    @pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
    @pytest.mark.parametrize(("output", "inner"), [("logits", "scores"), ("probabilities", "logits")])
    def test_softmax_is_left_out(self, head: Head, operator: str, output: str, inner: str, tmp_path: Path) -> None:
        made = with_own_graph(tmp_path, head)
        end_in(made, operator, output=output, inner=inner, axis=-1)

        exported = export(made.folder, head, tmp_path / "out")

        assert_equals_torch(exported, made, rows(13), rows(4, 17, 9))

    @pytest.mark.parity
    def test_sigmoid_is_left_out_where_several_labels_may_be_true(self, tmp_path: Path) -> None:
        made = with_own_graph(tmp_path, Head.SEQUENCE)
        made.rewrite_config(problem_type="multi_label_classification")
        end_in(made, "Sigmoid")

        assert_equals_torch(export(made.folder, Head.SEQUENCE, tmp_path / "out"), made, rows(4, 17, 9))

    @pytest.mark.parametrize(
        ("operator", "problem", "remedy"),
        [("Sigmoid", None, "multi_label"), ("Softmax", "multi_label_classification", "single_label")],
    )
    def test_a_function_that_config_json_contradicts_is_refused_and_the_remedy_works(
        self, operator: str, problem: str | None, remedy: str, tmp_path: Path
    ) -> None:
        made = with_own_graph(tmp_path, Head.SEQUENCE)
        made.rewrite_config(problem_type=problem)
        end_in(made, operator)

        with pytest.raises(UnsupportedModel, match=f"ends in a {operator.lower()}, and by config.json") as caught:
            export(made.folder, Head.SEQUENCE, tmp_path / "out")

        assert f"problem_type: {remedy}_classification" in caught.value.remedy
        made.rewrite_config(problem_type=f"{remedy}_classification")
        assert export(made.folder, Head.SEQUENCE, tmp_path / "out").how == "own-onnx"

    def test_probabilities_of_a_graph_that_does_not_end_in_softmax_are_refused(self, tmp_path: Path) -> None:
        made = with_own_graph(tmp_path, Head.SEQUENCE)

        def append(model: onnx.ModelProto) -> None:
            rename(model, {"logits": "scores"})
            model.graph.node.append(helper.make_node("Softmax", ["scores"], ["shares"]))
            model.graph.node.append(helper.make_node("Abs", ["shares"], ["logits"]))
            model.graph.output[0].name = "logits"

        edit(made, append)

        with pytest.raises(
            UnsupportedModel, match="logits are probabilities, and it does not end in the operator Softmax"
        ):
            export(made.folder, Head.SEQUENCE, tmp_path / "out")

    @pytest.mark.parity
    def test_logits_are_preferred_to_probabilities(self, tmp_path: Path) -> None:
        made = with_own_graph(tmp_path, Head.SEQUENCE)

        def append(model: onnx.ModelProto) -> None:
            rename(model, {"logits": "output_1"})
            model.graph.node.append(helper.make_node("Softmax", ["output_1"], ["output_0"]))
            model.graph.output.insert(0, helper.make_tensor_value_info("output_0", TensorProto.FLOAT, None))

        edit(made, append)

        assert_equals_torch(export(made.folder, Head.SEQUENCE, tmp_path / "out"), made, rows(4, 17, 9))


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["value", "initializer", "in a branch"])
def test_a_value_within_the_graph_may_be_called_as_our_output(kind: str, tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, Head.SEQUENCE)

    def clash(model: onnx.ModelProto) -> None:
        rename(model, {"logits": "output_0"})
        value = next(node.output[0] for node in model.graph.node if node.op_type == "MatMul")
        if kind == "initializer":
            value = model.graph.initializer[0].name
            model.graph.initializer[0].name = "logits"
        rename(model, {value: "logits"})
        if kind == "in a branch":
            float_type = helper.make_tensor_value_info("same", TensorProto.FLOAT, None)
            branch = helper.make_graph([helper.make_node("Identity", ["logits"], ["same"])], "b", [], [float_type])
            model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
            node = helper.make_node("If", ["yes"], ["through"], then_branch=branch, else_branch=branch)
            position = next(index for index, one in enumerate(model.graph.node) if "logits" in one.output)
            for later in model.graph.node:
                later.input[:] = ["through" if name == "logits" else name for name in later.input]
            model.graph.node.insert(position + 1, node)

    edit(made, clash)

    assert_equals_torch(export(made.folder, Head.SEQUENCE, tmp_path / "out"), made, rows(4, 17, 9))


def test_a_graph_that_does_not_use_the_mask_is_refused(tmp_path: Path) -> None:
    made = with_own_graph(tmp_path, Head.SEQUENCE)

    def ignore_mask(model: onnx.ModelProto) -> None:
        rename(model, {"attention_mask": "mask"})
        model.graph.input[1].name = "attention_mask"
        model.graph.node.insert(0, helper.make_node("Equal", ["attention_mask", "attention_mask"], ["all"]))
        model.graph.node.insert(1, helper.make_node("Cast", ["all"], ["mask"], to=TensorProto.INT64))

    edit(made, ignore_mask)

    with pytest.raises(UnsupportedModel, match="another answer in a batch with a longer one than alone"):
        export(made.folder, Head.SEQUENCE, tmp_path / "out")
