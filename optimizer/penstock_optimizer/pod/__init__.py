"""Runs an optimisation job in a pod: `python -m penstock_optimizer.pod`.

Configured by environment variables (docs/reference/settings.md). It needs no API token: progress goes to standard
output as JSON lines, the artefacts into the store, the result into the termination message.
"""
