"""From a model folder to the fp32 graph that everything else is made from and judged by.

It is built from the weights, or it is the model's own, or it is exported through torch. `FAMILIES` are the families
that are read from their weights, by `model_type`: one table for export and for text generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from penstock.errors import CorruptModel, UnsafeModel, UnsupportedModel
from penstock.manifest import GRAPH_OUTPUTS
from penstock.tasks import Head
from penstock_optimizer.export.build.encoder import build
from penstock_optimizer.export.build.operators import Flavour
from penstock_optimizer.export.build.sparse import pool_file
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
from penstock_optimizer.export.own_graph import take_own_graph
from penstock_optimizer.export.reader import CLASS_ENDINGS, Exported, NotBuildable, check_head
from penstock_optimizer.export.torch_export import export_with_torch
from penstock_optimizer.export.transformer import LONGEST_CONTEXT, Decoder, MaskFiller, SparseWeights
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.sentence import SparsePooling

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


def read_decoder(folder: ModelFolder) -> Decoder:
    """The decoder of a model folder; weights are memory-mapped where they are float32.

    UnsupportedModel for other families and for variants that are not computed here, with the list of the families;
    CorruptModel names the file and the field or tensor.
    """
    family = DECODERS.get(folder.model_type)
    if family is None:
        raise UnsupportedModel(
            f"{folder.path} is of the type {folder.model_type or 'unknown'}, which text-generation does not serve",
            remedy=f"Use a model of one of the types {', '.join(sorted(DECODERS))}",
        )
    try:
        return family(folder, LONGEST_CONTEXT).decoder()
    except NotBuildable as error:
        raise UnsupportedModel(
            f"{folder.path} cannot be served for text-generation: {error}",
            remedy="Use another model of this family (docs/reference/models.md#text-generation)",
        ) from error


__all__ = ["Exported", "Flavour", "export"]

GRAPH_NAME = "model.onnx"
Exporter = Callable[[ModelFolder, Head, Path], Exported]


def export(folder: ModelFolder, head: Head, out: Path, *, flavour: Flavour = Flavour.FUSED) -> Exported:
    """Write the graph into the folder `out`, which is made. An earlier graph there is replaced.

    The builder takes known families; else the model's own ONNX file is taken, whatever the flavour; else torch.
    CorruptModel names the file and the tensor or field that is missing or does not fit. UnsupportedModel names what no
    way here can take, and what to install where that helps.
    """
    without_family = folder.onnx is None and family_of(folder) is None
    if head is Head.SEQUENCE and without_family and folder.config.get("is_encoder_decoder") is True:
        raise UnsupportedModel(
            f"{folder.path} is an encoder with a decoder ({folder.model_type or 'no model_type'}): its "
            f"{head.value} head reads the last end-of-text token of each row, and only takes rows with the same number "
            "of them, so that texts cannot run together",
            remedy="Use an encoder that was trained for the same: FacebookAI/roberta-large-mnli instead of "
            "facebook/bart-large-mnli, for instance",
        )
    out.mkdir(parents=True, exist_ok=True)
    path = out / GRAPH_NAME
    if not folder.safetensors:
        return _take(take_own_graph, folder, head, path)
    try:
        return _build(folder, head, path, flavour)
    except NotBuildable as reason:
        if folder.onnx is not None:
            return _take(take_own_graph, folder, head, path)
        try:
            by_torch = partial(export_with_torch, flavour=flavour, why=str(reason))
            return _take(by_torch, folder, head, path)
        except (CorruptModel, UnsupportedModel) as error:
            meant = _type_of_the_architecture(folder)
            if meant in {None, folder.model_type}:
                raise
            raise CorruptModel(
                f"{folder.path}/config.json contradicts itself: model_type is {folder.model_type or 'not stated'}, and "
                f"architectures names {folder.architecture}, which is of the model_type {meant}",
                remedy="Take config.json from the same revision of the model as the weights, or write "
                f"model_type: {meant} where that is what the weights are",
            ) from error


def _take(exporter: Exporter, folder: ModelFolder, head: Head, path: Path) -> Exported:
    """Export with `exporter`, which knows all heads but `Head.SPARSE`: the nodes of that one are appended."""
    if head is not Head.SPARSE:
        return exporter(folder, head, path)
    exported = exporter(folder, Head.MASKED_LM, path)
    pool_file(path, folder.sparse or SparsePooling())
    return replace(exported, io=exported.io.model_copy(update={"outputs": dict(GRAPH_OUTPUTS[head])}))


def _type_of_the_architecture(folder: ModelFolder) -> str | None:
    """The `model_type` of a known family with a class of the name in `architectures`; None for other names."""
    name = folder.architecture
    for ending in ("Model", *chain.from_iterable(CLASS_ENDINGS.values())):
        name = name.removesuffix(ending)
    return next((known for known in FAMILIES if known.replace("-", "") == name.lower()), None)


def _build(folder: ModelFolder, head: Head, path: Path, flavour: Flavour) -> Exported:
    family_type = family_of(folder)
    if family_type is None:
        raise NotBuildable(f"its model_type is {folder.model_type or 'not stated'}")
    family = family_type(folder)
    check_head(folder, head)
    encoder = family.encoder()
    top = family.top(Head.MASKED_LM if head is Head.SPARSE else head, encoder)
    if head is Head.SPARSE and isinstance(top, MaskFiller):
        top = SparseWeights(top, folder.sparse or SparsePooling())
    graph, io = build(encoder, top, flavour)
    graph.save(path)
    return Exported(path, io, graph.fused_nodes(), "builder", family.parameters, family.weights_digest, family.notes)
