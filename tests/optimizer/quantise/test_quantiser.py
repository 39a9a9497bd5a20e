"""Graphs after quantisation, run in ONNX Runtime against the float graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from penstock_optimizer.quantise.linear import LinearGraph, difference, observe, outputs
from penstock_optimizer.quantise.openvino import QdqWriter
from penstock_optimizer.quantise.quantiser import IntegerWriter, Style, Writer, quantise
from penstock_runtime.rows import Row
from tests.optimizer.quantise import graphs

Maker = Callable[[], Any]
INPUTS = ("input_ids",)
MAKERS = {"feed-forward": graphs.feed_forward, "attention": graphs.attention, "tied": graphs.tied}


def rows(count: int = 24, seed: int = 0) -> list[Row]:
    generator = np.random.default_rng(seed)
    return [Row(generator.integers(0, 50, size=generator.integers(1, 20)).tolist()) for _ in range(count)]


def quantised(maker: Maker, style: Style, writer: Writer, folder: Path) -> tuple[Path, Path, Counter[str]]:
    """The float graph's file, the int8 graph's, and its operators."""
    plain = graphs.save(maker(), folder / "float.onnx")
    linear = LinearGraph(onnx.load(str(plain)))
    seen = observe(linear.model, linear.values, INPUTS, rows(), threads=1, scratch=folder / "scratch.onnx")
    quantise(linear, style, seen if style.calibrated else {}, writer, threads=2)
    path = graphs.save(linear.model, folder / "int8.onnx")
    return plain, path, Counter(node.op_type for node in linear.model.graph.node)


def error(plain: Path, path: Path, some: Sequence[Row] = ()) -> float:
    some = some or rows(seed=1)
    return difference(outputs(plain, INPUTS, some, 1), outputs(path, INPUTS, some, 1))


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("limit_pairs", [True, False], ids=["pairs", "full"])
@pytest.mark.parametrize("name", MAKERS)
def test_integer_operators_give_about_the_same_outputs(
    name: str, limit_pairs: bool, static: bool, tmp_path: Path
) -> None:
    style = Style(static, limit_pairs=limit_pairs, smoothing=0.7, compensated=True)

    plain, path, operators = quantised(MAKERS[name], style, IntegerWriter(), tmp_path)

    assert error(plain, path) < 2e-3
    assert operators["MatMulIntegerToFloat"] + operators["DynamicQuantizeMatMul"] + operators["QAttention"] >= 2


@pytest.mark.parametrize("name", ["feed-forward", "tied"])
def test_both_writers_write_the_same_numbers(name: str, tmp_path: Path) -> None:
    style = Style(static=True, smoothing=0.6, compensated=True)
    folders = [tmp_path / "integer", tmp_path / "pairs"]
    for folder in folders:
        folder.mkdir()
    plain, integer, _ = quantised(MAKERS[name], style, IntegerWriter(), folders[0])
    _, pairs, operators = quantised(MAKERS[name], style, QdqWriter(), folders[1])

    some = rows(seed=2)
    assert difference(outputs(integer, INPUTS, some, 1), outputs(pairs, INPUTS, some, 1)) < 1e-4
    assert error(plain, pairs) < 2e-3
    assert operators["QuantizeLinear"] == len(set(LinearGraph(onnx.load(str(plain))).values))


def test_pairs_are_for_calibrated_activations_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="calibrated"):
        quantised(graphs.tied, Style(static=False), QdqWriter(), tmp_path)


def test_every_refinement_reduces_the_error(tmp_path: Path) -> None:
    styles = [
        Style(static=False, per_channel=False),
        Style(static=False),
        Style(static=False, smoothing=0.7),
        Style(static=False, smoothing=0.7, compensated=True),
    ]
    errors = []
    for index, style in enumerate(styles):
        (tmp_path / str(index)).mkdir()
        plain, path, _ = quantised(graphs.feed_forward, style, IntegerWriter(), tmp_path / str(index))
        errors.append(error(plain, path))

    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 2


def test_an_activation_that_two_products_read_is_quantised_once(tmp_path: Path) -> None:
    _, _, operators = quantised(graphs.feed_forward, Style(static=False), IntegerWriter(), tmp_path)

    assert operators["DynamicQuantizeLinear"] == 1
    assert operators["MatMulIntegerToFloat"] == 2
    assert operators["DynamicQuantizeMatMul"] == 1


def test_the_smoothing_of_an_attentions_output_needs_no_extra_operator(tmp_path: Path) -> None:
    """Smoothing costs one Mul for the attention's input, and none for its output."""
    _, _, operators = quantised(graphs.attention, Style(static=True, smoothing=0.7), IntegerWriter(), tmp_path)

    assert operators["Mul"] == 1


@pytest.mark.parametrize("maker", [graphs.watched_attention, graphs.shown_attention, graphs.shared_attention])
def test_an_attention_output_with_other_readers_is_not_smoothed(maker: Maker, tmp_path: Path) -> None:
    style = Style(static=True, smoothing=0.7, compensated=True)

    plain, path, operators = quantised(maker, style, IntegerWriter(), tmp_path)

    assert operators["Mul"] == 2 + (maker is graphs.shared_attention)
    assert error(plain, path) < 5e-3


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    _, path, operators = quantised(graphs.tied, Style(static=True, smoothing=0.7), IntegerWriter(), tmp_path)

    int8 = [one for one in onnx.load(str(path)).graph.initializer if len(one.dims) == 2 and one.data_type == 3]
    assert (len(int8), operators["Mul"]) == (1, 2)


def test_the_file_has_no_float_weights(tmp_path: Path) -> None:
    _, path, _ = quantised(graphs.feed_forward, Style(static=True), IntegerWriter(), tmp_path)

    floats = {one.name for one in onnx.load(str(path)).graph.initializer if one.data_type == 1 and len(one.dims) == 2}
    assert floats == {"table", "last"}


def test_the_same_graph_and_texts_make_the_same_file(tmp_path: Path) -> None:
    style = Style(static=True, smoothing=0.7, compensated=True)
    files = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        files.append(quantised(graphs.feed_forward, style, IntegerWriter(), tmp_path / name)[1].read_bytes())

    assert files[0] == files[1]


def test_samples_that_do_not_fit_are_taken_in_several_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = LinearGraph(graphs.feed_forward())
    scratch = tmp_path / "scratch.onnx"
    whole = observe(linear.model, linear.values, INPUTS, rows(), threads=1, scratch=scratch)
    monkeypatch.setattr("penstock_optimizer.quantise.linear.PASS_BYTES", 1)
    piecemeal = observe(linear.model, linear.values, INPUTS, rows(), threads=1, scratch=scratch)

    assert list(piecemeal) == list(whole)
    assert all(np.array_equal(piecemeal[value].samples, whole[value].samples) for value in whole)
    assert list(tmp_path.iterdir()) == []


def test_differences_are_relative_and_nan_is_infinitely_far() -> None:
    one = [[np.array([3.0, 4.0], np.float32)]]

    assert difference(one, one) == 0
    assert difference(one, [[np.array([3.0, 9.0], np.float32)]]) == pytest.approx(1)
    assert difference(one, [[np.array([3.0, np.nan], np.float32)]]) == float("inf")
