"""The program that owns the NeuronCores: loads the compiled model on each of them, and runs batches. A child process.

Started by `process.py` as `python worker.py CONTROL PLACE...`, with the numbers of open sockets: one for control, and
one for each run that may be in progress. It needs torch and one of AWS's packages, and nothing of Penstock: it may run
in another interpreter (`PENSTOCK_NEURON_PYTHON`), of Python 3.10 or newer.

Messages are a length (4 bytes, big-endian), a JSON object of that length, and as many bytes as its field `bytes` has.

    control  <- {files, inputs, outputs, copies, places, cores_per_model, chosen_token, package}
             -> {packages}                          installed versions; the parent decides
             <- {go: true}, or {close: true}
             -> {loaded: [copy, file]} ...          one for each load, after a first run of it
             -> {ready: true}, or {failed: {stage, type, message}}
             <- {close: true}                       ends the process; so does the end of the parent
    place    <- {file, rows, tokens, shape}         with the inputs, int32 [inputs, *shape]
             -> {shapes, seconds}                   with the outputs, float32
             or {error: {type, message}}
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import socket
import struct
import sys
import threading
import time
from contextlib import nullcontext
from importlib import metadata
from typing import Any

DISTRIBUTIONS = ("torch", "torch-neuronx", "neuronx-cc", "torch-neuron", "neuron-cc")


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """The next message. EOFError when the other side has closed the connection."""
    (length,) = struct.unpack(">I", _read(connection, 4))
    header = json.loads(_read(connection, length))
    return header, _read(connection, header.get("bytes", 0))


def send(connection: socket.socket, header: dict[str, Any], *payload: Any) -> None:
    """Send a message; `payload`: objects with the interface of buffers, of bytes."""
    views = [memoryview(one).cast("B") for one in payload]
    text = json.dumps({**header, "bytes": sum(map(len, views))}).encode()
    connection.sendall(struct.pack(">I", len(text)) + text)
    for view in views:
        connection.sendall(view)


def _read(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        received = connection.recv_into(view[done:])
        if not received:
            raise EOFError
        done += received
    return data


def installed() -> dict[str, str]:
    """Versions of the packages that matter, by distribution name; only those that are installed."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class LoadedCopies:
    """The loaded copies."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._models: list[list[Any]] = []
        """By copy and file."""
        self._torch: Any = None
        self._neuron: Any = None

    def import_packages(self) -> None:
        """Import torch and the Neuron package: the operators of the compiled files exist only afterwards."""
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(1)
        self._neuron = importlib.import_module(self._given["package"].replace("-", "_"))

    def load(self, copy: int, file: int) -> None:
        """Load one compiled shape onto the cores of a copy. To be called file by file, in the order of the copies: on
        Inf1 the runtime puts each load on the next cores."""
        with self._on_cores(copy):
            model = self._torch.jit.load(self._given["files"][file]["path"])
        if copy == len(self._models):
            self._models.append([])
        self._models[copy].append(model)

    def _on_cores(self, copy: int) -> Any:
        count = self._given["cores_per_model"]
        # The name since SDK 2.25, then that before. torch_neuron has none.
        for module in (self._neuron, getattr(self._neuron, "experimental", None)):
            context = getattr(module, "neuron_cores_context", None)
            if context is not None:
                return context(start_nc=copy * count, nc_count=count)
        return nullcontext()

    def first_run(self, copy: int, file: int) -> None:
        """Run a loaded shape once: the first run of each is slow."""
        one = self._given["files"][file]
        shape = (len(self._given["inputs"]), one["batch"], one["tokens"])
        self._forward(copy, file, self._torch.ones(shape, dtype=self._torch.int32))

    def _forward(self, copy: int, file: int, inputs: Any) -> list[Any]:
        with self._torch.no_grad():
            found = self._models[copy][file](*inputs.unbind(0))
        if isinstance(found, dict):
            return [found[name] for name, _ in self._given["outputs"]]
        return list(found) if isinstance(found, (tuple, list)) else [found]

    def run(self, copy: int, header: dict[str, Any], data: bytearray) -> list[Any]:
        """Run a batch; float32 tensors of the real rows and tokens, in the order of the outputs."""
        torch = self._torch
        inputs = torch.frombuffer(data, dtype=torch.int32).reshape(len(self._given["inputs"]), *header["shape"])
        outputs = self._forward(copy, header["file"], inputs)
        rows, tokens = header["rows"], header["tokens"]
        trimmed = []
        for (_, axes), values in zip(self._given["outputs"], outputs, strict=True):
            real = values[:rows] if axes == "row" else values[:rows, :tokens]
            if axes == "masks":
                ids = inputs[self._given["inputs"].index("input_ids"), :rows, :tokens]
                real = real[ids == self._given["chosen_token"]]
            trimmed.append(real.to(torch.float32).contiguous())
        return trimmed

    def serve(self, copy: int, connection: socket.socket) -> None:
        """Answer the messages of one slot, until the other side closes it."""
        while True:
            try:
                header, data = receive(connection)
            except (EOFError, OSError):
                return
            started = time.perf_counter()
            try:
                outputs = self.run(copy, header, data)
            except Exception as error:  # the packages raise any; the parent decides by its text
                send(connection, {"error": described(error)})
                continue
            seconds = time.perf_counter() - started
            buffers = [
                (ctypes.c_char * (one.numel() * 4)).from_address(one.data_ptr()) for one in outputs if one.numel()
            ]
            send(connection, {"shapes": [list(one.shape) for one in outputs], "seconds": seconds}, *buffers)


def described(error: BaseException) -> dict[str, str]:
    """An exception for a message."""
    return {"type": type(error).__name__, "message": str(error)}


def watch(control: socket.socket, closing: threading.Event) -> None:
    """Wait for the message to close; if the parent has ended, end at once."""
    try:
        receive(control)
    except (EOFError, OSError):
        os._exit(1)
    closing.set()


def main() -> None:
    """Run until the parent closes it or ends."""
    control, *places = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    given, _ = receive(control)
    send(control, {"packages": installed()})
    try:
        answer, _ = receive(control)
    except EOFError:
        return
    if not answer.get("go"):
        return
    closing = threading.Event()
    threading.Thread(target=watch, args=(control, closing), daemon=True).start()
    worker = LoadedCopies(given)
    stage = "import"
    try:
        worker.import_packages()
        stage = "load"
        for file in range(len(given["files"])):
            for copy in range(given["copies"]):
                worker.load(copy, file)
                worker.first_run(copy, file)
                send(control, {"loaded": [copy, file]})
    except Exception as error:  # whatever it is, the parent reports it
        send(control, {"failed": {"stage": stage, **described(error)}})
        return
    for number, place in enumerate(places):
        threading.Thread(target=worker.serve, args=(number // given["places"], place), daemon=True).start()
    send(control, {"ready": True})
    closing.wait()


if __name__ == "__main__":
    # Nothing is imported from the folder of this file: it has Penstock's modules.
    del sys.path[0]
    main()
