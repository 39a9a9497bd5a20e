"""The server under test, as far as it is known before it runs: task, limits, tokenizer, and the requests to send.

From an endpoint file, or from the URL of a server. Its `/info` is in the form of Penstock or, as on the public port of
Penstock, of text-embeddings-inference. Other servers use that path for other things.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from penstock.errors import SpecError
from penstock.hardware import CpuIdentity
from penstock.resources.core import ModelSource
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.reading import from_file
from penstock.resources.shipped_classes import HARDWARE_CLASSES
from penstock.settings import hugging_face_token
from penstock.tasks import TaskName
from penstock_bench.cell import MeasurementFailed
from penstock_bench.grid import BenchOptions
from penstock_optimizer.load.client import RequestBody
from penstock_optimizer.load.workload import EVERYDAY_WORDS, TextMaker, predict_bodies
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.sources.fetch import fetch_model
from penstock_runtime.models.sources.transfer import OnProgress as OnTransfer
from penstock_runtime.models.sources.transfer import ignore_progress
from penstock_runtime.tokens import Tokenizer

INFO_SECONDS = 10.0


class _Part(BaseModel):
    """The fields that are read. Other fields are ignored."""

    model_config = ConfigDict(frozen=True)


class DescribedModel(_Part):
    """The model of the artefact that is served."""

    source: str
    max_tokens: int


class DescribedArtefact(_Part):
    """The served model."""

    model: DescribedModel


class DescribedPlan(_Part):
    """How."""

    summary: str


class DescribedVerdict(_Part):
    """The guard's verdict on it."""

    reason: str


class DescribedCores(_Part):
    """The server's cores."""

    granted: int
    cpus: tuple[int, ...] = ()
    """Logical."""


class DescribedHost(_Part):
    """The server's machine."""

    cpu: CpuIdentity
    cores: DescribedCores | None = None


class DescribedPredictor(_Part):
    """The loaded model."""

    caches: dict[str, dict[str, int]] = {}
    """By name: `answers`, `tokens`."""


class ServerInfo(_Part):
    """The body of `/info` of a Penstock server. All of it is there, if only as null."""

    task: TaskName
    phase: str
    plan: DescribedPlan | None
    artefact: DescribedArtefact | None
    verdict: DescribedVerdict | None
    host: DescribedHost | None
    predictor: DescribedPredictor | None = None

    @property
    def keeps_answers(self) -> bool:
        """Whether requests that come again are answered from memory."""
        return self.predictor is not None and "answers" in self.predictor.caches


class PublicInfo(_Part):
    """The body of `/info` of text-embeddings-inference, and of the public port of Penstock with an internal port."""

    model_id: str
    model_type: dict[str, Any]
    """With one key, the kind of the model."""
    max_input_length: int | None
    """Null while the model loads."""

    @property
    def task(self) -> TaskName | None:
        """The task of that kind; None for a kind that the servers have no name for."""
        return next((TASKS_OF_KINDS[kind] for kind in self.model_type if kind in TASKS_OF_KINDS), None)


TASKS_OF_KINDS = {
    "embedding": TaskName.FEATURE_EXTRACTION,
    "reranker": TaskName.TEXT_RANKING,
    "classifier": TaskName.TEXT_CLASSIFICATION,
}


INFO: TypeAdapter[ServerInfo | PublicInfo] = TypeAdapter(
    Annotated[ServerInfo | PublicInfo, Field(union_mode="left_to_right")]
)


def authorization(token: str) -> dict[str, str]:
    """The header that brings a bearer token; none without one."""
    return {"authorization": f"Bearer {token}"} if token else {}


def read_info(url: str, *, token: str = "") -> ServerInfo | PublicInfo | None:
    """`/info` of a server; None for another kind of server, which has answered all the same.

    MeasurementFailed when nothing answers there, or not without another token.
    """
    asked = urllib.request.Request(f"{url}/info", headers=authorization(token))
    try:
        with urllib.request.urlopen(asked, timeout=INFO_SECONDS) as answer:
            return INFO.validate_json(answer.read())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.UNAUTHORIZED:
            raise MeasurementFailed(
                f"{url}/info {'refuses this token' if token else 'asks for a token'} (401)",
                remedy="Give the server's in PENSTOCK_AUTH_TOKEN, or with --auth-token",
            ) from error
        return None
    except ValidationError:
        return None
    except (OSError, http.client.HTTPException) as error:
        raise MeasurementFailed(
            f"nothing answers at {url}: {_in_words(error)}", remedy="Start the server, or check the host and the port"
        ) from error


