"""LitServe with ONNX Runtime: the texts of up to 16 requests padded into one batch, mean pooling, L2 norm.

Runs in LitServe's own environment: `python litserve_app.py MODEL_FOLDER PORT`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import litserve  # type: ignore[import-not-found]  # installed in its own environment only
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

BATCH = 16
BATCH_TIMEOUT_SECONDS = 0.002


def die_with_parent() -> None:
    """LitServe's workers would outlive a killed parent and keep the port."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ != "__main__":
    die_with_parent()
os.register_at_fork(after_in_child=die_with_parent)


class Embedder(litserve.LitAPI):  # type: ignore[misc]
    """One worker, threads as many as CPUs."""

    def setup(self, device: str) -> None:  # noqa: ARG002 - LitServe's signature
        """Load."""
        folder = Path(sys.argv[1])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = len(os.sched_getaffinity(0))
        self.session = onnxruntime.InferenceSession(
            str(folder / "onnx" / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self.inputs = [item.name for item in self.session.get_inputs()]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        limit = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        self.tokenizer.enable_truncation(limit)
        self.tokenizer.enable_padding()

    # LitServe makes its endpoint from this signature: with an annotation it would look for a query parameter.
    def decode_request(self, request):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        """One text a request."""
        return request["input"]

    def batch(self, inputs: Sequence[Any]) -> list[Any]:
        """A batch is a list of texts."""
        return list(inputs)

    def predict(self, texts: Any) -> Any:
        """Vectors of a batch; of a single text when LitServe had no batch."""
        single = isinstance(texts, str)
        encodings = self.tokenizer.encode_batch([texts] if single else texts)
        mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
        feed = {
            "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
            "attention_mask": mask,
            "token_type_ids": np.array([encoding.type_ids for encoding in encodings], np.int64),
        }
        hidden = self.session.run(None, {name: feed[name] for name in self.inputs})[0]
        weights = mask[..., None].astype(np.float32)
        vectors = (hidden * weights).sum(1) / weights.sum(1)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors[0] if single else vectors

    def unbatch(self, output: Any) -> list[Any]:
        """Back to requests."""
        return list(output)

    def encode_response(self, vector: Any) -> dict[str, Any]:
        """The answer."""
        return {"embedding": vector.tolist()}


def stop(*_: object) -> None:
    """SIGTERM as LitServe's own interrupt, which ends its workers too."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    api = Embedder(max_batch_size=BATCH, batch_timeout=BATCH_TIMEOUT_SECONDS, api_path="/predict")
    litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, timeout=120).run(
        host="127.0.0.1", port=int(sys.argv[2]), num_api_servers=1, generate_client_file=False, log_level="warning"
    )
