"""Makes a tokenizer.json of the files of transformers' slow tokenizers: vocab.txt, vocab.json with merges.txt, and the
models of sentencepiece.

The steps follow transformers 4.57 (`convert_slow_tokenizer`), by tokenizer class. Further settings of
tokenizer_config.json, such as added tokens, are applied later, as for every tokenizer.json (`tokens.backend`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penstock.errors import CorruptModel, PenstockError, UnsupportedModel
from penstock_runtime.models.files import open_within, read_object, read_optional
from penstock_runtime.models.merges import merges_of
from penstock_runtime.tokens.classes import class_name, class_of
from penstock_runtime.tokens.sentencepiece import CONTROL, USER_DEFINED, SentencePiece, read_model

SPACE = "\u2581"
"""sentencepiece's character for a space."""
BEYOND = 100.0
"""Taken off the scores of pieces that are not to be used."""
EXTRA_IDS = 100
"""T5's default number of `<extra_id_N>`."""
MOST_EXTRA_IDS = 10_000
"""More than any model has; keeps a damaged count from filling the memory."""


def convert(path: Path, config: Mapping[str, Any]) -> bytes:
    """The tokenizer.json of the model folder `path` with this config.json, which has no such file.

    UnsupportedModel for a tokenizer class that is not known here, or without its files; CorruptModel for invalid
    files.
    """
    settings = read_optional(path, "tokenizer_config.json")
    name = class_name(settings, config)
    made_by = _CONVERTERS.get(name)
    if made_by is None:
        raise _no_tokenizer(path, f"its tokenizer class is {name or 'not stated'}")
    files, converter = made_by
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise _no_tokenizer(path, f"{name}Tokenizer needs {' and '.join(missing)}")
    try:
        backend = converter(_Source(path, files, settings, config))
        return str(backend.to_str()).encode()
    except PenstockError:
        raise
    except Exception as error:  # ValueError, and the library's plain Exception
        raise CorruptModel(
            f"{path}: no tokenizer can be made of {' and '.join(files)}: {error}", remedy="Fetch the model again"
        ) from error


def _no_tokenizer(path: Path, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{path} has no tokenizer.json, and none can be made: {reason}",
        remedy='Write one with python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained('{path}').save_pretrained('{path}')\" (docs/how-to/convert-a-model.md#tokenizer)",
    )


@dataclass(frozen=True)
class _Source:
    """The files of a tokenizer."""

    path: Path
    files: tuple[str, ...]
    settings: Mapping[str, Any]
    """tokenizer_config.json."""
    config: Mapping[str, Any] = field(repr=False)

    @cached_property
    def _special(self) -> dict[str, Any]:
        return read_optional(self.path, "special_tokens_map.json")

    def token(self, role: str) -> str:
        """A special token by role, such as `cls_token`: as stated, else the default of the class."""
        stated = self.settings.get(role) or self._special.get(role)
        content = stated.get("content") if isinstance(stated, dict) else stated
        return str(content or class_of(self.settings, self.config).names.get(role) or _OTHER_NAMES[role])

    def flag(self, name: str, *, default: bool) -> bool:
        """A setting that is true or false."""
        value = self.settings.get(name)
        return value if isinstance(value, bool) else default

    def lines(self, name: str) -> list[str]:
        """The lines of a text file. CorruptModel if it is not UTF-8."""
        with open_within(self.path, self.path / name) as file:
            content = file.read()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptModel(f"{self.path / name} is not text in UTF-8", remedy="Fetch the model again") from error
        lines = text.replace("\r\n", "\n").split("\n")
        return lines if lines[-1] else lines[:-1]

    @cached_property
    def pieces(self) -> SentencePiece:
        """The model of sentencepiece."""
        return read_model(self.path, self.path / self.files[0])


_OTHER_NAMES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
}


def _template(backend: Any, single: str, pair: str) -> Any:
    """The tokens around texts; ValueError if the vocabulary lacks one."""
    tokens = dict.fromkeys(part.split(":")[0] for part in pair.split() if not part.startswith("$"))
    numbers = [(token, backend.token_to_id(token)) for token in tokens]
    lacking = [token for token, number in numbers if number is None]
    if lacking:
        raise ValueError(f"the vocabulary has no token {lacking[0]!r}, which is put around texts")
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=numbers)


def _add_normalized(backend: Any, source: _Source, *roles: str) -> None:
    """Special tokens as the slow classes make them: found in texts after normalisation."""
    for role in roles:
        backend.add_special_tokens([AddedToken(source.token(role), normalized=True, special=True)])


# ---- vocab.txt ----


