"""Runs an optimisation job in a pod: `python -m penstock_optimizer.pod`.

All settings are environment variables (docs/settings.md), and no API token is needed: progress goes to standard output
as JSON lines, artefacts into the store, the result into the termination message.
"""
