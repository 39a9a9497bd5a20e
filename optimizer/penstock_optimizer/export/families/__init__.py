"""The families that are read from their weights, by `model_type`: one table for export and for text generation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import UnsafeModel, UnsupportedModel
from penstock_optimizer.export.families.bart import Bart
from penstock_optimizer.export.families.bert import (
    Albert,
    Bert,
    Data2VecText,
    DistilBert,
    Electra,
    Ernie,
    MPNet,
    Roberta,
)
from penstock_optimizer.export.families.deberta import DebertaV2
from penstock_optimizer.export.families.decoder_family import DecoderFamily
from penstock_optimizer.export.families.family import Family
from penstock_optimizer.export.families.gemma import Gemma3
from penstock_optimizer.export.families.gpt2 import Gpt2
from penstock_optimizer.export.families.gte import Gte
from penstock_optimizer.export.families.jina import LAYER, JinaBert, XlmRobertaFlash, XlmRobertaRotary
from penstock_optimizer.export.families.llama import EuroBert, Llama, Mistral, Phi3, Qwen2, Qwen3
from penstock_optimizer.export.families.modernbert import ModernBert
from penstock_optimizer.export.families.nomic import NomicBert
from penstock_optimizer.export.families.t5 import MT5, T5, UMT5
from penstock_optimizer.export.reader import NotBuildable
from penstock_optimizer.export.transformer import LONGEST_CONTEXT, Decoder
from penstock_runtime.models.folder import ModelFolder

DECODERS: Mapping[str, type[DecoderFamily]] = {
    "gemma3_text": Gemma3,
    "gpt2": Gpt2,
    "llama": Llama,
    "mistral": Mistral,
    "phi3": Phi3,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}
"""Families that text generation serves as well."""
FAMILIES: Mapping[str, type[Family]] = {
    **DECODERS,
    "albert": Albert,
    "bart": Bart,
    "bert": Bert,
    "camembert": Roberta,
    "data2vec-text": Data2VecText,
    "deberta-v2": DebertaV2,
    "distilbert": DistilBert,
    "electra": Electra,
    "ernie": Ernie,
    "eurobert": EuroBert,
    "gte": Gte,
    "modernbert": ModernBert,
    "mpnet": MPNet,
    "mt5": MT5,
    "new": Gte,
    "nomic_bert": NomicBert,
    "roberta": Roberta,
    "t5": T5,
    "umt5": UMT5,
    "xlm-roberta": Roberta,
}
"""By `model_type` of config.json."""


def family_of(folder: ModelFolder) -> type[Family] | None:
    """The family of a model; None for one that is not known. UnsafeModel for one that its own code is needed for."""
    if folder.model_type == "xlm-roberta" and any(name.endswith(LAYER) for name in folder.tensors):
        is_rotary = folder.config.get("position_embedding_type") == XlmRobertaRotary.position_embedding
        return XlmRobertaRotary if is_rotary else XlmRobertaFlash
    if folder.model_type == "xlm-roberta" and folder.config.get("auto_map"):
        if folder.onnx is None:
            raise UnsafeModel(
                f"{folder.path}/config.json names code of the model's own (auto_map), whose weights Penstock reads in "
                f"the layout of jina-embeddings-v3 only: there is no tensor ...{LAYER}",
                remedy="Code that comes with a model is never run here: export it to ONNX where you trust it and put "
                "model.onnx into the folder (docs/how-to/convert-a-model.md#remote-code)",
            )
        return None
    if folder.model_type == "bert" and folder.config.get("position_embedding_type") == JinaBert.position_embedding:
        return JinaBert
    return FAMILIES.get(folder.model_type)


def check_decoder(origin: Path | str, config: Mapping[str, Any]) -> type[DecoderFamily]:
    """The family of a model for text generation, by its config.json; UnsupportedModel names those that there are."""
    model_type = str(config.get("model_type") or "unknown")
    family = DECODERS.get(model_type)
    if family is None:
        raise UnsupportedModel(
            f"{origin} is of the type {model_type}, which text-generation does not serve",
            remedy=f"Use a model of one of the types {', '.join(sorted(DECODERS))}",
        )
    return family


def read_decoder(folder: ModelFolder) -> Decoder:
    """The decoder of a model folder; weights are memory-mapped where they are float32.

    UnsupportedModel for other families and for variants that are not computed here, with the list of the families;
    CorruptModel names the file and the field or tensor.
    """
    family = check_decoder(folder.path, folder.config)
    try:
        return family(folder, LONGEST_CONTEXT).decoder()
    except NotBuildable as error:
        raise UnsupportedModel(
            f"{folder.path} cannot be served for text-generation: {error}",
            remedy="Use another model of this family (docs/reference/models.md#text-generation)",
        ) from error
