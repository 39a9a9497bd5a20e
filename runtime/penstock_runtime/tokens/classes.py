"""The defaults of the fast tokenizer classes of transformers, for settings that tokenizer_config.json lacks.

transformers loads tokenizer.json into a class, which applies tokenizer_config.json and otherwise the class's defaults.
This is a copy of the defaults of transformers 4.57.6, so that a server need not import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import AddedToken


@dataclass(frozen=True, eq=False)
class TokenizerClass:
    """The defaults of one class, or of several with the same."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by role (`cls_token`)."""
    mask: Mapping[str, bool] = field(default_factory=dict)
    """Flags of the mask token; empty: as in tokenizer.json."""
    objects: frozenset[str] = frozenset()
    """Roles of the other tokens; they replace the roles in tokenizer.json."""
    additional: tuple[str, ...] = ()
    """Special tokens without a role."""
    folds: tuple[str, ...] = ()
    """Fields of BERT's normaliser that are compared with the settings; if one differs, all of these are set."""
    trims: bool = False
    """True if the post-processor's `add_prefix_space` and `trim_offsets` are set too (both of byte-level BPE)."""
    prefix_space: bool | None = False
    """Default of `add_prefix_space` of byte-level BPE; None: as in tokenizer.json."""
    ends: tuple[bool, bool] | None = None
    """The defaults of `add_bos_token` and `add_eos_token`, by which the class makes its post-processor; None: it does
    not."""
    types: bool = True
    """True if the model gets token types, unless the settings list the inputs (`model_input_names`)."""

    def wrapped(self, role: str, token: str | AddedToken | None) -> str | AddedToken | None:
        """The token as the class creates it from a string. An `AddedToken` replaces the existing token."""
        if not isinstance(token, str):
            return token
        if role == "mask_token" and self.mask:
            return AddedToken(token, **self.mask)
        return AddedToken(token) if role in self.objects else token


GENERIC = TokenizerClass()
"""PreTrainedTokenizerFast."""

UNKNOWN = TokenizerClass(prefix_space=None)
"""Any other class: a slow one, one of a model that is no encoder, or one from outside of transformers."""

GTE_QWEN2 = TokenizerClass(prefix_space=None, ends=(False, False), types=False)
"""gte-Qwen2's own class, which is Qwen2's with the settings of Llama's; its code is not read or run."""

