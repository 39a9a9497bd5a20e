"""The tasks: what a request means, and what an answer looks like.

`make_task` gives the task of a model folder; `penstock_runtime.tasks.base` says what a task is. Each module holds one
task; what they share stands in fields (checks and schemas), fitting (truncation), scores, pooling, entities, spans.
"""

from penstock_runtime.tasks.base import DEFAULT_LIMITS, Prepared, RequestLimits, Task
from penstock_runtime.tasks.factory import make_task, request_schema, response_schema

__all__ = ["DEFAULT_LIMITS", "Prepared", "RequestLimits", "Task", "make_task", "request_schema", "response_schema"]
