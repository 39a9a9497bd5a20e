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

from penstock_runtime.rows import Float

SMALLEST_SCALE = np.float32(1e-30)
"""Of a channel or group of zeros."""
GROUP = 32
"""Weights that share a scale and a minimum, as in llama.cpp's 4-bit formats."""


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
            return _int8_groups(weight, name)
        case Storage.INT4 | Storage.INT8 | Storage.INT8_GROUPS:
            return _int8(weight, name)
        case _:
            return op.constant(np.ascontiguousarray(weight), name=name)


def _int8(weight: Float, name: str) -> Any:
    scale = np.maximum(np.abs(weight).max(1, keepdims=True) / np.float32(127), SMALLEST_SCALE)
    values = np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)
    return op.multiply(op.convert(op.constant(values, name=name), Type.f32), op.constant(scale))


def _int8_groups(weight: Float, name: str) -> Any:
    rows, columns = weight.shape
    grouped = weight.reshape(rows, columns // GROUP, GROUP)
    scale = np.maximum(np.abs(grouped).max(2, keepdims=True) / np.float32(127), SMALLEST_SCALE)
    values = np.clip(np.rint(grouped / scale), -127, 127).astype(np.int8)
    expanded = op.multiply(op.convert(op.constant(values, name=name), Type.f32), op.constant(scale))
    return op.reshape(expanded, op.constant(np.array([rows, columns], np.int64)), special_zero=False)


def _int4(weight: Float, name: str) -> Any:
    rows, columns = weight.shape
    grouped = weight.reshape(rows, columns // GROUP, GROUP)
    lowest, highest = grouped.min(2, keepdims=True), grouped.max(2, keepdims=True)
    scale = np.maximum((highest - lowest) / np.float32(15), SMALLEST_SCALE)
    values = np.clip(np.rint((grouped - lowest) / scale), 0, 15).astype(np.uint8)
    zero = -lowest / scale
    whole = op.subtract(op.convert(_packed(values, name), Type.f32), op.constant(zero))
    expanded = op.multiply(whole, op.constant(scale))
    return op.reshape(expanded, op.constant(np.array([rows, columns], np.int64)), special_zero=False)


def _packed(values: Any, name: str) -> Any:
    """A constant of type u4 from uint8 values of 0 to 15; the first of each pair is in the lower bits."""
    flat = values.reshape(-1)
    packed = flat[0::2] | (flat[1::2] << 4)
    tensor = ov.Tensor(Type.u4, ov.Shape(list(values.shape)))
    tensor.data[:] = packed.reshape(tensor.data.shape)
    constant = ov.op.Constant(tensor)
    constant.set_friendly_name(name)
    return constant
