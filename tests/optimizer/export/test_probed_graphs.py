"""What a model's own ONNX file gives and needs is found by running it: pooled vectors, special tokens."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file
from tokenizers import Tokenizer as Backend

from penstock.errors import CorruptModel, ModelError, UnsupportedModel
from penstock.manifest import Axes
from penstock.recipe import EngineName, Precision, Recipe
from penstock.tasks import Head, TaskName
from penstock_optimizer.export import Exported, export
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import run_rows
from penstock_runtime.tasks import Task, make_task
from tests.runtime.http.serving import WIDTH, write_folder

VOCABULARY = 64
IDENTITY = "torch.nn.modules.linear.Identity"
PROJECTED = 5
PROJECTION: NDArray[np.float32] = np.random.default_rng(6).normal(size=(WIDTH, PROJECTED)).astype(np.float32)
TABLE: NDArray[np.float32] = np.random.default_rng(5).normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
SEPARATOR = 3
TEXTS = ["a very happy dog", "paris", "i like you and what you love"]
DOCUMENT = Path(__file__).parents[3] / "docs" / "how-to" / "convert-a-model.md"
Node = tuple[str, Sequence[str], Mapping[str, Any]]
"""An operator, its inputs and its attributes."""
MEAN: Sequence[Node] = [
    ("Cast", ["attention_mask"], {"to": TensorProto.FLOAT}),
    ("Unsqueeze", ["#0", "last"], {}),
    ("Mul", ["tokens", "#1"], {}),
    ("ReduceSum", ["#2", "second"], {"keepdims": 0}),
    ("ReduceSum", ["#1", "second"], {"keepdims": 0}),
    ("Div", ["#3", "#4"], {}),
]
NODES: Mapping[str, Sequence[Node]] = {
    "last_hidden_state": [("Identity", ["tokens"], {})],
    "sentence_embedding": MEAN,
    "projected": [*MEAN, ("MatMul", ["#5", "projection"], {})],
    "mean_of_all": [("ReduceMean", ["tokens"], {"keepdims": 0, "axes": [1]})],
    "mean_of_all_projected": [
        ("ReduceMean", ["tokens"], {"keepdims": 0, "axes": [1]}),
        ("MatMul", ["#0", "projection"], {}),
    ],
    "logits": [("Gather", ["tokens", "zero"], {"axis": 1}), ("MatMul", ["#0", "classifier"], {})],
    "shares": [
        ("Gather", ["tokens", "zero"], {"axis": 1}),
        ("MatMul", ["#0", "classifier"], {}),
        ("Softmax", ["#1"], {}),
        ("Abs", ["#2"], {}),
    ],
    "broken": [("MatMul", ["tokens", "classifier"], {}), ("MatMul", ["#0", "classifier"], {})],
    "pooler_output": [("Gather", ["tokens", "zero"], {"axis": 1})],
}
"""Nodes for each output: of the mean, of the mean and a Dense module, of the first token, and of faulty graphs."""


def write_graph(path: Path, outputs: dict[str, str]) -> Path:
    """A graph of a table of embeddings with these outputs: names to those of `NODES`."""
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["tokens"])]
    for name, kind in outputs.items():
        steps = NODES[kind]
        for index, (operator, inputs, attributes) in enumerate(steps):
            given = [f"{name}{one}" if one.startswith("#") else one for one in inputs]
            result = name if index == len(steps) - 1 else f"{name}#{index}"
            nodes.append(helper.make_node(operator, given, [result], **attributes))
    write_nodes(path, nodes, list(outputs))
    return path


def write_nodes(path: Path, nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> None:
    constants = {
        "table": TABLE,
        "projection": PROJECTION,
        "classifier": np.ascontiguousarray(TABLE[:WIDTH, :2]),
        "last": np.array([-1]),
        "second": np.array([1]),
        "zero": np.array(0),
        "minus_one": np.array([-1]),
        "separator": np.array(SEPARATOR),
        "nothing": np.array(0, np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"])
            for name in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path / "model.onnx"))


def model(path: Path, outputs: dict[str, str], *, plain: bool = False) -> Path:
    """A folder with such a graph; `plain`: without modules.json."""
    write_folder(path, TaskName.FEATURE_EXTRACTION)
    if plain:
        (path / "modules.json").unlink()
    return write_graph(path, outputs)


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def exported(path: Path, head: Head = Head.ENCODER) -> Exported:
    return export(ModelFolder.open(path), head, path.parent / "out")


def answer(path: Path, found: Exported, inputs: Any, parameters: dict[str, Any] | None = None) -> Any:
    """The answer of the task for which the folder was exported, computed in both engines."""
    name = TaskName.FEATURE_EXTRACTION if isinstance(inputs, list) else TaskName.SENTENCE_SIMILARITY
    task = task_of(path, found, name)
    prepared = task.prepare(task.parse(inputs, parameters or {}))
    answers = []
    for engine_name in (EngineName.ONNXRUNTIME, EngineName.OPENVINO):
        recipe = Recipe(engine=engine_name, precision=Precision.FP32)
        engine = load_engine(found.path, found.io, recipe, Threads(1, 1))
        try:
            outputs = run_rows(engine.run, found.io, prepared.rows)
        finally:
            engine.close()
        reduced = [task.reduce(row, one) for row, one in zip(prepared.rows, outputs, strict=True)]
        answers.append(np.asarray(task.assemble(prepared, reduced)))
    np.testing.assert_allclose(answers[0], answers[1], rtol=0, atol=1e-5)
    return answers[0]


def task_of(path: Path, found: Exported, name: TaskName = TaskName.FEATURE_EXTRACTION) -> Task:
    return make_task(name, ModelFolder.open(path), io=found.io)


def means(path: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    """The mean of the embeddings of each text's tokens, special ones included."""
    backend = Backend.from_file(str(path / "tokenizer.json"))
    return np.stack([TABLE[backend.encode(text).ids].mean(axis=0) for text in texts])


