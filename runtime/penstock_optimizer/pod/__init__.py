"""`python -m penstock_optimizer.pod`: the process of an optimisation job's pod.

Told everything by its environment (docs/settings.md), needs no API token: progress goes to standard output as JSON
lines, the artefacts into the store, the result into the termination message.
"""
