"""The families that the builder knows, each in its module: names of weights, defaults of configuration, heads."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_optimizer.export.families.albert import Albert
from penstock_optimizer.export.families.base import Family
from penstock_optimizer.export.families.bert import Bert, Ernie
from penstock_optimizer.export.families.distilbert import DistilBert
from penstock_optimizer.export.families.electra import Electra
from penstock_optimizer.export.families.mpnet import MPNet
from penstock_optimizer.export.families.roberta import Data2VecText, Roberta

__all__ = ["FAMILIES", "Family"]

FAMILIES: Mapping[str, type[Family]] = {
    "albert": Albert,
    "bert": Bert,
    "camembert": Roberta,
    "data2vec-text": Data2VecText,
    "distilbert": DistilBert,
    "electra": Electra,
    "ernie": Ernie,
    "mpnet": MPNet,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
}
"""By `model_type` of config.json."""
