"""Every family with every head equals transformers' own model, in both flavours, each in its engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.tasks import Head
from penstock_optimizer.export import Flavour, export
from tests.optimizer.export.judge import ENGINE_OF, assert_equals_torch, rows
from tests.optimizer.export.models import DECODERS, FAMILIES, HEADS, make

pytestmark = pytest.mark.parity


CASES = [(config_class, head) for config_class, heads in HEADS.items() for head in heads]


@pytest.mark.parametrize(("config_class", "head"), CASES)
def test_equals_transformers(config_class: str, head: Head, tmp_path: Path) -> None:
    made = make(tmp_path / "model", config_class, head, **{**FAMILIES, **DECODERS}[config_class])

    for flavour, engine in ENGINE_OF.items():
        exported = export(made.folder, head, tmp_path / flavour, flavour=flavour)

        assert exported.how == "builder"
        assert_equals_torch(exported, made, rows(13), rows(4, 17, 9), engines=[engine])


@pytest.mark.parametrize(
    ("config_class", "head"),
    [("BertConfig", Head.SPAN), ("RobertaConfig", Head.MASKED_LM), ("MPNetConfig", Head.SEQUENCE)],
)
def test_every_family_is_exported_in_both_flavours(config_class: str, head: Head, tmp_path: Path) -> None:
    made = make(tmp_path / "model", config_class, head, **FAMILIES[config_class])

    for flavour in Flavour:
        exported = export(made.folder, head, tmp_path / flavour, flavour=flavour)

        assert_equals_torch(exported, made, rows(4, 17, 9))
