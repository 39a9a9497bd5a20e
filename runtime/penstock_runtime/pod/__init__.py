"""`python -m penstock_runtime.pod`: the process of a serving pod.

Configured by environment variables (docs/settings.md): listens at once, fetches its artefact by digest, checks it and
the machine, warms up, becomes ready. Needs neither the optimiser nor its libraries.
"""
