"""Model folders made by hand: just enough files, real safetensors and ONNX, no engine."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

BERT: Mapping[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "max_position_embeddings": 64,
    "hidden_size": 4,
}
TOKENIZER = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}}'


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def bare_folder(path: Path, config: Mapping[str, Any] = BERT, **more: Any) -> Path:
    """`config.json` (with the keywords on top) and `tokenizer.json`, no weights."""
    write_json(path / "config.json", {**config, **more})
    (path / "tokenizer.json").write_text(TOKENIZER)
    return path


def model_folder(path: Path, config: Mapping[str, Any] = BERT, **more: Any) -> Path:
    """A bare folder with a small `model.safetensors`."""
    bare_folder(path, config, **more)
    save_file({"a.weight": np.ones((2, 3), np.float32), "b.bias": np.zeros(5, np.float16)}, path / "model.safetensors")
    return path


def sharded_folder(path: Path) -> Path:
    """A bare folder with its weights in two files and an index."""
    bare_folder(path)
    names = {"a.weight": "model-00001-of-00002.safetensors", "b.bias": "model-00002-of-00002.safetensors"}
    for tensor, name in names.items():
        save_file({tensor: np.ones((2, 3), np.float32)}, path / name)
    write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": 48}, "weight_map": names})
    return path


def write_onnx(path: Path) -> Path:
    """A real ONNX file: `last_hidden_state` is the input ids as floats."""
    import onnx
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("Cast", ["input_ids"], ["last_hidden_state"], to=TensorProto.FLOAT)],
        "g",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])],
        [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "tokens"])],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph), str(path))
    return path


def write_onnx_with_weights(path: Path, *names: str) -> Path:
    """A real ONNX file that runs: [batch, tokens, 4] of weights of one each, which are in these external files."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = [numpy_helper.from_array(np.ones((64, 4), np.float32), "embedding")]
    nodes = [helper.make_node("Gather", ["embedding", "input_ids"], ["sum_0"])]
    for index in range(1, len(names)):
        weights.append(numpy_helper.from_array(np.ones(4, np.float32), f"bias_{index}"))
        nodes.append(helper.make_node("Add", [f"sum_{index - 1}", f"bias_{index}"], [f"sum_{index}"]))
    nodes[-1].output[0] = "last_hidden_state"
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])],
        [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "tokens", 4])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    for tensor, name in zip(model.graph.initializer, names, strict=True):
        (path.parent / name).write_bytes(tensor.raw_data)
        refer(tensor, name)
    onnx.save(model, str(path))
    return path


def refer(tensor: Any, name: str) -> None:
    """Have an ONNX tensor refer to its contents in a file, as onnx does."""
    from onnx.external_data_helper import set_external_data

    set_external_data(tensor, name, offset=0, length=len(tensor.raw_data))
    tensor.ClearField("raw_data")


def write_pickle(path: Path) -> Path:
    """A pickle that records being loaded: loading it creates the file `path` + `.opened`."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (f"{path}.opened", "w"))

    path.write_bytes(pickle.dumps(Trap()))
    return path


def sentence_folder(path: Path, pooling: Mapping[str, Any], *kinds: str) -> Path:
    """A model folder with sentence-transformers' modules: Transformer, Pooling, then `kinds`."""
    model_folder(path)
    modules = ["Transformer", "Pooling", *kinds]
    write_json(
        path / "modules.json",
        [
            {
                "idx": index,
                "name": str(index),
                "path": "" if kind == "Transformer" else f"{index}_{kind}",
                "type": kind if "." in kind else f"sentence_transformers.models.{kind}",
            }
            for index, kind in enumerate(modules)
        ],
    )
    write_json(path / "1_Pooling" / "config.json", pooling)
    return path
