from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers
from sentence_transformers.sentence_transformer import modules

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.tasks.embeddings.feature_extraction import TokenIds
from tests.runtime.tasks.answers import assert_alike
from tests.runtime.tasks.conftest import Build
from tests.runtime.tasks.families import BERT, FAMILIES, MPNET, ROBERTA, Built, Family, build_for
from tests.runtime.tasks.texts import HARD, LONG, MORE

NAME = TaskName.FEATURE_EXTRACTION
SIMILARITY = TaskName.SENTENCE_SIMILARITY
TEXTS = [*HARD.values(), *MORE, LONG]
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("judge")]


def sentence_model(
    built: Built, path: Path, pooling: str, *, normalize: bool
) -> sentence_transformers.SentenceTransformer:
    """sentence-transformers around a small model, saved to `path` with the prompts that retrieval models have."""
    transformer = modules.Transformer(str(built.path))
    steps: list[Any] = [transformer, modules.Pooling(transformer.get_word_embedding_dimension(), pooling_mode=pooling)]
    model = sentence_transformers.SentenceTransformer(
        modules=[*steps, modules.Normalize()] if normalize else steps,
        device="cpu",
        prompts={"query": "query: ", "passage": "passage: "},
    )
    model.save(str(path))
    return model


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_plain_model_gives_the_token_vectors_of_the_pipeline(family: Family, built: Build) -> None:
    model = built(NAME, family)
    ours, theirs = model.task(NAME), model.pipeline(NAME)
    for text in TEXTS:
        assert_alike(ours(text), theirs(text, truncation=True))
    assert_alike([matrix.tolist() for matrix in ours(TEXTS[:3])], theirs(TEXTS[:3], truncation=True))


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "lasttoken"])
@pytest.mark.parametrize(
    ("family", "normalize"),
    [(BERT, True), (ROBERTA, False), (MPNET, True)],
    ids=lambda value: getattr(value, "name", value),
)
def test_pooled_vectors_are_those_of_sentence_transformers(
    family: Family, pooling: str, built: Build, tmp_path: Path, *, normalize: bool
) -> None:
    model = built(NAME, family)
    judge = sentence_model(model, tmp_path, pooling, normalize=normalize)
    ask = Built(family, tmp_path, model.model, model.tokenizer).task(NAME)
    np.testing.assert_allclose(ask(TEXTS), judge.encode(TEXTS, batch_size=1), atol=1e-5)
    np.testing.assert_allclose(
        ask(TEXTS, prompt_name="query"), judge.encode(TEXTS, batch_size=1, prompt_name="query"), atol=1e-5
    )
    np.testing.assert_allclose(
        ask(TEXTS, normalize=True), judge.encode(TEXTS, batch_size=1, normalize_embeddings=True), atol=1e-5
    )
    shortened = judge.encode(TEXTS, batch_size=1, truncate_dim=7, normalize_embeddings=normalize)
    np.testing.assert_allclose(ask(TEXTS, dimensions=7), shortened, atol=1e-5)


def test_the_default_prompt_is_put_before_every_text(built: Build, tmp_path: Path) -> None:
    model = built(NAME, BERT)
    sentence_model(model, tmp_path, "mean", normalize=True)
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"default_prompt_name": "query"}))
    judge = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    ask = Built(BERT, tmp_path, model.model, model.tokenizer).task(NAME)
    np.testing.assert_allclose(ask(MORE[0]), judge.encode([MORE[0]]), atol=1e-5)
    np.testing.assert_allclose(ask("query: a"), ask("query: a", prompt_name="query"), atol=0)
    assert np.abs(ask("a", prompt_name="passage") - ask("a")).max() > 1e-3


@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_are_truncated_if_the_models_files_state_it(built: Build, tmp_path: Path, *, normalize: bool) -> None:
    model = built(NAME, BERT)
    sentence_model(model, tmp_path, "mean", normalize=normalize)
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"truncate_dim": 7}))
    judge = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    ours = Built(BERT, tmp_path, model.model, model.tokenizer)
    ask, alike = ours.task(NAME), ours.task(SIMILARITY)

    np.testing.assert_allclose(ask(TEXTS), judge.encode(TEXTS, batch_size=1), atol=1e-5)
    np.testing.assert_allclose(
        ask(TEXTS, normalize=True), judge.encode(TEXTS, batch_size=1, normalize_embeddings=True), atol=1e-5
    )
    assert ask(TEXTS, dimensions=9).shape == (len(TEXTS), 9)
    assert np.asarray(ask(TEXTS[0], pooling="none")).shape[-1] > 9
    vectors = judge.encode(TEXTS[:3], batch_size=1)
    np.testing.assert_allclose(
        alike({"source_sentence": TEXTS[0], "sentences": TEXTS[1:3]}),
        judge.similarity(vectors[:1], vectors[1:])[0],
        atol=1e-5,
    )


