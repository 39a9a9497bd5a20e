"""From requests' rows to runs of the engine and back: a queue, a policy, and a thread for each stream.

Knows nothing of HTTP, and of tasks only that they boil a row's outputs down.
"""
