"""The program that follows grammars, in processes with limits of time and memory: none of them can stop the server.

A schema of a kilobyte can make the library compute for minutes and take gigabytes, when it is prepared and at each
token, and none of the library's own limits ends that. The server starts one process of this program for a model. It
reads the tokenizer once, and is forked for each grammar: a fork takes a millisecond, and shares the tokenizer.

    python -m penstock_runtime.generation.grammar_process CONTROL VOCABULARY END_TOKENS < tokenizer.json

CONTROL is the number of an open socket. It gets one byte when this process is ready. For each byte that comes with a
file descriptor, a fork serves that socket. All numbers are little-endian, of 32 bits:

| The server sends | It answers |
|---|---|
| size, grammar | size, an error as UTF-8; size 0: it is ready |
| `s`, state | the mask of a text that begins |
| `a`, state, token | one byte: 1 if nothing may follow the token; after 0, the next mask |

A mask is one byte, 0, and a bit for each token; or 1, size, and an error as UTF-8. A process ends when its socket does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

CPU_SECONDS = 2.0
"""For the preparation of a grammar, and for each token. A schema of 3,000 properties takes half of it."""
MEMORY_BYTES = 256 * 2**20
"""Beyond what the process has when it is forked."""
MASK_FAILED = b"\x01"


def main() -> None:
    """Read the tokenizer, then fork for each socket until the control socket ends."""
    import llguidance

    # A terminal sends it to the server's whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Forks leave nothing behind.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # When the container's memory runs out, the kernel should end this process and not the server.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    control = socket.socket(fileno=int(sys.argv[1]))
    ends = [int(token) for token in sys.argv[3].split(",") if token]
    tokenizer = llguidance.LLTokenizer(sys.stdin.read(), n_vocab=int(sys.argv[2]), eos_token=ends or None)
    control.sendall(b"r")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _serve(socket.socket(fileno=descriptors[0]), tokenizer)
            os._exit(0)
        os.close(descriptors[0])


def _serve(link: socket.socket, tokenizer: Any) -> None:
    """Follow one grammar. Ends the process by a signal at a limit, or when the server leaves."""
    import llguidance

    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    stream = link.makefile("rb")
    grammar = stream.read(_number(stream)).decode()
    limits = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
    with _limited(link):
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        error = (matcher.get_error() if matcher.is_error() else "").encode()
    link.sendall(struct.pack("<I", len(error)) + error)
    if error:
        return
    states = {}
    while command := stream.read(1):
        number = _number(stream)
        if command == b"s":
            states[number] = matcher.deep_copy()
        else:
            state = states[number]
            has_ended = not state.consume_token(_number(stream)) or state.is_stopped()
            link.sendall(b"\x01" if has_ended else b"\x00")
            if has_ended:
                del states[number]
                continue
        _send_mask(link, states[number])


def _send_mask(link: socket.socket, state: Any) -> None:
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    mask = state.compute_bitmask()
    signal.setitimer(signal.ITIMER_PROF, 0)
    if state.is_error():
        error = str(state.get_error()).encode()
        link.sendall(MASK_FAILED + struct.pack("<I", len(error)) + error)
    else:
        link.sendall(b"\x00" + mask)


class _limited(contextlib.AbstractContextManager[None]):  # noqa: N801 - used as a function
    """Signals with their default action end the process, in the library's code too: at the limit of time, and when the
    other end of the socket is closed."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def __enter__(self) -> None:
        fcntl.fcntl(self._link, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._link, fcntl.F_SETFL, fcntl.fcntl(self._link, fcntl.F_GETFL) | os.O_ASYNC)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        fcntl.fcntl(self._link, fcntl.F_SETFL, fcntl.fcntl(self._link, fcntl.F_GETFL) & ~os.O_ASYNC)


def _number(stream: Any) -> int:
    found = stream.read(4)
    if len(found) < 4:
        os._exit(0)  # the server has left
    return int(struct.unpack("<I", found)[0])


if __name__ == "__main__":
    main()
