"""From the texts of a request to rows: prompts before texts, and truncation to the model's limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from penstock.errors import SpecError, UnsupportedModel
from penstock.resources.endpoint_parts.serving import Prompts
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.multi_vector import DOCUMENT, QUERY
from penstock_runtime.rows import AnyPooling, Row
from penstock_runtime.tasks.base import DEFAULT_LIMITS, RequestLimits
from penstock_runtime.tasks.fields import Boolean, Choice, FieldKind, Integer, Text, near
from penstock_runtime.tokens import Pieces, Side, Template, Tokenizer, longest_first, windows
from penstock_runtime.tokens.pieces import count_windows

TRUNCATION: dict[str, tuple[FieldKind, Any]] = {
    "truncate": (Boolean(), None),
    "truncation_direction": (Choice(("left", "right"), any_case=True), None),
}
TRUNCATION_NOTES = {
    "truncate": "Cut texts that are too long for the model; false refuses them. Default: the endpoint's setting.",
    "truncation_direction": "Which end is given up. Default: the tokenizer's own, mostly right.",
}


MOST_CHARACTERS = 400_000
"""Of a text in windows. Each may be a token, which takes half a kilobyte while the text is tokenised."""
WINDOWS: dict[str, tuple[FieldKind, Any]] = {
    "stride": (Integer(0, 1_000_000), None),
    "max_windows": (Integer(1, 1_000_000), None),
}
WINDOW_NOTES = {
    "max_windows": "With stride: windows of a text that are read; the rest of a longer text is cut. Default: all, and "
    "a request with more than the limit of rows is refused.",
}


@dataclass(frozen=True, slots=True)
class Truncation:
    """The rule for texts that are too long, of the endpoint or of one request."""

    cut: bool
    side: Side

    def asked(self, cut: bool | None, side: str | None) -> Truncation:
        """This rule with the parameters of a request."""
        if cut is None and side is None:
            return self
        return Truncation(
            cut=self.cut if cut is None else cut,
            side=self.side if side is None else Side(side),
        )


class Fitter:
    """The tokenizer with the model's limit. Immutable."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, *, truncate: bool, pairs: bool) -> None:
        """`pairs`: rows of the task hold two texts. UnsupportedModel if a row has no room for text."""
        for template in (tokenizer.single, tokenizer.pair) if pairs else (tokenizer.single,):
            if max_tokens <= template.specials:
                raise UnsupportedModel(
                    f"{max_tokens} tokens leave no room besides the {template.specials} special tokens of this model",
                    remedy="Raise serving.maxInputTokens, or the model's own limit (model_max_length, max_seq_length)",
                )
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.rule = Truncation(cut=truncate, side=tokenizer.side)

    def room(self, template: Template) -> int:
        """Tokens of text that fit into a row."""
        return self.max_tokens - template.specials

    def split(self, texts: Sequence[str], template: Template, side: Side, *, offsets: bool = False) -> list[Pieces]:
        """The tokens of each text, as many as are needed for a row of this template."""
        return self.tokenizer.split(texts, limit=self.room(template), side=side, offsets=offsets)

    def singles(
        self,
        texts: Sequence[str] | Sequence[Pieces],
        where: Sequence[str],
        rule: Truncation,
        pooling: AnyPooling | None = None,
        *,
        template: Template | None = None,
    ) -> tuple[list[Row], int]:
        """One row for each text (or tokenised text), to be pooled by `pooling`, and how many of them were cut.

        `template`: the special tokens around them, if not the tokenizer's. `where` names the texts in errors.
        InvalidInput for the first text that is too long if `rule` does not cut, the first with a token that the model
        does not have, or the first without any token (`require_tokens`).
        """
        template = template or self.tokenizer.single
        room = self.room(template)
        if texts and isinstance(texts[0], Pieces):
            tokenised = cast("Sequence[Pieces]", texts)
        else:
            tokenised = self.split(cast("Sequence[str]", texts), template, rule.side)
        rows, cut = [], 0
        for pieces, field in zip(tokenised, where, strict=True):
            if len(pieces) > room:
                self.refuse_unless(rule, pieces, template, field)
                cut += 1
            ids = pieces.keep(room, rule.side).ids
            self.tokenizer.require_embedded(ids, field)
            rows.append(self.require_tokens(template.row(ids, pooling=pooling), field))
        return rows, cut

    def check_windows(self, values: Mapping[str, Any]) -> None:
        """InvalidInput if the parameters of `WINDOWS` do not fit the model, or each other."""
        stride, room = values["stride"], self.room(self.tokenizer.single)
        if stride is not None and stride >= room:
            raise InvalidInput(
                f"parameters.stride is {stride}; windows of this model have {room} tokens",
                field="parameters.stride",
                remedy=f"Send less than {room}",
            )
        if stride is None and values["max_windows"] is not None:
            raise InvalidInput(
                "parameters.max_windows is for long texts in windows, and there is no stride",
                field="parameters.max_windows",
                remedy="Send parameters.stride, too: the tokens that windows share, such as 32",
            )

    def windows(
        self,
        texts: Sequence[str],
        where: Sequence[str],
        stride: int,
        *,
        most: int | None,
        rows: int,
    ) -> tuple[list[list[Pieces]], list[int | None]]:
        """The windows of each text, neighbours sharing `stride` tokens, and after how many characters a text was cut
        that has more than `most` windows. InvalidInput for more than `rows` windows together."""
        room, side = self.room(self.tokenizer.single), self.rule.side
        step = room - stride
        # Only as much of a text as the limits allow is tokenised.
        kept = room + (most - 1) * step if most is not None and most <= rows else None
        limit = room + rows * step if kept is None else kept
        found: list[list[Pieces]] = []
        ends: list[int | None] = []
        total = 0
        for text, field in zip(texts, where, strict=True):
            if len(text) > MOST_CHARACTERS:
                raise InvalidInput(
                    f"{field} has {len(text)} characters; at most {MOST_CHARACTERS} are read in windows",
                    field=field,
                    remedy="Send it in parts",
                )
            # One at a time: texts beyond the limit of rows are not tokenised.
            (pieces,) = self.tokenizer.split([text], limit=limit, side=side, offsets=True)
            whole = pieces if kept is None else pieces.keep(kept, side)
            total += count_windows(len(whole), room, stride)
            if total > rows:
                raise InvalidInput(
                    f"{field} goes over the limit of {rows} windows in one request",
                    field=field,
                    remedy="Send less text, or a smaller stride",
                )
            ends.append(end_of(whole, side) if len(whole) < len(pieces) else None)
            found.append([whole.part(*window) for window in windows(len(whole), room, stride, side)])
        return found, ends

    def pair(self, first: Pieces, second: Pieces, where: str, rule: Truncation) -> tuple[Row, bool]:
        """One row of two texts, and whether it was cut: the longer text is cut first. InvalidInput as `singles`."""
        template = self.tokenizer.pair
        room = self.room(template)
        cut = len(first) + len(second) > room
        if cut:
            self.refuse_unless(rule, first, template, where, second)
            kept_first, kept_second = longest_first(len(first), len(second), room)
            first, second = first.keep(kept_first, rule.side), second.keep(kept_second, rule.side)
        self.tokenizer.require_embedded(chain(first.ids, second.ids), where, label=f"{where} with its pair")
        return self.require_tokens(template.row(first.ids, second.ids), where, label=f"{where} with its pair"), cut

    @staticmethod
    def require_tokens(row: Row, where: str, *, label: str = "") -> Row:
        """The row; InvalidInput (arguments as for `Tokenizer.require_embedded`) if it has no tokens.

        White space, or characters that the tokenizer drops, give no tokens where the template has no special tokens.
        """
        if not row.ids:
            raise InvalidInput(
                f"{label or where} has no tokens", field=where, remedy="Send a text with something in it"
            )
        return row

    def refuse_unless(
        self, rule: Truncation, first: Pieces, template: Template, where: str, second: Pieces | None = None
    ) -> None:
        """InvalidInput with the length of the text, unless `rule` allows to cut it."""
        if rule.cut:
            return
        count = len(first) + template.specials + (0 if second is None else len(second))
        exact = first.complete and (second is None or second.complete)
        raise InvalidInput(
            f"{where}{'' if second is None else ' with its pair'} has {'' if exact else 'more than '}{count} tokens; "
            f"this model takes {self.max_tokens}",
            field=where,
            remedy="Send a shorter text, or set parameters.truncate to true",
        )


