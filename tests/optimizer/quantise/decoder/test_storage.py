"""Each stored form of weights, expanded by OpenVINO."""

from __future__ import annotations

import gguf
import numpy as np
import openvino as ov
import pytest
from gguf import GGMLQuantizationType, quants
from openvino import opset13 as op

from penstock_optimizer.quantise.decoder.storage import Storage, stored
from penstock_runtime.engines.native.decoder_file import GROUP
from penstock_runtime.rows import Float

RANDOM = np.random.default_rng(0)


def expanded(weight: Float, storage: Storage) -> Float:
    """What the product with the identity gives: the stored weights."""
    x = op.parameter([weight.shape[1], weight.shape[1]], ov.Type.f32)
    product = op.matmul(x, stored(weight, storage, "w"), transpose_a=False, transpose_b=True)
    properties = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    compiled = ov.compile_model(ov.Model([op.result(product)], [x], "one"), "CPU", properties)
    result: Float = compiled([np.eye(weight.shape[1], dtype=np.float32)])[0].T
    return result


def rounded(kind: str, rows: int = 48, columns: int = 256) -> Float:
    """Random weights as a GGUF file of this type has them."""
    form = GGMLQuantizationType[kind]
    values = RANDOM.standard_normal((rows, columns)).astype(np.float32)
    assert gguf.GGML_QUANT_SIZES[form][0] == GROUP
    return np.asarray(quants.dequantize(quants.quantize(values, form), form), np.float32)


@pytest.mark.parametrize(("kind", "storage"), [("Q4_1", Storage.INT4), ("Q8_0", Storage.INT8_GROUPS)])
def test_weights_that_were_rounded_by_llama_cpp_are_kept(kind: str, storage: Storage) -> None:
    weight = rounded(kind)
    np.testing.assert_allclose(expanded(weight, storage), weight, atol=3e-6 * float(np.abs(weight).max()))


@pytest.mark.parametrize(
    ("storage", "steps"), [(Storage.INT8, 127.0), (Storage.INT8_GROUPS, 127.0), (Storage.INT4, 7.5)]
)
def test_other_weights_are_off_by_half_a_step_at_most(storage: Storage, steps: float) -> None:
    weight = RANDOM.standard_normal((20, 96)).astype(np.float32)
    half_a_step = float(np.abs(weight).max()) / steps / 2
    assert np.abs(expanded(weight, storage) - weight).max() <= half_a_step * 1.001


@pytest.mark.parametrize("storage", list(Storage))
def test_zeros_and_widths_that_are_no_whole_groups(storage: Storage) -> None:
    weight = np.zeros((3, GROUP + 8), np.float32)
    weight[1] = 1.0
    np.testing.assert_allclose(expanded(weight, storage), weight, atol=1e-6)