_ROLES = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BERT = dict(zip(_ROLES, ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]"), strict=True))
_CLS_SEP = _BERT | {"bos_token": "[CLS]", "eos_token": "[SEP]"}
_HERBERT = dict(zip(_ROLES, ("<unk>", "</s>", "<pad>", "<s>", "<mask>"), strict=True))
_ROBERTA = _HERBERT | {"bos_token": "<s>", "eos_token": "</s>"}
_ALBERT = _CLS_SEP | {"unk_token": "<unk>", "pad_token": "<pad>"}
_XLNET = _ROBERTA | {"sep_token": "<sep>", "cls_token": "<cls>"}
_END_OF_TEXT = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")

_EATS_SPACE = {"lstrip": True}
_RAW = {"lstrip": True, "normalized": False}
_NORMALIZED = {"lstrip": True, "normalized": True, "special": True}
_ALL = frozenset({"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"})

_FOLDS = ("lowercase", "strip_accents", "handle_chinese_chars")
_WORD_PIECE = TokenizerClass(names=_BERT, folds=_FOLDS)
_BYTE_LEVEL = TokenizerClass(names=_ROBERTA, mask=_RAW, trims=True, types=False)
_BART = replace(_BYTE_LEVEL, mask=_NORMALIZED)
_UNIGRAM = TokenizerClass(names=_ROBERTA, mask=_EATS_SPACE, types=False)

CLASSES: Mapping[str, TokenizerClass] = {
    "Albert": TokenizerClass(names=_ALBERT, mask=_RAW),
    "Bart": _BART,
    "Barthez": _UNIGRAM,
    "Bert": _WORD_PIECE,
    "BigBird": TokenizerClass(
        names=_ROBERTA | {"sep_token": "[SEP]", "cls_token": "[CLS]", "mask_token": "[MASK]"},
        mask=_EATS_SPACE,
        objects=_ALL,
        types=False,
    ),
    "Blenderbot": _BYTE_LEVEL,
    "Camembert": TokenizerClass(
        names=_ROBERTA,
        mask={"lstrip": True, "special": True},
        additional=("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"),
        types=False,
    ),
    "ConvBert": _WORD_PIECE,
    "DPRContextEncoder": _WORD_PIECE,
    "DPRQuestionEncoder": _WORD_PIECE,
    "DPRReader": replace(_WORD_PIECE, types=False),
    "Deberta": TokenizerClass(names=_CLS_SEP),
    "DebertaV2": TokenizerClass(names=_CLS_SEP),
    "DistilBert": replace(_WORD_PIECE, types=False),
    "Electra": _WORD_PIECE,
    "FNet": TokenizerClass(
        names=_BERT | {"unk_token": "<unk>", "pad_token": "<pad>"},
        mask=_EATS_SPACE,
        objects=frozenset({"cls_token", "sep_token"}),
    ),
    "Funnel": TokenizerClass(names=_XLNET, folds=_FOLDS),
    "GPT2": TokenizerClass(names=_END_OF_TEXT, types=False),
    "Gemma": TokenizerClass(
        names={"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
        ends=(True, False),
        types=False,
    ),
    "Herbert": TokenizerClass(names=_HERBERT),
    "LED": _BART,
    "LayoutLM": _WORD_PIECE,
    "Llama": TokenizerClass(
        names={"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        prefix_space=None,
        ends=(True, False),
        types=False,
    ),
    "Longformer": _BYTE_LEVEL,
    "Lxmert": _WORD_PIECE,
    "MPNet": TokenizerClass(
        names=_ROBERTA | {"unk_token": "[UNK]"}, mask=_EATS_SPACE, objects=_ALL, folds=_FOLDS[:2], types=False
    ),
    "MobileBert": _WORD_PIECE,
    "Mvp": replace(_BYTE_LEVEL, mask=_EATS_SPACE, objects=_ALL),
    "PreTrained": GENERIC,
    "Realm": _WORD_PIECE,
    "Reformer": TokenizerClass(names={"eos_token": "</s>", "unk_token": "<unk>"}, types=False),
    "RemBert": TokenizerClass(names=_ALBERT, mask=_EATS_SPACE),
    "RetriBert": replace(_WORD_PIECE, types=False),
    "Roberta": _BYTE_LEVEL,
    "Splinter": TokenizerClass(names=_BERT, additional=("[QUESTION]",), folds=_FOLDS[:2]),
    "SqueezeBert": _WORD_PIECE,
    "XLMRoberta": _UNIGRAM,
    "XLNet": TokenizerClass(names=_XLNET, mask=_EATS_SPACE, additional=("<eop>", "<eod>")),
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
    "Gemma": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 siglip2 t5gemma",
    "Herbert": "herbert",
    "LED": "led",
    "LayoutLM": "layoutlm",
    "Llama": "arcee aria chameleon colpali deepseek_v2 deepseek_v3 deepseek_vl deepseek_vl_hybrid diffllama "
    "ernie4_5 ernie4_5_moe idefics idefics2 idefics3 jamba janus jetmoe llama llama4 llama4_text llava "
    "llava_next llava_next_video llava_onevision ministral mistral mistral3 mixtral mllama paligemma "
    "persimmon phi3 phimoe video_llava vipllava zamba zamba2",
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

_WITHOUT_DEFAULTS = {"mt5": "T5", "t5": "T5", "umt5": "T5"}
"""The class of other models by `model_type`: not in `CLASSES`, but read without a tokenizer.json (`tokens.convert`)."""
_CLASS_OF_MODEL = {model: name for name, models in _MODELS.items() for model in models.split()}


def class_name(tokenizer_config: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The class that transformers uses, without `Tokenizer` and `TokenizerFast`: from tokenizer_config.json, else from
    config.json, else by model type; empty if none is known."""
    stated = next((named for file in (tokenizer_config, config) if (named := file.get("tokenizer_class"))), None)
    if stated is None:
        model_type = str(config.get("model_type"))
        return _CLASS_OF_MODEL.get(model_type) or _WITHOUT_DEFAULTS.get(model_type, "")
    return str(stated).removesuffix("Fast").removesuffix("Tokenizer")


def class_of(tokenizer_config: Mapping[str, Any], config: Mapping[str, Any]) -> TokenizerClass:
    """The defaults of `class_name`; `UNKNOWN` if it is not in the table."""
    if "tokenization_qwen.Qwen2Tokenizer" in str(tokenizer_config.get("auto_map")):
        return GTE_QWEN2
    return CLASSES.get(class_name(tokenizer_config, config), UNKNOWN)