def _word_piece(source: _Source, pair: str = "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1") -> Any:
    """Of a word that is listed twice, the last line counts."""
    vocabulary = {token: index for index, token in enumerate(source.lines(source.files[0]))}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=source.token("unk_token")))
    strip_accents = source.settings.get("strip_accents")
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=source.flag("tokenize_chinese_chars", default=True),
        strip_accents=strip_accents if isinstance(strip_accents, bool) else None,
        lowercase=source.flag("do_lower_case", default=True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls, sep = source.token("cls_token"), source.token("sep_token")
    backend.post_processor = _template(backend, f"{cls}:0 $A:0 {sep}:0", pair.format(cls=cls, sep=sep))
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _mpnet(source: _Source) -> Any:
    return _word_piece(source, "{cls}:0 $A:0 {sep}:0 {sep}:0 $B:1 {sep}:1")


# ---- vocab.json and merges.txt ----


def _byte_level(source: _Source) -> Any:
    vocabulary = read_object(source.path, source.files[0])
    # The first line is a version.
    merges = [tuple(line.split()) for line in source.lines(source.files[1])[1:] if line.strip()]
    backend = Tokenizer(models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    prefix = source.flag("add_prefix_space", default=False)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    around = [(source.token(role), backend.token_to_id(source.token(role))) for role in ("sep_token", "cls_token")]
    backend.post_processor = processors.RobertaProcessing(*around, add_prefix_space=prefix, trim_offsets=True)
    _add_normalized(backend, source, "bos_token", "pad_token", "eos_token", "unk_token")
    return backend


# ---- sentencepiece ----

Vocabulary = list[tuple[str, float]]
_SPACES = Regex(" {2,}")
_BERT_TEMPLATE = ("[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1")
_ROBERTA_TEMPLATE = ("<s> $A </s>", "<s> $A </s> </s> $B </s>")


def _pieces(
    source: _Source,
    *,
    vocabulary: Vocabulary | None = None,
    unknown: int | None = None,
    normalizer: Sequence[Any] | None = None,
    before: Sequence[Any] = (),
    template: tuple[str, str] | None = None,
) -> Any:
    """The steps that the classes have in common. `vocabulary` and `unknown` (its index): of the model's own by default.
    `before`: pre-tokenizers before the one that splits at spaces."""
    model = source.pieces
    scored = model.pieces if vocabulary is None else vocabulary
    unknown_id = model.unknown_id if unknown is None else unknown
    backend = Tokenizer(
        models.Unigram(scored, unk_id=unknown_id) if model.is_unigram else _merged(scored, model, byte_fallback=False)
    )
    _add_symbols(backend, model)
    own = [normalizers.Strip(left=False, right=True), normalizers.Replace(_SPACES, SPACE)]
    steps = [*_charsmap(model), *own] if normalizer is None else normalizer
    backend.normalizer = normalizers.Sequence(list(steps))
    scheme = "always" if source.flag("add_prefix_space", default=True) else "never"
    if scheme == "always" and not source.flag("legacy", default=True):
        scheme = "first"
    split = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, split]) if before else split
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    if template is not None:
        backend.post_processor = _template(backend, *template)
    return backend


def _add_symbols(backend: Any, model: SentencePiece) -> None:
    """Control tokens, which are special, and symbols that the model's author defined."""
    backend.add_tokens(
        [
            AddedToken(piece, normalized=False, special=kind == CONTROL)
            for (piece, _), kind in zip(model.pieces, model.kinds, strict=True)
            if kind in {CONTROL, USER_DEFINED}
        ]
    )


def _merged(scored: Vocabulary, model: SentencePiece, *, byte_fallback: bool) -> Any:
    ids = {piece: index for index, (piece, _) in enumerate(scored)}
    return models.BPE(
        ids, merges_of(scored, ids), unk_token=model.unknown_piece, fuse_unk=True, byte_fallback=byte_fallback
    )


def _charsmap(model: SentencePiece) -> list[Any]:
    return [normalizers.Precompiled(model.charsmap)] if model.charsmap else []


def _behind_fairseq(source: _Source, first: Vocabulary, skipped: int) -> Any:
    """Tokens of fairseq come first, instead of the first ones of the model, and the mask token comes last."""
    vocabulary = [*first, *source.pieces.pieces[skipped:], ("<mask>", 0.0)]
    return _pieces(source, vocabulary=vocabulary, unknown=3, template=_ROBERTA_TEMPLATE)


def _xlm_roberta(source: _Source) -> Any:
    return _behind_fairseq(source, [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)], 3)


def _camembert(source: _Source) -> Any:
    names = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>")
    return _behind_fairseq(source, [*((name, 0.0) for name in names), ("<unk>NOTUSED", -BEYOND)], 1)


