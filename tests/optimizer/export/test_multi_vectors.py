"""Models with a vector for each token, and BGE-M3's three outputs: answers are those of the published computation.

The judge runs transformers' model on the tokens that PyLate, sentence-transformers 6 and colbert-ai make of a text, and
computes the linear layers in torch.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from numpy.typing import NDArray

from penstock.errors import CorruptModel, UnsupportedModel
from penstock.recipe import EngineName, Precision, Recipe
from penstock.resources.endpoint import AccuracyBudget
from penstock.tasks import Head, TaskName
from penstock_optimizer.export import export
from penstock_optimizer.guard.gate import judge_candidate, observe, observe_reference
from penstock_optimizer.guard.judge import SampleRequest
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import run_rows
from penstock_runtime.tasks.base import Task
from penstock_runtime.tasks.embeddings.feature_extraction import TokenIds
from penstock_runtime.tasks.factory import head_of, make_task
from tests.runtime.tasks.families import BERT, XLM_ROBERTA, build

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
NAME = TaskName.FEATURE_EXTRACTION
TEXTS = ["Clara lives in Berkeley, not here.", "I like you. I love you!", "a", "Was ist das?"]
WIDTH = 8
Ask = Callable[..., Any]


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def weight(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 4


def with_pylate(path: Path, **settings: Any) -> Path:
    """The modules and settings that PyLate 1 adds to a folder, and its prefixes in the tokenizer."""
    package = "sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"
    entries = [
        {"idx": index, "name": str(index), "path": folder, "type": kind}
        for index, (folder, kind) in enumerate(zip(("", "1_Dense"), package, strict=True))
    ]
    write_json(path / "modules.json", entries)
    hidden = json.loads((path / "config.json").read_text())["hidden_size"]
    dense = {
        "in_features": hidden,
        "out_features": WIDTH,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
        "use_residual": False,
    }
    write_json(path / "1_Dense" / "config.json", dense)
    safetensors.torch.save_file({"linear.weight": weight(WIDTH, hidden)}, path / "1_Dense" / "model.safetensors")
    write_json(path / "config_sentence_transformers.json", {"prompts": {}, **settings})
    return path


def with_markers(path: Path, *markers: str) -> None:
    """Add tokens to the tokenizer and the model, as PyLate does."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path)
    tokenizer.add_tokens(list(markers))
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)


