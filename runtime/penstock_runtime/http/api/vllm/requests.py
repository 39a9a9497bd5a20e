"""Bodies of `/classify`."""

from __future__ import annotations

from dataclasses import replace

from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.classification import text_classification
from penstock_runtime.tasks.extraction import token_classification, zero_shot_token_classification
from penstock_runtime.tasks.extraction.entities import Aggregation
from penstock_runtime.tasks.fields import Boolean, Choice, Either, ListOf, Object, Others, Text


def distribution_body(limits: RequestLimits) -> Object:
    """The semantic router's body for a text classifier."""
    return Object(
        required={"inputs": text_classification.inputs(limits)},
        optional={"parameters": (replace(text_classification.PARAMETERS, others=Others.IGNORED), {})},
        others=Others.IGNORED,
    )


def spans_body(limits: RequestLimits) -> Object:
    """The semantic router's body for a token classifier."""
    kinds = token_classification.parameter_kinds(limits)
    groups = tuple(str(way) for way in Aggregation if way is not Aggregation.NONE)
    strategy = {"aggregation_strategy": (Choice(groups), str(Aggregation.SIMPLE))}
    parameters = Object(required={}, optional={**kinds.optional, **strategy}, notes=kinds.notes, others=Others.IGNORED)
    return Object(
        required={"inputs": token_classification.inputs(limits)},
        optional={"parameters": (parameters, parameters.parse({}, "parameters"))},
        others=Others.IGNORED,
    )


def labelled_spans_body(limits: RequestLimits) -> Object:
    """The same for the labels of a request."""
    kinds = zero_shot_token_classification.parameter_kinds(limits)
    return Object(
        required={"inputs": token_classification.inputs(limits), "parameters": replace(kinds, others=Others.IGNORED)},
        others=Others.IGNORED,
    )


def vllm_body(limits: RequestLimits) -> Object:
    """The body of vLLM's `/classify`."""
    return Object(
        required={"input": Either((Text(), ListOf(Text(), limits.items)))},
        optional={"model": (Text("the name of a model"), None), "use_activation": (Boolean(), None)},
        notes={"model": "Not used: an endpoint has one model.", "use_activation": "false: logits. Default: true."},
        others=Others.IGNORED,
    )
