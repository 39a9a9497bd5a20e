"""Runs a graph in both engines and compares it with the model that it was made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import openvino
import torch
from numpy.typing import NDArray

from penstock.manifest import GraphIO
from penstock.tasks import Head
from penstock_optimizer.export import Exported, Flavour
from tests.optimizer.export.models import MASK_ID, PAD_ID, VOCABULARY, Made

Arrays = dict[str, NDArray[Any]]
Run = Callable[[Arrays], Arrays]

CLOSE = 2e-5
"""The largest difference of any output that rounding explains in models this small, float32."""


def rows(*lengths: int, seed: int = 7, pad_id: int = PAD_ID) -> Arrays:
    """A batch of random tokens, padded on the right to the longest; mask tokens in the first row and here and there."""
    generator = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths))
    mask = (np.arange(shape[1]) < np.array(lengths)[:, None]).astype(np.int64)
    ids = generator.integers(MASK_ID + 1, VOCABULARY, shape)
    ids = np.where(generator.random(shape) < 0.2, MASK_ID, ids)
    ids[0, 1:3] = MASK_ID
    types = (np.arange(shape[1]) >= np.array(lengths)[:, None] // 2).astype(np.int64)
    return {"input_ids": np.where(mask == 1, ids, pad_id), "attention_mask": mask, "token_type_ids": types * mask}


def torch_outputs(made: Made, batch: Arrays, io: GraphIO) -> Arrays:
    """What transformers' own model answers, in the form of our graphs: padding set to 0, mask tokens gathered."""
    tensors = {name: torch.from_numpy(batch[name]) for name in io.inputs}
    with torch.no_grad():
        answer: Mapping[str, Any] = made.model(**tensors)
    outputs = {name: answer[name].numpy() for name in io.outputs}
    if made.head is Head.MASKED_LM:
        return {name: array[batch["input_ids"] == MASK_ID] for name, array in outputs.items()}
    return {name: _without_padding(array, batch, made.head) for name, array in outputs.items()}


def _without_padding(array: NDArray[Any], batch: Arrays, head: Head) -> NDArray[Any]:
    """Padding is not part of an answer."""
    if head in {Head.SEQUENCE, Head.MASKED_LM}:
        return array
    mask = batch["attention_mask"]
    return array * mask.reshape(*mask.shape, *[1] * (array.ndim - 2))


def in_onnxruntime(path: Path, io: GraphIO) -> Run:
    """The graph in ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    assert sorted(io.inputs) == sorted(node.name for node in session.get_inputs())
    return lambda batch: dict(
        zip(io.outputs, session.run(list(io.outputs), {name: batch[name] for name in io.inputs}), strict=True)
    )


@cache
def _openvino_core() -> Any:
    """Float32 throughout, which OpenVINO would not choose by itself on every CPU."""
    core = openvino.Core()
    core.set_property("CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})
    return core


def in_openvino(path: Path, io: GraphIO) -> Run:
    """The graph in OpenVINO."""
    compiled = _openvino_core().compile_model(str(path), "CPU")
    assert sorted(io.inputs) == sorted(node.any_name for node in compiled.inputs)

    def run(batch: Arrays) -> Arrays:
        answers = compiled({name: batch[name] for name in io.inputs})
        return {name: answers[name] for name in io.outputs}

    return run


Engine = Callable[[Path, GraphIO], Run]
ENGINES: Sequence[Engine] = (in_onnxruntime, in_openvino)
ENGINE_OF: Mapping[Flavour, Engine] = {Flavour.FUSED: in_onnxruntime, Flavour.PLAIN: in_openvino}
"""The engine that each flavour is made for."""


def assert_equals_torch(
    exported: Exported, made: Made, *batches: Arrays, close: float = CLOSE, engines: Sequence[Engine] = ENGINES
) -> None:
    """The engines answer as transformers does, padding aside."""
    for engine in engines:
        run = engine(exported.path, exported.io)
        for batch in batches:
            expected, actual = torch_outputs(made, batch, exported.io), run(batch)
            assert set(expected) == set(actual)
            for name, array in expected.items():
                seen = _without_padding(actual[name], batch, made.head)
                assert array.shape == seen.shape, engine.__name__
                np.testing.assert_allclose(seen, array, rtol=0, atol=close, err_msg=f"{engine.__name__}: {name}")
