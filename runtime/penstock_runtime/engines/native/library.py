"""ctypes bindings of the compiled library: its path, its version check, and its functions with their types.

ctypes releases the interpreter lock while a function runs, and does not depend on Python's ABI, so that one file works
with every version of Python.
"""

from __future__ import annotations

import ctypes
import os
from enum import IntEnum
from functools import cache
from pathlib import Path

from penstock.errors import ArtefactError
from penstock_runtime.engines.native.compiler import LIBRARY

ABI = 13
"""`PENSTOCK_ABI` of native.h."""
VARIABLE = "PENSTOCK_NATIVE_LIBRARY"
"""Environment variable: another file than the installed one (such as a build with sanitizers)."""


class Kernels(IntEnum):
    """`enum penstock_isa`: the instruction sets of the kernels; each includes those before it."""

    PLAIN = 0
    AVX2 = 1
    AVX512_VNNI = 2
    AVX512_BF16 = 3
    AMX = 4


class StepKind(IntEnum):
    """`enum penstock_kind`."""

    EMBED = 0
    NORM = 1
    LINEAR8 = 2
    LINEAR32 = 3
    ATTENTION = 4
    FIRST = 5
    CHOSEN = 6
    ROTATE = 7
    AVERAGE = 8
    HEAD_NORM = 9
    LAST = 10
    LARGEST = 11


class PoolingKind(IntEnum):
    """`enum penstock_pooling`."""

    EVERY = 0
    MEAN = 1
    CLS = 2
    LAST_TOKEN = 3


class RunStatus(IntEnum):
    """`enum penstock_status`."""

    OK = 0
    NO_MEMORY = 1
    BAD_INPUT = 2
    BAD_MODEL = 3


_NUMBERS = (
    "kind", "source", "target", "residual", "keys", "values", "inputs", "outputs", "activation", "heads", "positions",
    "types", "padding", "gated", "key_heads", "before", "after",
)  # fmt: skip
_POINTERS = (
    "weights", "scales", "bias", "factors", "position_table", "type_table", "distances", "cosines", "sines",
    "distance_keys", "distance_queries", "distance_rows",
)  # fmt: skip


class CStep(ctypes.Structure):
    """`struct penstock_step`."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in _NUMBERS),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    )


class CJob(ctypes.Structure):
    """`struct penstock_job`. Must stay at its address while the library uses it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("model", "ids", "mask", "types", "result")),
        ("floats", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rows", "tokens", "threads", "when_idle", "pooling")),
        ("started", ctypes.c_int64),
        ("ended", ctypes.c_int64),
        ("status", ctypes.c_int32),
        ("next", ctypes.c_void_p),
    )


class CProduct(ctypes.Structure):
    """`struct penstock_product`. All zero: the model does not have it."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("inputs", "outputs", "bits")),
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "bias")),
    )


class CNormalisation(ctypes.Structure):
    """`struct penstock_normalisation`."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("epsilon", ctypes.c_float))


class CLayer(ctypes.Structure):
    """`struct penstock_layer`."""

    _fields_ = (
        *((name, CProduct) for name in ("attend", "output", "up", "gate", "down")),
        *(
            (f"{name}_norm", CNormalisation)
            for name in ("attention", "network", "query", "key", "attended", "expanded")
        ),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int32),
        ("rope", ctypes.c_int32),
    )


class CRope(ctypes.Structure):
    """`struct penstock_rope`."""

    _fields_ = (("half", ctypes.c_int32), ("magnitude", ctypes.c_float), ("frequencies", ctypes.c_void_p))


class CDecoder(ctypes.Structure):
    """`struct penstock_decoder_parts`."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "layers", "ropes", "heads", "key_heads", "head_width", "head_size", "vocabulary", "positions",
                "activation",
            )
        ),
        ("embedding_scale", ctypes.c_float),
        ("embeddings", CProduct),
        ("head", CProduct),
        ("position_table", ctypes.c_void_p),
        ("final_norm", CNormalisation),
        ("layer", ctypes.POINTER(CLayer)),
        ("rope", ctypes.POINTER(CRope)),
    )  # fmt: skip


class CRows(ctypes.Structure):
    """`struct penstock_rows`."""

    _fields_ = (
        ("rows", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("tokens", "counts", "positions", "blocks", "logits", "result")),
    )


def library_path() -> Path:
    """The path of the library, which may not exist."""
    return Path(os.environ.get(VARIABLE) or LIBRARY)


@cache
def load_library() -> ctypes.CDLL:
    """The library, loaded once for the process. ArtefactError if it was not compiled, or is of another version."""
    path = library_path()
    remedy = "Install a C compiler (Debian: gcc and libc6-dev) and then Penstock again, or leave this engine out"
    if not path.is_file():
        raise ArtefactError(f"the native engine was not compiled: {path} is missing", remedy=remedy)
    try:
        library = ctypes.CDLL(str(path))
        abi = library.penstock_abi()
    except (OSError, AttributeError) as error:
        raise ArtefactError(f"{path} does not load: {error}", remedy=remedy) from error
    if abi != ABI:
        raise ArtefactError(f"{path} is of another version ({abi}, not {ABI})", remedy=remedy)
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    library.penstock_open.restype = pointer
    library.penstock_open.argtypes = [
        ctypes.POINTER(CStep), number, number, number, number, ctypes.POINTER(number)
    ]  # fmt: skip
    job = ctypes.POINTER(CJob)
    library.penstock_run.restype = None
    library.penstock_run.argtypes = [job]
    library.penstock_close.restype = None
    library.penstock_close.argtypes = [pointer]
    library.penstock_streams_open.restype = pointer
    library.penstock_streams_open.argtypes = [number, ctypes.POINTER(number)]
    library.penstock_streams_event.restype = ctypes.c_int
    library.penstock_streams_event.argtypes = [pointer]
    library.penstock_streams_submit.restype = None
    library.penstock_streams_submit.argtypes = [pointer, job]
    library.penstock_streams_retract.restype = ctypes.c_int
    library.penstock_streams_retract.argtypes = [pointer, job]
    library.penstock_streams_collect.restype = pointer
    library.penstock_streams_collect.argtypes = [pointer]
    library.penstock_streams_close.restype = None
    library.penstock_streams_close.argtypes = [pointer]
    library.penstock_decoder_open.restype = pointer
    library.penstock_decoder_open.argtypes = [
        ctypes.POINTER(CDecoder), number, number, number, ctypes.POINTER(number)
    ]  # fmt: skip
    library.penstock_decoder_step.restype = number
    library.penstock_decoder_step.argtypes = [pointer, ctypes.POINTER(CRows)]
    library.penstock_decoder_close.restype = None
    library.penstock_decoder_close.argtypes = [pointer]
    return library


def best_kernels() -> Kernels:
    """The best kernels that this processor supports and this process may use."""
    return Kernels(load_library().penstock_best_isa())
