"""Requests of the tasks: tables of refusals, and fuzzing by the published schemas."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import schemathesis
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.tasks import Prepared, RequestLimits, Task, request_schema, response_schema
from tests.examples import examples
from tests.runtime.tasks.conftest import Build
from tests.runtime.tasks.families import BERT, SMALL, Built, Runner
from tests.tasks import COMMON_TASKS

EVERY = list(COMMON_TASKS)
FEATURES = TaskName.FEATURE_EXTRACTION
SIMILARITY = TaskName.SENTENCE_SIMILARITY
RANKING = TaskName.TEXT_RANKING
CLASSES = TaskName.TEXT_CLASSIFICATION
TOKENS = TaskName.TOKEN_CLASSIFICATION
ANSWERS = TaskName.QUESTION_ANSWERING
MASKS = TaskName.FILL_MASK
ZERO_SHOT = TaskName.ZERO_SHOT_CLASSIFICATION
FUZZ = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)

GOOD: dict[TaskName, tuple[Any, dict[str, Any]]] = {
    FEATURES: ("a text", {}),
    SIMILARITY: ({"source_sentence": "a", "sentences": ["b"]}, {}),
    RANKING: ({"query": "a", "texts": ["b"]}, {}),
    CLASSES: ("a text", {}),
    TOKENS: ("a text", {}),
    ANSWERS: ({"question": "a", "context": "b"}, {}),
    MASKS: ("a [MASK]", {}),
    ZERO_SHOT: ("a text", {"candidate_labels": ["b"]}),
}


def ask(name: TaskName, built: Build, **options: Any) -> Runner:
    return built(name, BERT).task(name, limits=SMALL, **options)


@pytest.mark.parametrize(
    ("name", "inputs", "field", "message"),
    [
        (FEATURES, None, "inputs", "inputs must be a text or a list of texts, not null"),
        (FEATURES, 3, "inputs", "must be a text or a list of texts, not the number 3"),
        (FEATURES, True, "inputs", "not true"),
        (FEATURES, math.nan, "inputs", "not the number nan"),
        pytest.param(FEATURES, 10**5000, "inputs", "not a very large number", id="huge"),
        (FEATURES, {"text": "a"}, "inputs", "not an object"),
        (FEATURES, "", "inputs", "inputs is empty"),
        (FEATURES, [], "inputs", "inputs is empty"),
        (FEATURES, ["a", ""], "inputs[1]", r"inputs\[1\] is empty"),
        (FEATURES, ["a", None], "inputs[1]", r"inputs\[1\] must be a text, not null"),
        (FEATURES, ["a", ["b"]], "inputs[1]", "not a list"),
        (FEATURES, ["a"] * 65, "inputs", "has 65 entries; at most 64"),
        (FEATURES, "half \ud83d a pair", "inputs", "half a surrogate pair at character 5"),
        (FEATURES, ["a", "\udc00"], "inputs[1]", "half a surrogate pair at character 0"),
        (SIMILARITY, "a", "inputs", "must be an object with source_sentence and sentences, not a text"),
        (SIMILARITY, {}, "inputs.source_sentence", "inputs.source_sentence is missing"),
        (SIMILARITY, {"source_sentence": "a"}, "inputs.sentences", "inputs.sentences is missing"),
        (SIMILARITY, {"source_sentence": "a", "sentences": "b"}, "inputs.sentences", "must be a list of texts"),
        (SIMILARITY, {"source_sentence": "a", "sentences": []}, "inputs.sentences", "is empty"),
        (SIMILARITY, {"source_sentence": "a", "sentences": [1]}, "inputs.sentences[0]", "not the number 1"),
        (SIMILARITY, {"source_sentence": "a", "sentence": ["b"]}, "inputs.sentence", "there is no such field"),
        (RANKING, "a", "inputs", "an object with query and texts or a list of pairs, not a text"),
        (RANKING, {"query": "a", "documents": ["b"]}, "inputs.documents", "there is no such field"),
        (RANKING, {"query": "a", "texts": ["b", ""]}, "inputs.texts[1]", "is empty"),
        (RANKING, ["a", "b"], "inputs[0]", r"inputs\[0\] must be a list of two texts, not a text"),
        (RANKING, [["a"]], "inputs[0]", r"inputs\[0\] has 1 entries"),
        (RANKING, [["a", "b", "c"]], "inputs[0]", "has 3 entries; at most 2"),
        (CLASSES, [7], "inputs[0]", "or of two that are a pair, not the number 7"),
        (CLASSES, [["a", "b", "c"]], "inputs[0]", "has 3 entries; at most 2"),
        (CLASSES, {"text_pair": "a"}, "inputs.text", "is missing"),
        (CLASSES, {"text": "a", "text-pair": "b"}, "inputs.text-pair", "no such field"),
        (CLASSES, [{"text": "a"}, {"text": ""}], "inputs[1].text", "is empty"),
        (TOKENS, ["a", {}], "inputs[1]", "must be a text, not an object"),
        (ANSWERS, {"question": "a"}, "inputs.context", "is missing"),
        (ANSWERS, {"question": "", "context": "b"}, "inputs.question", "is empty"),
        (ANSWERS, {"question": ["a"], "context": "b"}, "inputs.question", "not a list"),
        (ANSWERS, [{"question": "a", "context": "b"}, 1], "inputs[1]", "not the number 1"),
        (MASKS, [], "inputs", "is empty"),
        (ZERO_SHOT, {}, "inputs", "must be a text or a list of texts, not an object"),
    ],
)
def test_wrong_inputs_are_named(name: TaskName, inputs: Any, field: str, message: str, built: Build) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        ask(name, built)(inputs, **GOOD[name][1])
    assert refused.value.field == field
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("name", "parameter", "value", "message", "remedy"),
    [
        (FEATURES, "normalise", True, "there is no such field", "Did you mean 'normalize'?"),
        (FEATURES, "truncate", "yes", "must be true or false, not a text", ""),
        (FEATURES, "truncate", 1, "must be true or false, not the number 1", ""),
        (FEATURES, "truncation_direction", "up", "must be one of left, right, not 'up'", "Known here: left, right"),
        (FEATURES, "truncation_direction", "rihgt", "not 'rihgt'", "Did you mean 'right'?"),
        (FEATURES, "dimensions", 0, "a whole number from 1 to 65536, not the number 0", ""),
        (FEATURES, "dimensions", 2.5, "not the number 2.5", ""),
        (FEATURES, "dimensions", math.inf, "not the number inf", ""),
        (FEATURES, "dimensions", math.nan, "not the number nan", ""),
        (FEATURES, "dimensions", True, "not true", ""),
        (FEATURES, "dimensions", "3", "not a text", ""),
        (FEATURES, "prompt_name", "query", "there is no prompt 'query'", "this endpoint has no prompts"),
        (FEATURES, "prompt_name", "", "is empty", ""),
        (FEATURES, "\ud800", 1, "there is no such field", ""),
        (FEATURES, "x" * 1000, 1, "there is no such field", ""),
        (CLASSES, "top_k", -1, "a whole number from 1", ""),
        (CLASSES, "function_to_apply", "softmaxx", "must be one of sigmoid, softmax, none", "Did you mean 'softmax'?"),
        (CLASSES, "return_all_scores", True, "there is no such field", "raw_scores"),
        (RANKING, "raw_scores", None, None, ""),
        (RANKING, "return_documents", True, "there is no such field", ""),
        (TOKENS, "aggregation_strategy", "avarage", "must be one of", "Did you mean 'average'?"),
        (TOKENS, "ignore_labels", "O", "must be a list of labels, not a text", ""),
        (TOKENS, "ignore_labels", [1], "must be a label, not the number 1", ""),
        (TOKENS, "stride", 3, "aggregation_strategy is none", "simple, first, average or max"),
        (ANSWERS, "topk", 3, "there is no such field", "Did you mean 'top_k'?"),
        (ANSWERS, "top_k", 0, "a whole number from 1 to 1000", ""),
        (ANSWERS, "max_answer_len", -3, "a whole number from 1", ""),
        (ANSWERS, "max_seq_len", 7, "a whole number from 8", ""),
        (MASKS, "targets", {}, "must be a text or a list of texts, not an object", ""),
        (ZERO_SHOT, "candidate_labels", 3, "must be a list of texts or a text of labels", ""),
        (ZERO_SHOT, "candidate_labels", [], "is empty", ""),
        (ZERO_SHOT, "multi_class", True, "there is no such field", "Did you mean 'multi_label'?"),
    ],
)
def test_wrong_parameters_are_named(
    name: TaskName, parameter: str, value: Any, message: str | None, remedy: str, *, built: Build
) -> None:
    inputs, required = GOOD[name]
    runner = ask(name, built)
    if message is None:
        assert runner(inputs, **required, **{parameter: value}) == runner(inputs, **required)
        return
    with pytest.raises(InvalidInput, match=message) as refused:
        runner(inputs, **(required | {parameter: value}))
    assert refused.value.field.startswith("parameters.")
    assert remedy in refused.value.remedy
    json.dumps(vars(refused.value), ensure_ascii=False).encode()  # can be sent
    assert len(refused.value.message) < 300


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("parameters", [[], "top_k", 3, True])
def test_parameters_are_an_object(name: TaskName, parameters: Any, built: Build) -> None:
    with pytest.raises(InvalidInput, match="parameters must be an object"):
        ask(name, built).task.parse(GOOD[name][0], parameters)


def test_the_labels_of_zero_shot_are_required(built: Build) -> None:
    with pytest.raises(InvalidInput, match=r"parameters\.candidate_labels is missing"):
        ask(ZERO_SHOT, built)("a text")


@pytest.mark.parametrize("name", [name for name in EVERY if name is not ANSWERS])
def test_texts_that_are_too_long_are_refused_if_truncation_is_off(name: TaskName, built: Build) -> None:
    long = "one two three four five " * 2000
    inputs = {
        SIMILARITY: {"source_sentence": "a", "sentences": ["b", long]},
        RANKING: {"query": "a", "texts": ["b", long]},
        MASKS: f"[MASK] {long}",
    }.get(name, long)
    parameters = GOOD[name][1]
    where = {SIMILARITY: "inputs.sentences[1]", RANKING: "inputs.texts[1]"}.get(name, "inputs")
    for runner, options in ((ask(name, built, truncate=False), {}), (ask(name, built), {"truncate": False})):
        with pytest.raises(InvalidInput, match=r"has (more than )?[0-9]+ tokens; this model takes 48") as refused:
            runner(inputs, **parameters, **options)
        assert refused.value.field == where
        assert ("with its pair has" in refused.value.message) == (name in {RANKING, ZERO_SHOT})
        assert "truncate" in refused.value.remedy
    assert ask(name, built, truncate=False)(inputs, **parameters, truncate=True) is not None


def without_special_tokens(model: Built, path: Path) -> Built:
    """The same, whose tokenizer puts nothing around a text, in the folder `path`."""
    shutil.copytree(model.path, path, dirs_exist_ok=True)
    for file, change in (
        ("tokenizer.json", {"post_processor": None}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        (path / file).write_text(json.dumps(json.loads((path / file).read_bytes()) | change))
    return Built(model.family, path, model.model, transformers.AutoTokenizer.from_pretrained(path))


@pytest.mark.parametrize(
    ("name", "inputs", "field"),
    [
        (FEATURES, " ", "inputs"),
        (FEATURES, ["a", "\u200b"], "inputs[1]"),
        (SIMILARITY, {"source_sentence": "a", "sentences": ["b", "\t"]}, "inputs.sentences[1]"),
        (RANKING, {"query": "\t", "texts": ["b", " "]}, "inputs.texts[1]"),
        (CLASSES, ["a", " "], "inputs[1]"),
        (CLASSES, [{"text": " ", "text_pair": "b"}, {"text": " ", "text_pair": "\u200b"}], "inputs[1]"),
        (ANSWERS, [{"question": " ", "context": "b"}, {"question": " ", "context": " "}], "inputs[1].context"),
        (MASKS, ["a [MASK]", " "], "inputs[1]"),
    ],
)
def test_a_text_without_tokens_is_refused_with_its_field(
    name: TaskName, inputs: Any, field: str, built: Build, tmp_path: Path
) -> None:
    runner = without_special_tokens(built(name, BERT), tmp_path).task(name, limits=SMALL)

    with pytest.raises(InvalidInput, match="has no tokens") as refused:
        runner(inputs)
    assert refused.value.field == field
    assert runner(GOOD[name][0]) is not None
    # Special tokens are something to look at.
    assert name is MASKS or ask(name, built)(inputs) is not None


def test_a_text_without_tokens_needs_a_hypothesis_with_tokens(built: Build, tmp_path: Path) -> None:
    runner = without_special_tokens(built(ZERO_SHOT, BERT), tmp_path).task(ZERO_SHOT)

    assert runner(" ", candidate_labels=["b"])["labels"] == ["b"]
    with pytest.raises(InvalidInput, match="has no tokens") as refused:
        runner(["a", " "], candidate_labels=["\u200b"], hypothesis_template="{}")
    assert refused.value.field == "inputs[1]"


def test_a_text_without_tokens_has_no_entities(built: Build, tmp_path: Path) -> None:
    model = without_special_tokens(built(TOKENS, BERT), tmp_path)
    texts = [" ", "one two", "\u200b"]

    first, second, third = model.task(TOKENS)(texts, ignore_labels=[])

    assert (first, third) == ([], [])
    assert second == model.task(TOKENS)("one two", ignore_labels=[])
    assert [[entity["word"] for entity in one] for one in (first, second, third)] == [
        [entity["word"] for entity in one] for one in model.pipeline(TOKENS)(texts, ignore_labels=[])
    ]


def test_a_context_without_tokens_has_the_empty_answer(built: Build, tmp_path: Path) -> None:
    inputs = {"question": "who", "context": " \t"}
    runner = without_special_tokens(built(ANSWERS, BERT), tmp_path).task(ANSWERS)

    assert runner(inputs) == ask(ANSWERS, built)(inputs) == {"score": 0.0, "start": 0, "end": 0, "answer": ""}


@pytest.mark.parametrize(
    ("name", "inputs", "field"),
    [
        (FEATURES, ["a", "a <brand>"], "inputs[1]"),
        (SIMILARITY, {"source_sentence": "a", "sentences": ["b", "<brand>"]}, "inputs.sentences[1]"),
        (RANKING, {"query": "a", "texts": ["b", "<brand>"]}, "inputs.texts[1]"),
        (CLASSES, ["a", "a <brand>"], "inputs[1]"),
        (CLASSES, [{"text": "a", "text_pair": "b"}, {"text": "a", "text_pair": "<brand>"}], "inputs[1]"),
        (TOKENS, ["a", "a <brand>"], "inputs[1]"),
        (ANSWERS, [{"question": "a", "context": "b"}, {"question": "a <brand>", "context": "b"}], "inputs[1].question"),
        (ANSWERS, {"question": "a", "context": "b " * 90 + "<brand>"}, "inputs.context"),
        (MASKS, ["a [MASK]", "<brand> [MASK]"], "inputs[1]"),
        (ZERO_SHOT, ["a", "a <brand>"], "inputs[1]"),
    ],
)
def test_a_token_without_a_vector_is_refused_in_the_text_that_has_it(
    name: TaskName, inputs: Any, field: str, built: Build, tmp_path: Path
) -> None:
    model = built(name, BERT)
    size, tokenizer = len(model.tokenizer), copy.deepcopy(model.tokenizer)
    tokenizer.add_tokens(["<brand>"])
    model.model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ask = Built(BERT, tmp_path, model.model, tokenizer).task(name)
    parameters = GOOD[name][1]

    with pytest.raises(InvalidInput, match=f" has '<brand>', which is token {size} .* 0 to {size - 1}") as refused:
        ask(inputs, **parameters)

    assert refused.value.field == field
    assert refused.value.message.startswith(field)
    assert "resize_token_embeddings" in refused.value.remedy
    if name is ZERO_SHOT:
        with pytest.raises(InvalidInput, match="hypothesis of the label 'c <brand>' has '<brand>'") as refused:
            ask("a", candidate_labels=["b", "c <brand>"])
        assert refused.value.field == "parameters.candidate_labels"
    if name is not ANSWERS:  # which looks at all of a context
        mask_first = json.dumps(inputs).replace("<brand> [MASK]", "[MASK] <brand>")
        cut_away = json.loads(mask_first.replace("<brand>", "b " * 90 + "<brand>"))
        assert ask(cut_away, **parameters, truncate=True) is not None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(), max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)


def parameter_names(name: TaskName) -> list[str]:
    return list(request_schema(name)["properties"]["parameters"]["properties"])


def attempt(task: Task, inputs: Any, parameters: Any) -> Prepared | InvalidInput:
    """The outcome of a request before any model runs; every other exception fails the test."""
    try:
        return task.prepare(task.parse(inputs, parameters))
    except InvalidInput as refused:
        return refused


@pytest.mark.parametrize("name", EVERY)
@FUZZ
@given(data=st.data())
def test_any_request_is_answered_or_refused(name: TaskName, built: Build, data: st.DataObject) -> None:
    task = ask(name, built).task
    good, required = GOOD[name]
    likely = JSON | st.just(good) | st.lists(JSON | st.just(good), max_size=3)
    if isinstance(good, dict):
        likely |= st.fixed_dictionaries({}, optional=dict.fromkeys(good, JSON))
    inputs = data.draw(likely)
    parameters = data.draw(JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(parameter_names(name), JSON)))
    if isinstance(parameters, dict):
        parameters = data.draw(st.sampled_from([required, {}])) | parameters
    outcome = attempt(task, inputs, parameters)
    if isinstance(outcome, Prepared):
        assert all(0 < row.length <= 48 for row in outcome.rows)
    else:
        assert outcome.field.startswith(("inputs", "parameters"))
        assert outcome.message
        assert outcome.remedy
        assert (outcome.message + outcome.field + outcome.remedy).encode()


DOCUMENTED = (
    "there is no prompt",
    "raw_scores and function_to_apply both",
    "this model's vectors have",
    "is for pooled vectors",
    "needs entities to merge",
    "windows of this model have",
    "over the limit of",
    "this model takes",
    "leaves no room",
    "a window has",
    "has no mask",
    "in this model's vocabulary",
    "tokens; this model takes",
    "this model gives dense vectors",
    "it has one kind of vectors",
    "for a query with texts",
)
"""What a request may be refused for although it fits the schema. docs/reference/tasks.md lists these reasons."""


def bodies(schema: dict[str, Any]) -> Any:
    """Request bodies of this schema, as schemathesis makes them."""
    content = {"application/json": {"schema": schema}}
    post = {"requestBody": {"required": True, "content": content}, "responses": {"200": {"description": "answer"}}}
    document = {"openapi": "3.1.0", "info": {"title": "t", "version": "1"}, "paths": {"/predict": {"post": post}}}
    return schemathesis.openapi.from_dict(document)["/predict"]["POST"].as_strategy().map(lambda case: case.body)


@pytest.mark.parametrize("name", EVERY)
@FUZZ
@given(data=st.data())
def test_a_request_that_matches_the_schema_gets_an_answer_that_matches_its_schema(
    name: TaskName, built: Build, data: st.DataObject
) -> None:
    limits = RequestLimits(items=4, rows=64)
    body: Any = data.draw(bodies(request_schema(name, limits)))
    if name is MASKS and isinstance(body["inputs"], str):
        body["inputs"] += "[MASK]"
    runner = built(name, BERT).task(name, limits=limits)
    prepared = attempt(runner.task, body["inputs"], body.get("parameters"))
    if isinstance(prepared, InvalidInput):
        assert any(reason in prepared.message for reason in DOCUMENTED), prepared.message
        return
    reduced = [runner.task.reduce(row, runner.built.forward(row)) for row in prepared.rows]
    answer = runner.task.assemble(prepared, reduced)
    plain = json.loads(json.dumps(answer, default=lambda array: array.tolist()))
    jsonschema_rs.validate(response_schema(name), plain)


@pytest.mark.parametrize("name", EVERY)
def test_the_examples_fit_the_schema_and_are_answered(name: TaskName, built: Build) -> None:
    schema = request_schema(name)
    assert jsonschema_rs.meta.is_valid(schema)
    assert jsonschema_rs.meta.is_valid(response_schema(name))
    runner = ask(name, built)
    for example in schema["examples"]:
        assert jsonschema_rs.is_valid(schema, example)
        parameters = example.get("parameters", {})
        answer = runner(example["inputs"], **parameters)
        plain = json.loads(json.dumps(answer, default=lambda array: array.tolist()))
        jsonschema_rs.validate(response_schema(name), plain)
    for example in response_schema(name)["examples"]:
        jsonschema_rs.validate(response_schema(name), example)


@pytest.mark.parametrize("name", EVERY)
def test_answers_hold_nothing_but_json_and_float32(name: TaskName, built: Build) -> None:
    def check(value: Any) -> None:
        if isinstance(value, list):
            for entry in value:
                check(entry)
        elif isinstance(value, dict):
            for key, entry in value.items():
                assert type(key) is str
                check(entry)
        elif isinstance(value, np.ndarray):
            assert value.dtype == np.float32
            assert value.flags.c_contiguous
        else:
            assert type(value) in {str, float, int}

    for example in request_schema(name)["examples"]:
        check(ask(name, built)(example["inputs"], **example.get("parameters", {})))


@pytest.mark.parametrize("name", EVERY)
def test_null_means_the_default(name: TaskName, built: Build) -> None:
    inputs, required = GOOD[name]
    nulls = {parameter: None for parameter in parameter_names(name) if parameter not in required}
    runner = ask(name, built)
    left, right = runner(inputs, **required, **nulls), runner(inputs, **required)
    assert left.tolist() == right.tolist() if isinstance(left, np.ndarray) else left == right
