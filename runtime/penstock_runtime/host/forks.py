"""Processes with limits of time and memory for what must not stop the server: forks of a process that has imported and
read what they need.

`ForkServer` is the server's end. A program that is started by it calls `serve_forks`. A fork costs a millisecond,
shares the memory of its parent, and ends when its socket does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from penstock.process import python_module

START_SECONDS = 60.0
"""Longest start of the parent, which imports libraries."""
CLOSE_SECONDS = 10.0


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
"""Loaded here: between fork and exec nothing may be."""


def end_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when the thread that started it ends. Processes that it
    starts are not killed.

    `parent`: the process id that the parent is known by, which may have ended before this call.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


class ForkServer:
    """The parent: started when it is first needed, and again if it has ended. It ends when this object is dropped. For
    any thread."""

    def __init__(self, module: str, arguments: Sequence[str] = (), text: str = "") -> None:
        """`module`: the program, which gets the number of its control socket, `arguments`, and `text` as its input."""
        self._command = python_module(module)
        self._arguments = arguments
        self._text = text
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._end: Callable[[], object] = lambda: None
        self.process: subprocess.Popen[str] | None = None

    def fork(self) -> socket.socket:
        """The server's end of the socket of a new process. OSError if none can be started."""
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            assert self._control is not None  # noqa: S101 - set by _start
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            return ours

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        ours.settimeout(START_SECONDS)
        with theirs:
            number = theirs.fileno()
            process = subprocess.Popen(
                [*self._command, str(number), *self._arguments],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[number], text=True,
            )  # fmt: skip
        assert process.stdin is not None  # noqa: S101 - opened with a pipe
        self._end = weakref.finalize(self, _end, process, ours)
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(self._text)
        if not ours.recv(1):
            raise OSError(f"{' '.join(self._command)} does not start")
        self.process, self._control = process, ours


def _end(process: subprocess.Popen[str], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve_forks(work: Callable[[Link], None], *, memory_bytes: int) -> None:
    """Do `work` in a fork for each socket that arrives, until the control socket ends; `sys.argv[1]` is its number.

    `memory_bytes`: that a fork may have beyond what this process has.
    """
    # A terminal sends it to the server's whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Forks leave nothing behind.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # When the container's memory runs out, the kernel should end these processes and not the server.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    control = socket.socket(fileno=int(sys.argv[1]))
    control.sendall(b"r")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + memory_bytes, size + memory_bytes))
            work(Link(socket.socket(fileno=descriptors[0])))
            os._exit(0)
        os.close(descriptors[0])


class Link:
    """The end of a fork: messages, each after its size as 32 bits, little-endian. The process ends with the socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self.stream: BinaryIO = link.makefile("rb")
        self.send = link.sendall

    def number(self) -> int:
        """32 bits, little-endian."""
        found = self.stream.read(4)
        if len(found) < 4:
            os._exit(0)  # the server has left
        return int(struct.unpack("<I", found)[0])

    def message(self) -> bytes:
        """A message."""
        return self.stream.read(self.number())

    def answer(self, data: bytes) -> None:
        """Send a message."""
        self.send(struct.pack("<I", len(data)) + data)

    @contextlib.contextmanager
    def limited(self, cpu_seconds: float) -> Iterator[None]:
        """Signals end the process, in the code of libraries too: at this limit, and when the server closes the socket.
        It must send nothing meanwhile."""
        link = self._link
        fcntl.fcntl(link, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(link, fcntl.F_GETFL)
        fcntl.fcntl(link, fcntl.F_SETFL, flags | os.O_ASYNC)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        fcntl.fcntl(link, fcntl.F_SETFL, flags)


async def exchange(link: socket.socket, *messages: bytes, seconds: float) -> bytes:
    """Send messages to a fork, and read its answer, from an event loop. After a failure the socket is closed, which
    ends the process.

    OSError if the process has ended at a limit, or does not answer within `seconds`.
    """
    link.setblocking(False)
    loop = asyncio.get_running_loop()
    # The handler of a request may run before it has a task, which asyncio.timeout needs.
    timer = loop.call_later(seconds, _shut, link)
    try:
        for data in messages:
            await loop.sock_sendall(link, struct.pack("<I", len(data)) + data)
        size = struct.unpack("<I", await _read(link, 4))[0]
        return await _read(link, size)
    except BaseException:
        link.close()
        raise
    finally:
        timer.cancel()


def _shut(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


async def _read(link: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = await asyncio.get_running_loop().sock_recv(link, size - len(found))
        if not piece:
            raise ConnectionResetError("the process has ended at a limit")
        found += piece
    return bytes(found)
