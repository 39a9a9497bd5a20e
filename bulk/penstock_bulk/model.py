"""`penstock.load`: a model in this process, with the answers that its HTTP server gives, to the bit."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import numpy as np

from penstock.artefact_store import DEFAULT_MODELS, DEFAULT_STORE
from penstock.errors import MissingPackage, PenstockError
from penstock.manifest import MANIFEST_NAME, Manifest
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.endpoint_parts.serving import Serving
from penstock.resources.files.reading import from_file
from penstock.settings import hugging_face_token
from penstock.tasks import TaskName
from penstock.vector_space import VectorSpace
from penstock_bulk.session import RowError, RunningModel
from penstock_runtime.host import read_host
from penstock_runtime.models.sources.transfer import FetchProgress
from penstock_runtime.rows import Float
from penstock_runtime.serving.loaded_model import LoadedModel, Which

if TYPE_CHECKING:
    from penstock_optimizer.job.progress import ProgressEvent

PROGRESS_SECONDS = 2.0
"""Between two lines of progress of an optimisation."""
T = TypeVar("T")
OnError = Literal["raise", "null"]
_OPENING = threading.Lock()


def _renew_lock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _OPENING  # noqa: PLW0603 - a lock that its holder cannot release is replaced
    _OPENING = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True)
class Identity:
    """What computed the answers. Two models with the same identity give the same bits."""

    artefact: str
    """sha256 of the artefact's manifest, hexadecimal."""
    space: str
    """Identifier of the vector space, such as `vs1-7f3a9c0d12ab5e44`; empty: the model gives no vectors."""
    fields: VectorSpace | None
    """The space in full."""
    model: str
    """The source of the model."""
    task: str
    which: str
    """`chosen`, the optimised plan, or `baseline`, fp32."""
    isa: str
    """The instruction set class: on another one, bits may differ."""


