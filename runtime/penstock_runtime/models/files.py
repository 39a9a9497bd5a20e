"""Files of a model folder: reading JSON safely, and refusing pickles, code and links out of the folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.errors import CorruptModel, UnsafeModel, UnsupportedModel

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The first bytes of a file of a repository that was cloned without git-lfs: 130 bytes instead of the content."""


def is_inner(name: str) -> bool:
    """Whether a path that a model's file names is below the model's folder, without hidden folders and files.

    Hidden ones are what clones and volumes add (.git, .cache, ..data): their links are not checked.
    """
    pure = PurePosixPath(name)
    return not pure.is_absolute() and not any(part.startswith(".") for part in pure.parts)


def open_within(folder: Path, path: Path) -> BufferedReader:
    """Open a file of a model folder to read it. UnsafeModel unless the file that was opened is below the folder.

    The open file is checked, not its name: a link may be replaced between a check and the opening. OSError if it cannot
    be opened.
    """
    # A named pipe would block the opening.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    where = Path(f"/proc/self/fd/{file.fileno()}").readlink()
    if not any(where.is_relative_to(place) for place in _places(folder)):
        problem = f"is a link to {where}, outside the model's folder"
    elif not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        problem = "is not a regular file"
    else:
        return file
    file.close()
    raise UnsafeModel(f"{path} {problem}", remedy="Copy the file into the folder instead")


def copy_within(folder: Path, path: Path, target: Path) -> None:
    """Copy the contents of a file of a model folder, opened as by `open_within`, to `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_within(folder, path) as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy, 2**20)


def _places(folder: Path) -> tuple[Path, ...]:
    """The real folders that files of a model folder may be in: itself, and the `blobs` of the hub's cache."""
    root = Path(os.path.realpath(folder))
    return (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)


def check_pointer(path: Path, start: bytes) -> None:
    """CorruptModel if a file is empty, or a git-lfs pointer instead of the content. `start`: its first bytes."""
    if start.startswith(LFS_POINTER):
        raise CorruptModel(
            f"{path} is a git-lfs pointer, not the file itself", remedy="Run git lfs pull in the clone, then try again"
        )
    if not start:
        raise CorruptModel(f"{path} is empty", remedy="Fetch the model again")


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in `folder/name`; CorruptModel if it is anything else."""
    path = folder / name
    value = _read_json(folder, path)
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} holds a JSON {type(value).__name__}, not an object", remedy="Fetch the model again")
    return value


def read_optional(folder: Path, name: str) -> dict[str, Any]:
    """As `read_object`; empty if there is no such file."""
    return read_object(folder, name) if (folder / name).is_file() else {}


def read_list(folder: Path, name: str) -> list[dict[str, Any]]:
    """The JSON list of objects in `folder/name`, empty if there is no such file; CorruptModel for anything else."""
    path = folder / name
    if not path.is_file():
        return []
    value = _read_json(folder, path)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise CorruptModel(f"{path} is not a list of objects", remedy="Fetch the model again")
    return value


def _read_json(folder: Path, path: Path) -> Any:
    with open_within(folder, path) as file:
        content = file.read()
    check_pointer(path, content)
    try:
        # UTF-8 only: what json would guess to be another encoding can be an archive with code.
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path} is not JSON in UTF-8: {error}", remedy="Fetch the model again") from error


def read_text(folder: Path, path: Path) -> str:
    """The text of a file; CorruptModel if it is not text in UTF-8, but an archive, for example."""
    with open_within(folder, path) as file:
        content = file.read()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise CorruptModel(f"{path} is not text in UTF-8", remedy="Fetch the model again, or remove the file")
    return text


def positive_number(path: Path, values: dict[str, Any], key: str) -> int | None:
    """The number at `key`, as an integer from 1; None if absent, null or infinite; CorruptModel for anything else."""
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        raise CorruptModel(f"{path}: {key} is {value!r}", remedy="Make it a number from 1, or remove it")
    return int(value) if value != float("inf") else None


_GRAPH = re.compile(r"(onnx/)?[^/.][^/]*\.onnx")
SHOWN = 8
"""Names of files in an error."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
"""Suffixes of weight files that torch or joblib unpickle: loading them can run any code."""
OTHER_WEIGHTS = (".h5", ".msgpack", ".ot", ".tflite", ".keras", ".gguf")
"""Suffixes of weight files of other frameworks. Some can run code (Keras); none is read here."""


GRAPHS = ("model.onnx", "onnx/model.onnx")


def graph_names(names: Iterable[str]) -> list[str]:
    """The ONNX files of a model by relative name: the one with a known name alone, else all at the top and in onnx/."""
    names = set(names)
    known = [name for name in GRAPHS if name in names]
    return known[:1] or sorted(name for name in names if _GRAPH.fullmatch(name))


def own_graph(names: Iterable[str]) -> str | None:
    """The ONNX file that is served, if it has a known name or is the only one; None otherwise."""
    found = graph_names(names)
    return found[0] if len(found) == 1 else None


def unread_weights(names: Iterable[str]) -> list[str]:
    """The file names of weights that are not read here; only the unsafe ones if there are any."""
    names = sorted(name for name in names if "/" not in name)
    unsafe = [name for name in names if name.endswith(PICKLED) and not name.startswith("training_args")]
    return unsafe or [name for name in names if name.endswith(OTHER_WEIGHTS)]


