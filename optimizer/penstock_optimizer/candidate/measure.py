"""Measures an engine and a plan in process: single runs by length, lone requests, requests at saturation; and the
machine's ceiling for matrix products, with the operations of an encoder to compare with it.

The measured code is the code that serves: tokenising, batching, forward pass and assembling; only HTTP is left out.

The ceiling is the best rate that any engine reaches on a chain of square products in the wanted precision, large enough
to be bound by arithmetic and not by memory. The chain has the inputs of a model, so that the engines that serve run it,
with the plan's threads. One product of M x K and K x N counts 2 x M x K x N operations. Element-wise work (softmax,
normalisation, activations) is left out, as the ceiling has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from penstock.manifest import Axes, GemmShare, GraphIO
from penstock.recipe import EngineName, Precision, Recipe
from penstock.tasks import Head
from penstock_optimizer.candidate.isolation import CpuTime
from penstock_optimizer.load.generator import poisson_arrivals, quantile
from penstock_optimizer.search.goal import PlanSample
from penstock_runtime.engines.base import Engine
from penstock_runtime.errors import DeadlineExceeded, Overloaded
from penstock_runtime.rows import Batch

LEAST_RUNS = 3
MOST_RUNS = 60
DISTURBED = 0.1
"""Share of waiting from which a single run is measured again. Threads that wake up wait for some 2 % of a run of half a
millisecond."""
GROUP_SECONDS = 0.01
"""Runs that are disturbed, or not, together."""
LONE_SECONDS = 0.4
SHORT_SECONDS = 0.15
"""For each of the shortest lengths."""
MOST_LONE_SECONDS = 6.0
SATURATION_SECONDS = 0.7
MOST_SATURATION_SECONDS = 6.0
LOADED_SECONDS = 2.0
DRAIN_SECONDS = 10.0
"""For requests in progress when the last one of the wanted rate was due. No longer: a slow model at too high a rate
would count as hanging."""
MOST_RATE = 20_000.0
"""Requests a second: more than this process can send, and more than any model answers."""
OUTSTANDING = 32
"""Requests in progress at saturation: as many clients as the mixed-traffic benchmark has."""


def resident_bytes() -> int:
    """Resident memory of this process, after freed memory is returned to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # C libraries other than glibc
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


class Predicting(Protocol):
    """The part of the predictor that is measured."""

    async def predict(self, inputs: Any, parameters: Mapping[str, Any]) -> Any:
        """Return the answer."""


@dataclass(frozen=True)
class PredictRequest:
    """A request as the predictor takes it."""

    inputs: Any
    parameters: Mapping[str, Any]


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of timed code."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Contention:
    """Adds up the waiting in all measurements of a process."""

    def __init__(self, read: Callable[[], CpuTime] = CpuTime.read) -> None:
        self._read = read
        self.total = CpuTime()
        self.last = CpuTime()
        """Of the last measurement."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What runs in the block counts."""
        before = self._read()
        yield
        self.last = self._read().since(before)
        self.total += self.last


CONTENTION = Contention()
"""Of this process, which measures one thing at a time."""


def time_runs(
    run: Callable[[], object],
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    contention: Contention = CONTENTION,
) -> list[float]:
    """Milliseconds of single runs: after one that does not count, for about `seconds`, at least three of them.

    Runs during which the threads waited for a CPU do not count, if there are three others within twice the time.
    """
    run()
    times: list[float] = []
    disturbed: list[float] = []
    with no_collection():
        end = clock() + seconds
        while len(times) < MOST_RUNS and (
            len(times) + len(disturbed) < LEAST_RUNS or clock() < end + (seconds if len(times) < LEAST_RUNS else 0.0)
        ):
            group: list[float] = []
            with contention.measured():  # takes a millisecond, and so not around each run
                until = clock() + GROUP_SECONDS
                while not group or (clock() < until and len(group) < MOST_RUNS - len(times)):
                    begin = clock()
                    run()
                    group.append((clock() - begin) * 1e3)
            (disturbed if contention.last.share > DISTURBED else times).extend(group)
    return times if len(times) >= LEAST_RUNS else times + disturbed