class Model:
    """A model in this process. Its methods take any number of texts, and may be called from several threads.

    It is loaded on the first use, again in a child process after a fork, and pickled as its arguments. A context
    manager, which frees the model at the end.
    """

    def __init__(
        self, artefact: Path, which: Which, threads: int | None, serving: Serving, arguments: Mapping[str, Any]
    ) -> None:
        self._artefact, self._which, self._threads, self._serving = artefact, which, threads, serving
        self.arguments = arguments
        """Of `load`."""
        self._session: RunningModel | None = None
        self._process = 0

    @overload
    def embed(
        self,
        texts: Iterable[str],
        *,
        on_error: Literal["raise"] = ...,
        prompt_name: str | None = ...,
        normalize: bool | None = ...,
        dimensions: int | None = ...,
    ) -> Float: ...
    @overload
    def embed(
        self,
        texts: Iterable[str],
        *,
        on_error: Literal["null"],
        prompt_name: str | None = ...,
        normalize: bool | None = ...,
        dimensions: int | None = ...,
    ) -> tuple[Float, list[RowError]]: ...
    def embed(
        self,
        texts: Iterable[str],
        *,
        on_error: OnError = "raise",
        prompt_name: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
    ) -> Float | tuple[Float, list[RowError]]:
        """Vectors, float32 [texts, dimensions]; of one text [dimensions].

        `prompt_name`: put before each text, by its name in the model's files; None: the model's default. `normalize`:
        to length 1; None: as the model's files state. `dimensions`: the first of each vector; None: all.
        `on_error="null"`: also the errors, and NaN in the rows of refused texts. Otherwise RowsRefused.
        """
        if isinstance(texts, str):
            one: Float = self.embed([texts], prompt_name=prompt_name, normalize=normalize, dimensions=dimensions)[0]
            return one
        asked = {"prompt_name": prompt_name, "normalize": normalize, "dimensions": dimensions}
        parameters = {"pooling": "auto", **{name: value for name, value in asked.items() if value is not None}}
        vectors, errors = self._all(TaskName.FEATURE_EXTRACTION, texts, parameters, list, on_error)
        return _matrix(vectors) if on_error == "raise" else (_matrix(vectors), errors)

    def embed_arrow(self, table: Any, *, text: str = "text", vector: str = "vector", **options: Any) -> Any:
        """A pyarrow Table or RecordBatch with a column of vectors behind its own, a FixedSizeList of float32, which is
        null where a text was refused. `text`: column of texts; `options`: as of `embed`. Needs the extra `index`."""
        from penstock_bulk.arrow import with_vectors

        return with_vectors(table, text, vector, lambda texts: self.embed(texts, on_error="null", **options)[0])

    def classify(
        self, texts: Iterable[str | tuple[str, str]], *, on_error: OnError = "raise", **parameters: Any
    ) -> list[list[dict[str, Any]] | None]:
        """For each text, or pair of texts, its labels with scores, the best first. `on_error="null"`: None for a
        refused one. `parameters`: as of `POST /predict`, such as `top_k=1`."""
        return self._all(TaskName.TEXT_CLASSIFICATION, texts, parameters, _classified, on_error)[0]

    def rerank(self, query: str, texts: Iterable[str], **parameters: Any) -> Float:
        """How well each text answers the query: scores from 0 to 1, float32 [texts], in the order of the texts.
        `parameters`: as of `POST /predict`, such as `raw_scores=True` for logits."""
        parameters = {"raw_scores": False, **parameters}
        scores, _ = self._all(
            TaskName.TEXT_RANKING, texts, parameters, lambda some: [[query, one] for one in some], "raise"
        )
        return np.asarray(scores, dtype=np.float32)

    def generate(
        self, prompts: Iterable[str], *, max_tokens: int = 64, on_error: OnError = "raise", **parameters: Any
    ) -> list[str | None]:
        """A continuation of each prompt, without the prompt. The most probable tokens, unless `do_sample=True`.
        `on_error="null"`: None for a refused prompt. `parameters`: as of `POST /predict`, such as `stop_strings`."""
        parameters = {"max_new_tokens": max_tokens, "do_sample": False, "return_full_text": False, **parameters}
        found, _ = self._all(TaskName.TEXT_GENERATION, prompts, parameters, list, on_error)
        return [None if one is None else one[0]["generated_text"] for one in found]

    @property
    def identity(self) -> Identity:
        """What computes the answers."""
        session, manifest = self._open(None), Manifest.load(self._artefact)
        space = session.model.space if isinstance(session.model, LoadedModel) else None
        return Identity(
            artefact=hashlib.sha256((self._artefact / MANIFEST_NAME).read_bytes()).hexdigest(),
            space="" if space is None else space.id,
            fields=space,
            model=manifest.model.source,
            task=manifest.task.value,
            which=self._which,
            isa=read_host().cpu.isa.value,
        )

    @property
    def findings(self) -> tuple[str, ...]:
        """Where it differs from the plan that was measured, as sentences."""
        return self._open(None).model.findings

    def close(self) -> None:
        """Free the model. The next use loads it again."""
        with _OPENING:
            session, self._session = self._session, None
        if session is not None and self._process == os.getpid():
            session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_again, (dict(self.arguments),)

    def _all(
        self,
        task: TaskName,
        rows: Iterable[T],
        parameters: Mapping[str, Any],
        inputs: Callable[[Sequence[T]], Any],
        on_error: OnError,
    ) -> tuple[list[Any], list[RowError]]:
        """The answers to all rows in order, and the errors."""
        if isinstance(rows, str):
            raise PenstockError("one text was given where texts are expected", remedy="Pass a list of texts")
        answers: list[Any] = []
        errors: list[RowError] = []
        session = self._open(task)
        for some, found, _ in session.answers(rows, parameters, inputs, strict=on_error == "raise"):
            answers += some
            errors += found
        return answers, errors

    def _open(self, task: TaskName | None) -> RunningModel:
        """The session of this process."""
        with _OPENING:
            if self._session is None or self._process != os.getpid():
                self._session = RunningModel(self._artefact, self._which, self._threads, self._serving)
                self._process = os.getpid()
            session = self._session
        if task not in {None, session.task}:
            raise PenstockError(
                f"this model was loaded for {session.task.value}, and the call is for {task}",
                remedy=f'Load it with task="{task}"',
            )
        return session


