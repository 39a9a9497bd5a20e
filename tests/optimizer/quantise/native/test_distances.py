"""DeBERTa's scores of distances on the native engine: configurations, lengths and instruction sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import OptimizationError
from penstock.tasks import Head
from penstock_optimizer.export import Flavour, export
from penstock_optimizer.quantise import build
from penstock_runtime.engines.native import engine
from penstock_runtime.engines.native.library import Kernels
from tests.optimizer.export.models import make
from tests.optimizer.quantise.native.test_families import RECIPE, check, fields
from tests.runtime.engines.native.programs import AVAILABLE, needs_library

pytestmark = [needs_library, pytest.mark.parity]
BASE: dict[str, Any] = {"position_buckets": 256, "max_position_embeddings": 512}
"""The distances of the published models."""


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        pytest.param(Head.ENCODER, {"pos_att_type": "c2p|p2c"}, id="kinds of scores as a text"),
        pytest.param(Head.ENCODER, {"pos_att_type": ["c2p"]}, id="queries meet distances"),
        pytest.param(Head.TOKEN, {"pos_att_type": ["p2c"]}, id="keys meet distances"),
        pytest.param(Head.SEQUENCE, {"pos_att_type": ["c2p"]}, id="one query meets distances"),
        pytest.param(Head.SEQUENCE, {"pos_att_type": ["p2c"]}, id="keys meet their distance from one query"),
        pytest.param(Head.ENCODER, {"pos_att_type": []}, id="nothing meets distances"),
        pytest.param(Head.ENCODER, {"relative_attention": False}, id="no distances, same scale"),
        pytest.param(Head.TOKEN, {"share_att_key": False}, id="projections of distances"),
        pytest.param(
            Head.ENCODER, {"position_buckets": -1, "max_relative_positions": 6}, id="distances without buckets"
        ),
        pytest.param(Head.ENCODER, {"norm_rel_ebd": "none"}, id="distances without a norm"),
        pytest.param(Head.SPAN, {"position_biased_input": True, "type_vocab_size": 2}, id="tables of both"),
        pytest.param(Head.ENCODER, {"type_vocab_size": 1}, id="one type, no positions"),
        pytest.param(Head.MASKED_LM, {"embedding_size": 32}, id="narrow embeddings"),
        pytest.param(
            Head.MASKED_LM, {"legacy": False, "tie_word_embeddings": False}, id="the newer vocabulary head"
        ),
        pytest.param(Head.MASKED_LM, {"tie_word_embeddings": False}, id="untied"),
        pytest.param(Head.SEQUENCE, {"pooler_hidden_act": "tanh"}, id="tanh in the pooler"),
        pytest.param(Head.SEQUENCE, {"num_hidden_layers": 1, "num_labels": 1}, id="one layer, one label"),
        pytest.param(Head.ENCODER, {"num_attention_heads": 8}, id="heads of 16"),
        pytest.param(Head.SEQUENCE, {"num_attention_heads": 8}, id="heads of 16, one query"),
        pytest.param(Head.ENCODER, {"num_attention_heads": 1}, id="a head of 128"),
    ],
)  # fmt: skip
def test_a_configuration_is_near_fp32(head: Head, changes: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, "DebertaV2Config", head, **changes)


@pytest.mark.parametrize("kernels", AVAILABLE, ids=lambda kernels: kernels.name.lower())
@pytest.mark.parametrize("head", [Head.ENCODER, Head.SEQUENCE])
def test_texts_of_1_to_512_tokens_are_near_fp32_with_all_kernels(
    kernels: Kernels, head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "best_kernels", lambda: kernels)
    labels: dict[str, Any] = {"num_labels": 12} if head is Head.SEQUENCE else {}

    check(tmp_path, "DebertaV2Config", head, lengths=(1, 15, 16, 33, 129, 300, 512), **BASE, **labels)


@pytest.mark.parametrize("head", [Head.ENCODER, Head.SEQUENCE])
def test_a_convolution_is_refused_with_its_operator(head: Head, tmp_path: Path) -> None:
    changes = {"conv_kernel_size": 3, "conv_act": "gelu"}
    made = make(tmp_path / "model", "DebertaV2Config", head, **fields("DebertaV2Config", **changes))
    graph = export(made.folder, head, tmp_path / "graph", flavour=Flavour.FUSED)

    with pytest.raises(OptimizationError, match=r"does not know a convolution"):
        build(RECIPE, graph.path, graph.io, (), tmp_path / "native")