def expected(
    path: Path,
    text: str,
    marker: str,
    longest: int,
    linear: torch.Tensor,
    *,
    query: bool,
    skipped: tuple[str, ...] = tuple(string.punctuation),
    attended: bool = False,
    expand: bool = True,
) -> NDArray[np.float32]:
    """The vectors of a text by PyLate's `tokenize` and `encode`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token_id = tokenizer.mask_token_id
    padding = "max_length" if query and expand else False
    encoded = tokenizer(text, truncation=True, max_length=longest - 1, padding=padding, return_tensors="pt")
    inserted = tokenizer.convert_tokens_to_ids(marker)
    encoded = {
        name: torch.cat([values[:, :1], torch.full((1, 1), added), values[:, 1:]], dim=1)
        for name, added in (("input_ids", inserted), ("attention_mask", 1), ("token_type_ids", 0))
        for values in [encoded[name]]
    }
    if query and attended:
        encoded["attention_mask"].fill_(1)
    model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        vectors = model(**encoded).last_hidden_state[0] @ linear.T
    if not query:
        ids = tokenizer.convert_tokens_to_ids(list(skipped))
        vectors = vectors[~torch.isin(encoded["input_ids"][0], torch.tensor(ids))]
    answer: NDArray[np.float32] = torch.nn.functional.normalize(vectors, dim=1).numpy()
    return answer


@contextmanager
def asking(path: Path, out: Path, engine: EngineName = EngineName.ONNXRUNTIME) -> Iterator[Ask]:
    """Asks the task of a folder, with its fp32 graph."""
    folder = ModelFolder.open(path)
    task = make_task(NAME, folder)
    with forwarding(folder, task, out, engine) as forward:

        def ask(inputs: Any, **parameters: Any) -> Any:
            return observe(task, forward, task.prepare(task.parse(inputs, parameters))).answer

        yield ask


@contextmanager
def forwarding(
    folder: ModelFolder, task: Task, out: Path, engine: EngineName = EngineName.ONNXRUNTIME
) -> Iterator[Any]:
    exported = export(folder, head_of(task.name, folder), out)
    recipe = Recipe(engine=engine, precision=Precision.FP32)
    loaded = load_engine(exported.path, exported.io, recipe, Threads(1, 1), max_tokens=folder.max_tokens)
    try:
        yield lambda rows: run_rows(loaded.run, exported.io, rows)
    finally:
        loaded.close()


def close(actual: Any, wanted: Any) -> None:
    np.testing.assert_allclose(actual, wanted, atol=1e-4)


@pytest.mark.parametrize("attended", [False, True])
@pytest.mark.parametrize("engine", [EngineName.ONNXRUNTIME, EngineName.OPENVINO])
def test_answers_are_those_of_pylate(engine: EngineName, attended: bool, tmp_path: Path) -> None:
    path = build(BERT, Head.ENCODER, tmp_path / "model").path
    with_markers(path, "[Q] ", "[D] ")
    with_pylate(
        path,
        query_prefix="[Q] ",
        document_prefix="[D] ",
        query_length=16,
        document_length=20,
        attend_to_expansion_tokens=attended,
        skiplist_words=list(string.punctuation),
    )
    linear = safetensors.torch.load_file(path / "1_Dense" / "model.safetensors")["linear.weight"]

    with asking(path, tmp_path / "out", engine) as ask:
        documents = [expected(path, text, "[D] ", 20, linear, query=False) for text in TEXTS]
        queries = [expected(path, text, "[Q] ", 16, linear, query=True, attended=attended) for text in TEXTS]
        for answers, wanted in ((ask(TEXTS), documents), (ask(TEXTS, prompt_name="query"), queries)):
            for actual, one in zip(answers, wanted, strict=True):
                close(actual[0], one)
        close(ask(TEXTS[0], prompt_name="document")[0], documents[0])
        ranking = ask({"query": TEXTS[1], "texts": TEXTS}, return_text=True, top_k=3)
        scores = [float((queries[1] @ document.T).max(axis=1).sum()) for document in documents]
        order = sorted(range(len(TEXTS)), key=lambda index: -scores[index])[:3]
        assert [entry["index"] for entry in ranking] == order
        assert [entry["text"] for entry in ranking] == [TEXTS[index] for index in order]
        close([entry["score"] for entry in ranking], [scores[index] for index in order])
        assert all(queries[0].shape == (16, WIDTH) for _ in queries)
        assert len(documents[0]) < len(expected(path, TEXTS[0], "[D] ", 20, linear, query=False, skipped=()))


def test_without_expansion_and_without_a_skip_list(tmp_path: Path) -> None:
    path = build(BERT, Head.ENCODER, tmp_path / "model").path
    with_markers(path, "[Q] ", "[D] ")
    with_pylate(path, do_query_expansion=False, skiplist_words=[], query_length=16, document_length=20)
    linear = safetensors.torch.load_file(path / "1_Dense" / "model.safetensors")["linear.weight"]

    with asking(path, tmp_path / "out") as ask:
        wanted = expected(path, TEXTS[0], "[Q] ", 16, linear, query=True, expand=False)
        close(ask(TEXTS[0], prompt_name="query")[0], wanted)
        close(ask(TEXTS[0])[0], expected(path, TEXTS[0], "[D] ", 20, linear, query=False, skipped=()))


def test_queries_are_filled_up_to_no_more_tokens_than_a_row_may_have(tmp_path: Path) -> None:
    path = build(BERT, Head.ENCODER, tmp_path / "model").path
    with_pylate(path, query_length=10**9)
    longest = ModelFolder.open(path).max_tokens

    with asking(path, tmp_path / "out") as ask:
        assert len(ask(TEXTS[0], prompt_name="query")[0]) == longest


@pytest.mark.parametrize(("words", "kept"), [((",", "☃"), False), ((",",), True)])
def test_a_skipped_word_that_is_no_token_skips_unknown_tokens(
    words: tuple[str, ...], kept: bool, tmp_path: Path
) -> None:
    path = build(BERT, Head.ENCODER, tmp_path / "model").path
    with_markers(path, "[Q] ", "[D] ")
    with_pylate(path, document_length=20, skiplist_words=list(words))
    linear = safetensors.torch.load_file(path / "1_Dense" / "model.safetensors")["linear.weight"]
    assert transformers.AutoTokenizer.from_pretrained(path).tokenize("☃") == ["[UNK]"]

    with asking(path, tmp_path / "out") as ask:
        without, having = ask(["a a", "a ☃ a"])
        assert (len(having[0]) > len(without[0])) == kept
        close(having[0], expected(path, "a ☃ a", "[D] ", 20, linear, query=False, skipped=words))


def test_a_residual_layer_of_another_width(tmp_path: Path) -> None:
    path = build(BERT, Head.ENCODER, tmp_path / "model").path
    with_markers(path, "[Q] ", "[D] ")
    with_pylate(path, document_length=20)
    values = json.loads((path / "1_Dense" / "config.json").read_text())
    write_json(path / "1_Dense" / "config.json", {**values, "use_residual": True})
    tensors = safetensors.torch.load_file(path / "1_Dense" / "model.safetensors")
    tensors["residual.weight"] = weight(*tensors["linear.weight"].shape, seed=5)
    safetensors.torch.save_file(tensors, path / "1_Dense" / "model.safetensors")

    with asking(path, tmp_path / "out") as ask:
        both = tensors["linear.weight"] + tensors["residual.weight"]
        close(ask(TEXTS[0])[0], expected(path, TEXTS[0], "[D] ", 20, both, query=False))


def colbert_ai(path: Path, metadata: Mapping[str, Any]) -> torch.Tensor:
    """A folder as colbert-ai writes it: `bert.*` and `linear.weight` in one file, settings in artifact.metadata."""
    build(BERT, Head.ENCODER, path)
    with_markers(path, "[unused0]", "[unused1]")
    config = json.loads((path / "config.json").read_text())
    write_json(path / "config.json", {**config, "architectures": ["HF_ColBERT"]})
    linear = weight(WIDTH, config["hidden_size"])
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    named = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file({**named, "linear.weight": linear}, path / "model.safetensors")
    write_json(path / "artifact.metadata", metadata)
    # The judge reads the encoder.
    (path.parent / "judge").mkdir()
    for file in path.iterdir():
        (path.parent / "judge" / file.name).write_bytes(file.read_bytes())
    safetensors.torch.save_file(tensors, path.parent / "judge" / "model.safetensors", metadata={"format": "pt"})
    return linear


METADATA = {
    "query_token_id": "[unused0]",
    "doc_token_id": "[unused1]",
    "query_maxlen": 12,
    "doc_maxlen": 20,
    "mask_punctuation": True,
    "attend_to_mask_tokens": False,
    "dim": WIDTH,
}


def test_answers_are_those_of_colbert_ai(tmp_path: Path) -> None:
    linear = colbert_ai(tmp_path / "model", METADATA)
    judge = tmp_path / "judge"

    with asking(tmp_path / "model", tmp_path / "out") as ask:
        for text in TEXTS:
            close(ask(text)[0], expected(judge, text, "[unused1]", 20, linear, query=False))
            close(ask(text, prompt_name="query")[0], expected(judge, text, "[unused0]", 12, linear, query=True))


def test_an_artefact_has_the_projection_of_colbert_ai(tmp_path: Path) -> None:
    linear = colbert_ai(tmp_path / "model", METADATA)
    folder = ModelFolder.open(tmp_path / "model")
    assert tmp_path / "model" / "artifact.metadata" in folder.settings
    files = folder.artefact_files
    (tmp_path / "model" / "model.safetensors").unlink()
    for name, contents in files.items():
        (tmp_path / "model" / name).write_bytes(contents)

    artefact = ModelFolder.open(tmp_path / "model", weights=False).multi_vector

    assert artefact is not None
    np.testing.assert_array_equal(artefact.projections[0].weight, linear.numpy())


def test_modules_of_sentence_transformers_6(tmp_path: Path) -> None:
    path = build(BERT, Head.ENCODER, tmp_path / "model").path
    with_markers(path, "[Q]", "[D]")
    with_pylate(path)
    kinds = [
        ("", "sentence_transformers.base.modules.transformer.Transformer"),
        ("1_Dense", "sentence_transformers.base.modules.dense.Dense"),
        ("2_MultiVectorMask", "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"),
        ("3_Normalize", "sentence_transformers.sentence_transformer.modules.normalize.Normalize"),
    ]
    write_json(path / "modules.json", [{"idx": 0, "name": "0", "path": at, "type": kind} for at, kind in kinds])
    values = json.loads((path / "1_Dense" / "config.json").read_text())
    names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    write_json(path / "1_Dense" / "config.json", {**values, **names})
    write_json(path / "2_MultiVectorMask" / "config.json", {"skiplist_words": [",", "."]})
    expansion = {"strategy": "fixed", "attend": False, "token": None, "length": 16}
    settings = {"document_length": 20, "query_expansion": expansion}
    write_json(path / "sentence_bert_config.json", settings)
    prompts = {"prompts": {"query": "[Q]", "document": "[D]"}, "model_type": "MultiVectorEncoder"}
    write_json(path / "config_sentence_transformers.json", prompts)
    linear = safetensors.torch.load_file(path / "1_Dense" / "model.safetensors")["linear.weight"]

    with asking(path, tmp_path / "out") as ask:
        for text in TEXTS:
            close(
                ask(text, prompt_name="document")[0],
                expected(path, text, "[D]", 20, linear, query=False, skipped=(",", ".")),
            )
            close(ask(text, prompt_name="query")[0], expected(path, text, "[Q]", 16, linear, query=True))


def test_requests_for_other_vectors_are_refused(tmp_path: Path) -> None:
    path = with_pylate(build(BERT, Head.ENCODER, tmp_path / "model").path)
    folder = ModelFolder.open(path)
    task = make_task(NAME, folder)
    for parameters in ({"normalize": True}, {"pooling": "auto"}, {"sparse_format": "pairs"}):
        with pytest.raises(InvalidInput, match=r"a vector for each token \(ColBERT\)") as caught:
            task.parse("a", parameters)
        assert "/embed_all" in caught.value.remedy
    with pytest.raises(InvalidInput, match="one kind of vectors"):
        task.parse("a", {"outputs": ["dense"]})
    with pytest.raises(InvalidInput, match="this model's vectors have 8"):
        task.parse("a", {"dimensions": 9})
    with pytest.raises(InvalidInput, match="for a query with texts"):
        task.parse("a", {"top_k": 1})
    with pytest.raises(UnsupportedModel, match="has a vector for each token of a text") as refused:
        make_task(TaskName.SENTENCE_SIMILARITY, folder)
    assert "feature-extraction" in refused.value.remedy
    dense = make_task(NAME, ModelFolder.open(build(BERT, Head.ENCODER, tmp_path / "dense").path))
    with pytest.raises(InvalidInput, match="this model ranks none"):
        dense.parse({"query": "a", "texts": ["b"]}, {})


def test_broken_folders_name_the_file(tmp_path: Path) -> None:
    colbert_ai(tmp_path / "model", METADATA)
    write_json(tmp_path / "model" / "artifact.metadata", {"query_token_id": 3})
    with pytest.raises(CorruptModel, match=r"artifact\.metadata: query_token_id is 3"):
        make_task(NAME, ModelFolder.open(tmp_path / "model"))


def bge_m3(path: Path) -> dict[str, torch.Tensor]:
    """A folder as BGE-M3's, with its heads as safetensors."""
    build(XLM_ROBERTA, Head.ENCODER, path)
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    entries = [
        {"idx": 0, "name": "0", "path": at, "type": f"sentence_transformers.models.{kind}"} for kind, at in kinds
    ]
    write_json(path / "modules.json", entries)
    write_json(path / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    hidden = json.loads((path / "config.json").read_text())["hidden_size"]
    heads = {
        "colbert_linear.weight": weight(hidden, hidden),
        "colbert_linear.bias": weight(hidden, seed=4),
        "sparse_linear.weight": weight(1, hidden, seed=5),
        "sparse_linear.bias": torch.tensor([0.1]),
    }
    for name in ("colbert_linear", "sparse_linear"):
        parts = {part: heads[f"{name}.{part}"] for part in ("weight", "bias")}
        safetensors.torch.save_file(parts, path / f"{name}.safetensors")
    return heads


def test_three_outputs_of_one_run_are_those_of_flag_embedding(tmp_path: Path) -> None:
    heads = bge_m3(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    model = transformers.AutoModel.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    specials = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}

    with asking(tmp_path / "model", tmp_path / "out") as ask:
        whole = ask(TEXTS, outputs=["dense", "sparse", "multi_vector"])
        for index, text in enumerate(TEXTS):
            encoded = tokenizer(text, return_tensors="pt")
            with torch.no_grad():
                states = model(**encoded).last_hidden_state[0]
            close(whole["dense"][index], torch.nn.functional.normalize(states[0], dim=0))
            weights = torch.relu(states @ heads["sparse_linear.weight"].T + heads["sparse_linear.bias"])[:, 0].tolist()
            wanted: dict[int, float] = {}
            for token, value in zip(encoded["input_ids"][0].tolist(), weights, strict=True):
                if token not in specials and value > 0:
                    wanted[token] = max(value, wanted.get(token, 0.0))
            found = {pair["index"]: pair["value"] for pair in whole["sparse"][index]}
            assert found.keys() == wanted.keys()
            close(list(found.values()), [wanted[token] for token in found])
            vectors = states[1:] @ heads["colbert_linear.weight"].T + heads["colbert_linear.bias"]
            close(whole["multi_vector"][index], torch.nn.functional.normalize(vectors, dim=1))
            # One output alone, as the routes of text-embeddings-inference ask for it.
            close(ask(text)[0], whole["dense"][index])
            assert {pair["index"] for pair in ask(text, sparse_format="pairs")[0]} == set(wanted)
            close(ask(text, pooling="none")[0], whole["multi_vector"][index])
        assert any(whole["sparse"])
        with pytest.raises(InvalidInput, match="the dense output is a pooled vector"):
            ask("a", outputs=["dense"], pooling="none")


def test_an_output_whose_file_is_missing_is_refused(tmp_path: Path) -> None:
    bge_m3(tmp_path / "model")
    (tmp_path / "model" / "sparse_linear.safetensors").unlink()
    task = make_task(NAME, ModelFolder.open(tmp_path / "model"))
    with pytest.raises(InvalidInput, match=r"no sparse output: its folder lacks sparse_linear\.safetensors") as caught:
        task.parse("a", {"outputs": ["sparse"]})
    assert "convert-a-model.md#bge-m3" in caught.value.remedy


@pytest.mark.parametrize("kind", ["pylate", "bge-m3"])
def test_the_guard_compares_all_outputs(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if kind == "pylate":
        with_pylate(build(BERT, Head.ENCODER, path).path)
    else:
        bge_m3(path)
    folder = ModelFolder.open(path)
    task = make_task(NAME, folder)
    samples = [SampleRequest(text) for text in TEXTS * 4]
    with forwarding(folder, task, tmp_path / "out") as forward:
        reference = observe_reference(task, forward, samples)
        assert judge_candidate(task, forward, reference, AccuracyBudget()).passed

        def turned(rows: Any) -> Any:
            """Changes the last token only: pooled vectors stay as they are."""
            changed = []
            for outputs in forward(rows):
                states = outputs["last_hidden_state"].copy()
                states[1:] = -states[1:]
                changed.append({"last_hidden_state": states})
            return changed

        verdict = judge_candidate(task, turned, reference, AccuracyBudget())
    assert not verdict.passed
    assert "cosine" in verdict.reason


def test_token_ids_are_taken(tmp_path: Path) -> None:
    bge_m3(tmp_path / "model")
    with asking(tmp_path / "model", tmp_path / "out") as ask:
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
        ids = tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
        close(ask(TokenIds([ids], single=True), pooling="none"), ask(TEXTS[0], pooling="none"))
