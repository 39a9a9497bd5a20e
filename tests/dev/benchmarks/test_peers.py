"""The comparison with other servers: requests, answers, verdicts, written files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.generation import CONVERTED_PEER, GENERATION_PEER
from benchmarks.peers.answers import Agreement, Cosines, agreement, cosine
from benchmarks.peers.cells import MIXED, TRAFFIC, Cell, aims
from benchmarks.peers.outcome import Outcome, Standing, to_json, to_markdown, write
from benchmarks.peers.servers import (
    EMBED,
    INFINITY,
    LITSERVE,
    MLSERVER,
    PYPI_PEERS,
    TRANSFORMERS,
    Place,
    peer_of_command,
)
from benchmarks.peers.setup import NAMES, REQUIREMENTS
from penstock_bench.cell import CellResult
from penstock_bench.results import Figures
from tests.bench.conftest import StartStub


def figures(rate: float, p95: float = 10.0) -> Figures:
    cell = CellResult(seconds=1, completed_per_second=rate, latencies_milliseconds=(p95,) * 20, groups=(8,) * 20)
    return Figures.of([cell])


@pytest.mark.parametrize(
    ("shape", "answer", "vector"),
    [
        (EMBED, [[1.0, 2.0]], [1.0, 2.0]),
        (INFINITY, {"data": [{"embedding": [1.0, 2.0]}]}, [1.0, 2.0]),
        (LITSERVE, {"embedding": [1.0, 2.0]}, [1.0, 2.0]),
        # Token vectors (3, 0) and (0, 4): their mean, at length one.
        (MLSERVER, {"outputs": [{"data": ["[[[3.0, 0.0], [0.0, 4.0]]]"]}]}, [0.6, 0.8]),
    ],
)
def test_each_servers_answer_is_read(shape: object, answer: object, vector: list[float]) -> None:
    assert shape.vector(answer) == pytest.approx(vector)  # type: ignore[attr-defined]


def test_every_peer_has_its_pins() -> None:
    assert {GENERATION_PEER, CONVERTED_PEER, *(peer.needs for peer in PYPI_PEERS)} == set(NAMES)
    assert all("==" in (REQUIREMENTS / f"{name}.txt").read_text() for name in NAMES)


def test_every_peer_listens_at_the_given_address(tmp_path: Path) -> None:
    place = Place(model=Path("/models/minilm"), port=4321, cpus=(0, 1), scratch=tmp_path)

    for peer in (*PYPI_PEERS, TRANSFORMERS):
        words = " ".join(peer.command(place))
        files = " ".join(path.read_text() for path in tmp_path.iterdir())
        assert "4321" in words + files, peer.name
        assert "/models/minilm" in words + files, peer.name


def test_a_command_of_the_users_is_filled_in(tmp_path: Path) -> None:
    peer = peer_of_command("tei=router --model-id {model} --port {port} --cpus {cpus}")
    place = Place(model=Path("/m"), port=99, cpus=(2, 3), scratch=tmp_path)

    assert peer.name == "tei"
    assert peer.command(place) == ["router", "--model-id", "/m", "--port", "99", "--cpus", "2,3"]


@pytest.mark.parametrize("text", ["router --port 1", "tei=", "=router"])
def test_a_command_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not NAME=COMMAND"):
        peer_of_command(text)


@pytest.mark.parametrize(
    ("cell", "ours", "theirs", "passed"),
    [
        (Cell(32, MIXED), figures(100, 30), figures(40, 80), [True]),
        (Cell(32, MIXED), figures(100, 40), figures(40, 80), [False]),
        (Cell(32, MIXED), figures(90, 30), figures(40, 80), [False]),
        (Cell(16, 32), figures(41), figures(40), [True]),
        (Cell(16, 32), figures(39), figures(40), [False]),
        (Cell(1, 8), figures(52), figures(40), [True]),
        (Cell(1, 8), figures(51), figures(40), [False]),
        (Cell(1, 128), figures(40), figures(40), [True]),
        (Cell(1, 128), figures(39), figures(40), [False]),
    ],
)
def test_aims(cell: Cell, ours: Figures, theirs: Figures, passed: list[bool]) -> None:
    found = aims(cell, {"penstock": ours, "tei": theirs}, ours="penstock", same_graph=("tei",), cores=2)

    assert [aim.passed for aim in found] == passed


def test_nothing_is_judged_on_a_busy_machine() -> None:
    busy = figures(100).model_copy(update={"foreign_cores": 1.0})

    (aim,) = aims(Cell(16, 32), {"penstock": busy, "tei": figures(10)}, ours="penstock", same_graph=(), cores=2)

    assert aim.passed is None
    assert aim.text == "10.00x the rate (ahead asked); others took 50% of the CPUs"


def test_cosines() -> None:
    assert cosine([1, 0], [2, 0]) == 1
    assert cosine([1, 0], [0, 3]) == 0
    assert cosine([1, 1], [1, 0]) == pytest.approx(math.sqrt(0.5))
    assert cosine([0, 0], [1, 0]) == 0
    with pytest.raises(ValueError, match="zip"):
        cosine([1], [1, 2])


def test_one_odd_text_among_many_is_not_p1_but_the_minimum() -> None:
    reference = [[1.0, 0.0]] * 400
    odd = [[0.0, 1.0], *([[1.0, 0.0]] * 399)]

    found = Cosines.of(odd, reference)

    assert (found.minimum, found.p1) == (0, 1)
    assert not found.right


def test_a_server_that_answers_something_else_is_marked_not_raised(start_stub: StartStub) -> None:
    server = start_stub()

    found = agreement(server.url, EMBED, ["a"], [[1.0]])

    assert "KeyError" in found.error
    assert not found.right


def outcome() -> Outcome:
    return Outcome(
        cpu="Some CPU (AVX2, no VNNI)",
        cores=2,
        seconds=2.0,
        rounds=3,
        servers={"penstock": "chosen plan", "fast": "another", "broken": "a third"},
        agreements={
            "penstock": Agreement(Cosines(0.998, 0.991, 0.975), Cosines(0.998, 0.991, 0.975), 1.0),
            "fast": Agreement(Cosines(0.995, 0.99, 0.98), Cosines(0.98, 0.95, 0.85), 0.93),
            "broken": Agreement(None, None, 0, error="ValueError: status 500"),
        },
        standings=[
            Standing(TRAFFIC[0], "penstock", figures(100, 20)),
            Standing(TRAFFIC[0], "fast", figures(120, 20)),
            Standing(
                TRAFFIC[0], "broken", Figures.of([CellResult(seconds=1, failures={"500": 3}, first_failure="500")])
            ),
        ],
        aims=aims(
            TRAFFIC[0],
            {"penstock": figures(100, 20), "fast": figures(120, 20)},
            ours="penstock",
            same_graph=(),
            cores=2,
        ),
    )


def test_a_fast_server_with_wrong_answers_is_marked() -> None:
    text = to_markdown(outcome())

    alone, together = "0.9950 / 0.9900 / 0.9800", "0.9800 / 0.9500 / 0.8500"
    assert f"| fast | another | {alone} | {together} | 0.93000 | WRONG: 0.985 / 0.95 / 0.9 are asked |" in text
    assert "| fast (wrong answers) | 120.0 (20.0 / 20.0) |" in text
    assert "| penstock | 100.0 (20.0 / 20.0) |" in text
    assert "failed: 500" in text
    assert "| mixed lengths, 32 clients | fast | FAIL |" in text


def test_everything_is_written(tmp_path: Path) -> None:
    write(outcome(), tmp_path / "out")

    assert json.loads((tmp_path / "out" / "results.json").read_text()) == json.loads(to_json(outcome()))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "results.csv", "results.md"}
