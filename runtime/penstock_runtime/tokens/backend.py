"""Loads `tokenizer.json` with the tokenizers library, and adapts it as transformers does for the same folder.

The tokenizer object is not changed any more after `open_backend` has returned it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram

from penstock.errors import CorruptModel, PenstockError, UnsupportedModel
from penstock_runtime.models.files import open_within
from penstock_runtime.tokens.classes import TokenizerClass, class_of
from penstock_runtime.tokens.specials import TokenFiles, add_special_tokens


def open_backend(
    path: Path, files: TokenFiles, kind: TokenizerClass, *, lower_case: bool, content: bytes | None = None
) -> tuple[Any, dict[str, int]]:
    """The library's tokenizer without truncation and padding, and the ids of its special tokens by role (`cls_token`).

    `path` is tokenizer.json, or the file that `content`, a tokenizer.json, was made of. `kind` has the defaults of
    transformers' class for settings that `files` lack.

    `lower_case` adds a lower-casing step before the normaliser unless it has one, as sentence-transformers does.
    CorruptModel for an invalid file.
    """
    # Each worker thread has one core: the library's thread pool would use the cores of other threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        if content is None:
            with open_within(files.path, path) as file:
                content = file.read()
        backend = Backend.from_buffer(content)
    except PenstockError:
        raise
    except Exception as error:  # the library raises plain Exception for all errors
        unknown = _unknown_component(content or b"")
        if unknown is not None:
            raise UnsupportedModel(
                f"{path} has {unknown}, which tokenizers {tokenizers.__version__} does not read: the file was written "
                "by a newer version of tokenizers, or is damaged there",
                remedy="Install a newer Penstock, or save the tokenizer again with this version of tokenizers "
                "(docs/how-to/convert-a-model.md#tokenizer)",
            ) from error
        raise CorruptModel(
            f"{path} is not a tokenizer that tokenizers reads: {error}", remedy="Fetch the model again"
        ) from error
    padding = None if backend.padding is None else backend.padding["pad_token"]
    backend.no_truncation()
    backend.no_padding()
    # In the order of transformers: the library normalises added tokens when they are added.
    specials = add_special_tokens(backend, files, kind, padding=padding)
    config = files.settings
    # If true, special tokens in texts are split like other characters.
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    _match_prefix_space(backend, config, kind)
    _match_normalizer(backend, config, kind)
    _match_post_processor(backend, config, kind)
    if kind.ends is not None:
        backend.post_processor = _ends(path, backend, config, specials, kind.ends)
    if lower_case and not _lowers(component(backend.normalizer)):
        first = normalizers.Lowercase()
        backend.normalizer = first if backend.normalizer is None else normalizers.Sequence([first, backend.normalizer])
    return backend, specials


_READERS: Mapping[str, Callable[[], Any]] = {
    "normalizer": normalizers.Strip,
    "pre_tokenizer": pre_tokenizers.Whitespace,
    "post_processor": lambda: processors.TemplateProcessing(single="$0", special_tokens=[]),
    "decoder": decoders.Fuse,
}
"""An object of each part of tokenizer.json except the model; its class reads any component of that part."""
_MODEL_TYPES = frozenset({"BPE", "WordPiece", "WordLevel", "Unigram"})


def _unknown_component(content: bytes) -> str | None:
    """The first component of a tokenizer.json that the library does not read, such as `normalizer Later`.

    None if the file is no JSON object, or all components can be read.
    """
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(whole, dict):
        return None
    for part, sample in _READERS.items():
        for state in _components(whole.get(part)):
            try:
                sample().__setstate__(json.dumps(state).encode())
            except Exception:  # the library's plain Exception
                return f"the {part} {state.get('type')!r}"
    model = whole.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    return None if kind is None or kind in _MODEL_TYPES else f"the model {kind!r}"


def _components(state: Any) -> Iterator[dict[str, Any]]:
    """A component of tokenizer.json; of a sequence its steps."""
    if not isinstance(state, dict):
        return
    if state.get("type") != "Sequence":
        yield state
        return
    for steps in state.values():
        for step in steps if isinstance(steps, list) else ():
            yield from _components(step)


def own_size(backend: Any) -> int:
    """The highest id of the tokenizer's vocabulary (without added tokens) plus one: ids may have gaps."""
    if isinstance(backend.model, Unigram):
        # Its ids have no gaps, and getting the whole vocabulary takes 0.3 s.
        return int(backend.get_vocab_size(with_added_tokens=False))
    return max(backend.get_vocab(with_added_tokens=False).values(), default=-1) + 1


def missing_unknown(backend: Any) -> bool:
    """True if the library fails on characters or words that the vocabulary lacks, because it has no unknown token.

    BPE without an unknown token drops such characters instead, as transformers then does.
    """
    model = backend.model
    if isinstance(model, Unigram):
        # The attribute is not readable from Python; an unknown character shows it.
        try:
            _ = model.tokenize("\U0010fffd")
        except Exception:  # the library raises plain Exception for all errors
            return True
        return False
    unknown = model.unk_token
    return unknown is not None and model.token_to_id(unknown) is None


