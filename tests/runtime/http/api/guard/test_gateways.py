"""The routes for gateways, asked as LiteLLM, agentgateway, clients of OpenAI and vLLM's semantic router ask them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.resources.endpoint_parts.guard_policy import Category
from penstock.tasks import TaskName
from penstock_runtime.http.api.guard.verdicts import NOT_READ
from tests.runtime.http.api.guard.keywords import BLOCKING, MASKING, TEXTS, TOKENS, guarding, words
from tests.runtime.http.serving import Endpoint

GUARDRAIL = "/beta/litellm_basic_guardrail_api"
GOOD, BAD, UNSURE = "i like you", "this is a bad example", "a happy dog"
NAMED, MASKED = "my name is clara and i live in berkeley", "my name is <PER> and i live in [LOC]"
LONG = f"{'a very sunny day . ' * 40}{BAD}{' a very sunny day .' * 40}"
"""Six windows; only one of them is bad."""


@pytest.fixture(scope="module")
def blocking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with guarding(words(tmp_path_factory.mktemp("texts"), TEXTS)) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def masking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with guarding(words(tmp_path_factory.mktemp("tokens"), TOKENS), TOKENS, MASKING) as endpoint:
        yield endpoint


def post(endpoint: Endpoint, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(endpoint.url + path, json=body, headers=headers, timeout=60)


def ask(endpoint: Endpoint, path: str, body: Any) -> Any:
    answer = post(endpoint, path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def litellm(**fields: Any) -> dict[str, Any]:
    """A body as LiteLLM 1.83 sends it (recorded in tests/clients), with other fields."""
    return {
        "litellm_call_id": "fb8d", "litellm_trace_id": None, "texts": None, "request_data": {}, "images": None,
        "tools": None, "structured_messages": None, "tool_calls": None, "input_type": "request", "model": "gpt",
        "litellm_version": "1.83.0", "request_headers": {"authorization": "[present]"},
        "additional_provider_specific_params": {}, **fields,
    }  # fmt: skip


def of_gateway(action: Any) -> str:
    """The action that agentgateway reads: the first form that fits, of an untagged union."""
    body = action.get("body")
    if isinstance(body, dict) and ("messages" in body or "choices" in body):
        return "mask"
    if isinstance(body, str) and isinstance(action.get("status_code"), int) and 0 <= action["status_code"] < 65536:
        return "reject"
    assert isinstance(action.get("reason", ""), str)
    return "pass"


CALL = {"id": "1", "type": "function", "function": {"name": "write", "arguments": '{"to": "this is bad"}'}}


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"texts": [GOOD]}, {"action": "NONE"}),
        ({"texts": [GOOD, BAD]}, {"action": "BLOCKED", "blocked_reason": "prompt injection"}),
        ({"texts": [LONG]}, {"action": "BLOCKED", "blocked_reason": "prompt injection"}),
        ({"texts": [LONG.replace("bad", "good")]}, {"action": "NONE"}),
        ({"texts": ["", "  "]}, {"action": "NONE"}),
        ({"texts": []}, {"action": "NONE"}),
        ({"texts": [GOOD], "input_type": "response"}, {"action": "NONE"}),
        ({"texts": [GOOD], "tool_calls": [CALL]}, {"action": "BLOCKED", "blocked_reason": "prompt injection"}),
        ({"texts": [GOOD], "images": ["aGk="]}, {"action": "BLOCKED", "blocked_reason": NOT_READ}),
        ({"images": ["aGk="]}, {"action": "BLOCKED", "blocked_reason": NOT_READ}),
        ({"structured_messages": [{"role": "user"}]}, {"action": "BLOCKED", "blocked_reason": NOT_READ}),
    ],
)
def test_litellm_gets_an_action(blocking: Endpoint, fields: dict[str, Any], answer: Any) -> None:
    assert ask(blocking, GUARDRAIL, litellm(**fields)) == answer


def test_litellm_gets_masked_texts_one_to_one(masking: Endpoint) -> None:
    call = {"function": {"name": "write", "arguments": '{"to": "clara"}'}}

    answer = ask(masking, GUARDRAIL, litellm(texts=[GOOD, NAMED, ""]))
    assert answer == {"action": "GUARDRAIL_INTERVENED", "texts": [GOOD, MASKED, ""]}
    # The arguments of a call cannot be rewritten.
    assert ask(masking, GUARDRAIL, litellm(texts=[NAMED], tool_calls=[call]))["action"] == "BLOCKED"


def test_spans_of_a_long_text_are_masked_wherever_they_are(masking: Endpoint) -> None:
    text = "a very sunny day . " * 60 + NAMED + " a very sunny day ." * 60

    answer = ask(masking, GUARDRAIL, litellm(texts=[text]))

    assert answer["texts"] == [text.replace(NAMED, MASKED)]


@pytest.mark.parametrize(
    ("text", "action", "outcome"), [(GOOD, "pass", "pass"), (BAD, "reject", "block"), (LONG, "reject", "block")]
)
def test_agentgateway_reads_the_action(blocking: Endpoint, text: str, action: str, outcome: str) -> None:
    messages = [{"role": "system", "content": GOOD}, {"role": "user", "content": text}]
    for path, body in (
        ("/request", {"body": {"messages": messages}}),
        ("/response", {"body": {"choices": [{"message": messages[0]}, {"message": messages[1]}]}}),
    ):
        answer = post(blocking, path, body)

        assert of_gateway(answer.json()["action"]) == action, answer.text
        assert answer.headers["x-penstock-verdict"] == outcome


def test_agentgateway_gets_all_messages_with_masked_ones(masking: Endpoint) -> None:
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": NAMED}]
    masked = [messages[0], {"role": "user", "content": MASKED}]

    asked = ask(masking, "/request", {"body": {"messages": messages}})
    answered = ask(masking, "/response", {"body": {"choices": [{"message": messages[1]}]}})

    assert of_gateway(asked["action"]) == of_gateway(answered["action"]) == "mask"
    assert asked["action"]["body"] == {"messages": masked}
    assert answered["action"]["body"] == {"choices": [{"message": masked[1]}]}


@pytest.mark.parametrize(
    ("roles", "role", "action"),
    [
        ([], "system", "reject"),
        (["user"], "system", "pass"),
        (["user"], "user", "reject"),
        (["user", "tool"], "tool", "reject"),
        (["user"], "unheard", "reject"),
    ],
)
def test_messages_of_other_roles_are_not_read(
    blocking: Endpoint, monkeypatch: pytest.MonkeyPatch, roles: list[str], role: str, action: str
) -> None:
    policy = blocking.server.status.guard_policy
    assert policy is not None
    monkeypatch.setattr(blocking.server.status, "guard_policy", policy.model_copy(update={"roles": roles}))

    answer = ask(blocking, "/request", {"body": {"messages": [{"role": role, "content": BAD}]}})

    assert of_gateway(answer["action"]) == action


class TestModerations:
    def test_a_text_has_all_categories_of_openai_in_its_order(self, blocking: Endpoint) -> None:
        answer = ask(blocking, "/v1/moderations", {"input": BAD, "model": "omni-moderation-latest"})

        (result,) = answer["results"]
        assert answer["id"].startswith("modr-")
        assert answer["model"] == "guard"
        for field in ("categories", "category_scores", "category_applied_input_types"):
            assert list(result[field]) == list(map(str, Category))
        assert result["flagged"] is True
        assert [name for name, is_found in result["categories"].items() if is_found] == ["illicit"]
        assert result["category_scores"]["illicit"] == pytest.approx(1 / (1 + 2.718281828**-5))
        applied = result["category_applied_input_types"]
        assert {name: kinds for name, kinds in applied.items() if kinds} == {"illicit": ["text"]}

    def test_texts_get_a_result_each_and_parts_get_one(self, blocking: Endpoint) -> None:
        parts = [{"type": "text", "text": one} for one in (GOOD, BAD)]

        several = ask(blocking, "/v1/moderations", {"input": [GOOD, BAD, ""]})["results"]
        one = ask(blocking, "/v1/moderations", {"input": parts})["results"]

        assert [result["flagged"] for result in several] == [False, True, False]
        assert one == several[1:2]

    def test_a_label_without_a_category_is_one_itself(self, masking: Endpoint) -> None:
        (result,) = ask(masking, "/v1/moderations", {"input": NAMED})["results"]

        assert list(result["categories"])[13:] == ["PER", "LOC"]
        assert result["flagged"] is result["categories"]["PER"] is result["categories"]["LOC"] is True
        assert result["category_scores"]["PER"] > 0.9

    @pytest.mark.parametrize(
        ("body", "status", "code"),
        [
            ({"input": [{"type": "image_url", "image_url": {"url": "x"}}]}, 400, "unsupported_option"),
            ({"input": "x", "model": "another"}, 404, "model_not_found"),
            ({"input": 7}, 400, "validation"),
            ({}, 400, "validation"),
        ],
    )
    def test_what_cannot_be_judged_is_refused_in_openais_form(
        self, blocking: Endpoint, body: Any, status: int, code: str
    ) -> None:
        answer = post(blocking, "/v1/moderations", body)

        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["code"] == code


class TestSemanticRouter:
    """`/classify`, with the checks of its validators."""

    @pytest.mark.parametrize(("text", "is_bad"), [(GOOD, False), (BAD, True), (LONG, True)])
    def test_a_distribution_of_a_long_text_adds_up_to_one(self, blocking: Endpoint, text: str, is_bad: bool) -> None:
        answer = post(blocking, "/classify", {"inputs": text})

        scores = {one["label"]: one["score"] for one in answer.json()}
        assert set(scores) == {"SAFE", "INJECTION"}
        assert sum(scores.values()) == pytest.approx(1, abs=0.02)
        assert (scores["INJECTION"] > 0.9) == is_bad
        assert "x-truncated" not in answer.headers

    def test_spans_of_a_long_text_are_all_of_it(self, masking: Endpoint) -> None:
        text = "a very sunny day . " * 60 + NAMED

        answer = ask(masking, "/classify", {"inputs": text})

        assert "truncated_at" not in answer
        assert [text[one["start"] : one["end"]] for one in answer["spans"]] == ["clara", "berkeley"]


@pytest.mark.parametrize(("incomplete", "action"), [("Block", "BLOCKED"), ("Pass", "NONE")])
def test_a_text_with_too_many_windows_is_read_in_part(tmp_path_factory: Any, incomplete: str, action: str) -> None:
    policy = {**BLOCKING, "maxWindows": 2, "incomplete": incomplete}
    text = GOOD + " . " * 500 + BAD
    with guarding(words(tmp_path_factory.mktemp("texts"), TEXTS), policy=policy) as endpoint:
        assert ask(endpoint, GUARDRAIL, litellm(texts=[text]))["action"] == action
        (result,) = ask(endpoint, "/v1/moderations", {"input": text})["results"]
        assert result["incomplete"] is True
        assert result["flagged"] == (incomplete == "Block")
        assert endpoint.server.metrics.guard.coverage["partial"] == 2
        assert sum(endpoint.server.metrics.guard.coverage.values()) == 2


def test_unsure_scores_abstain(tmp_path_factory: Any) -> None:
    policy = {"labels": {"INJECTION": {"above": 0.9, "unsureAbove": 0.6}}}
    with guarding(words(tmp_path_factory.mktemp("texts"), TEXTS), policy=policy) as endpoint:
        answer = post(endpoint, GUARDRAIL, litellm(texts=[UNSURE]))

        assert answer.json() == {"action": "NONE"}
        assert answer.headers["x-penstock-verdict"] == "abstain"
        assert endpoint.server.metrics.guard.coverage["abstained"] == 1
        assert endpoint.server.metrics.guard.verdicts == {"abstain": 1}


def test_a_label_of_several_true_ones_has_its_own_threshold(tmp_path_factory: Any) -> None:
    model = words(tmp_path_factory.mktemp("texts"), TEXTS, problem="multi_label_classification")
    with guarding(model, policy={"labels": {"SAFE": {"above": 0.6}, "INJECTION": {}}}) as endpoint:
        (result,) = ask(endpoint, "/v1/moderations", {"input": GOOD})["results"]

        # The sigmoid of 0 and of -5.
        assert [result["category_scores"][name] for name in ("SAFE", "INJECTION")] == pytest.approx(
            [0.5, 0.0067], abs=1e-3
        )
        assert result["flagged"] is False


def test_keys_of_litellm_come_in_x_api_key(tmp_path_factory: Any) -> None:
    with guarding(words(tmp_path_factory.mktemp("texts"), TEXTS), auth_token="secret") as endpoint:
        statuses = [
            post(endpoint, GUARDRAIL, litellm(texts=[GOOD]), **headers).status_code
            for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}, {"x-api-key": "wrong"}, {})
        ]

        assert statuses == [200, 200, 401, 401]
        assert endpoint.server.metrics.guard.coverage == {
            **dict.fromkeys(endpoint.server.metrics.guard.coverage, 0),
            "classified": 2,
            "refused": 2,
        }


@pytest.mark.parametrize("task", [TEXTS, TaskName.FEATURE_EXTRACTION])
def test_without_a_policy_there_is_no_verdict(tmp_path_factory: Any, task: TaskName) -> None:
    with guarding(words(tmp_path_factory.mktemp("texts"), TEXTS), task, policy=None) as endpoint:
        answer = post(endpoint, GUARDRAIL, litellm(texts=[GOOD]))

        assert answer.status_code == 404
        assert ("serving.guardPolicy" in answer.text) == (task is TEXTS)
