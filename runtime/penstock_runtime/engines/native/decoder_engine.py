"""The engine of text generation in C (docs/decisions/native-generation.md).

One read of the weights serves all rows of a step. A row's logits have the same bits alone and in company, however its
prompt was cut into steps, and with any number of threads: activations are quantised token by token, and products are
sums of integers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ArtefactError
from penstock.manifest import DecoderFacts
from penstock_runtime.engines.base import BLOCK_SIZE
from penstock_runtime.engines.native.decoder_file import NativeDecoderFile, NormPart, ProductPart, read_decoder_file
from penstock_runtime.engines.native.engine import ACTIVATIONS
from penstock_runtime.engines.native.library import (
    CDecoder,
    CLayer,
    CNormalisation,
    CProduct,
    CRope,
    CRows,
    Kernels,
    RunStatus,
    best_kernels,
    load_library,
)
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import StepRow

_NORMS = ("attention_norm", "network_norm", "query_norm", "key_norm", "attended_norm", "expanded_norm")
HEAD_MULTIPLE = 16
"""Heads are filled up with zeros to a multiple of this width."""


class NativeStepEngine:
    """See `StepEngine`. Create it with `load`."""

    def __init__(
        self, file: NativeDecoderFile, facts: DecoderFacts, *, blocks: int, threads: int, kernels: Kernels
    ) -> None:
        """Copy the weights. ArtefactError if the library rejects the parts, MemoryError if there is no memory."""
        self._library = load_library()
        self.vocabulary, self.context = facts.vocabulary, facts.context
        self.block_size, self.blocks = BLOCK_SIZE, blocks
        self._width = (file.parts.head or file.parts.embeddings).outputs
        # The arrays that the structure points to are used until the library has copied them.
        parts = _c_decoder(file)
        status = ctypes.c_int32()
        self._decoder = self._library.penstock_decoder_open(
            ctypes.byref(parts), blocks, threads, kernels, ctypes.byref(status)
        )
        if self._decoder is None:
            if status.value == RunStatus.NO_MEMORY:
                raise MemoryError("no memory for a native decoder's weights and cache, or no thread can be started")
            raise ArtefactError("the native decoder's parts do not fit together", remedy="Run penstock optimize again")

    def step(self, rows: Sequence[StepRow]) -> NDArray[np.float32]:
        """See `StepEngine`. InferenceFailed if the library fails."""
        tokens = np.concatenate([row.tokens for row in rows], dtype=np.int32)
        blocks = np.concatenate([row.blocks[: -(-(row.position + len(row.tokens)) // BLOCK_SIZE)] for row in rows])
        blocks = np.ascontiguousarray(blocks, np.int32)
        counts = np.array([len(row.tokens) for row in rows], np.int32)
        positions = np.array([row.position for row in rows], np.int32)
        wanted = np.array([row.logits for row in rows], np.int32)
        logits = np.empty((int(wanted.sum()), self._width), np.float32)
        arrays = {"tokens": tokens, "counts": counts, "positions": positions, "blocks": blocks, "logits": wanted}
        record = CRows(
            rows=len(rows), result=logits.ctypes.data, **{name: array.ctypes.data for name, array in arrays.items()}
        )
        status = self._library.penstock_decoder_step(self._decoder, ctypes.byref(record))
        if status == RunStatus.NO_MEMORY:
            raise InferenceFailed(f"native: no memory for {len(tokens)} tokens", remedy="Allow the pod more memory")
        if status != RunStatus.OK:
            raise InferenceFailed(
                f"native: {len(rows)} rows with {len(tokens)} tokens hold a token, a position or a block that does not "
                "exist",
                remedy="Report it with the model and the prompt",
            )
        return logits if self._width == self.vocabulary else np.ascontiguousarray(logits[:, : self.vocabulary])

    def close(self) -> None:
        """See `StepEngine`."""
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            self._library.penstock_decoder_close(decoder)


def block_bytes(facts: DecoderFacts) -> int:
    """Bytes of a block of the cache, in all layers: keys and values are float16."""
    width = -(-facts.head_size // HEAD_MULTIPLE) * HEAD_MULTIPLE
    return 2 * len(facts.scales) * BLOCK_SIZE * facts.key_heads * width * 2


def load(
    path: Path, facts: DecoderFacts, threads: int, *, blocks: int, kernels: Kernels | None = None
) -> NativeStepEngine:
    """Load a decoder file and make its pool of `blocks` cache blocks. `kernels`: None: the best of this processor.

    ArtefactError when it does not load, MemoryError when the memory does not suffice.
    """
    load_library()
    file = read_decoder_file(path)
    if file.parts.vocabulary != facts.vocabulary or len(file.parts.layers) != len(facts.scales):
        raise ArtefactError(f"{path} is of another model than its manifest", remedy="Run penstock optimize again")
    best = best_kernels() if kernels is None else kernels
    try:
        return NativeStepEngine(file, facts, blocks=blocks, threads=threads, kernels=best)
    except ArtefactError as error:
        raise ArtefactError(f"{path}: {error.message}", remedy=error.remedy) from error


def _c_decoder(file: NativeDecoderFile) -> CDecoder:
    parts, tensors = file.parts, file.tensors

    def address(name: str | None) -> int | None:
        return None if name is None else tensors[name].ctypes.data

    def product(one: ProductPart | None) -> CProduct:
        if one is None:
            return CProduct()
        return CProduct(one.inputs, one.outputs, one.bits, address(one.packed), address(one.scales), address(one.bias))

    def norm(one: NormPart | None) -> CNormalisation:
        if one is None:
            return CNormalisation()
        return CNormalisation(address(one.weight), address(one.bias), one.epsilon)

    layers = [
        CLayer(
            **{name: product(getattr(layer, name)) for name in ("attend", "output", "up", "gate", "down")},
            **{name: norm(getattr(layer, name)) for name in _NORMS},
            scale=layer.scale,
            window=layer.window,
            rope=layer.rope,
        )
        for layer in parts.layers
    ]
    ropes = [CRope(len(tensors[one.frequencies]), one.magnitude, address(one.frequencies)) for one in parts.ropes]
    return CDecoder(
        layers=len(layers),
        ropes=len(ropes),
        heads=parts.heads,
        key_heads=parts.key_heads,
        head_width=parts.head_width,
        head_size=parts.head_size,
        vocabulary=parts.vocabulary,
        positions=parts.positions,
        activation=ACTIVATIONS[parts.activation],
        embedding_scale=parts.embedding_scale,
        embeddings=product(parts.embeddings),
        head=product(parts.head),
        position_table=address(parts.position_table),
        final_norm=norm(parts.final_norm),
        layer=(CLayer * len(layers))(*layers),
        rope=(CRope * len(ropes))(*ropes),
    )
