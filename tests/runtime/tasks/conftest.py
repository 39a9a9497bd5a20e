from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.tasks import TaskName
from tests.runtime.tasks.families import Built, Family, build_for

Build = Callable[..., Built]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`built(task, family, **config)`: a model that the task fits, each made once."""
    made: dict[Any, Built] = {}

    def of(name: TaskName, family: Family, **options: Any) -> Built:
        key = (name, family.name, *sorted(options.items()))
        if key not in made:
            made[key] = build_for(name, family, tmp_path_factory.mktemp(f"{family.name}-{name.value}"), **options)
        return made[key]

    return of
