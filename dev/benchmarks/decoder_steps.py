"""Steps of the native engine of text generation, with random weights: milliseconds, and what the arithmetic reaches.

    python -m benchmarks.decoder_steps [--shape qwen2.5-0.5b] [--bits 4] [--kernels AVX2] [--threads 1]

"8 rows" is a step of eight sequences with 128 tokens each, "prompt of 512" one of 512 tokens of a new sequence; both
have one line of logits for each sequence. Times are the best of several steps: of one thread its processor time, which
other work on the machine changes least. The rate counts the multiplications of the products (an activation of 16 bits
with a weight) but not those of the attention, and the bytes of the weights once. Another build:
`PENSTOCK_NATIVE_LIBRARY=FILE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any, Literal

import click
import numpy as np

from benchmarks.program import Program
from penstock.manifest import DecoderFacts
from penstock_runtime.engines.native.decoder_file import (
    GROUP,
    PANEL,
    RECORD_BYTES,
    DecoderParts,
    LayerParts,
    NativeDecoderFile,
    NormPart,
    ProductPart,
    RopePart,
)
from penstock_runtime.engines.native.library import Kernels, best_kernels
from penstock_runtime.generation.engine import BLOCK_SIZE, Row
from penstock_runtime.generation.native_engine import NativeStepEngine
from penstock_runtime.host import read_host

CONTEXT = 128
"""Tokens of each row before the step."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model with tied embeddings."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    head_size: int = 64

    def products(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's products."""
        joined = (self.heads + 2 * self.key_heads) * self.head_size
        return {
            "attend": (self.hidden, joined),
            "output": (self.heads * self.head_size, self.hidden),
            "up": (self.hidden, self.inner),
            "gate": (self.hidden, self.inner),
            "down": (self.inner, self.hidden),
        }

    def facts(self) -> DecoderFacts:
        """For the engine."""
        return DecoderFacts(
            vocabulary=self.vocabulary, context=8192, heads=self.heads, key_heads=self.key_heads,
            head_size=self.head_size, scales=(self.head_size**-0.5,) * self.layers, windows=(0,) * self.layers,
        )  # fmt: skip


SHAPES = {
    "smollm2-135m": Shape(hidden=576, inner=1536, layers=30, heads=9, key_heads=3, vocabulary=49_152),
    "qwen2.5-0.5b": Shape(hidden=896, inner=4864, layers=24, heads=14, key_heads=2, vocabulary=151_936),
}


def records(random: np.random.Generator, inputs: int, outputs: int, bits: int) -> Any:
    """Random weights (`record_bytes` of kernels.h), whose numbers have no meaning."""
    return random.integers(0, 256, (outputs // PANEL, inputs // GROUP, RECORD_BYTES[bits]), np.uint8)


def random_file(shape: Shape, bits: Literal[4, 8]) -> NativeDecoderFile:
    """A decoder whose layers have the same weights; the engine copies them for each layer."""
    random = np.random.default_rng(1)
    tensors: dict[str, Any] = {
        "norm": np.ones(shape.hidden, np.float32),
        "frequencies": (10_000.0 ** (-np.arange(0, 1, 2 / shape.head_size))).astype(np.float32),
    }

    def product(name: str, inputs: int, outputs: int, bits: Literal[4, 8]) -> ProductPart:
        tensors[name] = records(random, inputs, outputs, bits)
        tensors[f"{name}.scales"] = np.full(outputs, 1 / 74 / inputs**0.5, np.float32)
        return ProductPart(inputs=inputs, outputs=outputs, bits=bits, packed=name, scales=f"{name}.scales")

    norm = NormPart(weight="norm", epsilon=1e-5)
    made = {name: product(name, *sizes, bits) for name, sizes in shape.products().items()}
    layer = LayerParts(
        attend=made["attend"], output=made["output"], up=made["up"], gate=made["gate"], down=made["down"],
        attention_norm=norm, network_norm=norm, scale=shape.head_size**-0.5, rope=0,
    )  # fmt: skip
    parts = DecoderParts(
        heads=shape.heads, key_heads=shape.key_heads, head_width=shape.head_size, head_size=shape.head_size,
        vocabulary=shape.vocabulary, activation="silu", final_norm=norm,
        embeddings=product("embeddings", shape.hidden, shape.vocabulary, 8),
        ropes=(RopePart(frequencies="frequencies", magnitude=1.0),), layers=(layer,) * shape.layers,
    )  # fmt: skip
    return NativeDecoderFile(parts, tensors)


def step_seconds(engine: NativeStepEngine, rows: Sequence[Row], clock: Callable[[], float], seconds: float) -> float:
    """The shortest time of a step."""
    engine.step(rows)
    best, end = float("inf"), perf_counter() + seconds
    while perf_counter() < end:
        begin = clock()
        engine.step(rows)
        best = min(best, clock() - begin)
    return best


def made_rows(count: int, tokens: int, position: int) -> list[Row]:
    """Sequences that end with this number of new tokens."""
    blocks = -(-(position + tokens) // BLOCK_SIZE)
    return [
        Row(
            np.full(tokens, 1 + row, np.int32), position, np.arange(row * blocks, (row + 1) * blocks, dtype=np.int32), 1
        )
        for row in range(count)
    ]


def measure(
    shape: Shape,
    bits: Literal[4, 8],
    cases: Sequence[tuple[str, list[Row]]],
    *,
    kernels: Kernels,
    threads: int,
    seconds: float,
) -> None:
    """Print a line for each case."""
    blocks = max(int(rows[-1].blocks[-1]) for _, rows in cases) + 1
    engine = NativeStepEngine(random_file(shape, bits), shape.facts(), blocks=blocks, threads=threads, kernels=kernels)
    weights = sum(inputs * outputs for inputs, outputs in shape.products().values()) * shape.layers
    head = shape.hidden * shape.vocabulary
    size = weights * RECORD_BYTES[bits] / (GROUP * PANEL) + head
    try:
        for name, rows in cases:
            took = step_seconds(engine, rows, process_time if threads == 1 else perf_counter, seconds)
            lines = sum(len(row.tokens) for row in rows)
            rate = (weights * lines + head * len(rows)) / took
            click.echo(
                f"{bits} bits, {kernels.name}, {threads} threads, {name}: {took * 1e3:.2f} ms, "
                f"{rate / 1e9:.1f} billion multiplications/s, {size / took / 1e9:.1f} GB/s"
            )
    finally:
        engine.close()


@click.command(cls=Program, help=__doc__)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="smollm2-135m", show_default=True)
@click.option("--bits", "all_bits", multiple=True, type=click.Choice(["8", "4"]), default=("8", "4"), show_default=True)
@click.option(
    "--kernels", default=None, type=click.Choice([one.name for one in Kernels]), help="Default: the best ones."
)
@click.option("--threads", "all_threads", multiple=True, type=int, default=(1, 2), show_default=True)
@click.option("--rows", "all_rows", multiple=True, type=int, default=(1, 2, 4, 8, 16), show_default=True)
@click.option("--prompt", "prompts", multiple=True, type=int, default=(128, 512), show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="Of each line.")
def main(
    *, shape: str, all_bits: Sequence[str], kernels: str | None, all_threads: Sequence[int], all_rows: Sequence[int],
    prompts: Sequence[int], seconds: float,
) -> None:  # fmt: skip
    """Measure."""
    chosen = best_kernels() if kernels is None else Kernels[kernels]
    click.echo(f"{read_host().cpu.model_name}, {shape}")
    cases = [(f"{rows} rows", made_rows(rows, 1, CONTEXT)) for rows in all_rows]
    cases += [(f"prompt of {tokens}", made_rows(1, tokens, 0)) for tokens in prompts]
    for bits in all_bits:
        for threads in all_threads:
            measure(SHAPES[shape], 8 if bits == "8" else 4, cases, kernels=chosen, threads=threads, seconds=seconds)


if __name__ == "__main__":
    main()