async def sample_plan(
    predictor: Predicting,
    requests: Sequence[PredictRequest],
    *,
    short: Mapping[int, Sequence[PredictRequest]] | None = None,
    rate: float | None = None,
) -> PlanSample:
    """Measure a plan with requests of the workload's mix: one at a time, also requests of the shortest lengths
    (`short`, by tokens) too, then many at once, and with `rate` (requests/s) arriving at random at that rate."""
    for request in requests[:4]:
        await predictor.predict(request.inputs, request.parameters)
    with no_collection():
        with CONTENTION.measured():  # not at saturation, where more threads work than there are CPUs
            p50, p95, mean = await lone_latency(predictor, requests)
        shortest = {
            tokens: (await lone_latency(predictor, some, seconds=SHORT_SECONDS))[0]
            for tokens, some in (short or {}).items()
        }
        rows = await saturation(predictor, requests, expected_seconds=mean)
        loaded = await loaded_p95(predictor, requests, rate) if rate is not None else None
    return PlanSample(
        p50_milliseconds=p50,
        p95_milliseconds=p95,
        requests_per_second=rows,
        loaded_p95_milliseconds=loaded,
        short_milliseconds=shortest,
    )


async def lone_latency(
    predictor: Predicting, requests: Sequence[PredictRequest], *, seconds: float = LONE_SECONDS
) -> tuple[float, float, float]:
    """p50 and p95 in milliseconds over the mix, and the mean in seconds, one request at a time, for about `seconds`.

    Whole rounds over the mix, so that every measurement has the same lengths; each request counts with its median over
    the rounds, so that one disturbance does not become the tail.
    """
    times: list[list[float]] = [[] for _ in requests]
    begin = time.perf_counter()
    rounds = 0
    while rounds == 0 or (time.perf_counter() - begin < seconds and rounds < MOST_RUNS):
        for index, request in enumerate(requests):
            start = time.perf_counter()
            await predictor.predict(request.inputs, request.parameters)
            times[index].append(time.perf_counter() - start)
            if rounds == 0 and time.perf_counter() - begin > MOST_LONE_SECONDS:
                break
        rounds += 1
        if time.perf_counter() - begin > MOST_LONE_SECONDS:
            break
    medians = sorted(median(values) for values in times if values)
    return quantile(medians, 0.5) * 1e3, quantile(medians, 0.95) * 1e3, sum(medians) / len(medians)


async def saturation(predictor: Predicting, requests: Sequence[PredictRequest], *, expected_seconds: float) -> float:
    """Requests a second with many in progress at all times: a fixed amount of work, whole rounds over the mix.

    `expected_seconds`: time of a lone request, to choose the amount.
    """
    round_seconds = max(expected_seconds * len(requests), 1e-6)
    rounds = max(1, min(round(SATURATION_SECONDS / round_seconds), 50))
    share = min(1.0, MOST_SATURATION_SECONDS / (round_seconds * rounds))
    todo = [request for _ in range(rounds) for request in requests][
        : max(OUTSTANDING, round(len(requests) * rounds * share))
    ]
    waiting = iter(todo)

    async def client() -> None:
        for request in waiting:
            await predictor.predict(request.inputs, request.parameters)

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(OUTSTANDING):
            group.create_task(client())
    return len(todo) / (time.perf_counter() - begin)


