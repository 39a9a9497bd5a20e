"""Texts in a given form: a JSON schema or a regular expression decides which tokens may come next (llguidance)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from penstock_runtime.errors import InvalidInput
from penstock_runtime.generation.grammar_check import GrammarChecker

LONGEST_GRAMMAR = 100_000
"""Characters of a schema or an expression."""

WHITESPACE = r"[ \n]{0,16}"
"""Small models otherwise fill the answer with spaces, which JSON allows anywhere."""
LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""A state has some 2 kB. With verbose errors, texts of other requests could get into logs."""

_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-grammar")


async def in_grammar_thread(work: Callable[[], GrammarState]) -> GrammarState:
    """Make a grammar in the thread for it: large ones take a while, and threads for other work stay free."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


class GrammarState:
    """Where a text is in its grammar. For one continuation."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def copy(self) -> GrammarState:
        """Another state at the same place."""
        return GrammarState(self._matcher.deep_copy(), self._vocabulary)

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, [vocabulary]. ValueError if the grammar became too complex for this text."""
        packed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise ValueError(f"the grammar of a request failed: {self._matcher.get_error()}")
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little")
        return bits[: self._vocabulary].astype(np.bool_)

    def accept(self, token: int) -> bool:
        """An allowed token was chosen; true if nothing may follow it."""
        return not self._matcher.consume_token(token) or self._matcher.is_stopped()


class Grammars:
    """Makes grammars for the tokens of one model."""

    def __init__(self, tokenizer_json: str, vocabulary: int, end_tokens: Collection[int]) -> None:
        """`vocabulary`: number of logits. `end_tokens`: allowed where the text may end."""
        ends = sorted(end_tokens) or None
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocabulary, eos_token=ends)
        self._vocabulary = vocabulary
        self._checker = GrammarChecker()

    def of_json_schema(self, schema: Any, field: str) -> GrammarState:
        """A text that is JSON of this schema. InvalidInput about `field` for an invalid or unsupported schema."""
        if not isinstance(schema, dict | bool):
            raise InvalidInput(f"{field} must be a JSON schema", field=field, remedy="Send an object")
        text = json.dumps(schema)
        self._check_length(text, field)
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE})
        except ValueError as error:
            raise _invalid(field, str(error)) from None
        return self._start(grammar, field)

    def of_regex(self, expression: Any, field: str) -> GrammarState:
        """A text that matches a regular expression as a whole. InvalidInput about `field` for an invalid one."""
        if not isinstance(expression, str) or not expression:
            raise InvalidInput(f"{field} must be a regular expression", field=field, remedy="Send a text")
        self._check_length(expression, field)
        return self._start(llguidance.LLMatcher.grammar_from_regex(expression), field)

    def of_lark(self, grammar: str, field: str) -> GrammarState:
        """A text of a grammar in llguidance's variant of Lark. InvalidInput about `field` as for schemas."""
        self._check_length(grammar, field)
        return self._start(llguidance.LLMatcher.grammar_from_lark(grammar), field)

    def _check_length(self, text: str, field: str) -> None:
        if len(text) > LONGEST_GRAMMAR:
            raise InvalidInput(
                f"{field} has {len(text)} characters; at most {LONGEST_GRAMMAR} are accepted",
                field=field,
                remedy="Send a smaller one",
            )

    def _start(self, grammar: str, field: str) -> GrammarState:
        error = self._checker.error(grammar)
        if error:
            raise _invalid(field, error)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _invalid(field, matcher.get_error())
        return GrammarState(matcher, self._vocabulary)


def _invalid(field: str, reason: str) -> InvalidInput:
    return InvalidInput(
        f"{field} cannot be followed: {' '.join(reason.split())[:300]}",
        field=field,
        remedy="Correct it, or leave out what is not supported",
    )
