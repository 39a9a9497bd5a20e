"""A library of text generation behind a plain HTTP server, as a peer of `benchmarks.generation`.

    python generation_app.py openvino-genai --model model.gguf --port 8081 --threads 2 [--hint f32]
    python generation_app.py transformers --model folder --port 8081 --threads 2 [--hint bf16]
    python generation_app.py transformers-without-cache --model folder --port 8081 --threads 2
    python generation_app.py ctranslate2 --model folder --port 8081 --threads 2

`POST /` with {"tokens": [...], "count": n} streams one line for each token. Runs in the peer's own environment, and so
imports nothing of Penstock.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

GATHER_SECONDS = 0.02


class Server(ABC):
    """A thread answers the requests that wait."""

    def __init__(self) -> None:
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

    @abstractmethod
    def _run(self) -> None:
        """Answer requests until the process is ended."""


class GenAi(Server):
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
        super().__init__()

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


class Batches(Server):
    """Runs requests that wait at the same time, and have prompts of one length, as one batch."""

    @abstractmethod
    def run(self, prompts: list[list[int]], count: int, put: Callable[[int, int], None]) -> None:
        """Generate `count` tokens for each prompt, and call `put` with the number of a prompt and its token."""

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._waiting:
                    self._lock.wait()
            # Requests that clients send together arrive within this time.
            time.sleep(GATHER_SECONDS)
            with self._lock:
                length, count = len(self._waiting[0][0]), self._waiting[0][1]
                batch = [one for one in self._waiting if (len(one[0]), one[1]) == (length, count)]
                self._waiting = [one for one in self._waiting if one not in batch]
            self._answer(batch, count)

    def _answer(self, batch: list[tuple[list[int], int, queue.SimpleQueue[int | None]]], count: int) -> None:
        try:
            self.run([one[0] for one in batch], count, lambda number, token: batch[number][2].put(token))
        finally:
            for one in batch:
                one[2].put(None)


class Transformers(Batches):
    """`transformers.generate` with its cache."""

    use_cache = True

    def __init__(self, model: str, threads: int, hint: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        kind = torch.bfloat16 if hint == "bf16" else torch.float32
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=kind).eval()
        super().__init__()

    def run(self, prompts: list[list[int]], count: int, put: Callable[[int, int], None]) -> None:
        """One batch."""
        import torch

        class Streamer:
            """Receives the prompts first, then one token of each sequence."""

            def __init__(self) -> None:
                self.prompt = True

            def put(self, value: Any) -> None:
                if not self.prompt:
                    for number, token in enumerate(value.reshape(-1).tolist()):
                        put(number, token)
                self.prompt = False

            def end(self) -> None:
                """All tokens were given to `put`."""

        ids = torch.tensor(prompts)
        with torch.no_grad():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                use_cache=self.use_cache,
                streamer=Streamer(),
            )


class WithoutCache(Transformers):
    """The plain loop: every token computes the whole text again."""

    use_cache = False


class CTranslate2(Batches):
    """CTranslate2 with int8 weights, converted here; its batches are static."""

    def __init__(self, model: str, threads: int, hint: str) -> None:
        assert not hint
        import ctranslate2
        import transformers

        folder = Path(tempfile.mkdtemp()) / "model"
        ctranslate2.converters.TransformersConverter(model).convert(str(folder), quantization="int8")
        self._generator = ctranslate2.Generator(str(folder), device="cpu", intra_threads=threads, inter_threads=1)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        shutil.rmtree(folder.parent)
        super().__init__()

    def run(self, prompts: list[list[int]], count: int, put: Callable[[int, int], None]) -> None:
        """One batch."""

        def step(result: Any) -> bool:
            put(result.batch_id, result.token_id)
            return False

        self._generator.generate_batch(
            [self._tokenizer.convert_ids_to_tokens(tokens) for tokens in prompts],
            max_length=count,
            min_length=count,
            include_prompt_in_result=False,
            callback=step,
        )


LIBRARIES: dict[str, Callable[[str, int, str], Server]] = {
    "openvino-genai": GenAi,
    "transformers": Transformers,
    "transformers-without-cache": WithoutCache,
    "ctranslate2": CTranslate2,
}


def serve(engine: Server, port: int) -> None:
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

    class Listener(ThreadingHTTPServer):
        """Refuses no connection of clients that connect at the same time: the usual queue has five entries."""

        request_queue_size = 128

    Listener(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--hint", default="")
    given = parser.parse_args()
    serve(LIBRARIES[given.library](given.model, given.threads, given.hint), given.port)
