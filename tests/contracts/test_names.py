"""One name for one thing: no two public classes share a name for different things."""

import ast
from collections import defaultdict

from tests.contracts.tracked import ROOT, sources

SAME_KIND = {
    "Part": "a part of the plan of an endpoint, and a part of the lines of a buffer",
    "Rollout": "a setting of an endpoint, and the part of its plan that follows from it",
    "Row": "a row of a batch of texts, and a row of a step of text generation",
    "Request": "each task module has its checked request",
    "LogSettings": "the same settings group, of the two processes that have one",
    "Settings": "all settings of a process; the operator and the runtime have one each",
    "MeasurementFailed": "bench and optimizer raise the same kind of error",
    "WatchExpired": "the API server ended a watch (410 Gone); the gateway imports the standard library only",
    "WindowRow": "the same kind of row, of the two tasks that split long texts into windows",
}
"""Class names that are used twice on purpose, each with the reason."""


def test_no_two_public_classes_share_a_name() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")

    assert len(found) > 500
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and name not in SAME_KIND} == {}
