"""The flags of `penstock bench` become the experiment that is measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock_cli.bench
from penstock.artefact_store import DEFAULT_MODELS
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.reading import from_file
from penstock_bench.grid import BenchOptions
from penstock_bench.random_models.families import CONFIGURATIONS
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.tokens import Tokenizer
from tests.cli.endpoints import invoke, write_endpoint
from tests.runtime.models.hub_server import running_hub

Benched = list[BenchOptions]


@pytest.fixture
def benched(monkeypatch: pytest.MonkeyPatch) -> Benched:
    """Records the experiment instead of measuring it."""
    found: Benched = []

    def record(options: BenchOptions, _: Any) -> Any:
        found.append(options)
        return SimpleNamespace(notes=("cores 8: this machine has 4",), answered=True)

    monkeypatch.setattr(penstock_cli.bench, "run_bench", record)
    return found


def test_defaults_are_the_published_experiment(benched: Benched) -> None:
    result = invoke("bench", "x.yaml")

    assert result.exit_code == 0
    assert "cores 8: this machine has 4" in result.output
    assert "bench/report.html" in result.output
    assert benched == [BenchOptions(target="x.yaml", models=DEFAULT_MODELS)]
    assert len(benched[0].cores) * len(benched[0].lengths) * len(benched[0].batches) == 192


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["--cores", "1,2", "--lengths", "8", "--batches", "1,32"], {}, {"cores": (1, 2), "batches": (1, 32)}),
        (["--cores", " 1 , 2 "], {}, {"cores": (1, 2)}),
        (["--seconds", "0.5", "--rounds", "7", "--seed", "3"], {}, {"seconds": 0.5, "rounds": 7, "seed": 3}),
        (["--baseline", "--output", "out"], {}, {"baseline": True, "output": Path("out")}),
        ([], {"PENSTOCK_BENCH_LENGTHS": "16,64", "PENSTOCK_STORE": "s"}, {"lengths": (16, 64), "store": Path("s")}),
        ([], {"PENSTOCK_AUTH_TOKEN": "word"}, {"auth_token": "word"}),
        (["--models", "m"], {}, {"models": Path("m")}),
        ([], {"PENSTOCK_MODELS": "m"}, {"models": Path("m")}),
        (["--lengths", "8"], {"PENSTOCK_BENCH_LENGTHS": "16,64"}, {"lengths": (8,)}),
    ],
)
def test_flags_and_variables(
    words: list[str], environment: dict[str, str], expected: dict[str, Any], benched: Benched
) -> None:
    result = invoke("bench", "x.yaml", *words, environment=environment)

    assert result.exit_code == 0, result.output
    assert {name: getattr(benched[0], name) for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--cores", "0,1"], "holds a number under 1"),
        (["--cores", "one"], "write it like 1,2,4"),
        (["--lengths", ""], "is not a list of whole numbers"),
        (["--batches", "1,,2"], "is not a list of whole numbers"),
        (["--lengths", "8.5"], "is not a list of whole numbers"),
        (["--seconds", "0"], "is not in the range x>=0.1"),
        (["--rounds", "51"], "is not in the range 1<=x<=50"),
        (["--tokenizer", "/none"], "does not exist"),
    ],
)
def test_contradicting_flags_are_a_usage_error(words: list[str], complaint: str, benched: Benched) -> None:
    result = invoke("bench", "x.yaml", *words)

    assert result.exit_code == 2
    assert complaint in result.stderr
    assert benched == []


def test_an_interrupted_run_prints_how_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(penstock_cli.bench, "run_bench", end)
    result = invoke("bench", "x.yaml", "--output", "out")

    assert result.exit_code == 130
    assert "what was measured is in out: the same command goes on from there" in result.output


def test_a_run_without_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(notes=(), answered=False, target="http://x")
    monkeypatch.setattr(penstock_cli.bench, "run_bench", lambda *_: nothing)
    result = invoke("bench", "http://x", "--output", "out")

    assert result.exit_code == 1
    assert "out/report.html" in result.output
    assert "error: no request to http://x was answered in any setting" in result.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:18080", "localhost:18080", "host-1.example:80/x", "[::1]:8080"])
def test_an_address_without_a_scheme_is_an_error(address: str, tmp_path: Path) -> None:
    result = invoke("bench", address, "--output", tmp_path / "out")

    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {address} is neither a file nor a URL, which begins with http://. ")
    assert f"Give http://{address} " in result.stderr


def test_a_download_is_shown_and_nothing_to_measure_is_an_error(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_endpoint(tmp_path / "far.yaml", "hf://org/model")
    with running_hub() as hub:
        hub.add("org/model", tiny)
        hub.failures = [502]
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        words = ("--models", tmp_path / "models", "--output", tmp_path / "out", "--cores", 4096)
        result = invoke("bench", file, *words)

    assert "note       hf://org/model@main: the hub at " in result.output
    assert "(HTTP 502): trying again in " in result.output
    assert result.exit_code == 1
    assert "error: nothing of this can be measured (4096 cores: this machine has" in result.stderr
    assert list((tmp_path / "out").iterdir()) == []


SMALL: Mapping[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 900,
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize("name", ["bert", "bart"])
def test_a_family_is_measured_with_random_weights(
    name: str, benched: Benched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        CONFIGURATIONS, name, {key: SMALL.get(key, value) for key, value in CONFIGURATIONS[name].items()}
    )

    for _ in range(2):  # the second time with the folder that is there
        assert invoke("bench", "--family", name, "--models", tmp_path).exit_code == 0

    first, second = (from_file(ModelEndpoint, Path(options.target)) for options in benched)
    assert first == second
    folder = ModelFolder.open(Path(first.spec.model.removeprefix("file://")))
    assert (folder.model_type, str(folder.pooling), folder.max_tokens) == (name, "mean", 512)
    tokenizer = Tokenizer.load(folder)
    assert [len(pieces) for pieces in tokenizer.split(["the school of music"])] == [4]
    assert tokenizer.single.specials == 2


@pytest.mark.parametrize("words", [[], ["x.yaml", "--family", "bert"]], ids=["neither", "both"])
def test_a_target_or_a_family_is_given(words: list[str], benched: Benched) -> None:
    result = invoke("bench", *words)

    assert result.exit_code == 2
    assert "Give either FILE, URL or modelendpoint/NAME, or --family." in result.output
    assert benched == []