async def loaded_p95(predictor: Predicting, requests: Sequence[PredictRequest], rate: float) -> float:
    """p95 in milliseconds with requests arriving at random at `rate` a second, counted from when each was due.

    A request that is refused, or has no answer DRAIN_SECONDS after the last was due, counts as waiting until then: a
    plan that the rate is too high for is slow, not broken.
    """
    rate = min(rate, MOST_RATE)
    seconds = max(LOADED_SECONDS, min(40 / rate, 3 * LOADED_SECONDS))
    arrivals = poisson_arrivals(rate, seconds, seed=0)
    loop = asyncio.get_running_loop()
    begin = loop.time()
    end = begin + seconds + DRAIN_SECONDS
    latencies = [seconds + DRAIN_SECONDS - at for at in arrivals]

    async def one(index: int) -> None:
        request = requests[index % len(requests)]
        with suppress(Overloaded, DeadlineExceeded):
            await predictor.predict(request.inputs, request.parameters)
            latencies[index] = loop.time() - begin - arrivals[index]

    tasks: list[asyncio.Task[None]] = []
    for index, at in enumerate(arrivals):
        delay = begin + at - loop.time()
        if delay > 0:
            await asyncio.sleep(delay)
        elif index % OUTSTANDING == OUTSTANDING - 1:
            # More are due than can be sent: the answers need the event loop too, and a request not sent in time is a
            # miss.
            await asyncio.sleep(0)
            if loop.time() - begin > seconds:
                break
        tasks.append(loop.create_task(one(index)))
    done, late = await asyncio.wait(tasks, timeout=end - loop.time(), return_when=asyncio.FIRST_EXCEPTION)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in done:
        task.result()
    return quantile(sorted(latencies), 0.95) * 1e3


_HIDDEN = ("hidden_size", "dim", "d_model", "n_embd")
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
_FEED_FORWARD = ("intermediate_size", "hidden_dim", "ffn_dim", "d_ff", "n_inner")


