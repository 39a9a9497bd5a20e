"""Every refusal in the code that reads models, tokenizers and heads: its advice leads to a folder that opens, or to an
error about the next fault. A test compares the table with the code."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.errors import CorruptModel, ModelError, ModelNotFound, UnsafeModel, UnsupportedModel
from penstock.tasks import TaskName
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.tasks import make_task
from penstock_runtime.tokens import Tokenizer
from tests.runtime.http.serving import (
    write_folder,
    write_sparse_folder,
    write_three_outputs_folder,
    write_token_vectors_folder,
)
from tests.runtime.models.folders import (
    TOKENIZER,
    bare_folder,
    model_folder,
    sentence_folder,
    sharded_folder,
    write_json,
    write_onnx,
    write_onnx_with_weights,
)
from tests.runtime.models.test_refusals import REFUSALS, open_all

Change = Callable[[Path], object]
SOURCES = Path(__file__).parents[3] / "runtime" / "penstock_runtime"
TESTS = Path(__file__).parents[2]
MEAN = {"pooling_mode_mean_tokens": True}
MODULE = "sentence_transformers.models."


@dataclass(frozen=True)
class Advised:
    """A folder that is refused, words of the error and its advice, and what follows the advice."""

    error: str
    advice: str
    make: Change
    follow: Change
    use: Change = open_all
    then: Change | None = None
    """What is done after the advice was followed; None: the same as before."""


def chain(*changes: Change) -> Change:
    """One after the other."""

    def all_of(path: Path) -> None:
        for change in changes:
            change(path)

    return all_of


def put(name: str, content: str | bytes) -> Change:
    return lambda path: (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def drop(name: str) -> Change:
    return lambda path: (path / name).unlink()


def fields(name: str, **changes: Any) -> Change:
    """Change fields of a JSON object; None removes one."""

    def change(path: Path) -> None:
        old = json.loads((path / name).read_text()) if (path / name).is_file() else {}
        write_json(path / name, {key: value for key, value in {**old, **changes}.items() if value is not None})

    return change


def module(index: int, **changes: Any) -> Change:
    """Change a module; one is added at the end."""

    def change(path: Path) -> None:
        modules = json.loads((path / "modules.json").read_text())
        modules[index:] = [{**(modules[index] if index < len(modules) else {}), **changes}, *modules[index + 1 :]]
        write_json(path / "modules.json", modules)

    return change


def keep_modules(count: int) -> Change:
    def change(path: Path) -> None:
        write_json(path / "modules.json", json.loads((path / "modules.json").read_text())[:count])

    return change


def tensors(name: str, **shapes: tuple[int, ...]) -> Change:
    """A safetensors file of ones."""
    named = {key.replace("__", "."): np.ones(shape, np.float32) for key, shape in shapes.items()}

    def write(path: Path) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(named, path / name)

    return write


def without_tensor(name: str) -> Change:
    """Of GLiNER's head."""

    def change(path: Path) -> None:
        file = path / "gliner_head.safetensors"
        save_file({key: value for key, value in load_file(file).items() if name not in key}, file)

    return change


def as_task(name: TaskName, **options: Any) -> Change:
    return lambda path: make_task(name, ModelFolder.open(path, weights=False), **options)


def tokenise(path: Path) -> object:
    return Tokenizer.load(ModelFolder.open(path))


def of_task(name: TaskName) -> Change:
    return lambda path: write_folder(path, name)


def dense(path: Path) -> None:
    """Sentence-transformers' modules with a Dense."""
    sentence_folder(path, MEAN, "Dense")
    write_json(path / "2_Dense" / "config.json", {"in_features": 4, "out_features": 3, "bias": False})
    dense_weights(path)


dense_weights = tensors("2_Dense/model.safetensors", linear__weight=(3, 4))
FEATURES, SIMILARITY, RANKING = TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY, TaskName.TEXT_RANKING
ENTITIES, CLASSES, MASKS = TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION, TaskName.TEXT_CLASSIFICATION, TaskName.FILL_MASK
ZERO_SHOT, ANSWERS, TAGS = TaskName.ZERO_SHOT_CLASSIFICATION, TaskName.QUESTION_ANSWERING, TaskName.TOKEN_CLASSIFICATION
SENTENCES = "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
TOKENS = "tokenizer_config.json"
plain = model_folder


def sentence(path: Path) -> None:
    sentence_folder(path, MEAN)


