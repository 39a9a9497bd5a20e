"""What is measured, as far as it is known before it runs: task, limits, tokenizer. From an endpoint file or a URL."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from penstock.errors import SpecError
from penstock.hardware import CpuIdentity
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.source import ModelSource
from penstock.settings import hugging_face_token
from penstock.tasks import TaskName
from penstock_bench.servers.info import read_info
from penstock_bench.options import BenchOptions
from penstock_optimizer.load.workload import EVERYDAY_WORDS
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.fetching import OnProgress as OnTransfer
from penstock_runtime.models.fetching import ignore_progress
from penstock_runtime.models.sources import fetch_model
from penstock_runtime.tokens import Tokenizer

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
    cpu: CpuIdentity | None = None
    """Of the server given by URL, where it tells."""
    notes: tuple[str, ...] = ()


def read_subject(options: BenchOptions, *, models: Path, on_transfer: OnTransfer = ignore_progress) -> Subject:
    """Read the file, or ask the server. SpecError, or what the model's source raises; `on_transfer` as it has it."""
    if not options.target.strip():
        raise SpecError("nothing is named that is to be measured", remedy="Give a ModelEndpoint file or a URL")
    if "://" in options.target:
        return _of_url(options)
    if not Path(options.target).exists() and ADDRESS.match(options.target):
        raise SpecError(
            f"{options.target} is neither a file nor a URL, which begins with http://",
            remedy=f"Give http://{options.target} for the server that answers there",
        )
    endpoint = ModelEndpoint.from_file(Path(options.target))
    folder = fetch_model(endpoint.spec.source, cache=models, token=hugging_face_token(os.environ), on_progress=on_transfer)
    limit = endpoint.spec.serving.max_input_tokens
    return Subject(
        name=endpoint.metadata.name,
        model=endpoint.spec.model,
        task=endpoint.spec.task,
        tokenizer=Backend.from_file(str(folder.tokenizer)),
        max_tokens=folder.max_tokens if limit is None else min(limit, folder.max_tokens),
        mask_token=_mask_token(endpoint.spec.task, folder),
        endpoint=endpoint,
        folder=folder,
    )


def _of_url(options: BenchOptions) -> Subject:
    url = _base(options.target)
    info = read_info(url, token=options.auth_token)
    task = options.task or (info.task if info else None)
    if task is None:
        raise SpecError(f"{url}/info does not tell the task", field="task", remedy="Give --task")
    try:
        task_name = TaskName(task)
    except ValueError:
        raise SpecError(f"{task!r} is no task", field="task", remedy=f"Known: {', '.join(TaskName)}") from None
    described = info.artefact.model if info and info.artefact else None
    cpu = info.host.cpu if info and info.host else None
    if info is not None and task_name is not info.task:
        raise SpecError(
            f"{url}/info has the task {info.task.value}, and --task is {task_name.value}",
            field="task",
            remedy="Leave --task out, or give the URL of the other server",
        )
    folder = _tokenizer_folder(options)
    notes = [] if folder else ["lengths are counted as one token for each everyday English word and two special ones"]
    if cpu is None:
        notes.append("the server does not tell its CPU: the one named is that of the client's machine")
    return Subject(
        name=url,
        model=described.source if described else "unknown",
        task=task_name,
        tokenizer=Backend.from_file(str(folder.tokenizer)) if folder else everyday_tokenizer(),
        max_tokens=described.max_tokens if described else folder.max_tokens if folder else NO_LIMIT,
        mask_token=_mask_token(task_name, folder) if folder else "[MASK]",
        folder=folder,
        url=url,
        cpu=cpu,
        notes=tuple(notes),
    )


def _base(target: str) -> str:
    """What `/predict` and `/info` are asked below: the path before them is kept. SpecError for what is no plain URL."""
    try:
        parts = urlsplit(target)
        plain = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError:
        # A bracket that is not closed, or a port that is no number.
        plain = False
    if not plain or "@" in parts.netloc or parts.query or parts.fragment:
        raise SpecError(f"{target} cannot be measured", remedy="Give a plain URL such as http://127.0.0.1:8080")
    return f"http://{parts.netloc}{parts.path.rstrip('/').removesuffix('/predict').rstrip('/')}"


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


def everyday_tokenizer() -> Backend:
    """Counts everyday words as one token and adds two special ones: what a BERT-like tokenizer does with them."""
    entries = ["[CLS]", "[SEP]", "[UNK]", *EVERYDAY_WORDS]
    tokenizer = Backend(WordLevel({word: index for index, word in enumerate(entries)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return tokenizer
