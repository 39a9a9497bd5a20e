"""The baseline of the published tables: a plain transformers pipeline behind FastAPI and uvicorn, fp32, eager PyTorch.

A separate program: `python -m penstock_bench.baseline --help`. Nothing here is tuned, and nothing is made
worse than a careful user of these libraries would have it: threads equal cores, a batch runs as one batch, the answer
is written without FastAPI's re-encoding, the endpoint is a coroutine (no thread pool in between). Truncation is the
model's own limit, as in our server.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, UnsupportedModel
from penstock.tasks import TaskName
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Pooling

EXTRA = "bench"
LIBRARIES = ("torch", "transformers", "fastapi")
READY_PATH = "/healthz"

Answer = Callable[[Any, dict[str, Any]], Any]


class BaselineMissing(PenstockError):
    """The baseline's libraries are not installed, or have no pipeline for the task."""


def require_baseline() -> None:
    """Raise BaselineMissing, with the missing packages and how to install them."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise BaselineMissing(
            f"the baseline needs {', '.join(missing)}, not installed here",
            remedy=f"pip install 'penstock[{EXTRA}]' (PyPI's torch is some 3 GB on Linux), or leave --baseline out",
        )


def make_answer(folder: ModelFolder, task: TaskName) -> Answer:
    """Load the model; the function answers `inputs` and `parameters` of the HF shape."""
    limit = {"truncation": True, "max_length": folder.max_tokens}
    match task:
        case TaskName.FEATURE_EXTRACTION:
            embed = _embedder(folder)
            return lambda inputs, _: embed([inputs])[0] if isinstance(inputs, str) else embed(inputs)
        case TaskName.SENTENCE_SIMILARITY:
            embed = _embedder(folder)
            return lambda inputs, _: _similarities(embed([inputs["source_sentence"], *inputs["sentences"]]))
        case TaskName.TEXT_RANKING:
            score = _pipeline("text-classification", folder)
            return lambda inputs, _: _ranked(
                score(
                    [{"text": folder.default_prompt + inputs["query"], "text_pair": text} for text in inputs["texts"]],
                    batch_size=len(inputs["texts"]),
                    function_to_apply="none",
                    **limit,
                )
            )
        case TaskName.TEXT_CLASSIFICATION:
            classify = _pipeline(task.value, folder)
            return lambda inputs, parameters: classify(inputs, batch_size=_size(inputs), **limit, **parameters)
        case TaskName.QUESTION_ANSWERING:
            find = _pipeline(task.value, folder)
            return lambda inputs, parameters: find(inputs, batch_size=_size(inputs), **parameters)
        case TaskName.TOKEN_CLASSIFICATION | TaskName.FILL_MASK | TaskName.ZERO_SHOT_CLASSIFICATION:
            apply = _pipeline(task.value, folder)
            return lambda inputs, parameters: apply(inputs, batch_size=_size(inputs), **parameters)
        case TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION:
            raise UnsupportedModel(
                f"transformers has no pipeline for {task.value}",
                remedy="Leave the comparison with transformers out",
            )
        case TaskName.TEXT_GENERATION:
            generate = _pipeline(task.value, folder)
            return lambda inputs, parameters: generate(inputs, **parameters)


def _size(inputs: Any) -> int:
    return len(inputs) if isinstance(inputs, list) else 1


def _pipeline(name: str, folder: ModelFolder, **options: Any) -> Any:
    from transformers import __version__, pipeline, pipelines

    if name not in pipelines.SUPPORTED_TASKS and name not in pipelines.TASK_ALIASES:
        raise BaselineMissing(
            f"transformers {__version__} has no pipeline for {name}",
            remedy="pip install 'transformers<5', or leave --baseline out",
        )
    return pipeline(name, model=str(folder.path), tokenizer=str(folder.path), device="cpu", **options)


def _embedder(folder: ModelFolder) -> Callable[[list[str]], list[list[float]]]:
    """Pooled sentence vectors: transformers' own pipeline stops at token vectors, so the last step is added to it as
    model cards show it."""
    from transformers import FeatureExtractionPipeline

    pooling, normalize = folder.pooling or Pooling.MEAN, folder.normalize

    class EmbeddingPipeline(FeatureExtractionPipeline):  # type: ignore[misc]  # transformers has no types
        def _forward(self, model_inputs: Any) -> Any:
            return {"hidden": self.model(**model_inputs).last_hidden_state, "mask": model_inputs["attention_mask"]}

        def postprocess(self, model_outputs: Any, **_: Any) -> list[float]:
            hidden, mask = model_outputs["hidden"], model_outputs["mask"].unsqueeze(-1)
            match pooling:
                case Pooling.CLS:
                    pooled = hidden[:, 0]
                case Pooling.MEAN:
                    pooled = (hidden * mask).sum(1) / mask.sum(1)
                case Pooling.MAX:
                    pooled = hidden.masked_fill(mask == 0, float("-inf")).max(1).values
                case Pooling.LAST:
                    pooled = hidden[:, int(mask.sum()) - 1]
            if normalize:
                pooled = pooled / pooled.norm(dim=1, keepdim=True)
            vector: list[float] = pooled[0].tolist()
            return vector

    embed = _pipeline(
        "feature-extraction",
        folder,
        pipeline_class=EmbeddingPipeline,
        tokenize_kwargs={"truncation": True, "max_length": folder.max_tokens},
    )
    prompt = folder.default_prompt

    def answer(texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = embed([prompt + text for text in texts], batch_size=len(texts))
        return vectors

    return answer


def _similarities(vectors: list[list[float]]) -> list[float]:
    import numpy as np

    rows = np.asarray(vectors)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    similarities: list[float] = (rows[1:] @ rows[0]).tolist()
    return similarities


def _ranked(scores: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ranked = [{"index": index, "score": score["score"]} for index, score in enumerate(scores)]
    return sorted(ranked, key=lambda entry: -float(entry["score"]))


def make_application(answer: Answer) -> Any:
    """The FastAPI application."""
    from fastapi import FastAPI
    from fastapi.responses import Response
    from pydantic import BaseModel

    class Body(BaseModel):
        inputs: Any
        parameters: dict[str, Any] = {}

    application = FastAPI()

    # Without `from __future__ import annotations` FastAPI would see the class itself; it is given by hand instead.
    async def predict(body):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        # Some pipelines answer with numpy's numbers.
        content = json.dumps(answer(body.inputs, body.parameters), default=float)
        return Response(content, media_type="application/json")

    predict.__annotations__ = {"body": Body}
    application.post("/predict")(predict)

    async def health():  # type: ignore[no-untyped-def] # noqa: ANN202
        return {"status": "ok"}

    application.get(READY_PATH)(health)
    return application


def command(python: str, folder: Path, task: TaskName, port: int) -> list[str]:
    """The command that starts it."""
    return [
        python,
        "-m",
        "penstock_bench.baseline",
        *("--model", str(folder)),
        *("--task", task.value),
        *("--port", str(port)),
    ]


def environment(threads: int) -> dict[str, str]:
    """Sets variables that PyTorch reads when it is loaded."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(description="A plain transformers pipeline behind FastAPI: the baseline.")
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--task", type=TaskName, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    require_baseline()
    import uvicorn

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    application = make_application(make_answer(ModelFolder.open(given.model), given.task))
    uvicorn.run(application, host=given.host, port=given.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
