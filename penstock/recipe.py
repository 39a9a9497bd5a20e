"""Recipes (engine, precision, options), and plans (a recipe with threads and batching) that the runtime serves."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class EngineName(StrEnum):
    """The library that executes the graph."""

    ONNXRUNTIME = "onnxruntime"
    OPENVINO = "openvino"
    NATIVE = "native"
    """Penstock's engine in C: 8-bit encoders on x86 with 8-bit dot products, fastest for short rows; text generation
    with weights in 8 and 4 bits."""
    NEURON = "neuron"
    """torch-neuronx (Inf2) or torch-neuron (Inf1): compiled for fixed shapes, not yet run on a device."""


class Precision(StrEnum):
    """The arithmetic of the linear layers."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8_DYNAMIC = "int8-dynamic"
    """Weights int8 ahead of time, activations scaled once per run over the whole tensor: depends on the batch."""
    INT8_STATIC = "int8-static"
    """Weights and activations scaled ahead of time from calibration texts."""
    INT8_ROWWISE = "int8-rowwise"
    """Weights int8 ahead of time, activations scaled per row (token) or group at run time: independent of the batch."""
    INT8_WEIGHTS = "int8-weights"
    """Weights int8 with a scale for each output channel; the arithmetic stays in floating point (text generation)."""
    INT4_WEIGHTS = "int4-weights"
    """Weights in 4 bits with a scale and a minimum for each 32 inputs, table and head in int8; the arithmetic stays in
    floating point (text generation)."""
    INT4_ROWWISE = "int4-rowwise"
    """Weights as with `int4-weights`, activations scaled per token or group at run time (text generation)."""


GENERATION_PRECISIONS = frozenset({Precision.INT8_WEIGHTS, Precision.INT4_WEIGHTS, Precision.INT4_ROWWISE})
"""Precisions that only text generation has."""
LARGEST_BATCH_TOKENS = 2048
"""Padded tokens of the largest batch that a plan may form."""
LARGEST_PADDING_SHARE = 0.25
"""The largest share of padding tokens in a batch that a plan may allow."""
PER_CHANNEL = "per-channel"
"""Option: a scale for each output channel of a weight instead of one for the whole matrix."""
SMOOTH = "smooth"
"""Option: SmoothQuant. Outlier channels of the activations are scaled down and the weights up: the same product, with
smaller rounding errors. Calibration texts decide the strength."""
COMPENSATED = "compensated"
"""Option: GPTQ. Weights that are rounded later compensate the rounding errors of earlier ones; the bias compensates the
mean error."""
REDUCED_RANGE = "reduced-range"
"""Option: neighbouring weights are limited, so that without VNNI the sum of two 8-bit products cannot saturate at
16 bits."""
SIX_BITS = "6-bit-weights"
"""Option of the native engine: weights are stored in 6 bits and expanded to 8 bits in registers. Reading weights is
most of the time of a short row, and this saves a quarter of it."""
GROUP_32 = "group-32"
"""Option: a scale for every 32 activations of a token, computed at run time."""
WIDE_ACTIVATIONS = "16-bit-activations"
"""Option of the native engine in text generation: activations are rounded to 16 bits, of which few are much larger than
the others, and multiplied as two numbers of 8 bits."""
CACHE_U8 = "cache-u8"
"""Option of text generation: keys and values are kept in 8 bits, with scales, instead of the precision of the rest."""
BF16_REST = "bf16-rest"
"""Option of the engine: operations that are not int8 (attention, GELU, sums) run in bf16."""

_TUNED = frozenset({COMPENSATED, PER_CHANNEL, SMOOTH})
_SHORT_NAMES: dict[tuple[EngineName, Precision], tuple[str, frozenset[str]]] = {
    (EngineName.ONNXRUNTIME, Precision.INT8_STATIC): ("int8", _TUNED),
    (EngineName.ONNXRUNTIME, Precision.INT8_DYNAMIC): ("int8-dynamic", _TUNED),
    (EngineName.OPENVINO, Precision.INT8_STATIC): ("int8", _TUNED),
    (EngineName.OPENVINO, Precision.INT8_ROWWISE): ("int8-rowwise", frozenset({GROUP_32})),
    (EngineName.NATIVE, Precision.INT8_ROWWISE): ("int8", _TUNED),
    (EngineName.NATIVE, Precision.INT4_ROWWISE): ("int4", frozenset({WIDE_ACTIVATIONS})),
}
"""Engine and precision -> precision in the name, and the usual options, which the name leaves out."""
_SHORT_OPTIONS = {BF16_REST: "bf16"}


class Batching(StrEnum):
    """Which rows may share a batch without changing each other's answers, as the guard found."""

    SINGLE = "single"
    """One row per run, always."""
    EQUAL_LENGTH = "equal-length"
    """Rows of exactly the same length, so that nothing is padded."""
    PADDED = "padded"
    """Rows of near-equal length, padded to the longest within the plan's padding limit."""


