"""The fast tokenizer classes of transformers: what each assumes where tokenizer_config.json is silent.

transformers loads tokenizer.json into a class, which then changes it to what the file of settings says, or else to the
class's own defaults. A copy of those, of transformers 4.57.6, so that a server need not import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TokenizerClass:
    """One class, or several that are alike."""

    folds: tuple[str, ...] = ()
    """Fields of BERT's normaliser that are compared with the settings; where one differs, all of these are set."""
    trims: bool = False
    """Whether the post-processor's `add_prefix_space` and `trim_offsets` are set as well (both of byte-level BPE)."""
    prefix_space: bool | None = False
    """What byte-level BPE does before the first word, unless stated; None: what tokenizer.json says."""


GENERIC = TokenizerClass()
"""PreTrainedTokenizerFast."""

UNKNOWN = TokenizerClass(prefix_space=None)
"""A class that is not in the table: not a fast one, of a model that is no encoder, or not transformers' own."""

_FOLDS = ("lowercase", "strip_accents", "handle_chinese_chars")
_WORD_PIECE = TokenizerClass(folds=_FOLDS)
_BYTE_LEVEL = TokenizerClass(trims=True)

CLASSES: Mapping[str, TokenizerClass] = {
    "Albert": GENERIC,
    "Bart": _BYTE_LEVEL,
    "Barthez": GENERIC,
    "Bert": _WORD_PIECE,
    "BigBird": GENERIC,
    "Blenderbot": _BYTE_LEVEL,
    "Camembert": GENERIC,
    "ConvBert": _WORD_PIECE,
    "DPRContextEncoder": _WORD_PIECE,
    "DPRQuestionEncoder": _WORD_PIECE,
    "DPRReader": _WORD_PIECE,
    "Deberta": GENERIC,
    "DebertaV2": GENERIC,
    "DistilBert": _WORD_PIECE,
    "Electra": _WORD_PIECE,
    "FNet": GENERIC,
    "Funnel": _WORD_PIECE,
    "GPT2": GENERIC,
    "Herbert": GENERIC,
    "LED": _BYTE_LEVEL,
    "LayoutLM": _WORD_PIECE,
    "Longformer": _BYTE_LEVEL,
    "Lxmert": _WORD_PIECE,
    "MPNet": TokenizerClass(folds=_FOLDS[:2]),
    "MobileBert": _WORD_PIECE,
    "Mvp": _BYTE_LEVEL,
    "PreTrained": GENERIC,
    "Realm": _WORD_PIECE,
    "Reformer": GENERIC,
    "RemBert": GENERIC,
    "RetriBert": _WORD_PIECE,
    "Roberta": _BYTE_LEVEL,
    "Splinter": TokenizerClass(folds=_FOLDS[:2]),
    "SqueezeBert": _WORD_PIECE,
    "XLMRoberta": GENERIC,
    "XLNet": GENERIC,
}
"""By name, without `Tokenizer` and `TokenizerFast`."""

_MODELS = {
    "Albert": "albert nystromformer yoso",
    "Bart": "bart",
    "Barthez": "barthez",
    "Bert": "align bark bert blip bros chinese_clip ernie git grounding-dino megatron-bert mm-grounding-dino nezha "
    "qdqbert tvp vilt visual_bert",
    "BigBird": "big_bird",
    "Blenderbot": "blenderbot",
    "Camembert": "camembert",
    "ConvBert": "convbert",
    "DPRQuestionEncoder": "dpr",
    "Deberta": "deberta",
    "DebertaV2": "deberta-v2",
    "DistilBert": "distilbert",
    "Electra": "electra",
    "FNet": "fnet",
    "Funnel": "funnel",
    "GPT2": "blip-2 dbrx emu3 exaone4 flex_olmo gpt2 gpt_bigcode gpt_neo gptj instructblip instructblipvideo minimax "
    "olmo3 opt starcoder2",
    "Herbert": "herbert",
    "LED": "led",
    "LayoutLM": "layoutlm",
    "Longformer": "longformer",
    "Lxmert": "lxmert",
    "MPNet": "mpnet",
    "MobileBert": "mobilebert",
    "Mvp": "mvp",
    "PreTrained": "bitnet blt csm falcon glm glm4 glm4_moe glm4v glm4v_moe gpt_oss helium kosmos-2.5 modernbert "
    "moonshine moshi nemotron pixtral smollm3 voxtral",
    "Realm": "realm",
    "Reformer": "reformer",
    "RemBert": "rembert",
    "RetriBert": "retribert",
    "Roberta": "bridgetower clap data2vec-text ibert mega mra roberta roberta-prelayernorm",
    "Splinter": "splinter",
    "SqueezeBert": "squeezebert",
    "XLMRoberta": "kosmos-2 metaclip_2 xlm-roberta xlm-roberta-xl xmod",
    "XLNet": "xlnet",
}
"""The `model_type`s of each, separated by spaces."""

_CLASS_OF_MODEL = {model: name for name, models in _MODELS.items() for model in models.split()}


def class_of(tokenizer_config: Mapping[str, Any], config: Mapping[str, Any]) -> TokenizerClass:
    """The class that transformers makes: the one that tokenizer_config.json names, or config.json, or that of the
    model's type. `UNKNOWN` for one that is not in the table."""
    stated = next((named for file in (tokenizer_config, config) if (named := file.get("tokenizer_class"))), None)
    if stated is None:
        name = _CLASS_OF_MODEL.get(str(config.get("model_type")), "")
    else:
        name = str(stated).removesuffix("Fast").removesuffix("Tokenizer")
    return CLASSES.get(name, UNKNOWN)