def _in_words(error: Exception) -> str:
    """Why a server cannot be reached, such as `connection refused`."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    match cause:
        case socket.gaierror():
            return f"no such host ({cause.strerror})"
        case TimeoutError():
            return f"no answer within {INFO_SECONDS:g} s"
        case http.client.RemoteDisconnected() | ConnectionResetError():
            return "it closed the connection without an answer"
        case http.client.HTTPException():
            return "what answers there does not speak HTTP"
        case OSError() if cause.strerror:
            return cause.strerror[0].lower() + cause.strerror[1:]
        case _:
            return str(cause)


NO_LIMIT = 1 << 20
ADDRESS = re.compile(r"[\w.-]+:\d+(/|$)|\[[0-9a-fA-F:]+\]:\d+(/|$)")
"""A URL without its scheme: `localhost:8080`."""


@dataclass(frozen=True)
class Subject:
    """Before anything is started."""

    name: str
    model: str
    task: TaskName
    tokenizer: Backend
    max_tokens: int
    mask_token: str | None
    endpoint: ModelEndpoint | None = None
    folder: ModelFolder | None = None
    url: str = ""
    info: ServerInfo | None = None
    """Of the server given by URL, if it is Penstock's and has `/info` where it was looked for."""
    cpu: CpuIdentity | None = None
    """Of the server given by URL, if its /info has it."""
    notes: tuple[str, ...] = ()


def read_subject(options: BenchOptions, *, models: Path, on_transfer: OnTransfer = ignore_progress) -> Subject:
    """From a file or a URL. Raises SpecError, and the errors of `fetch_model`, which calls `on_transfer`."""
    if not options.target.strip():
        raise SpecError("nothing is named that is to be measured", remedy="Give a ModelEndpoint file or a URL")
    if "://" in options.target:
        return _of_url(options)
    if not Path(options.target).exists() and ADDRESS.match(options.target):
        raise SpecError(
            f"{options.target} is neither a file nor a URL, which begins with http://",
            remedy=f"Give http://{options.target} for the server that answers there",
        )
    endpoint = from_file(ModelEndpoint, Path(options.target))
    folder = fetch_model(
        endpoint.spec.source, cache=models, token=hugging_face_token(os.environ), on_progress=on_transfer
    )
    limit = endpoint.spec.serving.max_input_tokens
    return Subject(
        name=endpoint.metadata.name,
        model=endpoint.spec.model,
        task=endpoint.spec.task,
        tokenizer=Tokenizer.load(folder).backend,
        max_tokens=folder.max_tokens if limit is None else min(limit, folder.max_tokens),
        mask_token=_mask_token(endpoint.spec.task, folder),
        endpoint=endpoint,
        folder=folder,
        notes=_of_accelerators(endpoint.spec.hardware_class),
    )


def _of_accelerators(name: str) -> tuple[str, ...]:
    """A note where the endpoint's class is a shipped one of Inferentia."""
    hardware = HARDWARE_CLASSES.get(name)
    if hardware is None or hardware.neuron is None:
        return ()
    return (f"the endpoint is for {name}, AWS Inferentia, which is not used here: CPUs of this machine are measured",)


def _of_url(options: BenchOptions) -> Subject:
    url = _base(options.target)
    info_url = _base(options.info_url) if options.info_url else url
    found = read_info(info_url, token=options.auth_token)
    info = found if isinstance(found, ServerInfo) else None
    if info is None and options.info_url:
        raise SpecError(
            f"{info_url}/info is not that of a Penstock server",
            field="info_url",
            remedy="Give the internal port of the server, or leave --info-url out",
        )
    task = options.task or (found.task if found else None)
    if task is None:
        raise SpecError(
            f"{url}/info does not name the task",
            field="task",
            remedy="Give --task, or --info-url for a Penstock server with --internal-port",
        )
    try:
        task_name = TaskName(task)
    except ValueError:
        raise SpecError(f"{task!r} is no task", field="task", remedy=f"Known: {', '.join(TaskName)}") from None
    described = info.artefact.model if info and info.artefact else None
    public = found if isinstance(found, PublicInfo) else None
    cpu = info.host.cpu if info and info.host else None
    if info is not None and task_name is not info.task:
        raise SpecError(
            f"{info_url}/info has the task {info.task.value}, and --task is {task_name.value}",
            field="task",
            remedy="Leave --task out, or give the URL of the other server",
        )
    folder = _tokenizer_folder(options)
    notes = [] if folder else ["lengths are counted as one token for each everyday English word and two special ones"]
    if public is not None:
        notes.append(
            f"{url}/info has neither the plan nor its verdict (the internal port of Penstock does: --info-url)"
        )
    elif info is None:
        notes.append(f"{url} has no /info of a Penstock server: the model, the plan and its verdict are not known")
    if public is not None and options.task is None:
        notes.append(
            f"the task is {task_name.value}, the usual one of the model's kind in /info; --task is for another"
        )
    if info is not None and info.keeps_answers:
        notes.append(
            "the server keeps answers (--answer-cache-bytes, serving.caches), and the same texts come again: what was "
            "measured is mostly its memory, not the model"
        )
    if cpu is None:
        notes.append("the server does not name its CPU: the one named is that of the client's machine")
    return Subject(
        name=url,
        model=described.source if described else public.model_id if public else "unknown",
        task=task_name,
        tokenizer=Tokenizer.load(folder).backend if folder else everyday_tokenizer(),
        max_tokens=_limit(described, public, folder),
        mask_token=_mask_token(task_name, folder) if folder else "[MASK]",
        folder=folder,
        url=url,
        info=info,
        cpu=cpu,
        notes=tuple(notes),
    )


