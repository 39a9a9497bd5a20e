"""Answers of the question-answering pipeline of transformers 4, which version 5 no longer has.

    python -m tests.golden.pipeline       writes them again, with transformers 4

`question_answering.json`: kind of model -> context -> options -> answer.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

from penstock.tasks import TaskName
from tests.golden import snapshots
from tests.golden.cases import LONG, ODD, PERSON
from tests.golden.models import KINDS, Kind, write_model

PATH = Path(__file__).parent / "question_answering.json"
TASK = TaskName.QUESTION_ANSWERING
QUESTION = "Who lives in Berkeley?"
CONTEXTS = {"one window": PERSON, "several windows": LONG, "odd characters": ODD}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 3},
    {"top_k": 4, "align_to_words": False, "max_seq_len": 24, "doc_stride": 3},
    {"handle_impossible_answer": True, "top_k": 2},
    {"max_answer_len": 2},
    {"doc_stride": 0},
)


def cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Inputs and parameters of the task by context and options."""
    return {
        f"{name}, {json.dumps(options)}": ({"question": QUESTION, "context": context}, options)
        for name, context in CONTEXTS.items()
        for options in OPTIONS
    }


def compute(kind: Kind, folder: Path) -> dict[str, Any]:
    """Our answers."""
    return snapshots.answers(write_model(folder / "model", TASK, kind), TASK, cases(), folder / "graph")


def judged(kind: Kind, folder: Path) -> dict[str, Any]:
    """The pipeline's. Impossible answers, whose score is exactly 0, are left out: it adds them to give `top_k`."""
    import transformers

    path = write_model(folder / "model", TASK, kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(path).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = transformers.pipeline(TASK.value, model=model, tokenizer=tokenizer, device="cpu")
        found = {}
        for name, (inputs, options) in cases().items():
            answer = pipeline(**inputs, **options)
            answers = answer if isinstance(answer, list) else [answer]
            possible = [one for one in answers if one["score"] > 0] or answers
            found[name] = snapshots.plain(possible[0] if len(possible) == 1 else possible)
    return found


def main() -> None:
    """Write all of them again."""
    with tempfile.TemporaryDirectory() as scratch:
        found = {kind.name: judged(kind, Path(scratch) / kind.name) for kind in KINDS}
    PATH.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