def _albert_steps(source: _Source, *, lower_case: bool) -> list[Any]:
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not source.flag("keep_accents", default=False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if source.flag("do_lower_case", default=lower_case):
        steps.append(normalizers.Lowercase())
    return [*steps, *_charsmap(source.pieces), normalizers.Replace(_SPACES, " ")]


def _without_number_commas(source: _Source) -> Vocabulary:
    """Pieces such as `1,` are hardly used."""
    return [
        (piece, score - BEYOND if len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit() else score)
        for piece, score in source.pieces.pieces
    ]


def _albert(source: _Source) -> Any:
    return _pieces(
        source,
        vocabulary=_without_number_commas(source),
        normalizer=_albert_steps(source, lower_case=True),
        template=_BERT_TEMPLATE,
    )


def _xlnet(source: _Source) -> Any:
    return _pieces(
        source,
        vocabulary=_without_number_commas(source),
        normalizer=_albert_steps(source, lower_case=False),
        template=("$A:0 <sep>:0 <cls>:2", "$A:0 <sep>:0 $B:1 <sep>:1 <cls>:2"),
    )


def _deberta(source: _Source) -> Any:
    steps = [normalizers.Lowercase()] if source.flag("do_lower_case", default=False) else []
    steps += [normalizers.Strip(), *_charsmap(source.pieces), normalizers.Replace(_SPACES, " ")]
    split = source.flag("split_by_punct", default=False)
    before = [pre_tokenizers.Punctuation(behavior="isolated")] if split else []
    backend = _pieces(source, normalizer=steps, before=before, template=_BERT_TEMPLATE)
    _add_normalized(backend, source, "unk_token")
    return backend


def _t5(source: _Source) -> Any:
    count = source.settings.get("extra_ids", EXTRA_IDS)
    if not isinstance(count, int) or not 0 <= count <= MOST_EXTRA_IDS:
        raise ValueError(f"extra_ids is {count!r}")
    extra = [f"<extra_id_{index}>" for index in range(count)]
    vocabulary = [*source.pieces.pieces, *((name, 0.0) for name in reversed(extra))]
    backend = _pieces(source, vocabulary=vocabulary, template=("$A </s>", "$A </s> $B </s>"))
    backend.add_special_tokens(extra)
    return backend


def _llama(source: _Source) -> Any:
    """Llama, Mistral: BPE with bytes for characters that the vocabulary lacks."""
    model = source.pieces
    backend = Tokenizer(
        models.Unigram(model.pieces, unk_id=0, byte_fallback=True)
        if model.is_unigram
        else _merged(model.pieces, model, byte_fallback=True)
    )
    _add_symbols(backend, model)
    prefix = source.flag("add_prefix_space", default=True)
    if source.flag("legacy", default=True):
        steps = [normalizers.Prepend(SPACE)] if prefix else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    else:
        scheme = "first" if prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    before = [source.token("bos_token")] if source.flag("add_bos_token", default=True) else []
    after = [source.token("eos_token")] if source.flag("add_eos_token", default=False) else []
    single = [*(f"{token}:0" for token in before), "$A:0", *(f"{token}:0" for token in after)]
    second = [*(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
    if before or after:
        backend.post_processor = _template(backend, " ".join(single), " ".join([*single, *second]))
    return backend


_WORDS, _BYTES = ("vocab.txt",), ("vocab.json", "merges.txt")
_BERTS = (
    "Bert", "ConvBert", "DPRContextEncoder", "DPRQuestionEncoder", "DPRReader", "DistilBert", "Electra", "LayoutLM",
    "Lxmert", "MobileBert", "Realm", "RetriBert", "SqueezeBert",
)  # fmt: skip
_ROBERTAS = ("Bart", "LED", "Longformer", "Mvp", "Roberta")
_Converter = Callable[[_Source], Any]
_CONVERTERS: Mapping[str, tuple[tuple[str, ...], _Converter]] = {
    **dict.fromkeys(_BERTS, (_WORDS, _word_piece)),
    "MPNet": (_WORDS, _mpnet),
    **dict.fromkeys(_ROBERTAS, (_BYTES, _byte_level)),
    "Albert": (("spiece.model",), _albert),
    "Camembert": (("sentencepiece.bpe.model",), _camembert),
    "DebertaV2": (("spm.model",), _deberta),
    "Llama": (("tokenizer.model",), _llama),
    "T5": (("spiece.model",), _t5),
    "XLMRoberta": (("sentencepiece.bpe.model",), _xlm_roberta),
    "XLNet": (("spiece.model",), _xlnet),
}
"""By the name of the class: the files that it reads, and what makes the tokenizer of them."""
