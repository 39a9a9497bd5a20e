"""`serving.prompts` of an endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SpecError
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.reading import from_file
from penstock.resources.optimized_model import OptimizedModelSpec, Toolchain, optimized_model_key

EXAMPLE = Path(__file__).parents[3] / "examples/prompts.yaml"
E5: dict[str, Any] = {
    "texts": {"query": "query: ", "passage": "passage: "},
    "default": "query",
    "routes": {"/embed": "passage"},
}


def endpoint(prompts: object, *, task: str = "feature-extraction") -> ModelEndpoint:
    return ModelEndpoint.from_object(
        {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "ModelEndpoint",
            "metadata": {"name": "search"},
            "spec": {"model": "hf://org/name", "task": task, "serving": {"prompts": prompts}},
        }
    )


def test_the_example_has_a_prompt_for_queries_and_one_for_passages() -> None:
    prompts = from_file(ModelEndpoint, EXAMPLE).spec.serving.prompts

    assert prompts is not None
    assert prompts.to_object() == {
        "texts": {"query": "query: ", "passage": "passage: "},
        "default": "query",
        "routes": {"/embed": "passage"},
    }


def test_endpoints_that_differ_in_prompts_share_an_optimisation() -> None:
    toolchain = Toolchain(image="x:1", version="0.1")
    with_prompts, without = (OptimizedModelSpec.of(endpoint(given).spec, toolchain) for given in (E5, None))

    assert optimized_model_key(with_prompts) == optimized_model_key(without)
    assert with_prompts.endpoint_spec().serving.prompts is None


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ({"routes": {"/classify": "query"}}, "routes has a route without prompts: write one of /predict, /embed,"),
        ({"texts": {"a b": "x"}}, "'a b' is not the name of a prompt"),
        ({"texts": {"a": "x" * 1025}}, "1024"),
        ({"default": ""}, "default"),
        ({"route": {}}, "routes"),
    ],
)
def test_a_mistake_is_named(prompts: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        endpoint(prompts)

    assert words in str(caught.value)


def test_other_tasks_have_no_prompts() -> None:
    with pytest.raises(SpecError) as caught:
        endpoint(E5, task="fill-mask")

    assert "and task is fill-mask: remove serving.prompts" in str(caught.value)
