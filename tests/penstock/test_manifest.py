"""Reading manifests of earlier versions."""

from __future__ import annotations

import json

from penstock.manifest import CandidateFacts, Outcome

CANDIDATE = {
    "recipe": {"engine": "onnxruntime", "precision": "int8-dynamic", "options": ["per-channel", "reduced-range"]},
    "outcome": "teacher",
    "reason": "the fp32 graph",
}


def test_the_earlier_name_of_the_outcome_reference_is_read() -> None:
    found = CandidateFacts.model_validate_json(json.dumps(CANDIDATE))

    assert found.outcome is Outcome.REFERENCE
    assert json.loads(found.model_dump_json())["outcome"] == "reference"
    assert found.recipe.name == "onnxruntime-int8-dynamic-per-channel"