def missing_weights(origin: Path | str, names: Iterable[str]) -> CorruptModel | UnsafeModel | UnsupportedModel:
    """The error for a folder without safetensors or ONNX; the names of its files decide which."""
    names = set(names)
    if "adapter_config.json" in names:
        return UnsupportedModel(
            f"{origin} is an adapter (adapter_config.json), not a whole model",
            remedy="Merge it into its base model with peft's merge_and_unload() and save the result",
        )
    graphs = graph_names(names)
    if len(graphs) > 1:
        return UnsupportedModel(
            f"{origin} holds several ONNX files and no safetensors: {', '.join(graphs[:SHOWN])}"
            + (f" and {len(graphs) - SHOWN} more" if len(graphs) > SHOWN else ""),
            remedy="Rename the one to serve to model.onnx (a file with its weights keeps its name)",
        )
    unread = unread_weights(names)
    if not unread:
        return CorruptModel(
            f"{origin} holds no weights: neither model.safetensors (or its index) nor an ONNX file",
            remedy="Fetch the model again, or save it with save_pretrained(..., safe_serialization=True)",
        )
    ggufs = [name for name in unread if name.endswith(".gguf")]
    if ggufs and not unread[0].endswith(PICKLED):
        return UnsupportedModel(
            f"{origin} holds {ggufs[0]} and no safetensors",
            remedy=f"For text-generation name the file itself: end spec.model with /{ggufs[0]}",
        )
    if unread[0].endswith(PICKLED):
        why = "which is a pickle and can run code when loaded"
    else:
        why = "which is not read here, because such files can carry code"
    return UnsafeModel(
        f"{origin} holds {unread[0]}, {why}",
        remedy="Convert it to safetensors (docs/how-to/convert-a-model.md#safetensors) and try again",
    )


WITHOUT_ITS_CODE: Mapping[str, str] = {
    "bert": r"(jinaai/jina-bert-implementation--)?modeling_bert\.JinaBert\w+",
    "eurobert": r".*modeling_eurobert\.EuroBert\w+",
    "gte": ".*",
    "new": ".*",
    "nomic_bert": ".*",
    "phi3": r"(microsoft/[\w.-]+--)?modeling_phi3\.Phi3\w+",
    "xlm-roberta": r"(jinaai/[\w.-]+--)?(modeling_xlm_roberta|modeling_lora)\.XLMRoberta\w+",
    "qwen2": r"(Alibaba-NLP/gte-Qwen2-.*--)?modeling_qwen\.Qwen2\w+",
}
"""Models whose graph the exporter builds from the weights, although they name code of their authors: `model_type` to a
pattern of the names of classes in `auto_map`. That code is not fetched, read or run."""


def remote_code_classes(config: Mapping[str, Any]) -> list[str]:
    """The classes that `auto_map` of config.json takes from the model's own Python files; empty for most models, and
    for `WITHOUT_ITS_CODE`."""
    table = config.get("auto_map")
    if not table:
        return []
    values = table.values() if isinstance(table, dict) else [table]
    names = sorted({str(name) for value in values for name in (value if isinstance(value, list) else [value]) if name})
    pattern = WITHOUT_ITS_CODE.get(str(config.get("model_type")))
    # Configurations are read here, never made by their classes.
    known = pattern is not None and all(re.fullmatch(pattern, name) for name in names if not _is_configuration(name))
    return [] if known else names


def _is_configuration(name: str) -> bool:
    return name.endswith("Config")


def check_code(origin: Path | str, config: Mapping[str, Any], *, has_graph: bool) -> None:
    """UnsafeModel if the model needs its own Python code.

    A model with an ONNX graph does not need the code: only the graph is used then.
    """
    wanted = remote_code_classes(config)
    if wanted and not has_graph:
        raise UnsafeModel(
            f"{origin}/config.json wants code of the model's own (auto_map: {wanted[0]})",
            remedy="Code that comes with a model is never run here: export it to ONNX where you trust it and put "
            "model.onnx into the folder (docs/how-to/convert-a-model.md#remote-code)",
        )


def check_links(folder: Path) -> None:
    """UnsafeModel for symbolic links that lead out of the folder, except to the `blobs` folder of the hub's cache."""
    root, allowed = Path(os.path.realpath(folder)), _places(folder)
    for parent, folders, files in os.walk(root):
        links = [path for name in (*folders, *files) if (path := Path(parent, name)).is_symlink()]
        folders[:] = [name for name in folders if not name.startswith(".")]  # .git, .cache: never read (`is_inner`)
        for path in links:
            # realpath rather than Path.resolve, which fails on loops.
            target = Path(os.path.realpath(path))
            if not any(target.is_relative_to(place) for place in allowed):
                raise UnsafeModel(
                    f"{folder / path.relative_to(root)} is a link to {target}, outside the model's folder",
                    remedy="Copy the file into the folder instead",
                )


def write_once(target: Path, write: Callable[[Path], None]) -> Path:
    """`target`, a folder that `write` fills, written as a whole or not at all. Of several processes that write it at a
    time, the first one's folder stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        # mkdtemp makes a folder for its owner only.
        draft.chmod(0o755)
        write(draft)
        try:
            draft.replace(target)
        except OSError:
            # Another process was faster.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target