class Recipe(BaseModel):
    """Engine, precision and options: one way to make and run the model."""

    model_config = ConfigDict(frozen=True)

    engine: EngineName
    precision: Precision
    options: tuple[str, ...] = ()
    """Named choices within the precision, sorted, such as `per-channel`, `reduced-range`, `smooth`."""

    @property
    def name(self) -> str:
        """The short name, such as `native-int8` or `openvino-int8-bf16` (docs/decisions/recipe-names.md).

        Two recipes of one optimisation never share a name. `reduced-range` is left out: the processor decides it.
        """
        precision, usual = _SHORT_NAMES.get((self.engine, self.precision), (self.precision.value, frozenset()))
        if WIDE_ACTIVATIONS in self.options:  # instead of what encoders need
            usual = frozenset({WIDE_ACTIVATIONS})
        if SIX_BITS in self.options:
            precision = precision.replace("int8", "int6")
        named = [option for option in self.options if option not in {*usual, SIX_BITS, REDUCED_RANGE}]
        present = usual.intersection(self.options)
        if present != usual:
            named = [*(sorted(present) or ["plain"]), *named]
        return "-".join((self.engine.value, precision, *(_SHORT_OPTIONS.get(option, option) for option in named)))

    @property
    def full_name(self) -> str:
        """Engine, precision and every option, such as `onnxruntime int8-dynamic per-channel`."""
        return " ".join((self.engine.value, self.precision.value, *self.options))

    @property
    def as_built(self) -> Recipe:
        """The recipe without options of the engine. Recipes with the same `as_built` share one graph file."""
        kept = tuple(option for option in self.options if option != BF16_REST)
        return self if kept == self.options else self.model_copy(update={"options": kept})

    @property
    def with_bf16_rest(self) -> Recipe:
        """The recipe with `BF16_REST` as well."""
        return self.model_copy(update={"options": tuple(sorted({*self.options, BF16_REST}))})

    @property
    def slug(self) -> str:
        """The full name as a folder name."""
        return self.full_name.replace(" ", "-")


class ShortRoute(BaseModel):
    """Another recipe for short rows, with a separate graph. Streams, threads and tokens of a batch are the plan's."""

    model_config = ConfigDict(frozen=True)

    longest_tokens: int = Field(ge=1)
    """Rows of at most this length use this recipe, whatever the lengths of other waiting rows are."""
    recipe: Recipe
    batching: Batching = Batching.SINGLE
    max_batch_rows: int = Field(default=1, ge=1)
    max_padding_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    wide_from_tokens: int | None = Field(default=None, ge=1)
    """As the plan's, for short rows."""
    wide_alone_from_tokens: int | None = Field(default=None, ge=1)
    """As the plan's, for short rows."""


class Plan(BaseModel):
    """A recipe, and how it runs on the given cores."""

    model_config = ConfigDict(frozen=True)

    recipe: Recipe
    streams: int = Field(ge=1)
    """Runs that may execute at the same time: one thread each, plus its helper threads."""
    threads_per_stream: int = Field(ge=1)
    batching: Batching = Batching.SINGLE
    max_batch_rows: int = Field(default=1, ge=1)
    max_batch_tokens: int = Field(default=512, ge=1)
    """Padded tokens of one batch; a single longer row still runs, in a batch of one."""
    max_padding_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """The largest share of padding tokens in a batch (`Batching.PADDED` only)."""
    wide_from_tokens: int | None = Field(default=None, ge=1)
    """A row without a batch that is at least this long runs on all cores at once; None: never. Rows of other clients
    that arrive during the run wait for the cores."""
    wide_alone_from_tokens: int | None = Field(default=None, ge=1)
    """The same when its client is the only one with requests in progress; None: `wide_from_tokens`."""
    short: ShortRoute | None = None
    """Another recipe for short rows; None: this one serves all lengths."""

    @property
    def summary(self) -> str:
        """The plan in a table cell, such as `openvino-int8, 2x1 threads` or
        `openvino-int8, 2x1 threads; up to 16 tokens native-int8`."""
        what = "NeuronCores" if self.recipe.engine is EngineName.NEURON else "threads"
        own = f"{self.recipe.name}, {self.streams}x{self.threads_per_stream} {what}"
        return (
            own if self.short is None else f"{own}; up to {self.short.longest_tokens} tokens {self.short.recipe.name}"
        )

    @property
    def alone_wide_from(self) -> int | None:
        """The length from which on a row of an only client runs on all cores; None: never."""
        return self.wide_from_tokens if self.wide_alone_from_tokens is None else self.wide_alone_from_tokens

    @property
    def may_run_wide(self) -> bool:
        """True when some rows run on all cores at once, which the engine must support. Not counting short rows."""
        return self.alone_wide_from is not None

    def is_wide(self, tokens: int, *, alone: bool = False) -> bool:
        """True when a single row of this length runs on all cores at once; `alone`: its client is the only one."""
        wide_from = self.alone_wide_from if alone else self.wide_from_tokens
        return wide_from is not None and tokens >= wide_from

    @property
    def unrouted(self) -> Plan:
        """The plan of the long rows: the same without the recipe for short rows."""
        return self if self.short is None else self.model_copy(update={"short": None})

    @property
    def of_short_rows(self) -> Plan | None:
        """The plan of the short rows; None when they run like all other rows."""
        if self.short is None:
            return None
        route = {name: getattr(self.short, name) for name in ShortRoute.model_fields if name != "longest_tokens"}
        return self.model_copy(update={**route, "short": None})

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Its recipe, and the recipe for short rows, if any."""
        return (self.recipe,) if self.short is None else (self.recipe, self.short.recipe)

    def serves(self, tokens: int) -> bool:
        """True when its own recipe serves rows of this length; False when the recipe for short rows does."""
        return self.short is None or tokens > self.short.longest_tokens
