"""Texts in a given form: a JSON schema or a regular expression decides which tokens may come next (llguidance).

A client's grammar is never computed in the server's own process, but in processes with limits (`grammar_process`).
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from penstock_runtime.admission import FairLine
from penstock_runtime.errors import InvalidInput, Overloaded
from penstock_runtime.generation.tool_calls import WRITTEN_AS
from penstock_runtime.host.forks import ForkServer, exchange
from penstock_runtime.settings import QueueSettings

LONGEST_GRAMMAR = 100_000
"""Characters of a schema or an expression."""
PREPARE_SECONDS = 10.0
"""Longest wait for a grammar's preparation, which may compute for `grammar_process.CPU_SECONDS`."""
MASK_SECONDS = 10.0
"""Longest wait for the tokens that may come next; longer only on a machine that does nothing else."""
MOST_GRAMMARS, MOST_PER_CLIENT = 64, 16
"""Grammars in use, each a process of some megabytes."""
MOST_WAITING = 64
"""Grammars that wait for their preparation: one is prepared at a time."""
PROGRAM = "penstock_runtime.generation.grammar_process"
ENDED = "the process of a grammar has ended"
TOO_COMPLEX = "it takes too much time or memory to prepare"


@dataclass(frozen=True)
class GrammarText:
    """A grammar as the library reads it, not prepared yet. `field`: of the request, for errors."""

    text: str
    field: str


class Grammar:
    """A prepared grammar, in a process that ends when this object and its states are dropped.

    Its states share one socket, so they are for one thread. Its methods raise OSError if the process has ended at a
    limit, or does not answer.
    """

    def __init__(self, link: socket.socket, vocabulary: int, field: str) -> None:
        """`field`: of the request, for errors."""
        self._link = link
        self.field = field
        self._vocabulary = vocabulary
        self._states = 0
        self._waiting: list[GrammarState] = []
        weakref.finalize(self, link.close)

    def start(self) -> GrammarState:
        """The state of a text that begins, for one continuation. For any thread."""
        self._states += 1
        return GrammarState(self, self._states)

    def begin(self, state: GrammarState) -> None:
        """Let the process compute the first mask of a state."""
        self._send(b"s" + struct.pack("<I", state.number))
        self._waiting.append(state)

    def advance(self, state: GrammarState, token: int) -> bool:
        """Add a token to the text of a state; true if nothing may follow it. Otherwise the process goes on to compute
        the next mask."""
        self.collect()
        state.mask = None
        self._send(b"a" + struct.pack("<II", state.number, token))
        has_ended = self._read(1) != b"\x00"
        if not has_ended:
            self._waiting.append(state)
        return has_ended

    def collect(self) -> None:
        """Read the masks that the process computes, and give them to their states."""
        while self._waiting:
            state = self._waiting[0]
            failed = self._read(1) != b"\x00"
            answer = self._read(struct.unpack("<I", self._read(4))[0])
            if failed:
                state.failure = answer.decode()
            else:
                bits = np.unpackbits(np.frombuffer(answer, dtype=np.uint8), bitorder="little")
                # The library knows the tokens of the tokenizer only: a model may have further logits.
                state.mask = np.zeros(self._vocabulary, dtype=np.bool_)
                state.mask[: len(bits)] = bits[: self._vocabulary]
            del self._waiting[0]

    def _send(self, command: bytes) -> None:
        self._link.sendall(command)

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            piece = self._link.recv(size - len(found))
            if not piece:
                raise ConnectionResetError(ENDED)
            found += piece
        return bytes(found)


