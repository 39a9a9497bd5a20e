"""The inference tasks: request validation, tokenisation, post-processing and answers.

`make_task` returns the task of a model folder; `penstock_runtime.tasks.base` has the interface. Each task has a module;
shared parts are in fields (validation and schemas), texts (prompts and truncation), scores, embeddings/embedding,
extraction/entities and extraction/spans.
"""

from penstock_runtime.tasks.base import DEFAULT_LIMITS, Prepared, RequestLimits, Task
from penstock_runtime.tasks.factory import make_task, request_schema, response_schema

__all__ = ["DEFAULT_LIMITS", "Prepared", "RequestLimits", "Task", "make_task", "request_schema", "response_schema"]