def scaled(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    result: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return result


class TestPooledOutputs:
    """A graph without vectors of tokens, and with one vector for each text."""

    @pytest.mark.parametrize("name", ["sentence_embedding", "output_0", "pooled"])
    def test_the_vector_of_the_graph_is_the_answer(self, name: str, tmp_path: Path) -> None:
        path = model(tmp_path / "model", {name: "sentence_embedding"}, plain=True)

        found = exported(path)

        assert (found.how, found.io.outputs) == ("own-onnx", {"pooled": Axes.ROW})
        note = f"The vector of a text is the output {name} of the ONNX file; vectors of tokens are not served"
        assert found.notes == (note,)
        np.testing.assert_allclose(answer(path, found, TEXTS), means(path, TEXTS), rtol=0, atol=1e-5)
        by_request = answer(path, found, TEXTS, {"pooling": "auto", "normalize": True, "dimensions": 5})
        np.testing.assert_allclose(by_request, scaled(means(path, TEXTS)[:, :5]), rtol=0, atol=1e-5)

    def test_modules_that_normalise_apply(self, tmp_path: Path) -> None:
        path = model(tmp_path / "model", {"sentence_embedding": "sentence_embedding"})

        vectors = answer(path, exported(path), TEXTS)

        np.testing.assert_allclose(vectors, scaled(means(path, TEXTS)), rtol=0, atol=1e-5)

    def test_texts_are_compared_by_it(self, tmp_path: Path) -> None:
        path = model(tmp_path / "model", {"sentence_embedding": "sentence_embedding"}, plain=True)

        cosines = answer(path, exported(path), {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]})

        source, *others = scaled(means(path, TEXTS))
        np.testing.assert_allclose(cosines, np.stack(others) @ source, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("pooling", ["none", "cls", "mean"])
    def test_requests_that_need_the_vectors_of_tokens_are_refused(self, pooling: str, tmp_path: Path) -> None:
        path = model(tmp_path / "model", {"sentence_embedding": "sentence_embedding"})
        task = task_of(path, exported(path))

        with pytest.raises(InvalidInput, match=f"pooling {pooling} needs the vectors of tokens; this model's ONNX"):
            task.parse(TEXTS, {"pooling": pooling})

    @pytest.mark.parametrize("first", ["pooler_output", "sentence_embedding"])
    def test_the_known_name_is_chosen_of_several_and_stated(self, first: str, tmp_path: Path) -> None:
        names = {"pooler_output", "sentence_embedding"}
        path = model(tmp_path / "model", {name: name for name in (first, *(names - {first}))}, plain=True)

        found = exported(path)

        assert found.notes[1:] == ("Of the outputs of the ONNX file sentence_embedding is used, not pooler_output",)
        np.testing.assert_allclose(answer(path, found, TEXTS), means(path, TEXTS), rtol=0, atol=1e-5)

    def test_vectors_of_tokens_are_preferred_and_that_is_stated(self, tmp_path: Path) -> None:
        path = model(
            tmp_path / "model", {"sentence_embedding": "pooler_output", "token_embeddings": "last_hidden_state"}
        )

        found = exported(path)

        assert found.io.outputs == {"last_hidden_state": Axes.TOKENS}
        assert found.notes == ("Of the outputs of the ONNX file token_embeddings is used, not sentence_embedding",)
        np.testing.assert_allclose(answer(path, found, TEXTS), scaled(means(path, TEXTS)), rtol=0, atol=1e-5)

    def test_several_without_a_known_name_are_refused_and_the_remedy_works(self, tmp_path: Path) -> None:
        path = model(tmp_path / "model", {"one": "pooler_output", "two": "sentence_embedding"})

        with pytest.raises(UnsupportedModel, match="no vectors of tokens and several pooled ones: one, two") as caught:
            exported(path)

        assert "Leave one of them in the graph, or call one sentence_embedding" in caught.value.remedy
        write_graph(path, {"one": "pooler_output", "sentence_embedding": "sentence_embedding"})
        assert exported(path).io.outputs == {"pooled": Axes.ROW}

    def test_a_vector_of_another_width_is_no_pooled_one(self, tmp_path: Path) -> None:
        path = model(tmp_path / "model", {"sentence_embedding": "sentence_embedding"})
        change_json(path / "config.json", lambda config: {**config, "hidden_size": WIDTH + 1})

        with pytest.raises(UnsupportedModel, match=f"sentence_embedding float32 .2, {WIDTH}.*nothing is last_hidden"):
            exported(path)

    def test_modules_that_the_graph_may_include_are_refused_and_the_remedy_works(self, tmp_path: Path) -> None:
        path = model(tmp_path / "model", {"sentence_embedding": "sentence_embedding"})
        _add_dense(path)

        with pytest.raises(UnsupportedModel, match=r"modules\.json has Dense after the pooling") as caught:
            exported(path)

        assert "Remove it from modules.json if the graph includes it" in caught.value.remedy
        change_json(path / "modules.json", lambda entries: [one for one in entries if "Dense" not in one["type"]])
        assert exported(path).io.outputs == {"pooled": Axes.ROW}

    @pytest.mark.parametrize("outputs", [("projected",), ("last_hidden_state", "projected")], ids=len)
    def test_modules_that_only_the_graph_holds_are_not_applied_again(
        self, outputs: tuple[str, ...], tmp_path: Path
    ) -> None:
        path = model(tmp_path / "model", {f"output_{index}": name for index, name in enumerate(outputs)})
        _add_dense(path, PROJECTED)
        (path / "2_Dense" / "model.safetensors").unlink()

        vectors = answer(path, exported(path), TEXTS)

        np.testing.assert_allclose(vectors, scaled(means(path, TEXTS) @ PROJECTION), rtol=0, atol=1e-5)

    def test_modules_that_the_graph_has_passed_are_seen_by_the_width(self, tmp_path: Path) -> None:
        path = model(tmp_path / "model", {"output_0": "projected"})
        _add_dense(path, PROJECTED)

        vectors = answer(path, exported(path), TEXTS)

        np.testing.assert_allclose(vectors, scaled(means(path, TEXTS) @ PROJECTION), rtol=0, atol=1e-5)

    def test_the_number_of_values_is_that_after_the_modules(self, tmp_path: Path) -> None:
        path = model(tmp_path / "model", {"output_0": "projected"})
        _add_dense(path, PROJECTED)
        task = task_of(path, exported(path))

        with pytest.raises(InvalidInput, match=f"dimensions is {WIDTH}; this model's vectors have {PROJECTED}"):
            task.parse(TEXTS, {"dimensions": WIDTH})

    @pytest.mark.parametrize("follow", ["file", "graph"])
    def test_weights_of_modules_that_are_nowhere_are_refused_and_the_remedy_works(
        self, follow: str, tmp_path: Path
    ) -> None:
        path = model(tmp_path / "model", {"last_hidden_state": "last_hidden_state"})
        put_back = _take_dense_weights(path, tmp_path)

        with pytest.raises(CorruptModel, match=r"no 2_Dense/model\.safetensors.*no output with 5 values") as caught:
            exported(path)

        assert "Put that file there" in caught.value.remedy
        assert "export the graph with the modules" in caught.value.remedy
        _assert_a_remedy_works(path, follow, put_back, {"sentence_embedding": "projected"})

    @pytest.mark.parametrize("follow", ["file", "graph"])
    def test_a_pooling_that_counts_padding_is_refused_and_the_remedy_works(self, follow: str, tmp_path: Path) -> None:
        outputs = {"token_embeddings": "last_hidden_state", "sentence_embedding": "mean_of_all_projected"}
        path = model(tmp_path / "model", outputs)
        put_back = _take_dense_weights(path, tmp_path)

        with pytest.raises(UnsupportedModel, match=r"another answer in a batch.*pooling may count padding") as caught:
            exported(path)

        assert "Put 2_Dense/model.safetensors into the folder" in caught.value.remedy
        assert "with a pooling that leaves padding out" in caught.value.remedy
        _assert_a_remedy_works(path, follow, put_back, {**outputs, "sentence_embedding": "projected"})

    def test_a_prompt_that_must_not_count_is_refused_and_the_remedy_works(self, tmp_path: Path) -> None:
        path = model(tmp_path / "model", {"sentence_embedding": "sentence_embedding"})
        change_json(path / "1_Pooling" / "config.json", lambda config: {**config, "include_prompt": False})

        with pytest.raises(UnsupportedModel, match="include_prompt: false") as caught:
            exported(path)

        assert "last_hidden_state" in caught.value.remedy
        write_graph(path, {"last_hidden_state": "last_hidden_state"})
        assert exported(path).io.outputs == {"last_hidden_state": Axes.TOKENS}


def _add_dense(path: Path, values: int = WIDTH) -> None:
    """A Dense module to `values`, by the projection if it is to its width."""
    entry = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    change_json(path / "modules.json", lambda entries: [*entries[:2], entry, *entries[2:]])
    (path / "2_Dense").mkdir()
    settings = {"in_features": WIDTH, "out_features": values, "bias": False, "activation_function": IDENTITY}
    (path / "2_Dense" / "config.json").write_text(json.dumps(settings))
    weight = np.ascontiguousarray(PROJECTION.T) if values == PROJECTED else np.eye(WIDTH, dtype=np.float32)
    save_file({"linear.weight": weight}, path / "2_Dense" / "model.safetensors")


def _take_dense_weights(path: Path, elsewhere: Path) -> Callable[[], Path]:
    """Take the weights of a new Dense module to PROJECTED values away; the result puts them back."""
    _add_dense(path, PROJECTED)
    weights, kept = path / "2_Dense" / "model.safetensors", elsewhere / "kept"
    weights.rename(kept)
    return lambda: kept.rename(weights)


def _assert_a_remedy_works(path: Path, follow: str, put_back: Callable[[], Path], outputs: dict[str, str]) -> None:
    """With the weights back ("file"), or with a graph of these outputs ("graph"), the answers are the model's."""
    if follow == "file":
        put_back()
    else:
        write_graph(path, outputs)
    vectors = answer(path, exported(path), TEXTS)
    np.testing.assert_allclose(vectors, scaled(means(path, TEXTS) @ PROJECTION), rtol=0, atol=1e-5)


def with_boxes(path: Path) -> None:
    """An input that no node can make."""
    change_graph(
        path,
        lambda graph: graph.input.append(helper.make_tensor_value_info("bbox", TensorProto.INT64, ["b", "t", 4])),
    )


def with_a_fixed_length(path: Path) -> None:
    def fix(graph: Any) -> None:
        for value in graph.input:
            value.type.tensor_type.shape.dim[1].dim_value = 128

    change_graph(path, fix)


def change_graph(path: Path, change: Callable[[Any], Any]) -> None:
    found = onnx.load(str(path / "model.onnx"))
    change(found.graph)
    onnx.save(found, str(path / "model.onnx"))


@dataclass(frozen=True)
class Refused:
    """A graph that is refused, by its output; words of the error and of the remedy; and the output that follows it."""

    output: str
    error: str
    remedy: str
    instead: str
    head: Head = Head.ENCODER
    change: Callable[[Path], object] = lambda path: path


TOKENS = "last_hidden_state"
REFUSED = {
    "unknown input": Refused(TOKENS, "wants the inputs bbox", "Export it with the", TOKENS, change=with_boxes),
    "fixed length": Refused(TOKENS, "free axes", "Export it with the inputs", TOKENS, change=with_a_fixed_length),
    "does not run": Refused("broken", "does not run", "Export it again", TOKENS),
    "another task": Refused(TOKENS, "nothing is logits", "Export it for this task", "logits", Head.SEQUENCE),
    "probabilities": Refused("shares", "are probabilities", "with logits as its output", "logits", Head.SEQUENCE),
    "mask not used": Refused(
        "mean_of_all", "another answer in a batch", "do not depend on each other", "sentence_embedding"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_that_is_refused_is_served_after_its_remedy(name: str, tmp_path: Path) -> None:
    case = REFUSED[name]
    path = model(tmp_path / "model", {"output": case.output})
    case.change(path)

    with pytest.raises(ModelError) as caught:
        exported(path, case.head)
    write_graph(path, {"output": case.instead})

    assert case.error in caught.value.message
    assert case.remedy in caught.value.remedy
    assert exported(path, case.head).how == "own-onnx"


def write_graph_that_needs_a_separator(path: Path) -> None:
    """As BART's classifier: it looks for the last separator, and does not run without one."""
    nodes = [
        helper.make_node("Equal", ["input_ids", "separator"], ["is_separator"]),
        helper.make_node("NonZero", ["is_separator"], ["places"]),
        helper.make_node("Gather", ["places", "minus_one"], ["place"], axis=1),
        helper.make_node("ReduceSum", ["place"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["number", "nothing"], ["none"]),
        helper.make_node("Gather", ["table", "input_ids"], ["tokens"]),
        helper.make_node("Add", ["tokens", "none"], ["last_hidden_state"]),
    ]
    write_nodes(path, nodes, ["last_hidden_state"])


class TestSpecialTokens:
    """A graph is run with the special tokens that the tokenizer's template adds."""

    def test_a_graph_that_needs_them_is_served(self, tmp_path: Path) -> None:
        path = write_folder(tmp_path / "model", TaskName.FEATURE_EXTRACTION)
        write_graph_that_needs_a_separator(path)

        np.testing.assert_allclose(answer(path, exported(path), TEXTS), scaled(means(path, TEXTS)), rtol=0, atol=1e-5)

    def test_a_graph_is_served_without_them_if_the_tokenizer_adds_none(self, tmp_path: Path) -> None:
        path = model(tmp_path / "model", {"last_hidden_state": "last_hidden_state"})
        change_json(path / "tokenizer.json", lambda value: {**value, "post_processor": None})

        np.testing.assert_allclose(answer(path, exported(path), TEXTS), scaled(means(path, TEXTS)), rtol=0, atol=1e-5)

    def test_a_missing_one_is_named_and_the_remedy_works(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_folder(tmp_path / "model", TaskName.FEATURE_EXTRACTION)
        write_graph_that_needs_a_separator(path)
        change_json(path / "tokenizer.json", lambda value: {**value, "post_processor": None})

        with pytest.raises(UnsupportedModel, match=r"only on texts with the special token \[SEP\] at") as caught:
            exported(path)

        assert "docs/how-to/convert-a-model.md#special-tokens" in caught.value.remedy
        section = DOCUMENT.read_text(encoding="utf-8").split("## special tokens\n")[1].split("\n## ")[0]
        (program,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
        monkeypatch.setattr(sys, "argv", ["template.py", str(path / "tokenizer.json"), "[CLS]", "[SEP]"])
        exec(compile(program, "template.py", "exec"), {"__name__": "__main__"})
        assert exported(path).how == "own-onnx"
