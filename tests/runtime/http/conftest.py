"""One server per task for the whole run of tests: each answers in well under a millisecond."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from penstock.tasks import TaskName
from tests.runtime.generation.small_model import serving_generation, small_engine, small_generation_model
from tests.runtime.http.serving import Endpoint, make_model, serving


@pytest.fixture(scope="session")
def endpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[TaskName], Endpoint]]:
    """A running endpoint of a task."""
    running: dict[TaskName, Endpoint] = {}
    with ExitStack() as stack:

        def of(task: TaskName) -> Endpoint:
            if task not in running and task is TaskName.TEXT_GENERATION:
                path = tmp_path_factory.mktemp(task.value)
                generation = small_generation_model(path, small_engine(context=128, blocks=16))
                running[task] = stack.enter_context(serving_generation(generation, name="emotion"))
            elif task not in running:
                model = make_model(tmp_path_factory.mktemp(task.value), task)
                running[task] = stack.enter_context(serving(model, task))
            return running[task]

        yield of
