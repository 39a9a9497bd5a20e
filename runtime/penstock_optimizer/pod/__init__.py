"""`python -m penstock_optimizer.pod`: the process of an optimisation job's pod.

Configured by its environment alone (docs/reference/settings.md). It needs no API token: progress goes to standard
output as JSON lines, the artefacts into the store, the result into the termination message.
"""
