"""Reads the model files of sentencepiece, which are messages of protobuf (`sentencepiece_model.proto`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.errors import CorruptModel, UnsupportedModel
from penstock_runtime.models.files import open_within

UNIGRAM, BPE = 1, 2
"""`TrainerSpec.model_type`."""
CONTROL, USER_DEFINED = 3, 4
"""`SentencePiece.type`; 1: a normal piece, 2: the unknown token, 5: not used, 6: a byte."""


@dataclass(frozen=True, eq=False)
class SentencePiece:
    """The parts of a model that a tokenizer needs."""

    pieces: list[tuple[str, float]]
    """Texts and scores, in the order of ids."""
    kinds: list[int]
    """Their types."""
    is_unigram: bool
    """Otherwise BPE."""
    unknown_id: int
    unknown_piece: str
    charsmap: bytes
    """The table of the normalisation, compiled; empty: none."""


def read_model(folder: Path, path: Path) -> SentencePiece:
    """The model in a file of a model folder. CorruptModel for another file; UnsupportedModel for other algorithms."""
    from google.protobuf.message import DecodeError

    with open_within(folder, path) as file:
        content = file.read()
    message = _message()()
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise CorruptModel(
            f"{path} is not a model of sentencepiece: {error}", remedy="Fetch the model again (git lfs pull)"
        ) from error
    pieces = [(piece.piece, piece.score) for piece in message.pieces]
    trainer = message.trainer_spec
    if not pieces:
        raise CorruptModel(f"{path} is not a model of sentencepiece: it has no pieces", remedy="Fetch the model again")
    if trainer.model_type not in {UNIGRAM, BPE}:
        raise UnsupportedModel(
            f"{path} splits words or characters (model_type {trainer.model_type})",
            remedy="Use a model whose tokenizer is Unigram or BPE",
        )
    return SentencePiece(
        pieces=pieces,
        kinds=[piece.type for piece in message.pieces],
        is_unigram=trainer.model_type == UNIGRAM,
        unknown_id=trainer.unk_id,
        unknown_piece=trainer.unk_piece,
        charsmap=message.normalizer_spec.precompiled_charsmap,
    )


_FIELDS: dict[str, list[tuple[str, int, str, str]]] = {
    "Piece": [("piece", 1, "STRING", ""), ("score", 2, "FLOAT", ""), ("type", 3, "INT32", "1")],
    "Trainer": [("model_type", 3, "INT32", "1"), ("unk_id", 40, "INT32", "0"), ("unk_piece", 45, "STRING", "<unk>")],
    "Normalizer": [("precompiled_charsmap", 2, "BYTES", "")],
}
"""The fields that are read: name, number, type, default. protobuf skips the rest."""
_PARTS = [("pieces", 1, "Piece"), ("trainer_spec", 2, "Trainer"), ("normalizer_spec", 3, "Normalizer")]


@cache
def _message() -> Any:
    """The class of the message."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    package = "penstock.sentencepiece"
    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece.proto", package=package, syntax="proto2")
    for name, fields in _FIELDS.items():
        part = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            one = part.field.add(name=field, number=number, label=kinds.LABEL_OPTIONAL)
            one.type = getattr(kinds, f"TYPE_{kind}")
            if default:
                one.default_value = default
    whole = file.message_type.add(name="Model")
    for field, number, kind in _PARTS:
        label = kinds.LABEL_REPEATED if field == "pieces" else kinds.LABEL_OPTIONAL
        one = whole.field.add(name=field, number=number, label=label, type=kinds.TYPE_MESSAGE)
        one.type_name = f".{package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.Model"))