def test_texts_are_lower_cased_where_sentence_transformers_does(built: Build, tmp_path: Path) -> None:
    model = built(NAME, ROBERTA)
    sentence_model(model, tmp_path, "mean", normalize=True)
    file = tmp_path / "sentence_bert_config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"do_lower_case": True}))
    ask = Built(ROBERTA, tmp_path, model.model, model.tokenizer).task(NAME)
    np.testing.assert_allclose(ask("New YORK"), ask("new york"), atol=0)


def test_minilm_gives_the_vectors_of_sentence_transformers(minilm: Built) -> None:
    judge = sentence_transformers.SentenceTransformer(str(minilm.path), device="cpu")
    texts = [*HARD.values(), LONG, LONG * 10]
    np.testing.assert_allclose(minilm.task(NAME)(texts), judge.encode(texts, batch_size=1), atol=1e-5)


def test_minilm_ranks_the_most_similar_sentence_first(minilm: Built) -> None:
    judge = sentence_transformers.SentenceTransformer(str(minilm.path), device="cpu")
    sentences = ["That is a happy dog", "That is a very happy person", "Today is a sunny day", LONG]
    found = minilm.task(SIMILARITY)({"source_sentence": "That is a happy person", "sentences": sentences})
    vectors = judge.encode(["That is a happy person", *sentences], batch_size=1)
    np.testing.assert_allclose(found, judge.similarity(vectors[:1], vectors[1:])[0], atol=1e-5)
    assert found.index(max(found)) == 1
    assert all(type(cosine) is float for cosine in found)


def test_sentences_of_a_plain_model_are_compared_by_their_means(built: Build) -> None:
    model = built(SIMILARITY, BERT)
    found = model.task(SIMILARITY)({"source_sentence": MORE[0], "sentences": list(MORE)})
    vectors = model.task(NAME)(list(MORE), pooling="mean", normalize=True)
    np.testing.assert_allclose(found, vectors @ vectors[0], atol=1e-5)
    assert found[0] == pytest.approx(1)


def test_the_similarity_of_a_sentence_with_itself_is_at_most_one(minilm: Built) -> None:
    found = minilm.task(SIMILARITY)({"source_sentence": "aa", "sentences": ["aa"] * 3})
    assert all(0.99999 < cosine <= 1 for cosine in found)


def test_one_text_is_a_list_of_one_vector(minilm: Built) -> None:
    ask = minilm.task(NAME)
    single = ask(MORE[0])
    assert (single.shape, single.dtype, single.flags.c_contiguous) == ((1, 384), np.float32, True)
    np.testing.assert_array_equal(single, ask([MORE[0], MORE[1]])[:1])


def test_pooling_may_be_requested_or_switched_off(minilm: Built) -> None:
    ask = minilm.task(NAME)
    tokens = ask(MORE[0], pooling="none")
    assert tokens.shape[::2] == (1, 384)
    np.testing.assert_allclose(ask(MORE[0], pooling="cls", normalize=False), tokens[:, 0], atol=0)
    np.testing.assert_allclose(ask(MORE[0], normalize=False), tokens.mean(axis=1), atol=1e-6)


def test_auto_gives_a_vector_for_each_text_whatever_the_model(minilm: Built, built: Build) -> None:
    plain = built(NAME, BERT).task(NAME)
    np.testing.assert_array_equal(plain(TEXTS[:3], pooling="auto"), plain(TEXTS[:3], pooling="mean"))
    pooled = minilm.task(NAME)
    np.testing.assert_array_equal(pooled(MORE[0], pooling="auto"), pooled(MORE[0]))


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"prompt_name": "querry"}, "parameters.prompt_name", "there is no prompt 'querry'"),
        ({"dimensions": 33}, "parameters.dimensions", "this model's vectors have 32"),
        ({"pooling": "none", "normalize": True}, "parameters.normalize", "for pooled vectors"),
        ({"pooling": "none", "dimensions": 3}, "parameters.dimensions", "for pooled vectors"),
    ],
)
def test_parameters_that_the_model_does_not_support_are_refused(
    options: dict[str, Any], field: str, message: str, built: Build, tmp_path: Path
) -> None:
    model = built(NAME, BERT)
    sentence_model(model, tmp_path, "mean", normalize=True)
    with pytest.raises(InvalidInput, match=message) as refused:
        Built(BERT, tmp_path, model.model, model.tokenizer).task(NAME)("a", **options)
    assert refused.value.field == field
    assert "query" in refused.value.remedy or "prompt" not in field


