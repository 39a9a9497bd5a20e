"""Modules of sentence-transformers besides one pooling and Normalize: the vectors are those of that library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers
import torch
from safetensors.numpy import load_file, save_file
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer import modules

from penstock.errors import CorruptModel, UnsafeModel, UnsupportedModel
from penstock.tasks import TaskName
from penstock_runtime.models.folder import ModelFolder
from tests.runtime.tasks.conftest import Build
from tests.runtime.tasks.families import BERT, MPNET, ROBERTA, Built, Family
from tests.runtime.tasks.texts import HARD, LONG, MORE

NAME = TaskName.FEATURE_EXTRACTION
SIMILARITY = TaskName.SENTENCE_SIMILARITY
TEXTS = [*list(HARD.values())[:5], *MORE[:2], LONG]
PROMPTS = {"query": "Represent this query: ", "passage": "passage: "}
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("judge")]


def sentence_model(built: Built, path: Path, make: Any, **options: Any) -> sentence_transformers.SentenceTransformer:
    """sentence-transformers with the modules that `make` gives for a width, saved to `path` and loaded from there."""
    torch.manual_seed(7)
    transformer = modules.Transformer(str(built.path))
    steps = [transformer, *make(transformer.get_word_embedding_dimension())]
    whole = sentence_transformers.SentenceTransformer(modules=steps, device="cpu", prompts=PROMPTS, **options)
    whole.save(str(path))
    return sentence_transformers.SentenceTransformer(str(path), device="cpu")


def assert_same(built: Built, path: Path, judge: sentence_transformers.SentenceTransformer) -> None:
    ours = Built(built.family, path, built.model, built.tokenizer)
    ask, alike = ours.task(NAME), ours.task(SIMILARITY)
    vectors = judge.encode(TEXTS, batch_size=1)
    np.testing.assert_allclose(ask(TEXTS), vectors, atol=1e-5)
    np.testing.assert_allclose(ask(TEXTS[0]), vectors[:1], atol=1e-5)
    prompted = judge.encode(TEXTS, batch_size=1, prompt_name="query")
    np.testing.assert_allclose(ask(TEXTS, prompt_name="query"), prompted, atol=1e-5)
    normalised = judge.encode(TEXTS, batch_size=1, normalize_embeddings=True)
    np.testing.assert_allclose(ask(TEXTS, normalize=True), normalised, atol=1e-5)
    shortened = judge.encode(TEXTS, batch_size=1, truncate_dim=5, normalize_embeddings=True)
    np.testing.assert_allclose(ask(TEXTS, dimensions=5, normalize=True), shortened, atol=1e-5)
    found = alike({"source_sentence": TEXTS[0], "sentences": TEXTS[1:3]})
    np.testing.assert_allclose(found, judge.similarity(vectors[:1], vectors[1:3])[0], atol=1e-5)


POOLINGS = ["mean_sqrt_len_tokens", "weightedmean", ("cls", "mean"), ("max", "mean_sqrt_len_tokens", "lasttoken")]


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("pooling", [*POOLINGS, "cls", "mean", "max"], ids=str)
def test_poolings(pooling: Any, include_prompt: bool, built: Build, tmp_path: Path) -> None:
    model = built(NAME, BERT)
    judge = sentence_model(
        model, tmp_path, lambda width: [modules.Pooling(width, pooling_mode=pooling, include_prompt=include_prompt)]
    )
    assert_same(model, tmp_path, judge)


@pytest.mark.parametrize("family", [ROBERTA, MPNET], ids=lambda family: family.name)
def test_prompts_are_counted_with_the_special_tokens_of_the_family(
    family: Family, built: Build, tmp_path: Path
) -> None:
    model = built(NAME, family)
    judge = sentence_model(model, tmp_path, lambda width: [modules.Pooling(width, include_prompt=False)])
    assert_same(model, tmp_path, judge)


def dense(width: int) -> list[Any]:
    return [modules.Pooling(width), Dense(width, 24)]


def dense_with(activation: Any) -> Any:
    return lambda width: [modules.Pooling(width), Dense(width, 24, activation_function=activation())]


CHAINS = {
    "dense": dense,
    "dense and normalize": lambda width: [*dense(width), modules.Normalize()],
    "two without bias": lambda width: [
        modules.Pooling(width),
        Dense(width, 4 * width, bias=False, activation_function=torch.nn.Identity()),
        Dense(4 * width, width, bias=False, activation_function=torch.nn.Identity()),
        modules.Normalize(),
    ],
    "layer norm": lambda width: [modules.Pooling(width, pooling_mode="cls"), modules.LayerNorm(width)],
    "normalize before dense": lambda width: [modules.Pooling(width), modules.Normalize(), Dense(width, 24)],
    "of joined poolings": lambda width: [
        modules.Pooling(width, pooling_mode=("mean", "max")),
        Dense(2 * width, width),
        modules.LayerNorm(width),
        modules.Normalize(),
    ],
    **{
        f"dense with {kind.__name__}": dense_with(kind)
        for kind in (torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU, torch.nn.Sigmoid)
    },
}


@pytest.mark.parametrize("chain", CHAINS)
def test_modules_after_the_pooling(chain: str, built: Build, tmp_path: Path) -> None:
    model = built(NAME, BERT)
    assert_same(model, tmp_path, sentence_model(model, tmp_path, CHAINS[chain]))


@pytest.mark.parametrize("kind", [np.float16, "bfloat16"])
def test_weights_of_half_precision(kind: Any, built: Build, tmp_path: Path) -> None:
    model = built(NAME, BERT)
    sentence_model(model, tmp_path, dense)
    file = tmp_path / "2_Dense" / "model.safetensors"
    if kind == "bfloat16":
        from safetensors.torch import load_file as load
        from safetensors.torch import save_file as save

        save({name: array.bfloat16() for name, array in load(file).items()}, file)
    else:
        save_file({name: array.astype(kind) for name, array in load_file(file).items()}, file)
    assert_same(model, tmp_path, sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu"))


def test_the_width_of_dimensions_is_that_of_the_last_module(built: Build, tmp_path: Path) -> None:
    model = built(NAME, BERT)
    sentence_model(model, tmp_path, dense)
    ask = Built(BERT, tmp_path, model.model, model.tokenizer).task(NAME)

    assert np.shape(ask(MORE[0], dimensions=24)) == (1, 24)
    with pytest.raises(Exception, match=r"parameters\.dimensions is 25; this model's vectors have 24"):
        ask(MORE[0], dimensions=25)


def test_another_pooling_has_no_modules(built: Build, tmp_path: Path) -> None:
    model = built(NAME, BERT)
    sentence_model(model, tmp_path, dense)
    ask, plain = (Built(BERT, path, model.model, model.tokenizer).task(NAME) for path in (tmp_path, model.path))

    np.testing.assert_allclose(ask(MORE[0], pooling="cls"), plain(MORE[0], pooling="cls"), atol=1e-6)


def test_answers_do_not_depend_on_the_other_texts(built: Build, tmp_path: Path) -> None:
    model = built(NAME, BERT)
    sentence_model(model, tmp_path, CHAINS["two without bias"])
    ask = Built(BERT, tmp_path, model.model, model.tokenizer).task(NAME)

    assert [one.tolist() for one in ask(list(MORE))] == [ask(text)[0].tolist() for text in MORE]


class TestRefused:
    """Errors name the file and what is true of it."""

    @pytest.fixture
    def folder(self, built: Build, tmp_path: Path) -> Path:
        sentence_model(built(NAME, BERT), tmp_path, dense)
        return tmp_path

    def modules_of(self, path: Path) -> Any:
        return ModelFolder.open(path).vector_modules

    def test_the_weights_are_among_the_files_of_the_model(self, folder: Path) -> None:
        found = ModelFolder.open(folder)

        assert folder / "2_Dense" / "model.safetensors" in found.settings
        before = found.digest()
        file = folder / "2_Dense" / "model.safetensors"
        save_file({name: array + 1 for name, array in load_file(file).items()}, file)
        assert ModelFolder.open(folder).digest() != before

    def test_pickled_weights(self, folder: Path) -> None:
        file = folder / "2_Dense" / "model.safetensors"
        file.rename(file.with_name("pytorch_model.bin"))

        with pytest.raises(UnsafeModel, match=r"holds 2_Dense/pytorch_model\.bin, which is a pickle"):
            self.modules_of(folder)

    def test_missing_weights(self, folder: Path) -> None:
        (folder / "2_Dense" / "model.safetensors").unlink()

        with pytest.raises(CorruptModel, match=r"has no 2_Dense/model\.safetensors"):
            self.modules_of(folder)

    def test_a_link_out_of_the_folder(self, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        file = folder / "2_Dense" / "model.safetensors"
        file.rename(outside := tmp_path_factory.mktemp("outside") / "weights")
        file.symlink_to(outside)

        with pytest.raises(UnsafeModel, match="outside the model's folder"):
            self.modules_of(folder)

    @pytest.mark.parametrize(
        ("field", "value", "error", "message"),
        [
            ("out_features", 25, CorruptModel, r"linear\.weight should have shape \[25, 32\] by"),
            ("in_features", None, CorruptModel, "has no in_features"),
            ("in_features", -1, CorruptModel, "in_features is -1"),
            ("module_input_name", "token_embeddings", UnsupportedModel, "only the pooled vector"),
            ("activation_function", "torch.nn.modules.activation.Softplus", UnsupportedModel, "Softplus"),
        ],
    )
    def test_settings(self, field: str, value: Any, error: type[Exception], message: str, folder: Path) -> None:
        file = folder / "2_Dense" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_bytes()), field: value}))

        with pytest.raises(error, match=message):
            self.modules_of(folder)

    def test_an_activation_of_other_code_is_replaced_as_sentence_transformers_does(
        self, folder: Path, built: Build
    ) -> None:
        file = folder / "2_Dense" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_bytes()), "activation_function": "os.getcwd"}))

        judge = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
        assert_same(built(NAME, BERT), folder, judge)

    def test_widths_that_do_not_fit(self, folder: Path, built: Build) -> None:
        file = folder / "1_Pooling" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_bytes()), "pooling_mode": ["mean", "max"]}))
        model = built(NAME, BERT)

        with pytest.raises(CorruptModel, match=r"a Dense takes \d+ values, and gets \d+"):
            Built(BERT, folder, model.model, model.tokenizer).task(NAME)
