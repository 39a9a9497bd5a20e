"""sentence-transformers behind FastAPI, with one of its backends.

Runs in its own environment: `python sentence_transformers_app.py MODEL_FOLDER PORT torch|onnx|openvino`. The onnx
backend runs the folder's `onnx/model.onnx`; openvino converts the folder's weights when it starts.
"""

import sys
from typing import Annotated

import uvicorn
from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse
from sentence_transformers import SentenceTransformer

FILES = {"onnx": {"file_name": "onnx/model.onnx", "provider": "CPUExecutionProvider"}}


def main(folder: str, port: int, backend: str) -> None:
    """Serve until ended."""
    model = SentenceTransformer(folder, backend=backend, device="cpu", model_kwargs=FILES.get(backend, {}))
    application = FastAPI()

    @application.post("/embed")
    async def embed(inputs: Annotated[str | list[str], Body(embed=True)]) -> JSONResponse:
        texts = [inputs] if isinstance(inputs, str) else inputs
        vectors = model.encode(texts, batch_size=len(texts), normalize_embeddings=True, show_progress_bar=False)
        return JSONResponse(vectors.tolist())

    @application.get("/health")
    async def health() -> str:
        return "ok"

    uvicorn.run(application, host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
