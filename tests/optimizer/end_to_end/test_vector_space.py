"""The identity of a vector space: what changes it, what does not, and how a real server states it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.manifest import MANIFEST_NAME, Manifest
from penstock.vector_space import VectorSpace
from penstock_optimizer.candidate.work_folder import sha256
from penstock_optimizer.capacity.curve import serve_replica
from penstock_optimizer.optimise import prepare
from penstock_runtime.host import read_host
from penstock_runtime.serving.loaded_model import load_artefact
from tests.cli.endpoints import invoke
from tests.optimizer.end_to_end.optimising import QUICK, endpoint

WEIGHTS = "model.safetensors"


def space_of(folder: Path, store: Path, **spec: Any) -> VectorSpace:
    """The space of a model's fp32 artefact, as a server loads it."""
    artefact = prepare(endpoint(folder, QUICK, **spec), store=store, models=store).artefact
    wanted = endpoint(folder, QUICK, **spec).spec.serving
    loaded = load_artefact(
        artefact, "baseline", read_host(), max_tokens=wanted.max_input_tokens, prompts=wanted.prompts
    )
    loaded.close()
    assert loaded.space is not None
    return loaded.space


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weight(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["embeddings.word_embeddings.weight"][3, 3] += 1e-3
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def edit_vocabulary(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"school":', '"schools":'))


def normalise(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))


def pool_by_cls(folder: Path) -> None:
    edit_json(folder / "1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)


def add_prompt(folder: Path) -> None:
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: "}}))


def limit(folder: Path) -> None:
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32}))


def cut_left(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", truncation_side="left")


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (edit_weight, ["the weights"]),
        (edit_vocabulary, ["the tokenizer"]),
        (pool_by_cls, ["pooling and modules", "the pooling"]),
        (normalise, ["normalisation"]),
        (add_prompt, ["the prompts"]),
        (limit, ["the limit of tokens"]),
        (cut_left, ["the side that is cut"]),
    ],
)
def test_the_identifier_changes_with_everything_that_changes_a_vector(
    change: Callable[[Path], None], differs: list[str], model: Path, tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(model, tmp_path / "changed"))
    change(changed)

    before, after = space_of(model, tmp_path / "a"), space_of(changed, tmp_path / "b")

    assert before.id != after.id
    assert list(before.differences(after)) == differs


def save_in_shards(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    index: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / WEIGHTS).unlink()


def save_as_a_part_of_a_model_with_a_head(folder: Path) -> None:
    tensors = {f"bert.{name}": array for name, array in load_file(folder / WEIGHTS).items()}
    tensors["cls.predictions.bias"] = np.zeros(7, np.float32)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def save_the_tokenizer_with_padding(folder: Path) -> None:
    padding = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "[PAD]",
    }  # fmt: skip
    edit_json(folder / "tokenizer.json", padding=padding)


def rename(folder: Path) -> None:
    edit_json(folder / "config.json", _name_or_path="another/name", transformers_version="4.0.0")


@pytest.mark.parametrize(
    "change", [save_in_shards, save_as_a_part_of_a_model_with_a_head, save_the_tokenizer_with_padding, rename]
)
def test_the_identifier_stays_when_files_are_saved_again(
    change: Callable[[Path], None], model: Path, tmp_path: Path
) -> None:
    again = Path(shutil.copytree(model, tmp_path / "again"))
    change(again)

    assert space_of(again, tmp_path / "b") == space_of(model, tmp_path / "a")


def test_prompts_and_limit_of_the_endpoint_are_part_of_its_space(model: Path, tmp_path: Path) -> None:
    own = space_of(model, tmp_path)
    prompted = space_of(model, tmp_path, serving={"prompts": {"texts": {"query": "query: "}, "default": "query"}})
    shorter = space_of(model, tmp_path, serving={"maxInputTokens": 16})

    assert own.differences(prompted) == ("the prompts", "the default prompt")
    assert own.differences(shorter) == ("the limit of tokens",)


def test_a_server_states_the_space_on_every_answer_and_refuses_another_one(model: Path, tmp_path: Path) -> None:
    artefact = prepare(endpoint(model, QUICK), store=tmp_path, models=tmp_path).artefact
    space = Manifest.load(artefact).vector_space
    assert space is not None
    digest = sha256(artefact / MANIFEST_NAME)[:12]
    with (
        serve_replica(artefact, cores=1, cpus=(), log=tmp_path / "log", start_seconds=120) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        plain = client.post("/predict", json={"inputs": "a text"})
        chosen = client.post(
            "/predict", json={"inputs": "a text", "parameters": {"dimensions": 5, "normalize": True, "pooling": "cls"}}
        )
        openai = client.post("/v1/embeddings", json={"input": ["a text"], "model": "any"})
        expected = {"x-expect-vector-space": plain.headers["x-vector-space"]}
        same = client.post("/embed", json={"inputs": "a text"}, headers=expected)
        other = client.post(
            "/embed", json={"inputs": "a text"}, headers={"x-expect-vector-space": "vs1-0123456789abcdef"}
        )
        info = client.get("/info").json()
        listed = client.get("/v1/models").json()["data"][0]
        compared = invoke("space", server.url, "--against", artefact)
        unlike = invoke("space", artefact, "--against", server.url, "--json")
        limited = Path(shutil.copytree(artefact, tmp_path / "limited"))
        edited = {**space.model_dump(mode="json"), "max_tokens": 16}
        edit_json(limited / MANIFEST_NAME, vector_space=edited)
        differing = invoke("space", server.url, "--against", limited)

    assert compared.exit_code == 0
    assert "the same space" in compared.output
    assert json.loads(unlike.output)["differences"] == []
    assert differing.exit_code == 1
    assert "the limit of tokens" in differing.output
    assert plain.headers["x-vector-space"] == f"{space.id}; d={space.dimensions}; n=0"
    assert plain.headers["x-artefact"] == digest
    assert chosen.headers["x-vector-space"] == f"{space.id}; d=5; n=1; pooling=cls"
    assert openai.headers["x-vector-space"] == f"{space.id}; d={space.dimensions}; n=1"
    assert openai.json()["system_fingerprint"] == f"{space.id}/{digest}"
    assert same.status_code == 200
    assert (other.status_code, other.json()["error_type"]) == (412, "other_vector_space")
    assert "vs1-0123456789abcdef" in other.json()["error"]
    assert space.id in other.json()["error"]
    assert info["vector_space"] == {"id": space.id, "fields": space.model_dump(mode="json")}
    assert listed["vector_space"] == space.id


def test_an_artefact_without_a_recorded_space_is_served_without_the_headers(model: Path, tmp_path: Path) -> None:
    artefact = prepare(endpoint(model, QUICK), store=tmp_path, models=tmp_path).artefact
    old = json.loads((artefact / MANIFEST_NAME).read_text())
    del old["vector_space"]
    (artefact / MANIFEST_NAME).write_text(json.dumps(old))
    with (
        serve_replica(artefact, cores=1, cpus=(), log=tmp_path / "log", start_seconds=120) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        answer = client.post("/predict", json={"inputs": "a text"})
        refused = client.post(
            "/predict", json={"inputs": "a text"}, headers={"x-expect-vector-space": "vs1-0123456789abcdef"}
        )

    assert answer.status_code == 200
    assert not {"x-vector-space", "x-artefact"} & set(answer.headers)
    assert refused.status_code == 412
    assert "states none" in refused.json()["error"]
