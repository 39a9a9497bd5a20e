"""docs/cores.md describes every instruction set class as the code has it."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.hardware import Isa

PAGE = (Path(__file__).parents[3] / "docs" / "cores.md").read_text(encoding="utf-8")


def test_the_table_of_classes_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (exact|saturate) \| (native|no) \|$", PAGE, flags=re.MULTILINE)
    expected = [
        (isa.value, "exact" if isa.has_int8_dot else "saturate", "native" if isa.has_bf16 else "no") for isa in Isa
    ]
    assert rows == expected
