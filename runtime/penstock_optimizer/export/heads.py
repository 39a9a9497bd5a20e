"""Whether a model has the head that a task needs, by the name of its class: before any weight is looked at."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import UnsupportedModel
from penstock.tasks import HEAD_OF_TASK, Head
from penstock_runtime.models.folder import ModelFolder

CLASS_ENDINGS: Mapping[Head, tuple[str, ...]] = {
    Head.SEQUENCE: ("ForSequenceClassification",),
    Head.TOKEN: ("ForTokenClassification",),
    Head.SPAN: ("ForQuestionAnswering",),
    Head.MASKED_LM: ("ForMaskedLM", "ForPreTraining", "WithLMHead"),
}
"""How transformers' classes with a head are called; `architectures` of config.json names one of them."""


def check_head(folder: ModelFolder, head: Head) -> None:
    """UnsupportedModel when the class is known to have another head, or none. Every model is an encoder.

    transformers would load such a model all the same, with a head of random numbers.
    """
    name = folder.architecture
    if head is Head.ENCODER or name.endswith(CLASS_ENDINGS[head]):
        return
    others = [other for other, endings in CLASS_ENDINGS.items() if name.endswith(endings)]
    if others or name.endswith("Model"):
        raise no_head(folder, head, others[0] if others else Head.ENCODER)


def no_head(folder: ModelFolder, head: Head, own: Head | None = None) -> UnsupportedModel:
    """The error for a missing head, with the tasks that the model fits."""
    tasks = ", ".join(task.value for task, needed in HEAD_OF_TASK.items() if needed is own)
    fits = f"; this one fits {tasks}" if tasks else ""
    return UnsupportedModel(
        f"{folder.path} is a {folder.architecture or 'model'} without a {head.value} head",
        remedy=f"Use a model that was trained with one{fits}",
    )