def end_of(kept: Pieces, side: Side) -> int:
    """How many of a text's first characters are in the part that is left of it, with offsets. Cut at its beginning, it
    has none of them."""
    return kept.offsets[-1][1] if kept.offsets and side is Side.RIGHT else 0


PROMPT: dict[str, tuple[FieldKind, Any]] = {"prompt_name": (Text("the name of a prompt"), None)}
PROMPT_NOTES = {
    "prompt_name": "The prompt to put before each text: one of the endpoint (serving.prompts), or of the model "
    "(config_sentence_transformers.json). Default: the endpoint's for this route, or its default; else the model's "
    "default prompt, mostly none."
}
ROUTE_ALIASES = {
    "/": "/predict",
    "/v2/models/{name}/versions/{version}/infer": "/v2/models/{name}/infer",
    "/api/embed": "/embed",
    "/api/embeddings": "/embed",
}
"""Routes that take their default prompt from another route."""


@dataclass(frozen=True)
class PromptTexts:
    """All prompts by name, and the text for requests that name none."""

    texts: Mapping[str, str]
    default: str
    default_name: str | None = None
    """The endpoint's; None: it names none."""

    @classmethod
    def of(cls, folder: ModelFolder, prompts: Prompts | None) -> PromptTexts:
        """The prompts of a model, changed by the endpoint's.

        SpecError for a `default` or a route's prompt that neither has.
        """
        own = folder.prompts
        if folder.multi_vector is not None:
            # Queries and documents differ in more than their prompts.
            own = {QUERY: "", DOCUMENT: "", **own}
        if prompts is None:
            return cls(own, folder.default_prompt)
        texts = {**own, **prompts.texts}
        named = {"default": prompts.default, **{f"routes[{path}]": name for path, name in prompts.routes.items()}}
        for field, name in named.items():
            if name is not None and name not in texts:
                raise SpecError(
                    f"serving.prompts.{field} is {name!r}, and neither serving.prompts.texts nor the model has this "
                    "prompt",
                    field=f"spec.serving.prompts.{field}",
                    remedy=f"Add its text to serving.prompts.texts, or name one of {', '.join(sorted(texts))}"
                    if texts
                    else "Add its text to serving.prompts.texts",
                )
        default = folder.default_prompt if prompts.default is None else texts[prompts.default]
        return cls(texts, default, prompts.default)

    def text(self, name: str | None) -> str:
        """The text of a prompt, or the default; InvalidInput if there is none of this name."""
        if name is None:
            return self.default
        if name not in self.texts:
            raise InvalidInput(
                f"parameters.prompt_name: there is no prompt {name[:100]!r}",
                field="parameters.prompt_name",
                remedy=near(name, list(self.texts)) if self.texts else "Leave it out: this endpoint has no prompts",
            )
        return self.texts[name]


class PromptedTask:
    """What tasks with prompts are made of."""

    def __init__(
        self,
        fitter: Fitter,
        folder: ModelFolder,
        limits: RequestLimits = DEFAULT_LIMITS,
        prompts: Prompts | None = None,
    ) -> None:
        """`prompts`: the endpoint's. Errors as `PromptTexts.of`."""
        self.tokenizer = fitter.tokenizer
        self._fitter = fitter
        self._rule = fitter.rule
        self._limits = limits
        self._prompts = PromptTexts.of(folder, prompts)


def of_routes(prompts: Prompts | None) -> dict[str, str]:
    """The default prompt of each route that has a separate one, by the path in the route table."""
    if prompts is None:
        return {}
    aliases = {alias: prompts.routes[path] for alias, path in ROUTE_ALIASES.items() if path in prompts.routes}
    return {**prompts.routes, **aliases}
