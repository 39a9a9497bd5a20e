"""docs/reference/conditions.md has every reason that the code can give; messages name only documents that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from penstock.resources.conditions import ConditionType
from penstock_operator.facts.reasons import Reason

ROOT = Path(__file__).parents[3]
PLAN = ROOT / "operator" / "penstock_operator"
PAGE = (ROOT / "docs" / "reference" / "conditions.md").read_text(encoding="utf-8")
MAKERS = {"no", "yes", "unknown", "shared", "PodProblem", "PinVerdict", "_failed", "_timed_out", "Event"}
"""The functions whose argument is a reason."""


def literal_reasons() -> Iterator[str]:
    for path in PLAN.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in MAKERS:
                given = [*call.args, *(word.value for word in call.keywords if word.arg == "reason")]
                for part in (part for value in given for part in ast.walk(value)):
                    text = part.value if isinstance(part, ast.Constant) else None
                    if isinstance(text, str) and re.fullmatch(r"[A-Z][A-Za-z]+", text):
                        yield text


def test_every_reason_is_a_member_of_the_enumeration_and_documented() -> None:
    found = set(Reason)
    assert len(found) > 50
    assert set(literal_reasons()) - {"Normal", "Warning"} == set()
    assert sorted(reason for reason in found if f"`{reason}`" not in PAGE) == []


def test_every_condition_has_a_section() -> None:
    headings = re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)
    assert [kind.value for kind in ConditionType if kind.value not in headings] == []


def test_pages_that_messages_name_exist() -> None:
    pointed = {
        link
        for path in PLAN.rglob("*.py")
        for link in re.findall(r"docs/([\w./-]+\.md)(?:#([\w-]+))?", path.read_text())
    }
    assert pointed
    for name, section in pointed:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert not section or re.search(rf"^#+ {section}$", text, re.MULTILINE | re.IGNORECASE)
