"""Every family with every head equals transformers' own model, in both flavours and both engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.tasks import Head
from penstock_optimizer.export import Flavour, export
from tests.optimizer.export.judge import assert_equals_torch, rows
from tests.optimizer.export.models import FAMILIES, make

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("flavour", Flavour)
@pytest.mark.parametrize("head", Head)
@pytest.mark.parametrize("config_class", FAMILIES)
def test_equals_transformers(config_class: str, head: Head, flavour: Flavour, tmp_path: Path) -> None:
    made = make(tmp_path / "model", config_class, head, **FAMILIES[config_class])

    exported = export(made.folder, head, tmp_path / "out", flavour=flavour)

    assert exported.how == "builder"
    assert_equals_torch(exported, made, rows(13), rows(4, 17, 9))
