"""The forms in which a graph of OpenVINO stores the weights of its products.

Each becomes a constant with the operations that expand it; the plugin recognises them and multiplies with the stored
form.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np
import openvino as ov
from openvino import Type
from openvino import opset13 as op

from penstock_optimizer.quantise.rounding import SMALLEST_SCALE, rounded
from penstock_runtime.engines.native.decoder_file import GROUP
from penstock_runtime.rows import Float


class Storage(StrEnum):
    """How weights are stored."""

    FP32 = "fp32"
    INT8 = "int8"
    """8 bits with a scale for each output channel: w = scale x q."""
    INT8_GROUPS = "int8-groups"
    """8 bits with a scale for each group of `GROUP` inputs: w = scale x q. Keeps llama.cpp's Q8_0 exactly."""
    INT4 = "int4"
    """4 bits with a scale and a minimum for each group of `GROUP` inputs: w = scale x (q - zero), where zero need not
    be a whole number. Weights that were stored in llama.cpp's Q4_1 are kept, up to fp32 rounding."""


def stored(weight: Float, storage: Storage, name: str) -> Any:
    """A node [out, in] of type f32. Groups need `in` to be a multiple of `GROUP`; other matrices become INT8."""
    match storage:
        case Storage.INT4 if weight.shape[1] % GROUP == 0:
            return _int4(weight, name)
        case Storage.INT8_GROUPS if weight.shape[1] % GROUP == 0:
            return _joined(_int8(_grouped(weight), name), weight)
        case Storage.INT4 | Storage.INT8 | Storage.INT8_GROUPS:
            return _int8(weight, name)
        case _:
            return op.constant(np.ascontiguousarray(weight), name=name)


def _int8(weight: Float, name: str) -> Any:
    values, scale = rounded(weight, weight.ndim - 1)
    return op.multiply(op.convert(op.constant(values, name=name), Type.f32), op.constant(scale))


def _grouped(weight: Float) -> Float:
    """[rows, groups, GROUP]"""
    return weight.reshape(len(weight), -1, GROUP)


def _joined(expanded: Any, weight: Float) -> Any:
    """Groups as the rows of the weight again."""
    return op.reshape(expanded, op.constant(np.array(weight.shape, np.int64)), special_zero=False)


def _int4(weight: Float, name: str) -> Any:
    grouped = _grouped(weight)
    lowest, highest = grouped.min(2, keepdims=True), grouped.max(2, keepdims=True)
    scale = np.maximum((highest - lowest) / np.float32(15), SMALLEST_SCALE)
    values = np.clip(np.rint((grouped - lowest) / scale), 0, 15).astype(np.uint8)
    zero = -lowest / scale
    whole = op.subtract(op.convert(_packed(values, name), Type.f32), op.constant(zero))
    return _joined(op.multiply(whole, op.constant(scale)), weight)


def _packed(values: Any, name: str) -> Any:
    """A constant of type u4 from uint8 values of 0 to 15; the first of each pair is in the lower bits."""
    flat = values.reshape(-1)
    packed = flat[0::2] | (flat[1::2] << 4)
    tensor = ov.Tensor(Type.u4, ov.Shape(list(values.shape)))
    tensor.data[:] = packed.reshape(tensor.data.shape)
    constant = ov.op.Constant(tensor)
    constant.set_friendly_name(name)
    return constant
