"""Makes tokenizer.json of the vocabulary in a GGUF file: byte-level BPE, and BPE of sentencepiece. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_runtime.models.merges import merges_of

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that the tokenizer looks for before it splits a text."""
UNUSED, BYTE = 5, 6
"""Types of tokens that are not the result of a merge."""
SPACE = "\u2581"
"""What sentencepiece writes for a space."""
PATTERNS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Patterns of the models' own tokenizer.json, by llama.cpp's name of them."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file, by number, and their types."""

    tokens: Sequence[str]
    kinds: Sequence[int]

    def added(self) -> list[dict[str, Any]]:
        """The tokens that are found in a text as they are."""
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": index, "content": text, **flags, "special": kind == CONTROL}
            for index, (text, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in {CONTROL, USER_DEFINED}
        ]

    def merged(self) -> Iterator[int]:
        """The numbers of tokens that may be the result of a merge."""
        special = {CONTROL, USER_DEFINED, UNUSED, BYTE}
        return (index for index, kind in enumerate(self.kinds) if kind not in special)


def is_splitting(name: str) -> bool:
    """Whether this is llama.cpp's name of a way to split texts that is known here."""
    return name in {"gpt-2", "default", "smollm", *PATTERNS}


def byte_level(
    vocabulary: Vocabulary, merges: Sequence[tuple[str, ...]], splitting: str, *, first: int | None, last: int | None
) -> dict[str, Any]:
    """Byte-level BPE. `splitting`: llama.cpp's name. `first` and `last`: the tokens around each text; None: none."""
    normalizer, steps = _splitting(splitting)
    bytes_ = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    model = {"merges": [list(merge) for merge in merges], "ignore_merges": splitting == "llama-bpe"}
    return _whole(vocabulary, model, first, last) | {
        "normalizer": normalizer,
        "pre_tokenizer": steps,
        "decoder": bytes_,
    }


def sentence_pieces(
    vocabulary: Vocabulary, scores: Sequence[float], unknown: int, *, prefix: bool, first: int | None, last: int | None
) -> dict[str, Any]:
    """BPE of sentencepiece with bytes for characters that the vocabulary lacks, as of Llama 2 and Mistral.

    `prefix`: a space is added before texts. `first` and `last` as in `byte_level`.
    """
    tokens = vocabulary.tokens
    ids = {text: index for index, text in enumerate(tokens)}
    scored = [(tokens[index], scores[index]) for index in vocabulary.merged()]
    model = {
        "unk_token": tokens[unknown],
        "fuse_unk": True,
        "byte_fallback": True,
        "merges": [list(merge) for merge in merges_of(scored, ids)],
    }
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return _whole(vocabulary, model, first, last) | {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    }


def _whole(vocabulary: Vocabulary, model: dict[str, Any], first: int | None, last: int | None) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _around(vocabulary.tokens, first, last),
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: index for index, text in enumerate(vocabulary.tokens)},
            **model,
        },
    }


def _splitting(name: str) -> tuple[Any, Any]:
    """Normalizer and pre-tokenizer for llama.cpp's name of the way in which texts are split."""
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if name == "smollm":
        digits = {"type": "Digits", "individual_digits": True}
        return None, {"type": "Sequence", "pretokenizers": [digits, words]}
    if name not in PATTERNS:
        return None, words
    split = {"type": "Split", "pattern": {"Regex": PATTERNS[name]}, "behavior": "Isolated", "invert": False}
    steps = [split, words | {"use_regex": False}]
    return {"type": "NFC"} if name == "qwen2" else None, {"type": "Sequence", "pretokenizers": steps}


def _around(tokens: Sequence[str], first: int | None, last: int | None) -> Any:
    """The step that adds tokens before and after texts; None: there are none."""
    if first is None and last is None:
        return None

    def part(number: int | None, type_id: int) -> list[Any]:
        return [] if number is None else [{"SpecialToken": {"id": tokens[number], "type_id": type_id}}]

    single = [*part(first, 0), {"Sequence": {"id": "A", "type_id": 0}}, *part(last, 0)]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, *part(last, 1)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": {
            tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}
            for number in (first, last)
            if number is not None
        },
    }
