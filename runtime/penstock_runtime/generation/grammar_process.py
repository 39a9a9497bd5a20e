"""The program that follows grammars, in processes with limits of time and memory: none of them can stop the server.

A schema of a kilobyte can make the library compute for minutes and take gigabytes, when it is prepared and at each
token, and none of the library's own limits ends that. One process of this program reads the tokenizer of a model, and
is forked for each grammar.

    python -m penstock_runtime.generation.grammar_process CONTROL VOCABULARY END_TOKENS < tokenizer.json

A fork gets the grammar as a message, and answers with a message, the error; an empty one: it is ready. Then:

| The server sends | It answers |
|---|---|
| `s`, state | the mask of a text that begins |
| `a`, state, token | one byte: 1 if nothing may follow the token; after 0, the next mask |

States and tokens are numbers of 32 bits. A mask is one byte, 0, and a message with a bit for each token; or 1 and a
message, the error.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from penstock_runtime.host.forks import Link, serve_forks

CPU_SECONDS = 2.0
"""For the preparation of a grammar, and for each token. A schema of 3,000 properties takes half of it."""
MEMORY_BYTES = 256 * 2**20


def main() -> None:
    """Read the tokenizer, then follow grammars in forks."""
    import llguidance

    ends = [int(token) for token in sys.argv[3].split(",") if token]
    tokenizer = llguidance.LLTokenizer(sys.stdin.read(), n_vocab=int(sys.argv[2]), eos_token=ends or None)
    limits = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)

    def follow(link: Link) -> None:
        grammar = link.message().decode()
        with link.limited(CPU_SECONDS):
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            error = matcher.get_error() if matcher.is_error() else ""
        link.answer(error.encode())
        states: dict[int, Any] = {}
        while not error and (command := link.stream.read(1)):
            number = link.number()
            if command == b"s":
                states[number] = matcher.deep_copy()
            else:
                state = states[number]
                has_ended = not state.consume_token(link.number()) or state.is_stopped()
                link.send(b"\x01" if has_ended else b"\x00")
                if has_ended:
                    continue
            _send_mask(link, states[number])

    serve_forks(follow, memory_bytes=MEMORY_BYTES)


def _send_mask(link: Link, state: Any) -> None:
    # Its signal ends the process.
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    mask = state.compute_bitmask()
    signal.setitimer(signal.ITIMER_PROF, 0)
    if state.is_error():
        link.send(b"\x01")
        link.answer(str(state.get_error()).encode())
    else:
        link.send(b"\x00")
        link.answer(mask)


if __name__ == "__main__":
    main()