def _limit(described: DescribedModel | None, public: PublicInfo | None, folder: ModelFolder | None) -> int:
    """The most tokens of a text."""
    if described is not None:
        return described.max_tokens
    if public is not None and public.max_input_length is not None:
        return public.max_input_length
    return folder.max_tokens if folder else NO_LIMIT


def _base(target: str) -> str:
    """The address without `/predict` or `/info`; a path before these is kept. SpecError for no plain URL."""
    try:
        parts = urlsplit(target)
        plain = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError:
        # A bracket that is not closed, or a port that is no number.
        plain = False
    if not plain or "@" in parts.netloc or parts.query or parts.fragment:
        raise SpecError(f"{target} cannot be measured", remedy="Give a plain URL such as http://127.0.0.1:8080")
    return f"http://{parts.netloc}{parts.path.rstrip('/').removesuffix('/predict').removesuffix('/info').rstrip('/')}"


def _tokenizer_folder(options: BenchOptions) -> ModelFolder | None:
    if options.tokenizer is None:
        return None
    return fetch_model(ModelSource.parse(f"file://{options.tokenizer.resolve()}"), cache=options.tokenizer)


def _mask_token(task: TaskName, folder: ModelFolder) -> str | None:
    """The mask token as the server will know it, where the task needs one. SpecError where there is none."""
    if task is not TaskName.FILL_MASK:
        return None
    found = Tokenizer.load(folder).mask_token
    if found is None:
        raise SpecError(
            f"{folder.tokenizer} has no mask token, which every request of fill-mask must contain",
            field="task",
            remedy="State it as mask_token in tokenizer_config.json, or choose another task",
        )
    return found


def everyday_tokenizer(first: Sequence[str] = ()) -> Backend:
    """Counts everyday words as one token and adds two special ones, as a BERT-like tokenizer does.

    `first`: further special tokens, before these.
    """
    entries = [*first, "[CLS]", "[SEP]", "[UNK]", *EVERYDAY_WORDS]
    tokenizer = Backend(WordLevel({word: index for index, word in enumerate(entries)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, entries.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(list(first))
    return tokenizer


QUERY_TOKENS = 10


def fewest_tokens(task: TaskName, tokenizer: Backend) -> int:
    """Tokens of the shortest input of the task, special ones and a mask included: a word, or a pair of them."""
    maker = TextMaker(tokenizer)
    match task:
        case TaskName.TEXT_RANKING | TaskName.QUESTION_ANSWERING:
            return maker.count(maker.one_token_words[0], maker.one_token_words[0])
        case TaskName.FILL_MASK:
            return maker.specials + 2
        case _:
            return maker.specials + 1


def batch_bodies(
    task: TaskName,
    tokenizer: Backend,
    tokens: int,
    batch: int,
    *,
    count: int,
    mask_token: str | None = None,
    seed: int = 0,
) -> tuple[RequestBody, ...]:
    """`count` different requests of `batch` texts. For pairs, `tokens` is the length of the pair.

    The batch is the number of sentences for one source (sentence-similarity), or of texts for one query (text-ranking).
    """
    if task in {TaskName.TEXT_RANKING, TaskName.SENTENCE_SIMILARITY}:
        maker = TextMaker(tokenizer, seed=seed)
        payloads = [_one_to_many(task, maker, tokens, batch) for _ in range(count)]
    else:
        singles = predict_bodies(task, tokenizer, [tokens] * (count * batch), mask_token=mask_token, seed=seed)
        parsed = [json.loads(single.body) for single in singles]
        payloads = [_merge(parsed[start : start + batch]) for start in range(0, len(parsed), batch)]
    return tuple(
        RequestBody(body=json.dumps(payload, ensure_ascii=False, separators=(",", ":")), group=tokens)
        for payload in payloads
    )


def _merge(payloads: list[dict[str, Any]]) -> dict[str, Any]:
    """One request of several; one alone stays as it is."""
    if len(payloads) == 1:
        return payloads[0]
    return {**payloads[0], "inputs": [payload["inputs"] for payload in payloads]}


def _one_to_many(task: TaskName, maker: TextMaker, tokens: int, batch: int) -> dict[str, Any]:
    if task is TaskName.SENTENCE_SIMILARITY:
        sentences = [maker.text(tokens) for _ in range(batch)]
        return {"inputs": {"source_sentence": maker.text(tokens), "sentences": sentences}}
    query = maker.text(min(QUERY_TOKENS, max(tokens // 2, 1)))
    return {"inputs": {"query": query, "texts": [maker.pair(query, tokens) for _ in range(batch)]}}
