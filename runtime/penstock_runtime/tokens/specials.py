"""Special and added tokens, from tokenizer.json, the other tokenizer files of the folder, and the tokenizer class.

The steps and their order are the same as in transformers' `PreTrainedTokenizerBase._from_pretrained` and
`PreTrainedTokenizerFast.__init__`. The order decides the ids of tokens that are not in the vocabulary, and which of two
definitions of a token is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import AddedToken

from penstock.errors import CorruptModel
from penstock_runtime.models.files import read_optional
from penstock_runtime.tokens.classes import UNKNOWN, TokenizerClass

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDITIONAL = "additional_special_tokens"
DECODER = "added_tokens_decoder"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "mask_token": ("[MASK]", "<mask>"),
}
"""For folders that define neither the token nor a class with a default."""

Token: TypeAlias = str | AddedToken


@dataclass(frozen=True)
class TokenFiles:
    """The token definitions of the files other than tokenizer.json."""

    path: Path
    settings: Mapping[str, Any]
    """tokenizer_config.json."""
    special: Mapping[str, Any]
    """special_tokens_map.json."""
    added: Mapping[str, Any]
    """added_tokens.json."""

    @classmethod
    def read(cls, path: Path) -> TokenFiles:
        """The files of the folder `path`; a missing one is empty. CorruptModel if one is not a JSON object."""
        return cls(
            path,
            read_optional(path, "tokenizer_config.json"),
            read_optional(path, "special_tokens_map.json"),
            read_optional(path, "added_tokens.json"),
        )


def add_special_tokens(
    backend: Any, files: TokenFiles, kind: TokenizerClass, *, padding: str | None = None
) -> dict[str, int]:
    """Add missing or different tokens to `backend`. Returns the ids of the special tokens by role (`cls_token`).

    `padding`: the padding token of tokenizer.json, if any. CorruptModel for invalid token definitions.
    """
    stated, decoder = _stated(backend, files)
    more = stated.pop(ADDITIONAL, kind.additional) or []
    named: dict[str, Token | None] = {role: kind.names.get(role) for role in ROLES}
    named["pad_token"] = named["pad_token"] or padding
    named |= stated
    if kind is UNKNOWN:
        named |= {role: _usual(backend, role) for role in USUAL_NAMES if named[role] is None}
    named = {role: kind.wrapped(role, token) for role, token in named.items()}
    extra = files.settings.get("extra_special_tokens")
    extras = [[_token(value, files)] for value in extra.values()] if isinstance(extra, Mapping) else []
    _add(backend, decoder, _without_repeats([*([token] for token in named.values() if token), more, *extras]))
    if named["mask_token"] is None:
        # transformers has no mask token then; using a token that texts can contain anyway does no harm.
        named["mask_token"] = _usual(backend, "mask_token", added=True)
    found = {role: backend.token_to_id(str(token)) for role, token in named.items() if token}
    return {role: number for role, number in found.items() if number is not None}


def _stated(backend: Any, files: TokenFiles) -> tuple[dict[str, Any], dict[int, AddedToken]]:
    """The tokens that the files define, by role (None if explicitly null), and the added tokens by id."""
    stated = _named(files, files.settings)
    if DECODER in files.settings:
        decoder = spelt = _decoder(files)
    else:
        # Folders from before transformers 4.34, and hand-written ones.
        mapped = _named(files, files.special, special=True)
        more = stated.get(ADDITIONAL) or []
        if ADDITIONAL in mapped:
            mapped[ADDITIONAL] = [*more, *(token for token in mapped[ADDITIONAL] if token not in more)]
        unread = [token for token in _each(stated) if not isinstance(token, str)]
        stated |= mapped
        # Token objects in tokenizer_config.json are ignored here, as in transformers.
        names = {str(token) for token in _each(stated) if not any(token is one for one in unread)}
        spelt = backend.get_added_tokens_decoder()
        added = {
            _number(files, number): AddedToken(text, normalized=text not in names, special=text in names)
            for text, number in files.added.items()
        }
        decoder = added | spelt
    by_content = {token.content: token for token in spelt.values()}
    return {
        role: token if role == ADDITIONAL or token is None else by_content.get(str(token), token)
        for role, token in stated.items()
    }, decoder


def _each(stated: Mapping[str, Any]) -> Iterator[Token]:
    for role, token in stated.items():
        yield from token if role == ADDITIONAL else () if token is None else (token,)


def _named(files: TokenFiles, file: Mapping[str, Any], *, special: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {
        role: None if file[role] is None else _token(file[role], files, special=special)
        for role in ROLES
        if role in file
    }
    if ADDITIONAL in file:
        more = file[ADDITIONAL] or []
        if not isinstance(more, list):
            raise _corrupt(files, f"{ADDITIONAL} is {more!r}")
        found[ADDITIONAL] = [_token(value, files, special=special) for value in more]
    return found


def _decoder(files: TokenFiles) -> dict[int, AddedToken]:
    tokens = files.settings[DECODER]
    if not isinstance(tokens, Mapping) or not all(isinstance(value, Mapping) for value in tokens.values()):
        raise _corrupt(files, f"{DECODER} is not a table of tokens")
    return {_number(files, number): AddedToken(**_fields(files, value)) for number, value in tokens.items()}


def _token(value: object, files: TokenFiles, *, special: bool = False) -> Token:
    """A token from either form: a string, or an object with content and flags."""
    if isinstance(value, str):
        return value
    fields = _fields(files, value)
    return AddedToken(**(fields | {"special": True} if special else fields))


def _fields(files: TokenFiles, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise _corrupt(files, f"{value!r} is no token")
    flags = {flag: value[flag] for flag in FLAGS if isinstance(value.get(flag), bool)}
    return {"content": value["content"]} | flags


def _number(files: TokenFiles, value: object) -> int:
    try:
        return int(str(value))
    except ValueError as error:
        raise _corrupt(files, f"{value!r} is no token id") from error


def _corrupt(files: TokenFiles, what: str) -> CorruptModel:
    return CorruptModel(f"the tokens stated in {files.path}: {what}", remedy="Fetch the model again")


def _usual(backend: Any, role: str, *, added: bool = False) -> str | None:
    """The usual spelling of a token if it is in the vocabulary; with `added`, only if it is an added token."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()} if added else None
    return next(
        (
            name
            for name in USUAL_NAMES[role]
            if (backend.token_to_id(name) is not None if known is None else name in known)
        ),
        None,
    )


def _without_repeats(groups: Iterable[Sequence[Token]]) -> list[Token]:
    """For each content the tokens of the first group that has it; of duplicates in a group the last one wins."""
    found: list[Token] = []
    for group in groups:
        seen = {str(token) for token in found}
        found += [token for token in group if str(token) not in seen]
    return found


def _add(backend: Any, decoder: Mapping[int, AddedToken], special: Sequence[Token]) -> None:
    """Add the tokens that `backend` lacks or has with other flags; new tokens get the ids after its vocabulary."""
    known = backend.get_added_tokens_decoder().values()
    same = {repr(token) for token in known}
    adding: list[Token] = [token for _, token in sorted(decoder.items()) if repr(token) not in same]
    contents = {token.content for token in known} | {str(token) for token in adding}
    adding += [
        token
        for token in special
        # A string is new only if its content is. An object always counts as new, and its flags replace earlier ones.
        if (token not in adding if isinstance(token, AddedToken) else token not in contents)
    ]
    names = {str(token) for token in special}
    for index, token in enumerate(adding):
        if isinstance(token, AddedToken):
            token.special = token.special or token.content in names
        else:
            adding[index] = AddedToken(token, special=True)
    if adding:
        backend.add_tokens(adding)
