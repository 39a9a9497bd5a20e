"""A library of text generation behind a plain HTTP server, as a peer of `benchmarks.generation`.

    python generation_app.py openvino-genai --model model.gguf --port 8081 --threads 2 [--hint f32]
    python generation_app.py transformers --model folder --port 8081 --threads 2

`POST /` with {"tokens": [...], "count": n} streams one line for each token. Runs in the peer's own environment, and so
imports nothing of Penstock.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class GenAi:
    """openvino-genai's continuous batching: one thread runs its steps."""

    def __init__(self, model: str, threads: int, hint: str) -> None:
        import openvino_genai

        self._library = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = 512
        scheduler.max_num_batched_tokens = 512
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if hint:
            properties["INFERENCE_PRECISION_HINT"] = hint
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._lock = threading.Condition()
        self._waiting: list[tuple[list[int], int, queue.SimpleQueue[int | None]]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def generate(self, tokens: list[int], count: int) -> Iterator[int]:
        """The tokens as they are made."""
        found: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        with self._lock:
            self._waiting.append((tokens, count, found))
            self._lock.notify()
        while (token := found.get()) is not None:
            yield token

    def _run(self) -> None:
        import numpy as np
        import openvino

        running: list[tuple[Any, Any]] = []
        number = 0
        while True:
            with self._lock:
                while not self._waiting and not running:
                    self._lock.wait()
                arrived, self._waiting = self._waiting, []
            for tokens, count, found in arrived:
                config = self._library.GenerationConfig()
                config.max_new_tokens = count
                config.ignore_eos = True
                ids = openvino.Tensor(np.array([tokens], np.int64))
                running.append((self._pipeline.add_request(number, ids, config), found))
                number += 1
            self._pipeline.step()
            left = []
            for handle, found in running:
                while handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            found.put(int(token))
                if handle.get_status() == self._library.GenerationStatus.RUNNING:
                    left.append((handle, found))
                else:
                    found.put(None)
            running = left


class Transformers:
    """`transformers.generate` in fp32 with its cache: one request after the other, as it has no batching of its own."""

    def __init__(self, model: str, threads: int, hint: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        kind = torch.bfloat16 if hint == "bf16" else torch.float32
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=kind).eval()
        self._lock = threading.Lock()

    def generate(self, tokens: list[int], count: int) -> Iterator[int]:
        """The tokens as they are made."""
        import torch

        found: queue.SimpleQueue[int | None] = queue.SimpleQueue()

        class Streamer:
            """Receives the prompt first, then each token."""

            def __init__(self) -> None:
                self.prompt = True

            def put(self, value: Any) -> None:
                if not self.prompt:
                    found.put(int(value.reshape(-1)[0]))
                self.prompt = False

            def end(self) -> None:
                found.put(None)

        def run() -> None:
            with self._lock, torch.no_grad():
                self._model.generate(
                    torch.tensor([tokens]),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    streamer=Streamer(),
                )

        threading.Thread(target=run, daemon=True).start()
        while (token := found.get()) is not None:
            yield token


def serve(engine: GenAi | Transformers, port: int) -> None:
    """Serve until the process is ended."""

    class Handler(BaseHTTPRequestHandler):
        """Streams the tokens of a request."""

        def do_POST(self) -> None:
            """One request."""
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            for token in engine.generate(body["tokens"], body["count"]):
                self.wfile.write(b"%d\n" % token)
                self.wfile.flush()

        def do_GET(self) -> None:
            """Readiness."""
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """No log."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=["openvino-genai", "transformers"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--hint", default="")
    given = parser.parse_args()
    kind = GenAi if given.library == "openvino-genai" else Transformers
    serve(kind(given.model, given.threads, given.hint), given.port)