@dataclass(frozen=True)
class EncoderShape:
    """The sizes that decide an encoder's work."""

    hidden: int
    layers: int
    feed_forward: int
    first_only: bool = False
    """The last layer is computed for the first token only, which is all that is read of it; its keys and values are of
    all tokens."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *, head: Head = Head.ENCODER, how: str = "") -> EncoderShape | None:
        """Read the sizes from `config.json`, under any of the names that families use; None when a size is missing.

        `head` and `how` describe the graph (as in `ExportedFacts`). Graphs that are built from the weights leave out
        the parts that a sequence classification does not read.
        """
        sizes = [
            next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)
            for names in (_HIDDEN, _LAYERS, _FEED_FORWARD)
        ]
        if None in sizes:
            return None
        hidden, layers, feed_forward = (size for size in sizes if size is not None)
        return cls(hidden, layers, feed_forward, first_only=head is Head.SEQUENCE and how == "builder")

    def operations(self, tokens: int, rows: int = 1) -> int:
        """Multiplications and additions of the encoder's matrix products: projections (query, key, value, output),
        attention scores and their sums, and the two feed-forward products."""
        layer = self._layer(tokens, tokens)
        last = self._layer(tokens, 1) if self.first_only else layer
        return rows * ((self.layers - 1) * layer + last)

    def _layer(self, tokens: int, queries: int) -> int:
        """Operations of one layer that computes only `queries` of the tokens."""
        keys_and_values = 2 * 2 * tokens * self.hidden * self.hidden
        queries_and_output = 2 * 2 * queries * self.hidden * self.hidden
        attention = 2 * 2 * queries * tokens * self.hidden
        feed_forward = 2 * 2 * queries * self.hidden * self.feed_forward
        return keys_and_values + queries_and_output + attention + feed_forward


ROWS = 256
SIZE = 1024
CHAIN = 16
"""Products in a row: casting the inputs and reducing the last result then weigh little."""
OPERATIONS = 2 * ROWS * SIZE * SIZE * CHAIN
IO = GraphIO(inputs=("input_ids",), outputs={"logits": Axes.ROW})
RUNS = 7

INT8 = frozenset({Precision.INT8_DYNAMIC, Precision.INT8_STATIC, Precision.INT8_ROWWISE})
"""Precisions in which linear layers multiply 8-bit integers."""


def write_chain(path: Path, *, int8: bool) -> None:
    """Write the chain of products as ONNX: float32, or int8 throughout in the form (quantise, dequantise, multiply)
    that engines convert to integer products."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    generator = np.random.default_rng(0)
    weights = (generator.standard_normal((SIZE, SIZE)) / np.sqrt(SIZE)).astype(np.float32)
    constants: list[onnx.TensorProto] = [numpy_helper.from_array(np.float32(SIZE), "scale")]
    nodes: list[onnx.NodeProto] = [
        helper.make_node("Cast", ["input_ids"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["numbers", "scale"], ["x0"]),
    ]
    weight = "weights"
    if int8:
        step = np.float32(np.abs(weights).max() / 127)
        constants += [
            numpy_helper.from_array(np.clip(np.round(weights / step), -127, 127).astype(np.int8), "weights_int8"),
            numpy_helper.from_array(step, "weight_step"),
            numpy_helper.from_array(np.int8(0), "weight_zero"),
            numpy_helper.from_array(np.float32(8 / 255), "step"),
            numpy_helper.from_array(np.uint8(128), "zero"),
        ]
    else:
        constants.append(numpy_helper.from_array(weights, "weights"))
    for index in range(CHAIN):
        x = f"x{index}"
        if int8:
            nodes += [
                helper.make_node("QuantizeLinear", [x, "step", "zero"], [f"{x}_q"]),
                helper.make_node("DequantizeLinear", [f"{x}_q", "step", "zero"], [f"{x}_dq"]),
                helper.make_node(
                    "DequantizeLinear", ["weights_int8", "weight_step", "weight_zero"], [f"weights_{index}"]
                ),
            ]
            x, weight = f"{x}_dq", f"weights_{index}"
        nodes.append(helper.make_node("MatMul", [x, weight], [f"x{index + 1}"]))
    nodes.append(helper.make_node("ReduceMax", [f"x{CHAIN}"], ["logits"], axes=[1], keepdims=1))
    graph = helper.make_graph(
        nodes,
        "gemm",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save_model(model, path)


def chain_recipes(precision: Precision) -> tuple[Recipe, ...]:
    """The recipes that run the chain in a precision, one for each engine that has it."""
    plain = Precision.INT8_STATIC if precision in INT8 else precision
    return tuple(
        Recipe(engine=engine, precision=plain)
        for engine in EngineName
        # The native engine runs encoders, not any graph: its products are compared with the rate of the libraries.
        # Neuron's are computed by a device.
        if engine not in {EngineName.NATIVE, EngineName.NEURON}
        if plain is not Precision.BF16 or engine is EngineName.OPENVINO
    )


def measure_chain(engine: Engine, *, runs: int = RUNS, clock: Callable[[], float] = time.perf_counter) -> float:
    """The rate of a loaded chain, 10^9 operations a second, of its fastest run: a ceiling is the best that can be
    reached."""
    ids = np.random.default_rng(1).integers(0, SIZE, (ROWS, SIZE), dtype=np.int64)
    batch = Batch(input_ids=ids, attention_mask=np.ones_like(ids), token_type_ids=np.zeros_like(ids))
    engine.run(batch)
    fastest = float("inf")
    for _ in range(runs):
        begin = clock()
        engine.run(batch)
        fastest = min(fastest, clock() - begin)
    return OPERATIONS / fastest / 1e9


def gemm_shares(shape: EncoderShape, milliseconds: Mapping[int, float], ceiling_gops: float) -> tuple[GemmShare, ...]:
    """The share of the ceiling that a model of this shape reaches at each measured length (batch 1)."""
    shares = []
    for tokens in sorted(milliseconds):
        reached = shape.operations(tokens) / (milliseconds[tokens] * 1e-3) / 1e9
        shares.append(
            GemmShare(tokens=tokens, ceiling_gops=ceiling_gops, reached_gops=reached, share=reached / ceiling_gops)
        )
    return tuple(shares)