def test_vectors_share_no_memory_with_the_outputs_of_the_batch(built: Build) -> None:
    """A view would keep the whole padded batch in memory until its last answer has been sent."""
    model = built(NAME, BERT)
    task = model.task(NAME).task
    for pooling in ("none", "cls", "mean", "max", "last"):
        row = task.prepare(task.parse("text", {"pooling": pooling})).rows[0]
        outputs = model.forward(row)
        assert not np.shares_memory(task.reduce(row, outputs), outputs["last_hidden_state"])


def test_files_that_the_task_does_not_need_may_be_missing(built: Build, tmp_path: Path) -> None:
    model = build_for(NAME, BERT, tmp_path / "made")
    for name in ("special_tokens_map.json", "vocab.txt", "tokenizer_config.json"):
        (tmp_path / "made" / name).unlink(missing_ok=True)
    shutil.copytree(tmp_path / "made", tmp_path / "copy")
    ask = Built(BERT, tmp_path / "copy", model.model, model.tokenizer).task(NAME)
    assert_alike(ask(MORE[0]), built(NAME, BERT).task(NAME)(MORE[0]).tolist())


def test_token_ids_give_the_same_vector_as_their_text(built: Build, tmp_path: Path) -> None:
    """OpenAI's and text-embeddings-inference's requests may have them; Hugging Face's may not."""
    model = built(NAME, BERT)
    sentence_model(model, tmp_path, "mean", normalize=True)
    ask = Built(BERT, tmp_path, model.model, model.tokenizer).task(NAME)
    ids = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (MORE[0], LONG)]
    np.testing.assert_array_equal(ask(TokenIds(ids, single=False)), ask([MORE[0], LONG]))
    np.testing.assert_array_equal(ask(TokenIds(ids[:1], single=True)), ask(MORE[0]))


@pytest.mark.parametrize("single", [True, False])
def test_ids_of_tokens_that_were_added_without_a_vector_are_refused(single: bool, built: Build, tmp_path: Path) -> None:
    model = built(NAME, BERT)
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.add_tokens(["<brand>"])
    model.model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ask, added = Built(BERT, tmp_path, model.model, tokenizer).task(NAME), len(tokenizer) - 1
    assert tokenizer.convert_ids_to_tokens(added) == "<brand>"

    last = ask(TokenIds([[5, added - 1]], single=single))
    assert np.asarray(last).reshape(-1, 32).shape[0] == 2 + model.tokenizer.num_special_tokens_to_add()
    with pytest.raises(InvalidInput, match=f"is {added}; this model's tokens are 0 to {added - 1}") as refused:
        ask(TokenIds([[5, added]], single=single))
    assert (refused.value.field, bool(refused.value.remedy)) == ("inputs[1]" if single else "inputs[0][1]", True)


@pytest.mark.parametrize(
    ("ids", "options", "field", "message"),
    [
        (TokenIds([[5, 10**6]], single=True), {}, "inputs[1]", "is 1000000; this model's tokens are 0 to"),
        (TokenIds([[5], [-1]], single=False), {}, "inputs[1][0]", "is -1; this model's tokens are 0 to"),
        (
            TokenIds([[5]], single=True),
            {"prompt_name": "query"},
            "inputs",
            "a prompt is put before the texts of this request",
        ),
        (TokenIds([[5] * 99], single=True), {"truncate": False}, "inputs", "has 101 tokens; this model takes 48"),
    ],
    ids=["too large", "negative", "a prompt", "too long"],
)
def test_token_ids_that_are_not_the_models_are_refused(
    ids: TokenIds, options: dict[str, Any], field: str, message: str, *, built: Build, tmp_path: Path
) -> None:
    model = built(NAME, BERT)
    sentence_model(model, tmp_path, "mean", normalize=True)
    with pytest.raises(InvalidInput, match=message) as refused:
        Built(BERT, tmp_path, model.model, model.tokenizer).task(NAME)(ids, **options)
    assert refused.value.field == field
