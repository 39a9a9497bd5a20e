"""Tasks for tests that make models of transformers' classes."""

from __future__ import annotations

from penstock.tasks import ENCODER_TASKS, TaskName

COMMON_TASKS = tuple(task for task in ENCODER_TASKS if task is not TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION)
"""The tasks that a class of transformers has a head for; zero-shot-token-classification needs a GLiNER model."""