def tagged(path: Path) -> None:
    """A vector for each token."""
    write_token_vectors_folder(path)


def nothing(path: Path) -> None:
    """The advice is about the endpoint's task."""


def tokenizer(**changes: Any) -> Change:
    return fields("tokenizer.json", **changes)


WORDS = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}
OUT_OF_ORDER = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "B", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {},
}
CASES = (
    # files and folders
    Advised("holds a JSON list", "Fetch", chain(plain, put("config.json", "[]")), bare_folder),
    Advised("config.json is empty", "Fetch", chain(plain, put("config.json", "")), bare_folder),
    Advised("is not a list of objects", "Fetch", chain(plain, put("modules.json", "{}")), drop("modules.json")),
    Advised("is not text in UTF-8", "remove the file", chain(plain, put("vocab.txt", b"\xff\0")), drop("vocab.txt")),
    Advised(
        "max_position_embeddings is 0", "Make it a number from 1", lambda path: plain(path, max_position_embeddings=0),
        fields("config.json", max_position_embeddings=64),
    ),
    Advised("holds no weights", "save_pretrained", bare_folder, plain),
    Advised("is not there", "Give the folder", lambda path: path.rmdir(), chain(lambda path: path.mkdir(), plain)),
    Advised("has no config.json", "save_pretrained", chain(plain, drop("config.json")), bare_folder),
    Advised(
        "has no tokenizer: neither", "add the tokenizer", chain(plain, drop("tokenizer.json")),
        put("tokenizer.json", TOKENIZER), tokenise,
    ),
    Advised(
        "keeps its transformer in the folder 0_Transformer", "puts it at the top",
        chain(
            lambda path: (path / "0_Transformer").mkdir(), lambda path: plain(path / "0_Transformer"),
            put("modules.json", "[]"),
        ),
        plain,
    ),
    Advised(
        "does not number its labels", "Give every output", lambda path: plain(path, id2label={"1": "a"}),
        fields("config.json", id2label={"0": "a"}),
    ),
    Advised(
        "num_labels is 0", "from 1 to", lambda path: plain(path, num_labels=0), fields("config.json", num_labels=1)
    ),
    Advised(
        "is not a whole ONNX model", "Fetch", chain(bare_folder, put("model.onnx", b"\x3a\x05he")),
        lambda path: write_onnx(path / "model.onnx"),
    ),
    Advised(
        "outside its folder or in a hidden one", "from a source you trust",
        chain(bare_folder, lambda path: write_onnx_with_weights(path / "model.onnx", "../weights")),
        lambda path: write_onnx(path / "model.onnx"),
    ),
    Advised(
        "leave no position for a token", "Fetch",
        lambda path: plain(path, model_type="xlm-roberta", pad_token_id=1, max_position_embeddings=2),
        fields("config.json", max_position_embeddings=64),
    ),
    Advised(
        "processing_kwargs is 'x', not an object", "Fetch", chain(plain, fields(SENTENCES, processing_kwargs="x")),
        drop(SENTENCES),
    ),
    Advised(
        "is_split_into_words", "Serve a model without it",
        chain(plain, fields(SENTENCES, processing_kwargs={"text": {"is_split_into_words": True}})), drop(SENTENCES),
    ),
    # safetensors
    Advised(
        "has no weight_map", "Fetch", chain(sharded_folder, put("model.safetensors.index.json", "{}")), sharded_folder
    ),
    Advised(
        "which is not a safetensors file of this folder", "from a source you trust",
        chain(sharded_folder, fields("model.safetensors.index.json", weight_map={"a": "../a.safetensors"})),
        sharded_folder,
    ),
    Advised("part 2 of 2", "Fetch", chain(sharded_folder, drop("model-00002-of-00002.safetensors")), sharded_folder),
    Advised(
        "lacks the tensor b.bias", "Fetch",
        chain(sharded_folder, tensors("model-00002-of-00002.safetensors", c=(1,))), sharded_folder,
    ),
    # modules of sentence-transformers
    Advised("an entry has no type or path", "Fetch", chain(sentence, module(1, type=3)), sentence),
    Advised("outside the folder or in a hidden one", "trust", chain(sentence, module(1, path="../x")), sentence),
    Advised(
        "code of the model's own", "sentence-transformers' own modules", chain(sentence, module(1, type="my.Pooling")),
        module(1, type=f"{MODULE}Pooling"),
    ),
    Advised(
        "pooling_mode is 3", "Fetch", lambda path: sentence_folder(path, {"pooling_mode": 3}),
        fields("1_Pooling/config.json", pooling_mode="mean"),
    ),
    Advised(
        "prompts is not a table", "Fetch", chain(sentence, fields(PROMPTS, prompts=[1])), fields(PROMPTS, prompts={})
    ),
    Advised(
        "default_prompt_name 'query' is not among", "Add it",
        chain(sentence, fields(PROMPTS, default_prompt_name="query")),
        fields(PROMPTS, prompts={"query": "query: "}),
    ),
    Advised(
        "asks for best pooling", "use a model with these", lambda path: sentence_folder(path, {"pooling_mode": "best"}),
        fields("1_Pooling/config.json", pooling_mode="mean"),
    ),
    Advised(
        "has 2 Pooling modules", "exactly one", chain(sentence, module(2, path="1_Pooling", type=f"{MODULE}Pooling")),
        keep_modules(2),
    ),
    Advised("lacks 1_Pooling/config.json", "Fetch", chain(sentence, drop("1_Pooling/config.json")), sentence),
    Advised(
        "a sparse model has a masked language model at the top", "SparseEncoder",
        chain(write_sparse_folder, module(0, type=f"{MODULE}Pooling")), module(0, type=f"{MODULE}MLMTransformer"),
        as_task(FEATURES),
    ),
    Advised(
        "pooling_strategy 'mean'", "max and sum",
        chain(write_sparse_folder,
        lambda path: write_json(path / "1_SpladePooling/config.json", {"pooling_strategy": "mean"})),
        fields("1_SpladePooling/config.json", pooling_strategy="max"), as_task(FEATURES),
    ),
    Advised(
        "of sparse vectors; dense ones are needed here", "Use a model with dense vectors",
        chain(sentence, module(2, path="", type=f"{MODULE}SparseAutoEncoder")), keep_modules(2),
    ),
    Advised("has no 2_Dense/model.safetensors", "Fetch", chain(dense, drop("2_Dense/model.safetensors")),
    dense_weights),
    Advised(
        "holds 2_Dense/pytorch_model.bin, which is a pickle", "which writes 2_Dense/model.safetensors",
        chain(dense, drop("2_Dense/model.safetensors"), put("2_Dense/pytorch_model.bin", b"\x80")), dense_weights,
    ),
    Advised(
        "has no out_features", "Fetch", chain(dense, fields("2_Dense/config.json", out_features=None)),
        fields("2_Dense/config.json", out_features=3),
    ),
    Advised(
        "activation_function is torch.nn.Mish", "use a model with one of them",
        chain(dense, fields("2_Dense/config.json", activation_function="torch.nn.Mish")),
        fields("2_Dense/config.json", activation_function="torch.nn.Tanh"),
    ),
    Advised(
        "only the pooled vector (sentence_embedding) is served", "follow the pooling",
        chain(dense, fields("2_Dense/config.json", module_input_name="token_embeddings")),
        fields("2_Dense/config.json", module_input_name="sentence_embedding"),
    ),
    Advised("lacks 2_Dense/config.json", "Fetch", chain(dense, drop("2_Dense/config.json")), dense),
    Advised(
        "linear.weight should have shape [3, 4]", "same revision",
        chain(dense, tensors("2_Dense/model.safetensors", linear__weight=(3, 5))), dense_weights,
    ),
    Advised(
        "a Dense takes 4 values, and gets 5", "same revision", chain(dense, fields("config.json", hidden_size=5)),
        fields("config.json", hidden_size=4), as_task(FEATURES),
    ),
    # a vector for each token
    Advised(
        "has a CNN module", "Served are Transformer, Dense",
        chain(tagged, module(2, path="2_CNN", type=f"{MODULE}CNN")),
        keep_modules(2), as_task(FEATURES),
    ),
    Advised(
        "query_prefix is 3, not a text", "Fetch", chain(tagged, fields(PROMPTS, query_prefix=3)),
        fields(PROMPTS, query_prefix="[Q]"), as_task(FEATURES),
    ),
    Advised(
        "a list of texts is 'x'", "Fetch", chain(tagged, fields(PROMPTS, skiplist_words="x")),
        fields(PROMPTS, skiplist_words=["x"]), as_task(FEATURES),
    ),
    Advised(
        "the projection of ColBERT", "Fetch", lambda path: plain(path, architectures=["HF_ColBERT"]),
        tensors("model.safetensors", linear__weight=(2, 4)), lambda path: ModelFolder.open(path).multi_vector,
    ),
    Advised(
        "not weight [out, in] and bias [out]", "#bge-m3",
        chain(write_three_outputs_folder, tensors("sparse_linear.safetensors", weight=(3,))),
        write_three_outputs_folder,
        as_task(FEATURES),
    ),
    Advised(
        "not one for the text", "task: feature-extraction", tagged, nothing, as_task(SIMILARITY), as_task(FEATURES)
    ),
    # GLiNER
    Advised(
        "span_mode is 'token_level'", "Use a GLiNER model with span_mode",
        chain(of_task(ENTITIES), fields("gliner_config.json", span_mode="token_level")),
        fields("gliner_config.json", span_mode="marker"), as_task(ENTITIES),
    ),
    Advised(
        "has no encoder_config", "Load and save the model once",
        chain(of_task(ENTITIES), fields("gliner_config.json", encoder_config=None)),
        of_task(ENTITIES), as_task(ENTITIES),
    ),
    Advised(
        "class_token_index is -1", "Fetch",
        chain(of_task(ENTITIES), fields("gliner_config.json", class_token_index=-1)),
        of_task(ENTITIES), as_task(ENTITIES),
    ),
    Advised(
        "has no tensor 'span_rep_layer", "Fetch", chain(of_task(ENTITIES), without_tensor("span_rep_layer")),
        of_task(ENTITIES), as_task(ENTITIES),
    ),
    Advised(
        "tensor 'prompt_rep_layer.0.weight' is missing", "same revision",
        chain(of_task(ENTITIES), without_tensor("prompt_rep_layer")), of_task(ENTITIES), as_task(ENTITIES),
    ),
    Advised(
        "has no token '<<SEP>>'", "same revision",
        chain(of_task(ENTITIES),
        lambda path: put("tokenizer.json", (path / "tokenizer.json").read_text().replace("<<SEP>>", "<<X>>"))(path)),
        of_task(ENTITIES), as_task(ENTITIES),
    ),
    Advised("is a GLiNER model", "task: zero-shot-token", of_task(ENTITIES), nothing, as_task(TAGS), as_task(ENTITIES)),
    # tokenizers
    Advised(
        "is not a tokenizer that tokenizers reads", "Fetch", chain(plain, put("tokenizer.json", '{"model": 3}')),
        put("tokenizer.json", TOKENIZER), tokenise,
    ),
    Advised(
        "written by a newer version of tokenizers", "save the tokenizer again",
        chain(plain, tokenizer(normalizer={"type": "FutureNormalizer"})), put("tokenizer.json", TOKENIZER), tokenise,
    ),
    Advised(
        "has tokens up to 1, and vocab_size", "Use the tokenizer of this model",
        chain(lambda path: plain(path, vocab_size=1), tokenizer(model=WORDS)), put("tokenizer.json", TOKENIZER),
        tokenise,
    ),
    Advised(
        "the tokens stated in", "Fetch", chain(plain, fields(TOKENS, added_tokens_decoder={"x": {"content": "a"}})),
        drop(TOKENS), tokenise,
    ),
    Advised(
        "makes no token of any of", "its vocabulary does not belong to its normaliser",
        chain(plain, tokenizer(model={**WORDS, "vocab": {"A": 0}}, normalizer={"type": "Lowercase"})),
        tokenizer(normalizer=None, model=WORDS), tokenise,
    ),
    Advised(
        "does not keep each text in one piece", "a usual template",
        chain(plain, tokenizer(model=WORDS, post_processor=OUT_OF_ORDER)), tokenizer(post_processor=None), tokenise,
    ),
    Advised(
        "has no tokenizer.json, and none can be made", "Write one with python",
        chain(plain, drop("tokenizer.json"), put("vocab.txt", "[UNK]\na\n"),
        fields(TOKENS, tokenizer_class="JumanppTokenizer")),
        put("tokenizer.json", TOKENIZER), tokenise,
    ),
    # tasks
    Advised(
        "has no head for token-classification", "It can do feature-extraction", of_task(CLASSES), nothing,
        as_task(TAGS), as_task(FEATURES),
    ),
    Advised(
        "has no mask token", "State it as mask_token",
        chain(of_task(MASKS), fields(TOKENS, mask_token=None),
        lambda path: put("tokenizer.json", (path / "tokenizer.json").read_text().replace("[MASK]", "[GAP]"))(path)),
        fields(TOKENS, mask_token="[GAP]"), as_task(MASKS),
    ),
    Advised(
        "3 labels; a ranking model has one", "Use the task text-classification",
        of_task(CLASSES), nothing, as_task(RANKING), as_task(CLASSES),
    ),
    Advised(
        "that does not rank by the tokens yes and no", "cross-encoder with one label",
        chain(of_task(RANKING), fields("config.json", architectures=["Qwen3ForCausalLM"])), of_task(RANKING),
        as_task(RANKING),
    ),
    Advised(
        "has no entailment label", "whose id2label names",
        chain(of_task(ZERO_SHOT), fields("config.json", id2label={"0": "a", "1": "b"})),
        fields("config.json", id2label={"0": "contradiction", "1": "entailment"}), as_task(ZERO_SHOT),
    ),
    Advised(
        "reads the context before the question", "BERT or RoBERTa",
        chain(of_task(ANSWERS), fields(TOKENS, padding_side="left")),
        of_task(ANSWERS), as_task(ANSWERS),
    ),
    Advised(
        "is no GLiNER model", "the task token-classification", of_task(TAGS), nothing, as_task(ENTITIES), as_task(TAGS),
    ),
    Advised(
        "leave no room besides the 2 special tokens", "model_max_length",
        chain(of_task(FEATURES), fields(TOKENS, model_max_length=2)),
        fields(TOKENS, model_max_length=64), as_task(FEATURES),
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.error for case in CASES])
def test_the_advice_leads_to_a_model_that_opens(case: Advised, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    case.make(path)

    with pytest.raises(ModelError) as caught:
        case.use(path)
    case.follow(path)

    assert case.error in caught.value.message
    assert case.advice in caught.value.remedy
    (case.then or case.use)(path)


READERS = ("files", "folder", "gliner", "graph", "limits", "multi_vector", "safetensors", "sentence", "vector_modules")
ERRORS = {one.__name__ for one in (CorruptModel, ModelNotFound, UnsafeModel, UnsupportedModel)}
ELSEWHERE = {
    "{path} {problem}": "runtime/models/test_folder.py",
    "{error.filename or path}": "runtime/models/test_folder.py",
    "holds {ggufs[0]} and no safetensors": "runtime/models/test_gguf.py",
    "which is not a floating-point weight": "optimizer/export/test_refusals.py",
    "has no vectors of tokens": "optimizer/export/test_multi_vectors.py",
    "leave no room besides the {template.specials} of the prompt": "optimizer/export/families/test_qwen3_reranker.py",
    "has no {role}, which its tokenizer_config.json adds": "runtime/tokens/test_specials.py",
    "no tokenizer can be made of": "runtime/tokens/test_convert.py",
    "{self.path / name} is not text in UTF-8": "runtime/tokens/test_convert.py",
    "is not a model of sentencepiece": "runtime/tokens/test_convert.py",
    "splits words or characters": "runtime/tokens/test_convert.py",
}
"""Messages of refusals to the files with their tests: of faults of the disk, of other formats, and of heads."""


def messages() -> Iterator[tuple[str, str]]:
    """Each message in the code, and a pattern of its texts."""
    for file in [
        *(SOURCES / "models" / f"{name}.py" for name in READERS),
        *SOURCES.glob("to*/*.py"),
        *SOURCES.glob("ta*/**/*.py"),
    ]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
                parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else [node.args[0]]
                texts = [re.escape(str(one.value)) if isinstance(one, ast.Constant) else ".*" for one in parts]
                yield ast.unparse(node.args[0]), "".join(texts)


def test_every_refusal_in_the_code_has_a_case(tmp_path: Path) -> None:
    found: list[str] = []
    for index, (make, use) in enumerate(
        [*((case.make, case.use) for case in CASES), *((one.make, open_all) for one in REFUSALS)]
    ):
        path = tmp_path / str(index) / "model"
        path.mkdir(parents=True)
        make(path)
        with pytest.raises(ModelError) as caught:
            use(path)
        found.append(caught.value.message)

    missing = [
        source
        for source, pattern in messages()
        if not any(words in source for words in ELSEWHERE)
        and not any(re.fullmatch(pattern, message, flags=re.DOTALL) for message in found)
    ]
    assert missing == []
    sources = [source for source, _ in messages()]
    assert [words for words in ELSEWHERE if not any(words in source for source in sources)] == []
    assert all((TESTS / file).is_file() for file in ELSEWHERE.values())