def load(
    reference: str | os.PathLike[str],
    *,
    task: str = TaskName.FEATURE_EXTRACTION.value,
    plan: Literal["optimized", "fp32"] = "optimized",
    threads: int | None = None,
    store: str | os.PathLike[str] | None = None,
    models: str | os.PathLike[str] | None = None,
    budget_seconds: float | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Model:
    """A model for this process.

    `reference`: the folder of an artefact, a ModelEndpoint file, of which `serving` counts too, or a model: `hf://…`,
    `file:///…`, `pkg://…`, `s3://…`, `gs://…`, `az://…`, `oci://…`. `task`: of a model; artefacts and files have their
    own.
    `plan`: `optimized` takes the artefact that was made before for this model and machine, or makes it, which takes
    minutes (`budget_seconds` at most); `fp32` is there within seconds, without an optimisation. `threads`: physical
    cores; None: all that this process may use, with its CPU quota. On the native engine they do not change the answers.
    `store`, `models`: folders as of `penstock optimize`. `on_progress`: receives lines about a download or an
    optimisation; None: they go to standard error.

    PenstockError states what is wrong with the model, the machine or the arguments.
    """
    arguments = {
        "reference": os.fspath(reference), "task": task, "plan": plan, "threads": threads,
        "store": None if store is None else os.fspath(store), "models": None if models is None else os.fspath(models),
        "budget_seconds": budget_seconds,
    }  # fmt: skip
    if plan not in {"optimized", "fp32"}:
        raise PenstockError(f"plan is {plan!r}", remedy='Pass "optimized" or "fp32"')
    which: Which = "baseline" if plan == "fp32" else "chosen"
    if (Path(reference) / MANIFEST_NAME).exists():
        return Model(Path(reference).resolve(), which, threads, Serving(), arguments)
    endpoint = _endpoint(os.fspath(reference), task)
    # Only here: the libraries of an optimisation are another extra.
    try:
        from penstock_optimizer.optimise import optimise, prepare
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"{error.name} is not installed here: artefacts can be loaded, and no other models",
            remedy="Run pip install 'penstock[optimizer]', or give the folder of an artefact",
        ) from error
    folders = {
        "store": Path(DEFAULT_STORE if store is None else store).expanduser(),
        "models": Path(DEFAULT_MODELS if models is None else models).expanduser(),
    }
    show = _Progress(on_progress or _print_line)
    common: dict[str, Any] = {
        **folders, "cores": read_host().usable_cores(threads).cores, "token": hugging_face_token(os.environ),
        "on_transfer": show.transfer,
    }  # fmt: skip
    if plan == "fp32":
        found = prepare(endpoint, **common)
        return Model(found.artefact.resolve(), which, threads, endpoint.spec.serving, arguments)
    artefact = optimise(endpoint, budget_seconds=budget_seconds, on_progress=show.event, **common)
    return Model(artefact.resolve(), which, threads, endpoint.spec.serving, arguments)


def _load_again(arguments: dict[str, Any]) -> Model:
    return load(**arguments)


def _endpoint(reference: str, task: str) -> ModelEndpoint:
    if "://" not in reference:
        return from_file(ModelEndpoint, Path(reference))
    return ModelEndpoint.from_object(
        {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "ModelEndpoint",
            "metadata": {"name": "in-process"},
            "spec": {"model": reference, "task": task},
        }
    )


class _Progress:
    """Lines about a download or an optimisation, not more often than every PROGRESS_SECONDS."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._last = time.monotonic()

    def event(self, event: ProgressEvent) -> None:
        """Of an optimisation."""
        self._line(f"{event.stage.value} {event.step}/{event.steps}  {event.message}")

    def transfer(self, step: FetchProgress) -> None:
        """Of a download."""
        self._line(f"download {step.bytes_done / 1e6:.0f} MB of {step.bytes_total / 1e6:.0f} MB  {step.note}".rstrip())

    def _line(self, line: str) -> None:
        if time.monotonic() - self._last >= PROGRESS_SECONDS:
            self._last = time.monotonic()
            self._show(line)


def _print_line(line: str) -> None:
    sys.stderr.write(f"penstock: {line}\n")


def _classified(texts: Sequence[str | tuple[str, str]]) -> list[Any]:
    return [one if isinstance(one, str) else {"text": one[0], "text_pair": one[1]} for one in texts]


def _matrix(vectors: Sequence[Any]) -> Float:
    """float32 [rows, dimensions], with NaN for None."""
    made = [row for row, one in enumerate(vectors) if one is not None]
    first = vectors[made[0]] if made else np.empty(0, dtype=np.float32)
    if not isinstance(first, np.ndarray) or first.ndim != 1:
        raise PenstockError(
            "this model has no dense vectors, one for each text", remedy="Serve it, and use POST /predict"
        )
    matrix = np.full((len(vectors), len(first)), np.nan, dtype=np.float32)
    if made:
        matrix[made] = [vectors[row] for row in made]
    return matrix