def check_vocabulary(backend: Any, own: int, path: Path, config: Mapping[str, Any]) -> int | None:
    """The number of embeddings of the model, if there are added tokens without one, which texts may contain.

    None if all tokens have one, or config.json has no vocab_size. `own`: the backend's `own_size`.
    CorruptModel if tokens of the tokenizer's own vocabulary have none: `path` then belongs to another model.
    """
    size = config.get("vocab_size")
    if not isinstance(size, int):
        return None
    if own > size:
        raise CorruptModel(
            f"{path} has tokens up to {own - 1}, and vocab_size of the model's config.json is {size}",
            remedy="Use the tokenizer of this model",
        )
    return size if max(backend.get_added_tokens_decoder(), default=0) >= size else None


def uses_type_ids(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> bool:
    """True if the model gets token types: by the tokenizer's list of inputs, otherwise its class; needs two types."""
    names = tokenizer_config.get("model_input_names")
    stated = "token_type_ids" in names if isinstance(names, list) else class_of(tokenizer_config, config).types
    types = config.get("type_vocab_size")
    return stated and not (isinstance(types, int) and types < 2)


def _match_normalizer(backend: Any, config: Mapping[str, Any], kind: TokenizerClass) -> None:
    """BERT's normaliser, for the classes that set it; otherwise it stays as in tokenizer.json."""
    state = component(backend.normalizer)
    if state.get("type") != "BertNormalizer":
        return
    stated = {
        "lowercase": _stated(config, "do_lower_case", default=True),
        "strip_accents": _stated(config, "strip_accents", default=None),
        "handle_chinese_chars": _stated(config, "tokenize_chinese_chars", default=True),
    }
    wanted = {field: stated[field] for field in kind.folds}
    if any(state[field] != value for field, value in wanted.items()):
        options = {field: value for field, value in (state | wanted).items() if field != "type"}
        backend.normalizer = normalizers.BertNormalizer(**options)


def _match_prefix_space(backend: Any, config: Mapping[str, Any], kind: TokenizerClass) -> None:
    """Byte-level BPE: whether a space is added before the first word."""
    wanted = _stated(config, "add_prefix_space", default=kind.prefix_space)
    state = component(backend.pre_tokenizer)
    # Only this pre-tokenizer has the field; inside a sequence it is not changed.
    if wanted is not None and state.get("type") == "ByteLevel" and state["add_prefix_space"] != wanted:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=wanted, use_regex=state["use_regex"])


def _match_post_processor(backend: Any, config: Mapping[str, Any], kind: TokenizerClass) -> None:
    """Byte-level BPE: whether offsets exclude the spaces around words, and whether the first word got one."""
    state = component(backend.post_processor)
    if not kind.trims or state.get("type") not in {"ByteLevel", "RobertaProcessing"}:
        return
    wanted = {
        "add_prefix_space": _stated(config, "add_prefix_space", default=kind.prefix_space),
        "trim_offsets": _stated(config, "trim_offsets", default=True),
    }
    if all(state[field] == value for field, value in wanted.items()):
        return
    if state["type"] == "ByteLevel":
        backend.post_processor = processors.ByteLevel(**wanted, use_regex=state["use_regex"])
    else:
        backend.post_processor = processors.RobertaProcessing(
            sep=tuple(state["sep"]), cls=tuple(state["cls"]), **wanted
        )


def _ends(
    path: Path, backend: Any, config: Mapping[str, Any], specials: Mapping[str, int], defaults: tuple[bool, bool]
) -> Any:
    """The post-processor of Llama's and Gemma's classes: a first and a last token of each text, by the settings.

    CorruptModel if such a token is not known.
    """
    wanted = {
        "bos_token": _stated(config, "add_bos_token", default=defaults[0]),
        "eos_token": _stated(config, "add_eos_token", default=defaults[1]),
    }
    found = {role: specials.get(role) for role, is_added in wanted.items() if is_added}
    for role, number in found.items():
        if number is None:
            raise CorruptModel(
                f"{path} has no {role}, which its tokenizer_config.json adds to each text",
                remedy="Fetch the model again",
            )
    names = {role: backend.id_to_token(number) for role, number in found.items()}

    def text(place: str, kind: int) -> list[str]:
        first, last = names.get("bos_token"), names.get("eos_token")
        parts = [(first, kind), (place, kind), (last, kind)]
        return [f"{part}:{number}" for part, number in parts if part is not None]

    return processors.TemplateProcessing(
        single=text("$A", 0),
        pair=[*text("$A", 0), *text("$B", 1)],
        special_tokens=[(names[role], number) for role, number in found.items()],
    )


def _stated(config: Mapping[str, Any], key: str, *, default: bool | None) -> bool | None:
    value = config.get(key)
    return value if isinstance(value, bool) else default


def component(part: Any) -> dict[str, Any]:
    """A component of the tokenizer as in tokenizer.json; empty if there is none, or it is written in Python."""
    if part is None:
        return {}
    try:
        state = json.loads(part.__getstate__())
    except Exception:  # the library's plain Exception for components that cannot be serialised
        return {}
    return state if isinstance(state, dict) else {}


def _lowers(state: Mapping[str, Any]) -> bool:
    if state.get("type") == "Sequence":
        return any(_lowers(step) for step in state.get("normalizers", ()))
    return state.get("type") == "Lowercase" or bool(state.get("lowercase"))