class GrammarState:
    """The position of a text in its grammar. For one continuation."""

    def __init__(self, grammar: Grammar, number: int) -> None:
        self._grammar = grammar
        self.number = number
        self._is_begun = False
        self.mask: NDArray[np.bool_] | None = None
        self.failure = ""

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, [vocabulary]. InvalidInput if the grammar became too complex for this text."""
        try:
            self._begin()
            if self.mask is None and not self.failure:
                self._grammar.collect()
        except OSError:
            self.failure = TOO_COMPLEX
        if self.mask is None:
            raise _invalid(self._grammar.field, self.failure)
        return self.mask

    def accept(self, token: int) -> bool:
        """An allowed token was chosen; true if nothing may follow it. After a failure, `allowed` raises."""
        try:
            self._begin()
            return self._grammar.advance(self, token)
        except OSError:
            self.failure = TOO_COMPLEX
            return False

    def _begin(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._grammar.begin(self)


class Grammars:
    """Prepares grammars for the tokens of one model."""

    def __init__(self, tokenizer_json: str, vocabulary: int, end_tokens: Collection[int]) -> None:
        """`vocabulary`: number of logits. `end_tokens`: allowed where the text may end."""
        self._vocabulary = vocabulary
        ends = ",".join(str(token) for token in sorted(end_tokens))
        self._parent = ForkServer(PROGRAM, [str(vocabulary), ends], tokenizer_json)
        self._slots = FairLine(1, QueueSettings(max_queue_rows=MOST_WAITING), "the preparation of a grammar")
        self._in_use: Counter[str] = Counter()
        # A grammar may be dropped in any thread, also while this one counts.
        self._lock = threading.RLock()

    async def prepare(self, text: GrammarText, client: str) -> Grammar:
        """Prepare a grammar. `client`: by which requests share the preparation, one at a time.

        InvalidInput about its field for one that is invalid, not supported, or takes too much time or memory;
        Overloaded if too many are in use or wait. When the caller is cancelled, the preparation ends.
        """
        async with self._slots.slot(client):
            if self._in_use.total() >= MOST_GRAMMARS or self._in_use[client] >= MOST_PER_CLIENT:
                raise Overloaded(
                    f"{self._in_use[client]} requests of this client and {self._in_use.total()} of all clients ask for "
                    f"answers in a given form; at most {MOST_PER_CLIENT} and {MOST_GRAMMARS} may at a time"
                )
            link = await asyncio.to_thread(self._parent.fork)
            try:
                error = (await exchange(link, text.text.encode(), seconds=PREPARE_SECONDS)).decode()
            except OSError:
                error = TOO_COMPLEX
        if error:
            link.close()
            raise _invalid(text.field, error)
        link.settimeout(MASK_SECONDS)
        grammar = Grammar(link, self._vocabulary, text.field)
        with self._lock:
            self._in_use[client] += 1
        weakref.finalize(grammar, self._dropped, client)
        return grammar

    def _dropped(self, client: str) -> None:
        with self._lock:
            self._in_use[client] -= 1
            if not self._in_use[client]:
                del self._in_use[client]


def json_schema(schema: Any, field: str) -> GrammarText:
    """The grammar of a text that is JSON of this schema. InvalidInput about `field` for what cannot be one."""
    if not isinstance(schema, dict | bool):
        raise InvalidInput(f"{field} must be a JSON schema", field=field, remedy="Send an object")
    text = json.dumps(schema)
    _check_length(text, field)
    try:
        written: Any = dict(WRITTEN_AS)
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text, defaults=written)
    except ValueError as error:
        raise _invalid(field, str(error)) from None
    return GrammarText(grammar, field)


def regular_expression(expression: Any, field: str) -> GrammarText:
    """The grammar of a text that matches a regular expression as a whole. InvalidInput as for schemas."""
    if not isinstance(expression, str) or not expression:
        raise InvalidInput(f"{field} must be a regular expression", field=field, remedy="Send a text")
    _check_length(expression, field)
    return GrammarText(llguidance.LLMatcher.grammar_from_regex(expression), field)


def lark(grammar: str, field: str) -> GrammarText:
    """A grammar in llguidance's variant of Lark. InvalidInput as for schemas."""
    _check_length(grammar, field)
    return GrammarText(llguidance.LLMatcher.grammar_from_lark(grammar), field)


def _check_length(text: str, field: str) -> None:
    if len(text) > LONGEST_GRAMMAR:
        raise InvalidInput(
            f"{field} has {len(text)} characters; at most {LONGEST_GRAMMAR} are accepted",
            field=field,
            remedy="Send a smaller one",
        )


def _invalid(field: str, reason: str) -> InvalidInput:
    return InvalidInput(
        f"{field} cannot be followed: {' '.join(reason.split())[:300]}",
        field=field,
        remedy="Correct it, or leave out what is not supported",
    )
